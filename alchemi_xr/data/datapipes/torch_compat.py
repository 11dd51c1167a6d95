"""Datasets and loaders inside ``torch.utils.data.DataLoader``, whose processes run transforms.

Torch's loader brings worker processes, their shared memory and their end; what
is given here keeps a batch one read, and the order the one of our loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from alchemi_xr.data.batch import Batch
from alchemi_xr.data.datapipes.dataloader import DataLoader
from alchemi_xr.data.datapipes.prefetch import FetchedSamples
from alchemi_xr.data.pyg import to_edge_index_dict, to_pyg
from alchemi_xr.errors import ArgumentTypeError

__all__ = ["BatchStream", "as_batch", "as_edge_index_dict", "as_pyg"]


def as_batch(samples: Any) -> Batch:
    """``collate_fn`` of a map-style dataset: the Batch.

    Parameters
    ----------
    samples : Batch or sequence
        What ``__getitems__`` gives, or a list of ``AtomicData`` or of pairs of it
        and metadata.

    Raises
    ------
    ArgumentTypeError
        Something else.
    """
    if isinstance(samples, FetchedSamples):
        return samples.batch
    if isinstance(samples, Batch):
        return samples
    if not isinstance(samples, Sequence) or isinstance(samples, str):
        raise ArgumentTypeError(
            "collate_fn",
            "puts samples together",
            found=type(samples).__name__,
            expected="a Batch or a list of samples",
        )
    return Batch.from_data_list([s[0] if isinstance(s, tuple) else s for s in samples])


def as_edge_index_dict(samples: Any) -> dict[str, Any]:
    """``collate_fn`` that gives tensors by name, with ``edge_index`` [2, E]."""
    return to_edge_index_dict(as_batch(samples))


def as_pyg(samples: Any) -> Any:
    """``collate_fn`` that gives a ``torch_geometric.data.Batch``."""
    return to_pyg(as_batch(samples))


class BatchStream(IterableDataset[Batch]):
    """The batches of our ``DataLoader`` for torch's, in the same order with any ``num_workers``.

    Parameters
    ----------
    loader : DataLoader
        Worker ``w`` of ``n`` reads and transforms each ``n``-th of its batches.

    Raises
    ------
    ArgumentTypeError
        Not a DataLoader of ours.

    Notes
    -----
    Torch's loader takes ``batch_size=None``. The epoch is the one of ``set_epoch``
    and begins at the first batch, or where ``load_state_dict`` of ``loader`` left
    it; without ``set_epoch`` each iteration gives the same epoch, as worker
    processes that end with it cannot count. Workers cannot hold CUDA tensors: the
    dataset's device is the CPU.
    """

    def __init__(self, loader: DataLoader) -> None:
        if not isinstance(loader, DataLoader):
            raise ArgumentTypeError(
                "BatchStream",
                "takes a loader of alchemi_xr",
                found=type(loader).__name__,
                expected="alchemi_xr.data.datapipes.DataLoader",
            )
        self.loader = loader
        # How often an epoch was set, and which: processes that go on living look here.
        self._set = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._seen = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.loader.set_epoch(epoch)
        self._set[1] = epoch
        self._set[0] += 1
        self._seen = int(self._set[0])

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        if int(self._set[0]) != self._seen:
            self._seen = int(self._set[0])
            self.loader.set_epoch(int(self._set[1]))
        about = get_worker_info()
        worker, workers = (0, 1) if about is None else (about.id, about.num_workers)
        return self.loader.iterate_part(worker, workers)

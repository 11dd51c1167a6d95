"""Several datasets behind one index: first all of the first, then the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alchemi_xr._typing import IntArray
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.datapipes.prefetch import (
    BLOCK_SAMPLES,
    Loaded,
    PrefetchingDataset,
    batch_tensors,
    sample_sizes,
)
from alchemi_xr.data.datapipes.streams import Staged, on_stream, record_event
from alchemi_xr.data.fields import field_order, resolve
from alchemi_xr.errors import ArgumentTypeError, ConfigError, FieldError, IndexRangeError

__all__ = ["DATASET_INDEX", "MultiDataset"]

#: Key of a sample's metadata that says which dataset it is from.
DATASET_INDEX = "dataset_index"


class MultiDataset(PrefetchingDataset):
    """Datasets one after the other.

    Parameters
    ----------
    *datasets : Dataset
        Their order defines the index. Closed with this one.
    output_strict : bool
        Demand equal field sets of all that are not empty. Otherwise a batch
        has the union of the fields of the datasets it draws from, with fill
        and presence where one lacks a field.
    num_workers : int
        Threads that read ahead.

    Raises
    ------
    ConfigError
        No dataset.
    ArgumentTypeError
        One of them is no dataset.
    FieldError
        Strict, and the field sets differ.
    """

    def __init__(
        self, *datasets: PrefetchingDataset, output_strict: bool = True, num_workers: int = 2
    ) -> None:
        super().__init__(num_workers=num_workers)
        if not datasets:
            raise ConfigError("MultiDataset", "needs at least one dataset", found=0)
        for number, dataset in enumerate(datasets):
            if not isinstance(dataset, PrefetchingDataset):
                raise ArgumentTypeError(
                    "MultiDataset",
                    f"datasets[{number}] is no Dataset",
                    found=type(dataset).__name__,
                )
        self._datasets = tuple(datasets)
        self.output_strict = output_strict
        self._offsets: IntArray = counts_to_ptr(np.array([len(d) for d in datasets]))
        self._field_names = self._union(check=output_strict)

    @property
    def datasets(self) -> tuple[PrefetchingDataset, ...]:
        """The datasets, in the order of the index."""
        return self._datasets

    @property
    def offsets(self) -> tuple[int, ...]:
        """First global index of each dataset, and the total at the end."""
        return tuple(self._offsets.tolist())

    @property
    def field_names(self) -> list[str]:
        return list(self._field_names)

    @property
    def pin_memory(self) -> bool:
        """Whether every dataset gives page-locked memory."""
        return all(getattr(dataset, "pin_memory", False) for dataset in self._datasets)

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        for dataset in self._datasets:
            if hasattr(dataset, "pin_memory"):
                dataset.pin_memory = value

    @property
    def device(self) -> torch.device:
        """Where batches are given: the first dataset's device."""
        device: torch.device = getattr(self._datasets[0], "device", torch.device("cpu"))
        return device

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def to_global_index(self, dataset_index: int, local_index: int) -> int:
        """Index here of a dataset's sample; both may be negative.

        Raises
        ------
        IndexRangeError
        """
        count = len(self._datasets)
        if not -count <= dataset_index < count:
            raise IndexRangeError(
                "MultiDataset", f"dataset_index {dataset_index} is out of range", expected=count
            )
        dataset_index %= count
        length = int(self._offsets[dataset_index + 1] - self._offsets[dataset_index])
        if not -length <= local_index < length:
            raise IndexRangeError(
                "MultiDataset",
                f"local_index {local_index} is out of range for dataset {dataset_index}",
                expected=f"{length} samples",
            )
        return int(self._offsets[dataset_index]) + local_index % length

    def to_local_index(self, index: int) -> tuple[int, int]:
        """Number of the dataset, and the index in it, of a global index.

        Raises
        ------
        IndexRangeError
        """
        position = self._positions([index])[0]
        dataset = int(np.searchsorted(self._offsets, position, side="right")) - 1
        return dataset, position - int(self._offsets[dataset])

    def get_metadata(self, index: int) -> tuple[int, int]:
        dataset, local = self.to_local_index(index)
        return self._datasets[dataset].get_metadata(local)

    def sample_sizes(self) -> tuple[IntArray, IntArray]:
        """Numbers of atoms and edges of all samples, int64 [N] each."""
        pairs = [sample_sizes(dataset) for dataset in self._datasets]
        return np.concatenate([a for a, _ in pairs]), np.concatenate([e for _, e in pairs])

    def block_starts(self) -> IntArray:
        """First sample of each block of all datasets, ascending from 0."""
        starts = []
        for offset, dataset in zip(self._offsets.tolist(), self._datasets, strict=False):
            find = getattr(dataset, "block_starts", None)
            own = np.arange(0, len(dataset), BLOCK_SAMPLES) if find is None else find()
            starts.append(own + offset)
        return np.unique(np.concatenate(starts)).astype(np.int64)

    def refresh(self) -> None:
        """Move every dataset to the newest state of its storage."""
        self.cancel_prefetch()
        for dataset in self._datasets:
            refresh = getattr(dataset, "refresh", None)
            if refresh is not None:
                refresh()
        self._offsets = counts_to_ptr(np.array([len(d) for d in self._datasets]))
        self._field_names = self._union(check=self.output_strict)

    def version(self) -> Any:
        return tuple(dataset.version() for dataset in self._datasets)

    def settle_in_worker(self) -> None:
        super().settle_in_worker()
        for dataset in self._datasets:
            dataset.settle_in_worker()

    def close(self) -> None:
        """End the threads, close every dataset; safe to call twice."""
        super().close()
        for dataset in self._datasets:
            dataset.close()

    # -- the path --------------------------------------------------------------

    def _union(self, *, check: bool) -> list[str]:
        sets = [
            {resolve(name) for name in dataset.field_names} if len(dataset) else None
            for dataset in self._datasets
        ]
        filled = [(number, names) for number, names in enumerate(sets) if names is not None]
        if check and filled:
            first, reference = filled[0]
            for number, names in filled[1:]:
                if names != reference:
                    raise FieldError(
                        "MultiDataset",
                        f"output_strict=True, but datasets {first} and {number} have other fields",
                        found=f"only one of them has {sorted(names ^ reference)}",
                        expected="equal field sets",
                        mend="output_strict=False fills what is missing, or read both with fields=",
                    )
        return field_order(set().union(*(names for _, names in filled)))

    def _routes(self, positions: IntArray) -> list[tuple[int, IntArray, IntArray]]:
        """Dataset, local indices and places in the request, for each dataset drawn from."""
        owner = np.searchsorted(self._offsets, positions, side="right") - 1
        places = [(int(number), np.flatnonzero(owner == number)) for number in np.unique(owner)]
        return [(n, positions[place] - self._offsets[n], place) for n, place in places]

    def _load(self, positions: list[int], stream: Any) -> Staged[Loaded]:
        routes = self._routes(np.asarray(positions, dtype=np.int64))
        parts = [self._datasets[n]._load(local.tolist(), stream) for n, local, _ in routes]
        metadata: list[dict[str, Any]] = [{} for _ in positions]
        samples: list[Any] = [None] * len(positions)
        with on_stream(stream):
            loads = [part.wait() for part in parts]
            for (number, _, places), loaded in zip(routes, loads, strict=True):
                for place, about in zip(places.tolist(), loaded.metadata, strict=True):
                    metadata[place] = {**about, DATASET_INDEX: number}
            batches = [loaded.batch for loaded in loads if loaded.batch is not None]
            whole = _restore(batches, [places for _, _, places in routes])
            if any(loaded.samples is not None for loaded in loads):
                for (_, _, places), loaded in zip(routes, loads, strict=True):
                    for row, place in enumerate(places.tolist()):
                        samples[place] = loaded.sample(row)[0]
            event = record_event(stream)
        kept = samples if samples and samples[0] is not None else None
        return Staged(Loaded(whole, metadata, kept), event, Loaded.tensors)

    def _stage_batches(self, lists: Sequence[Sequence[int]], stream: Any) -> list[Staged[Batch]]:
        # One read a dataset for all lists: the parts of list k from dataset n stand in parts[k].
        parts: list[list[tuple[Staged[Batch], IntArray]]] = [[] for _ in lists]
        wanted: dict[int, list[tuple[int, IntArray, IntArray]]] = {}
        for k, positions in enumerate(lists):
            for n, local, places in self._routes(np.asarray(positions, dtype=np.int64)):
                wanted.setdefault(n, []).append((k, local, places))
        for n, requests in wanted.items():
            staged = self._datasets[n].stage_batches(
                [local.tolist() for _, local, _ in requests], stream
            )
            for (k, _, places), part in zip(requests, staged, strict=True):
                parts[k].append((part, places))
        ready: list[Staged[Batch]] = []
        for found in parts:
            if len(found) == 1:
                ready.append(found[0][0])
                continue
            with on_stream(stream):
                batches = [part.wait() for part, _ in found]
                whole = _restore(batches, [places for _, places in found])
                ready.append(Staged(whole, record_event(stream), batch_tensors))
        return ready


def _restore(batches: list[Batch], places: list[IntArray]) -> Batch:
    """Parts of a request joined, over the union of their fields, in the order asked for."""
    if len(batches) == 1:
        return batches[0]
    device = batches[0].device
    whole = batches[0].clone()
    for part in batches[1:]:
        whole.append(part if part.device == device else part.to(device))
    order = np.argsort(np.concatenate(places), kind="stable")
    return whole.index_select(torch.from_numpy(order).to(device))

"""Writes what torch holds into a store: tensors become blocks, and nothing else.

What is on disk, and when it is true, belongs to ``store``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from alchemi_xr.data.atomic_data import AtomicData
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import canonical_level
from alchemi_xr.data.level import to_numpy
from alchemi_xr.errors import ArgumentTypeError, FieldError
from alchemi_xr.store.writer import StoreWriter

__all__ = ["AtomicDataZarrWriter"]


class AtomicDataZarrWriter:
    """Writes ``AtomicData`` and ``Batch`` into a store; each call is one commit.

    Parameters
    ----------
    store : str, path, URL, dict, Zarr store or Icechunk Repository
    config : ZarrWriteConfig or mapping, optional
        Chunks and codecs of arrays that are made; existing ones keep theirs.
    storage_options : dict, optional
        For a URL: endpoint, credentials and the like.
    """

    def __init__(
        self, store: Any, config: Any = None, *, storage_options: dict[str, Any] | None = None
    ) -> None:
        self.store = store
        self.config = config
        self._writer = StoreWriter(store, config, storage_options=storage_options)

    def write(
        self, data: AtomicData | Sequence[AtomicData] | Batch | Block, *, overwrite: bool = False
    ) -> None:
        """Make a new store of the data.

        Raises
        ------
        StoreExistsError
            Something is at the path already, and not ``overwrite``.
        FieldError
            There is no sample in the data.
        """
        self._writer.write(_as_block(data), overwrite=overwrite)

    def append(self, data: AtomicData | Sequence[AtomicData] | Batch | Block) -> None:
        """Add samples at the end.

        A field that the store has and the data lacks is filled, and so is a
        new field for the samples already there; presence masks say which.

        Raises
        ------
        StoreNotFoundError
        FieldError
            A field has another level or row shape than in the store.
        """
        self._writer.append(_as_block(data))

    def add_custom(
        self, key: str, data: Any, level: str = "system", *, unit: str | None = None
    ) -> None:
        """Add an array for the samples already there, deleted ones included.

        Raises
        ------
        FieldError
            Its rows are not those of the level, or the name is taken.
        LevelError
        """
        values = to_numpy(data) if isinstance(data, Tensor) else np.asarray(data)
        self._writer.add_custom(key, values, canonical_level(level, where=key), unit=unit)

    def delete(self, indices: Any) -> None:
        """Mark samples as deleted, by their physical positions.

        Raises
        ------
        IndexRangeError
        """
        self._writer.delete(_plain(indices))

    def undelete(self, indices: Any) -> None:
        """Take samples back that were deleted and not yet defragmented away."""
        self._writer.undelete(_plain(indices))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[AtomicDataZarrWriter]:
        """Make all appends and deletions of a ``with`` block one commit, or none.

        Raises
        ------
        StoreNotFoundError, StoreLockedError, StoreError
        """
        with self._writer.transaction():
            yield self

    def defragment(self, config: Any = None, *, dest: Any = None) -> None:
        """Rebuild the store without its deleted samples, in one swap, or at ``dest``."""
        self._writer.defragment(config, dest=dest)


def _as_block(data: AtomicData | Sequence[AtomicData] | Batch | Block) -> Block:
    if isinstance(data, Block):
        return data
    if isinstance(data, AtomicData):
        data = [data]
    if not isinstance(data, Batch):
        items = list(data)
        for number, item in enumerate(items):
            if not isinstance(item, AtomicData):
                raise ArgumentTypeError(
                    "AtomicDataZarrWriter",
                    f"item {number} of the data to write is no AtomicData",
                    found=type(item).__name__,
                )
        if not items:
            raise FieldError(
                "AtomicDataZarrWriter", "Cannot create batch from empty data list", found=0
            )
        data = Batch.from_data_list(items)
    if data.num_graphs == 0:
        raise FieldError("AtomicDataZarrWriter", "the Batch has no systems to write", found=0)
    return data.to_block()


def _plain(indices: Any) -> Any:
    """Indices without torch: the store knows none of it."""
    return indices.detach().cpu().numpy() if isinstance(indices, Tensor) else indices

"""The Zarr store in torch's words: a thin writer and a thin reader.

What is on disk, and when it is true, belongs to ``store``; how rows are
gathered belongs to ``gather``. Here tensors become blocks and back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import IntArray, Level
from alchemi_xr.data.atomic_data import AtomicData
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index
from alchemi_xr.data.datapipes.backends.base import RawSample, Reader, Tensors
from alchemi_xr.data.datapipes.cache import PieceCache, default_bytes
from alchemi_xr.data.datapipes.gather import Gatherer
from alchemi_xr.data.datapipes.validate import cast_floats
from alchemi_xr.data.fields import canonical_level, resolve
from alchemi_xr.data.level import from_numpy, to_numpy
from alchemi_xr.errors import (
    ArgumentTypeError,
    CorruptStoreError,
    FieldError,
    IndexRangeError,
    StoreClosedError,
    UnknownFieldError,
    nearest,
)
from alchemi_xr.store.reader import Snapshot, open_store
from alchemi_xr.store.writer import StoreWriter

__all__ = ["AtomicDataZarrReader", "AtomicDataZarrWriter"]


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


class AtomicDataZarrReader(Reader):
    """Reads one committed generation of a store, without its deleted samples.

    Parameters
    ----------
    store : str, path, URL, dict, Zarr store, Icechunk Repository or Snapshot
    pin_memory : bool
        Give tensors in page-locked memory (no effect without CUDA).
    include_index_in_metadata : bool
    fields : sequence of str, optional
        Read only these.
    cache_bytes : int, optional
        Decoded chunks to keep, at most; 0 keeps none. By default a sixteenth of the
        memory that is free when the reader is made, and 32 MiB at least.
    storage_options : dict, optional
        For a URL: endpoint, credentials and the like.

    Raises
    ------
    StoreNotFoundError
    NotAStoreError
    UnknownFieldError
        One of ``fields`` is not in the store.
    """

    def __init__(
        self,
        store: Any,
        *,
        pin_memory: bool = False,
        include_index_in_metadata: bool = True,
        fields: Sequence[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(pin_memory=pin_memory, include_index_in_metadata=include_index_in_metadata)
        self.store = store
        self._snapshot: Snapshot | None = store if isinstance(store, Snapshot) else None
        if self._snapshot is None:
            self._snapshot = open_store(store, storage_options=storage_options)
        self._place = self._snapshot.place
        self._chosen = None if fields is None else self._known(fields)
        self._cache = PieceCache(default_bytes() if cache_bytes is None else cache_bytes)
        self._choices: dict[tuple[str, ...] | None, tuple[str, ...]] = {}
        self._gather = Gatherer(self._snapshot, self._cache)
        # Positions of the samples that are not deleted; of the generation held.
        self._active: IntArray = self._snapshot.active

    # -- what it holds ---------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The generation that is read.

        Raises
        ------
        StoreClosedError
        """
        return self._check_open()

    def _check_open(self) -> Snapshot:
        if self._snapshot is None:
            raise StoreClosedError("AtomicDataZarrReader", "Cannot read from a closed reader.")
        return self._snapshot

    @property
    def where(self) -> str:
        return self._snapshot.where if self._snapshot is not None else type(self).__name__

    def __len__(self) -> int:
        return len(self._active)

    @property
    def num_samples(self) -> int:
        """Samples in the store, deleted ones included."""
        return self.snapshot.num_samples

    @property
    def field_levels(self) -> Mapping[str, str]:
        snapshot = self.snapshot
        return {name: snapshot.level(name) for name in self._get_field_names()}

    def _get_field_names(self) -> list[str]:
        if self._chosen is not None:
            return list(self._chosen)
        self._check_open()
        return list(self._gather.names)

    def schema(self) -> dict[str, dict[str, Any]]:
        """Level, dtype, row shape, group and unit of every field."""
        snapshot = self.snapshot
        return {
            name: {
                "level": snapshot.level(name),
                "dtype": str(snapshot.dtype(name)),
                "shape": snapshot.tail(name),
                "group": snapshot.group(name),
                "unit": snapshot.unit(name),
            }
            for name in self._get_field_names()
        }

    def level_sizes(self) -> dict[str, int]:
        """Rows at each level, those of deleted samples included."""
        snapshot = self.snapshot
        return {
            "atom": snapshot.num_atoms,
            "edge": snapshot.num_edges,
            "system": snapshot.num_samples,
        }

    def field_array(self, name: str) -> Any:
        """The Zarr array of a field; rows past the committed ones are no data."""
        return self.snapshot.array(self._known([name])[0])

    def check_integrity(self) -> None:
        """Check the structure of the whole store.

        Raises
        ------
        CorruptStoreError
            Naming what is wrong.
        """
        from alchemi_xr.store.verify import verify

        report = verify(self._place)
        if not report.ok:
            raise CorruptStoreError(
                self.where, str(report), mend="`alchemi-xr repair`, or restore it from a copy"
            )

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Numbers of atoms and edges of a sample, from the pointers alone."""
        snapshot = self.snapshot
        at = int(self._physical([index])[0])
        atoms = snapshot.atoms_ptr[at + 1] - snapshot.atoms_ptr[at]
        edges = snapshot.edges_ptr[at + 1] - snapshot.edges_ptr[at]
        return int(atoms), int(edges)

    def sample_sizes(self) -> tuple[IntArray, IntArray]:
        """Numbers of atoms and edges of all samples, int64 [N] each, from the pointers alone."""
        snapshot, at = self.snapshot, self._active
        atoms, edges = snapshot.atoms_ptr, snapshot.edges_ptr
        return atoms[at + 1] - atoms[at], edges[at + 1] - edges[at]

    def block_starts(self) -> IntArray:
        """First sample of each storage object of the atoms, int64, ascending from 0."""
        snapshot = self.snapshot
        rows = np.arange(0, max(1, snapshot.num_atoms), snapshot.chunk_rows("atom"))
        # The sample that owns the first row of a chunk belongs to the block before it.
        physical = np.searchsorted(snapshot.atoms_ptr[:-1], rows)
        starts = np.unique(np.searchsorted(self._active, physical))
        return np.unique(np.concatenate([[0], starts[starts < len(self)]])).astype(np.int64)

    # -- reading ---------------------------------------------------------------

    def read_block(self, indices: Any, fields: Sequence[str] | None = None) -> Block:
        """Several samples as flat arrays, edges local to each.

        Raises
        ------
        IndexRangeError
        UnknownFieldError
        StaleSnapshotError
            The generation is no longer on disk; ``refresh()`` moves on.
        """
        self._check_open()
        return self._gather(self._physical(indices), self._names(fields))

    def read_batch(self, indices: Sequence[int], fields: Sequence[str] | None = None) -> Batch:
        return self.read_batches([indices], fields)[0]

    def read_batches(
        self,
        lists: Sequence[Sequence[int]],
        fields: Sequence[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> list[Batch]:
        """One Batch for each list of indices, out of one read.

        Parameters
        ----------
        lists : sequence of sequence of int
        fields : sequence of str, optional
            Only these; the others are not touched.
        dtype : torch.dtype, optional
            Fields of floating-point numbers come in it.

        Raises
        ------
        FieldError
            One of the lists is empty.
        """
        try:
            lengths = [len(indices) for indices in lists]
            arrays = [
                indices
                if isinstance(indices, np.ndarray) and indices.ndim == 1
                else np.asarray(indices).reshape(length)
                for indices, length in zip(lists, lengths, strict=True)
            ]
        except (TypeError, ValueError):
            # Nested lists and the like; the reader below says what is wrong with the rest.
            arrays = [np.asarray(self._positions(indices)) for indices in lists]
            lengths = [len(indices) for indices in arrays]
        self._check_open()
        if 0 in lengths:
            raise FieldError(
                self.where, "no sample to read", found="an empty list of indices", expected="some"
            )
        if not lists:
            return []
        samples = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        names = self._names(fields)
        plan = self._gather.windows(names, dtype) if samples.dtype.kind in "iu" else None
        if plan is not None:
            bounds = np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1)
            batches = plan(np.ascontiguousarray(samples, np.int64), bounds)
            if batches is None:
                as_index(samples, len(self), where=self.where)  # says which is out of range
                raise IndexRangeError(self.where, "an index is out of range")
            return [batch.pin_memory() for batch in batches] if self._pins() else batches
        block = self._gather(self._physical(samples), names)
        stops = np.cumsum(lengths)
        # Windows of one read: only the edges are copied, to be made batch-global.
        parts = (
            [block]
            if len(lists) == 1
            else [
                block.slice(int(stop - length), int(stop))
                for stop, length in zip(stops, lengths, strict=True)
            ]
        )
        batches = [Batch.from_block(part) for part in parts]
        if dtype is not None:
            for batch in batches:
                cast_floats(batch, dtype)
        return [batch.pin_memory() for batch in batches] if self._pins() else batches

    def _load_many_samples(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        if len(indices) == 1:
            plan = self._gather.windows(self._names(None))
            found = None if plan is None else plan.sample(indices[0])
            if found is not None:
                return [Tensors(found)]
        block = self.read_block(indices)
        if len(indices) == 1 and not block.present:
            return [Tensors({name: from_numpy(rows) for name, rows in block.arrays.items()})]
        return list(_cut(block))

    def read_many(self, indices: Sequence[int]) -> list[RawSample]:
        self._check_open()  # a closed reader says so before it looks at indices
        return super().read_many(indices)

    def _get_sample_metadata(self, index: int) -> dict[str, Any]:
        return {
            "source_file": self.snapshot.where,
            # Text, as in nvalchemi-toolkit.
            "physical_index": str(int(self._active[index])),
        }

    # -- life ------------------------------------------------------------------

    def refresh(self) -> None:
        """Move to the newest generation of the store.

        Raises
        ------
        StoreClosedError
        """
        if self._snapshot is None:
            raise StoreClosedError("AtomicDataZarrReader", "Cannot refresh a closed reader.")
        newest = self._snapshot.refresh()
        if newest is not self._snapshot:
            self._snapshot.close()
        self._snapshot = newest
        self._cache.clear()
        self._gather = Gatherer(newest, self._cache)
        self._active = newest.active
        self._choices = {}
        if self._chosen is not None:
            self._chosen = self._known(self._chosen)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._snapshot is None

    def reopen(self) -> None:
        """Open the newest generation again after ``close``; an open reader stays as it is."""
        if self._snapshot is None:
            self._snapshot = open_store(self._place)
            self._gather = Gatherer(self._snapshot, self._cache)
            self._active = self._snapshot.active
            self._choices = {}

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
            self._cache.clear()
            del self._gather  # and with it the maps: batches are copies

    # -- inside ----------------------------------------------------------------

    def _physical(self, indices: Any) -> IntArray:
        self._check_open()
        return self._active[as_index(indices, len(self), where=self.where)]

    def _names(self, fields: Sequence[str] | None) -> tuple[str, ...]:
        """Canonical names of a choice of fields; looked up once for each choice."""
        key = None if fields is None else tuple(fields)
        found = self._choices.get(key)
        if found is None:
            names = self._get_field_names() if fields is None else self._known(fields)
            found = self._choices[key] = tuple(names)
        return found

    def _known(self, fields: Sequence[str]) -> list[str]:
        """Canonical names, checked against the store."""
        have = _tensor_fields(self.snapshot)
        names = [resolve(name) for name in fields]
        for given, name in zip(fields, names, strict=True):
            if name not in have:
                raise UnknownFieldError(
                    self.where, f"no field {given!r} to read. {nearest(given, have)}"
                )
        return names


def _tensor_fields(snapshot: Snapshot) -> list[str]:
    """Fields that a tensor can hold: all but text."""
    return [name for name in snapshot.fields if snapshot.group(name) != "text"]


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


def _cut(block: Block) -> Iterator[dict[str, Tensor]]:
    """One dict of tensors a sample; a field that a sample has not is not in it."""
    flat = {name: from_numpy(block.arrays[name]) for name in block.names}
    absent = {name: ~mask for name, mask in block.present.items()}
    sizes: dict[Level, list[int]] = {
        level: np.diff(block.ptr(level)).tolist() for level in ("atom", "edge", "system")
    }
    parts = {name: torch.split(t, sizes[block.levels[name]]) for name, t in flat.items()}
    for i in range(block.num_samples):
        yield Tensors(
            {
                name: pieces[i]
                for name, pieces in parts.items()
                if name not in absent or not absent[name][i]
            }
        )

"""The Zarr store in torch's words: a thin reader, and with it the thin writer.

What is on disk, and when it is true, belongs to ``store``; how rows are
gathered belongs to ``gather``. Here blocks become tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import IntArray, Level
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index
from alchemi_xr.data.datapipes.backends.base import RawSample, Reader, Tensors
from alchemi_xr.data.datapipes.backends.zarr_writer import AtomicDataZarrWriter
from alchemi_xr.data.datapipes.cache import cache_of
from alchemi_xr.data.datapipes.gather import Gatherer
from alchemi_xr.data.datapipes.validate import cast_floats
from alchemi_xr.data.fields import resolve
from alchemi_xr.data.level import from_numpy
from alchemi_xr.errors import (
    CorruptStoreError,
    FieldError,
    IndexRangeError,
    StoreClosedError,
    UnknownFieldError,
    nearest,
)
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["AtomicDataZarrReader", "AtomicDataZarrWriter"]


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
        Decoded chunks that this reader keeps for itself, at most; 0 keeps none. By
        default it shares the budget of all readers of the process: the option
        ``cache_bytes`` of ``alchemi_xr.set_options``, a sixteenth of the memory that is
        free at the first reader and 32 MiB at least.
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
        self._cache_bytes = cache_bytes
        self._hold(self._snapshot)

    def _hold(self, snapshot: Snapshot) -> None:
        """Read this generation from now on."""
        self._snapshot = snapshot
        self._cache = cache_of(snapshot, self._cache_bytes)
        self._gather = Gatherer(snapshot, self._cache)
        # Positions of the samples that are not deleted; of the generation held.
        self._active: IntArray = snapshot.active
        self._choices: dict[tuple[str, ...] | None, tuple[str, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens the generation for itself: nothing that grows with the store
        # goes there, and nothing that was decoded.
        left = {"_cache", "_gather", "_active", "_choices"}
        state = {k: v for k, v in self.__dict__.items() if k not in left}
        held = None if self._snapshot is None else self._snapshot.store
        return {**state, "store": None, "_place": self._place.for_other_processes(held)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        place = self._place
        self.store = place if place.path is None else place.path
        if self._snapshot is not None:
            self._hold(self._snapshot)

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
        held, before = self._snapshot, self._cache
        self._hold(held.refresh())
        before.close()
        held.close()
        if self._chosen is not None:
            self._chosen = self._known(self._chosen)

    def version(self) -> tuple[str, int]:
        """Which generation of which store is read."""
        schema = self.snapshot.schema
        return schema.identity, schema.generation

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._snapshot is None

    def reopen(self) -> None:
        """Open the newest generation again after ``close``; an open reader stays as it is."""
        if self._snapshot is None:
            self._hold(open_store(self._place))

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
            self._cache.close()
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

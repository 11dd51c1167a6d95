"""One committed generation of a store, read-only.

A snapshot trusts the committed counts of the root document alone, never the
length of an array, and goes on reading its own generation whatever writers do
meanwhile. In memory it keeps the two pointers and the sample mask; everything
else is read when asked for, in bounded pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index, counts_to_ptr, row_indices
from alchemi_xr.data.fields import as_rows, field_order, resolve
from alchemi_xr.errors import (
    AlchemiError,
    CorruptStoreError,
    FieldError,
    StaleSnapshotError,
    StoreClosedError,
    UnknownFieldError,
    nearest,
)
from alchemi_xr.store._compat import (
    chunk_rows_of,
    object_keys,
    object_rows_of,
    uses_own_file_access,
)
from alchemi_xr.store.edges import EdgeBases, find_bases
from alchemi_xr.store.locate import PinnedStore, Place, locate
from alchemi_xr.store.schema import Counts, FieldInfo, StoreSchema
from alchemi_xr.store.state import StoreState, read_state

__all__ = ["Snapshot", "open_store"]

DEFAULT_BLOCK_BYTES = 64 * 2**20
# A gather reads at most so many chunks in one go, which bounds its memory.
_GATHER_CHUNKS = 4
_DECODE_TRIES = 3
# Runs of neighbouring samples so long on average are copied run by run.
_RUN_SAMPLES = 4


def open_store(
    store: Any,
    *,
    generation: int | None = None,
    storage_options: dict[str, Any] | None = None,
    branch: str | None = None,
    tag: str | None = None,
    snapshot: str | None = None,
) -> Snapshot:
    """The newest committed generation of a store, or an older one that is still there.

    Parameters
    ----------
    store : str, Path, dict, zarr store, StorePath or Icechunk Repository
        A path, any URL that fsspec knows, or ``icechunk:<path or URL>``.
    generation : int, optional
    storage_options : dict, optional
        For a URL: endpoint, credentials and the like.
    branch, tag, snapshot : str, optional
        A state of an Icechunk repository; by default the newest of branch ``main``.

    Raises
    ------
    StoreNotFoundError
        Nothing is there.
    NotAStoreError
        Something else is there, or a store that was never finished.
    CorruptStoreError
        Its arrays contradict one another; the message names them.
    StaleSnapshotError
        The generation asked for is no longer on disk.
    """
    place = locate(
        store, storage_options=storage_options, branch=branch, tag=tag, snapshot=snapshot
    )
    return Snapshot(read_state(place, generation=generation))


class Snapshot:
    """One committed generation of a store.

    Made by :func:`open_store`. Positions are physical: deleted samples count,
    and ``active`` tells which are not.
    """

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._arrays: dict[str, zarr.Array[Any]] = {}
        self._present: dict[str, BoolArray | None] = {}
        self._active: IntArray | None = None
        self._edge_bases: EdgeBases | None = None
        self._closed = False

    # -- what it is --------------------------------------------------------

    @property
    def where(self) -> str:
        """The store's address, for messages."""
        return self._state.place.where

    @property
    def place(self) -> Place:
        """The store's address."""
        return self._state.place

    @property
    def folder(self) -> Path | None:
        """The folder that is read, when it is one."""
        return None if self._state.pinned is None else self._state.pinned.path

    @property
    def store(self) -> Store:
        """The zarr store that is read."""
        return self._state.store

    @property
    def snapshot_id(self) -> str | None:
        """The Icechunk snapshot that is read; None elsewhere."""
        return getattr(self._state.store, "snapshot_id", None)

    @property
    def pinned(self) -> PinnedStore | None:
        """The folder as this snapshot holds it, whatever is put in its place."""
        pinned = self._state.pinned
        return pinned if isinstance(pinned, PinnedStore) else None

    @property
    def schema(self) -> StoreSchema:
        return self._state.schema

    @property
    def generation(self) -> int:
        return self.schema.generation

    @property
    def is_foreign(self) -> bool:
        """Whether another tool wrote the store, or to it, since our last commit."""
        return self._state.foreign

    @property
    def num_samples(self) -> int:
        """Samples, deleted ones included."""
        return self.schema.counts.samples

    @property
    def num_atoms(self) -> int:
        return self.schema.counts.atoms

    @property
    def num_edges(self) -> int:
        return self.schema.counts.edges

    @property
    def atoms_ptr(self) -> Ptr:
        """int64 [N + 1]."""
        return self._state.atoms_ptr

    @property
    def edges_ptr(self) -> Ptr:
        """int64 [N + 1]."""
        return self._state.edges_ptr

    @property
    def samples_mask(self) -> BoolArray:
        """bool [N], False for deleted samples."""
        return self._state.samples_mask

    @property
    def active(self) -> IntArray:
        """Physical positions of the samples that are not deleted, int64."""
        if self._active is None:
            self._active = np.flatnonzero(self.samples_mask).astype(np.int64, copy=False)
        return self._active

    @property
    def fields(self) -> list[str]:
        """Names of all fields, in the project's one order."""
        return self.schema.names

    def __len__(self) -> int:
        return self.num_samples

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and resolve(name) in self.schema.fields

    def __repr__(self) -> str:
        return (
            f"<Snapshot {self.where} generation {self.generation}: {self.num_samples} samples "
            f"({self.num_samples - len(self.active)} deleted), {self.num_atoms} atoms, "
            f"{self.num_edges} edges, {len(self.fields)} fields>"
        )

    def info(self, name: str) -> FieldInfo:
        """What is known of a field.

        Raises
        ------
        UnknownFieldError
        """
        found = self.schema.fields.get(resolve(name))
        if found is None:
            raise UnknownFieldError(
                self.where, f"no field {name!r}. {nearest(name, self.schema.fields)}"
            )
        return found

    def level(self, name: str) -> Level:
        return self.info(name).level

    def unit(self, name: str) -> str:
        return self.info(name).unit

    def dtype(self, name: str) -> np.dtype[Any]:
        """dtype of a field in memory; object for text."""
        return self.info(name).dtype

    def tail(self, name: str) -> tuple[int, ...]:
        """Shape of one row."""
        return self.info(name).tail

    def group(self, name: str) -> str:
        """``"core"``, ``"custom"`` or ``"text"``."""
        return self.info(name).group

    def ptr(self, level: Level) -> Ptr:
        """Pointer of a level; for systems, 0 to N."""
        if level == "atom":
            return self.atoms_ptr
        if level == "edge":
            return self.edges_ptr
        return np.arange(self.num_samples + 1, dtype=np.int64)

    def chunk_rows(self, level: Level) -> int:
        """Rows of one storage object at a level: what a reader should align to."""
        found = [
            object_rows_of(self.array(name))
            for name in self.fields
            if self.level(name) == level and self.info(name).group != "text"
        ]
        if found:
            return max(found)
        from alchemi_xr.store.codecs import DEFAULT_CHUNK_ROWS

        return DEFAULT_CHUNK_ROWS[level]

    # -- rows --------------------------------------------------------------

    def array(self, name: str) -> zarr.Array[Any]:
        """The Zarr array of a field; rows past the committed count are garbage."""
        self._check_open()
        info = self.info(name)
        array = self._arrays.get(info.name)
        if array is None:
            array = self._open(info.path)
            rows = self.schema.rows(info.name) if info.rows is None else info.rows
            if array.shape[0] < rows:
                raise CorruptStoreError(
                    self.where,
                    f"array {info.path!r} has fewer rows than are committed",
                    found=array.shape[0],
                    expected=rows,
                    mend="`alchemi-xr repair`, or restore the store from a copy",
                )
            self._arrays[info.name] = array
        return array

    def _open(self, path: str) -> zarr.Array[Any]:
        return self._state.open_array(path)

    def present(self, name: str) -> BoolArray | None:
        """Mask of the samples that carry a field, bool [N]; None when all do."""
        self._check_open()
        info = self.info(name)
        if not info.holes:
            return None
        if info.name not in self._present:
            mask = np.zeros(self.num_samples, dtype=bool)
            known = self._state.present_rows(info)
            if known:
                array = self._open(info.present_path)
                mask[:known] = self._read(array, info.present_path, 0, known)
            if info.rows is not None:
                mask[known:] = False
                if not known:
                    mask[: self._state.samples_within(info)] = True
            elif known < self.num_samples:
                # A foreign writer appended: it extends every core field, so these carry it.
                mask[known:] = info.group == "core"
            self._present[info.name] = None if mask.all() else mask
        return self._present[info.name]

    def read_rows(self, name: str, start: int, stop: int) -> NDArray:
        """Committed rows ``start:stop`` of a field as on disk.

        ``neighbor_list`` stays store-global; system rows have the field's own
        tail; text is an object array of ``str``.

        Raises
        ------
        MissingChunkError
            A chunk of these rows is not there.
        """
        info = self.info(name)
        rows = self.schema.rows(info.name)
        if not 0 <= start <= stop <= rows:
            raise FieldError(
                self.where,
                f"rows {start}:{stop} of field {info.name!r} are not committed",
                expected=f"within 0:{rows}",
            )
        array = self.array(info.name)
        there = rows if info.rows is None else info.rows
        values = self._read(array, info.path, min(start, there), min(stop, there))
        values = values.astype(object) if info.is_text else self._own_tail(info, values)
        if stop > there:
            missing = np.full((stop - max(start, there), *info.tail), info.fill, info.dtype)
            values = np.concatenate([values, missing])
        return values

    def _own_tail(self, info: FieldInfo, values: NDArray) -> NDArray:
        if info.level == "system":
            values = as_rows(info.name, values)
        return values.reshape(len(values), *info.tail)

    def _read(self, array: zarr.Array[Any], path: str, start: int, stop: int) -> NDArray:
        pinned = self._state.pinned
        if pinned is not None and pinned.strict and uses_own_file_access():
            lost = pinned.first_missing(f"{path}/{k}" for k in object_keys(array, start, stop))
            if lost is not None:
                raise pinned.missing(lost)
        for attempt in range(_DECODE_TRIES):
            try:
                values = np.asarray(array[start:stop])
                break
            except AlchemiError:
                raise
            except (OSError, MemoryError):
                raise
            except Exception as error:
                # A shard is read by several requests, and an append may put its last
                # one anew between them; the new one holds the same committed rows.
                if attempt + 1 < _DECODE_TRIES:
                    continue
                raise CorruptStoreError(
                    self.where,
                    f"rows {start}:{stop} of array {path!r} cannot be decoded ({error})",
                    mend="restore the array's chunk files from a copy; "
                    "`alchemi-xr verify` lists those that are damaged",
                ) from error
        if pinned is not None and not pinned.is_whole():
            raise StaleSnapshotError(
                self.where,
                "the generation that this reader holds was replaced while it read",
                mend="call refresh(), or open the store again",
            )
        return values

    def take_rows(self, name: str, rows: Any) -> NDArray:
        """The rows of a field at any positions, in the order given.

        Rows that lie in neighbouring chunks are read together, each chunk once.
        """
        info = self.info(name)
        total = self.schema.rows(info.name)
        rows = as_index(rows, total, where=f"{self.where}, rows of {info.name!r}")
        out = np.empty((len(rows), *info.tail), dtype=info.dtype)
        if len(rows) == 0:
            return out
        if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            return self.read_rows(info.name, int(rows[0]), int(rows[-1]) + 1)
        in_order = bool((np.diff(rows) >= 0).all())
        order = None if in_order else np.argsort(rows, kind="stable")
        ordered = rows if order is None else rows[order]
        chunk = chunk_rows_of(self.array(info.name))
        pieces = ordered // chunk
        # A piece starts where chunks are skipped, or where enough are joined.
        jumps = np.diff(pieces)
        starts = (
            np.flatnonzero((jumps > 1) | ((jumps > 0) & (pieces[1:] % _GATHER_CHUNKS == 0))) + 1
        )
        bounds = np.concatenate(([0], starts, [len(ordered)]))
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            first, last = int(ordered[begin]), int(ordered[end - 1]) + 1
            span = self.read_rows(info.name, first, last)
            target = slice(begin, end) if order is None else order[begin:end]
            # ``take`` copies whole rows; an index in brackets goes element by element.
            out[target] = np.take(span, ordered[begin:end] - first, axis=0)
        return out

    # -- samples -----------------------------------------------------------

    def read_block(self, samples: Any, fields: Iterable[str] | None = None) -> Block:
        """Whole samples, by physical position and in the order given.

        Parameters
        ----------
        samples : int, slice, ints or mask
        fields : names, optional
            All by default.

        Returns
        -------
        Block
            With ``neighbor_list`` local to each sample.
        """
        self._check_open()
        index = as_index(samples, self.num_samples, where=self.where)
        names = self._names(fields)
        if len(index) and (len(index) == 1 or (np.diff(index) == 1).all()):
            return self._read_run(int(index[0]), int(index[-1]) + 1, names)
        breaks = np.flatnonzero(np.diff(index) != 1) + 1
        if (
            len(index) > 0
            and len(breaks) * _RUN_SAMPLES <= len(index)
            and (np.diff(index) > 0).all()
        ):
            return self._read_runs(index, breaks, names)
        atom_rows, atoms_ptr = row_indices(self.atoms_ptr, index)
        edge_rows, edges_ptr = row_indices(self.edges_ptr, index)
        rows: dict[Level, IntArray] = {"atom": atom_rows, "edge": edge_rows, "system": index}
        arrays = {name: self.take_rows(name, rows[self.level(name)]) for name in names}
        return self._block(index, atoms_ptr, edges_ptr, arrays, names)

    def _read_run(self, start: int, stop: int, names: Sequence[str]) -> Block:
        atoms_ptr = self.atoms_ptr[start : stop + 1]
        edges_ptr = self.edges_ptr[start : stop + 1]
        span: dict[Level, tuple[int, int]] = {
            "atom": (int(atoms_ptr[0]), int(atoms_ptr[-1])),
            "edge": (int(edges_ptr[0]), int(edges_ptr[-1])),
            "system": (start, stop),
        }
        arrays = {name: self.read_rows(name, *span[self.level(name)]) for name in names}
        index = np.arange(start, stop, dtype=np.int64)
        return self._block(index, atoms_ptr - atoms_ptr[0], edges_ptr - edges_ptr[0], arrays, names)

    def _read_runs(self, index: IntArray, breaks: IntArray, names: Sequence[str]) -> Block:
        """Ascending samples, most of them neighbours: whole runs are copied, not rows."""
        first = index[np.concatenate(([0], breaks))]
        last = index[np.concatenate((breaks - 1, [len(index) - 1]))] + 1
        arrays = {}
        for name in names:
            ptr = self._pointers(self.level(name))
            starts, stops = (first, last) if ptr is None else (ptr[first], ptr[last])
            arrays[name] = self._take_runs(name, starts, stops)
        pointers = [
            counts_to_ptr(ptr[index + 1] - ptr[index]) for ptr in (self.atoms_ptr, self.edges_ptr)
        ]
        return self._block(index, pointers[0], pointers[1], arrays, names)

    def _pointers(self, level: Level) -> Ptr | None:
        return {"atom": self.atoms_ptr, "edge": self.edges_ptr}.get(level)

    def _take_runs(self, name: str, starts: IntArray, stops: IntArray) -> NDArray:
        """Rows ``starts[k]:stops[k]`` of a field, one run after the other."""
        info = self.info(name)
        out = np.empty((int((stops - starts).sum()), *info.tail), dtype=info.dtype)
        chunk = chunk_rows_of(self.array(info.name))
        done = begin = 0
        while begin < len(starts):
            # Runs that end within some chunks of the first one are read together.
            limit = (int(starts[begin]) // chunk + _GATHER_CHUNKS) * chunk
            end = max(begin + 1, int(np.searchsorted(stops, limit, side="right")))
            low, high = int(starts[begin]), int(stops[end - 1])
            span = self.read_rows(info.name, low, high)
            for start, stop in zip(
                (starts[begin:end] - low).tolist(), (stops[begin:end] - low).tolist(), strict=True
            ):
                out[done : done + stop - start] = span[start:stop]
                done += stop - start
            begin = end
        return out

    def _block(
        self,
        index: IntArray,
        atoms_ptr: Ptr,
        edges_ptr: Ptr,
        arrays: dict[str, NDArray],
        names: Sequence[str],
    ) -> Block:
        if "neighbor_list" in arrays:
            bases = np.repeat(self._bases(index), np.diff(edges_ptr))
            pairs = arrays["neighbor_list"]
            arrays["neighbor_list"] = (pairs - bases[:, None]).astype(pairs.dtype, copy=False)
        present = {}
        for name in names:
            mask = self.present(name)
            if mask is not None and not mask[index].all():
                present[name] = mask[index]
        return Block(
            atoms_ptr,
            edges_ptr,
            arrays,
            {name: self.level(name) for name in names},
            present,
            {name: self.unit(name) for name in names if self.unit(name)},
        )

    def _bases(self, index: IntArray) -> IntArray:
        """What to subtract from the edges of these samples."""
        if not self.schema.foreign_samples:
            return self.atoms_ptr[index]
        found = self.edge_bases()
        unsure = np.intersect1d(index, found.unknown)
        if unsure.size:
            raise CorruptStoreError(
                self.where,
                f"edges of sample {int(unsure[0])} ({unsure.size} in all) do not say to which "
                "atoms they belong: another tool appended or defragmented, and more than one "
                "base fits or none does",
                mend="read without neighbor_list, or build the edges anew from the positions",
            )
        return found.bases[index]

    def edge_bases(self) -> EdgeBases:
        """Bases of all samples' edges; found by reading the edges once if another tool wrote."""
        if self._edge_bases is None:
            if "neighbor_list" not in self or not self.schema.foreign_samples:
                self._edge_bases = EdgeBases(self.atoms_ptr[:-1], np.empty(0, np.int64))
            else:
                self._edge_bases = find_bases(
                    self.atoms_ptr,
                    self.edges_ptr,
                    self.samples_mask,
                    lambda start, stop: self.read_rows("neighbor_list", start, stop),
                    foreign_samples=self.schema.foreign_samples,
                )
        return self._edge_bases

    def iter_blocks(
        self,
        *,
        fields: Iterable[str] | None = None,
        samples: Any = None,
        max_bytes: int = DEFAULT_BLOCK_BYTES,
    ) -> Iterator[Block]:
        """Blocks of whole samples that each take about ``max_bytes`` at most.

        Parameters
        ----------
        fields : names, optional
        samples : int, slice, ints or mask, optional
            Physical positions; by default all that are not deleted.
        max_bytes : int
            A sample larger than this is a block of its own.
        """
        names = self._names(fields)
        index = self.active if samples is None else as_index(samples, self.num_samples)
        ends = np.cumsum(self.sample_bytes(names)[index])
        start = 0
        while start < len(index):
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + max_bytes, side="right"))
            stop = max(stop, start + 1)
            yield self.read_block(index[start:stop], names)
            start = stop

    def sample_bytes(self, fields: Iterable[str] | None = None) -> IntArray:
        """Bytes of every sample in memory, int64 [N]."""
        per_row: dict[Level, int] = {"atom": 0, "edge": 0, "system": 16}
        for name in self._names(fields):
            per_row[self.level(name)] += self.info(name).row_bytes
        total: IntArray = (
            np.diff(self.atoms_ptr) * per_row["atom"]
            + np.diff(self.edges_ptr) * per_row["edge"]
            + per_row["system"]
        )
        return total

    def _names(self, fields: Iterable[str] | None) -> list[str]:
        if fields is None:
            return self.fields
        if isinstance(fields, str):
            fields = [fields]
        return field_order(self.info(name).name for name in fields)

    # -- life --------------------------------------------------------------

    def refresh(self) -> Snapshot:
        """A snapshot of the newest generation; this one stays as it is."""
        self._check_open()
        return open_store(self.place)

    def close(self) -> None:
        """Let go of the store; arrays that were handed out stay readable."""
        self._closed = True
        self._arrays.clear()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(
                self.where, "this reader was closed", mend="open the store again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._state
        place = self.place.for_other_processes(state.store)
        token = (state.schema.identity, state.schema.generation, state.schema.counts)
        return (_reopen, (place if place.path is None else str(place.path), token))


def _reopen(where: str | Place, token: tuple[str, int, Counts]) -> Snapshot:
    identity, generation, counts = token
    place = locate(where)
    state = read_state(place, generation=generation)
    if state.schema.identity != identity or state.schema.counts != counts:
        raise StaleSnapshotError(
            place.where,
            f"generation {generation}, which this reader held, is no longer on disk",
            mend="open the store again",
        )
    return Snapshot(state)

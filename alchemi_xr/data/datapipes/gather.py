"""Samples in any order out of a snapshot, as one flat block.

Raw arrays of a local store are mapped, and their rows copied in one call. Of the
others a plan knows which pieces a request touches before any byte moves. When
they fit in the cache, whole pieces are decoded once and rows are copied out of
them; else the snapshot reads, in ascending order and each sample once, and the
order asked for is made in memory. All ways give the same block.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from alchemi_xr._typing import IntArray, Level, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.datapipes.budget import Kept
from alchemi_xr.data.datapipes.cache import PieceCache
from alchemi_xr.data.datapipes.cuts import Cut, plan_cuts
from alchemi_xr.data.datapipes.forks import renew_in_child
from alchemi_xr.data.datapipes.pool import BufferPool
from alchemi_xr.data.datapipes.windows import WindowPlan, plan_windows
from alchemi_xr.native.rows import Field, Gather, copy_ranges
from alchemi_xr.store._compat import chunk_rows_of
from alchemi_xr.store.chunks import ChunkReader, chunk_reader
from alchemi_xr.store.mapped import map_rows
from alchemi_xr.store.reader import Snapshot

logger = logging.getLogger(__name__)

#: Rows of a field, of one piece.
_Load: TypeAlias = Callable[[str, int, int], NDArray]

__all__ = ["Cut", "Gatherer", "piece_rows", "plan_cuts"]

#: Bytes that a piece has at least: a call to zarr costs 1-3 ms however little it reads.
_PIECE_BYTES = 2**20
#: The same where chunks are files: most are decoded without zarr.
_LOCAL_BYTES = 2**18


def piece_rows(snapshot: Snapshot, name: str) -> int:
    """Rows of one piece: whole chunks, of about a megabyte when chunks are small."""
    chunk = chunk_rows_of(snapshot.array(name))
    row = max(1, math.prod(snapshot.tail(name)) * snapshot.dtype(name).itemsize)
    least = _PIECE_BYTES if snapshot.pinned is None else min(_PIECE_BYTES, _LOCAL_BYTES)
    return chunk * max(1, least // (chunk * row))


class Gatherer:
    """Reads samples of one snapshot in any order.

    Fields that lie raw in local files are mapped, and a batch of them is one call
    that copies rows; the others come out of cached pieces where these fit, else
    from the snapshot. All ways give the same block.

    Parameters
    ----------
    snapshot : Snapshot
    cache : PieceCache, optional
        Of this snapshot alone.
    """

    def __init__(self, snapshot: Snapshot, cache: PieceCache | None = None) -> None:
        self.snapshot = snapshot
        self.cache = cache
        #: Fields that a tensor can hold: all but text.
        self.names = [name for name in snapshot.fields if snapshot.group(name) != "text"]
        self._mapped: dict[str, Field | None] = {}
        self._plans: dict[tuple[str, ...], _Fields] = {}
        self._windows: dict[tuple[tuple[str, ...], Any], _Windows] = {}
        # Fields that are one array of the cache, which it may want back.
        self._wholes: dict[str, Kept] = {}
        self._version = self._seen = 0
        self._pool = BufferPool()
        self._chunks: dict[str, ChunkReader | None] = {}
        self._given = self._misfits = 0
        self._warned = False
        self._lock = Lock()
        if cache is not None:
            cache.listen(self)
        renew_in_child(self)

    def renew(self) -> None:
        """In a forked child: nobody holds the lock; maps stay."""
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps for itself.
        return (Gatherer, (self.snapshot, self.cache))

    def mapped(self, name: str) -> Field | None:
        """The rows of a field in mapped files, or None when they are not to be had so."""
        if name not in self._mapped:
            with self._lock:
                if name not in self._mapped:
                    self._mapped[name] = self._map(name)
        return self._mapped[name]

    def _map(self, name: str) -> Field | None:
        rows = map_rows(self.snapshot, name)
        return None if rows is None else self._field(name, rows)

    def _field(self, name: str, rows: NDArray) -> Field | None:
        snapshot = self.snapshot
        ptr = {"atom": snapshot.atoms_ptr, "edge": snapshot.edges_ptr}.get(snapshot.level(name))
        shifted = name == "neighbor_list"
        if shifted and not _can_shift(rows.dtype):
            return None
        return Field(rows, ptr, shifted=shifted)

    def windows(self, names: tuple[str, ...], dtype: Any = None) -> WindowPlan | None:
        """Batches of these fields without blocks, or None as long as one has to be decoded.

        Parameters
        ----------
        names : tuple of str
        dtype : torch.dtype, optional
            That floats come in.
        """
        key = (names, dtype)
        found = self._windows.get(key)
        if found is None:
            found = self._plan_windows(names, dtype)
        for kept in found.wholes:
            kept.touch()
        return found.plan

    def _plan_windows(self, names: tuple[str, ...], dtype: Any) -> _Windows:
        snapshot, plan, version = self.snapshot, None, self._version
        fields = {name: self.mapped(name) for name in names}
        rows = {name: field.rows for name, field in fields.items() if field is not None}
        if len(rows) == len(names) and not snapshot.schema.foreign_samples:
            present = {name: snapshot.present(name) for name in names}
            active = snapshot.active
            plan = plan_windows(
                rows,
                {name: snapshot.level(name) for name in names},
                snapshot.atoms_ptr,
                snapshot.edges_ptr,
                active=None if len(active) == snapshot.num_samples else active,
                present={name: mask for name, mask in present.items() if mask is not None},
                units={n: snapshot.unit(n) for n in names if snapshot.unit(n)},
                dtype=dtype,
                pool=self._pool,
            )
        found = _Windows(plan, self._held(names) if plan is not None else ())
        with self._lock:
            if version == self._version:
                self._windows[names, dtype] = found
        return found

    def _held(self, names: Sequence[str]) -> tuple[Kept, ...]:
        wholes = self._wholes
        return tuple(wholes[name] for name in names if name in wholes)

    def _fields(self, names: tuple[str, ...]) -> _Fields:
        found = self._plans.get(names)
        if found is None:
            version = self._version
            fields = {name: self.mapped(name) for name in names}
            direct = [name for name in names if fields[name] is not None]
            found = _Fields(
                direct,
                [name for name in names if fields[name] is None],
                Gather([field for field in fields.values() if field is not None]),
                {name: self.snapshot.level(name) for name in names},
                {n: self.snapshot.unit(n) for n in names if self.snapshot.unit(n)},
                [n for n in names if self.snapshot.present(n) is not None],
                self._held(direct),
            )
            with self._lock:
                if version == self._version:
                    self._plans[names] = found
        for kept in found.wholes:
            kept.touch()
        return found

    def __call__(self, samples: IntArray, names: Sequence[str]) -> Block:
        """The samples as a block, in the order given.

        Parameters
        ----------
        samples : int64 array, [B]
            Physical positions, in range; any order, repeats allowed.
        names : sequence of str
            None of them text.

        Returns
        -------
        Block
            Arrays of its own, edges local to each sample.
        """
        snapshot = self.snapshot
        # The edges of another tool's appends need the snapshot's own care.
        if snapshot.schema.foreign_samples:
            return _read(snapshot, samples, names)
        if self.cache is not None and self.cache.wholes != self._seen:
            self._seen = self.cache.wholes
            self._join(names)  # another reader of the same rows may have joined them
        fields = self._fields(tuple(names))
        if not fields.direct:
            return self._from_chunks(samples, names)
        starts = snapshot.atoms_ptr[samples]
        atoms_ptr = counts_to_ptr(snapshot.atoms_ptr[samples + 1] - starts)
        edges_ptr = counts_to_ptr(snapshot.edges_ptr[samples + 1] - snapshot.edges_ptr[samples])
        rows = {
            "atom": int(atoms_ptr[-1]),
            "edge": int(edges_ptr[-1]),
            "system": len(samples),
        }
        outs = fields.gather(
            samples,
            [rows[fields.levels[n]] for n in fields.direct],
            -starts,
            empty=self._pool.empty,
        )
        arrays = dict(zip(fields.direct, outs, strict=True))
        if fields.others:
            arrays |= self._from_chunks(samples, fields.others).arrays
            arrays = {name: arrays[name] for name in names}
        present = {}
        for name in fields.holey:
            mask = snapshot.present(name)
            if mask is not None and not mask[samples].all():
                present[name] = mask[samples]
        return Block(atoms_ptr, edges_ptr, arrays, dict(fields.levels), present, dict(fields.units))

    def _from_chunks(self, samples: IntArray, names: Sequence[str]) -> Block:
        """Fields that have to be decoded."""
        block = None
        if self.cache is not None:
            block = _from_pieces(self.snapshot, samples, names, self.cache, self._load)
            self._watch(names, len(samples), fits=block is not None)
        if block is None:
            return _read(self.snapshot, samples, names)
        self._join(names)
        return block

    def _load(self, name: str, start: int, stop: int) -> NDArray:
        """Rows of one piece, decoded."""
        try:
            chunks = self._chunks[name]
        except KeyError:
            chunks = self._chunks[name] = chunk_reader(self.snapshot, name)
        found = None if chunks is None else chunks.read(start, stop)
        if found is None:
            found = np.ascontiguousarray(self.snapshot.read_rows(name, start, stop))
        return found

    def _watch(self, names: Sequence[str], num: int, *, fits: bool) -> None:
        """Say it once when an order makes the cache decode the same pieces again and again."""
        cache = self.cache
        if self._warned or cache is None or cache.limit == 0:
            return
        self._given += num
        if not fits:
            self._misfits += num
        elif cache.drops == 0:
            return
        snapshot = self.snapshot
        pieces = sum(-(-snapshot.schema.rows(n) // piece_rows(snapshot, n)) for n in names)
        # Within an epoch each piece is needed once, or twice at its ends.
        epochs = self._given / snapshot.num_samples + 1
        often = cache.drops > pieces and cache.loads > 4 * pieces * epochs
        if self._misfits > max(4096, snapshot.num_samples // 2) or often:
            self._warned = True
            size = sum(
                self.snapshot.schema.rows(name)
                * int(np.prod(self.snapshot.tail(name), dtype=np.int64))
                * self.snapshot.dtype(name).itemsize
                for name in self.names
            )
            logger.warning(
                "%s: its chunks are decoded many times over, as the decoded fields (%.0f MiB) do "
                "not fit in %s (%.0f MiB) and samples come in random order. Take "
                "DataLoader(..., shuffle='block'), or %s(..., cache_bytes=%d)",
                self.snapshot.where,
                size / 2**20,
                "the cache of all readers" if cache.is_shared else "the reader's cache",
                cache.limit / 2**20,
                "alchemi_xr.set_options" if cache.is_shared else "AtomicDataZarrReader",
                size + size // 8,
            )

    def _join(self, names: Sequence[str]) -> None:
        """Fields of which the cache has every piece are from now on one array in memory."""
        assert self.cache is not None
        for name in names:
            pieces = -(-self.snapshot.schema.rows(name) // piece_rows(self.snapshot, name))
            # Most reads end here: not even the keys are made.
            if not pieces or self._mapped.get(name) is not None:
                continue
            if pieces > len(self.cache) and not self.cache.wholes:
                continue
            if name == "neighbor_list" and not _can_shift(self.snapshot.dtype(name)):
                continue
            whole = self.cache.join(name, [(name, number) for number in range(pieces)])
            if whole is None:
                continue
            field = self._field(name, whole.rows)
            if field is not None:
                with self._lock:
                    self._mapped[name], self._wholes[name] = field, whole
                    self._renewed()
                if whole.gone:  # between these lines, so that nobody heard of it
                    self.forget(name)

    def forget(self, name: str) -> None:
        """Let go of a field's joined array, which the cache keeps no longer."""
        with self._lock:
            whole = self._wholes.get(name)
            if whole is not None and whole.gone:
                del self._wholes[name], self._mapped[name]
                self._renewed()

    def _renewed(self) -> None:
        """Other fields lie in memory: what was planned on them is planned anew."""
        self._version += 1
        self._plans, self._windows = {}, {}


@dataclass(frozen=True, slots=True)
class _Windows:
    """A plan, and the joined arrays that it copies from."""

    plan: WindowPlan | None
    wholes: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class _Fields:
    """What is known of a set of fields before any sample is."""

    direct: list[str]
    others: list[str]
    gather: Gather
    levels: dict[str, Level]
    units: dict[str, str]
    holey: list[str]
    wholes: tuple[Kept, ...]


def _can_shift(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "i" and dtype.itemsize in (4, 8)


def _read(snapshot: Snapshot, samples: IntArray, fields: Sequence[str]) -> Block:
    """In ascending order and each once, as the snapshot reads best."""
    if len(samples) < 2 or bool((np.diff(samples) > 0).all()):
        return snapshot.read_block(samples, fields)
    unique, order = np.unique(samples, return_inverse=True)
    return snapshot.read_block(unique, fields).take(order)


def _from_pieces(
    snapshot: Snapshot,
    samples: IntArray,
    fields: Sequence[str],
    cache: PieceCache,
    load: _Load,
) -> Block | None:
    """The block out of cached pieces; None when the pieces do not fit in the cache."""
    ranges: dict[Level, tuple[IntArray, IntArray, Ptr]] = {}
    pointers: dict[Level, Ptr] = {"atom": snapshot.atoms_ptr, "edge": snapshot.edges_ptr}
    for level, ptr in pointers.items():
        starts, stops = ptr[samples], ptr[samples + 1]
        ranges[level] = starts, stops, counts_to_ptr(stops - starts)
    ranges["system"] = samples, samples + 1, np.arange(len(samples) + 1)
    levels = {name: snapshot.level(name) for name in fields}
    sizes = {name: piece_rows(snapshot, name) for name in fields}
    plans: dict[tuple[Level, int], list[Cut]] = {}
    needed = 0
    for name in fields:
        key = (levels[name], sizes[name])
        if key not in plans:
            starts, stops, new = ranges[levels[name]]
            plans[key] = plan_cuts(starts, stops, new[:-1], sizes[name])
        tail, dtype = snapshot.tail(name), snapshot.dtype(name)
        row_bytes = math.prod(tail) * dtype.itemsize
        needed += len(plans[key]) * min(sizes[name], snapshot.schema.rows(name)) * row_bytes
        # More than is kept: each piece is decoded once for this request and let go, unless
        # it is of many chunks, of which the snapshot decodes only those that are touched.
        if needed > cache.limit and sizes[name] != chunk_rows_of(snapshot.array(name)):
            return None
    arrays = {
        name: _take(
            snapshot,
            name,
            sizes[name],
            plans[levels[name], sizes[name]],
            int(ranges[levels[name]][2][-1]),
            cache,
            load,
            pointers.get(levels[name]),
        )
        for name in fields
    }
    atoms_ptr, edges_ptr = ranges["atom"][2], ranges["edge"][2]
    if "neighbor_list" in arrays:
        arrays["neighbor_list"] = _localised(
            arrays["neighbor_list"], snapshot.atoms_ptr[samples], edges_ptr
        )
    present = {}
    for name in fields:
        mask = snapshot.present(name)
        if mask is not None and not mask[samples].all():
            present[name] = mask[samples]
    units = {name: snapshot.unit(name) for name in fields if snapshot.unit(name)}
    return Block(atoms_ptr, edges_ptr, arrays, levels, present, units)


def _take(
    snapshot: Snapshot,
    name: str,
    size: int,
    cuts: Sequence[Cut],
    rows: int,
    cache: PieceCache,
    load: _Load,
    ptr: Ptr | None,
) -> NDArray:
    total = snapshot.schema.rows(name)
    out: NDArray = np.empty((rows, *snapshot.tail(name)), dtype=snapshot.dtype(name))
    for cut in cuts:
        start = cut.piece * size
        stop = min(start + size, total)

        key = (name, cut.piece)
        head = cache.head(key)
        if head is not None and int(cut.stops.max()) <= len(head):
            copy_ranges(head, cut.starts, cut.stops, out, cut.targets)
            continue
        loads = cache.loads
        piece = cache.get(key, partial(load, name, start, stop))
        if ptr is not None and head is None and cache.loads > loads:
            over = int(ptr[np.searchsorted(ptr, start)]) - start
            if 0 < over <= len(piece) // 4:
                cache.keep_head(key, piece[:over])
        copy_ranges(piece, cut.starts, cut.stops, out, cut.targets)
    return out


def _localised(pairs: NDArray, bases: IntArray, edges_ptr: Ptr) -> NDArray:
    """Store-global edges made local to their samples, in place."""
    pairs -= np.repeat(bases, np.diff(edges_ptr))[:, None].astype(pairs.dtype)
    return pairs

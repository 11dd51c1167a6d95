"""From counts to shards: a pure computation made before a byte is written.

A plan knows every offset, so no task needs another's result to know where it
writes, and the memory of the run is a number that can be read beforehand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, Level, NDArray, Ptr
from alchemi_xr.config import option
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import LEVELS
from alchemi_xr.errors import PlanError
from alchemi_xr.store.bulk import FieldLayout
from alchemi_xr.store.codecs import ZarrWriteConfig, encoding

__all__ = [
    "TEXT_BYTES",
    "Extent",
    "Piece",
    "Plan",
    "ShardTask",
    "cut_by_bytes",
    "extent_bytes",
    "format_bytes",
    "make_plan",
    "plan_samples",
    "presence",
    "shard_rows",
]

_TASK_BYTES = 32 * 2**20

TEXT_BYTES = 64
"""Bytes a text value is counted as in estimates."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive whole samples that one task reads.

    Parameters
    ----------
    samples, atoms, edges : int
    payload : object
        Small, picklable; what the reader needs to find them.
    input_bytes : int
        Bytes of input behind it, for the estimate of memory.
    """

    samples: int
    atoms: int
    edges: int
    payload: object
    input_bytes: int = 0

    def rows(self, level: Level) -> int:
        """Its rows at a level."""
        return {"atom": self.atoms, "edge": self.edges, "system": self.samples}[level]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start:stop`` of an extent, counted from that extent's first row."""

    extent: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Rows ``start:stop`` of every array of a level: one writer, one place."""

    number: int
    level: Level
    start: int
    stop: int
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """Offsets, shards and projected memory of a bulk write.

    Parameters
    ----------
    extents : tuple of Extent
    layouts : tuple of FieldLayout
    shard_rows : mapping of str to int
        Rows of one storage object, by level and where they differ by name.
    shards : tuple of ShardTask
    """

    extents: tuple[Extent, ...]
    layouts: tuple[FieldLayout, ...]
    shard_rows: Mapping[str, int]
    shards: tuple[ShardTask, ...]
    sample_base: tuple[int, ...] = field(repr=False, default=())
    atom_base: tuple[int, ...] = field(repr=False, default=())

    @property
    def num_samples(self) -> int:
        return sum(e.samples for e in self.extents)

    @property
    def num_atoms(self) -> int:
        return sum(e.atoms for e in self.extents)

    @property
    def num_edges(self) -> int:
        return sum(e.edges for e in self.extents)

    def row_bytes(self, level: Level) -> int:
        """Bytes of one row of a level over all its fields."""
        return sum(_row_bytes(layout) for layout in self.layouts if layout.level == level)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, before compression."""
        rows = {"atom": self.num_atoms, "edge": self.num_edges, "system": self.num_samples}
        return sum(self.row_bytes(level) * rows[level] for level in LEVELS)

    def names(self, level: Level) -> tuple[str, ...]:
        """Fields of a level, in the order of the layouts."""
        return tuple(layout.name for layout in self.layouts if layout.level == level)

    def extent_bytes(self, extent: Extent) -> int:
        """Bytes of an extent as arrays."""
        return sum(self.row_bytes(level) * extent.rows(level) for level in LEVELS)

    def shard_bytes(self) -> int:
        """Bytes of one whole shard of every kind (as far as there are rows)."""
        widths = self._widths()
        most: dict[tuple[str, ...], int] = {}
        for task in self.shards:
            most[task.names] = max(most.get(task.names, 0), task.stop - task.start)
        return sum(rows * sum(widths[n] for n in names) for names, rows in most.items())

    def _widths(self) -> dict[str, int]:
        """Bytes of a row of everything that is written."""
        widths = {layout.name: _row_bytes(layout) for layout in self.layouts}
        return widths | {presence(layout.name): 1 for layout in self.layouts if layout.holes}

    def window(self, threads: int) -> int:
        """Extents that may be read before the shards of older ones are written."""
        return 2 * max(1, threads) + 1

    def memory(self, threads: int = 1) -> int:
        """Projected peak bytes of the data of one process with so many threads.

        Reading an extent holds its input text, the text without its frame
        heads, and its arrays twice (flat and cut); everything read and not yet
        written is held back by the window. The interpreter comes on top.
        """
        biggest = max((self.extent_bytes(e) for e in self.extents), default=0)
        text = max((e.input_bytes for e in self.extents), default=0)
        waiting = (self.window(threads) + 1) * biggest + 2 * self.shard_bytes()
        return threads * (6 * text + 4 * biggest) + waiting

    def check_memory(self, limit: int, threads: int, where: str) -> None:
        """Raise when the projection exceeds what a worker has.

        Raises
        ------
        PlanError
        """
        need = self.memory(threads)
        if need > limit:
            raise PlanError(
                where,
                "a worker needs more memory than it may use",
                found=f"{format_bytes(limit)} a worker",
                expected=f"{format_bytes(need)}",
                mend="give memory=, fewer threads a worker, or smaller partitions "
                "(partition_bytes=) and smaller shards (profile=ZarrWriteConfig(...))",
            )

    def fingerprint(self, extra: Mapping[str, object]) -> str:
        """Hex digest of everything that decides the bytes of the result."""
        text = json.dumps(
            {
                "extents": [(e.samples, e.atoms, e.edges, repr(e.payload)) for e in self.extents],
                "layouts": [repr(layout) for layout in self.layouts],
                "shard_rows": {str(k): v for k, v in sorted(self.shard_rows.items())},
                **extra,
            },
            sort_keys=True,
            default=repr,
        )
        return hashlib.blake2s(text.encode()).hexdigest()

    def describe(self, threads: int = 1) -> str:
        """A table of what will happen: tasks, bytes, memory a worker."""
        lines = [
            f"{self.num_samples:,} samples, {self.num_atoms:,} atoms, {self.num_edges:,} edges "
            f"in {len(self.extents):,} partitions",
        ]
        kinds: dict[tuple[Level, tuple[str, ...]], int] = {}
        for task in self.shards:
            kinds[task.level, task.names] = kinds.get((task.level, task.names), 0) + 1
        widths = self._widths()
        for (level, names), tasks in kinds.items():
            shown = [name for name in names if name in self.names(level)]
            rows = max(_rows_of(name, level, self.shard_rows) for name in names)
            lines.append(
                f"  {level:<7}{tasks:>6,} shards of {rows:,} rows, "
                f"{sum(widths[n] for n in names)} bytes a row: {', '.join(shown or names)}"
            )
        lines.append(f"  tasks: {len(self.extents):,} read, {len(self.shards):,} write")
        lines.append(f"  bytes before compression: {format_bytes(self.nbytes)}")
        lines.append(
            f"  projected memory of a worker with {threads} thread(s): "
            f"{format_bytes(self.memory(threads))}"
        )
        return "\n".join(lines)


def make_plan(
    extents: Sequence[Extent], layouts: Sequence[FieldLayout], shard_rows: Mapping[str, int]
) -> Plan:
    """The plan that writes these extents one after the other.

    Parameters
    ----------
    extents : sequence of Extent
    layouts : sequence of FieldLayout
    shard_rows : mapping of str to int
        Rows of a storage object by level; an entry by name goes before that.
        Fields that are cut alike are written by one task, and with them those of
        which several objects fill the same rows.

    Raises
    ------
    PlanError
        No extent holds a sample, or a shard has no rows.
    """
    if not any(e.samples for e in extents):
        raise PlanError("plan", "there is no sample to write")
    shards: list[ShardTask] = []
    for level in LEVELS:
        names = [layout.name for layout in layouts if layout.level == level]
        if level == "system":
            names += [presence(layout.name) for layout in layouts if layout.holes]
        alike: dict[int, list[str]] = {}
        for name in names:
            alike.setdefault(_rows_of(name, level, shard_rows), []).append(name)
        ptr = counts_to_ptr(np.array([e.rows(level) for e in extents], dtype=np.int64))
        for rows, group in _together(alike, layouts):
            if rows < 1:
                raise PlanError("plan", f"a {level} shard has no rows", found=rows)
            shards.extend(_shards_of_level(level, tuple(group), ptr, rows, len(shards)))
    return Plan(
        tuple(extents),
        tuple(layouts),
        dict(shard_rows),
        tuple(shards),
        tuple(counts_to_ptr(np.array([e.samples for e in extents], dtype=np.int64)).tolist()),
        tuple(counts_to_ptr(np.array([e.atoms for e in extents], dtype=np.int64)).tolist()),
    )


def _together(
    alike: Mapping[int, Sequence[str]], layouts: Sequence[FieldLayout]
) -> list[tuple[int, list[str]]]:
    """Fields that one task writes, and its rows: fewer tasks, of a bounded size."""
    widths = {layout.name: _row_bytes(layout) for layout in layouts}
    out: list[tuple[int, list[str]]] = []
    for rows in sorted(alike, reverse=True):
        names = list(alike[rows])
        for most, group in out:
            width = sum(widths.get(name, 1) for name in (*group, *names))
            if rows > 0 and most % rows == 0 and most * width <= _TASK_BYTES:
                group += names
                break
        else:
            out.append((rows, names))
    return out


def extent_bytes() -> int:
    """Bytes of what one task reads: all that are under way hold about ``stream_bytes``."""
    return max(1 << 12, int(option("stream_bytes")) // 16)


def plan_samples(
    num_atoms: IntArray,
    num_edges: IntArray,
    layouts: Sequence[FieldLayout],
    config: ZarrWriteConfig,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> Plan:
    """The plan of samples with these counts; the payload of an extent is its range.

    Parameters
    ----------
    num_atoms, num_edges : int64 array, [N]
    layouts : sequence of FieldLayout
    config : ZarrWriteConfig
    ranges : sequence of (start, stop), optional
        Samples of each extent; by default of about ``extent_bytes()``.

    Raises
    ------
    PlanError
        There is no sample.
    """
    width: dict[Level, int] = {"atom": 0, "edge": 0, "system": 16}
    for layout in layouts:
        width[layout.level] += layout.to_info().row_bytes
    # In place: beside the counts nothing here should grow with the number of samples.
    sizes = num_atoms.astype(np.int64)
    sizes *= width["atom"]
    sizes += num_edges * np.int64(width["edge"])
    sizes += width["system"]
    parts = cut_by_bytes(sizes, extent_bytes()) if ranges is None else ranges
    del sizes
    extents = [
        Extent(b - a, _total(num_atoms[a:b]), _total(num_edges[a:b]), (a, b)) for a, b in parts
    ]
    return make_plan(extents, layouts, shard_rows(layouts, config, extents))


def _total(counts: IntArray) -> int:
    return int(counts.sum(dtype=np.int64))


def _shards_of_level(
    level: Level, names: tuple[str, ...], ptr: Ptr, rows: int, first: int
) -> Iterator[ShardTask]:
    total = int(ptr[-1])
    for number, start in enumerate(range(0, total, rows), start=first):
        stop = min(start + rows, total)
        low = int(np.searchsorted(ptr, start, side="right")) - 1
        high = int(np.searchsorted(ptr, stop, side="left"))
        pieces = []
        for extent in range(low, high):
            begin, end = max(start, int(ptr[extent])), min(stop, int(ptr[extent + 1]))
            if end > begin:
                pieces.append(Piece(extent, begin - int(ptr[extent]), end - int(ptr[extent])))
        yield ShardTask(number, level, start, stop, names, tuple(pieces))


def presence(name: str) -> str:
    """Name under which the presence mask of a field travels."""
    return f"present/{name}"


def shard_rows(
    layouts: Sequence[FieldLayout], config: ZarrWriteConfig, extents: Sequence[Extent]
) -> dict[str, int]:
    """Rows of a storage object by name and by level, as the writer will cut them."""
    totals = {level: sum(extent.rows(level) for extent in extents) for level in LEVELS}
    names: dict[str, int] = {}
    levels: dict[str, list[int]] = {level: [1] for level in LEVELS}
    for layout in layouts:
        info = layout.to_info()
        arguments = encoding(
            config,
            info.group,
            info.name,
            info.level,
            info.dtype,
            info.tail,
            is_text=info.is_text,
            total=totals[info.level],
        )
        names[layout.name] = _object_rows(arguments)
        levels[layout.level].append(names[layout.name])
        if layout.holes:
            mask = encoding(
                config,
                "meta",
                f"present/{info.name}",
                "system",
                np.dtype(bool),
                (),
                total=totals["system"],
            )
            names[presence(layout.name)] = _object_rows(mask)
            levels["system"].append(_object_rows(mask))
    return names | {level: math.lcm(*found) for level, found in levels.items()}


def cut_by_bytes(sizes: NDArray, target: int) -> list[tuple[int, int]]:
    """Ranges of consecutive samples that hold about ``target`` bytes, each at least one.

    Examples
    --------
    >>> cut_by_bytes(np.array([3, 3, 3, 20, 1]), 6)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    ranges = []
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + target, side="right")), start + 1)
        ranges.append((start, stop))
        start = stop
    return ranges


def _rows_of(name: str, level: Level, rows: Mapping[str, int]) -> int:
    return rows.get(name, rows[level])


def _object_rows(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get("shards", arguments["chunks"])[0])


def _row_bytes(layout: FieldLayout) -> int:
    if layout.dtype == "str":
        return TEXT_BYTES
    return int(np.dtype(layout.dtype).itemsize * np.prod(layout.tail, dtype=np.int64))


def format_bytes(count: float) -> str:
    """Bytes in words.

    Examples
    --------
    >>> format_bytes(3 * 1024**3)
    '3.0 GiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

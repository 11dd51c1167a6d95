"""What runs on a worker: read an extent, cut it, write a shard.

Each function is pure but for the bytes it writes, and a repeated task writes
the same bytes. What crosses between tasks is flat arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import expand_mask
from alchemi_xr.data.fields import LEVELS, fill_for
from alchemi_xr.errors import FieldError, PlanError
from alchemi_xr.plan.plan import Extent, Plan, ShardTask, presence
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.store.bulk import BulkWriter, FieldLayout

__all__ = [
    "Cut",
    "Loaded",
    "PartResult",
    "PartStats",
    "PlanCore",
    "ReadTask",
    "Reader",
    "cut",
    "load",
    "stats_of",
    "trim",
    "write_shard",
]


_TRIM_BYTES = 32 * 2**20
_written = 0  # by all threads since memory was last given back; need not be exact


@dataclass(slots=True)
class PartResult:
    """What a reader gives for one extent.

    Parameters
    ----------
    block : Block
        Whole samples, as many as the extent says; a rejected one keeps its
        rows (with any values), since the offsets are fixed.
    rejects : list of Reject
        With ``sample`` counted from the extent's first.
    notes : list of str
        Warnings for the report.
    left_out, undecided : int64 array, optional
        Samples that a condition does not keep, and those about which it cannot be
        decided; they keep their rows, too.
    """

    block: Block
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    undecided: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    def kept(self) -> BoolArray:
        """Mask of the samples that go on: neither rejected, nor left out, nor undecided."""
        mask = np.ones(self.block.num_samples, dtype=bool)
        mask[[r.sample for r in self.rejects if r.sample is not None]] = False
        mask[self.left_out] = False
        mask[self.undecided] = False
        return mask


class Reader(Protocol):
    """Reads the samples behind an extent's payload."""

    def __call__(self, payload: Any) -> PartResult: ...


@dataclass(slots=True)
class PartStats:
    """What the report and the journal keep of an extent.

    ``fields`` has, by name, the samples that carry the field and its rows with
    a NaN and with an infinity. ``left_out`` and ``undecided`` are runs of samples
    of the store, (first, how many).
    """

    rejects: list[Reject]
    notes: list[str]
    fields: dict[str, dict[str, int]]
    nonfinite_samples: int
    left_out: list[list[int]] = field(default_factory=list)
    undecided: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Loaded:
    """An extent in the layout of the store."""

    arrays: dict[str, NDArray]
    present: dict[str, BoolArray]
    stats: PartStats

    def __getitem__(self, name: str) -> NDArray:
        if name in self.arrays:
            return self.arrays[name]
        return self.present[name.removeprefix(presence(""))]


@dataclass(frozen=True, slots=True)
class PlanCore:
    """The part of a plan that every reading task needs: the layouts alone."""

    layouts: tuple[FieldLayout, ...]

    @staticmethod
    def of(plan: Plan) -> PlanCore:
        return PlanCore(plan.layouts)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """An extent with its place: its first sample and atom in the store."""

    number: int
    extent: Extent
    sample: int
    atom: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of an extent that one shard takes, of fields and presence masks."""

    names: tuple[str, ...]
    start: int
    stop: int


def load(reader: Reader, plan: PlanCore, source: ReadTask) -> Loaded:
    """Read an extent and bring it into the store's layout."""
    number, extent = source.number, source.extent
    result = reader(extent.payload)
    block = result.block.validate(where=f"partition {number}")
    found = (block.num_samples, block.num_atoms, block.num_edges)
    expected = (extent.samples, extent.atoms, extent.edges)
    if found != expected:
        raise PlanError(
            f"partition {number}",
            "the input does not have the samples, atoms and edges that the scan counted",
            found=found,
            expected=expected,
            mend="do not change the input while it is read; run it again",
        )
    rejects = [_moved(reject, source.sample) for reject in result.rejects]
    skip = ~result.kept()
    stats = PartStats(
        rejects,
        list(result.notes),
        {},
        0,
        _runs(result.left_out, source.sample),
        _runs(result.undecided, source.sample),
    )
    bad = np.zeros(block.num_samples, dtype=bool)
    arrays: dict[str, NDArray] = {}
    present: dict[str, BoolArray] = {}
    for layout in plan.layouts:
        mask = block.has(layout.name) & ~skip
        values = block.arrays.get(layout.name)
        if values is not None:
            stats.fields[layout.name], broken = _count(block, layout, values, mask)
            bad |= broken
        arrays[layout.name] = _conform(block, layout, values, block.has(layout.name), number)
        if layout.holes:
            present[layout.name] = mask
        elif not (mask | skip).all():
            raise FieldError(
                f"partition {number}",
                f"field {layout.name!r} is missing in {int((~(mask | skip)).sum())} samples "
                "although the scan found it in all",
            )
    stats.nonfinite_samples = int(bad.sum())
    pairs = arrays.get("neighbor_list")
    if pairs is not None:
        # On disk the pairs are store-global: local + atoms_ptr of their sample.
        shift = np.repeat(block.atoms_ptr[:-1] + source.atom, np.diff(block.edges_ptr))
        arrays["neighbor_list"] = pairs + shift[:, None].astype(pairs.dtype)
    return Loaded(arrays, present, stats)


def _runs(samples: IntArray, first: int) -> list[list[int]]:
    """Samples as (first, how many), counted from the store's first one."""
    if len(samples) == 0:
        return []
    ends = np.flatnonzero(np.diff(samples) != 1)
    starts = np.concatenate(([0], ends + 1))
    stops = np.concatenate((ends + 1, [len(samples)]))
    return np.column_stack((samples[starts] + first, stops - starts)).tolist()  # type: ignore[no-any-return]


def cut(loaded: Loaded, rows: Cut) -> dict[str, Any]:
    """The rows that one shard takes from an extent."""
    # Views: one keeps its array until the last shard that it touches is written, which
    # is at most one extent more than copies would take (and Plan.memory counts it).
    return {n: loaded[n][rows.start : rows.stop] for n in rows.names}


def write_shard(writer: BulkWriter, task: ShardTask, pieces: Sequence[dict[str, Any]]) -> int:
    """Write one shard of every array of a level; gives its number back."""
    written = 0
    for name in task.names:
        parts = [piece[name] for piece in pieces]
        written += sum(part.nbytes for part in parts)
        if name.startswith(presence("")):
            mask = np.concatenate(parts)
            writer.write_present(name.removeprefix(presence("")), task.start, mask, flush=False)
        else:
            writer.write_parts(name, task.start, parts)
    # Before the journal: after a loss of power it must not speak of bytes that are gone.
    if not writer.defers:
        writer.flush()
    global _written
    _written += written
    if _written >= _TRIM_BYTES:
        # Not each time: what is given back has to be asked for, page by page, again.
        _written = 0
        trim()
    return task.number


def trim() -> None:
    """Give freed memory back to the system, where the C library can.

    Pieces of extents are freed by other threads than those that made them; what
    glibc keeps of them in the arena of each thread would grow with the run.
    """
    call = _malloc_trim()
    if call is not None:
        call(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


def stats_of(loaded: Loaded) -> PartStats:
    """The part of an extent that outlives it."""
    return loaded.stats


def _moved(reject: Reject, base: int) -> Reject:
    sample = None if reject.sample is None else reject.sample + base
    return Reject(
        reject.file, reject.frame, reject.reason, reject.offset, reject.line, reject.field, sample
    )


def _count(
    block: Block, layout: FieldLayout, values: NDArray, mask: BoolArray
) -> tuple[dict[str, int], BoolArray]:
    """Samples with the field, rows with NaN and with infinity, samples with either."""
    out = {"samples": int(mask.sum()), "nan": 0, "inf": 0}
    bad = np.zeros(block.num_samples, dtype=bool)
    # One sum tells whether a look at every value is needed at all.
    if values.dtype.kind != "f" or values.size == 0:
        return out, bad
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(values)):
            return out, bad
    level: Level = layout.level
    rows = mask if level == "system" else expand_mask(mask, block.ptr(level))
    axes = tuple(range(1, values.ndim))
    nan = np.isnan(values).any(axis=axes) & rows
    inf = np.isinf(values).any(axis=axes) & rows
    out["nan"], out["inf"] = int(nan.sum()), int(inf.sum())
    broken = np.flatnonzero(nan | inf)
    bad[np.searchsorted(block.ptr(level), broken, side="right") - 1] = True
    return out, bad


def _conform(
    block: Block, layout: FieldLayout, values: NDArray | None, mask: BoolArray, number: int
) -> NDArray:
    """Values with the dtype and tail of the layout and the fill in the holes."""
    if layout.level not in LEVELS:
        raise FieldError(f"partition {number}", f"unknown level {layout.level!r}")
    text = layout.dtype == "str"
    dtype = np.dtype(object) if text else np.dtype(layout.dtype)
    fill = "" if text else fill_for(dtype)
    rows = block.rows(layout.level)
    if values is None:
        return np.full((rows, *layout.tail), fill, dtype)
    if block.levels[layout.name] != layout.level or values.shape[1:] != tuple(layout.tail):
        raise FieldError(
            f"partition {number}",
            f"field {layout.name!r} does not fit the layout",
            found=f"{block.levels[layout.name]} {list(values.shape)}",
            expected=f"{layout.level} [rows, {', '.join(map(str, layout.tail))}]",
        )
    # What does not fit was rejected by the reading; its rows hold anything.
    with np.errstate(over="ignore", invalid="ignore"):
        out = values.astype(dtype, copy=not mask.all())
    if not mask.all():
        absent = ~mask if layout.level == "system" else ~expand_mask(mask, block.ptr(layout.level))
        out[absent] = fill
    return out

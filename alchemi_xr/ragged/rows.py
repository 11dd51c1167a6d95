"""Which rows of a store a Dataset shows, kept as samples and row ranges.

A selection of samples is remembered as samples, and the rows of a level as
coalesced ranges: nothing here is as long as the atoms or edges chosen, so a
selection costs memory by samples alone and selections compose without
touching a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from alchemi_xr._typing import IntArray, Level, Ptr
from alchemi_xr.data.csr import coalesce, counts_to_ptr

if TYPE_CHECKING:
    from alchemi_xr.store.reader import Snapshot

__all__ = ["RowRanges", "Selection"]


@dataclass(frozen=True, slots=True)
class RowRanges:
    """Logical rows ``0..length`` laid over ranges of physical rows.

    Parameters
    ----------
    starts, stops : int64 array, [R]
        Coalesced, none empty, in logical order.
    ptr : int64 array, [R + 1]
        Logical row at which each range begins.
    """

    starts: IntArray
    stops: IntArray
    ptr: Ptr

    @classmethod
    def of(cls, starts: IntArray, stops: IntArray) -> RowRanges:
        """Ranges as given, neighbours joined and empty ones dropped."""
        starts, stops = coalesce(starts, stops)
        return cls(starts, stops, counts_to_ptr(stops - starts))

    def __len__(self) -> int:
        return int(self.ptr[-1])

    def between(self, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Physical ranges of the logical rows ``start:stop``."""
        if stop <= start:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty
        first = int(np.searchsorted(self.ptr, start, side="right")) - 1
        last = int(np.searchsorted(self.ptr, stop, side="left")) - 1
        starts = self.starts[first : last + 1].copy()
        stops = self.stops[first : last + 1].copy()
        starts[0] += start - self.ptr[first]
        stops[-1] -= self.ptr[last + 1] - stop
        return starts, stops

    def rows(self, index: IntArray) -> IntArray:
        """Physical rows of logical ones, in their order."""
        if len(index) == 0:
            return np.empty(0, dtype=np.int64)
        which = np.searchsorted(self.ptr, index, side="right") - 1
        return self.starts[which] + (index - self.ptr[which])


@dataclass(slots=True)
class Selection:
    """Chosen samples of a snapshot, in order.

    Parameters
    ----------
    snapshot : Snapshot
    samples : int64 array, [M], or slice
        Physical positions; a slice (step 1, resolved) where they are contiguous.
    """

    snapshot: Snapshot
    samples: IntArray | slice
    _ranges: dict[str, RowRanges] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def all(cls, snapshot: Snapshot) -> Selection:
        """Every sample, deleted ones included."""
        return cls(snapshot, slice(0, snapshot.num_samples))

    def __len__(self) -> int:
        if isinstance(self.samples, slice):
            return int(self.samples.stop - self.samples.start)
        return len(self.samples)

    @property
    def index(self) -> IntArray:
        """Physical positions, int64 [M]."""
        if isinstance(self.samples, slice):
            return np.arange(self.samples.start, self.samples.stop, dtype=np.int64)
        return self.samples

    def take(self, positions: IntArray) -> Selection:
        """The samples at these positions of this selection."""
        if len(positions) and (np.diff(positions) == 1).all():
            first, stop = int(positions[0]), int(positions[-1]) + 1
            if isinstance(self.samples, slice):
                start = self.samples.start
                return Selection(self.snapshot, slice(start + first, start + stop))
            return Selection(self.snapshot, self.samples[first:stop])
        if isinstance(self.samples, slice):
            return Selection(self.snapshot, positions + self.samples.start)
        return Selection(self.snapshot, self.samples[positions])

    def counts(self, level: Level) -> IntArray:
        """Rows of each chosen sample at a level, int64 [M]."""
        if level == "system":
            return np.ones(len(self), dtype=np.int64)
        ptr = self._ptr(level)
        if isinstance(self.samples, slice):
            return np.diff(ptr[self.samples.start : self.samples.stop + 1])
        return ptr[self.samples + 1] - ptr[self.samples]

    def ranges(self, level: Level) -> RowRanges:
        """Row ranges at a level, made once."""
        if level not in self._ranges:
            self._ranges[level] = self._make_ranges(level)
        return self._ranges[level]

    def _make_ranges(self, level: Level) -> RowRanges:
        if isinstance(self.samples, slice):
            edge = np.array([self.samples.start, self.samples.stop], dtype=np.int64)
            edge = edge if level == "system" else self._ptr(level)[edge]
            return RowRanges.of(edge[:1], edge[1:])
        if level == "system":
            return RowRanges.of(self.samples, self.samples + 1)
        ptr = self._ptr(level)
        return RowRanges.of(ptr[self.samples], ptr[self.samples + 1])

    def _ptr(self, level: Level) -> Ptr:
        return self.snapshot.atoms_ptr if level == "atom" else self.snapshot.edges_ptr

    def __getstate__(self) -> dict[str, Any]:
        # The ranges are made again where they are needed; a pickle stays small.
        return {"snapshot": self.snapshot, "samples": self.samples, "_ranges": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, value)

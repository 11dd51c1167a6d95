"""Edge bases of stores that nvalchemi-toolkit appended to or defragmented.

On disk ``neighbor_list`` holds store-global atom numbers. That tool's append
leaves them relative to the batch that was appended, and its defragment leaves
the numbers of before. The base of each sample is found where the numbers prove
it, and reported where they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, NDArray, Ptr

__all__ = ["EdgeBases", "find_bases"]

# Edges looked at in one go; bounds the memory of the check.
_ROWS = 1 << 20


@dataclass(frozen=True)
class EdgeBases:
    """What must be subtracted from each sample's edges.

    Parameters
    ----------
    bases : int64 array, [N]
        Equal to ``atoms_ptr[:-1]`` where nothing is wrong.
    unknown : int64 array
        Samples whose base cannot be proven.
    """

    bases: IntArray
    unknown: IntArray

    def moved(self, atoms_ptr: Ptr) -> IntArray:
        """Samples whose edges do not have the right base on disk."""
        return np.flatnonzero(self.bases != atoms_ptr[:-1]).astype(np.int64)


def find_bases(
    atoms_ptr: Ptr,
    edges_ptr: Ptr,
    active: BoolArray,
    read_edges: Callable[[int, int], NDArray],
    *,
    foreign_samples: int,
) -> EdgeBases:
    """The base of every sample's edges.

    A sample is right as it is when all its numbers fall in its own atoms. Else,
    when they span its whole length there is one base only. Else the base is one
    that an append could have left, ``atoms_ptr[i] - atoms_ptr[first]``, if
    exactly one of these fits. In a store with a wrong sample, one that fits
    both as it is and otherwise is not trusted either.

    Parameters
    ----------
    atoms_ptr, edges_ptr : int64 array, [N + 1]
    active : bool array, [N]
        Deleted samples are passed over (their edges may have been zeroed).
    read_edges : callable
        ``(start, stop) -> [stop - start, 2]`` as on disk.
    foreign_samples : int
        Only the first so many samples are tested.
    """
    num = min(foreign_samples, len(atoms_ptr) - 1)
    bases = atoms_ptr[:-1].astype(np.int64, copy=True)
    low, high = _ranges(edges_ptr, num, read_edges)
    ptr, counts = atoms_ptr[:num], np.diff(atoms_ptr[: num + 1])
    tested = (np.diff(edges_ptr[: num + 1]) > 0) & active[:num]
    right = (low >= ptr) & (high < ptr + counts)
    whole = high - low + 1 == counts
    # ptr[i] - ptr[first] must lie in (high - counts, low], so ptr[first] in:
    least, most = ptr - low, ptr - (high - counts) - 1
    first = np.searchsorted(ptr, least, side="left")
    last = np.minimum(np.searchsorted(ptr, most, side="right"), np.arange(num) + 1)
    # Equal ptr (samples without atoms) give the same base.
    steps = np.concatenate(([0], np.cumsum(np.diff(ptr) > 0))) if num else np.zeros(0, np.int64)
    safe_first, safe_last = np.minimum(first, max(num - 1, 0)), np.maximum(last - 1, 0)
    options = np.where(last > first, steps[safe_last] - steps[safe_first] + 1, 0) if num else steps
    wrong = tested & ~right
    if not wrong.any():
        return EdgeBases(bases, np.empty(0, np.int64))
    impossible = wrong & (high - low + 1 > counts)
    proven = wrong & whole
    single = wrong & ~whole & ~impossible & (options == 1)
    bases[:num][proven] = low[proven]
    bases[:num][single] = (ptr - ptr[safe_first])[single]
    unsure = tested & right & ~whole & (options > 1)
    unsure[: int(np.flatnonzero(wrong)[0])] = False
    unknown = (wrong & ~proven & ~single) | unsure
    return EdgeBases(bases, np.flatnonzero(unknown).astype(np.int64))


def _ranges(
    edges_ptr: Ptr, num: int, read_edges: Callable[[int, int], NDArray]
) -> tuple[IntArray, IntArray]:
    """Least and greatest atom number of each sample's edges (0, -1 without edges)."""
    low, high = np.zeros(num, np.int64), np.full(num, -1, np.int64)
    start = 0
    while start < num:
        stop = int(np.searchsorted(edges_ptr, edges_ptr[start] + _ROWS, side="right")) - 1
        stop = min(max(stop, start + 1), num)
        begin, end = int(edges_ptr[start]), int(edges_ptr[stop])
        if end > begin:
            pairs = read_edges(begin, end).astype(np.int64, copy=False)
            some = np.flatnonzero(np.diff(edges_ptr[start : stop + 1]) > 0)
            # Only samples with edges, so that no segment of reduceat is empty.
            offsets = edges_ptr[start:stop][some] - begin
            low[start + some] = np.minimum.reduceat(pairs.min(axis=1), offsets)
            high[start + some] = np.maximum.reduceat(pairs.max(axis=1), offsets)
        start = stop
    return low, high

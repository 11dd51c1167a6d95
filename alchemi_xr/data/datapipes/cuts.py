"""Which rows a request takes from which piece of an array."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.data.csr import counts_to_ptr

__all__ = ["Cut", "plan_cuts"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges of rows that a request takes from one piece of an array.

    Parameters
    ----------
    piece : int
        Rows ``piece * size`` to ``(piece + 1) * size`` of the array.
    starts, stops : int64 arrays
        Within the piece.
    targets : int64 array
        First row of each in the result.
    """

    piece: int
    starts: IntArray
    stops: IntArray
    targets: IntArray


def plan_cuts(starts: IntArray, stops: IntArray, targets: IntArray, size: int) -> list[Cut]:
    """What ranges of rows take from each piece of ``size`` rows, each piece once.

    Parameters
    ----------
    starts, stops : int64 arrays, [B]
        Rows of each sample.
    targets : int64 array, [B]
        Where they go in the result.
    size : int

    Examples
    --------
    >>> cuts = plan_cuts(np.array([9, 3]), np.array([10, 6]), np.array([0, 1]), 4)
    >>> [(c.piece, c.starts.tolist(), c.stops.tolist(), c.targets.tolist()) for c in cuts]
    [(0, [3], [4], [1]), (1, [0], [2], [2]), (2, [1], [2], [0])]
    """
    first, last = starts // size, (stops - 1) // size
    parts = np.where(stops > starts, last - first + 1, 0)
    if not parts.any():
        return []
    if (parts == 1).all():
        owner, piece = np.arange(len(starts)), first
    else:
        owner = np.repeat(np.arange(len(starts)), parts)
        begins = counts_to_ptr(parts)[:-1]
        piece = first[owner] + np.arange(len(owner)) - begins[owner]
    low = np.maximum(starts[owner], piece * size)
    high = np.minimum(stops[owner], (piece + 1) * size)
    place = targets[owner] + low - starts[owner]
    if (np.diff(piece) < 0).any():
        order = np.argsort(piece, kind="stable")
        piece, low, high, place = piece[order], low[order], high[order], place[order]
    bounds = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(piece)]
    return [
        Cut(number, low[a:b] - number * size, high[a:b] - number * size, place[a:b])
        for a, b in pairwise(bounds)
        for number in (int(piece[a]),)
    ]

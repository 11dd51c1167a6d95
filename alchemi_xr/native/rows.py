"""Ranges of rows of an array, copied one behind the other."""

from __future__ import annotations

import numpy as np

from alchemi_xr._typing import IntArray, NDArray

try:
    from alchemi_xr.native import _rows
except ImportError:  # no compiler at installation
    _rows = None  # type: ignore[assignment]

__all__ = ["copy_ranges"]


def copy_ranges(source: NDArray, starts: IntArray, stops: IntArray, out: NDArray) -> NDArray:
    """Rows ``[starts[i], stops[i])`` of ``source`` for every i, one behind the other.

    Parameters
    ----------
    source : array, shape (rows, ...)
        Contiguous in C order.
    starts, stops : int64 arrays, shape (n,)
        ``0 <= starts <= stops <= len(source)``.
    out : array, shape (sum of the lengths, ...)
        Filled and returned; same dtype and trailing shape as ``source``.

    Raises
    ------
    ValueError
        A range leaves the source, or ``out`` is not of the right form.

    Examples
    --------
    >>> out = np.empty(3, int)
    >>> copy_ranges(np.arange(10), np.array([7, 0]), np.array([9, 1]), out)
    array([7, 8, 0])
    """
    starts = np.ascontiguousarray(starts, np.int64)
    stops = np.ascontiguousarray(stops, np.int64)
    rows = int((stops - starts).sum())
    if len(starts) and (
        starts.min() < 0 or stops.max() > len(source) or bool((stops < starts).any())
    ):
        raise ValueError(f"ranges leave the {len(source)} rows of the source")
    if out.shape != (rows, *source.shape[1:]) or out.dtype != source.dtype:
        raise ValueError(
            f"out is {out.dtype} {out.shape}, the rows are {source.dtype} "
            f"{(rows, *source.shape[1:])}"
        )
    if not (out.flags.c_contiguous and source.flags.c_contiguous and out.flags.writeable):
        raise ValueError("source and out must be contiguous, and out writable")
    if rows == 0:
        return out
    if _rows is None or source.dtype.hasobject:
        pieces = [source[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        return np.concatenate(pieces, out=out)
    width = source.nbytes // len(source)
    _rows.copy_ranges(
        out.ctypes.data, source.ctypes.data, starts.ctypes.data, stops.ctypes.data,
        len(starts), width,
    )  # fmt: skip
    return out

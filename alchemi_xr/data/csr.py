"""Pointer algebra of ragged (CSR) arrays, in NumPy.

``ptr`` is int64 [N+1], cumulative and starting at 0 unless said otherwise;
sample ``i`` owns the rows ``ptr[i]:ptr[i + 1]``. Everything here is vectorised
over samples and right for samples without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, NDArray, Ptr
from alchemi_xr.errors import FieldError, IndexRangeError

__all__ = [
    "as_index",
    "coalesce",
    "counts_to_ptr",
    "expand_mask",
    "ptr_to_index",
    "row_indices",
    "take_rows",
    "validate_ptr",
]


def counts_to_ptr(counts: NDArray) -> Ptr:
    """Pointer from counts.

    Examples
    --------
    >>> counts_to_ptr(np.array([2, 0, 3]))
    array([0, 2, 2, 5])
    """
    ptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=ptr[1:])
    return ptr


def ptr_to_index(ptr: Ptr) -> IntArray:
    """Sample of every row, int64 [V].

    Examples
    --------
    >>> ptr_to_index(np.array([0, 2, 2, 5]))
    array([0, 0, 2, 2, 2])
    """
    return np.repeat(np.arange(len(ptr) - 1, dtype=np.int64), np.diff(ptr))


def validate_ptr(ptr: NDArray, *, rows: int | None = None, where: str = "ptr") -> None:
    """Raise unless ``ptr`` starts at 0, never falls and ends at ``rows``.

    Raises
    ------
    FieldError
    """
    if ptr.ndim != 1 or len(ptr) == 0 or ptr.dtype.kind not in "iu":
        raise FieldError(
            where,
            "a ptr is a whole-number array [N + 1]",
            found=f"{ptr.dtype} {list(ptr.shape)}",
        )
    if ptr[0] != 0:
        raise FieldError(where, "the first ptr is not 0", found=int(ptr[0]), expected=0)
    falls = np.flatnonzero(np.diff(ptr) < 0)
    if falls.size:
        raise FieldError(
            where,
            f"the ptr falls at sample {falls[0]}",
            found=f"{int(ptr[falls[0]])} then {int(ptr[falls[0] + 1])}",
            expected="no fall",
        )
    if rows is not None and ptr[-1] != rows:
        raise FieldError(
            where, "the ptr does not end at the rows", found=int(ptr[-1]), expected=rows
        )


def row_indices(ptr: Ptr, samples: IntArray) -> tuple[IntArray, Ptr]:
    """Rows of the chosen samples, one after the other, and their new pointer.

    Parameters
    ----------
    ptr : int64 array, [N + 1]
    samples : int64 array, [M]
        In range, any order, repeats allowed.

    Returns
    -------
    rows : int64 array, [sum of counts]
    new_ptr : int64 array, [M + 1]

    Examples
    --------
    >>> row_indices(np.array([0, 2, 2, 5]), np.array([2, 0]))
    (array([2, 3, 4, 0, 1]), array([0, 3, 5]))
    """
    starts = ptr[samples]
    counts = ptr[samples + 1] - starts
    new = counts_to_ptr(counts)
    rows = np.repeat(starts - new[:-1], counts)
    rows += np.arange(new[-1], dtype=np.int64)
    return rows, new


def take_rows(values: NDArray, ptr: Ptr, samples: IntArray) -> tuple[NDArray, Ptr]:
    """Rows of the chosen samples out of a flat array, and their new pointer."""
    rows, new = row_indices(ptr, samples)
    return values[rows], new


def coalesce(starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
    """Neighbouring half-open ranges joined; empty ones dropped, order kept.

    Examples
    --------
    >>> coalesce(np.array([0, 3, 9]), np.array([3, 5, 10]))
    (array([0, 9]), array([ 5, 10]))
    """
    full = stops > starts
    starts, stops = starts[full], stops[full]
    if len(starts) == 0:
        return starts, stops
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    first = np.concatenate(([0], breaks + 1))
    last = np.concatenate((breaks, [len(starts) - 1]))
    return starts[first], stops[last]


def expand_mask(mask: BoolArray, ptr: Ptr) -> BoolArray:
    """A mask over samples as one over their rows.

    Examples
    --------
    >>> expand_mask(np.array([True, False]), np.array([0, 1, 3]))
    array([ True, False, False])
    """
    return np.repeat(mask, np.diff(ptr))


def as_index(selection: Any, length: int, *, where: str = "index") -> IntArray:
    """Any way to choose samples, as int64 positions in ``[0, length)``.

    Accepts an int, a slice, a sequence or array of ints (negatives and repeats
    allowed) or of bools (a mask of the full length; a list of bools too).

    Raises
    ------
    IndexRangeError
        Out of range, a mask of the wrong length, or no whole numbers.
    """
    if isinstance(selection, slice):
        return np.arange(*selection.indices(length), dtype=np.int64)
    if isinstance(selection, (int, np.integer)) and not isinstance(selection, (bool, np.bool_)):
        selection = [selection]
    if hasattr(selection, "detach"):  # a torch tensor, without importing torch
        selection = selection.detach().cpu().numpy()
    elif isinstance(selection, (Sequence, range)) and not isinstance(selection, str):
        selection = np.asarray(list(selection)) if len(selection) else np.empty(0, np.int64)
    index = np.asarray(selection)
    if index.dtype.kind == "b":
        if index.shape != (length,):
            raise IndexRangeError(
                where,
                "a mask needs one entry per sample",
                found=list(index.shape),
                expected=[length],
            )
        return np.flatnonzero(index).astype(np.int64)
    if index.dtype.kind not in "iu":
        raise IndexRangeError(
            where, "Unsupported index type: must be integer or bool", found=str(index.dtype)
        )
    index = index.astype(np.int64, copy=False).reshape(-1)
    if len(index) and index.min() >= 0 and index.max() < length:
        return index  # nothing negative, nothing to be said
    bad = (index < -length) | (index >= length)
    if bad.any():
        raise IndexRangeError(
            where,
            f"index {int(index[bad][0])} is out of range",
            expected=f"-{length} to {length - 1}" if length else "no sample",
        )
    return np.where(index < 0, index + length, index)

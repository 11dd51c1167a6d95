"""Rows of arrays copied in ranges, and files mapped as the rows they hold."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray, Ptr

try:
    from alchemi_xr.native import _rows
except ImportError:  # no compiler at installation
    _rows = None  # type: ignore[assignment]

__all__ = ["Field", "Gather", "copy_ranges", "map_files"]


def copy_ranges(
    source: NDArray, starts: IntArray, stops: IntArray, out: NDArray, targets: IntArray
) -> None:
    """Rows ``[starts[i], stops[i])`` of ``source`` to the rows of ``out`` from ``targets[i]`` on.

    Parameters
    ----------
    source : array, shape (rows, ...)
        Contiguous in C order.
    starts, stops : int64 arrays, shape (n,)
        ``0 <= starts <= stops <= len(source)``.
    out : array, shape (more rows, ...)
        Contiguous; same dtype and trailing shape as ``source``.
    targets : int64 array, shape (n,)

    Raises
    ------
    ValueError
        A range leaves the source or the target, or ``out`` is not of the right form.

    Examples
    --------
    >>> out = np.zeros(4, int)
    >>> copy_ranges(np.arange(10), np.array([7, 1]), np.array([9, 2]), out, np.array([2, 0]))
    >>> out
    array([1, 0, 7, 8])
    """
    starts = np.ascontiguousarray(starts, np.int64)
    stops = np.ascontiguousarray(stops, np.int64)
    targets = np.ascontiguousarray(targets, np.int64)
    if out.shape[1:] != source.shape[1:] or out.dtype != source.dtype:
        raise ValueError(f"out is {out.dtype} {out.shape}, the rows {source.dtype} {source.shape}")
    if not (out.flags.c_contiguous and source.flags.c_contiguous and out.flags.writeable):
        raise ValueError("source and out must be contiguous, and out writable")
    if not len(starts) == len(stops) == len(targets):
        raise ValueError("starts, stops and targets differ in length")
    if len(starts) == 0:
        return
    width = source.dtype.itemsize * math.prod(source.shape[1:])
    if _rows is not None and source.dtype.kind in "biufc":
        if width == 0 or _rows.copy_ranges(out, source, starts, stops, targets, width):
            return
    else:
        counts = stops - starts
        if (
            starts.min() >= 0
            and counts.min() >= 0
            and stops.max() <= len(source)
            and targets.min() >= 0
            and (targets + counts).max() <= len(out)
        ):
            for first, last, place in zip(
                starts.tolist(), stops.tolist(), targets.tolist(), strict=True
            ):
                out[place : place + last - first] = source[first:last]
            return
    raise ValueError(
        f"ranges leave the {len(source)} rows of the source or the {len(out)} of the target"
    )


def _address(array: NDArray) -> int:
    # A quarter of what ``array.ctypes.data`` costs, and asked for with every batch.
    return int(array.__array_interface__["data"][0])


class Field:
    """Rows of all samples of one field, contiguous in memory (or in mapped files).

    Parameters
    ----------
    rows : array, shape (V or E or N, ...)
        In C order; no objects.
    ptr : int64 array, shape (N + 1,), optional
        Rows of each sample; None for one row a sample.
    shifted : bool
        Numbers get one added that differs by sample; int32 or int64 only.
    """

    __slots__ = ("ptr", "rows", "shifted", "width")

    def __init__(self, rows: NDArray, ptr: Ptr | None = None, *, shifted: bool = False) -> None:
        if not rows.flags.c_contiguous or rows.dtype.hasobject:
            raise ValueError("rows must be contiguous and hold no objects")
        if shifted and (rows.dtype.kind != "i" or rows.dtype.itemsize not in (4, 8)):
            raise ValueError(f"only int32 and int64 are shifted, not {rows.dtype}")
        if ptr is not None and (ptr.dtype != np.int64 or not ptr.flags.c_contiguous):
            raise ValueError("a pointer is a contiguous int64 array")
        if ptr is not None and len(ptr) and not (ptr[0] >= 0 and ptr[-1] <= len(rows)):
            raise ValueError("the pointer leaves the rows")
        self.rows, self.ptr, self.shifted = rows, ptr, shifted
        self.width = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))


class Gather:
    """Rows of chosen samples of several fields, copied in one call.

    Pointers have to ascend (a snapshot's were checked when it was opened): that
    is not looked at again for every batch.

    Parameters
    ----------
    fields : sequence of Field
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = list(fields)
        table = np.zeros((len(self.fields), 7), np.uint64)
        for line, field in zip(table, self.fields, strict=True):
            line[1] = field.rows.ctypes.data
            line[2] = 0 if field.ptr is None else field.ptr.ctypes.data
            line[4], line[5] = field.width, field.rows.dtype.itemsize
        self._table = table

    def __call__(
        self,
        samples: IntArray,
        counts: Sequence[int],
        shift: IntArray | None = None,
        *,
        slot: int = 0,
        empty: Callable[[tuple[int, ...], np.dtype[Any]], NDArray] = np.empty,
    ) -> list[NDArray]:
        """Arrays of their own, one a field.

        Parameters
        ----------
        samples : int64 array, shape (B,)
            In range; any order, repeats allowed.
        counts : sequence of int
            Rows of each field's result.
        shift : int64 array, shape (B,), optional
            What is added to the numbers of fields that are shifted.
        slot : int
            Rows that each sample has in the result of a ragged field, those behind
            its own being zero; 0 for no more than it has. No sample may have more.
        empty : callable
            Gives the memory of the results, from shape and dtype.
        """
        outs: list[NDArray] = [
            empty((count, *field.rows.shape[1:]), field.rows.dtype)
            for field, count in zip(self.fields, counts, strict=True)
        ]
        if _rows is None:
            for field, out in zip(self.fields, outs, strict=True):
                _gather_slowly(field, samples, shift, out, slot)
            return outs
        samples = np.ascontiguousarray(samples, np.int64)
        table = self._table.copy()
        table[:, 0] = [_address(out) for out in outs]
        if shift is not None:
            shift = np.ascontiguousarray(shift, np.int64)
            table[[field.shifted for field in self.fields], 3] = _address(shift)
        if slot:
            table[:, 6] = slot * table[:, 4]
        _rows.gather(_address(table), len(table), _address(samples), len(samples))
        return outs


def _gather_slowly(
    field: Field, samples: IntArray, shift: IntArray | None, out: NDArray, slot: int
) -> None:
    if field.ptr is None:
        np.take(field.rows, samples, axis=0, out=out)
        return
    starts, stops = field.ptr[samples], field.ptr[samples + 1]
    pieces = [field.rows[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    if slot:
        out[...] = 0
        for place, piece in enumerate(pieces):
            out[place * slot : place * slot + len(piece)] = piece
        return
    if pieces:
        np.concatenate(pieces, out=out)
    if field.shifted and shift is not None:
        added = np.repeat(shift, stops - starts).astype(out.dtype)
        out += added.reshape(-1, *(1,) * (out.ndim - 1))


def map_files(paths: Sequence[str], piece: int, length: int) -> NDArray | None:
    """Bytes of files that stand for one array, each ``piece`` of them, read-only.

    Nothing is read: pages come from the system's cache when they are touched.
    A file that is removed or replaced meanwhile stays as it was for this map.

    Parameters
    ----------
    paths : sequence of str
    piece : int
        Bytes of a file; a multiple of the page size unless there is only one.
    length : int
        Bytes in all; the last file gives what is left.

    Returns
    -------
    uint8 array, shape (length,), or None
        None where files cannot be mapped in this way.

    Raises
    ------
    OSError
        A file cannot be opened.
    EOFError
        A file is shorter than its piece; its number is the first argument.
    """
    import mmap

    if _rows is None or length < 1 or (len(paths) > 1 and piece % mmap.PAGESIZE):
        return None
    try:
        held: Any = _rows.map_files([os.fsencode(path) for path in paths], piece, length)
    except NotImplementedError:
        return None
    except ValueError as error:
        raise EOFError(*error.args) from None
    return np.frombuffer(held, np.uint8)

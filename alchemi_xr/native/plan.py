"""A gather of many fields that is planned once, for lists of samples in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray, Ptr

try:
    from alchemi_xr.native import _rows
except ImportError:  # no compiler at installation
    _rows = None  # type: ignore[assignment]

__all__ = ["Line", "Plan"]

_COPY, _SHIFT, _WIDEN, _NARROW = range(4)
_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


class Line:
    """One field of a plan: where its rows lie, and what becomes of them.

    Parameters
    ----------
    rows : array, shape (rows of the level, ...)
        In C order; no objects.
    level : int
        Number of its pointer; -1 for one row a sample.
    shifted : bool
        Its numbers name rows of pointer 0 and are made those of the result;
        int32 or int64 only.
    dtype : dtype, optional
        Of the result: another float for float32 and float64.

    Raises
    ------
    ValueError
        Objects, no C order, or a dtype that is not shifted or cast.
    """

    __slots__ = ("dtype", "how", "level", "rows", "tail", "wide", "width")

    def __init__(
        self, rows: NDArray, level: int, *, shifted: bool = False, dtype: Any = None
    ) -> None:
        self.dtype = rows.dtype if dtype is None else np.dtype(dtype)
        if not rows.flags.c_contiguous or rows.dtype.hasobject:
            raise ValueError("rows must be contiguous and hold no objects")
        if shifted and (rows.dtype.kind != "i" or rows.dtype.itemsize not in (4, 8) or level < 0):
            raise ValueError(f"only ragged int32 and int64 are shifted, not {rows.dtype}")
        self.how = _SHIFT if shifted else _COPY
        if self.dtype != rows.dtype:
            if {self.dtype, rows.dtype} != {_SINGLE, _DOUBLE} or shifted:
                raise ValueError(f"{rows.dtype} is not cast to {self.dtype} here")
            self.how = _WIDEN if rows.dtype == _SINGLE else _NARROW
        if self.how != _COPY and not (rows.dtype.isnative and rows.flags.aligned):
            raise ValueError("numbers that are changed must be native and aligned")
        self.rows, self.level, self.tail = rows, level, rows.shape[1:]
        numbers = int(np.prod(self.tail, dtype=np.int64))
        self.width, self.wide = numbers * rows.dtype.itemsize, numbers * self.dtype.itemsize


class Plan:
    """Rows of lists of samples, of several fields, in two calls without the GIL.

    Parameters
    ----------
    lines : sequence of Line
    pointers : sequence of int64 array, [N + 1]
        At least one; number 0 is that of the atoms.
    active : int64 array, optional
        The stored sample of each that is counted; by default all.

    Raises
    ------
    ValueError
        The pointers differ in length or descend, or leave the rows of a line.
    """

    def __init__(
        self, lines: Sequence[Line], pointers: Sequence[Ptr], active: IntArray | None = None
    ) -> None:
        self.lines = list(lines)
        self.pointers = [np.ascontiguousarray(ptr, np.int64) for ptr in pointers]
        self.active = None if active is None else np.ascontiguousarray(active, np.int64)
        stored = len(self.pointers[0]) - 1
        for ptr in self.pointers:
            if len(ptr) != stored + 1 or ptr[0] < 0 or bool((np.diff(ptr) < 0).any()):
                raise ValueError("pointers differ in length, or do not ascend from 0")
        for line in self.lines:
            most = stored if line.level < 0 else int(self.pointers[line.level][-1])
            if most > len(line.rows):
                raise ValueError(f"the pointer leaves the {len(line.rows)} rows of a field")
        self._length = stored if self.active is None else len(self.active)
        # Buffers of what is empty, or no plain number (bool, complex), are bytes as well.
        self._plan = None if _rows is None else _rows.Plan(
            [
                (_bytes(x.rows), x.level, x.width, x.wide, x.rows.dtype.itemsize, x.how)
                for x in self.lines
            ],
            self.pointers,
            self.active,
        )  # fmt: skip

    def measure(self, samples: IntArray, bounds: IntArray) -> tuple[IntArray, list[int]] | None:
        """What lists of samples will take.

        Parameters
        ----------
        samples : int64 array, [n]
            Contiguous; negatives count from the end.
        bounds : int64 array, [lists + 1]
            Of each list in ``samples``, from 0 to n.

        Returns
        -------
        scratch : int64 array
            For ``fill`` and ``pointer``.
        rows : list of int, [pointers * lists]
            Rows of each list, those of the first pointer first.

        None when an index is out of range.
        """
        lists = len(bounds) - 1
        scratch = np.empty(len(samples) + len(self.pointers) * (len(samples) + lists), np.int64)
        if self._plan is not None:
            rows = self._plan.measure(samples, bounds, scratch)
            return None if rows is None else (scratch, rows)
        stored = np.where(samples < 0, samples + self._length, samples)
        if len(stored) and not (stored.min() >= 0 and stored.max() < self._length):
            return None
        if self.active is not None:
            stored = self.active[stored]
        scratch[: len(stored)] = stored
        found = []
        for number, ptr in enumerate(self.pointers):
            for place in range(lists):
                chosen = stored[bounds[place] : bounds[place + 1]]
                out = self.pointer(scratch, bounds, number, place)
                out[0] = 0
                np.cumsum(ptr[chosen + 1] - ptr[chosen], out=out[1:])
                found.append(int(out[-1]))
        return scratch, found

    def pointer(self, scratch: IntArray, bounds: IntArray, number: int, place: int) -> Ptr:
        """Pointer ``number`` of list ``place``, int64 [samples of the list + 1], a view."""
        lists, n = len(bounds) - 1, int(bounds[-1])
        start = n + number * (n + lists) + int(bounds[place]) + place
        return scratch[start : start + int(bounds[place + 1] - bounds[place]) + 1]

    def fill(
        self, scratch: IntArray, bounds: IntArray, outs: list[NDArray], *, local: bool = False
    ) -> None:
        """Write the rows of all lists, one behind the other.

        Parameters
        ----------
        scratch, bounds
            Of ``measure``.
        outs : list of array
            One a line, contiguous.
        local : bool
            Numbers that are shifted become those of their sample, not of their list.
        """
        if self._plan is not None:
            self._plan.fill(scratch, bounds, outs, local)
            return
        n = int(bounds[-1])
        stored = scratch[:n]
        firsts = np.concatenate(
            [scratch[:0]]
            + [self.pointer(scratch, bounds, 0, k)[:-1] for k in range(len(bounds) - 1)]
        )
        atoms = self.pointers[0]
        for line, out in zip(self.lines, outs, strict=True):
            if line.level < 0:
                out[...] = line.rows[stored]
                continue
            ptr = self.pointers[line.level]
            counts = ptr[stored + 1] - ptr[stored]
            for start, stop, place in zip(
                ptr[stored].tolist(),
                ptr[stored + 1].tolist(),
                (np.cumsum(counts) - counts).tolist(),
                strict=True,
            ):
                out[place : place + stop - start] = line.rows[start:stop]
            if line.how == _SHIFT:
                added = np.repeat((0 if local else firsts) - atoms[stored], counts)
                out += added.astype(out.dtype).reshape(-1, *(1,) * (out.ndim - 1))


def _bytes(rows: NDArray) -> NDArray:
    return rows.reshape(-1).view(np.uint8) if rows.size else np.empty(0, np.uint8)

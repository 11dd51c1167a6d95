"""Batches straight out of rows in memory: what a Batch needs, and nothing twice.

Most of the time of a small batch was once Python around a copy of 20 µs. Here all
that does not hang on the samples is made once; a window of several batches is one
gather, and each batch is views of it, edges numbered for it while they are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray, Ptr
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.collate import Flat
from alchemi_xr.data.datapipes.pool import BufferPool
from alchemi_xr.data.datapipes.validate import cast_floats
from alchemi_xr.data.fields import field_order
from alchemi_xr.data.level import DEFAULT_FIELDS, PLAIN_DTYPES, LevelRows
from alchemi_xr.native.plan import Line, Plan

__all__ = ["WindowPlan", "plan_windows"]

_CPU = torch.device("cpu")
_ONE = np.array([0, 1], np.int64)
#: Number of a level's pointer; the last place of a list of sizes for systems.
_NUMBERS: dict[Level, int] = {"atom": 0, "edge": 1, "system": -1}
_CASTS = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def plan_windows(
    rows: Mapping[str, NDArray],
    levels: Mapping[str, Level],
    atoms_ptr: Ptr,
    edges_ptr: Ptr,
    *,
    active: IntArray | None = None,
    present: Mapping[str, BoolArray] | None = None,
    units: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    pool: BufferPool | None = None,
) -> WindowPlan | None:
    """A plan for fields in memory, or None where one of them needs more than copies.

    Parameters
    ----------
    rows : dict of str to array, [V, ...], [E, ...] or [N, ...]
        ``neighbor_list`` holds atoms of all samples, not of each.
    levels : dict of str to level
    atoms_ptr, edges_ptr : int64 array, [N + 1]
    active : int64 array, optional
        Stored samples in the order they are counted in; by default all.
    present : dict of str to bool array, [N], optional
        Of fields that not every sample has.
    units : dict of str to str, optional
    dtype : torch.dtype, optional
        Floats come in it: float32 and float64 are cast while they are copied.
    pool : BufferPool, optional
    """
    target = None if dtype is None else _CASTS.get(dtype)
    lines = []
    names = field_order(rows)
    for name in names:
        values = rows[name]
        shifted = name == "neighbor_list"
        if values.dtype not in PLAIN_DTYPES or not values.flags.c_contiguous:
            return None
        if present and name in present and name in DEFAULT_FIELDS:
            return None
        if shifted and (values.dtype.kind != "i" or values.dtype.itemsize < 4):
            return None
        cast = target if target is not None and values.dtype in _CASTS.values() else None
        if cast is not None and cast != values.dtype and not values.flags.aligned:
            return None
        lines.append(Line(values, _NUMBERS[levels[name]], shifted=shifted, dtype=cast))
    # Rare floats are cast by torch, batch by batch.
    late = dtype is not None and any(
        line.dtype.kind == "f" and (target is None or line.dtype != target) for line in lines
    )
    return WindowPlan(
        names,
        Plan(lines, [atoms_ptr, edges_ptr], active),
        {name: levels[name] for name in names},
        {name: mask for name, mask in (present or {}).items() if name in rows},
        {name: unit for name, unit in (units or {}).items() if name in rows},
        BufferPool() if pool is None else pool,
        dtype if late else None,
    )


class WindowPlan:
    """Makes the batches of a window; see ``plan_windows``."""

    def __init__(
        self,
        names: Sequence[str],
        plan: Plan,
        levels: dict[str, Level],
        present: dict[str, BoolArray],
        units: dict[str, str],
        pool: BufferPool,
        cast: torch.dtype | None = None,
    ) -> None:
        self._plan, self._pool, self._cast = plan, pool, cast
        self._levels, self._present, self._units = levels, present, units
        self._lines = [(line.level, line.tail, line.dtype) for line in plan.lines]
        self._fields = [(name, line.level) for name, line in zip(names, plan.lines, strict=True)]

    def __call__(self, samples: IntArray, bounds: IntArray) -> list[Batch] | None:
        """One Batch a list on the CPU, or None when an index is out of range.

        Parameters
        ----------
        samples : int64 array, [n]
            Contiguous; negatives count from the end.
        bounds : int64 array, [lists + 1]
            Of the lists in ``samples``.
        """
        measured = self._plan.measure(samples, bounds)
        if measured is None:
            return None
        scratch, rows = measured
        num, lists = len(samples), len(bounds) - 1
        totals = (sum(rows[:lists]), sum(rows[lists:]), num)
        empty = self._pool.empty
        outs = [empty((totals[level], *tail), dtype) for level, tail, dtype in self._lines]
        self._plan.fill(scratch, bounds, outs)
        from_numpy = torch.from_numpy
        if lists == 1:
            fields = {
                name: from_numpy(out) for (name, _), out in zip(self._fields, outs, strict=True)
            }
            ptrs = scratch[num : 2 * num + 1], scratch[2 * num + 1 :]
            return [self._batch(fields, scratch[:num], *ptrs, totals)]
        columns = [
            (name, level, out) for (name, level), out in zip(self._fields, outs, strict=True)
        ]
        batches, at = [], bounds.tolist()
        first, starts = 0, (0, 0, 0)
        for place in range(lists):
            last = at[place + 1]
            sizes = rows[place], rows[lists + place], last - first
            stops = starts[0] + sizes[0], starts[1] + sizes[1], last
            # A tensor each: views of one would share what autograd counts.
            fields = {
                name: from_numpy(out[starts[level] : stops[level]]) for name, level, out in columns
            }
            begin, end = num + first + place, num + last + place + 1
            skip = num + lists
            batches.append(
                self._batch(
                    fields,
                    scratch[first:last],
                    scratch[begin:end],
                    scratch[begin + skip : end + skip],
                    sizes,
                )
            )
            first, starts = last, stops
        return batches

    def sample(self, index: int) -> dict[str, torch.Tensor] | None:
        """Tensors of one sample by field, edges its own; None when it is out of range."""
        bounds = _ONE
        measured = self._plan.measure(np.array([index], np.int64), bounds)
        if measured is None:
            return None
        scratch, rows = measured
        sizes = (*rows, 1)
        outs = [np.empty((sizes[level], *tail), dtype) for level, tail, dtype in self._lines]
        self._plan.fill(scratch, bounds, outs, local=True)
        return {
            name: torch.from_numpy(out)
            for (name, _), out in zip(self._fields, outs, strict=True)
            if name not in self._present or self._present[name][scratch[0]]
        }

    def _batch(
        self,
        fields: dict[str, torch.Tensor],
        stored: IntArray,
        atoms_ptr: Ptr,
        edges_ptr: Ptr,
        sizes: tuple[int, int, int],
    ) -> Batch:
        present = {}
        for name, mask in self._present.items():
            there = mask[stored]
            if not there.all():
                present[name] = torch.from_numpy(there)
        batch = Batch._of(
            Flat(
                fields,
                self._levels.copy(),
                present,
                LevelRows(atoms_ptr, sizes[0], _CPU),
                LevelRows(edges_ptr, sizes[1], _CPU),
                sizes[2],
                _CPU,
                self._units.copy(),
            )
        )
        return batch if self._cast is None else cast_floats(batch, self._cast)

    def __reduce__(self) -> Any:
        raise TypeError("a plan holds addresses of this process")

"""Reductions of flat tensors over a pointer, in torch and Warp.

Same results, dtypes and rules as ``alchemi_xr.data.segment``. The torch
version carries gradients for sum, mean, norm, min and max; the Warp version,
the default on CUDA, walks each sample in order and so is deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alchemi_xr.data.kernels.gather import Backend, pick_backend
from alchemi_xr.data.segment import check_op, empty_extreme
from alchemi_xr.errors import FieldError

__all__ = ["segment_reduce"]

# Rows a sample beyond which one Warp thread a sample leaves a device idle; torch spreads the rows.
_LONG = 4096


def segment_reduce(
    values: Tensor,
    ptr: Tensor,
    op: str,
    *,
    initial: Any = None,
    backend: Backend | None = None,
) -> Tensor:
    """One value a sample, out of the rows of each.

    Parameters
    ----------
    values : tensor, [V, ...]
    ptr : int64 tensor, [N + 1], on the same device
        Not checked on a device beyond its length: that would wait for it.
    op : {"sum", "mean", "min", "max", "norm", "any", "all", "argmin", "argmax"}
    initial : number, optional
        For ``min`` and ``max``: a value that takes part in every sample.
    backend : {"torch", "warp"}, optional
        By default torch on CPU and where a gradient is wanted, else Warp.

    Returns
    -------
    tensor, [N, ...] ([N] for norm)
        As ``alchemi_xr.data.segment.segment_reduce``.

    Raises
    ------
    FieldError
        ``ptr`` does not fit, or a smallest whole number of no rows is asked
        for without ``initial``.
    ConfigError
        The op or the backend is not known.

    Examples
    --------
    >>> segment_reduce(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 2, 2, 3]), "sum")
    tensor([3., 0., 5.])
    """
    check_op(op)
    ptr = ptr.to(torch.int64)
    if ptr.ndim != 1 or len(ptr) == 0:
        raise FieldError("segment_reduce", "a ptr is [N + 1]", found=list(ptr.shape))
    if ptr.device.type == "cpu" and (int(ptr[0]) != 0 or int(ptr[-1]) != len(values)):
        raise FieldError(
            "segment_reduce",
            "the ptr does not end at the rows",
            found=[int(ptr[0]), int(ptr[-1])],
            expected=[0, len(values)],
        )
    if backend is None and len(values) > _LONG * max(len(ptr) - 1, 1):
        backend = "torch"
    warp = pick_backend(backend, values.device) == "warp" and not values.requires_grad
    engine = _Warp(values, ptr) if warp else _Torch(values, ptr)
    if op in ("sum", "mean", "norm"):
        return _additive(engine, values, ptr, op)
    if op in ("any", "all"):
        hits = engine.sum("true")
        return hits > 0 if op == "any" else hits == _column(ptr.diff(), hits)
    if op in ("argmin", "argmax"):
        return engine.arg(largest=op == "argmax")
    return _extreme(engine, values, ptr, op, initial)


def _column(counts: Tensor, like: Tensor) -> Tensor:
    return counts.reshape(-1, *[1] * (like.ndim - 1))


def _additive(engine: _Torch, values: Tensor, ptr: Tensor, op: str) -> Tensor:
    floating = values.is_floating_point()
    if op == "norm":
        squares = engine.sum("squares").to(torch.float64)
        return (
            squares.reshape(len(ptr) - 1, values.shape[1:].numel())
            .sum(1)
            .sqrt()
            .to(values.dtype if floating else torch.float64)
        )
    total = engine.sum("sum")
    if op == "mean":
        # Of whole numbers torch would make float32.
        mean = total.to(torch.float64) / _column(ptr.diff(), total)
        return mean.to(values.dtype) if floating else mean
    return total.to(values.dtype) if floating else total


def _extreme(engine: _Torch, values: Tensor, ptr: Tensor, op: str, initial: Any) -> Tensor:
    local = engine.arg(largest=op == "max")
    empty = _column(ptr.diff() == 0, local).expand(local.shape)
    start = None if initial is None else torch.full_like(local, 0).to(values.dtype) + initial
    if start is None and not values.is_floating_point():
        without = torch.nonzero(ptr.diff() == 0)
        if len(without):
            raise empty_extreme(op, int(without[0]), values.dtype)
    if len(values):
        # The value stands at the row found; clamped, as rows of empty samples are not read.
        rows = (_column(ptr[:-1], local) + local).clamp(0, len(values) - 1)
        found = values.gather(0, rows)
    else:
        found = torch.zeros(local.shape, dtype=values.dtype, device=values.device)
    if start is None:
        if not values.is_floating_point():
            return found
        return torch.where(empty, torch.full_like(found, float("nan")), found)
    start = start.to(values.dtype)
    if values.dtype == torch.bool:
        both = found & start if op == "min" else found | start
    else:
        both = torch.minimum(found, start) if op == "min" else torch.maximum(found, start)
    return torch.where(empty, start, both)


class _Torch:
    """Sums and rows of extremes by torch's own operations."""

    def __init__(self, values: Tensor, ptr: Tensor) -> None:
        self.values = values
        self.ptr = ptr
        self.num = len(ptr) - 1
        self.sample = torch.repeat_interleave(
            torch.arange(self.num, device=ptr.device), ptr.diff(), output_size=len(values)
        )

    def sum(self, mode: str) -> Tensor:
        """Per sample and column, in float64 or int64."""
        values = self.values
        if mode == "true":
            wide = (values != 0).to(torch.int64)
        else:
            wide = values.to(torch.float64 if values.is_floating_point() else torch.int64)
            if mode == "squares":
                wide = wide * wide
        out = torch.zeros((self.num, *values.shape[1:]), dtype=wide.dtype, device=values.device)
        return out.index_add(0, self.sample, wide)

    def arg(self, *, largest: bool) -> Tensor:
        """First row of the extreme within each sample, -1 without rows."""
        values = self.values.detach()
        if values.dtype == torch.bool:
            values = values.to(torch.uint8)
        elif values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        shape = (self.num, *values.shape[1:])
        index = _column(self.sample, values).expand(values.shape)
        best = torch.zeros(shape, dtype=values.dtype, device=values.device).scatter_reduce(
            0, index, values, "amax" if largest else "amin", include_self=False
        )
        spread = best[self.sample]
        hit = (values == spread) | ((values != values) & (spread != spread))
        local = torch.arange(len(values), device=values.device) - self.ptr[self.sample]
        none = torch.iinfo(torch.int64).max
        rows = torch.where(hit, _column(local, values).expand(values.shape), none)
        first = torch.full(shape, none, dtype=torch.int64, device=values.device).scatter_reduce(
            0, index, rows, "amin"
        )
        return torch.where(first == none, torch.full_like(first, -1), first)


class _Warp(_Torch):
    """The same, one Warp thread a sample and column."""

    def __init__(self, values: Tensor, ptr: Tensor) -> None:
        self.values = values
        self.ptr = ptr
        self.num = len(ptr) - 1

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(self.num, *self.values.shape[1:])

    def sum(self, mode: str) -> Tensor:
        from alchemi_xr.data.kernels._segment_warp import accumulate

        total = accumulate(self.values, self.ptr, mode)
        return self._shaped(total.to(torch.int64) if mode == "true" else total)

    def arg(self, *, largest: bool) -> Tensor:
        from alchemi_xr.data.kernels._segment_warp import extreme_row

        return self._shaped(extreme_row(self.values, self.ptr, largest=largest))

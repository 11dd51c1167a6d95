"""Reductions of flat arrays over a pointer, in NumPy.

One sample is one segment of rows; samples without rows have a stated result,
never the neighbour's value. ``data.kernels.segment`` gives the same in torch
and Warp.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray, Ptr
from alchemi_xr.data.csr import validate_ptr
from alchemi_xr.errors import ConfigError, FieldError

__all__ = ["OPS", "check_op", "segment_reduce"]

OPS = ("sum", "mean", "min", "max", "norm", "any", "all", "argmin", "argmax")


def check_op(op: str) -> None:
    """Raise unless ``op`` is one of ``OPS``.

    Raises
    ------
    ConfigError
    """
    if op not in OPS:
        raise ConfigError("segment_reduce", f"op {op!r} is not known", expected=", ".join(OPS))


def empty_extreme(op: str, sample: int, dtype: object) -> FieldError:
    """The error for a smallest or largest value of no rows in a dtype without NaN."""
    return FieldError(
        "segment_reduce",
        f"sample {sample} has no rows, and {dtype} has no NaN to say so",
        mend=f"segment_reduce(..., {op!r}, initial=...)",
    )


def segment_reduce(values: NDArray, ptr: Ptr, op: str, *, initial: Any = None) -> NDArray:
    """One value a sample, out of the rows of each.

    Parameters
    ----------
    values : array, [V, ...]
    ptr : int64 array, [N + 1]
    op : {"sum", "mean", "min", "max", "norm", "any", "all", "argmin", "argmax"}
        Column by column, except ``norm``: the L2 norm over the rows of a sample
        and all that is behind them. ``argmin`` and ``argmax`` give the first
        such row, counted within the sample.
    initial : number, optional
        For ``min`` and ``max``: a value that takes part in every sample.

    Returns
    -------
    array, [N, ...] ([N] for norm)
        Floats keep their dtype (they are summed in float64); whole numbers and
        bools give int64 sums and float64 means and norms. Without rows: 0 for
        sum and norm, NaN for mean, min and max, False for any, True for all,
        -1 for argmin and argmax. NaN rows propagate.

    Raises
    ------
    FieldError
        ``ptr`` does not fit, or a smallest whole number of no rows is asked
        for without ``initial``.
    ConfigError
        The op is not known.

    Examples
    --------
    >>> segment_reduce(np.array([1.0, 2.0, 5.0]), np.array([0, 2, 2, 3]), "mean")
    array([1.5, nan, 5. ])
    >>> segment_reduce(np.array([3, 1, 2]), np.array([0, 2, 3]), "argmin")
    array([1, 0])
    """
    check_op(op)
    values = np.asarray(values)
    validate_ptr(ptr, rows=len(values), where="segment_reduce")
    ptr = ptr.astype(np.int64, copy=False)
    if op == "sum":
        return _sum(values, ptr)
    if op == "mean":
        return _mean(values, ptr)
    if op == "norm":
        return _norm(values, ptr)
    if op in ("any", "all"):
        ufunc = np.logical_or if op == "any" else np.logical_and
        out = np.full((len(ptr) - 1, *values.shape[1:]), op == "all")
        return _reduce_into(out, ufunc, values.astype(bool, copy=False), ptr)
    if op in ("min", "max"):
        return _extreme(values, ptr, op, initial)
    return _arg(values, ptr, op)


def _reduce_into(out: NDArray, ufunc: np.ufunc, values: NDArray, ptr: Ptr) -> NDArray:
    """Reduce into the rows of ``out`` whose samples have rows; the others stay."""
    full = np.flatnonzero(np.diff(ptr))
    if len(full):
        # reduceat gives an empty segment the next row, so only full ones are passed: what lies
        # between two of their starts is exactly the rows of the first.
        out[full] = ufunc.reduceat(values, ptr[full], axis=0, dtype=out.dtype)
    return out


def _wide(values: NDArray) -> np.dtype[Any]:
    """dtype to sum in."""
    kinds = {"f": np.float64, "c": np.complex128}
    return np.dtype(kinds.get(values.dtype.kind, np.int64))


def _sum(values: NDArray, ptr: Ptr) -> NDArray:
    wide = _wide(values)
    out = np.zeros((len(ptr) - 1, *values.shape[1:]), dtype=wide)
    _reduce_into(out, np.add, values, ptr)
    return out.astype(values.dtype, copy=False) if values.dtype.kind in "fc" else out


def _mean(values: NDArray, ptr: Ptr) -> NDArray:
    kind = values.dtype if values.dtype.kind in "fc" else np.dtype(np.float64)
    wide = np.complex128 if kind.kind == "c" else np.float64
    total = np.zeros((len(ptr) - 1, *values.shape[1:]), dtype=wide)
    _reduce_into(total, np.add, values, ptr)
    counts = np.diff(ptr).reshape(-1, *[1] * (values.ndim - 1))
    with np.errstate(invalid="ignore"):
        mean: NDArray = (total / counts).astype(kind, copy=False)
    return mean


def _norm(values: NDArray, ptr: Ptr) -> NDArray:
    kind = np.dtype(np.float64)
    if values.dtype.kind in "fc":
        kind = values.real.dtype
    columns = math.prod(values.shape[1:])  # -1 is ambiguous for no rows
    flat = np.abs(values.reshape(len(values), columns).astype(_wide(values), copy=False))
    squares = np.square(flat, dtype=np.float64).sum(axis=1)
    return np.sqrt(_reduce_into(np.zeros(len(ptr) - 1), np.add, squares, ptr)).astype(kind)


def _extreme(values: NDArray, ptr: Ptr, op: str, initial: Any) -> NDArray:
    ufunc = np.minimum if op == "min" else np.maximum
    shape = (len(ptr) - 1, *values.shape[1:])
    if initial is not None:
        out = _reduce_into(np.full(shape, initial, dtype=values.dtype), ufunc, values, ptr)
        return np.asarray(ufunc(out, np.asarray(initial, dtype=values.dtype)))
    if values.dtype.kind == "f":
        return _reduce_into(np.full(shape, np.nan, dtype=values.dtype), ufunc, values, ptr)
    empty = np.flatnonzero(np.diff(ptr) == 0)
    if len(empty):
        raise empty_extreme(op, int(empty[0]), values.dtype)
    return _reduce_into(np.empty(shape, dtype=values.dtype), ufunc, values, ptr)


def _arg(values: NDArray, ptr: Ptr, op: str) -> IntArray:
    ufunc = np.minimum if op == "argmin" else np.maximum
    counts = np.diff(ptr)
    shape = (len(counts), *values.shape[1:])
    best = _reduce_into(np.zeros(shape, dtype=values.dtype), ufunc, values, ptr)
    spread = np.repeat(best, counts, axis=0)
    hit = values == spread
    if values.dtype.kind == "f":
        hit |= np.isnan(values) & np.isnan(spread)
    local = np.arange(len(values)) - np.repeat(ptr[:-1], counts)
    none = np.iinfo(np.int64).max
    rows = np.where(hit, local.reshape(-1, *[1] * (values.ndim - 1)), none)
    return _reduce_into(np.full(shape, -1, dtype=np.int64), np.minimum, rows, ptr)

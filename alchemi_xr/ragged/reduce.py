"""One value a sample out of its rows.

The reduction itself is ``data.segment.segment_reduce``, in NumPy; Dask only
places it, block by block, since a block holds whole samples. Fields still in
the store are read some megabytes at a time, so that the result is all that
stays in memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, Level, NDArray
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.errors import ConfigError, FieldError, UnknownFieldError, nearest
from alchemi_xr.ragged.array import is_dask, is_lazy
from alchemi_xr.ragged.chunks import align, by_bytes, find_partition, level_chunks
from alchemi_xr.ragged.conventions import DIMS, Structure, level_of, structure

__all__ = ["OPS", "reduce", "resolve_variable"]

OPS = ("sum", "mean", "min", "max", "norm", "any", "all", "argmin", "argmax")
READ_BYTES = 32 * 2**20
_KEEPS_UNIT = ("sum", "mean", "min", "max", "norm")


def reduce(
    ds: xr.Dataset, what: Hashable | xr.DataArray, op: str, *, initial: Any = None
) -> xr.DataArray:
    """One value a sample; see ``RaggedAccessor.reduce``."""
    if op not in OPS:
        raise ConfigError(
            "ds.ragged.reduce", f"{op!r} is no reduction. {nearest(op, OPS, n=1)}", expected=OPS
        )
    struct = structure(ds)
    name, var, level = resolve_variable(ds, what, struct, where="ds.ragged.reduce")
    if level == "system":
        raise FieldError(
            "ds.ragged.reduce",
            f"{str(name)!r} has one value a sample already",
            found=f"dims {var.dims}",
            expected="a variable over 'atom' or 'edge'",
        )
    dim = DIMS[level]
    var = var.transpose(dim, ...)
    dims = (DIMS["system"],) if op == "norm" else (DIMS["system"], *var.dims[1:])
    if is_dask(var):
        data = _dask(var, ds, struct, level, op, initial)
    elif is_lazy(var):
        data = _streamed(var, struct, level, op, initial)
    else:
        data = _segment(var.values, np.diff(struct.ptr(level)), op, initial)
    coords = {n: c.variable for n, c in ds.coords.items() if set(c.dims) <= set(dims)}
    return xr.DataArray(data, coords, dims, name, _attrs(var.attrs, name, op, level))


def resolve_variable(
    ds: xr.Dataset, what: Hashable | xr.DataArray, struct: Structure, *, where: str
) -> tuple[Hashable, xr.Variable, Level]:
    """Name, variable and level of what a verb is asked about, checked to fit.

    Raises
    ------
    UnknownFieldError
        No variable has this name.
    FieldError
        It has no ragged dim, or another number of rows than the Dataset.
    """
    if isinstance(what, xr.DataArray):
        name, var = what.name, what.variable
    elif what in ds.variables:
        name, var = what, ds.variables[what]
    else:
        raise UnknownFieldError(
            where, f"no variable {what!r}. {nearest(str(what), map(str, ds.data_vars))}"
        )
    level = level_of(var.dims, name=name)
    if level is None:
        raise FieldError(
            where,
            f"{str(name)!r} lies along no level",
            found=f"dims {var.dims}",
            expected="'atom', 'edge' or 'sample' among them",
        )
    rows = var.shape[var.dims.index(DIMS[level])]
    if rows != struct.rows(level):
        raise FieldError(
            where,
            f"{str(name)!r} is of another Dataset",
            found=f"{rows} rows",
            expected=struct.rows(level),
        )
    return name, var, level


def _segment(values: NDArray, counts: IntArray, op: str, initial: Any) -> NDArray:
    options = {} if initial is None else {"initial": initial}
    return segment_reduce(values, counts_to_ptr(counts), op, **options)


def _dask(
    var: xr.Variable, ds: xr.Dataset, struct: Structure, level: Level, op: str, initial: Any
) -> Any:
    import dask.array

    da: Any = dask.array
    sizes = find_partition(ds, struct, var)
    assert sizes is not None
    x = align(var, struct, sizes).data
    counts = da.from_array(np.diff(struct.ptr(level)), chunks=(sizes,))
    axes = "abcdefgh"[: x.ndim]
    kept = axes[:1] if op == "norm" else axes
    # One row of one sample tells dtype without reading any.
    sample = _segment(np.ones((1, *x.shape[1:]), x.dtype), np.array([1]), op, initial)
    return da.blockwise(
        _segment,
        kept,
        x,
        axes,
        counts,
        "a",
        op,
        None,
        initial,
        None,
        # The rows of x and the samples of counts differ in number, not in blocks.
        align_arrays=False,
        adjust_chunks={"a": sizes},
        concatenate=True,
        dtype=sample.dtype,
        meta=np.empty((0,) * len(kept), dtype=sample.dtype),
    )


def _streamed(var: xr.Variable, struct: Structure, level: Level, op: str, initial: Any) -> NDArray:
    ptr = struct.ptr(level)
    row_bytes = max(1, var.dtype.itemsize * int(np.prod(var.shape[1:], dtype=np.int64)))
    sizes = by_bytes([ptr * row_bytes], READ_BYTES)
    out, start = [], 0
    for size, rows in zip(sizes, level_chunks(ptr, sizes), strict=True):
        first = int(ptr[start])
        values = var[first : first + rows].values
        out.append(_segment(values, np.diff(ptr[start : start + size + 1]), op, initial))
        start += size
    return np.concatenate(out)


def _attrs(
    attrs: dict[Hashable, Any], name: Hashable, op: str, level: Level
) -> dict[Hashable, Any]:
    out: dict[Hashable, Any] = {}
    if op in _KEEPS_UNIT and "units" in attrs:
        out["units"] = attrs["units"]
    label = attrs.get("long_name", name)
    out["long_name"] = f"{op} of {label} over the {level}s of each sample"
    out["level"] = "system"
    out["cell_methods"] = f"{DIMS[level]}: {op}"
    return out

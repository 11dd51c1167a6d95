"""A sample's value brought to each of its rows.

Arithmetic between an atom-level and a sample-level variable is an outer
product for xarray (every atom with every sample); bring the sample's value to
its atoms first.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, Level, NDArray
from alchemi_xr.data.fields import canonical_level
from alchemi_xr.errors import FieldError
from alchemi_xr.ragged.array import is_dask
from alchemi_xr.ragged.chunks import align, find_partition, level_chunks
from alchemi_xr.ragged.conventions import DIMS, Structure, level_of, structure
from alchemi_xr.ragged.reduce import resolve_variable

__all__ = ["broadcast"]


def broadcast(ds: xr.Dataset, what: Hashable | xr.DataArray, level: str = "atom") -> xr.DataArray:
    """The value of its sample for every row; see ``RaggedAccessor.broadcast``."""
    target = canonical_level(level, where="ds.ragged.broadcast")
    struct = structure(ds)
    name, var, own = resolve_variable(ds, what, struct, where="ds.ragged.broadcast")
    if own != "system" or target == "system":
        raise FieldError(
            "ds.ragged.broadcast",
            f"{str(name)!r} cannot be brought from {own} to {target}",
            expected="a variable over 'sample', brought to 'atom' or 'edge'",
        )
    var = var.transpose(DIMS["system"], ...)
    dims = (DIMS[target], *var.dims[1:])
    if is_dask(var) or _has_dask(ds, target):
        data = _dask(var, ds, struct, target)
    else:
        data = _repeat(var.values, np.diff(struct.ptr(target)))
    coords = {n: c.variable for n, c in ds.coords.items() if set(c.dims) <= set(dims)}
    attrs = {k: v for k, v in var.attrs.items() if k != "sample_dimension"} | {"level": target}
    return xr.DataArray(data, coords, dims, name, attrs)


def _repeat(values: NDArray, counts: IntArray) -> NDArray:
    return np.repeat(values, counts, axis=0)


def _has_dask(ds: xr.Dataset, level: Level) -> bool:
    return any(is_dask(v) and level_of(v.dims) == level for v in ds.variables.values())


def _dask(var: xr.Variable, ds: xr.Dataset, struct: Structure, level: Level) -> Any:
    import dask.array

    da: Any = dask.array
    sizes = find_partition(ds, struct, var)
    assert sizes is not None
    ptr = struct.ptr(level)
    x = align(var, struct, sizes).data
    counts = da.from_array(np.diff(ptr), chunks=(sizes,))
    axes = "abcdefgh"[: x.ndim]
    return da.blockwise(
        _repeat,
        axes,
        x,
        axes,
        counts,
        "a",
        align_arrays=False,
        adjust_chunks={"a": level_chunks(ptr, sizes)},
        dtype=x.dtype,
        meta=x._meta,
    )

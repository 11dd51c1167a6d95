"""The largest force of every sample: the number that says whether it is relaxed."""

from __future__ import annotations

import numpy as np
import xarray as xr

from alchemi_xr._typing import NDArray
from alchemi_xr.analysis.species import need, sample_coords
from alchemi_xr.data.block import Block
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["fmax"]

_PIECE = 32_768


def fmax(ds: xr.Dataset, name: str = "forces") -> xr.DataArray:
    r"""Largest norm of a vector of the atoms of every sample.

    .. math:: f_{max} = \max_a |f_a|

    Parameters
    ----------
    ds : Dataset
        Ragged.
    name : str
        A per-atom field with a last axis of x, y, z.

    Returns
    -------
    DataArray over ``sample``
        In the dtype and units of the field; NaN for a sample without atoms, and where a force
        is NaN. Lazy on Dask.
    """
    need(ds, (name,), "fmax")
    var = ds.variables[name]
    dtype = np.result_type(var.dtype, np.float32)
    values = apply_blocks(ds, [name], _largest, name, rows="system", dtype=dtype)
    attrs = {k: v for k, v in var.attrs.items() if k == "units"}
    attrs |= {"long_name": f"largest norm of the {name}", "level": "system", "analysis": "fmax"}
    return xr.DataArray(values, sample_coords(ds), ("sample",), "fmax", attrs)


def _largest(block: Block, name: str) -> NDArray:
    values = block[name]
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        largest = np.sqrt(segment_reduce(_squares(values), block.atoms_ptr, "max"))
    # Squares of very large or small forces leave the range of float32: these few once more.
    if values.dtype == np.float32 and (~np.isfinite(largest) | (largest < 1e-18)).any():
        wide = _squares(values.astype(np.float64))
        return np.sqrt(segment_reduce(wide, block.atoms_ptr, "max"))
    return largest


def _squares(values: NDArray) -> NDArray:
    """x² + y² + z² of each row."""
    out = np.empty(len(values), dtype=values.dtype)
    # Column by column, in pieces that stay in cache: a sum over an axis of three is ten
    # times slower, einsum twice.
    for start in range(0, len(values), _PIECE):
        part = values[start : start + _PIECE]
        square, into = part * part, out[start : start + _PIECE]
        np.add(square[:, 0], square[:, 1], out=into)
        into += square[:, 2]
    return out

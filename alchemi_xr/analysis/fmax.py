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
    # einsum, not (v**2).sum(-1): a sum over an axis of three is ten times slower.
    squares = np.einsum("ai,ai->a", values, values)
    largest = np.sqrt(segment_reduce(squares, block.atoms_ptr, "max"))
    # Squares of very large or small forces leave the range of float32: these few once more.
    odd = ~np.isfinite(largest) | (largest < 1e-18)
    if odd.any() and values.dtype == np.float32:
        wide = np.einsum("ai,ai->a", values, values, dtype=np.float64)
        return np.sqrt(segment_reduce(wide, block.atoms_ptr, "max"))
    return largest

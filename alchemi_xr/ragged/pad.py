"""Between ragged rows and dense ones with a fill.

Some functions want rectangles. ``to_padded`` makes them block by block, each
sample's rows first and the fill behind; ``from_padded`` takes the fill off.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import fill_for
from alchemi_xr.errors import FieldError
from alchemi_xr.ragged.array import is_dask
from alchemi_xr.ragged.conventions import (
    DIMS,
    POINTER_NAMES,
    PTR_DIM,
    Structure,
    level_of,
    pointer_coords,
    structure,
)
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["from_padded", "to_padded"]

SLOTS: dict[str, Level] = {"atom_slot": "atom", "edge_slot": "edge"}


def to_padded(ds: xr.Dataset, fill: Any) -> xr.Dataset:
    """Dense rows with a fill; see ``RaggedAccessor.to_padded``."""
    struct = structure(ds)
    data: dict[Hashable, xr.Variable] = {}
    for name, var in ds.variables.items():
        level = level_of(var.dims, name=name)
        if name in ("atoms_ptr", "edges_ptr", "sample_row") or PTR_DIM in var.dims:
            continue
        if level not in ("atom", "edge"):
            data[name] = var
            continue
        var = var.transpose(DIMS[level], ...)
        width = int(np.diff(struct.ptr(level)).max(initial=0))
        value = _fill(name, var.dtype, fill)
        values = apply_blocks(
            ds,
            [name],
            _pad,
            str(name),
            level,
            width,
            value,
            rows="system",
            tail=(width, *var.shape[1:]),
            dtype=var.dtype,
        )
        dims = (DIMS["system"], f"{level}_slot", *var.dims[1:])
        data[name] = xr.Variable(dims, values, {**var.attrs, "padding": value})
    coords = {n: v for n, v in data.items() if n in ds.coords}
    return xr.Dataset({n: v for n, v in data.items() if n not in coords}, coords, ds.attrs)


def _fill(name: Hashable, dtype: np.dtype[Any], fill: Any) -> Any:
    if isinstance(fill, Mapping):
        fill = fill.get(name)
    if fill is None:
        # 0 is an atom; no atom is -1.
        return -1 if name == "neighbor_list" else np.asarray(fill_for(dtype), dtype=dtype).item()
    try:
        if np.asarray(fill, dtype=dtype).item() == fill or fill != fill:
            return fill
    except (ValueError, TypeError, OverflowError):
        pass
    raise FieldError(
        "ds.ragged.to_padded",
        f"{str(name)!r} cannot hold the fill",
        found=repr(fill),
        expected=str(dtype),
        mend="give fill= a value for each variable: {'forces': 0.0, ...}",
    )


def _pad(block: Block, name: str, level: Level, width: int, fill: Any) -> NDArray:
    values = block.arrays[name]
    counts = np.diff(block.ptr(level))
    out = np.full((len(counts), width, *values.shape[1:]), fill, dtype=values.dtype)
    out[np.arange(width)[None] < counts[:, None]] = values
    return out


def from_padded(ds: xr.Dataset) -> xr.Dataset:
    """The ragged Dataset of a padded one.

    Parameters
    ----------
    ds : Dataset
        Variables over ``(sample, atom_slot, ...)`` and ``(sample, edge_slot, ...)``
        with ``num_atoms`` (and ``num_edges``) rows used.

    Returns
    -------
    Dataset
        On Dask where the padded variables are.

    Raises
    ------
    FieldError
        ``num_atoms`` is missing, or larger than the slots.
    """
    counts = {}
    for level, plural in (("atom", "num_atoms"), ("edge", "num_edges")):
        if plural in ds.variables:
            counts[level] = np.asarray(ds.variables[plural].values, dtype=np.int64)
    for slot, level in SLOTS.items():
        if slot not in ds.dims:
            continue
        if level not in counts:
            raise FieldError("from_padded", f"there is no num_{level}s", found=list(ds.variables))
        most = counts[level].max(initial=0)
        if most > ds.sizes[slot] or counts[level].min(initial=0) < 0:
            raise FieldError(
                "from_padded", f"num_{level}s does not fit", found=most, expected=ds.sizes[slot]
            )
    if "atom" not in counts:
        raise FieldError("from_padded", "there is no num_atoms", found=list(ds.variables))
    edges = counts_to_ptr(counts["edge"]) if "edge" in counts else None
    struct = Structure(counts_to_ptr(counts["atom"]), edges)
    data: dict[Hashable, xr.Variable] = {}
    for name, var in ds.variables.items():
        slots = [d for d in var.dims if d in SLOTS]
        if name in POINTER_NAMES:
            continue
        data[name] = _unpad(var, str(slots[0]), struct) if slots else var
    coords = {n: v for n, v in data.items() if n in ds.coords}
    out = xr.Dataset({n: v for n, v in data.items() if n not in coords}, coords, ds.attrs)
    return out.assign_coords(pointer_coords(struct))


def _unpad(var: xr.Variable, slot: str, struct: Structure) -> xr.Variable:
    level = SLOTS[slot]
    var = var.transpose(DIMS["system"], slot, ...)
    counts = np.diff(struct.ptr(level))
    dims = (DIMS[level], *var.dims[2:])
    attrs = {k: v for k, v in var.attrs.items() if k != "padding"}
    if not is_dask(var):
        return xr.Variable(dims, _strip(var.values, counts), attrs)
    import dask.array

    da: Any = dask.array
    x = var.chunk(dict.fromkeys(var.dims[1:], -1)).data
    sizes = x.chunks[0]
    bounds = counts_to_ptr(np.asarray(sizes))
    rows = tuple(np.diff(struct.ptr(level)[bounds]).tolist())
    axes = "abcdefgh"[: x.ndim]
    out = da.blockwise(
        _strip,
        axes[0] + axes[2:],
        x,
        axes,
        da.from_array(counts, chunks=(sizes,)),
        "a",
        align_arrays=False,
        adjust_chunks={"a": rows},
        concatenate=True,
        dtype=x.dtype,
        meta=np.empty((0,) * (x.ndim - 1), dtype=x.dtype),
    )
    return xr.Variable(dims, out, attrs)


def _strip(values: NDArray, counts: NDArray) -> NDArray:
    return values[np.arange(values.shape[1])[None] < counts[:, None]]

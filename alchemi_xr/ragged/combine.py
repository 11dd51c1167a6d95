"""Several ragged Datasets as one: samples of one after those of the other.

Pointers are joined, fields that only some have are filled and masked by
``<field>_present``, dtypes are widened, never narrowed.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import Level, NDArray
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import fill_for
from alchemi_xr.errors import ArgumentTypeError, FieldError, StoreNotFoundError
from alchemi_xr.ragged.array import is_dask, is_lazy
from alchemi_xr.ragged.chunks import align
from alchemi_xr.ragged.conventions import (
    DIMS,
    POINTER_NAMES,
    PTR_DIM,
    Structure,
    level_of,
    pointer_coords,
    structure,
)
from alchemi_xr.ragged.mapping import partition_of

__all__ = ["concat", "open_mfdataset"]


def concat(datasets: Iterable[xr.Dataset]) -> xr.Dataset:
    """The samples of several Datasets, one after the other.

    Parameters
    ----------
    datasets : iterable of Dataset
        Ragged. A field that one has and another lacks is filled there, and
        ``<field>_present`` says where it has a value.

    Returns
    -------
    Dataset
        On Dask unless all are in memory; no block holds samples of two.

    Raises
    ------
    FieldError
        A field has other dims, lengths or units in one than in another.

    Examples
    --------
    >>> both = concat([train, extra])                  # doctest: +SKIP
    """
    parts = list(datasets)
    if not parts or not all(isinstance(p, xr.Dataset) for p in parts):
        raise ArgumentTypeError("ragged.concat", "a list of Datasets is needed", found=len(parts))
    if len(parts) == 1:
        structure(parts[0])
        return parts[0]
    structs = [structure(p) for p in parts]
    joined = _join(structs)
    lazy = any(
        is_dask(v) or is_lazy(v) for p in parts for n, v in p.variables.items() if _own(n, v)
    )
    cuts = [partition_of(p, s)[0] for p, s in zip(parts, structs, strict=True)]
    names = dict.fromkeys(n for p in parts for n, v in p.variables.items() if _own(n, v))
    out: dict[Hashable, xr.Variable] = {}
    for name in names:
        if str(name).endswith("_present") and str(name)[: -len("_present")] in names:
            continue
        first = next(p.variables[name] for p in parts if name in p.variables)
        level = level_of(first.dims, name=name)
        if level is None:
            _need_same(name, [p.variables[name] for p in parts if name in p.variables])
            out[name] = first
            continue
        made, mask = _column(name, first, level, parts, structs, cuts, lazy)
        out[name] = made
        if mask is not None:
            label = f"{name}_present"
            made.attrs["ancillary_variables"] = label
            attrs = {"long_name": f"sample has a value of {name}", "level": "system"}
            out[label] = xr.Variable((DIMS["system"],), mask, attrs)
    coords = {n for p in parts for n in p.coords}
    attributes = {
        k: v for k, v in parts[0].attrs.items() if all(p.attrs.get(k) == v for p in parts)
    }
    data = {n: v for n, v in out.items() if n not in coords}
    kept: dict[Hashable, Any] = {n: v for n, v in out.items() if n in coords}
    return xr.Dataset(data, kept | pointer_coords(joined), attributes)


def _own(name: Hashable, var: xr.Variable) -> bool:
    return name not in POINTER_NAMES and PTR_DIM not in var.dims


def _join(structs: Sequence[Structure]) -> Structure:
    atoms = counts_to_ptr(np.concatenate([np.diff(s.atoms_ptr) for s in structs]))
    if all(s.edges_ptr is None for s in structs):
        return Structure(atoms, None)
    edges = [
        np.zeros(s.num_samples, dtype=np.int64) if s.edges_ptr is None else np.diff(s.edges_ptr)
        for s in structs
    ]
    return Structure(atoms, counts_to_ptr(np.concatenate(edges)))


def _column(
    name: Hashable,
    first: xr.Variable,
    level: Level,
    parts: Sequence[xr.Dataset],
    structs: Sequence[Structure],
    cuts: Sequence[tuple[int, ...]],
    lazy: bool,
) -> tuple[xr.Variable, NDArray | None]:
    """A variable of the whole, and its presence mask if it has holes."""
    dims = (DIMS[level], *(d for d in first.dims if d != DIMS[level]))
    tail = first.transpose(*dims).shape[1:]
    there = [p.variables[name] for p in parts if name in p.variables]
    text = any(v.dtype.kind in "OUT" for v in there)
    dtype = np.dtype(object) if text else np.result_type(*(v.dtype for v in there))
    pieces: list[Any] = []
    masks: list[NDArray] = []
    for part, struct, cut in zip(parts, structs, cuts, strict=True):
        mask = np.ones(struct.num_samples, dtype=bool)
        if name not in part.variables:
            pieces.append(_filled(struct.rows(level), tail, dtype, lazy))
            masks.append(~mask)
            continue
        var = part.variables[name]
        if set(var.dims) != set(dims) or var.transpose(*dims).shape[1:] != tail:
            raise FieldError(
                "ragged.concat",
                f"{str(name)!r} has another shape in one Dataset than in another",
                found=f"{dict(zip(var.dims, var.shape, strict=True))}",
                expected=f"{dict(zip(dims[1:], tail, strict=True))} a row",
            )
        units = (first.attrs.get("units"), var.attrs.get("units"))
        if units[0] != units[1]:
            raise FieldError(
                "ragged.concat",
                f"{str(name)!r} has other units in one Dataset than in another",
                found=units[1],
                expected=units[0],
                mend="convert one first: ds.assign(name=ds.name * factor)",
            )
        var = var.transpose(*dims)
        if lazy:
            pieces.append(align(var.to_base_variable(), struct, cut, name=name).data.astype(dtype))
        else:
            pieces.append(var.values.astype(dtype, copy=False))
        if f"{name}_present" in part.variables:
            mask = np.asarray(part.variables[f"{name}_present"].values)
        masks.append(mask)
    attrs = {k: v for k, v in first.attrs.items() if k != "ancillary_variables"}
    has = np.concatenate(masks)
    joined = _concatenate(pieces) if lazy else np.concatenate(pieces)
    var = xr.Variable(dims, joined, attrs).transpose(*first.dims)
    return var, None if has.all() else has


def _concatenate(pieces: list[Any]) -> Any:
    import dask.array

    da: Any = dask.array
    full = [p for p in pieces if p.shape[0]] or pieces[:1]
    return da.concatenate(full)


def _filled(rows: int, tail: tuple[int, ...], dtype: np.dtype[Any], lazy: bool) -> Any:
    fill = fill_for(dtype)
    if not lazy:
        return np.full((rows, *tail), fill, dtype=dtype)
    import dask.array

    da: Any = dask.array
    chunks = ("auto" if dtype.kind != "O" else -1, *tail)
    return da.full((rows, *tail), fill, dtype=dtype, chunks=chunks)


def _need_same(name: Hashable, found: Sequence[xr.Variable]) -> None:
    if not all(found[0].identical(v) for v in found[1:]):
        raise FieldError(
            "ragged.concat",
            f"{str(name)!r} lies along no level and differs from Dataset to Dataset",
            mend=f"ds.drop_vars({str(name)!r}), or give it the dim 'sample'",
        )


def open_mfdataset(stores: Any, *, chunks: Any = None, **options: Any) -> xr.Dataset:
    """Several stores as one lazy Dataset.

    Parameters
    ----------
    stores : glob pattern, or list of anything that ``open_dataset`` takes
    chunks : optional
        As for ``open_dataset``, for each store; by default its own chunks.
    **options
        Further arguments of ``open_dataset``.

    Returns
    -------
    Dataset
        With the coordinate ``store_index``, which says from which store each
        sample comes; their paths are its attribute ``stores``.

    Raises
    ------
    StoreNotFoundError
        The pattern fits nothing.
    """
    from alchemi_xr.ragged.backend import open_dataset

    if isinstance(stores, (str, os.PathLike)):
        pattern = os.fspath(stores)
        stores = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not stores:
            raise StoreNotFoundError(pattern, "no store fits the pattern")
    parts = [open_dataset(s, chunks={} if chunks is None else chunks, **options) for s in stores]
    counts = [p.sizes.get(DIMS["system"], 0) for p in parts]
    out = concat(parts)
    index = np.repeat(np.arange(len(parts)), counts)
    attrs = {
        "long_name": "store that the sample comes from",
        "level": "system",
        "stores": [str(p.attrs.get("source", "")) for p in parts],
    }
    return out.assign_coords(store_index=xr.Variable((DIMS["system"],), index, attrs))

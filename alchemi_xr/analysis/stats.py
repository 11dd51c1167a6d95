"""Statistics of fields by element or group, and what a data set is made of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import NDArray
from alchemi_xr.analysis.basics import symbols
from alchemi_xr.analysis.species import elements_of, need
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.ragged.conventions import level_of
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["composition", "count_elements", "counts_table", "statistics"]


def statistics(
    ds: xr.Dataset,
    name: str = "forces",
    *,
    by: str | None = None,
    norm: bool = True,
    per_atom: bool = False,
    skipna: bool = False,
) -> xr.Dataset:
    """Count, mean, spread and extremes of a field, by element or by any group.

    Parameters
    ----------
    ds : Dataset
        Ragged.
    name : str
        A field over ``sample``, ``atom`` or ``edge``.
    by : str, optional
        ``"element"`` (per-atom fields) or a variable over ``sample``, such as
        ``config_type``; by default all together.
    norm : bool
        Of a vector (its last axis is xyz) take the length; else its components alike.
    per_atom : bool
        Divide a field over ``sample`` by the number of atoms.
    skipna : bool
        Leave out values that are NaN or infinite. They are counted in either case
        (``non_finite``); left in, they make the mean of their group NaN, as they should.

    Returns
    -------
    Dataset over the groups
        ``count``, ``non_finite``, ``missing`` (samples without the field, never part of the
        rest), ``mean``, ``std``, ``rms``, ``min``, ``max``.
    """
    need(ds, (name,), "statistics")
    var = ds.variables[name]
    level = level_of(var.dims, name=name)
    if level is None or var.dtype.kind not in "fiub":
        raise FieldError("statistics", f"{name!r} is no field of numbers", found=var.dtype)
    if per_atom and level != "system":
        raise ConfigError("statistics", f"per_atom is for fields over sample, {name!r} is not")
    names, labels, values = [name], np.array(["all"]), None
    dim = by or "group"
    if by == "element":
        if level != "atom":
            raise ConfigError("statistics", f"{name!r} is no field of atoms: it has no element")
        elements = elements_of(ds)
        labels = np.array([symbols()[z] for z in elements])
        values, names = np.array(elements), [name, "atomic_numbers"]
    elif by is not None:
        need(ds, (by,), "statistics")
        if ds.variables[by].dims != ("sample",):
            raise FieldError("statistics", f"{by!r} has not one value a sample")
        found = np.asarray(ds[by].values)
        found = found.astype(str) if found.dtype.kind == "O" else found
        labels, inverse = np.unique(found, return_inverse=True)
        ds = ds.assign(_group=("sample", inverse.astype(np.int64)))
        names = [name, "_group"]
    if per_atom:
        names.append("atomic_numbers")
    options = (name, level, values, len(labels), norm, per_atom, skipna)
    parts = np.asarray(
        apply_blocks(ds, names, _sums, *options, rows="block", tail=(len(labels), 7))
    )
    count, bad, missing, total, squares = (parts[:, :, k].sum(axis=0) for k in range(5))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, square = total / count, squares / count
        # Chan's way to join variances: no difference of large numbers.
        each = parts[:, :, 3] / parts[:, :, 0]
        spread = (parts[:, :, 0] * np.nan_to_num(each - mean) ** 2).sum(axis=0)
        inner = parts[:, :, 4] - parts[:, :, 0] * each**2
        std = np.sqrt(np.maximum(np.nansum(inner, axis=0) + spread, 0) / count)
    std = np.where(np.isfinite(mean), std, np.nan)
    low, high = (
        parts[:, :, 5].min(axis=0, initial=np.inf),
        parts[:, :, 6].max(axis=0, initial=-np.inf),
    )
    empty = count == 0
    units = {k: v for k, v in var.attrs.items() if k == "units"}
    if per_atom and units:
        units = {"units": f"{units['units']}/atom"}
    label = str(var.attrs.get("long_name", name))
    data: dict[str, Any] = {
        "count": (dim, count.astype(np.int64), {"long_name": f"values of {label}"}),
        "non_finite": (dim, bad.astype(np.int64), {"long_name": "values that are NaN or infinite"}),
        "missing": (dim, missing.astype(np.int64), {"long_name": "rows without a value"}),
    }
    for key, what in {
        "mean": mean,
        "std": std,
        "rms": np.sqrt(square),
        "min": np.where(empty, np.nan, low),
        "max": np.where(empty, np.nan, high),
    }.items():
        data[key] = (dim, what, {**units, "long_name": f"{key} of {label}"})
    return xr.Dataset(data, {dim: labels}, {"analysis": "statistics", "variable": name})


def _sums(
    block: Block,
    name: str,
    level: Any,
    elements: NDArray | None,
    groups: int,
    norm: bool,
    per_atom: bool,
    skipna: bool,
) -> NDArray:
    """Of each group: count, non-finite, missing, sum, sum of squares, least, largest."""
    values = block[name].astype(np.float64)
    if per_atom:
        with np.errstate(invalid="ignore", divide="ignore"):
            counts = np.diff(block.atoms_ptr).reshape(-1, *[1] * (values.ndim - 1))
            values = values / counts
    if norm and values.ndim > 1 and values.shape[-1] == 3:
        values = np.linalg.norm(values, axis=-1)
    values = values.reshape(len(values), int(np.prod(values.shape[1:], dtype=np.int64)))
    owner = ptr_to_index(block.ptr(level))
    group = np.zeros(len(values), dtype=np.int64)
    if elements is not None:
        group = np.searchsorted(elements, block["atomic_numbers"])
    elif "_group" in block:
        group = block["_group"][owner]
    there = block.has(name)[owner]
    out = np.zeros((groups, 7))
    out[:, 5], out[:, 6] = np.inf, -np.inf
    out[:, 2] = np.bincount(group[~there], minlength=groups)
    group = np.repeat(group[there], values.shape[1])
    flat = values[there].reshape(-1)
    good = np.isfinite(flat)
    out[:, 1] = np.bincount(group[~good], minlength=groups)
    if skipna:
        flat, group = flat[good], group[good]
    out[:, 0] = np.bincount(group, minlength=groups)
    with np.errstate(invalid="ignore", over="ignore"):
        out[:, 3] = np.bincount(group, flat, minlength=groups)
        out[:, 4] = np.bincount(group, flat**2, minlength=groups)
        np.minimum.at(out[:, 5], group, flat)
        np.maximum.at(out[:, 6], group, flat)
    return out


def composition(ds: xr.Dataset, *, top: int | None = None) -> xr.Dataset:
    """What a data set is made of: formulas and elements with their numbers.

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``atomic_numbers``.
    top : int, optional
        Only so many of the most frequent formulas.

    Returns
    -------
    Dataset over (formula,) and (element,)
        ``samples`` of each formula (Hill order), most frequent first, with its
        ``num_atoms``; ``atoms`` of each element, and ``samples_with`` it.
    """
    need(ds, ("atomic_numbers",), "composition")
    elements = elements_of(ds)
    table = np.asarray(counts_table(ds, elements))
    kinds, number = (
        np.unique(table, axis=0, return_counts=True) if len(table) else (table, np.zeros(0, int))
    )
    order = np.argsort(-number, kind="stable")[:top]
    names = [symbols()[z] for z in elements]
    formulas = [_hill(dict(zip(names, row, strict=True))) for row in kinds[order].astype(int)]
    return xr.Dataset(
        {
            "samples": ("formula", number[order], {"long_name": "samples of each formula"}),
            "num_atoms": (
                "formula",
                kinds[order].sum(axis=1).astype(np.int64),
                {"long_name": "atoms"},
            ),
            "atoms": (
                "element",
                table.sum(axis=0).astype(np.int64),
                {"long_name": "atoms of each element"},
            ),
            "samples_with": (
                "element",
                (table > 0).sum(axis=0).astype(np.int64),
                {"long_name": "samples with the element"},
            ),
        },
        {"formula": np.array(formulas, dtype=str), "element": np.array(names, dtype=str)},
        {"analysis": "composition"},
    )


def counts_table(ds: xr.Dataset, elements: list[int]) -> Any:
    """Atoms of each element in every sample, int32 [N, elements]; lazy on Dask."""
    return apply_blocks(
        ds,
        ["atomic_numbers"],
        count_elements,
        np.array(elements, dtype=np.int64),
        rows="system",
        tail=(len(elements),),
        dtype=np.int32,
    )


def count_elements(block: Block, elements: NDArray) -> NDArray:
    """Atoms of each element in every sample of a block, int64 [N, elements]."""
    owner = ptr_to_index(block.atoms_ptr)
    at = owner * len(elements) + np.searchsorted(elements, block["atomic_numbers"])
    flat = np.bincount(at, minlength=block.num_samples * len(elements))
    return flat.reshape(block.num_samples, len(elements))


def _hill(counts: dict[str, int]) -> str:
    """Formula, carbon and hydrogen first where there is carbon."""
    there = Counter({k: int(v) for k, v in counts.items() if v})
    order = sorted(there)
    if "C" in there:
        first = [e for e in ("C", "H") if e in there]
        order = first + [e for e in order if e not in first]
    return "".join(e + (str(there[e]) if there[e] > 1 else "") for e in order) or "(empty)"

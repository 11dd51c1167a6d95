"""Frames of one system as dense arrays over (frame, atom).

A store of many systems and many frames is ragged as a whole, but the frames
of one system all have its atoms: they make a rectangle, in the order of time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import NDArray
from alchemi_xr.errors import FieldError, UnknownFieldError
from alchemi_xr.ragged.array import is_dask, is_lazy
from alchemi_xr.ragged.chunks import align
from alchemi_xr.ragged.conventions import DIMS, POINTER_NAMES, PTR_DIM, level_of, structure
from alchemi_xr.ragged.mapping import partition_of
from alchemi_xr.ragged.select import sample_values, take

__all__ = ["dense", "times", "trajectory"]

_TIMES = ("time", "step", "frame", "frame_index")
_FIXED = ("atomic_numbers", "atomic_masses", "atom_categories")


def trajectory(
    ds: xr.Dataset,
    system_id: Any,
    *,
    by: str,
    time: str | None,
    time_step: float | None,
) -> xr.Dataset:
    """The frames of one system; see ``RaggedAccessor.trajectory``."""
    if system_id is None:
        return dense(ds, time=time, time_step=time_step)
    struct = structure(ds)
    values = sample_values(ds, by, "ds.ragged.trajectory", struct)
    at = np.flatnonzero(values == system_id)
    if not len(at):
        known = np.unique(values.astype(str) if values.dtype.kind == "O" else values)
        raise FieldError(
            "ds.ragged.trajectory",
            f"no sample has {by} {system_id!r}",
            found=f"{len(known)} systems",
            expected=f"one of {known[:5].tolist()}{' …' if len(known) > 5 else ''}",
        )
    return dense(take(ds, struct, at.astype(np.int64)), time=time, time_step=time_step)


def dense(ds: xr.Dataset, *, time: str | None = None, time_step: float | None = None) -> xr.Dataset:
    """All samples as the frames of one system."""
    struct = structure(ds)
    counts = np.diff(struct.atoms_ptr)
    if len(counts) and (counts != counts[0]).any():
        odd = int(np.flatnonzero(counts != counts[0])[0])
        raise FieldError(
            "ds.ragged.trajectory",
            "the samples are not frames of one system",
            found=f"{counts[odd]} atoms in sample {odd}",
            expected=f"{counts[0]}, as in the first",
            mend="ds.ragged.trajectory(system_id), or ds.ragged.groupby('system_id')",
        )
    values, attrs, name = times(ds, time, time_step)
    if values is not None and len(values) > 1 and (np.diff(values) < 0).any():
        order = np.argsort(values, kind="stable").astype(np.int64)
        ds, values = take(ds, struct, order), values[order]
        struct = structure(ds)
    atoms = int(counts[0]) if len(counts) else 0
    sizes, _ = partition_of(ds, struct)
    data: dict[Hashable, xr.Variable] = {}
    for key, var in ds.variables.items():
        level = level_of(var.dims, name=key)
        if key in POINTER_NAMES or PTR_DIM in var.dims or level == "edge":
            continue  # edges differ from frame to frame
        if level is None:
            data[key] = var
        elif level == "system":
            var = var.transpose(DIMS["system"], ...)
            data[key] = xr.Variable(("frame", *var.dims[1:]), _array(var), var.attrs)
        else:
            var = var.transpose(DIMS["atom"], ...)
            if is_dask(var) or is_lazy(var):
                var = align(var.to_base_variable(), struct, sizes, name=key)
            values_ = _reshape(var, len(counts), atoms, sizes)
            data[key] = xr.Variable(("frame", *var.dims), values_, var.attrs)
    _fix_atoms(data)
    coords: dict[Hashable, Any] = {n: v for n, v in data.items() if n in ds.coords}
    if values is None:
        values, attrs = np.arange(len(counts)), {"long_name": "number of the frame"}
    coords["time"] = xr.Variable(("frame",), values, attrs)
    if name is not None:
        data.pop(name, None)
        coords.pop(name, None)
        coords["time"] = xr.Variable(("frame",), values, attrs)
    keep = {n: v for n, v in data.items() if n not in coords and n != "time"}
    return xr.Dataset(keep, coords, ds.attrs)


def _array(var: xr.Variable) -> Any:
    return var.data if is_dask(var) else var.values


def _reshape(var: xr.Variable, frames: int, atoms: int, sizes: tuple[int, ...]) -> Any:
    shape = (frames, atoms, *var.shape[1:])
    if not is_dask(var):
        return var.values.reshape(shape)
    x = var.data
    if atoms == 0:
        return np.zeros(shape, dtype=var.dtype)
    return x.map_blocks(
        _fold,
        atoms,
        chunks=(tuple(sizes), (atoms,), *x.chunks[1:]),
        new_axis=1,
        dtype=x.dtype,
        meta=np.empty((0,) * len(shape), dtype=x.dtype),
    )


def _fold(values: NDArray, atoms: int) -> NDArray:
    return values.reshape(-1, atoms, *values.shape[1:])


def _fix_atoms(data: dict[Hashable, xr.Variable]) -> None:
    """What never changes along a trajectory has no frame axis; checked, not believed."""
    for name in _FIXED:
        var = data.get(name)
        if var is None or not var.shape[0]:
            continue
        first = np.asarray(var[0].values)
        if name == "atomic_numbers":
            same = (var == var[0]).all()
            if not bool(same.values):
                raise FieldError(
                    "ds.ragged.trajectory",
                    "atomic_numbers change from frame to frame",
                    expected="frames of one system, its atoms in one order",
                )
        elif not bool((var == var[0]).all().values):
            continue
        data[name] = xr.Variable(var.dims[1:], first, var.attrs)


def times(
    ds: xr.Dataset, time: str | None, time_step: float | None
) -> tuple[NDArray | None, dict[str, Any], Hashable | None]:
    """Time of each sample, its attributes, and the variable it came from."""
    if time is not None and time not in ds.variables:
        raise UnknownFieldError(
            "ds.ragged.trajectory", f"no variable {time!r} to take the time from"
        )
    names = [time] if time else [n for n in _TIMES if n in ds.variables]
    found = next((n for n in names if ds.variables[n].dims == (DIMS["system"],)), None)
    if found is None:
        if time_step is None:
            return None, {}, None
        count = structure(ds).num_samples
        return np.arange(count) * time_step, {"long_name": "time", "units": "fs"}, None
    var = ds.variables[found]
    values = np.asarray(var.values)
    if found != "time" and time_step is not None:
        return values * time_step, {"long_name": "time", "units": "fs"}, found
    attrs = {str(k): v for k, v in var.attrs.items() if k in ("units", "long_name")}
    if found == "time":
        # Public times are in fs; a store says so only where it uses another unit.
        attrs.setdefault("units", "fs")
    return values, attrs, found

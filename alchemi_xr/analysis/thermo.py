"""Temperature, pressure and energy conservation of trajectories.

The formulas are those of `alchemi_xr.data.thermo`; here they meet frozen
atoms, missing masses and time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import NDArray
from alchemi_xr.analysis.basics import masses_of
from alchemi_xr.analysis.species import need, sample_coords
from alchemi_xr.data import thermo
from alchemi_xr.data.block import Block
from alchemi_xr.data.cells import periodicity, volumes
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.errors import FieldError
from alchemi_xr.ragged.conventions import level_of
from alchemi_xr.ragged.mapping import apply_blocks
from alchemi_xr.units import EV_PER_A3_IN_GPA

__all__ = ["energy_drift", "pressure", "temperature"]

_MOTION = ("velocities", "momenta", "atomic_masses", "atomic_numbers")


def _motion(ds: xr.Dataset, where: str) -> list[str]:
    if "velocities" not in ds.variables and "momenta" not in ds.variables:
        need(ds, ("velocities",), where)
    return [n for n in _MOTION if n in ds.variables]


def _velocities(block: Block) -> tuple[NDArray, NDArray]:
    mass = masses_of(block)
    if "velocities" in block:
        return block["velocities"].astype(np.float64), mass
    return block["momenta"] / mass[:, None], mass


def temperature(
    ds: xr.Dataset, *, frozen: Any = None, com_removed: bool = False, constraints: int = 0
) -> xr.DataArray:
    r"""Kinetic temperature of every sample.

    .. math:: T = \frac{\sum_a m_a |v_a|^2}{f k_B} , \qquad f = 3 N_{free} - 3 c - n

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``velocities`` (or ``momenta``).
    frozen : str or bool DataArray over ``atom``, optional
        Atoms that do not move: they have no degrees of freedom, and no part in the sum.
    com_removed : bool
        The centre of mass is at rest (``c = 1``), as in most molecular dynamics. It is
        not counted where atoms are frozen, since these take up momentum.
    constraints : int
        Constraints ``n`` of every sample (rigid bonds).

    Returns
    -------
    DataArray over ``sample``, K
        NaN for a sample without degrees of freedom. Lazy on Dask.

    References
    ----------
    .. [1] M. P. Allen and D. J. Tildesley, *Computer Simulation of Liquids*, 2nd ed. (2017), sec. 2.4.
    """
    names = _motion(ds, "temperature")
    if frozen is not None:
        if isinstance(frozen, str):
            need(ds, (frozen,), "temperature")
            frozen = ds[frozen]
        frozen = xr.DataArray(frozen, dims="atom") if not hasattr(frozen, "dims") else frozen
        if level_of(frozen.dims) != "atom" or frozen.ndim != 1:
            raise FieldError("temperature", "frozen has not one value an atom", found=frozen.dims)
        ds = ds.assign(_frozen=frozen.astype(bool).variable)
        names.append("_frozen")
    values = apply_blocks(ds, names, _temperature, com_removed, constraints, rows="system")
    attrs = {"units": "K", "long_name": "kinetic temperature", "level": "system"}
    coords = sample_coords(ds)
    attrs["analysis"] = "temperature"
    return xr.DataArray(values, coords, ("sample",), "temperature", attrs)


def _temperature(block: Block, com_removed: bool, constraints: int) -> NDArray:
    v, mass = _velocities(block)
    free = np.ones(len(mass), dtype=bool)
    if "_frozen" in block:
        free = ~block["_frozen"]
        v = np.where(free[:, None], v, 0.0)
    moving = segment_reduce(free.astype(np.int64), block.atoms_ptr, "sum")
    dof = 3 * moving - constraints
    if com_removed:
        dof -= 3 * (moving == np.diff(block.atoms_ptr))
    out = np.asarray(thermo.temperature(v, mass, block.atoms_ptr, dof=np.maximum(dof, 0)))
    return np.where(dof > 0, out, np.nan)


def pressure(ds: xr.Dataset, *, kinetic: bool | None = None) -> xr.DataArray:
    r"""Pressure of every sample, positive under compression.

    .. math:: p = -\frac{1}{3}\mathrm{tr}\,\sigma + \frac{2K}{3V}

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``stress`` (positive in tension) or ``virial`` and ``cell``.
    kinetic : bool, optional
        Add the ideal-gas part; by default where there are velocities.

    Returns
    -------
    DataArray over ``sample``, GPa
        NaN for a sample without volume. Lazy on Dask.
    """
    source = "stress" if "stress" in ds.variables else "virial"
    need(ds, (source,), "pressure")
    if kinetic is None:
        kinetic = "velocities" in ds.variables or "momenta" in ds.variables
    names = [source, *(n for n in ("cell", "pbc") if n in ds.variables)]
    if kinetic:
        names += _motion(ds, "pressure")
    if kinetic or source == "virial":
        need(ds, ("cell",), "pressure")
    values = apply_blocks(ds, names, _pressure, bool(kinetic), rows="system")
    attrs = {"units": "GPa", "long_name": "pressure", "level": "system", "analysis": "pressure"}
    return xr.DataArray(values, sample_coords(ds), ("sample",), "pressure", attrs)


def _pressure(block: Block, kinetic: bool) -> NDArray:
    volume = volumes(block) if "pbc" in block else np.abs(np.linalg.det(periodicity(block)[0]))
    with np.errstate(invalid="ignore", divide="ignore"):
        if "stress" in block:
            out = np.asarray(thermo.pressure(block["stress"].astype(np.float64)))
        else:
            out = np.trace(block["virial"].astype(np.float64), axis1=1, axis2=2) / (3 * volume)
        if kinetic:
            v, mass = _velocities(block)
            energy = thermo.kinetic_energy(v, mass, block.atoms_ptr)
            out = out + 2.0 * np.asarray(energy) / (3.0 * volume)
    return out * EV_PER_A3_IN_GPA


def energy_drift(
    ds: xr.Dataset, *, by: str = "system_id", time_step: float | None = None
) -> xr.Dataset:
    r"""How well each system keeps its energy.

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``energy``; the kinetic energy is added where there are velocities.
    by : str
        Variable that tells the systems apart; without it all samples are frames of one.
    time_step : float, optional
        fs between frames, or of one ``step``.

    Returns
    -------
    Dataset over the systems
        ``drift``, the slope of a straight line through the total energy per atom,
        in eV per unit of time (``meV/ps`` where time is in fs); ``fluctuation``, the rms
        deviation from that line, in eV an atom; and ``energy`` an atom over ``sample``.
    """
    from alchemi_xr.ragged.trajectory import times

    need(ds, ("energy",), "energy_drift")
    names = ["energy"]
    if "velocities" in ds.variables or "momenta" in ds.variables:
        names += _motion(ds, "energy_drift")
    total = np.asarray(apply_blocks(ds, names, _per_atom, rows="system"))
    values, attrs, _ = times(ds, None, time_step)
    units = str(attrs.get("units", "steps" if values is not None else "frames"))
    label = np.zeros(len(total), dtype=np.int64)
    if by in ds.variables:
        label = np.asarray(ds[by].values)
    keys, inverse = np.unique(
        label.astype(str) if label.dtype.kind == "O" else label, return_inverse=True
    )
    drift, spread = np.full(len(keys), np.nan), np.full(len(keys), np.nan)
    for k in range(len(keys)):
        at = np.flatnonzero(inverse == k)
        t = np.arange(len(at), dtype=np.float64) if values is None else values[at].astype(float)
        if len(at) > 1 and np.ptp(t) > 0:
            slope, start = np.polyfit(t - t.mean(), total[at], 1)
            drift[k] = slope
            spread[k] = np.sqrt(np.mean((total[at] - slope * (t - t.mean()) - start) ** 2))
    unit = f"eV/{units}"
    if units == "fs":
        drift, unit = drift * 1e6, "meV/ps"
    return xr.Dataset(
        {
            "drift": ((by,), drift, {"units": unit, "long_name": "drift of the energy per atom"}),
            "fluctuation": ((by,), spread, {"units": "eV", "long_name": "rms about the drift"}),
            "energy": (("sample",), total, {"units": "eV", "long_name": "total energy per atom"}),
        },
        {
            by: keys,
            "time": (
                "sample",
                np.arange(len(total)) if values is None else values,
                {"units": units},
            ),
        },
        {"analysis": "energy_drift"},
    )


def _per_atom(block: Block) -> NDArray:
    out = block["energy"].astype(np.float64).reshape(-1)
    if "velocities" in block or "momenta" in block:
        v, mass = _velocities(block)
        out = out + np.asarray(thermo.kinetic_energy(v, mass, block.atoms_ptr))
    with np.errstate(invalid="ignore", divide="ignore"):
        return out / np.diff(block.atoms_ptr)

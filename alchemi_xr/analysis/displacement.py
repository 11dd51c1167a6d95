"""Mean squared displacement and the diffusion coefficient."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import NDArray
from alchemi_xr.analysis.basics import masses_of
from alchemi_xr.analysis.frames import Frames, correlate, iter_systems
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged.mapping import as_block
from alchemi_xr.ragged.select import take

__all__ = ["diffusion", "msd"]

_AXES = {"x": 0, "y": 1, "z": 2}


def msd(
    ds: xr.Dataset,
    *,
    by: str = "system_id",
    axes: str = "xyz",
    time_step: float | None = None,
    scheme: str = "fractional",
    remove_drift: bool = False,
    blocks: int = 5,
) -> xr.Dataset:
    r"""Mean squared displacement of each element, over all time origins.

    .. math:: \mathrm{MSD}(m) = \frac{1}{N (F-m)} \sum_{a} \sum_{k=0}^{F-m-1}
              |x_a(k+m) - x_a(k)|^2

    by FFT in O(F log F) [1]_. Wrapped positions are unwrapped, also in triclinic and
    changing cells and where only some axes are periodic.

    Parameters
    ----------
    ds : Dataset
        Ragged; the samples are frames of one system, or of several told apart by ``by``.
    by : str
    axes : str
        Which of x, y, z are counted.
    time_step : float, optional
        fs between frames, or of one ``step`` where the store counts steps.
    scheme : {"fractional", "toroidal"}
        What a cell that changes means; the same for a constant cell. ``fractional``
        takes the motion within the cell, in the mean cell; ``toroidal`` sums the
        shortest displacements, each in the cell of its frame.
    remove_drift : bool
        Take off the motion of the centre of mass.
    blocks : int
        Parts of the trajectory whose own MSD gives `diffusion` its error; 0 for none.

    Returns
    -------
    Dataset over (system_id, element, lag)
        ``msd``; ``msd_block`` over (block, lag_block) besides. ``element`` begins with ``all``.

    Raises
    ------
    FieldError
        Samples that are not frames of one system, or not equally spaced.

    Warns
    -----
    UserWarning
        Atoms move by nearly half a cell between frames: they cannot be unwrapped.

    References
    ----------
    .. [1] V. Calandrini et al., *Collection SFN* 12, 201 (2011), sec. 3.1.
    """
    chosen = [_AXES[a] for a in axes if a in _AXES]
    if not chosen or len(chosen) != len(axes) or len(set(axes)) != len(axes):
        raise ConfigError("msd", f"axes={axes!r} are none", expected="'xyz', 'xy', 'z' …")
    parts, labels = [], []
    for label, frames in iter_systems(ds, ("positions",), "msd", by, time_step):
        parts.append(_one(frames, chosen, scheme, remove_drift, blocks))
        labels.append(label)
    if len(parts) == 1:
        out = parts[0] if by not in ds.variables else parts[0].assign_coords({by: labels[0]})
    else:
        index = xr.DataArray(labels, dims=by, name=by)
        out = xr.concat(parts, dim=index, join="outer")
    return out.assign_attrs(analysis="msd", axes=axes, dimensions=len(axes))


def _one(
    frames: Frames, axes: list[int], scheme: str, remove_drift: bool, blocks: int
) -> xr.Dataset:
    groups = frames.groups()
    count = len(frames)
    size = count // blocks if blocks else 0
    drift = _drift(frames, scheme) if remove_drift else None
    total = np.zeros((len(groups), count))
    by_block = np.zeros((blocks, len(groups), size))
    for slab in frames.slabs():
        x = frames.unwrapped(slab, scheme)
        if drift is not None:
            x -= drift
        if axes != [0, 1, 2]:
            x = x[:, axes]
        weights = np.stack([mask[slab] for _, mask in groups]).astype(np.float64)
        total += _sums(x, weights)
        for k in range(blocks if size > 1 else 0):
            by_block[k] += _sums(x[:, :, k * size : (k + 1) * size], weights)
    atoms = np.array([max(1, mask.sum()) for _, mask in groups])[:, None]
    lag = {"units": frames.units, "long_name": "time lag"}
    attrs = {"units": "Å²", "long_name": "mean squared displacement"}
    coords: dict[str, Any] = {
        "element": ("element", [name for name, _ in groups]),
        "lag": ("lag", np.arange(count) * frames.lag, lag),
    }
    data: dict[str, Any] = {"msd": (("element", "lag"), total / atoms, attrs)}
    if size > 1:
        coords["lag_block"] = ("lag_block", np.arange(size) * frames.lag, lag)
        dims = ("block", "element", "lag_block")
        data["msd_block"] = (dims, by_block / atoms, {**attrs, "long_name": "MSD of each part"})
    return xr.Dataset(data, coords)


def _sums(x: NDArray, weights: NDArray) -> NDArray:
    """Sum over atoms of their MSD, [G, F]."""
    count = x.shape[-1]
    # The mean position drops out; without it less is lost to rounding.
    products, squares = correlate(x, weights, center=True)
    ends = np.cumsum(squares, axis=1)
    # Both ends of the pairs at lag m: frames m ... F-1 and 0 ... F-1-m.
    last = ends[:, ::-1]
    first = ends[:, -1:] - np.concatenate([np.zeros((len(ends), 1)), ends[:, :-1]], axis=1)
    out = (first + last - 2.0 * products) / (count - np.arange(count))
    out[:, 0] = 0.0
    return np.maximum(out, 0.0)


def _drift(frames: Frames, scheme: str) -> NDArray:
    """Way of the centre of mass, [3, frames]."""
    one = as_block(take(frames.ds, _struct(frames), np.zeros(1, dtype=np.int64)).compute())
    mass = masses_of(one) if "atomic_numbers" in one else np.ones(frames.atoms)
    total = np.zeros((3, len(frames)))
    for slab in frames.slabs():
        total += np.einsum("a,axf->xf", mass[slab], frames.unwrapped(slab, scheme))
    return total / mass.sum()


def _struct(frames: Frames) -> Any:
    from alchemi_xr.ragged.conventions import structure

    return structure(frames.ds)


def diffusion(msd: xr.Dataset, *, fit: tuple[float, float] = (0.1, 0.5)) -> xr.Dataset:
    r"""Diffusion coefficient from the slope of the MSD, with its error.

    .. math:: D = \frac{1}{2d} \frac{\mathrm{d}\,\mathrm{MSD}}{\mathrm{d}t}

    Parameters
    ----------
    msd : Dataset
        From `msd`.
    fit : (float, float)
        Lags of the fit, as parts of the longest lag; of the longest lag of a block for
        the error.

    Returns
    -------
    Dataset
        ``D`` in Å² per unit of time (and ``D_cm2_s`` where time is in fs), ``D_error``, the
        standard error of the mean over the blocks of the trajectory, and ``intercept``.
    """
    low, high = fit
    if not 0 <= low < high <= 1:
        raise ConfigError(
            "diffusion", "fit is no range", found=fit, expected="0 <= low < high <= 1"
        )
    dimensions = int(msd.attrs.get("dimensions", 3))
    units = str(msd.lag.attrs.get("units", "frames"))
    slope, intercept = _fit(msd.msd, "lag", fit)
    attrs = {"units": f"Å²/{units}", "long_name": "diffusion coefficient"}
    out = xr.Dataset({"D": slope / (2 * dimensions), "intercept": intercept})
    if "msd_block" in msd:
        each = _fit(msd.msd_block, "lag_block", fit)[0] / (2 * dimensions)
        count = each.sizes["block"]
        out["D_error"] = each.std("block", ddof=1) / np.sqrt(count) if count > 1 else each * np.nan
        out["D_error"].attrs = {**attrs, "long_name": "standard error of D"}
    out["D"].attrs = attrs
    out["intercept"].attrs = {"units": "Å²", "long_name": "MSD at lag 0 of the fit"}
    if units == "fs":
        # 1 Å²/fs = 1e-16 cm² / 1e-15 s
        out["D_cm2_s"] = (out.D * 0.1).assign_attrs({**attrs, "units": "cm²/s"})
    return out.assign_attrs(analysis="diffusion")


def _fit(y: xr.DataArray, dim: str, fit: tuple[float, float]) -> tuple[xr.DataArray, xr.DataArray]:
    lag = y[dim]
    longest = float(lag[-1]) if lag.size else 0.0
    part = y.where((lag >= fit[0] * longest) & (lag <= fit[1] * longest), drop=True)
    if part.sizes[dim] < 2:
        raise ConfigError(
            "diffusion", "the fit holds fewer than two lags", found=part.sizes[dim], expected=">= 2"
        )
    found = part.polyfit(dim, 1).polyfit_coefficients
    return found.sel(degree=1, drop=True), found.sel(degree=0, drop=True)

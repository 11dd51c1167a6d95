"""Velocity autocorrelation and the vibrational spectrum."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import NDArray
from alchemi_xr.analysis.basics import masses_of
from alchemi_xr.analysis.frames import Frames, correlate, iter_systems
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged.conventions import structure
from alchemi_xr.ragged.mapping import as_block
from alchemi_xr.ragged.select import take

__all__ = ["vacf"]

_THZ_IN_INVERSE_CM = 33.35640951981521
_WINDOWS = ("hann", "none")


def vacf(
    ds: xr.Dataset,
    *,
    by: str = "system_id",
    time_step: float | None = None,
    max_lag: int | None = None,
    mass_weighted: bool = True,
    window: str = "hann",
) -> xr.Dataset:
    r"""Velocity autocorrelation of each element, and its spectrum.

    .. math:: C(m) = \frac{1}{F-m} \sum_a m_a \sum_k v_a(k+m) \cdot v_a(k) , \qquad
              S(\nu) = 2 \int_0^{\infty} \frac{C(t)}{C(0)} w(t) \cos(2\pi\nu t)\,dt

    The mass-weighted spectrum is the vibrational density of states of a harmonic
    solid [1]_.

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``velocities`` (or ``momenta``); the samples are frames of one system, or of
        several told apart by ``by``.
    by : str
    time_step : float, optional
        fs between frames, or of one ``step``.
    max_lag : int, optional
        Frames; by default half of them. More gives a finer, noisier spectrum.
    mass_weighted : bool
    window : {"hann", "none"}
        Fades the correlation out, so that its cut leaves no ripples.

    Returns
    -------
    Dataset over (system_id, element, lag) and (…, frequency)
        ``vacf``, normalised to 1 at lag 0; ``spectrum``; the coordinates
        ``frequency`` (THz where time is in fs) and ``wavenumber`` (1/cm).

    References
    ----------
    .. [1] M. P. Allen and D. J. Tildesley, *Computer Simulation of Liquids*, 2nd ed. (2017), sec. 2.7.
    """
    if window not in _WINDOWS:
        raise ConfigError("vacf", f"{window!r} is no window", expected=_WINDOWS)
    if max_lag is not None and max_lag < 2:
        raise ConfigError("vacf", "max_lag is too short", found=max_lag, expected=">= 2")
    parts, labels = [], []
    source = "momenta" if "momenta" in ds.variables else "velocities"
    source = "velocities" if "velocities" in ds.variables else source
    for label, frames in iter_systems(ds, (source,), "vacf", by, time_step):
        parts.append(_one(frames, max_lag, mass_weighted, window))
        labels.append(label)
    if len(parts) == 1:
        out = parts[0] if by not in ds.variables else parts[0].assign_coords({by: labels[0]})
    else:
        out = xr.concat(parts, dim=xr.DataArray(labels, dims=by, name=by), join="outer")
    return out.assign_attrs(analysis="vacf", window=window)


def _one(frames: Frames, max_lag: int | None, mass_weighted: bool, window: str) -> xr.Dataset:
    groups = frames.groups()
    mass = np.ones(frames.atoms)
    if mass_weighted:
        one = take(frames.ds, structure(frames.ds), np.zeros(1, dtype=np.int64))
        mass = masses_of(as_block(one.compute()))
    count = len(frames)
    total = np.zeros((len(groups), count))
    for slab in frames.slabs():
        weights = np.stack([mask[slab] * mass[slab] for _, mask in groups])
        total += correlate(frames.series("velocities", slab), weights)[0]
    total /= count - np.arange(count)
    lags = min(count, max_lag or max(2, count // 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        curve = total[:, :lags] / total[:, :1]
    frequency, spectrum = _spectrum(curve, frames.lag, window)
    coords: dict[str, Any] = {
        "element": ("element", [name for name, _ in groups]),
        "lag": (
            "lag",
            np.arange(lags) * frames.lag,
            {"units": frames.units, "long_name": "time lag"},
        ),
    }
    unit, time = f"1/{frames.units}", frames.units
    if frames.units == "fs":
        unit, frequency = "THz", frequency * 1e3
        coords["wavenumber"] = (
            "frequency",
            frequency * _THZ_IN_INVERSE_CM,
            {"units": "1/cm", "long_name": "wavenumber"},
        )
    coords["frequency"] = ("frequency", frequency, {"units": unit, "long_name": "frequency"})
    return xr.Dataset(
        {
            "vacf": (
                ("element", "lag"),
                curve,
                {"long_name": "velocity autocorrelation, normalised"},
            ),
            "spectrum": (
                ("element", "frequency"),
                spectrum,
                {"units": time, "long_name": "spectrum of the velocity autocorrelation"},
            ),
        },
        coords,
    )


def _spectrum(curve: NDArray, lag: float, window: str) -> tuple[NDArray, NDArray]:
    """Cosine transform of the even continuation, by frequency in 1/lag units."""
    lags = curve.shape[1]
    faded = curve
    if window == "hann":
        faded = curve * 0.5 * (1.0 + np.cos(np.pi * np.arange(lags) / lags))
    # Zeros behind make no new detail, but a curve that can be looked at.
    faded = np.pad(faded, ((0, 0), (0, 3 * lags)))
    even = np.concatenate([faded, faded[:, :0:-1]], axis=1)
    spectrum = np.fft.rfft(even, axis=1).real * lag
    return np.fft.rfftfreq(even.shape[1], d=lag), spectrum

"""Energy of each element by least squares, and what does not fit."""

from __future__ import annotations

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.analysis.basics import symbols
from alchemi_xr.analysis.species import elements_of, need
from alchemi_xr.analysis.stats import count_elements
from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["baseline", "outliers"]


def baseline(ds: xr.Dataset, name: str = "energy") -> xr.Dataset:
    r"""Energy of each element such that their sums come nearest to the energies.

    .. math:: \min_\epsilon \sum_s \Big(E_s - \sum_z n_{sz} \epsilon_z\Big)^2

    from the normal equations, summed block by block; of several answers (elements that
    only come together) the smallest.

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``atomic_numbers``.
    name : str
        The energy, over ``sample``; values that are missing or not finite are left out and
        counted (``left_out``).

    Returns
    -------
    Dataset
        ``element_energy`` over ``element``; ``residual`` over ``sample``, the energy per atom
        above the baseline (lazy on Dask); ``rank``, less than the elements where they
        cannot be told apart; ``rmse`` of the residual.
    """
    need(ds, (name, "atomic_numbers"), "baseline")
    if ds.variables[name].dims != ("sample",):
        raise FieldError("baseline", f"{name!r} has not one value a sample")
    elements = elements_of(ds)
    numbers = np.array(elements, dtype=np.int64)
    size = len(elements)
    parts = apply_blocks(
        ds,
        [name, "atomic_numbers"],
        _normal,
        name,
        numbers,
        rows="block",
        tail=(size + 1, size + 2),
    )
    total = np.asarray(parts.sum(axis=0))
    gram, right = total[:size, :size], total[:size, size]
    # Scaled to a unit diagonal, so that a rare element is not taken for none.
    scale = 1.0 / np.sqrt(np.maximum(np.diag(gram), 1e-300))
    found, _, rank, _ = np.linalg.lstsq(gram * np.outer(scale, scale), right * scale, rcond=1e-10)
    energies = found * scale
    attrs = {k: v for k, v in ds[name].attrs.items() if k == "units"}
    residual = apply_blocks(
        ds, [name, "atomic_numbers"], _residual, name, numbers, energies, rows="system"
    )
    used = total[size, size + 1]
    square = total[size, size] - 2 * energies @ right + energies @ gram @ energies
    per = {"units": f"{attrs['units']}/atom"} if attrs else {}
    return xr.Dataset(
        {
            "element_energy": (
                "element",
                energies,
                {**attrs, "long_name": "energy of each element, least squares"},
            ),
            "residual": (
                "sample",
                residual,
                {**per, "long_name": "energy per atom above the baseline", "level": "system"},
            ),
            "rank": ((), int(rank)),
            "rmse": ((), float(np.sqrt(max(square, 0.0) / max(used, 1))), attrs),
            "left_out": ((), int(total[size, 0])),
        },
        {"element": np.array([symbols()[z] for z in elements], dtype=str)},
        {"analysis": "baseline"},
    )


def _normal(block: Block, name: str, elements: IntArray) -> NDArray:
    """A'A, A'y, y'y, the samples used and those left out, in one square."""
    energy = block[name].astype(np.float64).reshape(-1)
    good = np.isfinite(energy) & block.has(name) & (np.diff(block.atoms_ptr) > 0)
    a, y = count_elements(block, elements)[good], energy[good]
    size = len(elements)
    out = np.zeros((size + 1, size + 2))
    out[:size, :size], out[:size, size] = a.T @ a, a.T @ y
    out[size, size], out[size, size + 1] = y @ y, good.sum()
    out[size, 0] = (~good).sum() if size else 0
    return out


def _residual(block: Block, name: str, elements: IntArray, energies: NDArray) -> NDArray:
    energy = block[name].astype(np.float64).reshape(-1)
    counts = np.diff(block.atoms_ptr)
    with np.errstate(invalid="ignore", divide="ignore"):
        out = (energy - count_elements(block, elements) @ energies) / counts
    return np.where(block.has(name), out, np.nan)


def outliers(residual: xr.DataArray, *, threshold: float = 6.0) -> xr.DataArray:
    r"""Samples whose residual is far from the others'.

    .. math:: |r - \mathrm{median}| > k \cdot 1.4826 \cdot \mathrm{median}|r - \mathrm{median}|

    Parameters
    ----------
    residual : DataArray over ``sample``
        Such as ``baseline(ds).residual``.
    threshold : float
        ``k``, in robust standard deviations [1]_.

    Returns
    -------
    bool DataArray over ``sample``
        For ``ds.ragged.where``. Residuals that are not finite are outliers.

    References
    ----------
    .. [1] P. J. Rousseeuw and C. Croux, *J. Am. Stat. Assoc.* 88, 1273 (1993).
    """
    if not threshold > 0:
        raise ConfigError("outliers", "threshold is no number > 0", found=threshold)
    values = np.asarray(residual.values, dtype=np.float64)
    good = np.isfinite(values)
    middle = np.median(values[good]) if good.any() else 0.0
    away = np.abs(values - middle)
    spread = 1.4826 * np.median(away[good]) if good.any() else 0.0
    # Half of the values alike: rounding must not make the others outliers.
    spread = max(spread, 1e-12 * max(1.0, abs(middle)))
    return residual.copy(data=~good | (np.nan_to_num(away) > threshold * spread)).rename("outlier")

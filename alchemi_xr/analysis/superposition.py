"""Deviation from a reference structure, with superposition."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import NDArray
from alchemi_xr.analysis.basics import masses_of
from alchemi_xr.analysis.species import need, sample_coords
from alchemi_xr.data.block import Block
from alchemi_xr.data.cells import complete_cells, periodicity
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.ragged.conventions import structure
from alchemi_xr.ragged.mapping import apply_blocks, as_block
from alchemi_xr.ragged.select import take

__all__ = ["rmsd", "rmsf", "superpose"]


def superpose(x: NDArray, reference: NDArray, weights: NDArray) -> NDArray:
    """Structures turned and moved onto a reference, least squares.

    Parameters
    ----------
    x : float64 array, [F, A, 3]
    reference : float64 array, [A, 3]
    weights : float64 array, [A]

    Returns
    -------
    float64 array, [F, A, 3]

    References
    ----------
    .. [1] W. Kabsch, *Acta Cryst. A* 32, 922 (1976); 34, 827 (1978).
    """
    w = weights / weights.sum()
    middle = w @ reference
    moved = x - np.einsum("a,fai->fi", w, x)[:, None]
    covariance = np.einsum("a,fai,aj->fij", w, moved, reference - middle, optimize=True)
    u, _, vt = np.linalg.svd(covariance)
    # A rotation, never a mirror: the smallest axis turns where the determinant is -1.
    sign = np.sign(np.linalg.det(u) * np.linalg.det(vt))
    u[:, :, 2] *= np.where(sign == 0, 1.0, sign)[:, None]
    out: NDArray = moved @ (u @ vt) + middle
    return out


def _reference(
    ds: xr.Dataset, reference: Any, weights: str, where: str
) -> tuple[NDArray, NDArray, NDArray]:
    """Positions [A, 3], cell [3, 3] and weights [A] of the reference."""
    need(ds, ("positions",), where)
    if weights not in ("mass", "equal"):
        raise ConfigError(where, f"weights={weights!r} are none", expected="'mass' or 'equal'")
    struct = structure(ds)
    counts = np.diff(struct.atoms_ptr)
    if not len(counts) or (counts != counts[0]).any():
        raise FieldError(
            where,
            "the samples do not all have the same number of atoms",
            found=f"{counts.min(initial=0)} to {counts.max(initial=0)}",
            mend="choose the frames of one system: ds.ragged.sel(system_id=...)",
        )
    at = int(reference) if isinstance(reference, (int, np.integer)) else 0
    if not -len(counts) <= at < len(counts):
        raise ConfigError(where, "there is no such frame", found=at, expected=f"< {len(counts)}")
    one = as_block(take(ds, struct, np.array([at % len(counts)], dtype=np.int64)).compute())
    if isinstance(reference, (int, np.integer)):
        place = one["positions"].astype(np.float64)
    else:
        place = np.asarray(getattr(reference, "values", reference), dtype=np.float64)
        if place.shape != (counts[0], 3):
            raise FieldError(
                where, "reference does not fit", found=place.shape, expected=(int(counts[0]), 3)
            )
    home = complete_cells(*periodicity(one))[0]
    return place, home, masses_of(one) if weights == "mass" else np.ones(counts[0])


def _images(block: Block, x: NDArray, place: NDArray, home: NDArray) -> NDArray:
    """Each atom at the image nearest to its place in the reference.

    How the structure moved as a whole is taken off first (the circular mean of the
    displacements), so that a molecule that wanders through the cell stays in one piece.
    """
    cell, pbc = periodicity(block)
    if not pbc.any() or not len(place):
        return x
    full = complete_cells(cell, pbc)
    away = x @ np.linalg.inv(full) - place @ np.linalg.inv(home)
    whole = np.angle(np.exp(2j * np.pi * away).mean(axis=1, keepdims=True)) / (2 * np.pi)
    jumps = np.where(pbc[:, None, :], np.rint(away - whole), 0.0)
    return x - jumps @ full


def rmsd(
    ds: xr.Dataset,
    *,
    reference: Any = 0,
    superposition: bool = True,
    weights: str = "equal",
    images: bool = True,
) -> xr.DataArray:
    r"""Root mean square deviation of every frame from a reference.

    .. math:: \mathrm{RMSD} = \min_{R,t} \sqrt{\sum_a w_a |R x_a + t - y_a|^2 / \sum_a w_a}

    Parameters
    ----------
    ds : Dataset
        Ragged; all samples have the same atoms.
    reference : int or array [A, 3]
        A frame, or positions.
    superposition : bool
        Turn and move each frame onto the reference first (Kabsch).
    weights : {"equal", "mass"}
    images : bool
        Along periodic axes take each atom at its image nearest to the reference (the
        motion of the whole taken off), so that wrapped atoms do not count as moved. The
        reference itself must be whole.

    Returns
    -------
    DataArray over ``sample``, Å
        Lazy on Dask.
    """
    place, home, w = _reference(ds, reference, weights, "rmsd")
    values = apply_blocks(
        ds, _names(ds, images), _rmsd, place, home, w, superposition, rows="system"
    )
    attrs = {"units": "Å", "long_name": "root mean square deviation", "level": "system"}
    return xr.DataArray(
        values, sample_coords(ds), ("sample",), "rmsd", {**attrs, "analysis": "rmsd"}
    )


def _names(ds: xr.Dataset, images: bool) -> list[str]:
    names = ["positions", "cell", "pbc"] if images else ["positions"]
    return [n for n in names if n in ds.variables]


def _placed(
    block: Block, place: NDArray, home: NDArray, w: NDArray, superposition: bool
) -> NDArray:
    """Frames [F, A, 3] at the images and in the place that are compared."""
    x = block["positions"].reshape(-1, *place.shape).astype(np.float64)
    x = _images(block, x, place, home)
    return superpose(x, place, w) if superposition and len(place) else x


def _rmsd(block: Block, place: NDArray, home: NDArray, w: NDArray, superposition: bool) -> NDArray:
    x = _placed(block, place, home, w, superposition)
    return np.sqrt(np.einsum("a,fai->f", w, (x - place) ** 2) / w.sum())


def rmsf(
    ds: xr.Dataset,
    *,
    reference: Any = 0,
    superposition: bool = True,
    weights: str = "mass",
    images: bool = True,
) -> xr.DataArray:
    r"""Root mean square fluctuation of every atom about its mean place.

    .. math:: \mathrm{RMSF}_a = \sqrt{\langle |x_a - \langle x_a \rangle|^2 \rangle}

    Parameters
    ----------
    ds, reference, superposition, weights, images
        As for `rmsd`; frames are first put onto the reference.

    Returns
    -------
    DataArray over ``atom``, Å
        Lazy on Dask.
    """
    place, home, w = _reference(ds, reference, weights, "rmsf")
    parts = apply_blocks(
        ds,
        _names(ds, images),
        _fluctuations,
        place,
        home,
        w,
        superposition,
        rows="block",
        tail=(len(place), 4),
    )
    total = parts.sum(axis=0) / max(1, structure(ds).num_samples)
    values = (total[:, 3] - (total[:, :3] ** 2).sum(axis=1)).clip(0) ** 0.5
    attrs = {"units": "Å", "long_name": "root mean square fluctuation", "analysis": "rmsf"}
    return xr.DataArray(values, dims=("atom",), name="rmsf", attrs=attrs)


def _fluctuations(
    block: Block, place: NDArray, home: NDArray, w: NDArray, superposition: bool
) -> NDArray:
    """Sums of the deviation from the reference and of its square: small numbers both."""
    away = _placed(block, place, home, w, superposition) - place
    return np.concatenate([away.sum(0), (away**2).sum((0, 2))[:, None]], axis=1)

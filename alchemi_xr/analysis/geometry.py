"""Bond lengths, bond angles and coordination numbers, by element.

Two atoms are bonded when they are nearer than the sum of their covalent radii
times a factor, or than a cutoff given for their elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.analysis.basics import check_length, symbols
from alchemi_xr.analysis.species import elements_of, need, number_of, or_nan, pair_table
from alchemi_xr.data.block import Block
from alchemi_xr.data.pairs import iter_pairs
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["angles", "bond_lengths", "coordination"]

_NAMES = ("positions", "atomic_numbers", "cell", "pbc")


def _reach(cutoff: Any, scale: float, elements: list[int], where: str) -> NDArray:
    """Length below which two elements are bonded, [128, 128]; 0 for never."""
    out = np.zeros((128, 128))
    if isinstance(cutoff, Mapping):
        for pair, length in cutoff.items():
            a, b = pair.split("-") if isinstance(pair, str) else pair
            one, two = number_of(a), number_of(b)
            out[one, two] = out[two, one] = check_length(length, where, f"cutoff of {pair}")
        return out
    if cutoff is not None:
        out[:] = check_length(cutoff, where, "cutoff")
        return out
    from ase.data import covalent_radii

    check_length(scale, where, "scale")
    for a, b in itertools.product(elements, elements):
        out[a, b] = scale * (covalent_radii[a] + covalent_radii[b])
    return out


def _setup(
    ds: xr.Dataset, cutoff: Any, scale: float, bins: int, where: str
) -> tuple[list[int], NDArray, float, list[str]]:
    need(ds, ("positions", "atomic_numbers"), where)
    if not isinstance(bins, (int, np.integer)) or bins < 1:
        raise ConfigError(where, "bins is no count", found=bins, expected=">= 1")
    elements = elements_of(ds)
    reach = _reach(cutoff, scale, elements, where)
    longest = float(reach[np.ix_(elements, elements)].max(initial=0.0)) or 1.0
    return elements, reach, longest, [n for n in _NAMES if n in ds.variables]


def bond_lengths(
    ds: xr.Dataset, *, cutoff: Any = None, scale: float = 1.25, bins: int = 200
) -> xr.Dataset:
    """Distribution of the bond lengths of each pair of elements.

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``positions`` and ``atomic_numbers``.
    cutoff : float or dict, optional
        Å, for all pairs or for each (``{"O-H": 1.2}``); by default ``scale`` times the
        sum of the covalent radii [1]_.
    scale : float
    bins : int

    Returns
    -------
    Dataset over (pair, r)
        ``density`` (integrates to 1 over r), ``counts``; ``number``, ``mean`` and ``std``
        of each pair. Lazy on Dask.

    References
    ----------
    .. [1] B. Cordero et al., *Dalton Trans.* 2832 (2008).
    """
    elements, reach, longest, names = _setup(ds, cutoff, scale, bins, "bond_lengths")
    pairs = list(itertools.combinations_with_replacement(elements, 2))
    table, labels = pair_table(pairs)
    if not pairs:
        labels = []
    parts = apply_blocks(
        ds,
        names,
        _lengths,
        reach,
        longest,
        int(bins),
        table,
        len(labels),
        rows="block",
        tail=(len(labels), bins + 3),
    )
    attrs = {"long_name": "bond length", "units": "Å"}
    out = _distribution(parts.sum(axis=0), bins, longest, "pair", labels, "r", attrs)
    return out.assign_attrs(analysis="bond_lengths")


def _lengths(
    block: Block, reach: NDArray, longest: float, bins: int, table: IntArray, kinds: int
) -> NDArray:
    out = np.zeros((kinds, bins + 3))
    numbers = block["atomic_numbers"].astype(np.int64)
    for found in iter_pairs(block, longest):
        a, b = numbers[found.i], numbers[found.j]
        bonded = found.distance < reach[a, b]
        _tally(out, table[a, b][bonded], found.distance[bonded], longest, bins)
    return out


def _tally(out: NDArray, kind: IntArray, value: NDArray, top: float, bins: int) -> None:
    """Histogram, number, sum and sum of squares of each kind."""
    at = np.minimum((value * (bins / top)).astype(np.int64), bins - 1)
    kinds = len(out)
    counts = np.bincount(kind * bins + at, minlength=kinds * bins)
    out[:, :bins] += counts.reshape(kinds, bins)
    for k, power in enumerate((np.ones_like(value), value, value**2)):
        out[:, bins + k] += np.bincount(kind, power, minlength=kinds)


def _distribution(
    total: Any,
    bins: int,
    top: float,
    dim: str,
    labels: list[str],
    axis: str,
    attrs: dict[str, str],
) -> xr.Dataset:
    counts, number = total[:, :bins], total[:, bins]
    bottom = or_nan(number)
    mean = total[:, bins + 1] / bottom
    std = (total[:, bins + 2] / bottom - mean**2).clip(0) ** 0.5
    density = counts / bottom[:, None] * (bins / top)
    name = attrs["long_name"]
    centers = (np.arange(bins) + 0.5) * top / bins
    return xr.Dataset(
        {
            "density": (
                (dim, axis),
                density,
                {"long_name": f"density of the {name}", "units": f"1/{attrs['units']}"},
            ),
            "counts": ((dim, axis), counts, {"long_name": "number in each bin"}),
            "number": ((dim,), number, {"long_name": "number"}),
            "mean": ((dim,), mean, {**attrs, "long_name": f"mean {name}"}),
            "std": ((dim,), std, {**attrs, "long_name": f"standard deviation of the {name}"}),
        },
        {dim: (dim, np.array(labels, dtype=str)), axis: (axis, centers, attrs)},
    )


def angles(
    ds: xr.Dataset, *, cutoff: Any = None, scale: float = 1.25, bins: int = 180
) -> xr.Dataset:
    """Distribution of the angles between bonds, by the elements of end, centre and end.

    Parameters
    ----------
    ds, cutoff, scale
        As for `bond_lengths`.
    bins : int
        Between 0 and 180 degrees.

    Returns
    -------
    Dataset over (triple, angle)
        As for `bond_lengths`; ``triple`` is such as ``H-O-H``, its ends in the order of
        atomic numbers. Lazy on Dask.
    """
    elements, reach, longest, names = _setup(ds, cutoff, scale, bins, "angles")
    ends = list(itertools.combinations_with_replacement(elements, 2))
    known = symbols()
    labels = [f"{known[a]}-{known[c]}-{known[b]}" for c in elements for a, b in ends]
    table = np.full((128, 128, 128), -1, dtype=np.int64)
    for k, (center, (a, b)) in enumerate(itertools.product(elements, ends)):
        table[a, center, b] = table[b, center, a] = k
    parts = apply_blocks(
        ds,
        names,
        _angles,
        reach,
        longest,
        int(bins),
        table,
        len(labels),
        rows="block",
        tail=(len(labels), bins + 3),
    )
    attrs = {"long_name": "bond angle", "units": "degree"}
    out = _distribution(parts.sum(axis=0), bins, 180.0, "triple", labels, "angle", attrs)
    return out.assign_attrs(analysis="angles")


def _angles(
    block: Block, reach: NDArray, longest: float, bins: int, table: IntArray, kinds: int
) -> NDArray:
    out = np.zeros((kinds, bins + 3))
    numbers = block["atomic_numbers"].astype(np.int64)
    for found in iter_pairs(block, longest, vectors=True):
        assert found.vector is not None
        near = found.distance < reach[numbers[found.i], numbers[found.j]]
        i, j, v = found.i[near], found.j[near], found.vector[near]
        # Both directions, by centre: all pairs of bonds of a centre are its angles.
        center, end = np.concatenate([i, j]), np.concatenate([j, i])
        arm = np.concatenate([v, -v])
        order = np.argsort(center, kind="stable")
        center, end, arm = center[order], end[order], arm[order]
        one, two = _bond_pairs(center)
        norm = np.linalg.norm(arm, axis=1)
        cosine = np.einsum("ij,ij->i", arm[one], arm[two]) / (norm[one] * norm[two])
        angle = np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0)))
        kind = table[numbers[end[one]], numbers[center[one]], numbers[end[two]]]
        _tally(out, kind, angle, 180.0, bins)
    return out


def _bond_pairs(center: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of rows with one centre; ``center`` is sorted."""
    if not len(center):
        return center, center
    first = np.flatnonzero(np.diff(center, prepend=-1))
    sizes = np.diff(np.append(first, len(center)))
    # Row k of a centre meets the rows after it.
    stop = np.repeat(first + sizes, sizes)
    later = stop - np.arange(len(center)) - 1
    one = np.repeat(np.arange(len(center)), later)
    begin = np.cumsum(later) - later
    two = np.arange(len(one)) - np.repeat(begin, later) + one + 1
    return one, two


def coordination(ds: xr.Dataset, *, cutoff: Any = None, scale: float = 1.25) -> xr.DataArray:
    """Number of bonds of every atom.

    Parameters
    ----------
    ds, cutoff, scale
        As for `bond_lengths`.

    Returns
    -------
    int64 DataArray over ``atom``
        Lazy on Dask; its mean by sample is ``ds.ragged.reduce(result, "mean")``.
    """
    _, reach, longest, names = _setup(ds, cutoff, scale, 1, "coordination")
    values = apply_blocks(ds, names, _neighbors, reach, longest, rows="atom", dtype=np.int64)
    attrs = {"long_name": "coordination number", "level": "atom", "analysis": "coordination"}
    coords = {n: c.variable for n, c in ds.coords.items() if c.dims == ("atom",)}
    return xr.DataArray(values, coords, ("atom",), "coordination", attrs)


def _neighbors(block: Block, reach: NDArray, longest: float) -> IntArray:
    out = np.zeros(block.num_atoms, dtype=np.int64)
    numbers = block["atomic_numbers"].astype(np.int64)
    for found in iter_pairs(block, longest):
        near = found.distance < reach[numbers[found.i], numbers[found.j]]
        for end in (found.i[near], found.j[near]):
            out += np.bincount(end, minlength=len(out))
    return out

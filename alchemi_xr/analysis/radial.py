"""Radial distribution functions, per pair of elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.analysis.basics import check_length
from alchemi_xr.analysis.species import need, or_nan, pair_table, pairs_of
from alchemi_xr.data.block import Block
from alchemi_xr.data.cells import volumes
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.data.pairs import iter_pairs
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["rdf"]


def rdf(
    ds: xr.Dataset, rmax: float = 10.0, *, bins: int = 200, pairs: Any = "elements"
) -> xr.Dataset:
    r"""Radial distribution function of each pair of elements.

    .. math:: g_{ab}(r) = \frac{\sum_s n^s_{ab}(r)}{4\pi r^2\,dr \sum_s N^s_a N^s_b / V^s}

    where :math:`n^s_{ab}` is the number of atoms b in a shell around the atoms a of
    sample s, periodic images included [1]_.

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``positions``, ``atomic_numbers``; ``cell`` and ``pbc`` where periodic.
    rmax : float
        Å. May be larger than half the cell: all images are counted.
    bins : int
    pairs : "elements", "all", or list of pairs of symbols
        ``"all"`` takes every atom alike.

    Returns
    -------
    Dataset over (pair, r)
        ``g``; ``coordination``, the mean number of atoms b within r of an atom a;
        ``counts``, pairs a → b in each shell over all samples. Samples that are not
        periodic along all axes have no volume: they add to ``counts`` and
        ``coordination``, and ``g`` is NaN where all samples are such. Lazy on Dask.

    Notes
    -----
    The density is that of all atoms b, :math:`N_b/V` (as in ASE), so that an ideal
    gas of N atoms has g = 1 - 1/N for a = b and a crystal its true peaks however
    small its cell.

    References
    ----------
    .. [1] M. P. Allen and D. J. Tildesley, *Computer Simulation of Liquids*, 2nd ed. (2017), sec. 8.2.
    """
    rmax = check_length(rmax, "rdf", "rmax")
    if not isinstance(bins, (int, np.integer)) or bins < 1:
        raise ConfigError("rdf", "bins is no count", found=bins, expected=">= 1")
    need(ds, ("positions", "atomic_numbers"), "rdf")
    wanted = pairs_of(ds, pairs)
    table, labels = pair_table(wanted)
    names = ["positions", "atomic_numbers", "cell", "pbc"]
    parts = apply_blocks(
        ds,
        [n for n in names if n in ds.variables],
        _histogram,
        rmax,
        int(bins),
        table,
        wanted or [(-1, -1)],
        rows="block",
        tail=(len(labels), 2 * bins + 2),
    )
    total = parts.sum(axis=0)
    inside, outside = total[:, :bins], total[:, bins:-2]
    ideal, centers = total[:, -2:-1], total[:, -1:]
    edges = np.linspace(0.0, rmax, bins + 1)
    shell = 4.0 / 3.0 * np.pi * np.diff(edges**3)
    counts = inside + outside
    g = inside / (or_nan(ideal) * shell)
    near = counts.cumsum(axis=1) / or_nan(centers)
    r = (edges[:-1] + edges[1:]) / 2
    coords = {
        "pair": ("pair", labels, {"long_name": "pair of elements"}),
        "r": ("r", r, {"units": "Å", "long_name": "distance"}),
    }
    return xr.Dataset(
        {
            "g": (("pair", "r"), g, {"long_name": "radial distribution function"}),
            "coordination": (
                ("pair", "r"),
                near,
                {"long_name": "mean number of the second within r of the first"},
            ),
            "counts": (("pair", "r"), counts, {"long_name": "pairs in each shell"}),
        },
        coords,
        {"rmax": rmax, "analysis": "rdf"},
    )


def _histogram(
    block: Block, rmax: float, bins: int, table: IntArray, species: list[tuple[int, int]]
) -> NDArray:
    """Counts of directed pairs a → b [P, bins], sum of N_a N_b / V, and number of atoms a."""
    out = np.zeros((len(species), 2 * bins + 2))
    numbers = block["atomic_numbers"].astype(np.int64)
    volume = volumes(block)
    owner = ptr_to_index(block.atoms_ptr)
    for k, (a, b) in enumerate(species):
        n_a, n_b = (
            np.bincount(owner, (numbers == z) | (z < 0), minlength=block.num_samples)
            for z in (a, b)
        )
        out[k, -2] = np.nansum(n_a * n_b / volume)
        out[k, -1] = n_a.sum()
    # A pair of like atoms is two directed ones; of a and b it is one a → b.
    double = np.array([2.0 if a == b else 1.0 for a, b in species])
    single = len(species) == 1 and species[0][0] < 0
    scale, last = bins / rmax, len(species) * bins
    for found in iter_pairs(block, rmax):
        if not len(found.i):
            continue
        # What lies at rmax, or in no pair asked for, goes to a bin that is dropped.
        at = (found.distance * scale).astype(np.int64)
        if not single:
            kind = table[numbers[found.i], numbers[found.j]]
            at = np.where((kind >= 0) & (at < bins), kind * bins + at, last)
        counts = np.bincount(at, minlength=last + 1)[:last].reshape(-1, bins)
        # All of these pairs are of samples with a volume, or none is.
        begin = 0 if np.isfinite(volume[owner[found.i[0]]]) else bins
        out[:, begin : begin + bins] += counts * double[:, None]
    return out

"""Samples that are the same structure, however it is turned, moved or numbered."""

from __future__ import annotations

import numpy as np
import xarray as xr

from alchemi_xr.analysis.basics import check_length
from alchemi_xr.analysis.species import need
from alchemi_xr.analysis.stats import counts_table
from alchemi_xr.data.fingerprint import FIELDS_NEEDED, LENGTH, fingerprints_of, first_same
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["duplicates", "fingerprints"]


def fingerprints(ds: xr.Dataset, *, cutoff: float = 5.0) -> xr.DataArray:
    r"""A vector for every sample that no turn, shift or renumbering changes.

    .. math:: f_k = \frac{1}{N} \sum_{i<j} w_i w_j\, e^{-(r_{ij}-r_k)^2 / 2\sigma^2} f_c(r_{ij})

    Radial symmetry functions [1]_ summed over all pairs, once weighted by 1 and once
    by the roots of both atomic numbers; and the weights themselves, summed.

    Parameters
    ----------
    ds : Dataset
        Ragged, with ``positions`` and ``atomic_numbers``.
    cutoff : float
        Å.

    Returns
    -------
    float64 DataArray over (sample, feature)
        Lazy on Dask. A crystal and its supercell have the same.

    References
    ----------
    .. [1] J. Behler, *J. Chem. Phys.* 134, 074106 (2011).
    """
    need(ds, ("positions", "atomic_numbers"), "fingerprints")
    cutoff = check_length(cutoff, "fingerprints", "cutoff")
    names = [n for n in FIELDS_NEEDED if n in ds.variables]
    values = apply_blocks(ds, names, fingerprints_of, cutoff, rows="system", tail=(LENGTH,))
    attrs = {"long_name": "fingerprint of the structure", "level": "system"}
    return xr.DataArray(values, dims=("sample", "feature"), name="fingerprint", attrs=attrs)


def duplicates(ds: xr.Dataset, *, tolerance: float = 1e-4, cutoff: float = 5.0) -> xr.DataArray:
    """Which samples are the same structure.

    Parameters
    ----------
    ds : Dataset
    tolerance : float
        Largest difference of any entry of two fingerprints, relative to its largest value.
    cutoff : float
        Å. Two molecules of one formula that differ only beyond it are taken for the same.

    Returns
    -------
    int64 DataArray over ``sample``
        Position of the first sample that is the same: its own for all but duplicates, so
        ``ds.ragged.where(result == np.arange(len(result)))`` keeps one of each.
        Only samples of one formula are compared.
    """
    if not tolerance >= 0:
        raise ConfigError("duplicates", "tolerance is no number >= 0", found=tolerance)
    from alchemi_xr.analysis.species import elements_of

    elements = elements_of(ds)
    prints = np.asarray(fingerprints(ds, cutoff=cutoff).values)
    table = np.asarray(counts_table(ds, elements))
    first = np.arange(len(prints), dtype=np.int64)
    scale = np.maximum(np.abs(prints).max(axis=0, initial=0.0), 1e-12)
    scaled = prints / scale
    _, kind = np.unique(table, axis=0, return_inverse=True)
    order = np.argsort(kind.reshape(-1), kind="stable")
    cuts = np.flatnonzero(np.diff(kind.reshape(-1)[order])) + 1
    for members in np.split(order, cuts):
        if len(members) > 1:
            first[members] = first_same(scaled[members], members, tolerance)
    attrs = {"long_name": "first sample of the same structure", "level": "system"}
    attrs["analysis"] = "duplicates"
    return xr.DataArray(first, dims=("sample",), name="same_as", attrs=attrs)

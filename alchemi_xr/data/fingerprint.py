"""Fingerprints of structures that no turn, shift or renumbering changes, and who shares one."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.data.pairs import iter_pairs

__all__ = ["FIELDS_NEEDED", "LENGTH", "fingerprints_of", "first_same"]

_SHELLS = 12
LENGTH = 2 * _SHELLS + 1
"""Numbers of a fingerprint."""
FIELDS_NEEDED = ("positions", "atomic_numbers", "cell", "pbc")


def fingerprints_of(block: Block, cutoff: float) -> NDArray:
    """Radial symmetry functions, summed over the pairs of each sample.

    The formula and its source are in :func:`alchemi_xr.analysis.fingerprints`.

    Parameters
    ----------
    block : Block
    cutoff : float
        Å.

    Returns
    -------
    float64 array, [N, LENGTH]

    Raises
    ------
    FieldError
        Positions that are not finite or too far apart, or a cell without volume.
    """
    owner = ptr_to_index(block.atoms_ptr)
    weight = np.sqrt(block["atomic_numbers"].astype(np.float64))
    count = block.num_samples
    out = np.zeros((count, LENGTH))
    shells = np.linspace(0.1 * cutoff, cutoff, _SHELLS)
    width = shells[1] - shells[0]
    for found in iter_pairs(block, cutoff):
        fade = 0.5 * (np.cos(np.pi * found.distance / cutoff) + 1.0)
        both = weight[found.i] * weight[found.j]
        sample = owner[found.i]
        for k, r in enumerate(shells):
            g = np.exp(-0.5 * ((found.distance - r) / width) ** 2) * fade
            out[:, k] += np.bincount(sample, g, minlength=count)
            out[:, _SHELLS + k] += np.bincount(sample, g * both, minlength=count)
    out[:, -1] = np.bincount(owner, weight, minlength=count)
    return out / np.maximum(np.diff(block.atoms_ptr), 1)[:, None]


def first_same(prints: NDArray, members: IntArray, tolerance: float) -> IntArray:
    """Smallest member of the cluster of near fingerprints that each belongs to.

    Parameters
    ----------
    prints : float array, [M, LENGTH]
        Finite.
    members : int64 array, [M]
    tolerance : float
        Largest difference of any entry of two that are the same.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import cKDTree

    # Equal ones first: of a thousand copies there would be half a million pairs.
    prints, which = np.unique(prints, axis=0, return_inverse=True)
    near: Any = cKDTree(prints).query_pairs(tolerance, p=np.inf, output_type="ndarray")
    size = len(prints)
    graph = coo_array((np.ones(len(near)), (near[:, 0], near[:, 1])), shape=(size, size))
    count, label = connected_components(graph, directed=False)
    label = label[which.reshape(-1)]
    lowest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(lowest, label, members)
    return lowest[label]

"""Stores and stage graphs for campaigns."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store import StoreWriter


def make_clusters(count, seed=0, sizes=(2, 10)):
    """Argon clusters on a stretched grid as one block, with a name and a tag each."""
    rng = np.random.default_rng(seed)
    atoms = rng.integers(*sizes, size=count)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)
    positions = []
    for n in atoms:
        spots = grid[rng.permutation(27)[:n]] if n > 8 else grid[:n]
        positions.append(spots * rng.uniform(3.6, 4.4) + rng.normal(0, 0.1, (n, 3)))
    ptr = counts_to_ptr(atoms)
    return Block(
        ptr,
        np.zeros(count + 1, dtype=np.int64),
        {
            "atomic_numbers": np.full(ptr[-1], 18),
            "positions": np.concatenate(positions) if count else np.zeros((0, 3)),
            "tag": np.arange(count, dtype=np.int64) ** 2,
            "name": np.array([f"cluster {i}" for i in range(count)], dtype=object),
        },
        {"atomic_numbers": "atom", "positions": "atom", "tag": "system", "name": "system"},
    )


@pytest.fixture
def clusters(tmp_path):
    """A store of 30 clusters, one of them deleted."""
    path = tmp_path / "clusters.zarr"
    StoreWriter(str(path)).write(make_clusters(31))
    StoreWriter(str(path)).delete([4])
    return path


@pytest.fixture
def relax():
    """Builds FIRE on Lennard-Jones argon; a closure, so that it pickles by value."""

    def stages():
        from alchemi_xr.dynamics import FIRE, ConvergenceHook
        from alchemi_xr.models import LennardJonesModel

        return FIRE(
            LennardJonesModel(epsilon=0.0104, sigma=3.4, cutoff=12.0),
            dt=1.0,
            n_steps=60,
            convergence_hook=ConvergenceHook.from_fmax(0.001),
        )

    return stages

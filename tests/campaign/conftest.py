"""Stores and stage graphs for campaigns."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store import StoreWriter


def _make_clusters(count, seed=0, sizes=(2, 10)):
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
def make_clusters():
    """Makes a block of argon clusters."""
    return _make_clusters


@pytest.fixture
def clusters(tmp_path):
    """A store of 30 clusters, one of them deleted."""
    path = tmp_path / "clusters.zarr"
    StoreWriter(str(path)).write(_make_clusters(31))
    StoreWriter(str(path)).delete([4])
    return path


@pytest.fixture
def model_kind():
    """Our batched Lennard-Jones; modules whose workers should start fast say "ase"."""
    return "ours"


@pytest.fixture
def faulty(model_kind):
    """Makes stages whose model fails for systems with certain tags, in some way.

    ``how``: "raise" (naming nobody), "late" (so, after two steps), "nan", "memory" (for more than two systems
    at once), or "kill" (the process, once if ``once`` is a path that is not
    there). The stages are closures, so that they pickle by value.
    """

    def make(tags=(), how="raise", once=None, n_steps=30):
        def stages():
            import functools
            import os
            import signal

            import torch
            from ase.calculators.lj import LennardJones

            from alchemi_xr.dynamics import FIRE, ConvergenceHook
            from alchemi_xr.models import ASECalculatorModel, LennardJonesModel

            numbers = {"epsilon": 0.0104, "sigma": 3.4}
            if model_kind == "ase":
                base, keywords = ASECalculatorModel, {}
                arguments = (functools.partial(LennardJones, rc=12.0, **numbers),)
            else:
                base, arguments, keywords = LennardJonesModel, (), {**numbers, "cutoff": 12.0}

            class Faulty(base):
                def forward(self, batch, **kwargs):
                    outputs = super().forward(batch, **kwargs)
                    bad = torch.isin(batch["tag"].reshape(-1), torch.tensor(sorted(tags)))
                    if how == "memory" and batch.num_graphs > 2:
                        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
                    if not bad.any():
                        return outputs
                    if how == "raise" or (how == "late" and (batch["steps"][bad] >= 2).any()):
                        raise ValueError("SCF did not converge")
                    if how == "nan":
                        outputs["energy"][bad] = torch.nan
                        outputs["forces"][bad[batch.batch_idx.long()]] = torch.nan
                    if how == "kill" and (once is None or not os.path.exists(once)):
                        if once is not None:
                            open(once, "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                    return outputs

            return FIRE(
                Faulty(*arguments, **keywords),
                dt=1.0,
                n_steps=n_steps,
                convergence_hook=ConvergenceHook.from_fmax(0.005),
            )

        return stages

    return make


@pytest.fixture
def relax(faulty):
    """Builds FIRE on Lennard-Jones argon."""
    return faulty()


@pytest.fixture
def read():
    """All samples of a store as one block."""

    def read(path):
        from alchemi_xr.store import open_store

        snapshot = open_store(str(path))
        return snapshot.read_block(snapshot.active)

    return read


@pytest.fixture
def assert_same():
    """Two blocks hold the same bytes, for all samples or those of the first."""

    def check(found, expected):
        ids = expected["dataset_index"].ravel()
        expected = expected.take(np.flatnonzero(np.isin(ids, found["dataset_index"].ravel())))
        assert set(found.arrays) == set(expected.arrays)
        np.testing.assert_array_equal(found.atoms_ptr, expected.atoms_ptr)
        for name in expected.arrays:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)

    return check

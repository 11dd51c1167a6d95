"""Velocity Verlet against what is known of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.dynamics import DemoDynamics
from alchemi_xr.units import FS_PER_INTERNAL_TIME


def total_energy(batch):
    masses, v = batch["atomic_masses"][:, None], batch["velocities"]
    kinetic = torch.zeros(batch.num_graphs, dtype=v.dtype).index_add(
        0, batch.batch_idx.long(), (0.5 * masses * v.square()).sum(1)
    )
    return batch["energy"].reshape(-1) + kinetic


def test_one_step_by_hand(kit):
    """dt is in fs: a free atom moves v·dt/10.18 Å."""
    batch = kit.systems([1])
    batch["velocities"] = torch.tensor([[0.3, 0.0, 0.0]], dtype=torch.float64)
    before = batch["positions"].clone()
    DemoDynamics(kit.SpringModel(k=0.0), n_steps=4, dt=2.5).run(batch)
    moved = (batch["positions"] - before)[0, 0]
    assert float(moved) == pytest.approx(0.3 * 10.0 / FS_PER_INTERNAL_TIME, rel=1e-12)


def test_period_of_a_spring(kit):
    """x(t) = cos(√(k/m) t): after a whole period all is where it was."""
    batch = Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.tensor([18]),
                positions=torch.tensor([[1.0, 0.0, 0.0]]).double(),
                atomic_masses=torch.tensor([40.0]).double(),
            )
        ]
    )
    period = 2 * math.pi * math.sqrt(40.0) * FS_PER_INTERNAL_TIME
    steps = 2000
    DemoDynamics(kit.SpringModel(), n_steps=steps, dt=period / steps).run(batch)
    assert float(batch["positions"][0, 0]) == pytest.approx(1.0, abs=1e-5)
    assert float(batch["velocities"].abs().max()) < 1e-4


@pytest.mark.physics
def test_energy_error_goes_with_the_square_of_dt():
    """Argon on Lennard-Jones: half the step, a quarter of the error, in every system."""
    from alchemi_xr.models.lj import LennardJonesModel

    generator = torch.Generator().manual_seed(5)
    corner = torch.tensor(
        [[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], dtype=torch.float64
    )
    samples = []
    for n, spacing in ((8, 3.9), (4, 3.7)):
        velocities = 0.006 * torch.randn(n, 3, dtype=torch.float64, generator=generator)
        samples.append(
            AtomicData(
                atomic_numbers=torch.full((n,), 18),
                positions=spacing * corner[:n],
                velocities=velocities,
            )
        )
    model = LennardJonesModel(epsilon=0.0104, sigma=3.4, cutoff=30.0)
    errors = []
    for dt in (8.0, 4.0, 2.0):
        batch = Batch.from_data_list(samples)
        drift = torch.zeros(2, dtype=torch.float64)
        stage = DemoDynamics(model, n_steps=int(10 / dt), dt=dt)
        stage.run(batch)
        first = total_energy(batch)
        for _ in range(30):
            stage.run(batch, n_steps=int(24 / dt))
            drift = torch.maximum(drift, (total_energy(batch) - first).abs())
        errors.append(drift)
    for coarse, fine in itertools.pairwise(errors):
        ratio = coarse / fine
        assert ((ratio > 2.5) & (ratio < 6.5)).all(), ratio
    assert (errors[-1] < 1e-6).all()


def test_euler_start_is_chosen_for_each_system(kit):
    """In a bare step without forces: a whole kick, in that system only."""
    batch = kit.systems([1, 1])
    forces = torch.zeros(2, 3).double()
    forces[1] = -batch["positions"][1]
    batch["forces"] = forces
    start = batch.clone()
    DemoDynamics(kit.SpringModel(), n_steps=1, dt=1.0).step(batch)
    h = 1.0 / FS_PER_INTERNAL_TIME
    m = float(batch["atomic_masses"][0])
    torch.testing.assert_close(batch["positions"][0], start["positions"][0])
    torch.testing.assert_close(batch["velocities"][0], -h * start["positions"][0] / m)
    x1 = start["positions"][1] * (1 - 0.5 * h * h / m)
    torch.testing.assert_close(batch["positions"][1], x1)
    torch.testing.assert_close(batch["velocities"][1], -0.5 * h * (start["positions"][1] + x1) / m)


def test_nan_in_an_idle_system_stays_there(kit):
    batch = kit.systems([2, 2])
    batch["positions"][:2] = float("nan")
    batch["status"] = torch.tensor([[1], [0]])
    DemoDynamics(kit.SpringModel(), n_steps=3).run(batch)
    assert batch["velocities"][:2].abs().max() == 0
    assert torch.isfinite(batch["positions"][2:]).all()


def test_dt_must_be_positive(kit):
    with pytest.raises(ValueError, match="dt"):
        DemoDynamics(kit.SpringModel(), n_steps=1, dt=0.0)

"""FIRE against the FIRE of ASE: the same steps, the same minima."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.constraints import FixAtoms
from ase.optimize import FIRE as AseFIRE

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.dynamics import ConvergenceHook, DynamicsStage, HostMemory, SizeAwareSampler
from alchemi_xr.dynamics.hooks import FreezeAtomsHook
from alchemi_xr.dynamics.optimizers import FIRE
from alchemi_xr.errors import ConfigError
from alchemi_xr.models.ase import ASECalculatorModel
from alchemi_xr.models.base import BaseModelMixin
from alchemi_xr.models.lj import LennardJonesModel
from alchemi_xr.units import FS_PER_INTERNAL_TIME

pytestmark = pytest.mark.physics

# ASE's defaults, in fs.
ASE_DT = 0.1 * FS_PER_INTERNAL_TIME


def reduced_lj() -> LennardJonesModel:
    """ε = 1 eV, σ = 1 Å, cut where nothing is left (whole clusters fit)."""
    return LennardJonesModel(1.0, 1.0, 30.0, shift=True)


ase_lj = partial(LennardJones, epsilon=1.0, sigma=1.0, rc=30.0, smooth=False)


def cluster(n: int, seed: int) -> Atoms:
    """A seeded start: points in a ball, none nearer than 0.8 σ."""
    rng = np.random.default_rng(seed)
    radius, points = 0.75 * n ** (1 / 3), np.zeros((0, 3))
    while len(points) < n:
        x = rng.uniform(-radius, radius, 3)
        if np.linalg.norm(x) < radius and (
            len(points) == 0 or np.linalg.norm(points - x, axis=1).min() > 0.8
        ):
            points = np.vstack([points, x])
    return Atoms(f"Ar{n}", positions=points)


def crystal(name: str, seed: int) -> Atoms:
    atoms = bulk(name, "fcc", cubic=True) * (2, 2, 1)
    atoms.rattle(0.15, seed=seed)
    return atoms


def data_of(atoms: Atoms) -> AtomicData:
    fields: dict[str, Any] = {}
    if atoms.pbc.any():
        fields = {
            "cell": torch.from_numpy(atoms.cell.array)[None],
            "pbc": torch.from_numpy(atoms.pbc)[None],
        }
    return AtomicData(
        atomic_numbers=torch.from_numpy(atoms.numbers.astype(np.int64)),
        positions=torch.from_numpy(atoms.positions.copy()),
        **fields,
    )


class Path:
    """A hook that keeps the positions of every step."""

    frequency = 1
    stage = DynamicsStage.AFTER_STEP

    def __init__(self) -> None:
        self.positions: list[np.ndarray] = []

    def __call__(self, ctx: Any, stage: Any) -> None:
        self.positions.append(ctx.batch.positions.numpy().copy())


def ase_path(atoms: Atoms, calculator: Any, steps: int, **options: Any) -> list[np.ndarray]:
    atoms = atoms.copy()
    atoms.calc = calculator
    optimizer = AseFIRE(atoms, logfile=None, **options)
    path: list[np.ndarray] = []
    optimizer.attach(lambda: path.append(atoms.positions.copy()))
    optimizer.run(fmax=0.0, steps=steps)
    return path[1:]


def our_path(
    systems: list[Atoms], model: BaseModelMixin, steps: int, **options: Any
) -> list[np.ndarray]:
    batch, path = Batch.from_data_list([data_of(a) for a in systems]), Path()
    FIRE(model, **{"dt": ASE_DT, **options}, hooks=[path], n_steps=steps).run(batch)
    return path.positions


def assert_same_paths(systems: list[Atoms], ours: list[np.ndarray], theirs: list[Any]) -> None:
    start = np.cumsum([0, *map(len, systems)])
    for k in range(len(systems)):
        rows = slice(start[k], start[k + 1])
        for step, (a, b) in enumerate(zip(ours, theirs[k], strict=True)):
            np.testing.assert_allclose(
                a[rows], b, rtol=0, atol=1e-9, err_msg=f"system {k}, step {step}"
            )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (
            {"dt_max": 0.4 * FS_PER_INTERNAL_TIME, "maxstep": 0.05, "n_min": 2, "f_inc": 1.3},
            {"dtmax": 0.4, "maxstep": 0.05, "Nmin": 2, "finc": 1.3},
        ),
        (
            {"f_dec": 0.3, "alpha_start": 0.2, "f_alpha": 0.9},
            {"fdec": 0.3, "astart": 0.2, "a": 0.2, "fa": 0.9},
        ),
        ({"uphill": True}, {"downhill_check": True}),
    ],
)
def test_every_step_is_that_of_ase(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Systems of two sizes and two energies at once, each on its own path."""
    systems = [crystal("Cu", 1), crystal("Au", 2), bulk("Cu", cubic=True)]
    systems[2].rattle(0.2, seed=3)
    found = our_path(systems, ASECalculatorModel(EMT), 60, **ours)
    assert_same_paths(systems, found, [ase_path(a, EMT(), 60, **theirs) for a in systems])


@pytest.mark.parametrize("options", [{}, {"uphill": True}])
def test_every_step_on_clusters(options: dict[str, Any]) -> None:
    systems = [cluster(7, 0), cluster(13, 1)]
    found = our_path(systems, ASECalculatorModel(ase_lj), 50, **options)
    theirs = {"downhill_check": True} if options else {}
    assert_same_paths(systems, found, [ase_path(a, ase_lj(), 50, **theirs) for a in systems])


def relax_with_ase(atoms: Atoms, calculator: Any, fmax: float) -> tuple[float, int]:
    atoms = atoms.copy()
    atoms.calc = calculator
    optimizer = AseFIRE(atoms, logfile=None)
    assert optimizer.run(fmax=fmax, steps=3000)
    return float(atoms.get_potential_energy()), int(optimizer.nsteps)


def relax(systems: list[Atoms], model: BaseModelMixin, fmax: float) -> Batch:
    batch = Batch.from_data_list([data_of(a) for a in systems])
    FIRE(model, dt=ASE_DT, n_steps=3000, convergence_hook=ConvergenceHook.from_fmax(fmax)).run(
        batch
    )
    norms = torch.linalg.vector_norm(batch.forces, dim=1)
    assert float(norms.max()) <= fmax
    return batch


def test_lj_clusters_end_in_the_minima_that_ase_finds() -> None:
    systems = [cluster(n, seed) for n, seed in ((7, 0), (7, 1), (13, 0), (13, 1), (38, 0))]
    batch = relax(systems, reduced_lj(), 1e-3)
    for k, atoms in enumerate(systems):
        energy, _ = relax_with_ase(atoms, ase_lj(), 1e-3)
        assert float(batch.energy[k]) == pytest.approx(energy, abs=1e-6 * len(atoms))
    # Whatever the start, no minimum lies below the known ones (Cambridge database).
    lowest = {7: -16.505384, 13: -44.326801, 38: -173.928427}
    for energy, atoms in zip(batch.energy[:, 0].tolist(), systems, strict=True):
        assert energy >= lowest[len(atoms)] - 1e-3


def test_a_perturbed_icosahedron_comes_home() -> None:
    from ase.cluster import Icosahedron

    atoms = Icosahedron("Ar", 2, latticeconstant=1.55)
    atoms.rattle(0.05, seed=4)
    batch = relax([Atoms(atoms)], reduced_lj(), 1e-5)
    assert float(batch.energy) == pytest.approx(-44.326801, abs=2e-4)


def test_emt_crystals_end_where_ase_ends_in_as_many_steps() -> None:
    systems = [crystal("Cu", 5), crystal("Au", 6)]
    batch, counts = Batch.from_data_list([data_of(a) for a in systems]), []
    for atoms in systems:
        energy, steps = relax_with_ase(atoms, EMT(), 1e-3)
        alone = relax([atoms], ASECalculatorModel(EMT), 1e-3)
        assert float(alone.energy) == pytest.approx(energy, abs=1e-6 * len(atoms))
        counts.append(steps)
    path = Path()
    FIRE(
        ASECalculatorModel(EMT),
        dt=ASE_DT,
        hooks=[path],
        n_steps=3000,
        convergence_hook=ConvergenceHook.from_fmax(1e-3),
    ).run(batch)
    assert len(path.positions) == max(counts)
    for k, atoms in enumerate(systems):
        energy, _ = relax_with_ase(atoms, EMT(), 1e-3)
        assert float(batch.energy[k]) == pytest.approx(energy, abs=1e-6 * len(atoms))


def test_a_system_in_a_batch_takes_the_path_it_takes_alone() -> None:
    """To the last bit, on the CPU."""
    systems = [cluster(5, 3), cluster(13, 1), cluster(2, 9)]
    together = our_path(systems, reduced_lj(), 40)
    start = np.cumsum([0, *map(len, systems)])
    for k, atoms in enumerate(systems):
        alone = our_path([atoms], reduced_lj(), 40)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a[start[k] : start[k + 1]], b)


class Pool:
    """A data set of a few systems."""

    def __init__(self, systems: list[Atoms]) -> None:
        self.data = [data_of(a) for a in systems]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[AtomicData, dict[str, Any]]:
        return self.data[i], {}

    def get_metadata(self, i: int) -> tuple[int, int]:
        return self.data[i].num_nodes, 0


def test_a_refilled_batch_ends_as_each_alone() -> None:
    systems = [cluster(n, n) for n in (4, 7, 5, 6, 3)]
    hook = ConvergenceHook.from_fmax(0.01)
    sink = HostMemory(len(systems))
    FIRE(
        reduced_lj(),
        dt=ASE_DT,
        n_steps=2000,
        convergence_hook=hook,
        sampler=SizeAwareSampler(Pool(systems), max_batch_size=2),
        sinks=[sink],
    ).run()
    assert len(sink) == len(systems)
    done = sink.read()
    for k, index in enumerate(done.dataset_index.reshape(-1).tolist()):
        alone = relax([systems[index]], reduced_lj(), 0.01)
        assert float(done.energy[k]) == float(alone.energy), f"sample {index}"


def test_numbers_may_be_per_system() -> None:
    systems = [cluster(7, 0), cluster(5, 1)]
    steps = torch.tensor([0.05, 0.15])
    found = our_path(systems, reduced_lj(), 30, maxstep=steps)
    for k, atoms in enumerate(systems):
        alone = our_path([atoms], reduced_lj(), 30, maxstep=float(steps[k]))
        rows = slice(0, 7) if k == 0 else slice(7, 12)
        np.testing.assert_allclose(found[-1][rows], alone[-1], atol=1e-6)


def test_numbers_per_sample_follow_a_refill() -> None:
    systems = [cluster(n, n) for n in (4, 7, 5, 6)]
    steps = torch.tensor([0.05, 0.1, 0.15, 0.2], dtype=torch.float64)
    sink = HostMemory(len(systems))
    FIRE(
        reduced_lj(),
        dt=ASE_DT,
        maxstep=steps,
        n_steps=2000,
        convergence_hook=ConvergenceHook.from_fmax(0.01),
        sampler=SizeAwareSampler(Pool(systems), max_batch_size=2),
        sinks=[sink],
    ).run()
    done = sink.read()
    given = done["fire_maxstep_given"].reshape(-1)
    index = done.dataset_index.reshape(-1)
    assert torch.equal(given, steps[index])


def test_a_tensor_that_does_not_fit_the_batch() -> None:
    with pytest.raises(ConfigError, match=r"maxstep does not fit.*3 values.*2 systems"):
        our_path([cluster(3, 0), cluster(4, 0)], reduced_lj(), 2, maxstep=torch.ones(3) * 0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"dt": 0.0},
        {"dt": float("nan")},
        {"dt_max": -1.0},
        {"maxstep": 0.0},
        {"f_dec": 1.5},
        {"alpha_start": 1.1},
        {"n_min": -1},
        {"dt": torch.tensor([1.0, -1.0])},
    ],
)
def test_numbers_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is out of range"):
        FIRE(reduced_lj(), **options)


def test_limits_of_the_time_step() -> None:
    batch = Batch.from_data_list([data_of(cluster(7, 0))])
    FIRE(reduced_lj(), dt=1.0, dt_max=1.5, dt_min=0.9, n_steps=60).run(batch)
    assert 0.9 <= float(batch["fire_dt"]) <= 1.5
    assert FIRE(reduced_lj(), dt=2.0).dt_max == 20.0


def test_velocities_that_a_system_brings_are_not_used() -> None:
    atoms = cluster(5, 2)
    data = data_of(atoms)
    data.velocities = torch.full((5, 3), 7.0, dtype=torch.float64)
    batch, path = Batch.from_data_list([data]), Path()
    FIRE(reduced_lj(), dt=ASE_DT, hooks=[path], n_steps=3).run(batch)
    for a, b in zip(path.positions, our_path([atoms], reduced_lj(), 3), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_state_goes_on_over_runs_and_starts_anew_for_another_optimizer() -> None:
    systems = [cluster(7, 0)]
    straight = our_path(systems, reduced_lj(), 20)
    batch, path = Batch.from_data_list([data_of(a) for a in systems]), Path()
    fire = FIRE(reduced_lj(), dt=ASE_DT, hooks=[path])
    fire.run(batch, 12)
    fire.run(batch, 8)
    np.testing.assert_array_equal(path.positions[-1], straight[-1])
    FIRE(reduced_lj(), dt=0.3, n_steps=1).run(batch)
    assert float(batch["fire_dt"]) == 0.3


def test_a_system_at_rest_stays() -> None:
    """No forces at all: |F| = 0 must not make NaN."""
    batch = Batch.from_data_list([data_of(Atoms("Ar")), data_of(cluster(4, 0))])
    FIRE(reduced_lj(), dt=ASE_DT, n_steps=5).run(batch)
    assert torch.equal(batch.positions[0], torch.zeros(3, dtype=torch.float64))
    assert torch.isfinite(batch.positions).all()


def test_a_system_with_nan_forces_stays_alone() -> None:
    systems = [cluster(4, 0), cluster(5, 1)]
    alone = our_path([systems[1]], reduced_lj(), 10)[-1]
    batch = Batch.from_data_list([data_of(a) for a in systems])
    batch.positions[1] = batch.positions[0]  # two atoms in one place
    FIRE(reduced_lj(), dt=ASE_DT, n_steps=10).run(batch)
    np.testing.assert_array_equal(batch.positions[4:], alone)


def test_masked_systems_are_untouched() -> None:
    batch = Batch.from_data_list([data_of(cluster(4, 0)), data_of(cluster(5, 1))])
    fire = FIRE(reduced_lj(), dt=ASE_DT)
    fire.step(batch)
    before = {name: value.clone() for name, value in batch}
    fire.masked_update(batch, torch.tensor([True, False]))
    for name, value in batch:
        rows = slice(4, None) if batch.level_of(name) == "atom" else slice(1, None)
        assert torch.equal(value[rows], before[name][rows]), name
    assert not torch.equal(batch.positions[:4], before["positions"][:4])


def test_single_precision_relaxes_too() -> None:
    atoms = cluster(13, 1)
    batch = Batch.from_data_list([data_of(atoms)]).to("cpu", torch.float32)
    FIRE(
        reduced_lj(), dt=ASE_DT, n_steps=2000, convergence_hook=ConvergenceHook.from_fmax(1e-2)
    ).run(batch)
    assert batch.positions.dtype == torch.float32
    energy, _ = relax_with_ase(atoms, ase_lj(), 1e-2)
    assert float(batch.energy) == pytest.approx(energy, abs=2e-3)


def test_frozen_atoms_are_those_of_ase() -> None:
    atoms = crystal("Cu", 8)
    fixed = [0, 3, 5]
    data = data_of(atoms)
    data.atom_categories = torch.zeros(len(atoms), dtype=torch.int64)
    data.atom_categories[fixed] = -1
    batch, path = Batch.from_data_list([data]), Path()
    FIRE(ASECalculatorModel(EMT), dt=ASE_DT, hooks=[FreezeAtomsHook(), path], n_steps=40).run(batch)
    atoms.set_constraint(FixAtoms(fixed))
    assert_same_paths([atoms], path.positions, [ase_path(atoms, EMT(), 40)])
    np.testing.assert_array_equal(batch.positions[fixed], atoms.positions[fixed])


@pytest.mark.gpu
def test_fire_on_cuda_ends_where_the_cpu_ends() -> None:
    systems = [cluster(7, 0), cluster(13, 1)]
    here = relax(systems, reduced_lj(), 1e-3)
    there = Batch.from_data_list([data_of(a) for a in systems]).to("cuda")
    FIRE(
        reduced_lj(), dt=ASE_DT, n_steps=3000, convergence_hook=ConvergenceHook.from_fmax(1e-3)
    ).run(there)
    torch.testing.assert_close(there.energy.cpu(), here.energy, rtol=0, atol=1e-5)

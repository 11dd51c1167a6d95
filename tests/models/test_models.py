"""What holds for every model: gradients, stresses, one by one, dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.errors import ConfigError, ModelError
from alchemi_xr.models.ase import ASECalculatorModel
from alchemi_xr.models.base import BaseModelMixin
from alchemi_xr.models.demo import DemoModel, DemoModelWrapper
from alchemi_xr.models.lj import LennardJonesModel

ALL = {"energy", "forces", "stress"}


def batch_of(systems: list[Atoms], dtype: torch.dtype = torch.float64) -> Batch:
    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.from_numpy(a.numbers.astype(np.int64)),
                positions=torch.from_numpy(a.positions).to(dtype),
                cell=torch.from_numpy(a.cell.array).to(dtype)[None],
                pbc=torch.from_numpy(a.pbc)[None],
            )
            for a in systems
        ]
    )


def lj(**options: float) -> LennardJonesModel:
    return LennardJonesModel(0.0104, 3.4, 8.5, **options)  # type: ignore[arg-type]


def demo() -> DemoModelWrapper:
    return DemoModelWrapper(DemoModel(seed=3).double())


def mixed(seed: int = 0) -> list[Atoms]:
    """A cluster, a rod, a slab, skewed crystals, one atom alone; all rattled."""
    rng = np.random.default_rng(seed)
    cluster = Atoms("Ar6", positions=rng.normal(size=(6, 3)) * 3.0, cell=np.eye(3))
    rod = Atoms("Ar3", positions=[[0, 0, 0], [3.5, 0.2, 0], [1.6, 3.2, 0.4]], cell=[7.1, 0, 0])
    rod.pbc = [True, False, False]
    slab = bulk("Ar", "fcc", 5.3) * (2, 2, 2)
    slab.pbc = [True, True, False]
    crystal = bulk("Ar", "hcp", a=3.8, c=6.3)
    systems = [cluster, rod, slab, crystal, bulk("Ar", "fcc", 5.25, cubic=True), Atoms("Ar")]
    for atoms in systems:
        atoms.positions += rng.normal(scale=0.08, size=(len(atoms), 3))
        if atoms.pbc.all():
            strain = np.eye(3) + rng.normal(scale=0.02, size=(3, 3))
            atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
    return systems


MODELS: dict[str, Callable[[], BaseModelMixin]] = {
    "lj": lj,
    "lj-switch": lambda: lj(switch_width=2.5),
    "lj-shift": lambda: lj(shift=True),
    "lj-half": lambda: lj(half_list=True, switch_width=1.0),
    "demo": demo,
    "lj+demo": lambda: lj() + demo(),
    "ase-emt": lambda: ASECalculatorModel(EMT),
}


def systems_for(name: str) -> list[Atoms]:
    if name != "ase-emt":
        return mixed()
    crystal = bulk("Cu", cubic=True)
    crystal.rattle(0.1, seed=1)
    return [crystal, molecule("H2O"), bulk("Au")]


@pytest.mark.physics
@pytest.mark.parametrize("name", MODELS)
def test_forces_are_the_gradient_of_the_energy(name: str) -> None:
    model, batch = MODELS[name](), batch_of(systems_for(name))
    forces = model(batch)["forces"].clone()  # type: ignore[operator]
    scale = float(forces.abs().max())
    step = 1e-4
    rng = np.random.default_rng(7)
    for atom in rng.choice(batch.num_nodes, 6, replace=False):
        for axis in range(3):
            energies = []
            for sign in (1.0, -1.0):
                moved = batch.clone()
                moved.positions[atom, axis] += sign * step
                energies.append(float(model(moved)["energy"].sum()))  # type: ignore[operator]
            numeric = -(energies[0] - energies[1]) / (2.0 * step)
            assert numeric == pytest.approx(float(forces[atom, axis]), rel=1e-4, abs=1e-6 * scale)


@pytest.mark.physics
@pytest.mark.parametrize("options", [{}, {"switch_width": 2.0}, {"half_list": True}])
def test_stress_is_the_strain_derivative(options: dict[str, float]) -> None:
    systems = [a for a in mixed(2) if a.pbc.all()]
    model, batch = lj(**options), batch_of(systems)
    model.set_config("active_outputs", ALL)
    stress = model(batch)["stress"]
    volume = torch.linalg.det(batch.cell).abs()
    step = 1e-5
    for row in range(3):
        for column in range(3):
            energies = []
            for sign in (1.0, -1.0):
                strain = torch.eye(3, dtype=torch.float64)
                strain[row, column] += sign * step
                strained = batch.clone()
                strained.positions = batch.positions @ strain
                strained.cell = batch.cell @ strain
                energies.append(model(strained)["energy"][:, 0])
            numeric = (energies[0] - energies[1]) / (2.0 * step) / volume
            torch.testing.assert_close(stress[:, row, column], numeric, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "lj-half"])
def test_each_system_equals_itself_alone(name: str) -> None:
    systems = systems_for(name)
    model = MODELS[name]()
    together = model(batch_of(systems))  # type: ignore[operator]
    ptr = batch_of(systems).atoms_ptr.tolist()
    for k, atoms in enumerate(systems):
        alone = MODELS[name]()(batch_of([atoms]))  # type: ignore[operator]
        torch.testing.assert_close(together["energy"][k], alone["energy"][0], rtol=1e-13, atol=0)
        torch.testing.assert_close(
            together["forces"][ptr[k] : ptr[k + 1]], alone["forces"], rtol=1e-11, atol=1e-14
        )


@pytest.mark.physics
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lj_is_that_of_ase(dtype: torch.dtype) -> None:
    systems = [a for a in mixed(4) if a.cell.rank == 3 or not a.pbc.any()]
    model = LennardJonesModel(0.0104, 3.4, 8.5, shift=True)
    model.set_config("active_outputs", ALL)
    output = model(batch_of(systems, dtype))
    assert output["energy"].dtype == dtype
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5
    ptr = batch_of(systems).atoms_ptr.tolist()
    for k, atoms in enumerate(systems):
        # ASE shifts by the value at the cutoff too (and cannot be told not to).
        atoms.calc = LennardJones(epsilon=0.0104, sigma=3.4, rc=8.5, smooth=False)
        reference = atoms.get_forces()
        assert float(output["energy"][k, 0]) == pytest.approx(
            atoms.get_potential_energy(), rel=tolerance, abs=tolerance
        )
        np.testing.assert_allclose(
            output["forces"][ptr[k] : ptr[k + 1]],
            reference,
            rtol=0,
            atol=tolerance * max(1.0, np.abs(reference).max()),
        )
        if atoms.pbc.all():
            np.testing.assert_allclose(
                output["stress"][k], atoms.get_stress(voigt=False), rtol=1e-4, atol=tolerance
            )


def test_case_c37_mixed_periodicity(shared: Path) -> None:
    folder = shared / "cases" / "C37-mixed-pbc-batch"
    expected = json.loads((folder / "expected.json").read_text())["expected"]
    frames = ase.io.read(folder / "in.xyz", index=":")
    batch = batch_of(frames)
    model = LennardJonesModel(0.0104, 3.40, 8.5)
    output = model(batch)
    np.testing.assert_allclose(output["energy"][:, 0], expected["energy_eV"], atol=1e-9)
    first = output["forces"][batch.atoms_ptr[:-1]]
    np.testing.assert_allclose(first, expected["forces_first_atom"], atol=1e-9)


class TestLennardJones:
    def test_switch_is_smooth_twice_and_ends_at_the_cutoff(self) -> None:
        model = LennardJonesModel(0.0104, 3.4, 6.0, switch_width=1.5)
        # Energies of the pair over distance: u, u', u'' by differences at both ends.
        r = torch.linspace(4.4, 6.1, 3401, dtype=torch.float64)
        positions = torch.zeros((2 * len(r), 3), dtype=torch.float64)
        positions[1::2, 0] = r
        batch = Batch.from_data_list(
            [
                AtomicData(atomic_numbers=torch.full((2,), 18), positions=pair)
                for pair in positions.reshape(-1, 2, 3)
            ]
        )
        output = model(batch)
        slope = -output["forces"][1::2, 0]
        curvature = torch.diff(slope) / torch.diff(r)
        assert float(output["energy"][r >= 6.0].abs().max()) == 0.0
        for values, jump in ((output["energy"][:, 0], 1e-5), (slope, 3e-5), (curvature, 1e-4)):
            assert float(torch.diff(values).abs().max()) < jump

    def test_hard_cutoff(self) -> None:
        pair = Atoms("Ar2", positions=[[0, 0, 0], [5.99, 0, 0]])
        model = LennardJonesModel(0.0104, 3.4, 6.0)
        s6 = (3.4 / 5.99) ** 6
        assert float(model(batch_of([pair]))["energy"]) == pytest.approx(0.0416 * (s6 * s6 - s6))
        pair.positions[1, 0] = 6.01
        assert float(model(batch_of([pair]))["energy"]) == 0.0

    def test_cell_smaller_than_the_cutoff(self) -> None:
        """A primitive cell sees the images that its supercell has as atoms."""
        small = bulk("Ar", "fcc", 5.2)
        energy = lj()(batch_of([small, small * (3, 3, 3)]))["energy"]
        torch.testing.assert_close(energy[0] * 27, energy[1], rtol=1e-12, atol=0.0)

    def test_turning_and_images_change_nothing(self) -> None:
        rng = np.random.default_rng(11)
        systems = mixed(5)
        energy = lj()(batch_of(systems))["energy"]
        turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        for atoms in systems:
            images = rng.integers(-2, 3, (len(atoms), 3)) * atoms.pbc
            atoms.positions += images @ atoms.cell.array + rng.uniform(-9, 9, 3)
            atoms.set_cell(atoms.cell.array @ turn)
            atoms.positions = atoms.positions @ turn
        torch.testing.assert_close(
            lj()(batch_of(systems))["energy"], energy, rtol=1e-11, atol=1e-13
        )

    def test_stress_is_off_until_asked_and_nan_without_periodic_axes(self) -> None:
        model, batch = lj(), batch_of(mixed())
        assert list(model(batch)) == ["energy", "forces"]
        model.set_config("active_outputs", ALL)
        nan = torch.isnan(model(batch)["stress"]).all(dim=2).all(dim=1)
        # cluster and single atom are open; the rod has no volume; slab and crystals have.
        assert nan.tolist() == [True, True, False, False, False, True]

    def test_skin_changes_the_work_and_not_the_result(self) -> None:
        model, batch = lj(skin=1.0), batch_of(mixed())
        model(batch)
        for _ in range(4):
            batch.positions.add_(0.03)
            torch.testing.assert_close(
                model(batch)["forces"], lj()(batch)["forces"], rtol=1e-11, atol=1e-14
            )
        assert model._neighbors.searches == 1

    def test_a_single_sample_is_a_batch_of_one(self) -> None:
        atoms = mixed()[2]
        data = batch_of([atoms]).get_data(0)
        torch.testing.assert_close(lj()(data)["energy"], lj()(batch_of([atoms]))["energy"])

    def test_stored_edges_are_not_trusted(self) -> None:
        """Edges that came with the data may be of any cutoff."""
        batch = batch_of(mixed())
        energy = lj()(batch)["energy"]
        batch.set_edges(torch.tensor([[0, 1], [1, 0]]), edges_ptr=[0, 2, 2, 2, 2, 2, 2])
        torch.testing.assert_close(lj()(batch)["energy"], energy)

    def test_one_bad_system_stays_alone(self) -> None:
        systems = mixed()
        energy = lj()(batch_of(systems))["energy"]
        batch = batch_of(systems)
        batch.positions[2] = torch.nan
        found = lj()(batch)["energy"]
        assert torch.isnan(found[0])
        torch.testing.assert_close(found[1:], energy[1:])

    def test_empty_systems(self) -> None:
        empty = AtomicData(
            atomic_numbers=torch.zeros(0, dtype=torch.int64),
            positions=torch.zeros((0, 3), dtype=torch.float64),
        )
        output = lj()(Batch.from_data_list([empty, empty]))
        assert output["energy"].tolist() == [[0.0], [0.0]]
        assert output["forces"].shape == (0, 3)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"epsilon": 0.0}, "epsilon must be positive"),
            ({"sigma": -1.0}, "sigma"),
            ({"cutoff": float("nan")}, "cutoff"),
            ({"switch_width": 9.0}, "switch_width"),
        ],
    )
    def test_parameters_are_checked(self, options: dict[str, float], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            LennardJonesModel(**{"epsilon": 0.01, "sigma": 3.4, "cutoff": 8.0, **options})

    def test_old_name(self) -> None:
        from alchemi_xr.models.lj import LennardJonesModelWrapper

        assert LennardJonesModelWrapper is LennardJonesModel

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_cuda_equals_cpu(self, dtype: torch.dtype) -> None:
        model, batch = lj(), batch_of(mixed(), dtype)
        model.set_config("active_outputs", ALL)
        there = model(batch.to("cuda"))
        again = lj()(batch.to("cuda"))
        here = lj()
        here.set_config("active_outputs", ALL)
        for name, value in here(batch).items():
            tolerance = 1e-10 if dtype is torch.float64 else 1e-4
            torch.testing.assert_close(
                there[name].cpu(), value, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        assert torch.equal(there["energy"], again["energy"])


class TestDemo:
    def test_default_weights_are_the_same_everywhere(self) -> None:
        batch = batch_of([molecule("CH3CH2OH")], torch.float32)
        state = torch.random.get_rng_state()
        first, second = DemoModelWrapper(), DemoModelWrapper()
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.equal(first(batch)["forces"], second(batch)["forces"])

    def test_given_model_and_sizes(self) -> None:
        model = DemoModelWrapper(DemoModel(num_atom_types=20, hidden_dim=8))
        batch = batch_of([molecule("H2O")])
        output = model(batch)
        assert output["energy"].dtype == torch.float32
        assert output["forces"].shape == (3, 3)
        data = model.compute_embeddings(batch)
        shapes = model.embedding_shapes
        assert data["node_embeddings"].shape == (3, *shapes["node_embeddings"])
        assert data["graph_embeddings"].shape == (1, *shapes["graph_embeddings"])

    def test_accepts_one_sample(self) -> None:
        batch = batch_of([molecule("H2O")], torch.float32)
        model = DemoModelWrapper()
        assert torch.equal(model(batch.get_data(0))["forces"], model(batch)["forces"])

    def test_outputs_carry_no_graph_in_a_simulation_and_one_in_training(self) -> None:
        model, batch = DemoModelWrapper(), batch_of([molecule("H2O")], torch.float32)
        output = model(batch)
        assert not output["energy"].requires_grad
        assert not output["forces"].requires_grad
        assert not batch.positions.requires_grad
        model.train()
        loss = model(batch)["forces"].square().sum() + model(batch)["energy"].square().sum()
        loss.backward()
        assert float(model.model.hidden.weight.grad.abs().sum()) > 0.0

    def test_an_unknown_element_is_named(self) -> None:
        model = DemoModelWrapper(DemoModel(num_atom_types=7))
        with pytest.raises(ModelError, match="found 8, expected 0 to 6"):
            model(batch_of([molecule("H2O")]))

    def test_sizes_are_checked(self) -> None:
        with pytest.raises(ConfigError, match="sizes start at 1"):
            DemoModel(hidden_dim=0)

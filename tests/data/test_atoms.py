"""Samples from and to ASE and pymatgen."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.atoms import full_tensor
from alchemi_xr.errors import FieldError


def labelled():
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.05, seed=2)
    atoms.info.update(
        energy=-3.25, stress=[1, 2, 3, 4, 5, 6], virials=np.arange(9), dipole=[0, 0, 1], spin=2
    )
    atoms.arrays["forces"] = np.random.default_rng(0).normal(size=(4, 3))
    return atoms


def test_labels_come_from_info_and_arrays():
    data = AtomicData.from_atoms(labelled())
    assert data.dtype == torch.float32
    assert data.atomic_numbers.dtype == torch.int32
    assert data.energy.tolist() == [[-3.25]]
    assert data.energy.dtype == torch.float64
    assert data.forces.shape == (4, 3)
    assert data.stress[0].tolist() == [[1, 6, 5], [6, 2, 4], [5, 4, 3]]
    assert data.virial[0].flatten().tolist() == list(range(9))
    assert data.dipole.tolist() == [[0, 0, 1]]
    assert data.spin.tolist() == [[2]]
    assert data.pbc.tolist() == [[True] * 3]
    assert data.cell.shape == (1, 3, 3)


def test_absent_stays_none():
    data = AtomicData.from_atoms(molecule("H2O"))
    for name in ("energy", "forces", "stress", "cell", "pbc", "charge", "charges", "dipole"):
        assert data[name] is None, name


def test_other_keys_and_custom_fields():
    atoms = molecule("H2O")
    atoms.info.update(REF_energy=-1.0, note="text", flag=True, weight=2.5, vector=[1, 2])
    atoms.arrays["REF_forces"] = np.ones((3, 3))
    atoms.set_array("my_feature", np.arange(3))
    atoms.set_array("words", np.array(["a", "b", "c"]))
    data = AtomicData.from_atoms(atoms, energy_key="REF_energy", forces_key="REF_forces")
    assert data.energy.item() == -1.0
    assert data.forces.sum() == 9
    assert data.level_of("my_feature") == "atom"
    assert data.my_feature.tolist() == [0, 1, 2]
    assert set(data.info) == {"weight", "vector"}
    assert Batch.from_data_list([data]).level_of("my_feature") == "atom"


def test_results_of_a_calculator_count_only_for_these_positions():
    atoms = bulk("Cu", cubic=True)
    atoms.calc = EMT()
    energy = atoms.get_potential_energy()
    atoms.get_forces()
    data = AtomicData.from_atoms(atoms)
    assert data.energy.item() == energy
    assert data.forces is not None
    assert data.dipole is None
    atoms.positions[0] += 0.1
    assert AtomicData.from_atoms(atoms).energy is None
    atoms.info["energy"] = 5.0
    assert AtomicData.from_atoms(atoms).energy.item() == 5.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.set_cell(a.cell[[1, 0, 2]]), "determinant that is not positive"),
        (lambda a: a.set_cell(np.zeros((3, 3))), "determinant that is not positive"),
        (lambda a: a.info.update(stress=[1, 2]), "'stress' is no 3 x 3 tensor"),
        (lambda a: a.info.update(charge=0.5), "not whole"),
        (lambda a: a.arrays.update(charges=np.full(4, 0.1)), "do not add up to a whole number"),
    ],
)
def test_refused(change, words):
    atoms = labelled()
    change(atoms)
    with pytest.raises(ValueError, match=words):
        AtomicData.from_atoms(atoms)


def test_open_directions_may_lack_a_vector():
    slab = fcc111("Cu", (1, 1, 2))
    assert list(slab.pbc) == [True, True, False]
    slab.cell[2] = 0
    data = AtomicData.from_atoms(slab)
    assert torch.linalg.det(data.cell[0]) > 0
    assert data.pbc.tolist() == [[True, True, False]]


def test_total_charge():
    atoms = molecule("H2O")
    atoms.arrays["charges"] = np.array([-0.8, 0.4, 0.401])
    assert AtomicData.from_atoms(atoms).charge.tolist() == [[0.0]]
    atoms.info["charge"] = -1
    assert AtomicData.from_atoms(atoms).charge.tolist() == [[-1.0]]


def test_one_hot():
    data = AtomicData.from_atoms(molecule("H2O"), z_table=[1, 8])
    assert data.node_attrs.tolist() == [[0, 1], [1, 0], [1, 0]]
    with pytest.raises(FieldError, match=r"lacks elements: found \[8\]"):
        AtomicData.from_atoms(molecule("H2O"), z_table=[1, 6])


def test_round_trip():
    atoms = labelled()
    del atoms.info["virials"]
    atoms.set_velocities(np.random.default_rng(1).normal(size=(4, 3)))
    atoms.set_masses([60.0, 61.0, 62.0, 63.0])
    atoms.set_array("tag2", np.array([1, 2, 3, 4]))
    data = AtomicData.from_atoms(atoms, dtype=torch.float64)
    again = data.to_atoms()
    np.testing.assert_array_equal(again.numbers, atoms.numbers)
    for found, expected in (
        (again.positions, atoms.positions),
        (again.cell.array, atoms.cell.array),
        (again.get_velocities(), atoms.get_velocities()),
        (again.get_masses(), atoms.get_masses()),
        (again.get_forces(), atoms.arrays["forces"]),
        (again.get_stress(), np.array(atoms.info["stress"], float)),
        (again.get_dipole_moment(), np.array(atoms.info["dipole"], float)),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)
    assert again.get_potential_energy() == -3.25
    assert again.arrays["tag2"].tolist() == [1, 2, 3, 4]
    assert again.info["spin"] == 2
    twice = AtomicData.from_atoms(again, dtype=torch.float64)
    for name, values in data:
        torch.testing.assert_close(twice[name], values, msg=name)


def test_batch_to_atoms_list():
    batch = Batch.from_data_list(
        [AtomicData.from_atoms(labelled()), AtomicData.from_atoms(molecule("H2O"))]
    )
    crystal, water = batch.to_atoms_list()
    assert crystal.get_potential_energy() == -3.25
    assert water.calc is None
    assert not water.pbc.any()
    assert isinstance(crystal.calc, SinglePointCalculator)
    assert len(Atoms(water)) == 3


def test_full_tensor():
    assert full_tensor(np.eye(3)[None], name="x").shape == (3, 3)
    with pytest.raises(FieldError, match=r"found \[3\]"):
        full_tensor([1, 2, 3], name="virial")


def test_structures_of_pymatgen():
    core = pytest.importorskip("pymatgen.core")
    lattice = core.Lattice.cubic(5.64)
    structure = core.Structure(
        lattice,
        ["Na", "Cl"],
        [[0, 0, 0], [0.5, 0.5, 0.5]],
        site_properties={"forces": [[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]},
    )
    structure.properties["energy"] = -4.0
    data = AtomicData.from_structure(structure, dtype=torch.float64)
    assert data.atomic_numbers.tolist() == [11, 17]
    assert data.positions[1].tolist() == pytest.approx([2.82] * 3)
    assert data.energy.item() == -4.0
    assert data.forces[0, 2] == 1.0
    assert data.pbc.all()
    water = core.Molecule(["O", "H"], [[0, 0, 0], [0, 0, 1]], charge=-1)
    data = AtomicData.from_structure(water)
    assert data.cell is None
    assert data.charge.item() == -1
    mixed = core.Structure(lattice, [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]])
    with pytest.raises(FieldError, match="disordered"):
        AtomicData.from_structure(mixed)

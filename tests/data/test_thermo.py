"""Energies, temperatures and pressures against ASE and by hand."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.emt import EMT

from alchemi_xr.data.thermo import (
    kinetic_energy,
    pressure,
    stress_from_virial,
    temperature,
    virial_from_stress,
    volume,
)
from alchemi_xr.errors import FieldError
from alchemi_xr.units import KB

PTR = np.array([0, 3, 3, 6])


@pytest.fixture
def moving():
    rng = np.random.default_rng(4)
    frames = [molecule("H2O"), molecule("CO2")]
    for atoms in frames:
        atoms.set_velocities(rng.normal(scale=0.01, size=(3, 3)))
    return frames


def test_kinetic_energy_and_temperature_equal_ase(moving):
    velocities = np.concatenate([a.get_velocities() for a in moving])
    masses = np.concatenate([a.get_masses() for a in moving])
    expected = [moving[0].get_kinetic_energy(), 0.0, moving[1].get_kinetic_energy()]
    np.testing.assert_allclose(kinetic_energy(velocities, masses, PTR), expected, rtol=1e-12)
    # ASE has the Boltzmann constant of CODATA 2014.
    warm = temperature(velocities, masses, PTR)
    np.testing.assert_allclose(warm[[0, 2]], [a.get_temperature() for a in moving], rtol=1e-6)
    assert np.isnan(warm[1])
    fewer = temperature(velocities, masses, PTR, dof=np.array([6, 0, 6]))
    np.testing.assert_allclose(fewer[0], 2 * expected[0] / (6 * KB))


def test_torch_gives_the_same(moving):
    velocities = np.concatenate([a.get_velocities() for a in moving])
    masses = np.concatenate([a.get_masses() for a in moving])
    for function in (kinetic_energy, temperature):
        found = function(
            torch.from_numpy(velocities), torch.from_numpy(masses), torch.from_numpy(PTR)
        )
        np.testing.assert_allclose(
            found.numpy(), function(velocities, masses, PTR), rtol=1e-12, equal_nan=True
        )
    stress = np.random.default_rng(0).normal(size=(2, 3, 3))
    cell = np.stack([np.diag([2.0, 3.0, 4.0]), np.diag([1.0, 1.0, 2.0])])
    for function in (stress_from_virial, virial_from_stress):
        found = function(torch.from_numpy(stress), torch.from_numpy(cell))
        np.testing.assert_allclose(found.numpy(), function(stress, cell), rtol=1e-12)
    found = pressure(torch.from_numpy(stress), kinetic=torch.ones(2), cell=torch.from_numpy(cell))
    np.testing.assert_allclose(
        found.numpy(), pressure(stress, kinetic=np.ones(2), cell=cell), rtol=1e-6
    )


def test_signs_of_a_compressed_crystal():
    """ASE's EMT copper under compression: pressure > 0, and stress = dE/dstrain / V."""
    atoms = bulk("Cu", cubic=True)
    atoms.set_cell(atoms.cell * 0.98, scale_atoms=True)
    atoms.calc = EMT()
    stress = atoms.get_stress(voigt=False)[None]
    assert pressure(stress)[0] > 0.01
    cell = np.asarray(atoms.cell)[None]
    np.testing.assert_allclose(volume(cell), [atoms.get_volume()])
    np.testing.assert_allclose(stress_from_virial(virial_from_stress(stress, cell), cell), stress)
    step = 1e-5
    energies = []
    for sign in (1, -1):
        strained = atoms.copy()
        strained.set_cell(atoms.cell * (1 + sign * step), scale_atoms=True)
        strained.calc = EMT()
        energies.append(strained.get_potential_energy())
    derivative = (energies[0] - energies[1]) / (2 * step)
    np.testing.assert_allclose(
        np.trace(virial_from_stress(stress, cell)[0]), -derivative, rtol=1e-5
    )


def test_ideal_gas_pressure():
    cell = 10.0 * np.eye(3)[None]
    kinetic = np.array([1.5 * 7 * KB * 300.0])
    found = pressure(np.zeros((1, 3, 3)), kinetic=kinetic, cell=cell)
    np.testing.assert_allclose(found, [7 * KB * 300.0 / 1000.0])


def test_errors():
    with pytest.raises(FieldError, match="the kinetic part needs the cell"):
        pressure(np.zeros((1, 3, 3)), kinetic=np.ones(1))
    with pytest.raises(FieldError, match="velocities do not fit"):
        kinetic_energy(np.zeros((2, 3)), np.ones(3), np.array([0, 3]))
    with pytest.raises(FieldError, match="does not end at the rows"):
        kinetic_energy(np.zeros((3, 3)), np.ones(3), np.array([0, 2]))

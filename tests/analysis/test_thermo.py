"""Temperature, pressure and drift beside ASE and closed formulas."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr import analysis
from alchemi_xr.errors import FieldError, UnknownFieldError
from alchemi_xr.units import EV_PER_A3_IN_GPA, KB


def gas(store, chunks=None, frames=4, atoms=50, temperature=300.0, **fields):
    from ase.data import atomic_masses

    rng = np.random.default_rng(0)
    numbers = np.array([18, 2] * (atoms // 2))
    mass = atomic_masses[numbers]
    v = rng.normal(size=(frames, atoms, 3)) * np.sqrt(KB * temperature / mass)[:, None]
    x = rng.random((frames, atoms, 3)) * 10
    return store(x, numbers, velocities=v, chunks=chunks, **fields), v, mass


def test_temperature_is_that_of_ase(store, chunks):
    import ase

    ds, v, _ = gas(store, chunks)
    out = analysis.temperature(ds)
    assert out.attrs["units"] == "K"
    assert bool(out.chunks) == bool(chunks)
    for f in range(4):
        atoms = ase.Atoms(numbers=[18, 2] * 25, positions=np.zeros((50, 3)))
        atoms.set_velocities(v[f])
        assert float(out[f]) == pytest.approx(atoms.get_temperature(), rel=1e-6)
    assert float(analysis.temperature(ds, com_removed=True)[0]) == pytest.approx(
        float(out[0]) * 150 / 147
    )
    assert float(analysis.temperature(ds, constraints=10)[0]) == pytest.approx(
        float(out[0]) * 150 / 140
    )


def test_frozen_atoms_have_no_degrees_of_freedom(store, chunks):
    frozen = np.zeros((4, 50), dtype=bool)
    frozen[:, :20] = True
    frozen[3] = True
    ds, v, mass = gas(store, chunks, frozen=frozen.reshape(-1), levels={"frozen": "atom"})
    out = analysis.temperature(ds, frozen="frozen", com_removed=True)
    for f in range(3):
        energy = (mass[20:] * (v[f, 20:] ** 2).sum(1)).sum()
        # The frozen atoms take up momentum: three degrees of freedom more than without them.
        assert float(out[f]) == pytest.approx(energy / (90 * KB))
    assert np.isnan(out[3])
    with pytest.raises(FieldError, match="one value an atom"):
        analysis.temperature(ds, frozen=ds.energy if "energy" in ds else ds.num_atoms)
    with pytest.raises(UnknownFieldError, match="velocities"):
        analysis.temperature(ds.drop_vars("velocities"))


@pytest.mark.physics
def test_ideal_gas_law(store):
    ds, _, _ = gas(
        store, frames=20, atoms=1000, stress=np.zeros((20, 3, 3)), cell=np.eye(3) * 30, pbc=True
    )
    pressure = analysis.pressure(ds)
    want = 1000 * KB * 300.0 / 30**3 * EV_PER_A3_IN_GPA
    # The mean of N = 20,000 kinetic energies is known to sqrt(2 / 3N); four of it.
    assert float(pressure.mean()) == pytest.approx(want, rel=4 * np.sqrt(2 / 60000))
    assert float(analysis.pressure(ds, kinetic=False).max()) == 0.0
    assert pressure.attrs["units"] == "GPa"


def test_pressure_from_stress_and_from_virial(store, chunks):
    rng = np.random.default_rng(0)
    stress = rng.normal(size=(3, 3, 3)) * 0.01
    cell = np.eye(3) * 4 + rng.normal(size=(3, 3, 3)) * 0.2
    x = rng.random((3, 2, 3))
    one = analysis.pressure(store(x, stress=stress, cell=cell, pbc=True, chunks=chunks))
    np.testing.assert_allclose(one, -np.trace(stress, axis1=1, axis2=2) / 3 * EV_PER_A3_IN_GPA)
    virial = -stress * np.abs(np.linalg.det(cell))[:, None, None]
    two = analysis.pressure(store(x, virial=virial, cell=cell, pbc=True, chunks=chunks))
    np.testing.assert_allclose(one, two)


def test_drift_of_each_system(store, chunks):
    time = np.repeat(np.arange(20) * 2.0, 2)
    system = np.tile([1, 2], 20)
    energy = np.where(system == 1, -8.0 + 1e-4 * time, 3.0)
    ds = store(np.zeros((40, 4, 3)), 18, energy=energy, system_id=system, time=time, chunks=chunks)
    ds["time"].attrs["units"] = "fs"
    out = analysis.energy_drift(ds)
    np.testing.assert_allclose(out.drift, [1e-4 / 4 * 1e6, 0.0], atol=1e-9)
    assert out.drift.attrs["units"] == "meV/ps"
    np.testing.assert_allclose(out.fluctuation, 0.0, atol=1e-12)

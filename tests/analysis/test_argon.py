"""Liquid argon beside Rahman's paper: A. Rahman, Phys. Rev. 136, A405 (1964).

There: 94.4 K, 1.374 g/cm³, 864 atoms; the first peak of g(r) at 3.7 Å, and a diffusion
coefficient of 2.43e-5 cm²/s. Here 108 atoms, which lowers D by about a tenth (the
hydrodynamic correction for periodic cells), and less time: D within a quarter.
"""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr import analysis
from alchemi_xr.units import KB, to_internal_time

EPSILON, SIGMA, MASS, KELVIN = 120.0 * KB, 3.4, 39.948, 94.4
ATOMS = 108
LENGTH = (ATOMS * 39.948 * 1.66053907e-24 / 1.374 * 1e24) ** (1 / 3)


def forces(x):
    d = x[:, None] - x[None]
    d -= LENGTH * np.rint(d / LENGTH)
    r2 = np.einsum("ijk,ijk->ij", d, d)
    np.fill_diagonal(r2, np.inf)
    r2[r2 > (2.5 * SIGMA) ** 2] = np.inf
    s6 = (SIGMA**2 / r2) ** 3
    return np.einsum("ij,ijk->ik", 24 * EPSILON * (2 * s6**2 - s6) / r2, d)


def simulate(steps, every, dt):
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3), -1).reshape(-1, 1, 3)
    x = ((grid + np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])) / 3).reshape(
        -1, 3
    )
    x = x * LENGTH
    v = rng.normal(size=x.shape) * np.sqrt(KB * KELVIN / MASS)
    f = forces(x)
    frames, velocities = [], []
    for step in range(-1500, steps):
        v += 0.5 * dt * f / MASS
        x = x + dt * v
        f = forces(x)
        v += 0.5 * dt * f / MASS
        if step < 0 and step % 20 == 0:
            v -= v.mean(0)
            v *= np.sqrt((3 * ATOMS - 3) * KB * KELVIN / (MASS * (v**2).sum()))
        if step >= 0 and step % every == 0:
            frames.append(np.mod(x, LENGTH))
            velocities.append(v.copy())
    return np.array(frames), np.array(velocities)


@pytest.mark.physics
@pytest.mark.slow
def test_argon_is_rahmans(store):
    x, v = simulate(5000, 10, to_internal_time(10.0))
    time = np.arange(len(x)) * 100.0
    ds = store(x, 18, velocities=v, cell=np.eye(3) * LENGTH, pbc=True, time=time)
    kelvin = float(analysis.temperature(ds, com_removed=True).mean())
    assert kelvin == pytest.approx(KELVIN, abs=8.0)
    g = analysis.rdf(ds, 8.5, bins=85).g[0]
    peak = int(np.argmax(g.values))
    assert float(g.r[peak]) == pytest.approx(3.7, abs=0.1)
    assert 2.6 < float(g[peak]) < 3.2
    # g of one cell goes to 1 - 1/N far away.
    assert float(g[-20:].mean()) == pytest.approx(1.0, abs=0.1)
    found = analysis.diffusion(analysis.msd(ds), fit=(0.02, 0.2)).sel(element="all")
    assert float(found.D_cm2_s) == pytest.approx(2.43e-5, rel=0.25)
    # The error that is given is of the size of the deviation, not of another.
    assert 0.005 < float(found.D_error / found.D) < 0.25
    # Green-Kubo: D is a third of the integral of the velocity autocorrelation.
    near = analysis.vacf(ds, mass_weighted=False, max_lag=30).vacf.sel(element="all")
    speed = 3 * KB * kelvin / MASS * to_internal_time(1.0) ** 2
    assert float(near.integrate("lag")) * speed / 3 * 0.1 == pytest.approx(2.43e-5, rel=0.35)

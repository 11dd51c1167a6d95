"""Bonds, angles, coordination and duplicates, beside loops and known structures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alchemi_xr import analysis
from alchemi_xr.errors import ConfigError

WATER = np.array([[0, 0, 0], [0.9572, 0, 0], [-0.2399872, 0.92662721, 0]])


def rotated(x, seed):
    from scipy.spatial.transform import Rotation

    return x @ Rotation.random(rng=np.random.default_rng(seed)).as_matrix().T


def test_water(store, chunks):
    x = [rotated(WATER, s) + s for s in range(4)]
    ds = store(x, [8, 1, 1] * 4, chunks=chunks)
    out = analysis.bond_lengths(ds)
    assert bool(out.counts.chunks) == bool(chunks)
    assert out.number.sel(pair="H-O") == 8
    assert out.number.sel(pair="O-O") == 0
    assert float(out["mean"].sel(pair="H-O")) == pytest.approx(0.9572, rel=1e-6)
    assert float(out["std"].sel(pair="H-O")) == pytest.approx(0.0, abs=1e-6)
    assert np.isnan(out["mean"].sel(pair="O-O"))
    step = float(out.r[1] - out.r[0])
    assert float(out.density.sel(pair="H-O").sum()) * step == pytest.approx(1.0)
    bent = analysis.angles(ds)
    assert bent.number.sel(triple="H-O-H") == 4
    assert float(bent["mean"].sel(triple="H-O-H")) == pytest.approx(104.52, abs=0.01)
    assert float(bent.number.sum()) == 4
    near = analysis.coordination(ds)
    assert near.dtype == np.int64
    assert near.values.tolist() == [2, 1, 1] * 4
    np.testing.assert_allclose(ds.ragged.reduce(near, "mean"), 4 / 3)


@pytest.mark.parametrize("cubic", [True, False])
def test_silicon_is_tetrahedral_however_small_its_cell(store, cubic):
    from ase.build import bulk

    si = bulk("Si", "diamond", a=5.43, cubic=cubic)
    ds = store([si.positions], si.numbers, cell=np.array(si.cell), pbc=True)
    assert (analysis.coordination(ds) == 4).all()
    out = analysis.angles(ds)
    assert out.number.item() == 6 * len(si)
    assert float(out["mean"][0]) == pytest.approx(109.4712, abs=1e-3)
    assert analysis.bond_lengths(ds).number.item() == 2 * len(si)


def test_angles_are_those_of_a_loop(store):
    rng = np.random.default_rng(0)
    x = rng.random((6, 7, 3)) * 3
    numbers = [6, 1, 6, 8, 1, 8, 6]
    out = analysis.angles(store(x, numbers), cutoff=1.6, bins=18)
    found: dict[str, list[float]] = {}
    name = {1: "H", 6: "C", 8: "O"}
    for frame in x:
        for c in range(7):
            bonded = [k for k in range(7) if k != c and np.linalg.norm(frame[k] - frame[c]) < 1.6]
            for a, b in itertools.combinations(bonded, 2):
                u, v = frame[a] - frame[c], frame[b] - frame[c]
                angle = np.degrees(np.arccos(u @ v / np.linalg.norm(u) / np.linalg.norm(v)))
                one, two = sorted((numbers[a], numbers[b]))
                found.setdefault(f"{name[one]}-{name[numbers[c]]}-{name[two]}", []).append(angle)
    for triple, angles in found.items():
        want = np.histogram(angles, bins=18, range=(0, 180))[0]
        np.testing.assert_array_equal(out.counts.sel(triple=triple), want)
        assert float(out["mean"].sel(triple=triple)) == pytest.approx(np.mean(angles))
        assert float(out["std"].sel(triple=triple)) == pytest.approx(np.std(angles))
    assert float(out.number.sum()) == sum(map(len, found.values()))


def test_cutoffs_by_pair(store):
    ds = store([WATER], [8, 1, 1])
    out = analysis.bond_lengths(ds, cutoff={"H-H": 2.0})
    assert out.number.sel(pair="H-H") == 1
    assert out.number.sel(pair="H-O") == 0
    with pytest.raises(ConfigError, match="cutoff of O-H"):
        analysis.bond_lengths(ds, cutoff={"O-H": -1.0})
    with pytest.raises(ConfigError, match="bins"):
        analysis.angles(ds, bins=0)


def test_single_atoms_have_no_bonds(store, chunks):
    ds = store([np.zeros((1, 3)), np.zeros((0, 3))], [2], chunks=chunks)
    assert analysis.coordination(ds).values.tolist() == [0]
    assert analysis.bond_lengths(ds).number.values.tolist() == [0]
    assert analysis.angles(ds).number.values.tolist() == [0]


def test_duplicates_turned_moved_and_renumbered_are_found(store, chunks):
    rng = np.random.default_rng(0)
    base = rng.normal(size=(6, 3)) * 1.5
    numbers = np.array([8, 1, 6, 1, 7, 1])
    order = rng.permutation(6)
    x = [
        base,
        rotated(base, 1) + 7,
        base + rng.normal(size=(6, 3)) * 0.05,
        base[order] * -1,  # a mirror image has the same distances
        base,
    ]
    z = np.concatenate([numbers, numbers, numbers, numbers[order], numbers[::-1]])
    out = analysis.duplicates(store(x, z, chunks=chunks))
    assert out.values.tolist() == [0, 0, 2, 0, 4]


def test_a_crystal_and_the_same_with_another_origin(store):
    from ase.build import bulk

    si = bulk("Si", "diamond", a=5.43, cubic=True)
    moved = si.copy()
    moved.translate([1.1, -9.0, 3.0])
    moved.wrap()
    strained = si.copy()
    strained.set_cell(si.cell * 1.01, scale_atoms=True)
    cells = np.stack([np.array(a.cell) for a in (si, moved, strained)])
    ds = store([a.positions for a in (si, moved, strained)], si.numbers, cell=cells, pbc=True)
    assert analysis.duplicates(ds).values.tolist() == [0, 0, 2]
    first = analysis.fingerprints(ds).values
    big = si * (2, 1, 1)
    other = store([big.positions], big.numbers, cell=np.array(big.cell), pbc=True)
    np.testing.assert_allclose(analysis.fingerprints(other).values[0], first[0], rtol=1e-9)

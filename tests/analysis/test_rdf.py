"""g(r) beside brute force over images, ASE on crystals, MDAnalysis on its own water, and theory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alchemi_xr import analysis
from alchemi_xr.errors import ConfigError, FieldError, UnknownFieldError

TRICLINIC = np.array([[7.0, 0, 0], [2.5, 6.5, 0], [-1.0, 1.5, 8.0]])


def brute(x, cell, pbc, rmax):
    """Distances of all directed pairs, images included."""
    reach = range(-8, 9)
    out = []
    for s in itertools.product(*[(reach if p else [0]) for p in pbc]):
        d = np.linalg.norm(x[None] + np.array(s) @ cell - x[:, None], axis=-1)
        i, j = np.nonzero((d < rmax) & (d > 1e-9))
        out += [(a, b, d[a, b]) for a, b in zip(i, j, strict=True)]
    return out


@pytest.mark.parametrize("pbc", [(1, 1, 1), (1, 1, 0), (0, 1, 0), (0, 0, 0)])
def test_counts_are_those_of_brute_force(store, chunks, pbc):
    rng = np.random.default_rng(0)
    numbers = np.array([8, 1, 1, 8, 1, 6])
    # Atoms lie far outside their cell: wrapping is no business of the user.
    x = rng.uniform(-15, 15, size=(5, 6, 3))
    ds = store(x, numbers, cell=TRICLINIC, pbc=np.array(pbc, bool), chunks=chunks)
    out = analysis.rdf(ds, 6.0, bins=24)
    assert bool(out.counts.chunks) == bool(chunks)
    assert out.pair.values.tolist() == ["H-H", "H-C", "H-O", "C-C", "C-O", "O-O"]
    found = [p for f in range(5) for p in brute(x[f], TRICLINIC, pbc, 6.0)]
    kinds = {"H": 1, "C": 6, "O": 8}
    for pair in out.pair.values:
        a, b = (kinds[e] for e in pair.split("-"))
        r = [d for i, j, d in found if numbers[i] == a and numbers[j] == b]
        want = np.histogram(r, bins=24, range=(0, 6.0))[0]
        np.testing.assert_array_equal(out.counts.sel(pair=pair), want)
        near = out.coordination.sel(pair=pair).values[-1]
        assert near == pytest.approx(len(r) / (5 * (numbers == a).sum()))
        g = out.g.sel(pair=pair).values
        if all(pbc):
            volume = abs(np.linalg.det(TRICLINIC))
            shell = 4 / 3 * np.pi * np.diff(np.linspace(0, 6, 25) ** 3)
            n = (numbers == a).sum() * (numbers == b).sum()
            np.testing.assert_allclose(g, want / (5 * n / volume * shell))
        else:
            assert np.isnan(g).all()
    total = analysis.rdf(ds, 6.0, bins=24, pairs="all")
    np.testing.assert_array_equal(
        total.counts[0], np.histogram([p[2] for p in found], bins=24, range=(0, 6.0))[0]
    )


def test_molecules_beside_crystals_do_not_touch_g(store, chunks):
    rng = np.random.default_rng(1)
    x = [rng.random((4, 3)) * 5 for _ in range(6)]
    cell = np.stack([np.eye(3) * 5] * 6)
    pbc = np.array([[True] * 3, [False] * 3] * 3)
    both = analysis.rdf(store(x, 18, cell=cell, pbc=pbc, chunks=chunks), 4.0)
    alone = analysis.rdf(store(x[::2], 18, cell=cell[::2], pbc=True), 4.0)
    apart = analysis.rdf(store(x[1::2], 18), 4.0)
    np.testing.assert_allclose(both.g, alone.g)
    np.testing.assert_array_equal(both.counts, alone.counts + apart.counts)


def test_single_atoms_and_empty_samples_pass(store, chunks):
    ds = store([np.zeros((1, 3)), np.zeros((0, 3)), np.zeros((1, 3))], 2, chunks=chunks)
    out = analysis.rdf(ds, 5.0)
    assert (out.counts == 0).all()
    assert (out.coordination == 0).all()
    # A lone atom in a small cell sees its own images.
    ds = store([np.zeros((1, 3))], 2, cell=np.eye(3) * 2, pbc=True)
    assert float(analysis.rdf(ds, 2.5, bins=5).coordination[0, -1]) == 6


@pytest.mark.physics
def test_ideal_gas_is_flat(store):
    rng = np.random.default_rng(2)
    n, length = 200, 20.0
    x = rng.random((200, n, 3)) * length
    out = analysis.rdf(store(x, 18, cell=np.eye(3) * length, pbc=True), 8.0, bins=16)
    pairs = out.counts.values[0] / 2
    # Poisson noise of each shell, four standard deviations; the expectation is 1 - 1/N.
    assert (np.abs(out.g.values[0] - (1 - 1 / n)) < 4 / np.sqrt(pairs)).all()


@pytest.mark.physics
def test_crystal_shells_and_ase(store):
    from ase.build import bulk
    from ase.geometry.rdf import get_rdf

    for cubic in (True, False):
        cu = bulk("Cu", "fcc", a=3.61, cubic=cubic) * ((4, 4, 4) if cubic else (6, 6, 6))
        ds = store([cu.positions], cu.numbers, cell=np.array(cu.cell), pbc=True)
        out = analysis.rdf(ds, 5.5, bins=110)
        near = out.coordination.isel(pair=0)
        for r, number in ((2.7, 12), (3.7, 18), (4.5, 42), (5.2, 54)):
            assert float(near.sel(r=r, method="nearest")) == pytest.approx(number)
        want, _ = get_rdf(cu, 5.5, 110)
        np.testing.assert_allclose(out.g[0], want, rtol=1e-5, atol=1e-9)
    # The primitive cell alone gives the same as its supercell.
    one = bulk("Cu", "fcc", a=3.61)
    ds = store([one.positions], 29, cell=np.array(one.cell), pbc=True)
    np.testing.assert_allclose(analysis.rdf(ds, 5.5, bins=110).g[0], want, rtol=1e-5, atol=1e-9)


@pytest.mark.physics
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_water_of_mdanalysis(store):
    mda = pytest.importorskip("MDAnalysis", reason="extra of the tests: MDAnalysis")
    files = pytest.importorskip("MDAnalysisTests.datafiles", reason="MDAnalysisTests is not there")
    from MDAnalysis.analysis.rdf import InterRDF
    from MDAnalysis.lib.distances import self_capped_distance

    universe = mda.Universe(files.GRO, files.XTC)
    oxygen = universe.select_atoms("name OW")
    frames = universe.trajectory[:2]
    x = np.stack([oxygen.positions.copy() for _ in frames])
    cells = np.stack([ts.triclinic_dimensions.copy() for ts in universe.trajectory[:2]])
    assert not np.allclose(cells[0], np.diag(np.diag(cells[0])))
    theirs = InterRDF(oxygen, oxygen, nbins=60, range=(0.0, 6.0)).run(stop=2)
    out = analysis.rdf(store(x, 8, cell=cells, pbc=True), 6.0, bins=60)
    want = theirs.results.count[1:]
    got = out.counts.values[0, 1:]
    # They hold positions and cells in float32: a pair within 1e-5 Å of the edge of a bin
    # may fall on its other side, and nothing else differs.
    edges = np.linspace(0.0, 6.0, 61)
    near = np.zeros(61)
    for ts in universe.trajectory[:2]:
        _, distances = self_capped_distance(oxygen.positions, 6.1, box=ts.dimensions)
        near += (np.abs(distances[:, None] - edges) < 1e-5).sum(axis=0)
    allowed = 2 * (near[1:-1] + near[2:])
    assert allowed.sum() < 1e-3 * want.sum()
    assert (np.abs(got - want) <= allowed).all()
    sure = allowed == 0
    assert sure.sum() > 20
    np.testing.assert_allclose(out.g[0, 1:][sure], theirs.results.rdf[1:][sure], rtol=1e-5)
    total = (out.g[0, 1:] * out.r[1:] ** 2).sum()
    assert float(total) == pytest.approx(
        float((theirs.results.rdf[1:] * out.r.values[1:] ** 2).sum()), rel=1e-5
    )


def test_wrong_input_is_named(store):
    x = np.zeros((1, 2, 3))
    x[0, 1] = np.nan
    ds = store(x)
    with pytest.raises(FieldError, match="atom 1 are not finite"):
        analysis.rdf(ds)
    with pytest.raises(ConfigError, match="no length"):
        analysis.rdf(ds, -1.0)
    with pytest.raises(ConfigError, match="'Q' is no element"):
        analysis.rdf(ds, pairs=[("Q", "H")])
    with pytest.raises(ConfigError, match="name one twice"):
        analysis.rdf(ds, pairs=[("O", "H"), ("H", "O")])
    with pytest.raises(ConfigError, match="name one twice"):
        analysis.rdf(ds, pairs=[])
    with pytest.raises(ConfigError, match="names no pairs"):
        analysis.rdf(ds, pairs="O")
    with pytest.raises(UnknownFieldError, match="positions"):
        analysis.rdf(ds.drop_vars("positions"))
    flat = store([np.zeros((1, 3))], cell=np.zeros((3, 3)), pbc=True)
    with pytest.raises(FieldError, match="spans no volume"):
        analysis.rdf(flat)

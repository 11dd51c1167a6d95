"""VACF, RMSD and RMSF beside loops, MDAnalysis and a harmonic crystal."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr import analysis
from alchemi_xr.errors import ConfigError, FieldError


def test_vacf_is_the_loop(store, chunks):
    rng = np.random.default_rng(0)
    v = rng.normal(size=(30, 4, 3))
    ds = store(np.zeros((30, 4, 3)), [1, 8, 1, 1], velocities=v, chunks=chunks)
    out = analysis.vacf(ds, mass_weighted=False, max_lag=20)
    want = np.array([(v[m:] * v[: 30 - m]).sum((1, 2)).mean() for m in range(20)])
    np.testing.assert_allclose(out.vacf.sel(element="all"), want / want[0], rtol=1e-9, atol=1e-12)
    want = np.array([(v[m:, 1] * v[: 30 - m, 1]).sum(1).mean() for m in range(20)])
    np.testing.assert_allclose(out.vacf.sel(element="O"), want / want[0], rtol=1e-9, atol=1e-12)
    with pytest.raises(ConfigError, match="window"):
        analysis.vacf(ds, window="box")
    mass = np.array([1.008, 15.999, 1.008, 1.008])
    other = store(np.zeros((30, 4, 3)), [1, 8, 1, 1], momenta=v * mass[:, None], chunks=chunks)
    same = analysis.vacf(other, mass_weighted=False, max_lag=20)
    np.testing.assert_allclose(same.vacf, out.vacf, rtol=1e-9, atol=1e-12)


@pytest.mark.physics
def test_spectrum_of_a_harmonic_crystal(store):
    """Atoms on springs vibrate at two frequencies; the spectrum peaks there, by mass."""
    time = np.arange(4000) * 2.0  # fs
    thz = np.array([5.0, 12.0])
    phase = np.random.default_rng(0).random((20, 3)) * 2 * np.pi
    kind = np.arange(20) % 2
    omega = 2 * np.pi * thz[kind] * 1e-3
    v = np.cos(omega[None, :, None] * time[:, None, None] + phase[None])
    numbers = np.where(kind == 0, 79, 6)
    ds = store(np.zeros((4000, 20, 3)), numbers, velocities=v, time=time)
    ds["time"].attrs["units"] = "fs"
    out = analysis.vacf(ds)
    assert out.frequency.attrs["units"] == "THz"
    for element, nu in (("Au", 5.0), ("C", 12.0)):
        peak = float(out.frequency[int(np.argmax(out.spectrum.sel(element=element).values))])
        assert peak == pytest.approx(nu, abs=float(out.frequency[1]))
        np.testing.assert_allclose(
            out.vacf.sel(element=element)[:100], np.cos(2e-3 * np.pi * nu * time[:100]), atol=0.02
        )
    assert float(out.wavenumber[-1]) == pytest.approx(33.3564095 * float(out.frequency[-1]))
    # The transform keeps C(0) = 1: S integrates to 1 over all frequencies, 1/2 of it at ν > 0.
    area = float(out.spectrum.sel(element="all").sum()) * float(out.frequency[1]) * 1e-3
    assert area == pytest.approx(0.5, rel=1e-2)


def rotations(count, seed):
    from scipy.spatial.transform import Rotation

    return Rotation.random(count, rng=np.random.default_rng(seed)).as_matrix()


def test_rmsd_does_not_see_turns_and_shifts(store, chunks):
    rng = np.random.default_rng(1)
    base = rng.normal(size=(7, 3)) * 3
    x = np.einsum("fij,aj->fai", rotations(8, 2), base) + rng.normal(size=(8, 1, 3)) * 5
    ds = store(x, 6, chunks=chunks)
    out = analysis.rmsd(ds)
    assert out.dims == ("sample",)
    assert bool(out.chunks) == bool(chunks)
    np.testing.assert_allclose(out, 0.0, atol=1e-7)
    flat = analysis.rmsd(ds, superposition=False)
    want = np.sqrt(((x - x[0]) ** 2).sum(-1).mean(1))
    np.testing.assert_allclose(flat, want, atol=1e-12)
    # A mirror image is another structure.
    mirrored = store([base, base * [1, 1, -1]], 6)
    assert float(analysis.rmsd(mirrored)[1]) > 0.5
    np.testing.assert_allclose(analysis.rmsf(ds), 0.0, atol=1e-6)


def test_rmsd_equals_scipy(store):
    from scipy.spatial.transform import Rotation

    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, 9, 3))
    mass = np.array([12.011, 1.008, 15.999] * 3)
    out = analysis.rmsd(store(x, [6, 1, 8] * 3), reference=2, weights="mass")
    centered = x - np.einsum("a,fai->fi", mass, x)[:, None] / mass.sum()
    for f in range(6):
        _, distance = Rotation.align_vectors(centered[2], centered[f], weights=mass)
        want = distance / np.sqrt(mass.sum())
        assert float(out[f]) == pytest.approx(want, rel=1e-4, abs=1e-7)
    with pytest.raises(FieldError, match="same number of atoms"):
        analysis.rmsd(store([np.zeros((2, 3)), np.zeros((3, 3))]))
    with pytest.raises(FieldError, match="reference does not fit"):
        analysis.rmsd(store(x), reference=np.zeros((2, 3)))
    with pytest.raises(ConfigError, match="no such frame"):
        analysis.rmsd(store(x), reference=6)


@pytest.mark.physics
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_protein_of_mdanalysis(store):
    mda = pytest.importorskip("MDAnalysis", reason="extra of the tests: MDAnalysis")
    files = pytest.importorskip("MDAnalysisTests.datafiles", reason="MDAnalysisTests is not there")
    from MDAnalysis.analysis import align, rms

    universe = mda.Universe(files.PSF, files.DCD)
    alpha = universe.select_atoms("name CA")
    x = np.stack([alpha.positions.copy() for _ in universe.trajectory])
    theirs = rms.RMSD(alpha).run().results.rmsd[:, 2]
    ds = store(x, 6)
    # The first frame is its own reference: 0 in exact arithmetic.
    np.testing.assert_allclose(analysis.rmsd(ds)[1:], theirs[1:], rtol=1e-5)
    inner = mda.Merge(alpha).load_new(x)
    align.AlignTraj(inner, inner, select="all", in_memory=True).run()
    want = rms.RMSF(inner.atoms).run().results.rmsf
    # AlignTraj moves float32 positions in place: 1e-5 Å of about 1 Å.
    np.testing.assert_allclose(analysis.rmsf(ds, weights="equal"), want, rtol=5e-5)


def test_rmsf_is_the_loop(store, chunks):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(50, 5, 3)) * 0.1 + np.arange(5)[None, :, None]
    out = analysis.rmsf(store(x, 6, chunks=chunks), superposition=False)
    want = np.sqrt(((x - x.mean(0)) ** 2).sum(-1).mean(0))
    np.testing.assert_allclose(out, want, rtol=1e-9)
    assert bool(out.chunks) == bool(chunks)


def test_wrapped_atoms_did_not_move(store, chunks):
    """A crystal whose atoms jump over the faces, and a molecule that wanders through its cell."""
    cell = np.array([[6.0, 0, 0], [2.0, 6.0, 0], [0, 1.0, 7.0]])
    rng = np.random.default_rng(5)
    place = rng.random((8, 3)) @ cell
    x = place + rng.normal(size=(12, 8, 3)) * 0.1
    fraction = x @ np.linalg.inv(cell)
    wrapped = (fraction - np.floor(fraction)) @ cell
    free = analysis.rmsd(store(x, 18, chunks=chunks), reference=place)
    ds = store(wrapped, 18, cell=cell, pbc=True, chunks=chunks)
    np.testing.assert_allclose(analysis.rmsd(ds, reference=place), free, rtol=1e-9)
    assert float(analysis.rmsd(ds, reference=place, images=False).max()) > 1.0
    molecule = rng.normal(size=(8, 3)) * 0.5
    path = np.cumsum(rng.normal(size=(12, 1, 3)), axis=0) * 2 + molecule
    whole = store(path, 6, cell=cell, pbc=True, chunks=chunks)
    np.testing.assert_allclose(analysis.rmsd(whole), 0.0, atol=1e-7)
    np.testing.assert_allclose(analysis.rmsf(whole), 0.0, atol=1e-6)

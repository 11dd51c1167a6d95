"""MSD beside a loop, the shared wrapped case, MDAnalysis' random walk, and diffusion theory."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alchemi_xr import analysis, convert, open_dataset
from alchemi_xr.analysis import frames as frames_module
from alchemi_xr.errors import ConfigError, FieldError

TRICLINIC = np.array([[7.0, 0, 0], [2.5, 6.5, 0], [-1.0, 1.5, 8.0]])


def slow_msd(x):
    """[F, A, 3] to [F]."""
    count = len(x)
    return np.array([((x[m:] - x[: count - m]) ** 2).sum(-1).mean() for m in range(count)])


def walk(frames, atoms, seed=0, step=0.4):
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.normal(size=(frames, atoms, 3)) * step, axis=0) + 3.0


@pytest.mark.parametrize("pbc", [(1, 1, 1), (1, 0, 1), (0, 0, 0)])
def test_wrapped_frames_are_unwrapped(store, chunks, pbc, monkeypatch):
    monkeypatch.setattr(frames_module, "SLAB_BYTES", 24 * 40 * 2)  # two atoms at a time
    x = walk(40, 5)
    fraction = x @ np.linalg.inv(TRICLINIC)
    wrapped = (fraction - np.floor(fraction) * np.array(pbc)) @ TRICLINIC
    ds = store(wrapped, [8, 1, 1, 8, 1], cell=TRICLINIC, pbc=np.array(pbc, bool), chunks=chunks)
    for scheme in ("fractional", "toroidal"):
        out = analysis.msd(ds, time_step=2.0, scheme=scheme)
        np.testing.assert_allclose(out.msd.sel(element="all"), slow_msd(x), rtol=1e-9)
        np.testing.assert_allclose(out.msd.sel(element="O"), slow_msd(x[:, [0, 3]]), rtol=1e-9)
        np.testing.assert_allclose(out.msd_block[1, 0], slow_msd(x[8:16]), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(out.lag, np.arange(40) * 2.0)
    assert out.lag.attrs["units"] == "fs"
    np.testing.assert_allclose(
        analysis.msd(ds, axes="xz").msd[0],
        slow_msd(x * [1, 0, 1]),
        rtol=1e-9,
    )
    centered = x - (x * [[[16.0], [1], [1], [16], [1]]]).sum(1, keepdims=True) / 35.0
    out = analysis.msd(ds, remove_drift=True)
    np.testing.assert_allclose(out.msd.sel(element="all"), slow_msd(centered), rtol=2e-2)


def test_many_systems_in_one_store(store, chunks):
    walks = [walk(20, 3, seed) for seed in range(3)]
    x = np.stack(walks, axis=1).reshape(-1, 3, 3)
    rng = np.random.default_rng(5)
    order = rng.permutation(60)
    system = np.tile([4, 9, 2], 20)
    step = np.repeat(np.arange(20), 3) * 5
    ds = store(x[order], 18, system_id=system[order], step=step[order], chunks=chunks)
    out = analysis.msd(ds, time_step=0.5)
    assert out.system_id.values.tolist() == [2, 4, 9]
    for label, path in zip([4, 9, 2], walks, strict=True):
        np.testing.assert_allclose(
            out.msd.sel(system_id=label, element="all"), slow_msd(path), rtol=1e-9
        )
    np.testing.assert_array_equal(out.lag, np.arange(20) * 2.5)


def test_shared_case_of_wrapped_frames(shared, tmp_path):
    case = shared / "cases" / "C44-msd-wrapped"
    want = json.loads((case / "expected.json").read_text())["expected"]
    for name in ("wrapped", "npt"):
        convert(str(case / f"{name}.xyz"), str(tmp_path / f"{name}.zarr"))
    out = analysis.msd(open_dataset(tmp_path / "wrapped.zarr"))
    curve = out.msd.sel(element="all").values
    np.testing.assert_allclose(curve[:4], want["msd_at_lag"], rtol=1e-5, atol=1e-9)
    assert curve[10] == pytest.approx(want["msd_at_lag_10"], rel=1e-5)
    lags = np.arange(want["frames"])
    np.testing.assert_allclose(
        curve, want["msd_ballistic_coefficient"] * lags**2, rtol=1e-5, atol=1e-9
    )
    npt = open_dataset(tmp_path / "npt.zarr")
    mean = float(npt.cell.values[:, 0, 0].mean())
    curve = analysis.msd(npt).msd.sel(element="all").values / mean**2
    # In units of the box, whose first edge is 10 Å.
    coefficient = want["msd_ballistic_coefficient"] / 100
    np.testing.assert_allclose(curve, coefficient * lags**2, rtol=1e-5, atol=1e-9)


@pytest.mark.physics
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_walk_of_mdanalysis(store):
    mda = pytest.importorskip("MDAnalysis", reason="extra of the tests: MDAnalysis")
    files = pytest.importorskip("MDAnalysisTests.datafiles", reason="MDAnalysisTests is not there")
    from MDAnalysis.analysis.msd import EinsteinMSD

    universe = mda.Universe(files.RANDOM_WALK_TOPO, files.RANDOM_WALK)
    x = np.stack([universe.atoms.positions[:60].copy() for _ in universe.trajectory[:400]])
    theirs = EinsteinMSD(universe.atoms[:60], fft=False).run(stop=400)
    out = analysis.msd(store(x, 18))
    np.testing.assert_allclose(
        out.msd.sel(element="all")[1:], theirs.results.timeseries[1:], rtol=1e-5
    )


@pytest.mark.physics
def test_diffusion_of_brownian_motion(store):
    # Each axis takes steps of variance s² in time t: D = s² / 2t.
    x = walk(1000, 60, seed=3, step=0.3)
    ds = store(x, [18, 10] * 30, time=np.arange(1000) * 4.0)
    ds["time"].attrs["units"] = "fs"
    found = analysis.diffusion(analysis.msd(ds), fit=(0.01, 0.1)).sel(element="all")
    assert float(found.D) == pytest.approx(0.09 / 8.0, rel=0.1)
    assert 0 < float(found.D_error) < 0.1 * float(found.D)
    assert abs(float(found.D) - 0.09 / 8.0) < 4 * float(found.D_error)
    assert found.D.attrs["units"] == "Å²/fs"
    assert float(found.D_cm2_s) == pytest.approx(0.1 * float(found.D))


def test_what_cannot_be_is_said(store):
    x = np.random.default_rng(0).random((10, 2, 3)) * 5
    ds = store(x, cell=np.eye(3) * 5, pbc=True)
    with pytest.warns(UserWarning, match="cannot be told"):
        analysis.msd(ds)
    with pytest.raises(FieldError, match="not frames of one system"):
        analysis.msd(store([np.zeros((2, 3)), np.zeros((3, 3))]))
    with pytest.raises(FieldError, match="not equally spaced"):
        analysis.msd(store(x, time=np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 20.0])))
    with pytest.raises(ConfigError, match="axes"):
        analysis.msd(ds, axes="xx")
    single = analysis.msd(store(x[:1], blocks := 1))
    assert single.msd.values.tolist() == [[0.0]]
    with pytest.raises(ConfigError, match="fewer than two lags"):
        analysis.diffusion(single)
    assert blocks == 1

"""Statistics, compositions and baselines beside loops; what is NaN is never hidden."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alchemi_xr import analysis, convert, open_dataset
from alchemi_xr.errors import ConfigError, FieldError


def ragged(store, chunks=None, seed=0, count=12, **extra):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, count)
    numbers = rng.choice([1, 6, 8], sizes.sum())
    forces = rng.normal(size=(sizes.sum(), 3))
    ds = store(
        [rng.normal(size=(n, 3)) for n in sizes],
        numbers,
        forces=forces,
        chunks=chunks,
        **extra,
    )
    return ds, sizes, numbers, forces


def test_forces_by_element(store, chunks):
    ds, _, numbers, forces = ragged(store, chunks)
    out = analysis.statistics(ds, by="element")
    norm = np.linalg.norm(forces, axis=1)
    for z, name in ((1, "H"), (6, "C"), (8, "O")):
        mine = norm[numbers == z]
        one = out.sel(element=name)
        assert one["count"] == len(mine)
        for key, want in {
            "mean": mine.mean(),
            "std": mine.std(),
            "rms": np.sqrt((mine**2).mean()),
            "min": mine.min(),
            "max": mine.max(),
        }.items():
            assert float(one[key]) == pytest.approx(want), key
    assert out["mean"].attrs["units"] == "eV/Å"
    parts = analysis.statistics(ds, norm=False)
    assert float(parts["std"][0]) == pytest.approx(forces.std())


def test_energy_by_config_type(store, chunks):
    kinds = np.array(list("abcabcabcabc"), dtype=object)
    energy = np.arange(12.0) - 1e7  # the spread of large numbers is not lost
    ds, sizes, _, _ = ragged(store, chunks, energy=energy, config_type=kinds)
    out = analysis.statistics(ds, "energy", by="config_type")
    for k in "abc":
        mine = energy[kinds == k]
        assert float(out["mean"].sel(config_type=k)) == pytest.approx(mine.mean())
        assert float(out["std"].sel(config_type=k)) == pytest.approx(mine.std(), rel=1e-3)
    per = analysis.statistics(ds, "energy", per_atom=True)
    assert float(per["mean"][0]) == pytest.approx((energy / sizes).mean())
    assert per["mean"].attrs["units"] == "eV/atom"
    for bad in ({"name": "energy", "by": "element"}, {"per_atom": True}):
        with pytest.raises(ConfigError):
            analysis.statistics(ds, **bad)
    with pytest.raises(FieldError, match="no field of numbers"):
        analysis.statistics(ds, "config_type")


def test_shared_case_of_nan_and_inf(shared, tmp_path):
    case = shared / "cases" / "C12-nan-inf-huge"
    want = json.loads((case / "expected.json").read_text())["expected"]
    convert(str(case / "in.xyz"), str(tmp_path / "s.zarr"))
    ds = open_dataset(tmp_path / "s.zarr")
    energy = analysis.statistics(ds, "energy")
    assert energy.non_finite.item() == want["non_finite"]["energy"]
    assert not np.isfinite(energy["mean"].item())
    forces = analysis.statistics(ds)
    assert forces.non_finite.item() == want["non_finite"]["forces_rows"]
    told = analysis.statistics(ds, skipna=True)
    assert told["max"].item() == pytest.approx(want["max_force_norm_finite"])
    assert np.isfinite(told["mean"].item())


def test_shared_case_of_empty_and_single(shared, tmp_path):
    case = shared / "cases" / "C10-empty-and-single"
    want = json.loads((case / "expected.json").read_text())["expected"]
    convert(str(case / "in.xyz"), str(tmp_path / "s.zarr"))
    ds = open_dataset(tmp_path / "s.zarr")
    kept = ds.atoms_ptr.values.tolist() == want["atoms_ptr_if_empty_kept"]
    assert kept or ds.atoms_ptr.values.tolist() == want["atoms_ptr_if_empty_dropped"]
    energy = want["energy_sum_if_kept" if kept else "energy_sum_if_dropped"]
    assert float(ds.energy.sum()) == pytest.approx(energy)
    out = analysis.statistics(ds, "energy")
    assert float(out["mean"][0] * out["count"][0]) == pytest.approx(energy)
    if kept:
        sums, means = (ds.ragged.reduce("positions", op).values[1] for op in ("sum", "mean"))
        assert (sums == 0).all()
        assert np.isnan(means).all()
    assert int(analysis.coordination(ds).sum()) >= 0
    assert analysis.rdf(ds).counts.sizes["r"] == 200
    assert analysis.duplicates(ds).sizes["sample"] == ds.sizes["sample"]
    assert int(analysis.composition(ds).atoms.sum()) == want["atoms"]
    analysis.baseline(ds)


def test_missing_values_are_no_values(store, tmp_path):
    from alchemi_xr.ragged import concat

    one, _, _, _ = ragged(store, energy=np.ones(12))
    two, _, _, _ = ragged(store, seed=1)
    out = analysis.statistics(concat([one, two]), "energy")
    assert out["count"].item() == 12
    assert out.missing.item() == 12
    assert out.non_finite.item() == 0
    assert out["mean"].item() == 1.0
    fitted = analysis.baseline(concat([one, two]))
    assert fitted.left_out == 12
    assert np.isnan(fitted.residual[12:]).all()


def test_composition(store, chunks):
    ds = store(
        [np.zeros((3, 3)), np.zeros((5, 3)), np.zeros((3, 3)), np.zeros((0, 3))],
        [8, 1, 1, 1, 6, 1, 1, 1, 1, 8, 1],
        chunks=chunks,
    )
    out = analysis.composition(ds)
    table = dict(zip(out.formula.values.tolist(), out.samples.values.tolist(), strict=True))
    assert table == {"H2O": 2, "CH4": 1, "(empty)": 1}
    assert out.formula.values[0] == "H2O"
    assert out.atoms.sel(element="H") == 8
    assert out.samples_with.sel(element="C") == 1
    assert analysis.composition(ds, top=1).sizes["formula"] == 1


def test_baseline_finds_the_energies_and_the_odd_one(store, chunks):
    rng = np.random.default_rng(1)
    ds, sizes, numbers, _ = ragged(store, chunks, count=60)
    owner = np.repeat(np.arange(60), sizes)
    each = {1: -13.6, 6: -1028.0, 8: -2041.0}
    energy = np.bincount(owner, [each[z] for z in numbers])
    energy += rng.normal(size=60) * 1e-3
    energy[17] += 5.0
    energy[30] = np.nan
    ds, *_ = ragged(store, chunks, count=60, energy=energy)
    good = ds.ragged.isel(np.setdiff1d(np.arange(60), [17]))
    out = analysis.baseline(good)
    np.testing.assert_allclose(out.element_energy, [-13.6, -1028.0, -2041.0], atol=2e-3)
    assert out["rank"] == 3
    assert out.left_out == 1
    full = analysis.baseline(ds)
    odd = np.flatnonzero(analysis.outliers(full.residual).values)
    assert 17 in odd
    assert 30 in odd
    table = np.zeros((60, 3))
    np.add.at(table, (owner, np.searchsorted([1, 6, 8], numbers)), 1)
    mask = np.isfinite(energy)
    want = np.linalg.lstsq(table[mask], energy[mask], rcond=None)[0]
    np.testing.assert_allclose(full.element_energy, want, rtol=1e-8)
    residual = (energy - table @ want)[mask]
    assert float(full.rmse) == pytest.approx(np.sqrt((residual**2).mean()), rel=1e-4)


def test_elements_that_only_come_together_share(store):
    ds = store([np.zeros((2, 3))] * 3, [11, 17], energy=np.full(3, -8.0))
    out = analysis.baseline(ds)
    assert out["rank"] == 1
    np.testing.assert_allclose(out.element_energy, [-4.0, -4.0])
    np.testing.assert_allclose(out.residual, 0.0, atol=1e-12)

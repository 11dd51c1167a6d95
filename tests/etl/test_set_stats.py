"""Statistics in one pass, against NumPy over everything at once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from alchemi_xr.cli.main import app
from alchemi_xr.errors import ConfigError, SourceNotFoundError, UnknownFieldError
from alchemi_xr.etl import convert, stats
from alchemi_xr.etl.set_stats import Moments
from alchemi_xr.store import StoreWriter


@pytest.fixture
def made(tmp_path: Path) -> list[Atoms]:
    rng = np.random.default_rng(5)
    out = []
    for i in range(60):
        n = int(rng.integers(1, 12))
        atoms = Atoms(
            rng.choice([1, 6, 26], n),
            rng.normal(size=(n, 3)),
            cell=np.eye(3) * (3 + i % 3),
            pbc=True,
        )
        results: dict[str, Any] = {"forces": rng.normal(size=(n, 3))}
        if i % 4:
            results["energy"] = -1e6 + float(rng.normal())
        atoms.calc = SinglePointCalculator(atoms, **results)
        atoms.info["kind"] = "abc"[i % 3]
        out.append(atoms)
    write(tmp_path / "in.extxyz", out)
    convert(tmp_path / "in.extxyz", tmp_path / "in.zarr", progress=False)
    return out


@pytest.mark.parametrize("name", ["in.extxyz", "in.zarr"])
def test_they_are_those_of_numpy(tmp_path: Path, made: list[Atoms], name: str) -> None:
    if name == "in.zarr":
        StoreWriter(tmp_path / name).delete([0, 7])
        made = [a for i, a in enumerate(made) if i not in (0, 7)]
    found = stats(tmp_path / name, progress=False)
    sizes = np.array([len(a) for a in made])
    assert (found.samples, found.atoms, found.rejected) == (len(made), sizes.sum(), 0)
    assert found.sizes[0.0] == sizes.min()
    assert found.sizes[1.0] == sizes.max()
    assert found.sizes[0.5] == np.sort(sizes)[len(sizes) // 2]
    numbers = np.concatenate([a.numbers for a in made])
    for z, symbol in ((1, "H"), (6, "C"), (26, "Fe")):
        assert found.elements[symbol] == ((numbers == z).sum(), sum(z in a.numbers for a in made))
    with_energy = [a for a in made if "energy" in a.calc.results]
    energies = np.array([a.calc.results["energy"] for a in with_energy])
    moments = found.fields["energy"].values
    assert found.fields["energy"].samples == moments.count == len(energies)
    assert moments.mean == pytest.approx(energies.mean(), rel=1e-14)
    assert moments.std == pytest.approx(energies.std(), rel=1e-6)
    per_atom = energies / np.array([len(a) for a in with_energy])
    assert found.derived["energy_per_atom"].maximum == pytest.approx(per_atom.max(), rel=1e-14)
    fmax = [np.linalg.norm(a.calc.results["forces"], axis=1).max() for a in made]
    assert found.derived["fmax"].mean == pytest.approx(np.mean(fmax), rel=1e-7)
    volumes = [a.cell.volume for a in made]
    assert found.derived["volume"].mean == pytest.approx(np.mean(volumes))
    density = [a.get_masses().sum() / a.cell.volume * 1.66053906660 for a in made]
    assert found.derived["density"].mean == pytest.approx(np.mean(density))
    assert found.fields["kind"].values is None
    assert "kind (system, str): in" in str(found)


def test_a_condition_and_the_command(tmp_path: Path, made: list[Atoms]) -> None:
    found = stats(tmp_path / "in.zarr", where="natoms < 5 and kind == 'a'", progress=False)
    kept = [a for a in made if len(a) < 5 and a.info["kind"] == "a"]
    assert found.samples == len(kept)
    result = CliRunner().invoke(
        app, ["stats", str(tmp_path / "in.extxyz"), "--json", "--where", "natoms < 5"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == sum(len(a) < 5 for a in made)
    result = CliRunner().invoke(app, ["stats", str(tmp_path / "in.zarr")])
    assert f"{len(made)} samples" in result.stdout


def test_broken_records_are_counted(tmp_path: Path, made: list[Atoms]) -> None:
    text = (tmp_path / "in.extxyz").read_text()
    (tmp_path / "cut.extxyz").write_text(text[: len(text) // 2])
    assert stats(tmp_path / "cut.extxyz", progress=False).rejected == 1


def test_a_sample_without_a_cell_has_no_volume(tmp_path: Path) -> None:
    frames = [Atoms("H"), Atoms("Cu", cell=np.eye(3) * 2, pbc=True)]
    write(tmp_path / "in.xyz", frames)
    volume = stats(tmp_path / "in.xyz", progress=False).derived["volume"]
    assert (volume.count, volume.mean) == (1, pytest.approx(8.0))


def test_what_cannot_be(tmp_path: Path, made: list[Atoms]) -> None:
    with pytest.raises(UnknownFieldError):
        stats(tmp_path / "in.zarr", where="nothing < 1", progress=False)
    with pytest.raises(ConfigError, match="options of files"):
        stats(tmp_path / "in.zarr", units={"energy": "eV"}, progress=False)
    with pytest.raises(ConfigError, match="no such option"):
        stats(tmp_path / "in.extxyz", units_="eV", progress=False)
    with pytest.raises(SourceNotFoundError):
        stats(tmp_path / "nowhere.extxyz", progress=False)


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), max_size=8),
        max_size=6,
    )
)
def test_moments_come_in_any_pieces(pieces: list[list[float]]) -> None:
    moments = Moments()
    for piece in pieces:
        moments.add(np.array(piece, dtype=float))
    everything = np.array([v for p in pieces for v in p], dtype=float)
    finite = everything[np.isfinite(everything)]
    assert (moments.count, moments.nan) == (len(finite), np.isnan(everything).sum())
    if len(finite):
        assert (moments.minimum, moments.maximum) == (finite.min(), finite.max())
        np.testing.assert_allclose(moments.mean, finite.mean(), atol=1e-9)
        np.testing.assert_allclose(moments.std, finite.std(), atol=1e-6 + 1e-9 * abs(finite).max())

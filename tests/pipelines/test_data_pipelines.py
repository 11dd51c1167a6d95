"""The data pipelines as shipped, on real files where they are and on a small set elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

import alchemi_xr as ax

SCRIPTS = Path(__file__).resolve().parents[2] / "pipelines"
NAMES = ("H2O", "CH4", "NH3", "C2H6", "CH3OH", "C6H6", "CO2", "H2O2", "C2H4", "HCN")
ENERGIES = {"H": -13.6, "C": -1029.5, "N": -1484.3, "O": -2041.8}

pytestmark = pytest.mark.slow


def run(script: str, *arguments: Any, code: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def structures() -> list[Atoms]:
    """Ten molecules, shaken twelve times each; energies of their elements and a little more."""
    rng = np.random.default_rng(1)
    out = []
    for name in NAMES:
        for _ in range(12):
            atoms = molecule(name)
            atoms.rattle(0.08, rng=rng)
            energy = sum(ENERGIES[s] for s in atoms.get_chemical_symbols()) + rng.normal() * 0.02
            forces = rng.normal(size=(len(atoms), 3))
            atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
            out.append(atoms)
    return out


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    frames = structures()
    frames += [frames[0].copy(), frames[30].copy()]  # repeats, without energy
    odd = frames[5].copy()
    odd.rattle(0.5, seed=3)
    odd.calc = SinglePointCalculator(odd, energy=0.0, forces=np.zeros((len(odd), 3)))
    frames.append(odd)  # an energy of no method
    hot = frames[7].copy()
    hot.rattle(0.3, seed=4)
    hot.calc = SinglePointCalculator(
        hot, energy=frames[7].get_potential_energy(), forces=np.full((len(hot), 3), 99.0)
    )
    frames.append(hot)
    write(folder / "in.extxyz", frames)
    text = (folder / "in.extxyz").read_text()
    (folder / "in.extxyz").write_text(text + "3\nno more\nH 0 0 0\n")
    done = run("convert_to_store.py", folder / "in.extxyz", folder / "all.zarr", "--workers", "2")
    assert "1 rejected" in done.stdout
    report = json.loads((folder / "all.zarr.report.json").read_text())
    assert report["conversion"]["samples"] == report["statistics"]["samples"] == len(frames)
    assert report["statistics"]["derived"]["fmax"]["maximum"] == pytest.approx(99 * 3**0.5)
    return folder / "all.zarr"


def test_a_broken_record_stops_it_when_asked(store: Path) -> None:
    source = store.parent / "in.extxyz"
    done = run("convert_to_store.py", source, store.parent / "b.zarr", "--strict", code=1)
    assert "frame 124" in done.stderr
    assert not (store.parent / "b.zarr").exists()
    done = run("convert_to_store.py", source, store, code=1)
    assert "already exists" in done.stderr


def test_curated(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "curated"
    run("curate_dataset.py", store, "--out", out, "--where", "fmax < 50 or natoms < 1",
        "--fractions", 0.6, 0.2, 0.2, "--seed", 1)  # fmt: skip
    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == 124
    # The hot one fails the condition; two repeats have no forces to decide by.
    assert (report["left_out"], report["undecided"]) == (1, 2)
    assert report["repeats"] == 0
    assert report["outliers"] == 1
    table = json.loads((out / "baseline.json").read_text())
    assert set(table) == set(ENERGIES)
    assert sum(report["parts"].values()) == 120
    seen: dict[str, set[tuple[int, ...]]] = {}
    for name in report["parts"]:
        ds = ax.open_dataset(out / f"{name}.zarr")
        assert ds.sizes["sample"] == report["parts"][name]
        assert float(np.abs(ds.energy).max()) < 100
        seen[name] = {
            tuple(sorted(ds.ragged.to_atoms(i).numbers.tolist())) for i in range(ds.sizes["sample"])
        }
    names = list(seen)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert not seen[name] & seen[other]
    with ax.open_store(store) as untouched:
        assert untouched.generation == 1
        assert len(untouched.active) == 124


def test_repeats_go(store: Path, tmp_path: Path) -> None:
    run("curate_dataset.py", store, "--out", tmp_path / "out", "--fractions", 1, 0, 0)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["repeats"] == 2
    assert report["parts"] == {"train": 124 - 2 - report["outliers"]}


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [("xyz-cluster-dft", "*.xyz"), ("aselmdb-mof", "*.aselmdb"), ("npz-ethanol", "*.npz")],
)
def test_real_files(shared: Path, tmp_path: Path, folder: str, pattern: str) -> None:
    files = sorted((shared / "data" / folder).glob(pattern))
    done = run("convert_to_store.py", *files, tmp_path / "out.zarr", "--profile", "raw")
    assert "0 rejected" in done.stdout
    report = json.loads((tmp_path / "out.zarr.report.json").read_text())
    assert report["statistics"]["samples"] == report["conversion"]["records"] > 0

"""The main job as shipped, beside ASE alone with the same calculator."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import alchemi_xr as ax

SCRIPT = Path(__file__).resolve().parents[2] / "pipelines" / "relax_and_analyse.py"

pytestmark = pytest.mark.slow


def run(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def table(out):
    with (out / "table.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.physics
def test_g2_energies_are_those_of_ase_alone(tmp_path):
    """All 162 molecules of the set: single atoms, radicals, molecules at rest from the start."""
    tblite = pytest.importorskip("tblite.ase")
    from ase.collections import g2
    from ase.optimize import FIRE

    out = tmp_path / "out"
    done = run("--out", out, "--workers", "2", "--batch-size", "16")
    assert "162 molecules (860 atoms), 162 converged to 0.01 eV/Å, 0 set aside" in done.stdout
    assert (out / "relaxation.png").stat().st_size > 20_000
    rows = table(out)
    assert sorted(row["name"] for row in rows) == sorted(g2.names)
    for row in rows:
        atoms = g2[row["name"]]
        atoms.calc = tblite.TBLite(method="GFN2-xTB", verbosity=0)
        before = atoms.get_potential_energy()
        FIRE(atoms, logfile=None).run(fmax=0.01, steps=500)
        assert float(row["energy_initial_eV"]) == pytest.approx(before, abs=1e-6), row["name"]
        after = atoms.get_potential_energy()
        assert float(row["energy_eV"]) == pytest.approx(after, abs=1e-3), row["name"]
        assert row["converged"] == "True"


def test_a_user_s_own_file_with_a_failure_and_a_second_start(tmp_path):
    """Extended XYZ with EMT; an element it does not know is set aside; nothing is done twice."""
    from ase.build import molecule
    from ase.io import write

    rng = np.random.default_rng(0)
    frames = []
    for i in range(12):
        atoms = molecule(["H2O", "CO", "CH4"][i % 3])
        atoms.positions += rng.normal(0, 0.05, atoms.positions.shape)
        frames.append(atoms)
    frames[4].numbers[0] = 92
    write(tmp_path / "mine.xyz", frames)
    out = tmp_path / "out"
    arguments = (tmp_path / "mine.xyz", "--out", out, "--calculator", "emt", "--workers", "1")
    done = run(*arguments, "--fmax", "0.05")
    assert "11 of 12 systems finished, 1 set aside" in done.stdout
    assert "set aside: sample 4:" in done.stdout
    relaxed = ax.open_dataset(out / "relaxed.zarr")
    assert relaxed["dataset_index"].values.tolist() == [i for i in range(12) if i != 4]
    frames = ax.open_dataset(out / "trajectory.zarr")
    assert frames.sizes["sample"] == int(relaxed["steps"].sum()) + 11
    before = table(out)
    # The failed one is tried again (and fails again), the others are not.
    done = run(*arguments, "--fmax", "0.05")
    assert "0 systems in" not in done.stdout
    assert "1 systems in" in done.stdout
    assert table(out) == before
    done = run(*arguments, "--fmax", "0.01", code=1)
    assert "holds a job with another fmax" in done.stderr


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    done = run(tmp_path / "none.xyz", "--out", tmp_path / "out", code=1)
    assert "none.xyz" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "job.json").exists()  # the folder is free for the right name


def test_an_edited_input_is_another_job_and_lost_frames_are_counted(tmp_path):
    from ase.build import molecule
    from ase.io import write

    write(tmp_path / "in.xyz", [molecule("H2O"), molecule("CO")])
    text = (tmp_path / "in.xyz").read_text().splitlines()
    broken = [*text[:2], text[2].rsplit(maxsplit=1)[0], *text[3:]]
    (tmp_path / "in.xyz").write_text("\n".join(broken) + "\n")
    arguments = (tmp_path / "in.xyz", "--out", tmp_path / "out", "--calculator", "emt")
    arguments = (*arguments, "--workers", "1", "--fmax", "0.1")
    done = run(*arguments)
    assert "not converted: " in done.stdout
    assert "frame 0" in done.stdout
    assert "1 molecules (2 atoms)" in done.stdout
    assert "1 not converted" in done.stdout
    (tmp_path / "in.xyz").write_text("\n".join(text) + "\n")
    assert "another state of the input" in run(*arguments, code=1).stderr
    assert "2 molecules (5 atoms)" in run(*arguments, "--overwrite").stdout

"""``alchemi-xr analyse`` and ``plot``: files, text, and errors in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

from alchemi_xr.cli.main import app
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store.writer import StoreWriter


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    rng = np.random.default_rng(0)
    ptr = counts_to_ptr(np.full(30, 5))
    x = np.cumsum(rng.normal(size=(30, 5, 3)) * 0.2, axis=0) + 2
    block = Block(
        ptr,
        np.zeros_like(ptr),
        {
            "positions": x.reshape(-1, 3),
            "atomic_numbers": np.tile([8, 1, 1, 6, 1], 30),
            "forces": rng.normal(size=(150, 3)),
            "energy": rng.normal(size=(30, 1)),
            "cell": np.tile(np.eye(3) * 6, (30, 1, 1)),
            "pbc": np.ones((30, 3), dtype=bool),
        },
        {
            "positions": "atom",
            "atomic_numbers": "atom",
            "forces": "atom",
            "energy": "system",
            "cell": "system",
            "pbc": "system",
        },
    )
    path = str(tmp_path_factory.mktemp("cli") / "s.zarr")
    StoreWriter(path).write(block)
    return path


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.output + (result.stderr if code else "")


def test_data_files_hold_the_result(path, tmp_path):
    from alchemi_xr import analysis, open_dataset

    out = tmp_path / "g.nc"
    run(
        "analyse",
        path,
        "rdf",
        "-o",
        out,
        "-o",
        tmp_path / "g.csv",
        "--set",
        "rmax=4",
        "--set",
        'pairs="all"',
    )
    want = analysis.rdf(open_dataset(path), 4.0, pairs="all")
    with xr.open_dataset(out) as got:
        np.testing.assert_allclose(got.g, want.g)
        assert got.r.attrs["units"] == "Å"
    assert (tmp_path / "g.csv").read_text().startswith("pair,r,g,")
    run("analyse", path, "composition", "-o", tmp_path / "c.json", "--samples", ":10")
    facts = json.loads((tmp_path / "c.json").read_text())
    assert facts["data_vars"]["samples"]["data"] == [10]


@pytest.mark.parametrize(
    "name",
    [
        "rdf",
        "msd",
        "rmsd",
        "rmsf",
        "statistics",
        "composition",
        "baseline",
        "duplicates",
        "fmax",
        "bond_lengths",
        "angles",
        "coordination",
    ],
)
def test_text_and_figure_of_each(path, tmp_path, name):
    pytest.importorskip("matplotlib")
    assert run("analyse", path, name).strip()
    run("analyse", path, name, "-o", tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["sizes", "energies", "forces", "rdf"])
def test_plots(path, tmp_path, name):
    pytest.importorskip("matplotlib")
    run("plot", path, name, "-o", tmp_path / "f.svg")
    assert "</svg>" in (tmp_path / "f.svg").read_text()


def test_errors_are_one_line(path, tmp_path):
    assert "Nearest: 'rdf'" in run("analyse", path, "rdff", code=1)
    assert "names no format" in run("analyse", path, "rdf", "-o", tmp_path / "g.doc", code=1)
    assert "folder is not there" in run(
        "analyse", path, "rdf", "-o", tmp_path / "no" / "g.nc", code=1
    )
    assert "no argument 'rmaks'" in run("analyse", path, "rdf", "--set", "rmaks=3", code=1)
    assert "NAME=VALUE" in run("analyse", path, "rdf", "--set", "rmax", code=1)
    assert "is no range" in run("analyse", path, "rdf", "--samples", "a:b", code=1)
    assert "needs 'velocities'" in run("analyse", path, "vacf", code=1)
    assert "no plot" in run("plot", path, "sises", "-o", tmp_path / "g.png", code=1)

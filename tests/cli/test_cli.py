"""The command line: exit codes, messages, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase.build import molecule
from ase.io import read, write
from typer.testing import CliRunner

from alchemi_xr.cli.main import app
from alchemi_xr.store import open_store

runner = CliRunner()


def call(*arguments: object) -> Any:
    return runner.invoke(app, [str(a) for a in arguments])


@pytest.fixture
def source(shared: Path) -> Path:
    return shared / "cases" / "C06-bad-lattice" / "in.xyz"


def test_c47_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = call("convert", tmp_path / "nope.xyz", tmp_path / "out.zarr")
    assert result.exit_code == 1
    assert str(tmp_path / "nope.xyz") in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_c47_raise_and_quarantine(source: Path, tmp_path: Path) -> None:
    result = call("convert", source, tmp_path / "out.zarr")
    assert result.exit_code == 1
    assert "frame 1" in result.stderr
    assert "Traceback" not in result.output
    result = call("convert", "--on-error", "quarantine", "-q", source, tmp_path / "out.zarr")
    assert result.exit_code == 0
    assert "3 records in, 2 written" in result.stdout
    assert "1 rejected" in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_c47_a_picture_renamed(tmp_path: Path) -> None:
    (tmp_path / "pic.xyz").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 10)
    for how in ("raise", "quarantine"):
        result = call("convert", "--on-error", how, tmp_path / "pic.xyz", tmp_path / "out.zarr")
        assert result.exit_code == 1
        assert "pic.xyz" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["pic.xyz"]


def test_c47_a_format_of_another_extra(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    path = shared / "data" / "aselmdb-mof" / "rows.aselmdb"
    result = call("convert", path, tmp_path / "out.zarr")
    assert result.exit_code == 1
    assert "alchemi_xr[etl]" in result.stderr


def test_unknown_formats_and_options(tmp_path: Path, source: Path) -> None:
    (tmp_path / "x.what").write_text("?")
    result = call("convert", tmp_path / "x.what", tmp_path / "out.zarr")
    assert result.exit_code == 1
    assert "extxyz" in result.stderr
    assert call("convert", source).exit_code == 2
    assert call("convert", "--map", "a", source, tmp_path / "o").exit_code == 2
    assert call("convert", "--nothing", source, tmp_path / "o").exit_code == 2
    assert call("convert", "--memory", "much", source, tmp_path / "o").exit_code == 1


def test_c30_on_the_command_line(shared: Path, tmp_path: Path) -> None:
    good = shared / "cases" / "C10-empty-and-single" / "in.xyz"
    dst = tmp_path / "out.zarr"
    assert call("convert", good, dst).exit_code == 0
    result = call("convert", good, dst)
    assert result.exit_code == 1
    assert "--overwrite" in result.stderr
    assert call("convert", "--overwrite", good, dst).exit_code == 0
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(b"x")
    for flags in ([], ["--overwrite"]):
        assert call("convert", *flags, good, photos).exit_code == 1
        assert (photos / "a.jpg").read_bytes() == b"x"
    assert call("info", photos).exit_code == 1
    assert [p.name for p in photos.iterdir()] == ["a.jpg"]


def test_options_reach_the_conversion(shared: Path, tmp_path: Path) -> None:
    source = shared / "cases" / "C01-energy-key-names" / "in.xyz"
    report = tmp_path / "report.json"
    result = call(
        "convert", "--energy-key", "REF_energy", "--map", "dft_energy=energy",
        "--units", "energy=Ha", "--dtype", "float32", "--field", "energy", "--profile", "small",
        "--report", report, source, tmp_path / "out.zarr",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(report.read_text())
    assert facts["fields"]["energy"]["samples"] == 4
    assert set(facts["fields"]) == {"atomic_numbers", "positions", "energy"}
    assert facts["fields"]["positions"]["dtype"] == "float32"
    shown = json.loads(call("info", "--json", tmp_path / "out.zarr").stdout)
    assert shown["samples"] == 4
    assert shown["fields"]["energy"]["unit"] == "eV"
    assert shown["provenance"]["units"] == {"energy": "Ha"}


def test_plan_writes_nothing(shared: Path, tmp_path: Path) -> None:
    path = shared / "data" / "xyz-solvents" / "frames.xyz"
    result = call("convert", "--plan", path, tmp_path / "out.zarr")
    assert result.exit_code == 0
    assert "203 samples" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_look_check_and_mend(shared: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.zarr"
    source = shared / "cases" / "C12-nan-inf-huge" / "in.xyz"
    assert call("convert", "--nonfinite", "quarantine", source, dst).exit_code == 0
    result = call("info", dst)
    assert "2 samples (2 more are deleted)" in result.stdout
    assert "eV/Å" in result.stdout
    assert call("verify", dst).exit_code == 0
    assert call("verify", "--data", dst).exit_code == 0
    assert "2 deleted samples removed, 2 kept" in call("defragment", dst).stdout
    assert call("append", source, dst).exit_code == 0
    assert json.loads(call("info", "--json", dst).stdout)["samples"] == 6
    next(p for p in (dst / "core" / "energy" / "c").rglob("*") if p.is_file()).unlink()
    result = call("verify", dst)
    assert result.exit_code == 1
    assert "energy" in result.stdout
    assert call("repair", dst).exit_code == 1
    assert call("verify", tmp_path / "none").exit_code == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = call("--debug", "convert", tmp_path / "nope.xyz", tmp_path / "out.zarr")
    assert type(result.exception).__name__ == "SourceNotFoundError"


def test_help_is_light() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from alchemi_xr.cli.main import app;"
        "r = CliRunner().invoke(app, ['convert', '--help']); assert r.exit_code == 0, r.output;"
        "print(sorted({'torch', 'dask', 'zarr', 'numpy', 'ase', 'warp'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_convert_needs_no_torch(tmp_path: Path, shared: Path) -> None:
    source = shared / "cases" / "C10-empty-and-single" / "in.xyz"
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['warp'] = None\n"
        "from alchemi_xr.etl import convert\n"
        f"print(convert({str(source)!r}, {str(tmp_path / 'o.zarr')!r}, progress=False).samples)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "4"


def test_export(tmp_path: Path) -> None:
    write(tmp_path / "in.xyz", [molecule("H2O"), molecule("CH4")])
    assert call("convert", "-q", tmp_path / "in.xyz", tmp_path / "in.zarr").exit_code == 0
    store, out, report = tmp_path / "in.zarr", tmp_path / "out.npz", tmp_path / "r.json"
    done = call("export", store, out, "--option", "pad_to=9", "--report", report)
    assert done.exit_code == 0, done.output
    assert json.loads(report.read_text())["samples"] == 2
    with np.load(out) as pack:
        assert pack["R"].shape == (2, 9, 3)
    again = call("export", store, out)
    assert again.exit_code == 1
    assert "--overwrite" in again.stderr
    assert call("export", store, tmp_path / "second.cif", "--sample", 1).exit_code == 0
    assert len(read(tmp_path / "second.cif")) == 5
    assert call("export", store, tmp_path / "all.cif").exit_code == 1
    unknown = call("export", store, tmp_path / "out.nothing")
    assert unknown.exit_code == 1
    assert "--format" in unknown.stderr


def test_options_of_a_source(tmp_path: Path) -> None:
    site = {"species": [{"element": "H", "occu": 1}], "xyz": [0, 0, 0]}
    cell = {"matrix": [[2, 0, 0], [0, 2, 0], [0, 0, 2]]}
    entry = {"structure": {"lattice": cell, "sites": [site]}, "stress": [1, 2, 3, 0, 0, 0]}
    (tmp_path / "in.json").write_text(json.dumps([entry]))
    source, store = tmp_path / "in.json", tmp_path / "out.zarr"
    done = call(
        "convert", source, store, "--option", "stress=-kbar", "--option", "partition_bytes=9"
    )
    assert done.exit_code == 0, done.output
    assert "'stress' in -kbar" in done.stdout
    with open_store(store) as snapshot:
        assert snapshot.read_rows("stress", 0, 1)[0, 1, 1] == pytest.approx(-0.2 / 160.21766208)
    assert call("convert", source, tmp_path / "b.zarr", "--option", "strain=1").exit_code == 1

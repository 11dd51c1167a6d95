"""The commands that keep stores in shape: exit codes, messages, results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from alchemi_xr.cli.main import app
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store import StoreWriter, open_store

runner = CliRunner()


def call(*arguments: object) -> Any:
    return runner.invoke(app, [str(a) for a in arguments])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    counts = np.array([3, 1, 2, 5, 4, 2, 1, 3, 2, 2])
    ptr = counts_to_ptr(counts)
    block = Block(
        ptr,
        ptr * 0,
        {
            "positions": np.arange(75.0).reshape(25, 3),
            "kind": np.array(list("aabbccaabb"), dtype=object),
        },
        {"positions": "atom", "kind": "system"},
    )
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(block)
    StoreWriter(path).delete([0])
    return path


def test_sort_rechunk_defragment(store: Path, tmp_path: Path) -> None:
    result = call("sort", store, "--by", "num_atoms", "--descending", "-q")
    assert result.exit_code == 0, result.output
    assert "sort, 10 samples" in result.stdout
    assert np.diff(open_store(store).atoms_ptr).tolist() == [5, 4, 3, 3, 2, 2, 2, 2, 1, 1]
    result = call("rechunk", store, "--chunk-rows", 4, "--profile", "raw", "-q")
    assert result.exit_code == 0, result.output
    assert open_store(store).array("positions").chunks == (4, 3)
    assert call("rechunk", store).exit_code == 2
    report = tmp_path / "report.json"
    result = call("defragment", store, "--report", report, "--threads", 1)
    assert "1 deleted samples removed, 9 kept" in result.stdout
    assert json.loads(report.read_text())["removed"] == 1
    assert len(result.stdout.splitlines()) == 1


def test_merge_and_split(store: Path, tmp_path: Path) -> None:
    result = call("merge", store, store, tmp_path / "m.zarr", "-q")
    assert result.exit_code == 0, result.output
    assert "merge, 18 samples" in result.stdout
    assert call("merge", store, store, tmp_path / "m.zarr").exit_code == 1
    assert call("merge", store, store, tmp_path / "m.zarr", "--overwrite").exit_code == 0
    assert call("merge", store).exit_code == 2
    result = call("merge", store, tmp_path / "c.zarr", "--where", "natoms > 2", "-q")
    assert "merge, 3 samples" in result.stdout
    assert "7 left out" in result.stdout
    parts = [f"{tmp_path / name}.zarr={share}" for name, share in (("x", 0.7), ("y", 0.3))]
    report = tmp_path / "report.json"
    result = call("split", tmp_path / "m.zarr", *parts, "--by", "kind", "--report", report)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2
    assert sum(r["samples"] for r in json.loads(report.read_text()).values()) == 18
    result = call("split", store, tmp_path / "k-{}.zarr", "--by", "kind", "-q")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.glob("k-*")) == ["k-a.zarr", "k-b.zarr", "k-c.zarr"]


def test_errors_end_with_a_reason(store: Path, tmp_path: Path) -> None:
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("sort", tmp_path / "none.zarr"), 1, "none.zarr"),
        (("sort", store, "--by", "knd"), 1, "kind"),
        (("sort", store, "--memory", "lots"), 1, "2GiB"),
        (("sort", store, "--workers", 1, "--scheduler", "tcp://x"), 1, "not both"),
        (("merge", tmp_path / "none.zarr", tmp_path / "m.zarr"), 1, "none.zarr"),
        (("split", store, f"{tmp_path}/x=0.5"), 1, "add up to 1"),
        (("split", store, "x"), 2, "PART=FRACTION"),
        (("split", store, "x=lots"), 2, "PART=FRACTION"),
        (("rechunk", store, "--profile", "tiny"), 1, "tiny"),
    ]
    for arguments, code, text in cases:
        result = call(*arguments)
        assert result.exit_code == code, (arguments, result.output)
        assert text in result.output
        assert "Traceback" not in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]

"""A source that another package announces: found by name and by suffix, here and by workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl import RecordSource, convert
from alchemi_xr.registry import sources
from alchemi_xr.store import open_store

MODULE = """
import json

from alchemi_xr.etl import RecordSource


class JsonLines(RecordSource):
    name = "json-lines"
    suffixes = (".mol.jsonl",)
    units = {"energy": "kcal/mol"}

    def pieces(self, path, start, stop):
        with open(path, "rb") as file:
            file.seek(start)
            while (stop is None or file.tell() < stop) and (line := file.readline()):
                yield file.tell() - len(line), file.tell(), line

    def parse(self, piece):
        values = json.loads(piece)
        return {"numbers": values.pop("elements"), "positions": values.pop("xyz"), **values}
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """What an installed package leaves in site-packages."""
    folder = tmp_path / "site"
    metadata = folder / "molfiles-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "molfiles.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: molfiles\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[alchemi_xr.sources]\njson-lines = molfiles:JsonLines\n"
    )
    return folder


def molecules(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    out = []
    for i in range(count):
        n = int(rng.integers(1, 7))
        out.append(
            {
                "elements": rng.integers(1, 9, n).tolist(),
                "xyz": rng.normal(size=(n, 3)).tolist(),
                "energy": float(i),
                "forces": rng.normal(size=(n, 3)).tolist(),
                "tag": f"m{i}",
                **({"cell": (np.eye(3) * 9).tolist()} if i % 3 == 0 else {}),
            }
        )
    return out


def write(path: Path, given: list[Any]) -> None:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in given))


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
def test_a_source_of_another_package(
    package: Path, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    good = molecules(60)
    given: list[Any] = list(good)
    given[7] = '{"elements": [1], "xyz": \n'
    given[20] = {"elements": [1, 1], "xyz": [[0, 0, 0]]}
    given[31] = {"xyz": [[0, 0, 0]]}
    given[40] = {**good[40], "forces": [[0, 0, 1]] * (len(good[40]["elements"]) + 1)}
    write(tmp_path / "a.mol.jsonl", given)
    command = [sys.executable, "-m", "alchemi_xr", "convert", "a.mol.jsonl", "a.zarr"]
    result = subprocess.run(
        [*command, "--on-error", "quarantine", "--report", "r.json", *workers],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads((tmp_path / "r.json").read_text())
    assert [r["frame"] for r in told["rejects"]] == [7, 20, 31, 40]
    text = (tmp_path / "a.mol.jsonl").read_bytes()
    for reject, reason in zip(
        told["rejects"],
        ("JSONDecodeError", "found 1 rows, expected 2", "elements", "forces"),
        strict=True,
    ):
        assert reason in reject["reason"] + reject["field"]
        assert text[: reject["offset"]].count(b"\n") == reject["frame"]
    kept = [m for i, m in enumerate(good) if i not in (7, 20, 31, 40)]
    with open_store(tmp_path / "a.zarr") as store:
        block = store.read_block(store.active)
    np.testing.assert_array_equal(np.diff(block.atoms_ptr), [len(m["elements"]) for m in kept])
    np.testing.assert_array_equal(block["positions"], np.concatenate([m["xyz"] for m in kept]))
    np.testing.assert_array_equal(block["forces"], np.concatenate([m["forces"] for m in kept]))
    energies = np.array([m["energy"] for m in kept]) * 0.0433641
    np.testing.assert_allclose(block["energy"][:, 0], energies, rtol=1e-6)
    assert block["tag"].tolist() == [m["tag"] for m in kept]
    np.testing.assert_array_equal(block.has("cell"), ["cell" in m for m in kept])
    np.testing.assert_array_equal(block["pbc"].any(axis=1), ["cell" in m for m in kept])


def test_parts_of_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    exec(MODULE, namespace)
    kind = namespace["JsonLines"]
    monkeypatch.setattr("alchemi_xr.etl.record_source._PARTITION_BYTES", 2_000)
    monkeypatch.setitem(sources._objects, "json-lines", kind)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.mol.jsonl", molecules(50))
    source = kind([str(tmp_path / "a.mol.jsonl"), str(tmp_path / "b.mol.jsonl")])
    scan = source.scan()
    assert len(scan.partitions) > 10
    report = convert(source.paths, tmp_path / "a.zarr", progress=False)
    assert (report.records, report.samples) == (100, 100)
    with open_store(tmp_path / "a.zarr") as store:
        tags = store.read_block(slice(None), ["tag"])["tag"].tolist()
    assert tags == [m["tag"] for m in molecules(50)] * 2
    # One line less, and the counts of the scan are wrong.
    write(tmp_path / "b.mol.jsonl", molecules(49))
    with pytest.raises(SourceError, match="not what it was when it was scanned"):
        for partition in scan.partitions:
            source.read(partition)


def test_units_are_those_of_fields(tmp_path: Path) -> None:
    class Wrong(RecordSource):
        name = "wrong"
        units = {"nrg": "eV", "E": "eV"}  # noqa: RUF012

        def pieces(self, path: str, start: int, stop: int | None) -> Any:
            yield 0, 1, None

        def parse(self, piece: Any) -> Any:
            return {"numbers": [1], "positions": [[0, 0, 0]], "nrg": 1.0}

    (tmp_path / "a").write_text("x")
    assert not Wrong.matches("a")
    with pytest.raises(ConfigError, match="'nrg' is no field"):
        Wrong([str(tmp_path / "a")]).scan()


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Converts records of JSON; the reasons of those set aside, and the block of the others."""
    namespace: dict[str, Any] = {}
    exec(MODULE, namespace)
    monkeypatch.setitem(sources._objects, "json-lines", namespace["JsonLines"])

    def run(*given: Any) -> tuple[list[str], Any]:
        write(tmp_path / "a.mol.jsonl", list(given))
        report = convert(
            tmp_path / "a.mol.jsonl",
            tmp_path / "a.zarr",
            on_error="quarantine",
            overwrite=True,
            progress=False,
        )
        with open_store(tmp_path / "a.zarr") as store:
            return [r.reason for r in report.rejects], store.read_block(store.active)

    return run


@pytest.mark.parametrize(
    "odd",
    [
        {"elements": [1.5, 8]},
        {"elements": [200, 1]},
        {"elements": [-1, 1]},
        {"elements": [[1], [8]]},
        {"elements": 6},
        {"xyz": [[0, 1], [2, 3], [4, 5]]},
        {"xyz": [["0", "1", "2"], ["3", "4", "5"]]},
        {"xyz": [[None, 1, 2], [3, 4, 5]]},
        {"pbc": "T T F"},
        {"label": "cut off \ud83d"},
        {"cut off \ud83d": 1},
    ],
    ids=str,
)
def test_values_that_are_none_are_set_aside(told: Any, odd: dict[str, Any]) -> None:
    good = {"elements": [1, 8], "xyz": [[0, 0, 0], [0, 0, 1]], "label": "é 日\n", "energy": 1.0}
    reasons, block = told(good, {**good, **odd}, good)
    assert len(reasons) == 1
    assert block.num_samples == 2
    assert block["atomic_numbers"].tolist() == [1, 8] * 2
    assert block["label"].tolist() == ["é 日\n"] * 2


def test_whole_numbers_that_no_type_holds_stay_exact(told: Any) -> None:
    good = {"elements": [1], "xyz": [[0, 0, 0]]}
    reasons, block = told(*({**good, "id": i} for i in (2**63 + 1, -1, 2**62 + 1)))
    assert not reasons
    assert list(map(int, block["id"])) == [2**63 + 1, -1, 2**62 + 1]


def test_long_floats(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.longdouble).reshape(1, 2, 3) / 3
    np.savez(tmp_path / "a.npz", R=values, z=[1, 8], E=values[:, 0, 1])
    convert(tmp_path / "a.npz", tmp_path / "a.zarr", progress=False)
    with open_store(tmp_path / "a.zarr") as store:
        block = store.read_block(slice(None))
    np.testing.assert_array_equal(block["positions"], values[0].astype(np.float64))

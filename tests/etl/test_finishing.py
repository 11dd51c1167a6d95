"""Repeats, order and parts of a conversion: what needs all samples together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import alchemi_xr as ax
from alchemi_xr.errors import ConfigError, StoreExistsError
from alchemi_xr.etl.conversion import convert

ase = pytest.importorskip("ase")
pytest.importorskip("vesin", reason="vesin, of the extra etl, makes the search")

FIRST = 60  # of the 90 frames; the others are these again, turned and renumbered
NAN = 'natoms\nProperties=species:S:1:pos:R:3 k={} pbc="F F F"\nH 0 0 nan\n'


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import ase.build
    import ase.io

    rng = np.random.default_rng(0)
    images = []
    for k in range(90):
        atoms = ase.build.molecule(("H2O", "CH4", "CH3CH2OH")[k % 3])
        atoms.rattle(0.05, seed=k % FIRST)
        atoms.rotate(11.0 * k, "xyz"[k % 3])
        atoms = atoms[rng.permutation(len(atoms))]
        atoms.info = {"k": k, "kind": "ab"[k % 2]}
        images.append(atoms)
    path = tmp_path_factory.mktemp("finish") / "a.extxyz"
    ase.io.write(path, images)
    with path.open("a") as file:
        # Neither has a fingerprint, so that neither repeats the other.
        for k in (90, 91):
            file.write("1\n" + NAN.format(k).partition("\n")[2].replace("pbc", "kind=a pbc"))
    return path


def numbers(store: Path) -> list[int]:
    with ax.open_store(store) as snapshot:
        assert len(snapshot.active) == snapshot.num_samples
        return snapshot.read_block(slice(None), ["k"])["k"].reshape(-1).tolist()


def left_behind(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def test_the_first_of_each_structure_is_kept_in_the_order_asked_for(
    source: Path, tmp_path: Path
) -> None:
    report = convert(source, tmp_path / "a.zarr", dedup=True, progress=False)
    assert numbers(tmp_path / "a.zarr") == [*range(FIRST), 90, 91]
    assert (report.records, report.repeats, report.samples) == (92, 30, 62)
    assert "30 repeats" in report.summary()
    convert(source, tmp_path / "b.zarr", dedup=True, sort="num_atoms", progress=False)
    sizes = {0: 3, 1: 5, 2: 9}
    by_size = sorted(range(FIRST), key=lambda k: (sizes[k % 3], k))
    assert numbers(tmp_path / "b.zarr") == [90, 91, *by_size]
    with ax.open_store(tmp_path / "b.zarr") as snapshot:
        told = snapshot.schema.provenance
    assert told["dedup"]["repeats"] == 30
    assert told["sorted_by"] == "num_atoms"
    convert(source, tmp_path / "c.zarr", sort="k", where="k > 80", progress=False)
    assert numbers(tmp_path / "c.zarr") == [*range(81, 92)]
    assert left_behind(tmp_path) == []


def test_parts_have_every_sample_once(source: Path, tmp_path: Path) -> None:
    report = convert(
        source,
        tmp_path / "{}.zarr",
        split={"train": 0.75, "test": 0.25},
        cutoff=2.0,
        where="k < 90",
        seed=3,
        progress=False,
    )
    train, test = (numbers(tmp_path / f"{name}.zarr") for name in ("train", "test"))
    assert sorted(train + test) == [*range(90)]
    assert [len(train), len(test)] == [68, 22]
    assert {os.path.basename(p): n for p, n in report.parts.items()} == {
        "train.zarr": 68,
        "test.zarr": 22,
    }
    assert report.samples == 90
    with ax.open_store(tmp_path / "test.zarr") as snapshot:
        assert snapshot.num_edges > 0
    convert(source, tmp_path / "kind-{}.zarr", split_by="kind", sort="k", progress=False)
    assert numbers(tmp_path / "kind-b.zarr") == [*range(1, 90, 2)]
    with pytest.raises(StoreExistsError):
        convert(source, tmp_path / "{}.zarr", split={"train": 1.0}, progress=False)
    assert left_behind(tmp_path) == []


def test_broken_records_are_in_no_part_and_in_the_list(source: Path, tmp_path: Path) -> None:
    report = convert(
        source,
        tmp_path / "a.zarr",
        sort="num_atoms",
        nonfinite="quarantine",
        on_error="quarantine",
        progress=False,
    )
    assert (report.samples, report.rejected) == (90, 2)
    assert report.rejects_path == str(tmp_path / "a.zarr.rejects.jsonl")
    assert len(Path(report.rejects_path).read_text().splitlines()) == 2
    assert len(numbers(tmp_path / "a.zarr")) == 90


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("step", ["repeats", "sort", "split", "build"])
def test_stopped_anywhere_it_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    options: dict = {
        "dedup": True,
        "sort": "num_atoms",
        "split": {"one": 0.5, "two": 0.5},
        "progress": False,
    }
    monkeypatch.chdir(tmp_path)
    convert(source, "{}.zarr", **options)
    expected = {name: tree(tmp_path / f"{name}.zarr") for name in ("one", "two")}
    for name in expected:
        os.rename(f"{name}.zarr", f"kept-{name}")
    where = "alchemi_xr.etl.conversion.run_plan" if step == "build" else None

    def stop(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where or f"alchemi_xr.etl.finishing.{step}", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, "{}.zarr", **options)
    assert not Path("one.zarr").exists()
    report = convert(source, "{}.zarr", **options)
    assert report.resumed or step == "build"
    assert {name: tree(tmp_path / f"{name}.zarr") for name in expected} == expected
    assert report.repeats == 30
    assert left_behind(tmp_path) == []


def test_the_command_line_says_the_same(source: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from alchemi_xr.cli.main import main; main()"),
            *("convert", str(source)),
            *(str(tmp_path / "{}.zarr"), "--dedup", "--sort", "num_atoms", "-q"),
            *("--split", "train=0.5", "--split", "test=0.5", "--split-by", "composition"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "30 repeats" in done.stdout
    parts = [set(numbers(tmp_path / f"{name}.zarr")) for name in ("train", "test")]
    assert sorted(parts[0] | parts[1]) == [*range(FIRST), 90, 91]
    # One composition, one part.
    assert not {k % 3 for k in parts[0] if k < 90} & {k % 3 for k in parts[1] if k < 90}


@pytest.mark.parametrize(
    ("dst", "options", "message"),
    [
        ("a.zarr", {"split": {"train": 1.0}}, "one {}"),
        ("{}.zarr", {"dedup": True}, "one {}"),
        ("{}.zarr", {"split": ["train"]}, "no mapping"),
        ("a.zarr", {"dedup": -1.0}, "no tolerance"),
        ("a.zarr", {"sort": 3}, "no field"),
    ],
)
def test_what_cannot_be_meant_is_refused_first(
    source: Path, tmp_path: Path, dst: str, options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / dst, **options, progress=False)
    assert os.listdir(tmp_path) == []

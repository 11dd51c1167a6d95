"""Packed memmap folders as a source: what is in the files, and what is wrong with them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl.conversion import append, convert, plan_convert
from alchemi_xr.etl.inputs import expand, find_source
from alchemi_xr.etl.sources.packed import PackedSource
from alchemi_xr.store.reader import open_store


def write(path: Path, counts: list[int], *, charges: bool = True, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    path.mkdir()
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    atoms = int(offsets[-1])
    np.save(path / "offsets.npy", offsets)
    np.save(path / "n_atoms.npy", np.array(counts, np.int32))
    rng.integers(1, 90, atoms).astype("<i4").tofile(path / "Z_pack.int32")
    rng.normal(size=(atoms, 3)).astype("<f4").tofile(path / "R_pack.f32")
    rng.normal(size=(atoms, 3)).astype("<f4").tofile(path / "F_pack.f32")
    rng.normal(size=len(counts)).astype("<f8").tofile(path / "E.f64")
    if charges:
        rng.integers(-2, 3, len(counts)).astype("<f8").tofile(path / "Qtot.f64")
    return path


def raw(path: Path) -> dict[str, Any]:
    out: dict[str, Any] = {
        "atomic_numbers": np.fromfile(path / "Z_pack.int32", "<i4"),
        "positions": np.fromfile(path / "R_pack.f32", "<f4").reshape(-1, 3),
        "forces": np.fromfile(path / "F_pack.f32", "<f4").reshape(-1, 3),
        "energy": np.fromfile(path / "E.f64", "<f8")[:, None],
    }
    if (path / "Qtot.f64").exists():
        out["charge"] = np.fromfile(path / "Qtot.f64", "<f8")[:, None]
    return out


def test_real_molecules(shared: Path, converted: Any) -> None:
    folder = shared / "data" / "packed-alcohols"
    facts = json.loads((folder / "expected.json").read_text())["facts"]
    report, store = converted(folder / "packed")
    block = store.read_block(store.active)
    assert (report.source, report.samples, report.atoms) == ("packed", 600, 4650)
    assert block["energy"].sum() == pytest.approx(facts["energies"]["E"]["sum"], rel=1e-12)
    assert block["energy"][0, 0] == facts["energies"]["E"]["first"]
    norms = np.linalg.norm(block["forces"].astype(float), axis=1)
    assert norms.sum() == pytest.approx(facts["forces"]["F"]["sum_of_norms"], rel=1e-9)
    assert norms.max() == pytest.approx(facts["forces"]["F"]["max_norm"], rel=1e-6)
    total = np.abs(block["positions"].astype(float)).sum()
    assert total == pytest.approx(facts["sum_abs_positions"], rel=1e-9)
    assert block["atomic_numbers"].sum() == facts["sum_atomic_numbers"]
    for name, values in raw(folder / "packed").items():
        np.testing.assert_array_equal(block[name], values)
    # Nothing in the files says eV: the report does not pass over that.
    assert any("name no units" in note for note in report.notes)
    assert any("taken as they stand" in note for note in report.notes)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(sum),
    frames=st.integers(1, 13),
    charges=st.booleans(),
)
def test_any_cut_gives_the_files(
    tmp_path_factory: Any, counts: list[int], frames: int, charges: bool
) -> None:
    folder = write(tmp_path_factory.mktemp("in") / "p", counts, charges=charges)
    source = PackedSource([str(folder)], frames=frames)
    scan = source.scan()
    assert scan.num_atoms.tolist() == counts
    assert sum(p.samples for p in scan.partitions) == len(counts)
    blocks = [source.read(p).block for p in scan.partitions]
    assert [n for b in blocks for n in np.diff(b.atoms_ptr).tolist()] == counts
    want = raw(folder)
    for name, values in want.items():
        np.testing.assert_array_equal(np.concatenate([b[name] for b in blocks]), values)
    assert set(blocks[0].arrays) == set(want)


def test_nothing_is_copied(tmp_path: Path) -> None:
    source = PackedSource([str(write(tmp_path / "p", [3, 4, 5]))])
    block = source.read(source.scan().partitions[0]).block
    for name, values in block.arrays.items():
        assert not values.flags.owndata, name
        assert not values.flags.writeable, name


def test_several_folders_with_and_without_charges(tmp_path: Path, converted: Any) -> None:
    write(tmp_path / "a", [3, 1], charges=False)
    write(tmp_path / "b", [2, 5], seed=1)
    report, store = converted(tmp_path / "[ab]")
    assert report.samples == 4
    block = store.read_block(store.active)
    assert block.has("charge").tolist() == [False, False, True, True]
    np.testing.assert_array_equal(block["positions"][4:], raw(tmp_path / "b")["positions"])


def test_units_are_given_or_recorded(tmp_path: Path, converted: Any) -> None:
    folder = write(tmp_path / "p", [3, 4])
    units = {"energy": "kcal/mol", "forces": "kcal/mol/Å"}
    _, store = converted(folder, units=units)
    want, got = raw(folder), store.read_block(store.active)
    np.testing.assert_allclose(got["energy"], want["energy"] * 0.0433641042)
    np.testing.assert_allclose(got["forces"], want["forces"] * 0.0433641042, rtol=1e-6)
    assert store.unit("energy") == "eV"
    (folder / "units.json").write_text(json.dumps(units))
    report = convert(folder, tmp_path / "said.zarr", progress=False)
    assert any("energy from kcal/mol to eV (as the input" in note for note in report.notes)
    assert not any("name no units" in note for note in report.notes)
    with open_store(tmp_path / "said.zarr") as said:
        np.testing.assert_allclose(said.read_block(said.active)["energy"], got["energy"])
    # What the user says wins.
    convert(folder, tmp_path / "mine.zarr", units={"energy": "eV"}, progress=False)
    with open_store(tmp_path / "mine.zarr") as mine:
        np.testing.assert_array_equal(mine.read_block(mine.active)["energy"], want["energy"])
    write(tmp_path / "q", [2])
    with pytest.raises(ConfigError, match="not those of the folders before"):
        convert([folder, tmp_path / "q"], tmp_path / "two.zarr", progress=False)


def test_names_are_mapped(tmp_path: Path, converted: Any) -> None:
    _, store = converted(write(tmp_path / "p", [3, 4]), key_map={"E": "dft", "Qtot": "spin"})
    assert store.level("dft") == "system"
    block = store.read_block(store.active)
    np.testing.assert_array_equal(block["dft"].ravel(), raw(tmp_path / "p")["energy"].ravel())
    assert "energy" not in block
    assert "spin" in block
    with pytest.raises(ConfigError, match="for one field"):
        PackedSource(["p"], names=_names({"R": "forces"}))


def _names(mapping: dict[str, str]) -> Any:
    from alchemi_xr.etl.names import NameMap

    return NameMap.make(key_map=mapping)


def test_impossible_elements_are_set_aside(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", [3, 0, 4, 2, 5])
    numbers = np.fromfile(folder / "Z_pack.int32", "<i4")
    numbers[[4, 5, 9]] = 0, 119, -1
    numbers.tofile(folder / "Z_pack.int32")
    with pytest.raises(SourceError, match="atom 1 has the atomic number 0"):
        convert(folder, tmp_path / "out.zarr", progress=False)
    assert not (tmp_path / "out.zarr").exists()
    report = convert(folder, tmp_path / "out.zarr", on_error="quarantine", progress=False)
    assert [(r.frame, r.field) for r in report.rejects] == [
        (2, "atomic_numbers"),
        (4, "atomic_numbers"),
    ]
    assert report.samples == 3


@pytest.mark.parametrize("file", ["R_pack.f32", "E.f64", "Z_pack.int32"])
def test_a_file_that_was_cut_off(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path / "p", [3, 4])
    whole = write(tmp_path / "q", [2])
    os.truncate(folder / file, 5)
    with pytest.raises(SourceError, match="size mismatch: expected"):
        convert(folder, tmp_path / "out.zarr", progress=False)
    report = convert([folder, whole], tmp_path / "out.zarr", on_error="quarantine", progress=False)
    assert (report.records, report.samples, report.rejected) == (2, 1, 1)
    assert "size mismatch" in report.rejects[0].reason
    np.save(folder / "n_atoms.npy", np.array([3, 3], np.int32))
    with pytest.raises(SourceError, match="molecule 1: offsets"):
        convert(folder, tmp_path / "again.zarr", progress=False)


def test_a_folder_that_changes_while_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", [3, 4])
    source = PackedSource([str(folder)])
    partition = source.scan().partitions[0]
    shutil.copytree(folder, tmp_path / "kept")

    def changed(file: str, data: Any) -> None:
        if isinstance(data, bytes):
            (folder / file).write_bytes(data)
        else:
            np.save(folder / file, data)
        with pytest.raises(SourceError, match="not what it was"):
            source.read(partition)
        shutil.copy(tmp_path / "kept" / file, folder / file)

    changed("R_pack.f32", b"123")
    changed("offsets.npy", np.array([0, 3, 9]))
    changed("offsets.npy", np.array([0, 9, 7]))
    changed("offsets.npy", np.array([0, 7]))
    changed("offsets.npy", b"nothing")
    source.read(partition)


def test_what_is_empty_and_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no record"):
        convert(write(tmp_path / "none", []), tmp_path / "out.zarr", progress=False)
    folder = write(tmp_path / "p", [3])
    assert find_source(expand(folder))[0] is PackedSource
    assert find_source(expand(tmp_path / "*"))[1] == [str(tmp_path / "none"), str(folder)]
    assert not PackedSource.matches(str(tmp_path))
    (folder / "F_pack.f32").unlink()
    with pytest.raises(SourceError, match=r"F_pack\.f32 is missing"):
        plan_convert(folder)


def test_append_and_workers(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", list(range(1, 30)))
    convert(folder, tmp_path / "out.zarr", progress=False, options={"frames": 4}, client=2)
    append(folder, tmp_path / "out.zarr", progress=False)
    with open_store(tmp_path / "out.zarr") as store:
        block = store.read_block(store.active)
    for name, values in raw(folder).items():
        np.testing.assert_array_equal(block[name], np.concatenate([values, values]))

"""A store to packed memmaps and back: the identity, up to what the report names."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.packed_memmap_loader import PackedMemmapLoader
from alchemi_xr.errors import ConfigError, FieldError, StoreExistsError
from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.exports.packed import PackedExport, write_packed
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.writer import StoreWriter

ATOM = ("atomic_numbers", "positions", "forces")


def block_of(counts: list[int], *, seed: int = 0, real: str = "float32", **more: Any) -> Block:
    rng = np.random.default_rng(seed)
    atoms, n = sum(counts), len(counts)
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 90, atoms),
        "positions": rng.normal(size=(atoms, 3)).astype(real),
        "forces": rng.normal(size=(atoms, 3)).astype(real),
        "energy": rng.normal(size=(n, 1)) * 1e5,
        "charge": rng.integers(-2, 3, (n, 1)).astype(float),
        **more,
    }
    levels: Any = {k: "atom" if k in ATOM else "system" for k in arrays}
    ptr = counts_to_ptr(np.array(counts))
    return Block(ptr, np.zeros_like(ptr), arrays, levels)


def put(path: Path, block: Block) -> Path:
    StoreWriter(path).write(block)
    return path


def whole(path: Path) -> Block:
    with open_store(path) as store:
        return store.read_block(store.active)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    size=st.sampled_from([1, 400, 10**6]),
    gone=st.sets(st.integers(0, 8), max_size=3),
)
def test_round_trip(tmp_path_factory: Any, counts: list[int], size: int, gone: set[int]) -> None:
    from alchemi_xr.etl.exporting import export

    folder = tmp_path_factory.mktemp("round")
    block = block_of(counts)
    store = put(folder / "in.zarr", block)
    gone = {g for g in gone if g < len(counts) - 1}
    StoreWriter(store).delete(sorted(gone))
    kept = np.array([i for i in range(len(counts)) if i not in gone])
    report = export(store, folder / "out.packed", block_bytes=size, progress=False)
    assert report.samples == len(kept)
    assert report.lost == {}
    convert(folder / "out.packed", folder / "back.zarr", progress=False)
    want, got = block.take(kept), whole(folder / "back.zarr")
    np.testing.assert_array_equal(got.atoms_ptr, want.atoms_ptr)
    for name, values in want.arrays.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def test_the_loader_reads_it(tmp_path: Path) -> None:
    block = block_of([3, 1, 4])
    write_packed(put(tmp_path / "in.zarr", block), tmp_path / "out")
    loader = PackedMemmapLoader(tmp_path / "out", 3, shuffle=False)
    batch = next(loader.batches())
    assert batch["N"].tolist() == [1, 3, 4]
    np.testing.assert_array_equal(batch["E"], block["energy"][[1, 0, 2], 0])
    np.testing.assert_array_equal(batch["R"][2], block["positions"][4:])
    np.testing.assert_array_equal(batch["Qtot"], block["charge"][[1, 0, 2], 0])
    assert not [n for n in os.listdir(tmp_path) if "partial" in n]


def test_units_are_recorded_and_taken_back(tmp_path: Path) -> None:
    block = block_of([3, 1])
    store = put(tmp_path / "in.zarr", block)
    units = {"energies": "kcal/mol", "forces": "kcal/mol/Å"}
    write_packed(store, tmp_path / "out", units=units)
    raw = np.fromfile(tmp_path / "out" / "E.f64", "<f8")
    np.testing.assert_allclose(raw, block["energy"].ravel() / 0.0433641042)
    said = json.loads((tmp_path / "out" / "units.json").read_text())
    assert said == {
        "energy": "kcal/mol", "forces": "kcal/mol/Å", "positions": "Å", "charge": "e"
    }  # fmt: skip
    convert(tmp_path / "out", tmp_path / "back.zarr", progress=False)
    got = whole(tmp_path / "back.zarr")
    np.testing.assert_allclose(got["energy"], block["energy"], rtol=1e-14)
    np.testing.assert_allclose(got["forces"], block["forces"], rtol=1e-6)
    for wrong in ({"energy": "Å"}, {"stress": "GPa"}, {"positions": "feet"}):
        with pytest.raises(ConfigError):
            write_packed(store, tmp_path / "no", units=wrong)
    with pytest.raises(ConfigError, match="missing"):
        write_packed(store, tmp_path / "no", missing="zero")  # type: ignore[arg-type]
    assert not (tmp_path / "no").exists()


def test_what_it_cannot_hold_is_named(tmp_path: Path) -> None:
    block = block_of(
        [3, 1],
        real="float64",
        cell=np.tile(9 * np.eye(3), (2, 1, 1)),
        label=np.array(["a", "b"], dtype=object),
        stress=np.zeros((2, 3, 3)),
    )
    block = block.with_field("charges", np.ones(4), "atom")
    ptr = counts_to_ptr(np.array([1, 0]))
    block.edges_ptr = ptr
    block.arrays["neighbor_list"] = np.array([[0, 1]])
    block.levels["neighbor_list"] = "edge"
    report = write_packed(put(tmp_path / "in.zarr", block), tmp_path / "out")
    assert set(report.lost) == {"cell", "label", "stress", "charges", "neighbor_list"}
    assert "no edges" in report.lost["neighbor_list"]
    assert "positions: float64 rounded to float32" in report.notes
    assert "not held: cell" in str(report)


def test_a_number_that_does_not_fit(tmp_path: Path) -> None:
    block = block_of([3], real="float64")
    block["forces"][1, 2] = 1e39
    store = put(tmp_path / "in.zarr", block)
    with pytest.raises(FieldError, match="too large for float32"):
        write_packed(store, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in.zarr"]
    block["forces"][1, 2] = np.inf  # is what it is in float32, too
    write_packed(put(tmp_path / "inf.zarr", block), tmp_path / "out")


@pytest.mark.parametrize("missing", [np.nan, 0.0])
def test_samples_without_a_value(tmp_path: Path, missing: float) -> None:
    block = block_of([2, 1, 3])
    block.present["forces"] = np.array([True, False, True])
    block.present["energy"] = np.array([True, True, False])
    block.fill_missing()
    store = put(tmp_path / "in.zarr", block)
    report = write_packed(store, tmp_path / "out", missing=missing)
    forces = np.fromfile(tmp_path / "out" / "F_pack.f32", "<f4").reshape(-1, 3)
    want = block["forces"].copy()
    want[2] = missing
    np.testing.assert_array_equal(forces, want)
    energy = np.fromfile(tmp_path / "out" / "E.f64", "<f8")
    np.testing.assert_array_equal(energy[2], missing)
    assert sum("samples without" in note for note in report.notes) == 2
    only = write_packed(store, tmp_path / "bare", fields=[], missing=missing)
    assert only.fields == ["atomic_numbers", "positions"]
    assert any("no sample has forces" in note for note in only.notes)
    forces = np.fromfile(tmp_path / "bare" / "F_pack.f32", "<f4")
    np.testing.assert_array_equal(forces, np.full(18, missing, np.float32))
    assert PackedMemmapLoader(tmp_path / "bare", 2).Qtot is None


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    store = put(tmp_path / "in.zarr", block_of([2]))
    write_packed(store, tmp_path / "out")
    with pytest.raises(StoreExistsError):
        write_packed(store, tmp_path / "out")
    write_packed(store, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "thesis.tex").touch()
    assert not PackedExport.owns(str(tmp_path / "out"))
    with pytest.raises(StoreExistsError, match="is not of the format"):
        write_packed(store, tmp_path / "out", overwrite=True)


def test_memory_is_bounded(tmp_path: Path) -> None:
    from alchemi_xr.etl.exporting import export

    peaks = []
    for n in (200, 800):
        store = put(tmp_path / f"{n}.zarr", block_of([60] * n))
        tracemalloc.start()
        export(store, tmp_path / f"{n}.packed", block_bytes=2**18, progress=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]

"""NPZ and NPY in the forms that people have, and what is wrong with some of them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.errors import SourceError
from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.sources.npz import NpzSource
from alchemi_xr.store.reader import Snapshot, open_store


def whole(store: Snapshot) -> Any:
    return store.read_block(store.active)


@pytest.mark.parametrize("folder", ["npz-ethanol", "npz-padded", "npz-box-mask"])
def test_real_files(shared: Path, converted: Any, folder: str) -> None:
    facts = json.loads((shared / "data" / folder / "expected.json").read_text())["facts"]
    report, store = converted(shared / "data" / folder / "data.npz")
    block = whole(store)
    counts = np.diff(block.atoms_ptr)
    assert (block.num_samples, block.num_atoms) == (facts["frames"], facts["atoms_total"])
    assert (counts.min(), counts.max()) == (facts["atoms_min"], facts["atoms_max"])
    assert int(block["atomic_numbers"].sum()) == facts["sum_atomic_numbers"]
    total = np.abs(block["positions"]).sum()
    np.testing.assert_allclose(total, facts["sum_abs_positions"], rtol=1e-10)
    if "energies" in facts:
        want = facts["energies"]["E"]
        np.testing.assert_allclose(block["energy"].sum(), want["sum"], rtol=1e-12)
        norms = np.sqrt((block["forces"] ** 2).sum(axis=1)).sum()
        np.testing.assert_allclose(norms, facts["forces"]["F"]["sum_of_norms"], rtol=1e-9)
    else:
        assert "energy" not in block
        assert "cell" not in block
    assert any("units taken as they stand" in note for note in report.notes)


def test_case_padding(shared: Path, converted: Any) -> None:
    case = shared / "cases" / "C19-npz-padding"
    want = json.loads((case / "expected.json").read_text())["expected"]
    _, store = converted(case / "no_N.npz")
    block = whole(store)
    assert np.diff(block.atoms_ptr).tolist() == want["n_atoms"]
    assert block["energy"].ravel().tolist() == want["energy"]
    assert np.abs(block["positions"]).max() == want["max_abs_position"]
    np.testing.assert_allclose(block["forces"].sum(), want["sum_forces"])
    assert block["dipole"].sum() == want["dipole_sum"]


def test_pickled_objects_are_refused(shared: Path, tmp_path: Path) -> None:
    path = shared / "cases" / "C19-npz-padding" / "object.npz"
    with pytest.raises(SourceError, match="pickled Python objects"):
        convert(path, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


def pack(path: Path, compressed: bool = False, **arrays: Any) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def simple(frames: int = 3, atoms: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "R": rng.normal(size=(frames, atoms, 3)),
        "Z": np.ones((frames, atoms), np.int32),
        "E": rng.normal(size=frames),
        "F": rng.normal(size=(frames, atoms, 3)),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"F": np.zeros((2, 2, 3))}, r"'F': found \[2, 2, 3\], expected 3 rows"),
        ({"F": np.zeros((3, 4, 3))}, r"'F': found \[3, 4, 3\], expected \[3, 2, 3\]"),
        ({"R": np.zeros((3, 2))}, r"'R': found \[3, 2\]"),
        ({"Z": np.ones(5)}, r"'Z': found \[5\]"),
        ({"N": np.array([1, 2, 7])}, "N says 7 atoms, there is room for 2"),
        ({"Z": np.full((3, 2), 150)}, "atomic number 150"),
        ({"Z": np.full((3, 2), 1.5)}, "atom 0 is of no element"),
        ({"Z": np.array([["H", "Qq"]] * 3)}, "atom 1 is of no element"),
        ({"E": np.zeros((3, 2))}, r"'E': found \[3, 2\]"),
    ],
)
def test_bad_arrays(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = pack(tmp_path / "in.npz", **{**simple(), **change})
    with pytest.raises(SourceError, match=message):
        convert(path, tmp_path / "out.zarr", progress=False)


def test_one_bad_frame_is_set_aside(tmp_path: Path, converted: Any) -> None:
    arrays = simple(frames=5)
    arrays["Z"][2, 1] = 120
    report, store = converted(pack(tmp_path / "in.npz", **arrays), on_error="quarantine")
    assert (report.records, report.samples, report.rejected) == (5, 4, 1)
    assert report.rejects[0].frame == 2
    np.testing.assert_array_equal(whole(store)["energy"].ravel(), np.delete(arrays["E"], 2))


@pytest.mark.parametrize("cut", [40, 400])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_cut_off_archive(tmp_path: Path, cut: int, compressed: bool) -> None:
    path = pack(tmp_path / "in.npz", compressed, **simple())
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SourceError, match="damaged"):
        convert(path, tmp_path / "out.zarr", progress=False)


def test_a_flipped_byte_of_a_deflated_member(tmp_path: Path) -> None:
    path = pack(tmp_path / "in.npz", True, **simple(frames=200))
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("R.npy")
    data = bytearray(path.read_bytes())
    data[info.header_offset + info.compress_size // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(SourceError, match="damaged"):
        convert(path, tmp_path / "out.zarr", progress=False)


def test_an_empty_file_and_no_positions(tmp_path: Path) -> None:
    empty = tmp_path / "empty.npz"
    empty.write_bytes(b"")
    with pytest.raises(SourceError, match="empty"):
        convert(empty, tmp_path / "out.zarr", progress=False)
    path = pack(tmp_path / "in.npz", coords_of_mine=np.zeros((2, 1, 3)), Z=np.ones(1))
    with pytest.raises(SourceError, match=r"no array is known as positions.*coords_of_mine"):
        convert(path, tmp_path / "out.zarr", progress=False)


def test_names_and_units_of_the_user(tmp_path: Path, converted: Any) -> None:
    arrays = simple()
    path = pack(tmp_path / "in.npz", mine=arrays.pop("R"), U0=arrays["E"] + 1, **arrays)
    report, store = converted(
        path, key_map={"mine": "positions", "U0": "energy"}, units={"energy": "kcal/mol"}
    )
    block = whole(store)
    np.testing.assert_allclose(block["energy"].ravel(), (arrays["E"] + 1) * 0.0433641042)
    np.testing.assert_array_equal(block["E"], arrays["E"])
    assert any("energy from kcal/mol to eV" in note for note in report.notes)


def test_rmd17_and_sgdml_say_their_units(tmp_path: Path, converted: Any) -> None:
    arrays = simple()
    path = pack(
        tmp_path / "in.npz",
        nuclear_charges=np.array([1, 1]),
        coords=arrays["R"],
        energies=arrays["E"],
        forces=arrays["F"],
        old_energies=arrays["E"],
        old_indices=np.arange(3),
    )
    report, store = converted(path)
    np.testing.assert_allclose(whole(store)["energy"].ravel(), arrays["E"] * 0.0433641042)
    assert any("by its definition" in note for note in report.notes)
    path = pack(tmp_path / "sgdml.npz", **arrays, e_unit="kcal/mol", r_unit="Ang")
    _, store = converted(path, overwrite=True)
    np.testing.assert_allclose(whole(store)["forces"], arrays["F"].reshape(-1, 3) * 0.0433641042)
    # The user's word wins.
    _, store = converted(path, overwrite=True, units={"energy": "eV"})
    np.testing.assert_array_equal(whole(store)["energy"].ravel(), arrays["E"])


def test_a_folder_of_npy_files(tmp_path: Path, converted: Any) -> None:
    arrays = simple()
    folder = tmp_path / "set"
    folder.mkdir()
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    report, store = converted(folder)
    assert report.samples == 3
    np.testing.assert_array_equal(whole(store)["positions"], arrays["R"].reshape(-1, 3))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_padding_never_becomes_atoms(tmp_path_factory: Any, data: Any) -> None:
    width = data.draw(st.integers(1, 5))
    counts = data.draw(st.lists(st.integers(1, width), min_size=1, max_size=8))
    frames = len(counts)
    keep = np.arange(width) < np.array(counts)[:, None]
    rng = np.random.default_rng(frames)
    numbers = np.where(keep, rng.integers(1, 90, size=keep.shape), 0)
    positions = np.where(keep[..., None], rng.normal(size=(frames, width, 3)), 1e9)
    arrays: dict[str, Any] = {"Z": numbers, "R": positions, "charge_like": positions[..., 0]}
    how = data.draw(st.sampled_from(["N", "mask", "zeros"]))
    if how == "N":
        arrays["N"] = np.array(counts)
    elif how == "mask":
        arrays["node_mask"] = keep
    path = pack(tmp_path_factory.mktemp("npz") / "in.npz", data.draw(st.booleans()), **arrays)
    source = NpzSource([str(path)], frames=data.draw(st.integers(1, 4)))
    scan = source.scan()
    assert scan.num_atoms.tolist() == counts
    blocks = [source.read(p).block for p in scan.partitions]
    np.testing.assert_array_equal(np.concatenate([b["positions"] for b in blocks]), positions[keep])
    np.testing.assert_array_equal(
        np.concatenate([b["atomic_numbers"] for b in blocks]), numbers[keep]
    )


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A pack of 64 MB read in slices takes a small part of it."""
    import tracemalloc

    frames, atoms = 20_000, 64
    shape = (frames, atoms, 3)
    path = pack(tmp_path / "in.npz", R=np.ones(shape), F=np.ones(shape), z=np.ones(atoms, np.int8))
    source = NpzSource([str(path)])
    tracemalloc.start()
    for partition in source.scan().partitions:
        source.read(partition)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2 * 8 * np.prod(shape) > 60e6
    # One partition holds 16 MiB of input; views of the map are not copies.
    assert peak < 45e6


def test_tensors_of_three_atoms(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensor, own = rng.normal(size=(2, 2, 3, 3))
    np.savez(
        tmp_path / "water.npz",
        R=rng.normal(size=(2, 3, 3)),
        Z=[8, 1, 1],
        stress=tensor,
        own=own,
        charges=rng.normal(size=(2, 3)),
    )
    report = convert(tmp_path / "water.npz", tmp_path / "out.zarr", progress=False)
    with open_store(tmp_path / "out.zarr") as store:
        assert (store.level("stress"), store.level("charges")) == ("system", "atom")
        np.testing.assert_array_equal(store.read_block([0, 1])["stress"], tensor)
    # A name of one's own is a guess, and said to be one.
    assert any("by their shape: 'own' (" in note for note in report.notes)


@pytest.mark.filterwarnings("error")
def test_elements_as_symbols_and_floats_with_padding(tmp_path: Path, converted: Any) -> None:
    for name, padded in (("s", ["H", ""]), ("f", [1.0, np.nan])):
        arrays = {**simple(), "Z": np.array([padded, padded, [padded[0]] * 2])}
        _, store = converted(pack(tmp_path / f"{name}.npz", **arrays), overwrite=True)
        np.testing.assert_array_equal(np.diff(whole(store).atoms_ptr), [1, 1, 2])
        assert (whole(store)["atomic_numbers"] == 1).all()


def test_tensors_that_no_alias_names(tmp_path: Path, converted: Any) -> None:
    voigt = np.arange(18.0).reshape(3, 6)
    more = {"stress": voigt, "charge": np.ones((3, 4)), "name": np.array(["a", "b", "c"])}
    report, store = converted(pack(tmp_path / "in.npz", **simple(), **more))
    block = whole(store)
    np.testing.assert_array_equal(block["stress"][:, 0], voigt[:, [0, 5, 4]])
    np.testing.assert_array_equal(block["stress"], block["stress"].transpose(0, 2, 1))
    np.testing.assert_array_equal(block["other_charge"], more["charge"])
    told = " ".join(report.notes)
    assert "'charge' is kept as 'other_charge'" in told
    assert "'name' is not stored" in told

"""HDF5 of the ANI, SPICE and MACE forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.errors import SourceError
from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.sources.hdf5 import Hdf5Source
from alchemi_xr.units import conversion_factor

h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
HARTREE = conversion_factor("Hartree", "eV")
BOHR = conversion_factor("bohr", "Å")


def whole(store: Any) -> Any:
    return store.read_block(store.active)


def test_ani1x(shared: Path, converted: Any) -> None:
    folder = shared / "data" / "h5-ani1x"
    facts = json.loads((folder / "expected.json").read_text())["facts"]
    report, store = converted(folder / "data.h5")
    block = whole(store)
    assert (block.num_samples, block.num_atoms) == (facts["frames"], facts["atoms_total"])
    assert int(block["atomic_numbers"].sum()) == facts["sum_atomic_numbers"]
    want = facts["energies"]["wb97x_dz.energy"]
    np.testing.assert_allclose(block["energy"].sum(), want["sum"] * HARTREE, rtol=1e-12)
    assert block["energy"][0, 0] == pytest.approx(want["first"] * HARTREE, rel=1e-14)
    norms = np.sqrt((block["forces"].astype(float) ** 2).sum(axis=1)).sum()
    want = facts["forces"]["wb97x_dz.forces"]["sum_of_norms"]
    np.testing.assert_allclose(norms, want * HARTREE, rtol=1e-6)
    other = facts["other"]["ccsd(t)_cbs.energy"]
    np.testing.assert_allclose(np.nansum(block["ccsd(t)_cbs.energy"]), other["sum"], rtol=1e-12)
    assert store.unit("ccsd(t)_cbs.energy") == "Hartree"
    assert store.level("wb97x_tz.mbis_dipoles") == "atom"
    assert store.level("wb97x_tz.dipole") == "system"
    assert any("by its definition" in note for note in report.notes)


def test_spice(shared: Path, converted: Any) -> None:
    folder = shared / "data" / "h5-spice"
    facts = json.loads((folder / "expected.json").read_text())["facts"]
    _, store = converted(folder / "data.h5")
    block = whole(store)
    assert (block.num_samples, block.num_atoms) == (facts["frames"], facts["atoms_total"])
    want = facts["energies"]["dft_total_energy"]["sum"]
    np.testing.assert_allclose(block["energy"].sum(), want * HARTREE, rtol=1e-12)
    np.testing.assert_allclose(
        np.abs(block["positions"].astype(float)).sum(),
        facts["sum_abs_conformations"] * BOHR,
        rtol=1e-6,
    )
    with h5py.File(folder / "data.h5") as file:
        gradient = file["103147721/dft_total_gradient"][0]
    np.testing.assert_allclose(block["forces"][:27], -gradient * HARTREE / BOHR, rtol=1e-5)
    assert int(block.has("charges").sum()) == 50
    assert "[Na+:5]" in block["smiles"][-1]


def test_ani2x_and_ani1(tmp_path: Path, converted: Any) -> None:
    rng = np.random.default_rng(1)
    energy = rng.normal(size=4)
    with h5py.File(tmp_path / "ani2x.h5", "w") as file:
        group = file.create_group("003")
        group["coordinates"] = rng.normal(size=(4, 3, 3))
        group["species"] = np.tile([8, 1, 1], (4, 1))
        group["energies"] = energy
        group["forces"] = rng.normal(size=(4, 3, 3))
    _, store = converted(tmp_path / "ani2x.h5")
    np.testing.assert_allclose(whole(store)["energy"].ravel(), energy * HARTREE)
    with h5py.File(tmp_path / "ani1.h5", "w") as file:
        group = file.create_group("gdb11_s01/gdb11_s01-0")
        group["coordinates"] = rng.normal(size=(2, 3, 3))
        group["species"] = np.array([b"O", b"H", b"H"])
        group["energies"] = energy[:2]
    _, store = converted(tmp_path / "ani1.h5", overwrite=True)
    assert whole(store)["atomic_numbers"].tolist() == [8, 1, 1] * 2


def test_mace_preprocessed(tmp_path: Path, converted: Any) -> None:
    with h5py.File(tmp_path / "train_0.h5", "w") as file:
        batch = file.create_group("config_batch_0")
        for i in range(12):
            config = batch.create_group(f"config_{i}")
            config["atomic_numbers"] = np.full(1 + i % 3, 6)
            config["positions"] = np.full((1 + i % 3, 3), float(i))
            config["cell"] = np.eye(3) * 5
            config["pbc"] = np.array([True] * 3)
            config["config_type"] = "Default"
            config["weight"] = 1.0
            properties = config.create_group("properties")
            properties["energy"] = -1.0 * i
            properties["forces"] = np.zeros((1 + i % 3, 3))
            properties["stress"] = "None" if i == 0 else np.arange(6.0)
    report, store = converted(tmp_path / "train_0.h5")
    block = whole(store)
    assert report.samples == 12
    # In the order of their numbers, not of their names.
    assert block["energy"].ravel().tolist() == [-1.0 * i for i in range(12)]
    assert int(block.has("stress").sum()) == 11
    assert block["stress"][1, 0].tolist() == [0.0, 5.0, 4.0]
    assert set(block["config_type"]) == {"Default"}


def test_mixed_units_are_converted_and_told(tmp_path: Path, converted: Any) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name, unit in (("a", "hartree"), ("b", "eV")):
            group = file.create_group(name)
            group["atomic_numbers"] = np.array([1])
            group["coordinates"] = np.zeros((1, 1, 3))
            group["energy"] = np.array([1.0])
            group["energy"].attrs["units"] = unit
    report, store = converted(tmp_path / "in.h5")
    np.testing.assert_allclose(whole(store)["energy"].ravel(), [HARTREE, 1.0])
    assert any("'energy' is in hartree and" in note for note in report.notes)


@pytest.mark.parametrize("cut", [100, 30_000])
def test_a_cut_off_file(shared: Path, tmp_path: Path, cut: int) -> None:
    data = (shared / "data" / "h5-ani1x" / "data.h5").read_bytes()
    (tmp_path / "in.h5").write_bytes(data[:-cut])
    with pytest.raises(SourceError, match=r"no whole HDF5 file|cannot be read"):
        convert(tmp_path / "in.h5", tmp_path / "out.zarr", progress=False)


def test_a_group_that_does_not_fit_is_set_aside(tmp_path: Path, converted: Any) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name, n in (("a", 2), ("b", 3)):
            group = file.create_group(name)
            group["atomic_numbers"] = np.ones(2)
            group["coordinates"] = np.zeros((1, n, 3))
    report, _ = converted(tmp_path / "in.h5", on_error="quarantine")
    assert (report.samples, report.rejected) == (1, 1)
    assert report.rejects[0].reason.startswith("b: array 'atomic_numbers'")


def molecules(file: Any, **options: Any) -> dict[str, list[Any]]:
    """Groups of several molecules in a file; the arrays that are in it."""
    rng = np.random.default_rng(5)
    made: dict[str, list[Any]] = {"positions": [], "energy": [], "forces": []}
    for i, atoms in enumerate((3, 5, 1, 8)):
        group = file.create_group(f"m{i}")
        given = {
            "species": rng.integers(1, 9, atoms),
            "coordinates": rng.normal(size=(6, atoms, 3)).astype(">f4" if i == 1 else "<f4"),
            "energy": rng.normal(size=6),
            "forces": rng.normal(size=(6, atoms, 3)),
        }
        for name, values in given.items():
            group.create_dataset(name, data=values, **(options if values.ndim > 1 else {}))
        group["smiles"] = "C" * atoms
        for name, key in (("positions", "coordinates"), ("forces",) * 2, ("energy",) * 2):
            made[name] += list(given[key].astype(float))
    return made


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": True}, {"compression": "gzip"}],
    ids=["contiguous", "chunked", "compressed"],
)
def test_however_its_numbers_lie(converted: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = molecules(file, **options)
    _, store = converted(tmp_path / "a.h5")
    block = whole(store)
    assert block.num_samples == 24
    np.testing.assert_array_equal(block["positions"], np.concatenate(made["positions"]))
    np.testing.assert_array_equal(block["forces"], np.concatenate(made["forces"]))
    np.testing.assert_array_equal(block["energy"][:, 0], made["energy"])
    assert block["smiles"].tolist()[::6] == ["CCC", "CCCCC", "C", "CCCCCCCC"]


def test_offsets_are_those_of_the_file_that_was_scanned(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        molecules(file)
    source = Hdf5Source([str(path)])
    (partition,) = source.scan().partitions
    # The same arrays elsewhere in the file: they are found by their names.
    with h5py.File(path, "w") as file:
        file["before"] = np.full(1000, np.nan)
        made = molecules(file)
    block = source.read(partition).block
    np.testing.assert_array_equal(block["positions"], np.concatenate(made["positions"]))
    source = Hdf5Source([str(path)])
    (partition,) = source.scan().partitions
    stat = path.stat()
    path.write_bytes(path.read_bytes()[: stat.st_size // 2])
    with pytest.raises(SourceError):
        source.read(partition)


def test_numbers_of_another_file_are_read_from_there(converted: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        made = molecules(file)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("m0", "m1"):
            file[name] = h5py.ExternalLink("other.h5", f"/{name}")
        for name in ("m2", "m3"):
            for array in ("species", "coordinates", "energy", "forces", "smiles"):
                file[f"{name}/{array}"] = h5py.ExternalLink("other.h5", f"/{name}/{array}")
        # So long that the other file's offsets are within this one, too.
        file["before"] = np.zeros(10_000)
    _, store = converted(tmp_path / "a.h5")
    block = whole(store)
    np.testing.assert_array_equal(block["positions"], np.concatenate(made["positions"]))
    np.testing.assert_array_equal(block["energy"][:, 0], made["energy"])

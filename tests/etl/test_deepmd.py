"""DeePMD-kit systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.errors import SourceError
from alchemi_xr.etl.conversion import convert


def whole(store: Any) -> Any:
    return store.read_block(store.active)


@pytest.mark.parametrize("part", ["data_0", "data_1"])
def test_water(shared: Path, converted: Any, part: str) -> None:
    folder = shared / "data" / "deepmd-water"
    facts = json.loads((folder / "expected.json").read_text())["facts"][part]
    report, store = converted(folder / part)
    block = whole(store)
    assert (block.num_samples, block.num_atoms) == (facts["frames"], facts["atoms_total"])
    energy = block["energy"].astype(float)
    np.testing.assert_allclose(energy.sum(), facts["energies"]["energy"]["sum"], rtol=1e-12)
    norms = np.sqrt((block["forces"].astype(float) ** 2).sum(axis=1)).sum()
    np.testing.assert_allclose(norms, facts["forces"]["force"]["sum_of_norms"], rtol=1e-9)
    total = np.abs(block["positions"].astype(float)).sum()
    np.testing.assert_allclose(total, facts["sum_abs_positions"], rtol=1e-9)
    first = block["atomic_numbers"][:192]
    assert ((first == 8).sum(), (first == 1).sum()) == (64, 128)
    assert block["pbc"].all()
    assert any("eV" in note for note in report.notes)


def test_many_systems_by_a_pattern(shared: Path, converted: Any) -> None:
    report, _ = converted(shared / "data" / "deepmd-water" / "data_*")
    assert report.samples == 240


def system(folder: Path, **arrays: Any) -> Path:
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text("0\n1\n1\n")
    (folder / "type_map.raw").write_text("O\nH\n")
    for name, values in arrays.items():
        np.save(folder / "set.000" / f"{name}.npy", values, allow_pickle=True)
    return folder


def test_no_periodicity_virial_and_mixed_types(tmp_path: Path, converted: Any) -> None:
    rng = np.random.default_rng(0)
    folder = system(
        tmp_path / "s",
        coord=rng.normal(size=(2, 9)),
        box=np.zeros((2, 9)),
        virial=np.arange(18.0).reshape(2, 9),
        real_atom_types=np.array([[0, 1, 1], [1, 1, -1]]),
        atom_ener=np.ones((2, 3)),
    )
    (folder / "nopbc").touch()
    _, store = converted(folder)
    block = whole(store)
    assert np.diff(block.atoms_ptr).tolist() == [3, 2]
    assert block["atomic_numbers"].tolist() == [8, 1, 1, 1, 1]
    assert not block["pbc"].any()
    assert "cell" not in block
    assert block["virial"][1].tolist() == np.arange(9.0, 18).reshape(3, 3).tolist()
    assert store.level("atom_ener") == "atom"


def test_bad_systems(tmp_path: Path) -> None:
    def fails(folder: Path, message: str) -> None:
        with pytest.raises(SourceError, match=message):
            convert(folder, tmp_path / "out.zarr", progress=False)

    coord = np.zeros((2, 9))
    fails(system(tmp_path / "a", coord=coord, force=np.zeros((1, 9))), "expected 2 rows")
    fails(system(tmp_path / "b", coord=np.zeros((2, 8))), "expected")
    folder = system(tmp_path / "c", coord=coord)
    (folder / "type_map.raw").unlink()
    fails(folder, "type_map.raw is missing")
    folder = system(tmp_path / "d", coord=coord)
    (folder / "type.raw").write_text("0 5 1")
    fails(folder, "names a type that")
    fails(system(tmp_path / "e", coord=np.array([{"a": 1}], dtype=object)), "Python objects")
    folder = system(tmp_path / "f", coord=coord)
    path = folder / "set.000" / "coord.npy"
    path.write_bytes(path.read_bytes()[:-10])
    fails(folder, "cannot be read")

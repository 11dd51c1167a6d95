"""Single samples: small Datasets and ase.Atoms."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.errors import FieldError, IndexRangeError
from alchemi_xr.ragged import open_dataset


@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("max_bytes", [1, 200, 2**20])
def test_iter_samples_gives_each_sample_whole(path, block, chunks, max_bytes):
    ds = open_dataset(path, chunks=chunks)
    seen = 0
    for i, sample in enumerate(ds.ragged.iter_samples(max_bytes=max_bytes)):
        a, b = block.atoms_ptr[i], block.atoms_ptr[i + 1]
        e, f = block.edges_ptr[i], block.edges_ptr[i + 1]
        np.testing.assert_array_equal(sample.positions, block["positions"][a:b])
        np.testing.assert_array_equal(sample.neighbor_list, block["neighbor_list"][e:f])
        assert float(sample.energy) == block["energy"][i, 0]
        np.testing.assert_array_equal(sample.cell, block["cell"][i])
        assert str(sample["name"].values) == f"sample-{i}"
        assert int(sample.num_atoms) == b - a
        # A field the sample lacks is not there, rather than its fill.
        assert ("dipole" in sample) == block.present["dipole"][i]
        assert "dipole_present" not in sample
        assert "sample" not in sample.dims
        assert sample.positions.attrs["units"] == "Å"
        seen += 1
    assert seen == 10


def test_iter_samples_of_nothing(path):
    assert list(open_dataset(path).ragged.head(0).ragged.iter_samples()) == []


def test_iter_samples_reads_by_blocks(path, block, monkeypatch):
    from alchemi_xr.store.reader import Snapshot

    calls = []
    original = Snapshot.read_rows
    monkeypatch.setattr(
        Snapshot,
        "read_rows",
        lambda self, name, a, b: (calls.append(name), original(self, name, a, b))[1],
    )
    ds = open_dataset(path)
    assert len(list(ds.ragged.iter_samples())) == 10
    assert calls.count("positions") == 1


def test_to_atoms(path, block):
    ds = open_dataset(path)
    for i in (0, 4, -2):
        at = i % 10
        a, b = block.atoms_ptr[at], block.atoms_ptr[at + 1]
        atoms = ds.ragged.to_atoms(i)
        np.testing.assert_array_equal(atoms.numbers, block["atomic_numbers"][a:b])
        np.testing.assert_array_equal(atoms.positions, block["positions"][a:b])
        np.testing.assert_array_equal(atoms.cell.array, block["cell"][at])
        np.testing.assert_array_equal(atoms.pbc, block["pbc"][at])
        np.testing.assert_array_equal(atoms.get_forces(), block["forces"][a:b])
        assert atoms.get_potential_energy() == block["energy"][at, 0]
        assert atoms.info["name"] == f"sample-{at}"
        assert atoms.info["dataset_index"] == block["dataset_index"][at, 0]
        np.testing.assert_array_equal(atoms.arrays["feature"], block["feature"][a:b])
        assert ("dipole" in atoms.calc.results) == block.present["dipole"][at]
    assert len(ds.ragged.to_atoms(1)) == 0


def test_to_atoms_of_stress_and_velocities(tmp_path, make_block):
    from ase.stress import voigt_6_to_full_3x3_stress

    from alchemi_xr.store.writer import StoreWriter

    block = make_block([2, 3])
    stress = np.arange(18.0).reshape(2, 3, 3)
    stress = (stress + stress.transpose(0, 2, 1)) / 2
    block = block.with_field("stress", stress, "system")
    block = block.with_field("velocities", np.ones((5, 3)), "atom")
    path = str(tmp_path / "md.zarr")
    StoreWriter(path).write(block)
    atoms = open_dataset(path).ragged.to_atoms(1)
    np.testing.assert_allclose(voigt_6_to_full_3x3_stress(atoms.get_stress()), stress[1])
    np.testing.assert_allclose(atoms.get_velocities(), 1.0)


def test_wrong_requests_are_named(path):
    ds = open_dataset(path)
    with pytest.raises(IndexRangeError):
        ds.ragged.to_atoms(10)
    with pytest.raises(FieldError, match="no 'positions'"):
        ds.drop_vars("positions").ragged.to_atoms(0)

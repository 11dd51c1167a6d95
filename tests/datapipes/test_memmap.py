"""Packed memmap folders through Dataset and DataLoader, beside the files themselves."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.datapipes import DataLoader, Dataset, PackedMemmapReader
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    IndexRangeError,
    SourceError,
    StoreClosedError,
    UnknownFieldError,
)

COUNTS = [3, 1, 0, 7, 2, 5, 4, 1, 6, 2, 3]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "p"
    path.mkdir()
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int64)
    atoms = int(offsets[-1])
    np.save(path / "offsets.npy", offsets)
    np.save(path / "n_atoms.npy", np.array(COUNTS, np.int32))
    rng.integers(1, 90, atoms).astype("<i4").tofile(path / "Z_pack.int32")
    rng.normal(size=(atoms, 3)).astype("<f4").tofile(path / "R_pack.f32")
    rng.normal(size=(atoms, 3)).astype("<f4").tofile(path / "F_pack.f32")
    np.arange(len(COUNTS), dtype="<f8").tofile(path / "E.f64")
    np.full(len(COUNTS), -1.0).tofile(path / "Qtot.f64")
    return path


@given(indices=st.lists(st.integers(-11, 10), min_size=1, max_size=9))
def test_a_batch_is_the_rows_of_the_files(packed: Path, indices: list[int]) -> None:
    reader = PackedMemmapReader(packed)
    batch = reader.read_batch(indices)
    at = [i % 11 for i in indices]
    forces = np.fromfile(packed / "F_pack.f32", "<f4").reshape(-1, 3)
    offsets = np.load(packed / "offsets.npy")
    want = np.concatenate([forces[offsets[i] : offsets[i + 1]] for i in at])
    np.testing.assert_array_equal(batch["forces"].numpy(), want)
    assert batch["energies"].squeeze(1).tolist() == at
    assert batch["energy"].dtype == torch.float64
    assert [int(n) for n in batch.num_nodes_list] == [COUNTS[i] for i in at]
    for position, (tensors, metadata) in zip(at, reader.read_many(indices), strict=True):
        assert tensors["energy"].shape == (1, 1)
        assert tensors["positions"].shape == (COUNTS[position], 3)
        assert metadata["index"] == position


def test_an_epoch_has_every_molecule_once(packed: Path) -> None:
    for shuffle in (True, "block", False):
        dataset = Dataset(PackedMemmapReader(packed), device="cpu", skip_validation=True)
        loader = DataLoader(dataset, batch_size=3, shuffle=shuffle)  # type: ignore[arg-type]
        found = [int(e) for batch in loader for e in batch["energy"].ravel()]
        assert sorted(found) == list(range(11))
        dataset.close()


def test_sizes_and_metadata(packed: Path) -> None:
    reader = PackedMemmapReader(packed)
    assert len(reader) == 11
    assert reader.field_names == ["atomic_numbers", "positions", "forces", "energy", "charge"]
    assert reader.field_levels["charge"] == "system"
    assert reader.sample_sizes()[0].tolist() == COUNTS
    assert reader.get_metadata(3) == (7, 0)
    assert reader.block_starts().tolist() == [0]
    dataset = Dataset(reader, device="cpu", skip_validation=True)
    limited = DataLoader(dataset, batch_size=None, max_atoms=8)
    assert max(b.num_nodes for b in limited) <= 8


def test_units_given_or_recorded(packed: Path, tmp_path: Path) -> None:
    plain = PackedMemmapReader(packed).read_batch([3, 5])
    units = {"energies": "kcal/mol", "forces": "kcal/mol/Å"}
    reader = PackedMemmapReader(packed, units=units)
    batch = reader.read_batch([3, 5])
    assert reader.units == {"energy": "kcal/mol", "forces": "kcal/mol/Å"}
    torch.testing.assert_close(batch["energy"], plain["energy"] * 0.0433641042)
    torch.testing.assert_close(batch["forces"], plain["forces"] * 0.0433641042)
    torch.testing.assert_close(batch["positions"], plain["positions"])
    for wrong in ({"stress": "GPa"}, {"atomic_numbers": "eV"}, {"energy": "Å"}):
        with pytest.raises(ConfigError):
            PackedMemmapReader(packed, units=wrong)
    other = tmp_path / "p"
    other.mkdir()
    for file in packed.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "units.json").write_text(json.dumps({"energy": "Ha"}))
    found = PackedMemmapReader(other).read_batch([3])["energy"]
    torch.testing.assert_close(found, torch.tensor([[3 * 27.211386245988]], dtype=torch.float64))
    for text in ('{"energy": 1}', "[1]", "{", '{"stress": "GPa"}'):
        (other / "units.json").write_text(text)
        with pytest.raises(SourceError, match=r"units\.json"):
            PackedMemmapReader(other)


def test_fields_and_closing(packed: Path) -> None:
    reader = PackedMemmapReader(packed, fields=["energies", "positions"])
    assert set(reader.field_names) == {"energy", "positions"}
    with pytest.raises(UnknownFieldError, match="force"):
        PackedMemmapReader(packed, fields=["forcs"])
    with pytest.raises(IndexRangeError):
        reader.read_block([11])
    with pytest.raises(FieldError, match="no sample"):
        reader.read_batch([])
    assert set(reader.read_block([1], ["positions"]).arrays) == {"positions"}
    reader.close()
    reader.close()
    assert reader.closed
    with pytest.raises(StoreClosedError):
        reader.read(0)
    reader.reopen()
    assert len(reader) == 11


def test_a_pickle_carries_no_data(packed: Path) -> None:
    reader = PackedMemmapReader(packed, units={"energy": "kcal/mol"})
    sent = pickle.dumps(reader)
    assert len(sent) < 1500
    again: Any = pickle.loads(sent)
    torch.testing.assert_close(
        again.read_batch([4, 2])["energy"], reader.read_batch([4, 2])["energy"]
    )
    reader.close()
    assert pickle.loads(pickle.dumps(reader)).closed

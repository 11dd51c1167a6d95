from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter
from alchemi_xr.errors import (
    FieldError,
    IndexRangeError,
    LevelError,
    NotAStoreError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
    UnknownFieldError,
)

# -- round trip ---------------------------------------------------------------------------------

FLOATS = [torch.float16, torch.float32, torch.float64]
INTS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


@st.composite
def ragged_samples(draw: st.DrawFn) -> list[AtomicData]:
    """Samples with one dtype a field, any of the optional fields missing in any of them."""
    dtype = draw(st.sampled_from(FLOATS))
    numbers = draw(st.sampled_from(INTS))
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    energy = draw(st.sampled_from(FLOATS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def floats(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor(rng.normal(size=shape)).to(kind)

    samples = []
    for _ in range(draw(st.integers(1, 6))):
        atoms = draw(st.integers(0, 5))
        edges = draw(st.sampled_from([0, 0, 1, 7])) if atoms else 0
        optional: dict[str, Any] = {
            "forces": floats(atoms, 3),
            "velocities": floats(atoms, 3),
            "charges": floats(atoms),
            "node_attrs": floats(atoms, 2),
            "energy": floats(1, 1, kind=energy),
            "cell": floats(1, 3, 3),
            "pbc": torch.tensor(rng.integers(0, 2, (1, 3)), dtype=torch.bool),
            "dipole": floats(1, 3),
        }
        pairs: dict[str, Any] = {
            "neighbor_list": torch.tensor(rng.integers(0, max(atoms, 1), (edges, 2))).to(index),
            "shifts": floats(edges, 3),
        }
        chosen = {name: value for name, value in optional.items() if draw(st.booleans())}
        if draw(st.booleans()):
            chosen.update(pairs)
        sample = AtomicData(
            positions=floats(atoms, 3),
            atomic_numbers=torch.tensor(rng.integers(1, 100, atoms)).to(numbers),
            **chosen,
        )
        if draw(st.booleans()):
            sample.add_node_property("my_atom", torch.tensor(rng.integers(0, 99, (atoms, 2))))
            sample.add_system_property("my_system", floats(1, 4))
        samples.append(sample)
    return samples


@given(samples=ragged_samples(), split=st.integers(0, 6), seed=st.integers(0, 99))
def test_what_is_written_is_what_is_read(
    samples: list[AtomicData], split: int, seed: int, assert_same: Any
) -> None:
    """write (and append) → read → Batch → AtomicData is the identity."""
    store: dict[str, Any] = {}
    writer = AtomicDataZarrWriter(store)
    split = min(split, len(samples) - 1)
    # float16 next to float32 in one field would be promoted; a draw has one dtype a field.
    if split:
        writer.write(samples[:split])
        writer.append(samples[split:])
    else:
        writer.write(samples)
    with AtomicDataZarrReader(store) as reader:
        order = np.random.default_rng(seed).integers(0, len(samples), 2 * len(samples)).tolist()
        batch = reader.read_batch(order)
        for place, index in enumerate(order):
            expected = given_fields(samples[index])
            found = given_fields(batch.get_data(place))
            compare(found, expected)
            raw, _ = reader[index]
            compare(dict(raw), expected)


DEFAULTS = ("atomic_masses", "atom_categories", "velocities")


def given_fields(data: AtomicData) -> dict[str, torch.Tensor]:
    return data.to_dict()


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    # Velocities that one sample has the others have too, as zeros: that is the field's default.
    extra = set(found) - set(expected)
    assert extra <= set(DEFAULTS), extra
    for name in extra:
        assert not torch.isnan(found[name].double()).any()
        assert name != "velocities" or not found[name].any()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


# -- writer -------------------------------------------------------------------------------------


def test_one_a_list_and_a_batch(tmp_path: Path, make_samples: Any) -> None:
    samples = make_samples(4)
    for number, data in enumerate((samples[0], samples, Batch.from_data_list(samples))):
        path = tmp_path / f"{number}.zarr"
        AtomicDataZarrWriter(str(path)).write(data)
        with AtomicDataZarrReader(path) as reader:
            assert len(reader) == (1 if number == 0 else 4)
            assert torch.equal(
                reader[-1][0]["positions"], (samples[0] if number == 0 else samples[-1]).positions
            )
        AtomicDataZarrWriter(path).append(data)
        with AtomicDataZarrReader(zarr.storage.LocalStore(path)) as reader:
            assert len(reader) == (2 if number == 0 else 8)


def test_nothing_to_write_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    with pytest.raises(ValueError, match="Cannot create batch from empty data list"):
        writer.write([])
    with pytest.raises(ValueError, match="no systems"):
        writer.write(Batch())
    with pytest.raises(TypeError, match="item 1"):
        writer.write([AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1]), 5])  # type: ignore[list-item]
    assert not (tmp_path / "s.zarr").exists()


def test_an_existing_path_is_refused(store: Path, tmp_path: Path, make_samples: Any) -> None:
    with pytest.raises(FileExistsError, match="already exists"):
        AtomicDataZarrWriter(store).write(make_samples(1))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(StoreExistsError, match="already exists"):
        AtomicDataZarrWriter(empty).write(make_samples(1))
    AtomicDataZarrWriter(store).write(make_samples(2), overwrite=True)
    assert len(AtomicDataZarrReader(store)) == 2


def test_append_needs_a_store(tmp_path: Path, make_samples: Any) -> None:
    with pytest.raises(FileNotFoundError):
        AtomicDataZarrWriter(tmp_path / "none.zarr").append(make_samples(1))


def test_append_of_other_fields_loses_and_shifts_nothing(
    store: Path, make_samples: Any, assert_same: Any
) -> None:
    more = make_samples(3, seed=9, edges=False)
    for sample in more:
        sample.energy = None
        sample.dipole = torch.ones(1, 3)
    old = make_samples(23)
    AtomicDataZarrWriter(store).append(more)
    with AtomicDataZarrReader(store) as reader:
        for index, expected in enumerate(old):
            assert_same(reader.read_batch([index]).get_data(0), expected)
            assert "dipole" not in reader[index][0]
        batch = reader.read_batch([22, 23])
        assert batch["energy"].isnan().flatten().tolist() == [False, True]
        assert batch.has("dipole").tolist() == [False, True]
        assert "energy" not in reader[24][0]
        assert reader[25][0]["dipole"].tolist() == [[1.0, 1.0, 1.0]]


def test_custom_fields(store: Path) -> None:
    reader = AtomicDataZarrReader(store)
    atoms = reader.snapshot.num_atoms
    writer = AtomicDataZarrWriter(store)
    feature = torch.arange(atoms * 2, dtype=torch.float32).reshape(atoms, 2)
    writer.add_custom("my_feature", feature, level="atom")
    writer.add_custom("weight", np.arange(23.0), level="system")
    with pytest.raises(ValueError, match="does not match expected size"):
        writer.add_custom("short", feature[:-1], level="node")
    with pytest.raises(LevelError, match="Invalid level"):
        writer.add_custom("x", feature, level="molecule")
    with pytest.raises(ValueError):
        writer.add_custom("my_feature", feature, level="atom")
    with pytest.raises(ValueError):
        writer.add_custom("positions", feature, level="atom")
    assert "my_feature" not in reader.field_names
    reader.refresh()
    start = int(reader.snapshot.atoms_ptr[4])
    data, _ = reader[4]
    assert torch.equal(data["my_feature"], feature[start : start + len(data["positions"])])
    assert data["weight"].tolist() == [4.0]
    batch = reader.read_batch([4, 2])
    assert batch.level_of("my_feature") == "atom"
    assert batch["weight"].tolist() == [4.0, 2.0]
    assert reader.field_levels["my_feature"] == "atom"


def test_delete_is_of_physical_positions_and_undone(store: Path) -> None:
    writer = AtomicDataZarrWriter(store)
    writer.delete([0, 2])
    writer.delete(torch.tensor([3]))
    with AtomicDataZarrReader(store) as reader:
        assert (len(reader), reader.num_samples) == (20, 23)
        assert reader[0][0]["energy"].item() == 1.0
        assert reader[1][1] == {"index": 1, "source_file": str(store), "physical_index": "4"}
        assert reader[-1][0]["energy"].item() == 22.0
    writer.undelete([2])
    assert len(AtomicDataZarrReader(store)) == 21
    with pytest.raises(IndexError):
        writer.delete([23])
    writer.defragment()
    with AtomicDataZarrReader(store) as reader:
        assert (len(reader), reader.num_samples) == (21, 21)
        found = [reader[i][0]["energy"].item() for i in range(21)]
        assert found == [i for i in range(23) if i not in (0, 3)]


# -- reader -------------------------------------------------------------------------------------


def test_samples_as_raw_tensors(store: Path, make_samples: Any) -> None:
    with AtomicDataZarrReader(store) as reader:
        data, metadata = reader[5]
        expected = make_samples(23)[5]
        assert data["energies"].shape == (1, 1)
        assert data["cell"].shape == (1, 3, 3)
        assert torch.equal(data["neighbor_list"], expected.neighbor_list)
        assert metadata == {"index": 5, "source_file": str(store), "physical_index": "5"}
        assert [m["index"] for _, m in reader.read_many([3, -1, 3])] == [3, 22, 3]
        assert set(reader.field_names) == set(data)
        assert reader.get_metadata(5) == (expected.num_nodes, expected.num_edges)
        for wrong in (23, -24):
            with pytest.raises(IndexRangeError, match="out of range"):
                reader[wrong]
    assert "index" not in AtomicDataZarrReader(store, include_index_in_metadata=False)[0][1]


def test_batches_of_one_read_are_windows_of_their_own(store: Path) -> None:
    with AtomicDataZarrReader(store) as reader:
        first, second = reader.read_batches([[3, 1], [3]])
        first["positions"].zero_()
        assert float(second["positions"].abs().min()) > 0
        assert torch.equal(second["positions"], reader[3][0]["positions"])
        assert reader.read_batches([]) == []
        with pytest.raises(FieldError, match="no sample to read"):
            reader.read_batches([[0], []])


def test_only_some_fields(store: Path) -> None:
    with AtomicDataZarrReader(store, fields=["positions", "energies"]) as reader:
        assert reader.field_names == ["positions", "energy"]
        assert set(reader[0][0]) == {"positions", "energy"}
        assert set(reader.read_batch([0], fields=["energy"]).to_dict()) == {"energy"}
    with pytest.raises(UnknownFieldError, match="'forces'"):
        AtomicDataZarrReader(store, fields=["force_s"])


def test_a_reader_keeps_its_generation_until_refresh(store: Path, make_samples: Any) -> None:
    reader = AtomicDataZarrReader(store)
    writer = AtomicDataZarrWriter(store)
    before = reader[22][0]["positions"].clone()
    writer.append(make_samples(2))
    writer.delete([0])
    assert len(reader) == 23
    assert torch.equal(reader[22][0]["positions"], before)
    writer.defragment()
    assert torch.equal(reader[22][0]["positions"], before)
    reader.refresh()
    assert len(reader) == 24
    assert reader[0][0]["energy"].item() == 1.0
    reader.close()


def test_a_closed_reader_says_so(store: Path) -> None:
    reader = AtomicDataZarrReader(store)
    reader.close()
    reader.close()
    for call in (lambda: reader[0], lambda: reader.read_batch([0]), lambda: reader.get_metadata(0)):
        with pytest.raises(StoreClosedError, match="Cannot read from a closed reader"):
            call()
    with pytest.raises(RuntimeError, match="Cannot refresh a closed reader"):
        reader.refresh()


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        AtomicDataZarrReader(tmp_path / "none.zarr")
    zarr.create_group(tmp_path / "other.zarr", zarr_format=3)
    with pytest.raises(NotAStoreError):
        AtomicDataZarrReader(tmp_path / "other.zarr")


def test_what_the_store_holds(store: Path) -> None:
    with AtomicDataZarrReader(store) as reader:
        sizes = reader.level_sizes()
        assert sizes["system"] == reader.num_samples == 23
        assert sizes["atom"] == sum(reader.get_metadata(i)[0] for i in range(23))
        assert reader.schema()["positions"] == {
            "level": "atom",
            "dtype": "float32",
            "shape": (3,),
            "group": "core",
            "unit": "Å",
        }
        assert reader.field_array("positions").shape[0] >= sizes["atom"]
        reader.check_integrity()


def test_text_is_no_tensor(store: Path) -> None:
    from alchemi_xr.store import StoreWriter

    names = np.array([f"m{i}" for i in range(23)], dtype=object)
    StoreWriter(store).add_custom("name", names, "system")
    with AtomicDataZarrReader(store) as reader:
        assert "name" not in reader.field_names
        assert "name" not in reader[0][0]
        assert "name" not in reader.read_batch([0, 1])


@pytest.mark.compat
@pytest.mark.parametrize("name", ["ragged", "soft_deleted", "sharded", "appended"])
def test_stores_of_the_toolkit(shared: Path, name: str) -> None:
    """Values that went in come out, whoever wrote the store."""
    folder = shared / "fixtures" / "toolkit_stores"
    expected = json.loads((folder / "expected.json").read_text())["stores"][name]["samples"]
    with AtomicDataZarrReader(folder / f"{name}.zarr") as reader:
        assert len(reader) == len(expected)
        batch = reader.read_batch(range(len(reader)))
        for index, fields in enumerate(expected):
            raw, _ = reader[index]
            data = batch.get_data(index)
            for field, facts in fields.items():
                for found in (raw[field], data[field]):
                    assert list(found.shape) == facts["shape"], field
                    assert str(found.dtype) == f"torch.{facts['dtype']}", field
                    assert found.double().sum().item() == pytest.approx(facts["sum"], abs=1e-4)
                    if len(found):
                        row = found[0].double().flatten().tolist()
                        assert row == pytest.approx(facts["first_row"], abs=1e-5), field

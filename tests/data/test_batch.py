"""Batch: round trips that are the identity, and every way to choose and set."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.data import AtomicData, Batch, Block
from alchemi_xr.errors import FieldError, IndexRangeError, LevelError, UnknownFieldError
from alchemi_xr.testing.reference import (
    assert_same_samples,
    block_of_samples,
    local_edges,
    samples_of,
)
from alchemi_xr.testing.strategies import DTYPES, batches, blocks, random_rows, selections


def sample(n=2, *, edges=0, seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    data = AtomicData(
        atomic_numbers=torch.arange(1, n + 1),
        positions=torch.randn(n, 3, generator=generator),
        **fields,
    )
    if edges:
        pairs = torch.randint(0, n, (edges, 2), generator=generator)
        data.neighbor_list = pairs
    return data


def assert_same_block(found: Block, expected: Block):
    assert found.names == expected.names
    assert found.levels == expected.levels
    np.testing.assert_array_equal(found.atoms_ptr, expected.atoms_ptr)
    np.testing.assert_array_equal(found.edges_ptr, expected.edges_ptr)
    for name in expected.names:
        assert found.arrays[name].dtype == expected.arrays[name].dtype, name
        np.testing.assert_array_equal(found.arrays[name], expected.arrays[name], err_msg=name)
        np.testing.assert_array_equal(found.has(name), expected.has(name), err_msg=name)
    assert set(found.present) == set(expected.present)


# -- the identity ---------------------------------------------------------------------------


@settings(max_examples=100)
@given(block=blocks())
def test_block_batch_data_batch_block_is_the_identity(block):
    block.units["positions"] = "Bohr"
    batch = Batch.from_block(block)
    assert_same_block(batch.to_block(), block)
    again = Batch.from_data_list(batch.to_data_list())
    assert_same_block(again.to_block().validate(), block)
    assert again.to_block().units == block.units
    one_by_one = Batch.from_data_list([batch.get_data(i) for i in range(len(batch))])
    assert_same_block(one_by_one.to_block(), block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", ["atom", "edge", "system"])
def test_every_dtype_at_every_level(dtype, level):
    rng = np.random.default_rng(0)
    block = Block(
        np.array([0, 1, 1, 4]),
        np.array([0, 0, 0, 2]),
        {
            "atomic_numbers": np.array([1, 2, 3, 4]),
            "positions": rng.normal(size=(4, 3)),
            "neighbor_list": np.array([[0, 1], [2, 0]]),
        },
        {"atomic_numbers": "atom", "positions": "atom", "neighbor_list": "edge"},
    )
    rows = random_rows(rng, (block.rows(level), 2), dtype)
    block = block.with_field("x", rows, level, np.array([True, False, True]))
    block.fill_missing()
    batch = Batch.from_data_list(Batch.from_block(block).to_data_list())
    assert_same_block(batch.to_block(), block)
    assert batch.has("x").tolist() == [True, False, True]
    assert batch.get_data(1).level_of("positions") == "atom"
    assert "x" not in batch.get_data(1)


def test_text_is_left_out_and_unsigned_is_widened():
    block = Block(
        np.array([0, 1]),
        np.array([0, 0]),
        {
            "atomic_numbers": np.array([300], np.uint16),
            "positions": np.zeros((1, 3)),
            "label": np.array(["water"], object),
        },
        {"atomic_numbers": "atom", "positions": "atom", "label": "system"},
    )
    batch = Batch.from_block(block)
    assert "label" not in batch
    assert batch.atomic_numbers.dtype == torch.int32
    assert batch.atomic_numbers.tolist() == [300]


def test_from_block_shares_memory_unless_it_is_read_only():
    positions = np.zeros((1, 3))
    block = Block(
        np.array([0, 1]),
        np.array([0, 0]),
        {"atomic_numbers": np.array([1]), "positions": positions},
        {"atomic_numbers": "atom", "positions": "atom"},
    )
    Batch.from_block(block).positions[0, 0] = 5.0
    assert positions[0, 0] == 5.0
    positions.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Batch.from_block(block).positions[0, 0] = 7.0
    assert positions[0, 0] == 5.0
    swapped = Block(
        block.atoms_ptr,
        block.edges_ptr,
        {**block.arrays, "positions": np.ones((1, 3), dtype=">f8")},
        block.levels,
    )
    assert Batch.from_block(swapped).positions.sum() == 3.0


def test_fields_with_defaults_have_no_holes():
    moving = sample(2, velocities=torch.ones(2, 3), atomic_masses=torch.full((2,), 5.0))
    batch = Batch.from_data_list([moving, sample(1)])
    assert batch.velocities.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]
    assert batch.atomic_masses.tolist() == pytest.approx([5.0, 5.0, 1.008])
    assert batch.has("velocities").all()
    block = Batch.from_data_list([moving, moving]).to_block()
    block.present["velocities"] = np.array([True, False])
    block.fill_missing()
    again = Batch.from_block(block)
    assert again.velocities.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert again.has("velocities").all()


# -- making ---------------------------------------------------------------------------------


@given(block=blocks(min_samples=1))
def test_join_equals_the_loop(block):
    batch = Batch.from_data_list(Batch.from_block(block).to_data_list())
    expected = block_of_samples(samples_of(block), block.levels, block.arrays)
    assert_same_block(batch.to_block(), expected)
    pairs = batch.to_block().arrays.get("neighbor_list")
    if pairs is not None:
        mine = local_edges(
            batch.neighbor_list.numpy(), batch.atoms_ptr.numpy(), batch.edges_ptr.numpy()
        )
        np.testing.assert_array_equal(np.concatenate([pairs[:0], *mine]), pairs)


def test_union_of_fields():
    batch = Batch.from_data_list([sample(1), sample(2, energy=1.0), sample(3, edges=2)])
    assert batch.has("energy").tolist() == [False, True, False]
    assert batch.present["energy"].tolist() == [False, True, False]
    assert batch.energy[1].item() == 1.0
    assert batch.energy[[0, 2]].isnan().all()
    assert batch.has("positions").all()
    assert not batch.has("forces").any()
    assert batch.get_data(0).energy is None
    assert batch.num_edges_list == [0, 0, 2]


def test_what_cannot_be_joined():
    with pytest.raises(FieldError, match="empty data list"):
        Batch.from_data_list([])
    with pytest.raises(FieldError, match="empty data list"):
        Batch.from_raw_dicts([])
    first, second = sample(1), sample(1)
    first.node_attrs, second.node_attrs = torch.ones(1, 3), torch.ones(1, 4)
    with pytest.raises(FieldError, match=r"'node_attrs' have other shapes in samples 0 and 1"):
        Batch.from_data_list([first, second])
    first, second = sample(1), sample(1)
    first.add_node_property("x", torch.ones(1))
    second.add_system_property("x", torch.ones(1))
    with pytest.raises(FieldError, match="'x' has two levels"):
        Batch.from_data_list([first, second])


def test_exclude_keys():
    batch = Batch.from_data_list([sample(1, energy=1.0)], exclude_keys=["energies"])
    assert "energy" not in batch


def test_raw_dicts():
    raw = {
        "positions": torch.zeros(2, 3),
        "atomic_numbers": torch.tensor([1, 2]),
        "energies": torch.tensor([[-1e5]], dtype=torch.float64),
        "cell": torch.eye(3),
        "tag": torch.tensor([4]),
        "vector": torch.ones(1, 5),
        "per_atom": torch.ones(2),
        "name": "water",
    }
    batch = Batch.from_raw_dicts([raw, raw], field_levels={"per_atom": "node"})
    assert batch.energy.dtype == torch.float64
    assert batch.cell.shape == (2, 3, 3)
    assert batch.tag.shape == (2,)
    assert batch.vector.shape == (2, 5)
    assert batch.level_of("per_atom") == "atom"
    assert batch.level_of("vector") == "system"
    assert "name" not in batch
    with pytest.raises(FieldError, match="sample 0 has no 'atomic_numbers'"):
        Batch.from_raw_dicts([{"positions": torch.zeros(1, 3)}])


def test_flat_constructor():
    assert len(Batch(device="cpu")) == 0
    batch = Batch(
        fields={
            "positions": torch.zeros(3, 3),
            "atomic_numbers": torch.ones(3, dtype=torch.int64),
            "energies": torch.zeros(2),
            "x": torch.zeros(3),
        },
        levels={"x": "node"},
        atoms_ptr=[0, 1, 3],
    )
    assert batch.num_nodes_list == [1, 2]
    assert batch.energy.shape == (2, 1)
    with pytest.raises(FieldError, match="Length mismatch"):
        Batch(fields={"positions": torch.zeros(2, 3)}, atoms_ptr=[0, 1])


# -- what it is -----------------------------------------------------------------------------


def test_facts():
    batch = Batch.from_data_list([sample(2, edges=3), sample(3), sample(1, edges=1)])
    assert len(batch) == batch.num_graphs == batch.batch_size == batch.system_capacity == 3
    assert batch.num_nodes == 6
    assert batch.num_edges == 4
    assert batch.max_num_nodes == 3
    assert batch.num_nodes_list == [2, 3, 1]
    assert batch.num_edges_list == [3, 0, 1]
    assert batch.num_nodes_per_graph.tolist() == [2, 3, 1]
    assert batch.num_edges_per_graph.tolist() == [3, 0, 1]
    assert batch.batch_ptr.dtype == batch.batch_idx.dtype == torch.int32
    assert batch.atoms_ptr.dtype == batch.edges_ptr.dtype == torch.int64
    assert batch.batch_ptr.tolist() == batch.atoms_ptr.tolist() == [0, 2, 5, 6]
    assert batch.batch_idx.tolist() == batch.atom_system.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.edge_system.tolist() == [0, 0, 0, 2]
    assert Batch.from_data_list([sample(2)]).num_edges_list == []
    assert batch.keys["node"] == {"atomic_numbers", "positions"}
    assert batch.keys["edge"] == {"neighbor_list"}
    batch.status = torch.zeros(3, 1, dtype=torch.int64)
    assert batch.keys["system"] == {"status"}


def test_edge_ptr_is_csr_over_sources():
    data = sample(3)
    data.neighbor_list = torch.tensor([[0, 1], [0, 2], [2, 0]])
    batch = Batch.from_data_list([data, data])
    assert batch.edge_ptr.tolist() == [0, 2, 2, 3, 5, 5, 6]
    assert batch.edge_ptr.dtype == torch.int32
    assert Batch.from_data_list([sample(2)]).edge_ptr.tolist() == [0, 0, 0]


def test_field_access():
    batch = Batch.from_data_list([sample(2, energy=1.0)])
    assert batch["energies"] is batch.energy
    assert "energies" in batch
    assert "velocities" in batch
    assert "nothing" not in batch
    assert 3 not in batch
    assert not hasattr(batch, "cell")
    assert getattr(batch, "cell", None) is None
    with pytest.raises(KeyError, match="no field 'cel'"):
        batch["cel"]
    with pytest.raises(AttributeError, match="Nearest: 'energy'"):
        _ = batch.enrgy
    with pytest.raises(UnknownFieldError) as caught:
        del batch["cell"]
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert "no field 'cell'" in str(again)
    del batch["energies"]
    assert "energy" not in batch
    assert [name for name, _ in batch] == ["atomic_numbers", "positions"]
    assert list(batch.to_dict()) == list(batch.model_dump()) == ["atomic_numbers", "positions"]
    batch.velocities.add_(1.0)
    assert batch.velocities.sum() == 6.0
    assert "velocities" in batch.keys["node"]


# -- setting --------------------------------------------------------------------------------


def test_set_routes_by_table_then_record_then_length():
    batch = Batch.from_data_list([sample(2, edges=3), sample(1)])
    batch.forces = torch.zeros(3, 3)
    assert batch.level_of("forces") == "atom"
    batch.momenta = torch.zeros(3, 3)
    assert batch.level_of("momenta") == "atom"
    batch["energies"] = torch.tensor([1.0, 2.0])
    assert batch.energy.tolist() == [[1.0], [2.0]]
    batch.mine = torch.zeros(2, 4)
    assert batch.level_of("mine") == "system"
    batch.other = torch.zeros(3)
    assert batch.level_of("other") == "atom"
    batch.set("edge_weight", torch.zeros(3), level="edge")
    assert batch.level_of("edge_weight") == "edge"
    batch.edge_weight = torch.ones(3)
    assert batch.level_of("edge_weight") == "edge"
    batch.set("cell", np.zeros((2, 3, 3)))
    assert batch.cell.dtype == torch.float64
    batch.note = "plain"
    assert batch.note == "plain"
    assert "note" not in batch


def test_ambiguous_lengths_go_to_the_system():
    batch = Batch.from_data_list([sample(1), sample(1)])
    batch.x = torch.zeros(2)
    assert batch.level_of("x") == "system"


def test_set_refuses():
    batch = Batch.from_data_list([sample(2), sample(1)])
    with pytest.raises(FieldError, match="Length mismatch: 5 vs 3"):
        batch.forces = torch.zeros(5, 3)
    with pytest.raises(FieldError, match="fits no level"):
        batch.mine = torch.zeros(7)
    with pytest.raises(FieldError, match="wrong shape"):
        batch.forces = torch.zeros(3, 2)
    with pytest.raises(LevelError, match="Invalid level 'bond'"):
        batch.set("x", torch.zeros(2), level="bond")
    with pytest.raises(FieldError, match="is a member of Batch"):
        batch["to"] = torch.zeros(2)
    with pytest.raises(AttributeError):
        batch.num_graphs = 3


def test_set_clears_or_sets_presence():
    batch = Batch.from_data_list([sample(1), sample(1, energy=1.0)])
    batch.energy = torch.zeros(2, 1)
    assert batch.has("energy").all()
    assert batch.present == {}
    batch.set("energy", torch.zeros(2, 1), present=torch.tensor([True, False]))
    assert batch.has("energy").tolist() == [True, False]


def test_set_edges():
    batch = Batch.from_data_list([sample(2, edges=3), sample(2, edges=1)])
    batch.set("w", torch.zeros(4), level="edge")
    new = torch.tensor([[0, 1], [2, 3], [3, 2]])
    with pytest.raises(FieldError, match="set_edges"):
        batch.neighbor_list = new
    batch.set_edges(new, shifts=torch.zeros(3, 3))
    assert batch.num_edges_list == [1, 2]
    assert "w" not in batch
    assert batch.get_data(1).neighbor_list.tolist() == [[0, 1], [1, 0]]
    batch.set_edges(new[:0], edges_ptr=torch.tensor([0, 0, 0]))
    assert batch.num_edges_list == [0, 0]
    batch.neighbor_list = new
    assert batch.edges_ptr.tolist() == [0, 1, 3]
    with pytest.raises(FieldError, match="stand together"):
        batch.set_edges(new.flip(0))


def test_edges_of_a_batch_with_empty_systems():
    batch = Batch.from_data_list([sample(0), sample(2), sample(0), sample(1)])
    batch.neighbor_list = torch.tensor([[0, 1], [1, 0], [2, 2]])
    assert batch.num_edges_list == [0, 2, 0, 1]


def test_add_key():
    batch = Batch.from_data_list([sample(2, edges=1), sample(1)])
    batch.add_key("a", [torch.zeros(2), torch.ones(1)])
    assert batch.a.tolist() == [0, 0, 1]
    batch.add_key("s", [torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 4.0])], level="system")
    assert batch.s.tolist() == [[1, 2], [3, 4]]
    batch.add_key("n", [1.0, 2.0], level="graph")
    assert batch.n.tolist() == [1, 2]
    batch.add_key("e", [torch.zeros(1), torch.zeros(0)], level="edges")
    assert batch.level_of("e") == "edge"
    with pytest.raises(FieldError, match="already exists"):
        batch.add_key("a", [torch.zeros(2), torch.ones(1)])
    batch.add_key("a", [torch.ones(2), torch.ones(1)], overwrite=True)
    assert batch.a.sum() == 3
    with pytest.raises(FieldError, match="one tensor for each system"):
        batch.add_key("b", [torch.zeros(2)])
    with pytest.raises(FieldError, match="system 1 has the wrong number of rows"):
        batch.add_key("b", [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match="Group 'edges' not found"):
        Batch.from_data_list([sample(1)]).add_key("b", [torch.zeros(0)], level="edge")


# -- choosing -------------------------------------------------------------------------------


@settings(max_examples=100)
@given(batch=batches(), data=st.data())
def test_index_select_equals_the_loop(batch, data):
    selection, wanted = data.draw(selections(len(batch)))
    before = samples_of(batch.to_block())
    made = batch.index_select(selection)
    assert_same_samples(samples_of(made.to_block().validate()), [before[i] for i in wanted])
    assert_same_samples(samples_of(batch[selection].to_block()), [before[i] for i in wanted])
    as_tensor = torch.tensor(wanted)
    assert_same_samples(samples_of(batch[as_tensor].to_block()), [before[i] for i in wanted])


def test_index_errors():
    batch = Batch.from_data_list([sample(1), sample(2)])
    assert batch[-1].num_nodes == 2
    assert batch.index_select(-1).num_graphs == 1
    for empty in ([], torch.zeros(2, dtype=torch.bool), slice(0, 0)):
        with pytest.raises(IndexError, match="Index is empty"):
            batch.index_select(empty)
    with pytest.raises(IndexError, match="must be integer or bool"):
        batch.index_select(torch.tensor([0.0]))
    with pytest.raises(IndexError, match="Unsupported index type"):
        batch.index_select({"a": 1})
    for far in (2, -3):
        with pytest.raises(IndexError, match="out of range"):
            batch.get_data(far)
        with pytest.raises(IndexError, match="out of range"):
            batch[[far]]
    with pytest.raises(IndexRangeError, match="one entry per sample"):
        batch[torch.tensor([True])]


def test_results_do_not_share_memory():
    batch = Batch.from_data_list([sample(1), sample(2)])
    before = batch.positions.clone()
    for made in (batch[0], batch.to_data_list()[0], batch[:1], batch.clone(), batch.to("cpu")):
        made.positions += 100.0
    assert torch.equal(batch.positions, before)


@given(batch=batches())
def test_copies(batch):
    before = samples_of(batch.to_block())
    for made in (batch.clone(), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert_same_samples(samples_of(made.to_block()), before)
        assert made.device == batch.device
        made.positions.fill_(7.0)
    assert_same_samples(samples_of(batch.to_block()), before)


def test_to_honours_dtype():
    batch = Batch.from_data_list([sample(2, energy=1.0, edges=1)])
    batch.note = "kept"
    double = batch.to("cpu", dtype=torch.float64)
    assert double.positions.dtype == torch.float64
    assert double.atomic_numbers.dtype == torch.int64
    assert double.note == "kept"
    assert batch.positions.dtype == torch.float32


def test_in_place_ones_return_the_batch():
    batch = Batch.from_data_list([sample(2)])
    batch.set("positions", torch.zeros(3, 2).T)
    assert batch.contiguous() is batch
    assert batch.positions.is_contiguous()
    assert batch.pin_memory() is batch
    assert "positions=[2, 3]" in repr(batch)


@pytest.mark.gpu
@given(batch=batches(), data=st.data())
def test_cuda_equals_cpu(batch, data):
    selection, wanted = data.draw(selections(len(batch)))
    before = samples_of(batch.to_block())
    there = batch.cuda()
    assert there.device.type == "cuda"
    assert_same_samples(
        samples_of(there.index_select(selection).to_block()), [before[i] for i in wanted]
    )
    there.append(batch.cuda())
    assert_same_samples(samples_of(there.cpu().to_block()), before + before)

"""Append, put, defrag, trim, zero: every field and dtype, against slow loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.testing.reference import (
    assert_same_samples,
    block_of_samples,
    greedy_fit,
    samples_of,
)
from alchemi_xr.testing.strategies import batches

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def sample(n=2, *, edges=0, value=1.0, **fields):
    data = AtomicData(
        atomic_numbers=torch.arange(1, n + 1), positions=torch.full((n, 3), value), **fields
    )
    if edges:
        data.neighbor_list = torch.arange(2 * edges).reshape(edges, 2) % n
    return data


def masks(num):
    return st.lists(st.booleans(), min_size=num, max_size=num)


def carried(batch):
    return samples_of(batch.to_block().validate())


# -- append ---------------------------------------------------------------------------------


@settings(max_examples=100)
@given(first=batches(), second=batches())
def test_append_is_the_union(first, second):
    mine, theirs = first.to_block(), second.to_block()
    shared = set(mine.names) & set(theirs.names)
    levels = {**theirs.levels, **mine.levels}
    models = {**theirs.arrays, **mine.arrays}
    added = [
        {k: v.astype(mine.arrays[k].dtype) if k in shared else v for k, v in s.items()}
        for s in samples_of(theirs)
    ]
    expected = block_of_samples(samples_of(mine) + added, levels, models)
    before = samples_of(theirs)
    # An edge of a sample that has no edge field is not told by the loop's counts.
    first.append(second)
    assert_same_samples(carried(first), samples_of(expected))
    for name in levels:
        np.testing.assert_array_equal(first.has(name).numpy(), expected.has(name))
    assert_same_samples(samples_of(second.to_block()), before)


def test_append_fills_both_directions():
    batch = Batch.from_data_list([sample(1, charges=torch.ones(1))])
    batch.append(Batch.from_data_list([sample(2, energy=3.0, edges=1)]))
    assert batch.charges[0] == 1
    assert batch.charges[1:].isnan().all()
    assert batch.has("charges").tolist() == [True, False]
    assert batch.energy[0].isnan()
    assert batch.energy[1] == 3
    assert batch.num_edges_list == [0, 1]
    assert batch.neighbor_list.tolist() == [[1, 2]]
    assert batch.get_data(1).charges is None


def test_append_options():
    batch = Batch.from_data_list([sample(1, energy=1.0)])
    with pytest.raises(FieldError, match="the appended batch has no field 'energy'"):
        batch.append(Batch.from_data_list([sample(1)]), missing_fields="raise")
    assert batch.num_graphs == 1
    batch.append(
        Batch.from_data_list([sample(1)]),
        missing_fields="raise",
        field_defaults={"energies": 7.0},
    )
    assert batch.energy.tolist() == [[1.0], [7.0]]
    assert batch.has("energy").all()
    with pytest.raises(ConfigError, match="missing_fields='drop'"):
        batch.append(Batch.from_data_list([sample(1)]), missing_fields="drop")


def test_append_and_put_leave_the_other_batch_alone():
    """Velocities that only the receiver has are made for the result, not in the source."""
    batch, other = (Batch.from_data_list([sample(n)]) for n in (1, 2))
    buffer = Batch.empty(num_systems=2, num_nodes=4, num_edges=0, template=batch)
    batch.velocities = torch.ones(1, 3)
    buffer.velocities = torch.zeros(4, 3)
    names = [name for name, _ in other]
    batch.append(other)
    buffer.put(other, [True])
    assert [name for name, _ in other] == names
    assert batch.velocities.tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert not batch.present


def test_append_dtype_of_the_receiver_wins():
    batch = Batch.from_data_list([sample(1)])
    double = Batch.from_data_list([sample(1)]).to(dtype=torch.float64)
    batch.append(double)
    assert batch.positions.dtype == torch.float32
    assert double.positions.dtype == torch.float64


def test_append_refuses():
    batch = Batch.from_data_list([sample(1)])
    with pytest.raises(ValueError, match="shares storage"):
        batch.append(batch)
    other = Batch.from_data_list([sample(1)])
    other.positions = batch.positions
    with pytest.raises(ValueError, match="shares storage"):
        batch.append(other)
    batch.set("x", torch.zeros(1, 2), level="atom")
    other = Batch.from_data_list([sample(1)])
    other.set("x", torch.zeros(1, 2), level="system")
    with pytest.raises(FieldError, match="'x' has two levels"):
        batch.append(other)
    other.set("x", torch.zeros(1, 3), level="atom")
    with pytest.raises(FieldError, match="'x' have two shapes"):
        batch.append(other)
    with pytest.raises(ValueError, match="No data provided"):
        batch.append_data([])


def test_append_data_and_self_clone():
    batch = Batch.from_data_list([sample(2, edges=1)])
    batch.append_data([sample(1, energy=1.0)], exclude_keys=["energy"])
    assert "energy" not in batch
    batch.append(batch.clone())
    assert batch.num_nodes_list == [2, 1, 2, 1]
    assert batch.neighbor_list.tolist() == [[0, 1], [3, 4]]


def test_append_makes_defaults_not_holes():
    batch = Batch.from_data_list([sample(1, velocities=torch.ones(1, 3))])
    batch.append(Batch.from_data_list([sample(1)]))
    assert batch.velocities.tolist() == [[1.0] * 3, [0.0] * 3]
    assert batch.has("velocities").all()


# -- buffers --------------------------------------------------------------------------------


def test_empty():
    buffer = Batch.empty(num_systems=4, num_nodes=10, num_edges=6)
    assert len(buffer) == 0
    assert buffer.system_capacity == 4
    assert buffer.positions.shape == (10, 3)
    assert buffer.energy.shape == (4, 1)
    assert buffer.num_nodes == 10
    assert buffer.num_nodes_list == []
    with pytest.raises(ValueError, match="num_nodes is negative"):
        Batch.empty(num_systems=1, num_nodes=-1, num_edges=0)
    template = sample(2, edges=1, energy=1.0)
    buffer = Batch.empty(num_systems=4, num_nodes=10, num_edges=6, template=template)
    assert buffer.neighbor_list.shape == (6, 2)
    assert buffer.energy.dtype == torch.float64
    like = Batch.empty_like(Batch.from_data_list([template]))
    assert len(like) == 0
    assert like.keys == Batch.from_data_list([template]).keys
    like.append(Batch.from_data_list([template]))
    assert like.num_nodes_list == [2]


@settings(max_examples=150)
@given(data=st.data())
def test_put_equals_the_loop(data):
    """Several puts of any batches into one buffer: what fits is there, in order, whole."""
    template = data.draw(batches(min_samples=1))
    room = [data.draw(st.integers(0, limit)) for limit in (8, 20, 20)]
    buffer = Batch.empty(
        num_systems=room[0], num_nodes=room[1], num_edges=room[2], template=template
    )
    expected: list = []
    for _ in range(data.draw(st.integers(1, 3))):
        # The same fields and dtypes, drawn samples: select with repeats.
        picks = data.draw(st.lists(st.integers(0, len(template) - 1), min_size=1, max_size=6))
        src = template.index_select(picks)
        mask = data.draw(masks(len(src)))
        there = carried(src)
        wanted = [i for i, keep in enumerate(mask) if keep]
        fits = greedy_fit(
            [
                [1] * len(wanted),
                [src.num_nodes_per_graph[i].item() for i in wanted],
                [src.num_edges_per_graph[i].item() for i in wanted],
            ],
            room,
        )
        taken = [i for i, fit in zip(wanted, fits, strict=True) if fit]
        room[0] -= len(taken)
        room[1] -= sum(src.num_nodes_per_graph[i].item() for i in taken)
        room[2] -= sum(src.num_edges_per_graph[i].item() for i in taken)
        copied = torch.zeros(len(src), dtype=torch.bool)
        returned = buffer.put(src, torch.tensor(mask), copied_mask=copied)
        assert copied.tolist() == returned.tolist() == [i in taken for i in range(len(src))]
        expected += [there[i] for i in taken]
        assert_same_samples(carried(buffer), expected)
        assert_same_samples(carried(src), there)
        rest = [there[i] for i in range(len(src)) if i not in taken]
        trimmed = src.trim()
        assert_same_samples([] if trimmed is None else carried(trimmed), rest)
        lengths = {name: len(values) for name, values in src}
        assert src.defrag() is src
        assert_same_samples(carried(src), rest)
        assert {name: len(values) for name, values in src} == lengths
        for name, values in src:
            assert not values[src._rows_in_use(src.level_of(name)) :].any()
    assert buffer.num_graphs == len(expected)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("level", ["atom", "edge", "system"])
def test_every_dtype_is_put_and_defragged(dtype, level):
    src = Batch.from_data_list([sample(2, edges=1), sample(1, edges=2), sample(3, edges=1)])
    rows = {"atom": 6, "edge": 4, "system": 3}[level]
    values = (torch.arange(rows * 2).reshape(rows, 2) % 7).to(dtype)
    src.set("x", values.clone(), level=level)
    buffer = Batch.empty(num_systems=5, num_nodes=20, num_edges=20, template=src)
    buffer.put(src, [True, False, True])
    buffer.put(src, [False, True, False])
    parts = {"atom": [0, 1, 3, 4, 5, 2], "edge": [0, 3, 1, 2], "system": [0, 2, 1]}[level]
    assert buffer.x.dtype == dtype
    assert torch.equal(buffer.x[:rows], values[parts])
    src.defrag([True, False, False])
    assert src.num_nodes_list == [1, 3]
    first = {"atom": 2, "edge": 1, "system": 1}[level]
    assert torch.equal(src.x[: rows - first], values[first:])


def test_put_casts_to_the_buffer_and_carries_new_fields():
    template = sample(1)
    buffer = Batch.empty(num_systems=4, num_nodes=9, num_edges=9, template=template)
    buffer.put(Batch.from_data_list([template]), [True])
    src = Batch.from_data_list([sample(1, energy=2.0)]).to(dtype=torch.float64)
    buffer.put(src, [True])
    assert buffer.positions.dtype == torch.float32
    assert buffer.energy[:2, 0].tolist()[1] == 2.0
    assert buffer.has("energy").tolist() == [False, True]
    buffer.put(Batch.from_data_list([template]), [True])
    assert buffer.has("energy").tolist() == [False, True, False]
    assert buffer.get_data(2).energy is None
    buffer.defrag([True, False, False])
    assert buffer.has("energy").tolist() == [True, False]


def test_put_masks():
    src = Batch.from_data_list([sample(1), sample(2), sample(1)])
    buffer = Batch.empty(num_systems=3, num_nodes=9, num_edges=0, template=src)
    with pytest.raises(ValueError, match="mask shape 7 != num_graphs 3"):
        buffer.put(src, torch.ones(7, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask shape 2 != system_capacity 3"):
        buffer.put(src, [True] * 3, dest_mask=[True, False])
    buffer.put(src, [True] * 3)
    # Slot 1 is free again: its system goes, the new one comes last.
    buffer.put(src, [True, False, False], dest_mask=[True, False, True])
    assert buffer.num_nodes_list == [1, 1, 1]
    # Slots that are taken without a system leave less room.
    buffer.zero()
    done = buffer.put(src, [True] * 3, dest_mask=[False, True, True])
    assert done.tolist() == [True, False, False]


def test_defrag_and_trim_need_a_mask():
    batch = Batch.from_data_list([sample(1), sample(2)])
    with pytest.raises(ValueError, match="defrag requires copied_mask or a prior put"):
        batch.defrag()
    with pytest.raises(ValueError, match="trim requires copied_mask or a prior put"):
        batch.trim()
    assert batch.trim([True, True]) is None
    assert batch.trim([False, True]).num_nodes == 1
    batch.defrag([True, False])
    assert batch.num_graphs == 1
    assert batch.num_nodes == 3
    assert batch.num_nodes_list == [2]
    assert batch.batch_idx.tolist() == [0, 0]
    with pytest.raises(ValueError, match="a prior put"):
        batch.defrag()


def test_a_defragged_batch_goes_on():
    batch = Batch.from_data_list([sample(1, edges=1), sample(2, edges=2, value=5.0)])
    batch.defrag([True, False])
    assert batch[0].positions.tolist() == [[5.0] * 3] * 2
    batch.append(Batch.from_data_list([sample(1)]))
    assert batch.num_nodes == 3
    assert batch.num_graphs == batch.system_capacity == 2
    assert batch.neighbor_list.tolist() == [[0, 1], [0, 1]]


def test_zero():
    src = Batch.from_data_list([sample(2, edges=1)])
    buffer = Batch.empty(num_systems=1, num_nodes=4, num_edges=4, template=src)
    buffer.put(src, [True])
    assert buffer.zero() is buffer
    assert len(buffer) == 0
    assert buffer.num_nodes == 4
    assert not buffer.positions.any()
    buffer.put(src, [True])
    assert buffer.num_nodes_list == [2]


def test_buffers_survive_copies():
    src = Batch.from_data_list([sample(2, edges=1)])
    buffer = Batch.empty(num_systems=2, num_nodes=4, num_edges=4, template=src)
    buffer.put(src, [True])
    other = buffer.clone()
    other.put(src, [True])
    assert other.num_nodes_list == [2, 2]
    assert buffer.num_nodes_list == [2]
    assert src.clone().defrag().num_graphs == 0

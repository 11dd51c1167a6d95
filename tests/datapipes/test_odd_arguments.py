"""Arguments that no working script gives: each is named, none is silently bent."""

from __future__ import annotations

import pytest
import torch

from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    DataLoader,
    Dataset,
    InMemoryDataset,
)
from alchemi_xr.errors import AlchemiError, ArgumentTypeError, ConfigError, IndexRangeError


@pytest.fixture
def dataset(store):
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        yield dataset


@pytest.mark.parametrize("name", ["batch_size", "prefetch_factor", "num_streams", "seed"])
@pytest.mark.parametrize("value", [1.5, "x", None])
def test_sizes_are_whole_numbers(dataset, name, value):
    if name == "batch_size" and value is None:
        pytest.skip("None is the default: 1, or what max_atoms allows")
    with pytest.raises(ArgumentTypeError, match=f"{name} is no whole number"):
        DataLoader(dataset, **{name: value})


@pytest.mark.parametrize("value", [torch.tensor(2), 2])
def test_a_tensor_of_one_number_is_a_size(dataset, value):
    assert next(iter(DataLoader(dataset, batch_size=value))).num_graphs == 2


@pytest.mark.parametrize("sampler", [[1.5], ["a"], [None], [torch.tensor(0.5)]])
def test_a_sampler_of_no_indices_is_told_and_not_cut_off(dataset, sampler):
    with pytest.raises(IndexRangeError, match="what is no index"):
        list(DataLoader(dataset, sampler=sampler))


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_what_cannot_be_iterated_is_no_sampler(dataset, name):
    with pytest.raises(ArgumentTypeError, match=f"{name} gives no indices"):
        DataLoader(dataset, **{name: 5})


@pytest.mark.parametrize("wrong", [None, 5, "x", [], object()])
def test_a_loader_reads_a_dataset(wrong):
    with pytest.raises(ArgumentTypeError, match="reads a dataset"):
        DataLoader(wrong)


def test_a_batch_in_memory_is_a_batch():
    with pytest.raises(ArgumentTypeError, match="is no Batch"):
        InMemoryDataset(5)


def test_devices_that_are_not_there_are_named(store):
    for device in ("junk", "cuda:99"):
        with pytest.raises(ConfigError, match="device"):
            Dataset(AtomicDataZarrReader(store), device=device)
    with pytest.raises(ArgumentTypeError, match="num_workers"):
        Dataset(AtomicDataZarrReader(store), device="cpu", num_workers="x")


def test_several_indices_where_one_is_taken(dataset):
    with pytest.raises(IndexRangeError, match=r"one index.*found 2 indices"):
        dataset[[0, 1]]
    with pytest.raises(IndexRangeError, match=r"one index.*found 2 indices"):
        dataset.reader.read([0, 1])


@pytest.mark.parametrize("wrong", [None, "ab", {0, 1}, [1.5]])
def test_a_batch_of_no_indices(dataset, wrong):
    with pytest.raises(AlchemiError, match=r"[Ii]ndex"):
        dataset.reader.read_batch(wrong)


def test_nested_and_single_indices_make_a_batch(dataset):
    assert dataset.reader.read_batch([[0, 1]]).num_graphs == 2
    assert dataset.reader.read_batch(1).num_graphs == 1

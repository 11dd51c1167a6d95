from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from alchemi_xr.data import Batch
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
)
from alchemi_xr.errors import ConfigError, StoreClosedError


def ids(batch: Batch) -> list[int]:
    return [int(e) for e in batch["energy"].flatten()]


@pytest.mark.parametrize("chunk_size", [1, 4, 23, 4096])
def test_a_reader_is_read_whole_and_closed(store: Path, chunk_size: int) -> None:
    reader = AtomicDataZarrReader(store)
    dataset = InMemoryDataset(reader=reader, chunk_size=chunk_size)
    with pytest.raises(StoreClosedError):
        reader.read(0)
    with Dataset(AtomicDataZarrReader(store), device="cpu") as expected:
        assert len(dataset) == 23
        for indices in ([4, 0, 4], list(range(23)), [-1]):
            for name, value in expected.get_batch(indices):
                assert torch.equal(dataset.get_batch(indices)[name], value), name
        assert set(dataset.field_names) == set(expected.field_names)
        assert dataset.get_metadata(7) == expected.get_metadata(7)


def test_holes_survive(holed_store: Path) -> None:
    dataset = InMemoryDataset(reader=AtomicDataZarrReader(holed_store), chunk_size=3)
    assert dataset.get_batch([1, 2, 3]).has("energy").tolist() == [False, True, False]
    assert dataset[1][0].energy is None
    assert dataset[2][1] == {}


def test_the_loader_and_prefetch_work_alike(store: Path, no_threads: Any) -> None:
    dataset = InMemoryDataset(reader=AtomicDataZarrReader(store))
    seen = [ids(b) for b in DataLoader(dataset, batch_size=4, shuffle=True)]
    assert sorted(chain.from_iterable(seen)) == list(range(23))
    with Dataset(AtomicDataZarrReader(store), device="cpu") as stored:
        assert seen == [ids(b) for b in DataLoader(stored, batch_size=4, shuffle=True)]
    dataset.prefetch_fused_batches([[1, 2], [3]])
    assert [ids(b) for b in dataset.get_fused_batches()] == [[1, 2], [3]]
    dataset.prefetch(5)
    assert int(dataset[5][0].energy) == 5
    assert no_threads() == []


def test_a_batch_is_taken_as_it_is(make_samples: Any) -> None:
    batch = Batch.from_data_list(make_samples(5))
    dataset = InMemoryDataset(batch)
    assert dataset.in_memory_batch is batch
    taken = dataset.get_batch([2])
    taken["positions"].zero_()
    assert float(batch["positions"].abs().min()) > 0


def test_transforms_run_once(make_samples: Any, store: Path) -> None:
    calls: list[int] = []

    def double(batch: Any) -> Any:
        calls.append(len(batch))
        batch["energy"] = batch["energy"] * 2
        return batch

    dataset = InMemoryDataset(Batch.from_data_list(make_samples(5)), batch_transforms=[double])
    assert ids(dataset.get_batch([3])) == ids(dataset.get_batch([3])) == [6]
    assert calls == [5]
    InMemoryDataset(reader=AtomicDataZarrReader(store), chunk_size=10, batch_transforms=[double])
    assert calls == [5, 10, 10, 3]


def test_wrong_arguments(store: Path, make_samples: Any) -> None:
    batch = Batch.from_data_list(make_samples(2))
    with pytest.raises(ValueError, match="exactly one"):
        InMemoryDataset()
    reader = AtomicDataZarrReader(store)
    with pytest.raises(ValueError, match="exactly one"):
        InMemoryDataset(batch, reader=reader)
    with pytest.raises(ConfigError, match="chunk_size"):
        InMemoryDataset(reader=reader, chunk_size=0)
    with pytest.raises(TypeError, match="Sequence"):
        InMemoryDataset(batch, batch_transforms=lambda b: b)  # type: ignore[arg-type]
    AtomicDataZarrWriter(store).delete(list(range(23)))
    with pytest.raises(ConfigError, match="empty reader"):
        InMemoryDataset(reader=AtomicDataZarrReader(store))


def test_batches_are_those_torch_would_choose(make_samples: Any) -> None:
    samples = make_samples(9, holes=True)
    whole = Batch.from_data_list(samples)
    dataset = InMemoryDataset(whole)
    lists = [[3, 2, -1], [0], [8, 8]]

    def check() -> None:
        for found, one in zip(dataset.load_batches(lists), lists, strict=True):
            want = dataset.in_memory_batch.index_select(one)
            assert [name for name, _ in found] == [name for name, _ in want]
            for name, values in want:
                assert values.dtype == found[name].dtype
                assert torch.equal(values.nan_to_num(-1), found[name].nan_to_num(-1)), name
            assert torch.equal(found.batch_ptr, want.batch_ptr)
            assert torch.equal(found.edges_ptr, want.edges_ptr)
            assert found.has("forces").tolist() == want.has("forces").tolist()

    check()
    # Fields set anew, changed in place, or of a kind that only torch can choose from.
    whole["positions"] = whole.positions + 1
    check()
    whole.positions.mul_(2)
    check()
    whole["extra"] = torch.ones(whole.num_nodes, dtype=torch.bfloat16)
    check()
    whole["extra"] = torch.ones(whole.num_nodes, 2, dtype=torch.float64)
    check()
    whole.positions.requires_grad_()
    check()
    dataset.in_memory_batch = Batch.from_data_list(samples[::-1])
    check()
    # A batch given is not the memory of the dataset.
    dataset.load_batches([[0]])[0].positions.zero_()
    check()
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again.get_batch([1]).positions, dataset.get_batch([1]).positions)

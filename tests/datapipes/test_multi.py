from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data import Batch
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
)
from alchemi_xr.errors import ConfigError, FieldError, IndexRangeError


def read(path: Path) -> Dataset:
    return Dataset(AtomicDataZarrReader(path), device="cpu")


@pytest.fixture
def parts(tmp_path: Path, make_samples: Any) -> Iterator[list[Dataset]]:
    """Three datasets of 5, 1 and 7 samples whose energies are 0…, 100…, 200…"""
    datasets = []
    for number, count in enumerate((5, 1, 7)):
        samples = make_samples(count, seed=number)
        for sample in samples:
            sample.energy = sample.energy + 100 * number
        AtomicDataZarrWriter(tmp_path / f"{number}.zarr").write(samples)
        datasets.append(read(tmp_path / f"{number}.zarr"))
    yield datasets
    for dataset in datasets:
        dataset.close()


ENERGIES = [0, 1, 2, 3, 4, 100, 200, 201, 202, 203, 204, 205, 206]


def ids(batch: Batch) -> list[int]:
    return [int(e) for e in batch["energy"].flatten()]


def test_one_index_over_all(parts: list[Dataset]) -> None:
    multi = MultiDataset(*parts)
    assert len(multi) == 13
    assert multi.offsets == (0, 5, 6, 13)
    assert multi.datasets == tuple(parts)
    for index, energy in enumerate(ENERGIES):
        data, metadata = multi[index]
        assert int(data.energy) == energy
        number, local = multi.to_local_index(index)
        assert (metadata["dataset_index"], metadata["index"]) == (number, local)
        assert multi.to_global_index(number, local) == index
        assert multi.get_metadata(index) == (data.num_nodes, data.num_edges)
    assert multi.to_local_index(-1) == (2, 6)
    assert multi.to_global_index(-1, -1) == 12


@given(st.lists(st.integers(-13, 12), min_size=1, max_size=30))
def test_the_order_asked_for_is_kept(indices: list[int]) -> None:
    # Batches of plain tensors: the property is about order, not about storage.
    datasets = []
    start = 0
    for count in (5, 1, 7):
        rows = torch.arange(start, start + count, dtype=torch.float64)
        datasets.append(
            InMemoryDataset(
                Batch.from_raw_dicts(
                    [
                        {
                            "positions": torch.full((1 + i % 3, 3), float(e)),
                            "atomic_numbers": torch.ones(1 + i % 3, dtype=torch.long),
                            "energy": e.reshape(1, 1),
                            "neighbor_list": torch.zeros((i % 2, 2), dtype=torch.long),
                        }
                        for i, e in enumerate(rows)
                    ]
                )
            )
        )
        start += count
    multi = MultiDataset(*datasets)
    batch = multi.get_batch(indices)
    assert ids(batch) == [i % 13 for i in indices]
    expected = torch.repeat_interleave(batch["energy"].flatten(), batch.num_nodes_per_graph)
    assert torch.equal(batch["positions"][:, 0].double(), expected)
    edges = torch.repeat_interleave(batch.atoms_ptr[:-1], batch.num_edges_per_graph)
    assert torch.equal(batch["neighbor_list"][:, 0], edges)


def test_batches_prefetch_and_loader(parts: list[Dataset], no_threads: Any) -> None:
    with MultiDataset(*parts) as multi:
        lists = [[12, 0, 5], [3], [5, 5, 1]]
        expected = [[ENERGIES[i] for i in one] for one in lists]
        assert [ids(b) for b in multi.load_batches(lists)] == expected
        multi.prefetch_fused_batches(lists)
        assert [ids(b) for b in multi.get_fused_batches()] == expected
        multi.prefetch(7)
        assert int(multi[7][0].energy) == 201
        assert [int(d.energy) for d, _ in multi.read_many([7, 5, 0])] == [201, 100, 0]
        for shuffle in (False, True):
            seen = [ids(b) for b in DataLoader(multi, batch_size=4, shuffle=shuffle)]
            assert sorted(chain.from_iterable(seen)) == ENERGIES


def test_strict_demands_equal_fields(tmp_path: Path, make_samples: Any) -> None:
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(make_samples(3))
    AtomicDataZarrWriter(tmp_path / "b.zarr").write(make_samples(2, edges=False))
    a, b = read(tmp_path / "a.zarr"), read(tmp_path / "b.zarr")
    with pytest.raises(FieldError, match="neighbor_list"):
        MultiDataset(a, b)
    with MultiDataset(a, b, output_strict=False) as multi:
        assert "neighbor_list" in multi.field_names
        batch = multi.get_batch([4, 0, 3])
        assert batch.has("neighbor_list").tolist() == [False, True, False]
        assert ids(batch) == [1, 0, 0]


def test_wrong_arguments(parts: list[Dataset]) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        MultiDataset()
    with pytest.raises(TypeError, match=r"datasets\[1\]"):
        MultiDataset(parts[0], [1, 2])  # type: ignore[arg-type]
    multi = MultiDataset(*parts)
    for wrong in (lambda: multi[13], lambda: multi.to_local_index(-14)):
        with pytest.raises(IndexRangeError):
            wrong()
    with pytest.raises(IndexRangeError, match="dataset_index"):
        multi.to_global_index(3, 0)
    with pytest.raises(IndexRangeError, match="local_index"):
        multi.to_global_index(1, 1)


def test_close_and_refresh_reach_all(parts: list[Dataset], make_samples: Any) -> None:
    multi = MultiDataset(*parts)
    AtomicDataZarrWriter(parts[0].reader.store).append(make_samples(2))
    multi.refresh()
    assert multi.offsets == (0, 7, 8, 15)
    multi.close()
    for dataset in parts:
        with pytest.raises(RuntimeError, match="closed reader"):
            dataset[0]

"""Every order on every storage path: the samples of a plain loop over the reader.

One set of samples with holes, custom fields, text, edges, empty samples and deleted ones, in
every kind of place; each order over it, for any number of ranks, stopped and resumed anywhere.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.data import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)
from alchemi_xr.data.datapipes.prefetch import PrefetchingDataset
from alchemi_xr.store import StoreWriter

COUNT = 31
GONE = np.array([0, 7, 8, 18, 30])
ALIVE = np.setdiff1d(np.arange(COUNT), GONE)
SPLIT = 12
PLACES = ("raw", "small", "sharded", "dict", "memory", "s3", "icechunk", "resident", "multi")
ORDERS = ("sequential", "full", "block", "by size", "weighted", "balanced")


def make() -> Block:
    rng = np.random.default_rng(5)
    sizes = rng.integers(0, 13, COUNT)
    pairs = np.where(sizes > 1, rng.integers(0, 9, COUNT), 0)
    atoms, edges = counts_to_ptr(sizes), counts_to_ptr(pairs)
    v, e = int(atoms[-1]), int(edges[-1])
    half = np.arange(COUNT) % 2 == 0
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 9, v),
        "positions": rng.normal(size=(v, 3)).astype(np.float32),
        "forces": rng.normal(size=(v, 3)).astype(np.float32),
        "neighbor_list": (rng.random((e, 2)) * np.repeat(sizes, pairs)[:, None]).astype(np.int64),
        "energy": rng.normal(size=(COUNT, 1)),
        "number": np.arange(COUNT, dtype=np.int64)[:, None],
        "charge_guess": rng.normal(size=(v, 2)),
    }
    levels: dict[str, Any] = {
        "atomic_numbers": "atom",
        "positions": "atom",
        "forces": "atom",
        "neighbor_list": "edge",
        "energy": "system",
        "number": "system",
        "charge_guess": "atom",
    }
    arrays["energy"][~half] = np.nan
    arrays["forces"][np.repeat(~half, sizes)] = np.nan
    return Block(atoms, edges, arrays, levels, {"energy": half, "forces": half.copy()})


BLOCK = make()
SMALL_CHUNKS = {group: {"chunk_size": 32} for group in ("core", "custom", "meta")}


def reader(place: Any, config: Any, **options: Any) -> AtomicDataZarrReader:
    writer = StoreWriter(place, config, **options)
    writer.write(BLOCK.slice(0, 20))
    writer.append(BLOCK.slice(20, COUNT))
    writer.delete(GONE)
    # So little that pieces are dropped and decoded again.
    return AtomicDataZarrReader(place, cache_bytes=4000, **options)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: Any, request: Any) -> Iterator[Callable[[str], Any]]:
    """The dataset of a kind of place, made when first asked for."""
    made: dict[str, PrefetchingDataset] = {}
    folder: Path = tmp_path_factory.mktemp("ways")

    def dataset(kind: str) -> PrefetchingDataset:
        path = folder / f"{kind}.zarr"
        if kind in ("raw", "small"):
            found = reader(path, {"profile": kind, **SMALL_CHUNKS})
        elif kind == "sharded":
            shards = {g: {"chunk_size": 16, "shard_size": 64} for g in ("core", "custom")}
            found = reader(path, {"profile": "fast", **shards})
        elif kind == "dict":
            found = reader({}, SMALL_CHUNKS)
        elif kind == "memory":
            pytest.importorskip("fsspec")
            found = reader(f"memory://{uuid.uuid4().hex}.zarr", SMALL_CHUNKS)
        elif kind == "s3":
            server = request.getfixturevalue("s3")
            found = reader(server.url(), None, storage_options=server.options)
        elif kind == "icechunk":
            pytest.importorskip("icechunk", reason="extra icechunk is missing")
            found = reader(f"icechunk:{path}", None)
        elif kind == "resident":
            return InMemoryDataset(reader=reader({}, None), skip_validation=True)
        else:
            parts = []
            for number, part in enumerate((BLOCK.slice(0, SPLIT), BLOCK.slice(SPLIT, COUNT))):
                writer = StoreWriter(folder / f"part{number}.zarr", SMALL_CHUNKS)
                writer.write(part)
                first = SPLIT * number
                within = GONE[(first <= GONE) & (first + part.num_samples > GONE)]
                writer.delete(within - first)
                parts.append(open_dataset(AtomicDataZarrReader(folder / f"part{number}.zarr")))
            return MultiDataset(*parts)
        return open_dataset(found)

    def find(kind: str) -> PrefetchingDataset:
        if kind not in made:
            made[kind] = dataset(kind)
        return made[kind]

    yield find
    for one in made.values():
        one.close()


def open_dataset(found: AtomicDataZarrReader) -> Dataset:
    return Dataset(found, device="cpu", skip_validation=True, num_workers=1)


def numbers(batch: Batch) -> list[int]:
    found: list[int] = batch["number"].flatten().tolist()
    return found


def assert_equal(batch: Batch) -> None:
    """The batch holds just what a plain loop over its samples gives."""
    found, expected = batch.to_block(), BLOCK.take(np.array(numbers(batch)))
    assert np.array_equal(found.atoms_ptr, expected.atoms_ptr)
    assert np.array_equal(found.edges_ptr, expected.edges_ptr)
    assert set(found.names) == set(expected.names)
    for name in expected.names:
        a, b = found.arrays[name], expected.arrays[name]
        assert (a.dtype, found.levels[name]) == (b.dtype, expected.levels[name]), name
        assert np.array_equal(a, b, equal_nan=b.dtype.kind == "f"), name
        assert np.array_equal(found.has(name), expected.has(name)), name


def loader(
    dataset: Any, order: str, rank: int, world: int, seed: int, size: int, prefetch: int
) -> DataLoader:
    options: dict[str, Any] = {"prefetch_factor": prefetch}
    if order in ("weighted", "balanced"):
        # One dataset is a mixture of one.
        whole = dataset if isinstance(dataset, MultiDataset) else MultiDataset(dataset)
        ranks = {"rank": rank, "num_replicas": world, "seed": seed}
        if order == "weighted":
            sampler = MultiDatasetSampler(whole, replacement=False, **ranks)
            return DataLoader(whole, batch_size=size, sampler=sampler, **options)
        batches = MultiDatasetBatchSampler.balanced(whole, batch_size=2 * size, **ranks)
        return DataLoader(whole, batch_sampler=batches, **options)
    if order == "by size":
        options |= {"max_atoms": 12 + size, "max_edges": 12, "shuffle": True}
    else:
        shuffle: Any = {"sequential": False, "full": True, "block": "block"}[order]
        options |= {"batch_size": size, "shuffle": shuffle, "shuffle_blocks": 2}
    return DataLoader(dataset, seed=seed, rank=rank, world_size=world, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("place", PLACES)
# Few of each, many of all: the 54 pairs share the strategy.
@settings(max_examples=max(3, settings().max_examples // 20))
@given(
    world=st.integers(1, 7),
    seed=st.integers(0, 5),
    size=st.integers(1, 9),
    prefetch=st.integers(0, 3),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_every_order_and_place_gives_the_samples_of_a_plain_loop(
    datasets: Any,
    place: str,
    order: str,
    world: int,
    seed: int,
    size: int,
    prefetch: int,
    epoch: int,
    data: Any,
) -> None:
    dataset = datasets(place)
    seen: Counter[int] = Counter()
    steps: set[int] = set()
    for rank in range(world):
        one = loader(dataset, order, rank, world, seed, size, prefetch)
        one.set_epoch(epoch)
        steps.add(len(one))
        stop = data.draw(st.integers(0, len(one)), label=f"stop of rank {rank}")
        given_: list[list[int]] = []
        running = iter(one)
        for _ in range(stop):
            batch = next(running)
            assert_equal(batch)
            given_.append(numbers(batch))
        state = json.loads(json.dumps(one.state_dict()))
        running.close()  # type: ignore[attr-defined]
        # Another process, which may read ahead by another number.
        again = loader(dataset, order, rank, world, seed, size, 3 - prefetch)
        again.load_state_dict(state)
        for batch in again:
            assert_equal(batch)
            given_.append(numbers(batch))
        assert len(given_) == len(one)
        seen.update(number for numbers_ in given_ for number in numbers_)
    assert len(steps) == 1  # a rank that makes more steps waits for the others for ever
    assert set(seen) <= set(ALIVE.tolist())
    total = sum(seen.values())
    if order == "balanced":
        assert total == steps.pop() * world * 2 * size
    else:
        # Where a rank has to make a step of its own and no batch can be cut, it repeats one.
        spare = world - 1 if order == "weighted" or size == 1 else 0
        assert len(seen) == len(ALIVE)
        assert len(ALIVE) <= total <= len(ALIVE) + spare


@pytest.mark.parametrize("place", PLACES)
def test_a_plain_loop_gives_the_same_samples(datasets: Any, place: str) -> None:
    """``ds[i]``, ``read_many`` and ``get_batch`` of it, one by one."""
    dataset = datasets(place)
    assert len(dataset) == len(ALIVE)
    assert_equal(dataset.get_batch([-1, 3, 3, 0]))
    for place_, number in enumerate(ALIVE[::9].tolist()):
        sample, _ = dataset[9 * place_]
        assert int(sample.number) == number
        one = BLOCK.take(np.array([number]))
        for name in ("positions", "charge_guess", "energy", "forces"):
            if one.has(name)[0]:
                assert torch.equal(
                    getattr(sample, name).reshape(one.arrays[name].shape),
                    torch.from_numpy(one.arrays[name]),
                )

"""Orders, sizes and ranks of the DataLoader over real stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset, MultiDataset
from alchemi_xr.errors import ConfigError
from alchemi_xr.store import StoreWriter

COUNT, GONE = 140, 17


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of 1 to 12 atoms, numbered by their energy, some deleted; chunks of 64 rows."""
    rng = np.random.default_rng(0)
    atoms = counts_to_ptr(rng.integers(1, 13, COUNT))
    edges = counts_to_ptr(rng.integers(0, 5, COUNT))
    v, e = int(atoms[-1]), int(edges[-1])
    arrays: dict[str, Any] = {
        "atomic_numbers": np.ones(v, int),
        "positions": rng.normal(size=(v, 3)),
        "neighbor_list": np.zeros((e, 2), int),
        "energy": np.arange(COUNT, dtype=float)[:, None],
    }
    levels: dict[str, Any] = {
        "atomic_numbers": "atom",
        "positions": "atom",
        "neighbor_list": "edge",
        "energy": "system",
    }
    path = tmp_path_factory.mktemp("orders") / "a.zarr"
    writer = StoreWriter(path, {"core": {"chunk_size": 64}, "meta": {"chunk_size": 64}})
    writer.write(Block(atoms, edges, arrays, levels))
    writer.delete(np.arange(0, GONE * 8, 8))
    return path


@pytest.fixture(scope="module")
def dataset(path: Path) -> Dataset:
    return Dataset(AtomicDataZarrReader(path), device="cpu", num_workers=0)


def numbers(batch: Any) -> list[int]:
    return batch["energy"].reshape(-1).long().tolist()


@given(data=st.data())
def test_every_sample_once_over_all_ranks_and_resumed(dataset: Dataset, data: Any) -> None:
    world = data.draw(st.integers(1, 7))
    options: dict[str, Any] = {
        "shuffle": data.draw(st.sampled_from([False, True, "block"])),
        "seed": data.draw(st.integers(0, 3)),
        "prefetch_factor": data.draw(st.integers(0, 3)),
        "world_size": world,
    }
    if data.draw(st.booleans()):
        options |= {"max_atoms": data.draw(st.integers(12, 60)), "max_edges": 20}
    else:
        options["batch_size"] = data.draw(st.integers(2, 19))
    seen: list[int] = []
    lengths = set()
    for rank in range(world):
        loader = DataLoader(dataset, rank=rank, **options)
        loader.set_epoch(2)
        steps = len(loader)
        lengths.add(steps)
        whole = [numbers(batch) for batch in loader]
        assert len(whole) == steps
        # Stopped anywhere and taken up by another process.
        stop = data.draw(st.integers(0, len(whole) - 1))
        first = DataLoader(dataset, rank=rank, **options)
        first.set_epoch(2)
        given_ = iter(first)
        begun = [numbers(next(given_)) for _ in range(stop)]
        state = first.state_dict()
        second = DataLoader(dataset, rank=rank, **options)
        second.load_state_dict(state)
        assert begun + [numbers(batch) for batch in second] == whole
        seen += [n for batch in whole for n in batch]
    assert len(lengths) == 1
    alive = set(range(COUNT)) - set(range(0, GONE * 8, 8))
    assert len(seen) == len(set(seen))
    assert set(seen) == alive


def test_batches_by_size(dataset: Dataset) -> None:
    loader = DataLoader(dataset, max_atoms=40, shuffle=True)
    batches = list(loader)
    assert all(batch.num_nodes <= 40 for batch in batches)
    # Filled, not merely kept below: the next sample would not have fitted.
    assert np.mean([batch.num_nodes for batch in batches[:-1]]) > 32
    both = list(DataLoader(dataset, max_atoms=40, batch_size=4))
    assert max(batch.num_graphs for batch in both) == 4
    with pytest.raises(ConfigError, match=r"sample \d+ alone has more than max_atoms"):
        list(DataLoader(dataset, max_atoms=5))


def test_block_shuffle_reads_a_few_blocks_at_a_time(path: Path, dataset: Dataset) -> None:
    starts = dataset.block_starts()
    assert starts[0] == 0
    assert len(starts) > 10
    assert (np.diff(starts) > 0).all()
    loader = DataLoader(dataset, batch_size=5, shuffle="block", shuffle_blocks=2)
    physical = np.array([n for batch in loader for n in numbers(batch)])
    logical = np.searchsorted(dataset.reader._active, physical)
    owner = np.searchsorted(starts, logical, side="right") - 1
    last = {int(b): int(np.flatnonzero(owner == b)[-1]) for b in np.unique(owner)}
    first = {int(b): int(np.flatnonzero(owner == b)[0]) for b in np.unique(owner)}
    open_blocks = [sum(first[b] <= i <= last[b] for b in first) for i in range(len(owner))]
    assert max(open_blocks) <= 2
    again = [n for batch in loader for n in numbers(batch)]
    assert again != physical.tolist()
    assert sorted(again) == sorted(physical.tolist())


def test_several_datasets_in_blocks_and_by_size(path: Path) -> None:
    parts = [Dataset(AtomicDataZarrReader(path), device="cpu") for _ in range(2)]
    with MultiDataset(*parts) as both:
        assert len(both.block_starts()) == 2 * len(parts[0].block_starts())
        atoms, edges = both.sample_sizes()
        assert [(a, e) for a, e in zip(atoms, edges, strict=True)] == [
            both.get_metadata(i) for i in range(len(both))
        ]
        loader = DataLoader(both, max_atoms=50, shuffle="block")
        assert sum(batch.num_graphs for batch in loader) == len(both)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shuffle": "blocks"}, "shuffle"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"world_size": 0}, "world_size"),
        ({"max_atoms": 0}, "max_atoms"),
        ({"shuffle_blocks": 0}, "shuffle_blocks"),
        ({"sampler": [1, 2], "max_atoms": 4}, "sampler"),
        ({"sampler": [1, 2], "world_size": 2}, "sampler"),
    ],
)
def test_what_does_not_go_together(dataset: Dataset, options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DataLoader(dataset, **options)


def test_a_state_of_another_order_is_refused(dataset: Dataset) -> None:
    state = DataLoader(dataset, max_atoms=40, world_size=2).state_dict()
    for options in ({"max_atoms": 40}, {"max_atoms": 41, "world_size": 2}, {"batch_size": 4}):
        with pytest.raises(ConfigError, match="another"):
            DataLoader(dataset, **options).load_state_dict(state)

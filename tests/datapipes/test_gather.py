from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes.gather import gather, plan_gather
from alchemi_xr.store import Snapshot, StoreWriter, ZarrWriteConfig, open_store

COUNT = 29


@pytest.fixture(scope="module")
def block() -> Block:
    rng = np.random.default_rng(0)
    samples: list[dict[str, Any]] = []
    for number in range(COUNT):
        atoms, pairs = int(rng.integers(1, 6)), int(rng.integers(0, 4))
        samples.append(
            {
                "positions": rng.normal(size=(atoms, 3)),
                "atomic_numbers": rng.integers(1, 9, atoms),
                "neighbor_list": rng.integers(0, atoms, (pairs, 2)),
                "energy": np.array([float(number)]),
            }
        )
        if number % 3 == 0:
            samples[-1]["forces"] = rng.normal(size=(atoms, 3))
    levels = {"positions": "atom", "atomic_numbers": "atom", "neighbor_list": "edge"}
    return Block.from_samples(samples, {**levels, "energy": "system", "forces": "atom"})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def snapshot(block: Block, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    # Chunks of a few rows: every gather crosses some.
    path: Path = tmp_path_factory.mktemp("gather") / "s.zarr"
    config = ZarrWriteConfig(core={"chunk_size": 4}, meta={"chunk_size": 4})
    StoreWriter(path, config).write(block)
    return open_store(path)


@given(st.lists(st.integers(0, COUNT - 1), max_size=40))
def test_a_gather_is_a_take_in_memory(block: Block, snapshot: Snapshot, samples: list[int]) -> None:
    index = np.asarray(samples, dtype=np.int64)
    found = gather(snapshot, index, block.names)
    expected = block.take(index)
    assert np.array_equal(found.atoms_ptr, expected.atoms_ptr)
    assert np.array_equal(found.edges_ptr, expected.edges_ptr)
    assert set(found.arrays) == set(expected.arrays)
    for name, values in expected.arrays.items():
        assert found.arrays[name].dtype == values.dtype
        assert np.array_equal(found.arrays[name], values, equal_nan=values.dtype.kind == "f"), name
    assert np.array_equal(found.has("forces"), expected.has("forces"))


def test_a_plan_reads_each_sample_once_and_in_order() -> None:
    plan = plan_gather(np.array([7, 2, 7, 3, 2]))
    assert plan.samples.tolist() == [2, 3, 7]
    assert plan.order is not None
    assert plan.samples[plan.order].tolist() == [7, 2, 7, 3, 2]
    assert plan.runs() == [(2, 4), (7, 8)]
    assert plan_gather(np.array([2, 3, 9])).order is None
    assert plan_gather(np.array([], dtype=np.int64)).samples.size == 0


def test_some_fields_alone(block: Block, snapshot: Snapshot) -> None:
    found = gather(snapshot, np.array([3, 1]), ["energy"])
    assert found.names == ["energy"]
    assert found.arrays["energy"].tolist() == [[3.0], [1.0]]

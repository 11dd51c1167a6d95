"""Over any ragged store, with holes, custom fields and deleted samples: every way to read it
gives the samples that a plain loop gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
    gather,
)
from alchemi_xr.testing.strategies import blocks

NUMBER = "sample_number"


def numbered(block: Block) -> Block:
    numbers = np.arange(block.num_samples, dtype=np.int64)[:, None]
    return block.with_field(NUMBER, numbers, "system")


def assert_equal(found: Block, expected: Block) -> None:
    assert np.array_equal(found.atoms_ptr, expected.atoms_ptr)
    assert np.array_equal(found.edges_ptr, expected.edges_ptr)
    assert found.names == expected.names
    for name in expected.names:
        a, b = found.arrays[name], expected.arrays[name]
        assert a.dtype == b.dtype, name
        assert np.array_equal(a, b, equal_nan=b.dtype.kind == "f"), name
        assert np.array_equal(found.has(name), expected.has(name)), name
        assert found.levels[name] == expected.levels[name]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_PIECE_BYTES", 64)


@given(
    block=blocks(max_samples=9),
    split=st.integers(0, 9),
    deleted=st.sets(st.integers(0, 8), max_size=4),
    batch_size=st.integers(1, 5),
    prefetch_factor=st.integers(0, 3),
    cache_bytes=st.sampled_from([0, 200, 2**25]),
    shuffle=st.booleans(),
)
def test_every_way_to_read_gives_the_same_samples(
    block: Block,
    split: int,
    deleted: set[int],
    batch_size: int,
    prefetch_factor: int,
    cache_bytes: int,
    shuffle: bool,
) -> None:
    block = numbered(block)
    store: dict[str, Any] = {}
    # Chunks and pieces of a few rows: requests cross them.
    writer = AtomicDataZarrWriter(store, {"core": {"chunk_size": 5}})
    split = min(split, block.num_samples)
    if 0 < split < block.num_samples:
        writer.write(block.slice(0, split))
        writer.append(Batch.from_block(block.slice(split, block.num_samples)))
    else:
        writer.write(Batch.from_block(block))
    gone = sorted(index for index in deleted if index < block.num_samples)
    if gone:
        writer.delete(gone)
    alive = np.setdiff1d(np.arange(block.num_samples), gone)

    reader = AtomicDataZarrReader(store, cache_bytes=cache_bytes)
    with Dataset(reader, device="cpu", skip_validation=True) as dataset:
        assert len(dataset) == len(alive)
        loader = DataLoader(
            dataset, batch_size=batch_size, shuffle=shuffle, prefetch_factor=prefetch_factor
        )
        seen: list[int] = []
        for batch in loader:
            index = batch[NUMBER].flatten().numpy()
            assert_equal(batch.to_block(), block.take(index))
            seen += index.tolist()
        assert sorted(seen) == alive.tolist()
        for place, index in enumerate(alive.tolist()):
            one = block.take(np.array([index]))
            assert_equal(Batch.from_data_list([dataset[place][0]]).to_block(), present_only(one))
            assert_equal(
                Batch.from_raw_dicts(
                    [reader[place][0]], field_levels=reader.field_levels
                ).to_block(),
                present_only(one),
            )
        if len(alive):
            resident = InMemoryDataset(
                reader=AtomicDataZarrReader(store), chunk_size=2, skip_validation=True
            )
            order = list(range(len(alive)))[::-1]
            assert_equal(resident.get_batch(order).to_block(), block.take(alive[::-1]))


def present_only(one: Block) -> Block:
    """A block of one sample without the fields that this sample has not."""
    return one.select_fields([name for name in one.names if one.has(name)[0]])

"""Blocks end at sample boundaries, however they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged import open_dataset
from alchemi_xr.ragged.chunks import by_bytes, every, find_partition, level_chunks, preferred
from alchemi_xr.ragged.conventions import Structure, structure

WAYS = [{}, "auto", "100B", "1MiB", 1, 3, 1000, -1, {"sample": 4}, {"sample": "200B"}, (4, 6)]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.integers(1, 40),
)
def test_by_bytes_keeps_every_load_within_the_budget(a, b, budget):
    n = min(len(a), len(b))
    loads = [counts_to_ptr(np.array(a[:n])), counts_to_ptr(np.array(b[:n]))]
    sizes = by_bytes(loads, budget)
    assert sum(sizes) == n
    assert min(sizes) > 0
    for load in loads:
        for size, total in zip(sizes, level_chunks(load, sizes), strict=True):
            assert total <= budget or size == 1


def test_by_bytes_takes_as_many_as_fit():
    assert by_bytes([np.array([0, 2, 4, 6, 8])], 4) == (2, 2)


@given(st.integers(0, 30), st.integers(1, 8))
def test_every_adds_up(samples, size):
    sizes = every(samples, size)
    assert sum(sizes) == samples
    assert max(sizes) <= size


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 8))
def test_preferred_blocks_follow_stored_chunks(counts, stored):
    ptr = counts_to_ptr(np.array(counts))
    struct = Structure(ptr, None)
    # So wide a row that one stored chunk is a block.
    sizes = preferred(struct, {"atom": 2**40}, lambda level: stored)
    assert sum(sizes) == len(counts)
    stops = ptr[counts_to_ptr(np.array(sizes))][1:-1]
    for stop in stops:
        # The boundary is the first at or after a multiple of the stored rows.
        before = ptr[np.searchsorted(ptr, stop, side="left") - 1]
        assert stop // stored > before // stored or before % stored == 0


@pytest.mark.parametrize("chunks", WAYS, ids=str)
def test_same_samples_in_block_k_of_every_level(holey_path, block, assert_equal, chunks):
    if chunks == (4, 6):
        chunks = (4, 3)
    ds = open_dataset(holey_path, chunks=chunks)
    sizes = ds.chunksizes["sample"]
    assert ds.chunksizes["atom"] == level_chunks(ds.atoms_ptr.values, sizes)
    assert ds.chunksizes["edge"] == level_chunks(ds.edges_ptr.values, sizes)
    assert ds.chunksizes["xyz"] == (3,)
    assert find_partition(ds, structure(ds)) == sizes
    assert ds.atoms_ptr.chunks is None
    assert_equal(ds, block.take(np.array([0, 1, 4, 5, 6, 7, 9])))


def test_a_number_is_samples_in_a_block(path):
    assert open_dataset(path, chunks=4).chunksizes["sample"] == (4, 4, 2)
    assert open_dataset(path, chunks={"sample": 6}).chunksizes["sample"] == (6, 4)


def test_text_is_bytes_of_the_widest_field(path, block):
    # The widest atom row is positions, 24 bytes; the widest edge row shifts, 24; cell 72.
    ds = open_dataset(path, chunks="168B", fields=["positions", "energy"])
    for size, atoms in zip(ds.chunksizes["sample"], ds.chunksizes["atom"], strict=True):
        assert atoms * 24 <= 168 or size == 1
    assert len(ds.chunksizes["sample"]) > 1


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ({"atom": 5}, "not along 'atom'"),
        (0, "no way to cut"),
        (-3, "no way to cut"),
        ("many", "no number of bytes"),
        (True, "no way to cut"),
        ((1, 2), "do not add up"),
    ],
)
def test_wrong_chunks_are_named(path, chunks, text):
    with pytest.raises(ConfigError, match=text):
        open_dataset(path, chunks=chunks)


def test_chunk_of_the_accessor_recuts_at_the_store(path, block, assert_equal):
    ds = open_dataset(path, chunks=2).ragged.chunk(5)
    assert ds.chunksizes["sample"] == (5, 5)
    layers = set(ds.positions.data.dask.layers)
    assert not any("rechunk" in layer for layer in layers)
    assert_equal(ds, block)
    assert open_dataset(path).ragged.chunk(3).chunksizes["sample"] == (3, 3, 3, 1)


def test_computed_arrays_are_rechunked(path, block):
    ds = open_dataset(path, chunks=2)
    ds["positions"] = ds.positions * 2
    out = ds.ragged.chunk(5)
    assert out.chunksizes["atom"] == level_chunks(block.atoms_ptr, (5, 5))
    np.testing.assert_array_equal(out.positions, 2 * block["positions"])


def test_blocks_read_only_their_own_rows(path, block, monkeypatch):
    from alchemi_xr.store.reader import Snapshot

    read = []
    original = Snapshot.read_rows

    def record(self, name, start, stop):
        read.append((name, start, stop))
        return original(self, name, start, stop)

    ds = open_dataset(path, chunks=2)
    monkeypatch.setattr(Snapshot, "read_rows", record)
    ds.positions.data.blocks[2].compute()
    ptr = block.atoms_ptr
    assert read == [("positions", int(ptr[4]), int(ptr[6]))]

"""What is written is read: every dtype, level and hole, whatever the order of appends."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import verify

SMALL = {
    "core": {"chunk_size": 4},
    "custom": {"chunk_size": 3},
    "meta": {"chunk_size": 5},
}


@given(data=st.data())
def test_write_then_read_is_the_identity(data, blocks, same):
    block = data.draw(blocks())
    config = data.draw(st.sampled_from([None, "raw", "small", SMALL]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.zarr"
        StoreWriter(path, config).write(block)
        snapshot = open_store(path)
        same(snapshot.read_block(slice(None)), block)
        picked = np.array(data.draw(st.lists(st.integers(0, block.num_samples - 1), max_size=8)))
        picked = picked.astype(np.int64)
        same(snapshot.read_block(picked), block.take(picked))
        assert verify(path).clean


@given(data=st.data())
def test_appends_of_differing_fields_equal_a_concatenation(data, blocks, same):
    parts = data.draw(st.lists(blocks(same_dtypes=True), min_size=2, max_size=4))
    store: dict = {}
    writer = StoreWriter(store, data.draw(st.sampled_from([None, SMALL])))
    writer.write(parts[0])
    for part in parts[1:]:
        writer.append(part)
    snapshot = open_store(store)
    same(snapshot.read_block(slice(None)), Block.concat(parts))
    assert snapshot.generation == len(parts)


def test_one_field_alone_and_blocks_of_bounded_size(make, same, anywhere):
    block = make(3, 40)
    StoreWriter(anywhere, SMALL).write(block)
    snapshot = open_store(anywhere)
    same(snapshot.read_block([5, 2], ["energy"]), block.take([5, 2]).select_fields(["energy"]))
    pieces = list(snapshot.iter_blocks(max_bytes=1000))
    assert len(pieces) > 5
    assert max(p.nbytes for p in pieces) <= 1000
    same(Block.concat(pieces), block)
    assert [p.num_samples for p in snapshot.iter_blocks(max_bytes=1)] == [1] * 40


def test_rows_in_any_order_with_repeats(make, anywhere):
    block = make(1, 30)
    StoreWriter(anywhere, SMALL).write(block)
    snapshot = open_store(anywhere)
    rows = np.random.default_rng(0).integers(0, block.num_atoms, 200)
    np.testing.assert_array_equal(snapshot.take_rows("positions", rows), block["positions"][rows])
    np.testing.assert_array_equal(
        snapshot.take_rows("positions", np.sort(rows)), block["positions"][np.sort(rows)]
    )
    # The list on disk is global.
    pairs = snapshot.read_rows("neighbor_list", 0, block.num_edges)
    shift = np.repeat(block.atoms_ptr[:-1], np.diff(block.edges_ptr))
    np.testing.assert_array_equal(pairs, block["neighbor_list"] + shift[:, None])


def test_a_gather_decodes_few_chunks_at_once(make, tmp_path):
    block = make(1, 200)
    StoreWriter(tmp_path / "a.zarr", SMALL).write(block)
    snapshot = open_store(tmp_path / "a.zarr")
    spans = []
    read_rows = snapshot.read_rows
    snapshot.read_rows = lambda name, a, b: spans.append(b - a) or read_rows(name, a, b)
    rows = np.arange(0, block.num_atoms, 3)
    np.testing.assert_array_equal(snapshot.take_rows("positions", rows), block["positions"][rows])
    assert max(spans) <= 16


@pytest.mark.parametrize("how", ["path", "text", "store", "store_path", "group"])
def test_every_way_to_say_where_a_store_is(make, same, tmp_path, how):
    path = tmp_path / "a.zarr"
    place = {
        "path": path,
        "text": str(path),
        "store": zarr.storage.LocalStore(path),
        "store_path": zarr.storage.StorePath(zarr.storage.LocalStore(tmp_path), "a.zarr"),
        "group": path,
    }[how]
    block = make(0)
    StoreWriter(place).write(block)
    if how == "group":
        place = zarr.open_group(path, mode="r")
    same(open_store(place).read_block(slice(None)), block)


def test_a_store_inside_a_store_in_memory(make, same):
    memory = zarr.storage.MemoryStore()
    place = zarr.storage.StorePath(memory, "runs/first")
    StoreWriter(place).write(make(0))
    StoreWriter(place).append(make(1))
    same(open_store(place).read_block(slice(None)), Block.concat([make(0), make(1)]))


def test_a_snapshot_pickles_small_and_reads_elsewhere(make, same, tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0, 300))
    snapshot = open_store(path)
    data = pickle.dumps(snapshot)
    assert len(data) < 2000
    same(pickle.loads(data).read_block([7, 3]), snapshot.read_block([7, 3]))
    array = pickle.loads(pickle.dumps(snapshot.array("positions")))
    np.testing.assert_array_equal(array[:5], snapshot.read_rows("positions", 0, 5))


def test_plain_zarr_and_plain_xarray_read_it(make, tmp_path):
    xr = pytest.importorskip("xarray")
    path = tmp_path / "a.zarr"
    block = make(0, text=True)
    StoreWriter(path).write(block)
    group = zarr.open_group(path, mode="r")
    assert group.attrs["num_samples"] == 4
    assert group.attrs["fields"]["core"] == {
        "atomic_numbers": "atom",
        "positions": "atom",
        "forces": "atom",
        "neighbor_list": "edge",
        "energy": "system",
    }
    np.testing.assert_array_equal(group["core/positions"][:], block["positions"])
    assert group["core/positions"].attrs["units"] == "Å"
    dataset = xr.open_zarr(path, group="core", consolidated=False, chunks=None)
    assert dataset["positions"].dims == ("atom", "xyz")
    assert dataset["energy"].dims == ("sample", "one")
    np.testing.assert_array_equal(dataset["forces"].values, block["forces"])
    assert not list(path.rglob("*consolidated*"))
    assert b"consolidated_metadata" not in (path / "zarr.json").read_bytes()


def test_equal_content_gives_equal_bytes_whatever_the_order(make, tmp_path):
    block = make(0)
    other = Block(
        block.atoms_ptr, block.edges_ptr, dict(reversed(block.arrays.items())), block.levels
    )
    StoreWriter(tmp_path / "a.zarr").write(block)
    StoreWriter(tmp_path / "b.zarr").write(other)
    files = {p.relative_to(tmp_path / "a.zarr") for p in (tmp_path / "a.zarr").rglob("*")}
    assert files == {p.relative_to(tmp_path / "b.zarr") for p in (tmp_path / "b.zarr").rglob("*")}
    for file in files:
        a, b = tmp_path / "a.zarr" / file, tmp_path / "b.zarr" / file
        if a.is_file() and file.name != "zarr.json":
            assert a.read_bytes() == b.read_bytes(), file


def test_first_writes_length_does_not_become_the_chunk(make, tmp_path):
    path = tmp_path / "a.zarr"
    writer = StoreWriter(path)
    writer.write(make(0, 1))
    writer.append(make(1, 500))
    snapshot = open_store(path)
    assert snapshot.chunk_rows("atom") == 65536
    assert snapshot.chunk_rows("edge") == 262144
    assert sum(1 for p in path.rglob("*") if p.is_file()) < 60

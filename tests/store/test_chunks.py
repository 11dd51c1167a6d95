"""Chunks decoded without zarr hold what zarr reads, or are left to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store import StoreWriter, ZarrWriteConfig, open_store
from alchemi_xr.store.chunks import chunk_reader

COUNT = 23


def block() -> Block:
    rng = np.random.default_rng(0)
    atoms = counts_to_ptr(rng.integers(1, 6, COUNT))
    rows = int(atoms[-1])
    arrays = {
        "positions": rng.normal(size=(rows, 3)).astype(np.float32),
        "atomic_numbers": rng.integers(1, 9, rows),
        "energy": rng.normal(size=(COUNT, 1)),
        "pbc": rng.integers(0, 2, (COUNT, 3)).astype(bool),
    }
    levels = {"positions": "atom", "atomic_numbers": "atom", "energy": "system", "pbc": "system"}
    return Block(atoms, np.zeros_like(atoms), arrays, levels)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    codec = {"chunk_size": 8}
    StoreWriter(tmp_path / "s.zarr", ZarrWriteConfig(core=codec, meta=codec)).write(block())
    return tmp_path / "s.zarr"


@pytest.mark.parametrize("profile", ["raw", "mixed", "fast", "balanced", "small"])
def test_rows_are_those_of_zarr(tmp_path: Path, profile: str) -> None:
    StoreWriter(tmp_path / "s.zarr", profile).write(block())
    snapshot = open_store(tmp_path / "s.zarr")
    for name, want in block().arrays.items():
        reader = chunk_reader(snapshot, name)
        assert reader is not None, name
        for stop in (1, len(want)):
            found = reader.read(0, stop)
            assert found is not None
            assert found.dtype == want.dtype
            assert found.flags.writeable
            np.testing.assert_array_equal(found, want[:stop])
        assert reader.read(1, 2) is None  # not the first row of a chunk
    assert open_store(tmp_path / "s.zarr").fields == snapshot.fields


def test_many_chunks_and_the_last_one(path: Path) -> None:
    snapshot, want = open_store(path), block().arrays["positions"]
    reader = chunk_reader(snapshot, "positions")
    assert reader is not None
    for start in range(0, len(want), 8):
        for stop in (start + 3, start + 8, len(want)):
            found = reader.read(start, min(stop, len(want)))
            np.testing.assert_array_equal(found, want[start:stop])


@pytest.mark.parametrize("harm", ["gone", "cut", "turned", "empty"])
def test_damage_is_left_to_who_can_tell_it(path: Path, harm: str) -> None:
    snapshot = open_store(path)
    reader = chunk_reader(snapshot, "atomic_numbers")
    assert reader is not None
    chunk = next(path.glob("**/atomic_numbers/c/1"))
    held = bytearray(chunk.read_bytes())
    if harm == "gone":
        chunk.unlink()
    elif harm == "cut":
        chunk.write_bytes(held[:-3])
    elif harm == "turned":
        held[len(held) // 2] ^= 255
        chunk.write_bytes(held)
    else:
        chunk.write_bytes(b"")
    assert reader.read(8, 16) is None
    assert reader.read(0, 8) is not None


def test_a_store_that_was_replaced_is_not_read(path: Path, tmp_path: Path) -> None:
    reader = chunk_reader(open_store(path), "positions")
    assert reader is not None
    shutil.rmtree(path)
    assert reader.read(0, 8) is None


def test_text_and_other_places_are_left_to_zarr(tmp_path: Path) -> None:
    import zarr

    memory = zarr.storage.MemoryStore()
    StoreWriter(memory).write(block())
    assert chunk_reader(open_store(memory), "positions") is None

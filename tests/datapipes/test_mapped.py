"""Raw local arrays are mapped: equal to every other way, and gone when let go."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset
from alchemi_xr.data.datapipes.gather import Gatherer
from alchemi_xr.errors import CorruptStoreError, MissingChunkError
from alchemi_xr.native import available
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.mapped import map_rows, mapped_files

pytestmark = pytest.mark.skipif(not available()["rows"], reason="no compiler at installation")

COUNT = 3_000


def make(count: int, seed: int = 0) -> Block:
    """Samples of 0 to 9 atoms: more rows than a chunk of 4,096, edges, a field with holes."""
    rng = np.random.default_rng(seed)
    atoms, edges = rng.integers(0, 10, count), rng.integers(0, 6, count)
    edges[atoms == 0] = 0
    v, e = int(atoms.sum()), int(edges.sum())
    pairs = (rng.random((e, 2)) * np.repeat(atoms, edges)[:, None]).astype(np.int64)
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 90, v),
        "positions": rng.normal(size=(v, 3)),
        "forces": rng.normal(size=(v, 3)).astype(np.float32),
        "neighbor_list": pairs,
        "energy": rng.normal(size=(count, 1)),
        "cell": rng.normal(size=(count, 3, 3)),
        "pbc": rng.random((count, 3)) < 0.5,
        "feature": rng.normal(size=(v,)).astype(np.float16),
    }
    levels: dict[str, Any] = dict.fromkeys(arrays, "system")
    levels |= dict.fromkeys(("atomic_numbers", "positions", "forces", "feature"), "atom")
    levels["neighbor_list"] = "edge"
    there = np.arange(count) % 3 != 1
    arrays["dipole"] = np.where(there[:, None], rng.normal(size=(count, 3)), np.nan)
    levels["dipole"] = "system"
    return Block(
        counts_to_ptr(atoms), counts_to_ptr(edges), arrays, levels, {"dipole": there}
    ).validate()


@pytest.fixture(scope="module")
def block() -> Block:
    return make(COUNT)


CHUNKS = {group: {"chunk_size": 4096} for group in ("core", "custom", "meta")}


@pytest.fixture(scope="module", params=["raw", "mixed", "fast"])
def path(request: pytest.FixtureRequest, block: Block, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("mapped") / "a.zarr"
    StoreWriter(path, {"profile": request.param, **CHUNKS}).write(block)
    return path


@given(samples=st.lists(st.integers(0, COUNT - 1), max_size=80), data=st.data())
def test_any_samples_in_any_order(block: Block, path: Path, samples: list[int], data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(block.names), min_size=1, unique=True))
    found = Gatherer(open_store(path))(np.array(samples, np.int64), names)
    want = block.take(np.array(samples, np.int64))
    assert np.array_equal(found.atoms_ptr, want.atoms_ptr)
    assert np.array_equal(found.edges_ptr, want.edges_ptr)
    for name in names:
        values = found.arrays[name]
        assert values.dtype == want.arrays[name].dtype
        np.testing.assert_array_equal(values, want.arrays[name])
        assert np.array_equal(found.has(name), want.has(name))
        values[...] = 0  # the caller's own


def test_what_is_mapped(path: Path) -> None:
    store = open_store(path)
    profile = store.schema.encoding["profile"]
    floats = {"positions", "forces", "energy", "cell", "dipole", "feature"}
    mapped = {name for name in store.fields if map_rows(store, name) is not None}
    assert mapped == {"raw": set(store.fields), "mixed": floats, "fast": set()}[profile]
    rows = map_rows(store, "positions")
    if rows is not None:
        assert not rows.flags.writeable
        np.testing.assert_array_equal(rows, store.read_rows("positions", 0, len(rows)))


def test_a_reader_keeps_its_generation(block: Block, tmp_path: Path) -> None:
    """Samples that are added, deleted or moved meanwhile are seen after a refresh."""
    writer = StoreWriter(tmp_path / "a.zarr", {"profile": "raw", **CHUNKS})
    writer.write(block)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    want = reader.read_batch([5, 2990])
    other = AtomicDataZarrReader(tmp_path / "a.zarr")  # maps nothing before the rewrite
    writer.append(make(50, 1))
    writer.delete(np.arange(0, 1000))
    writer.defragment()
    for held in (reader, other):
        again = held.read_batch([5, 2990])
        for name, values in want:
            assert (again[name] == values).all() or values.isnan().any(), name
        assert len(held) == COUNT
    reader.refresh()
    assert len(reader) == COUNT + 50 - 1000
    np.testing.assert_array_equal(
        reader.read_block([0]).arrays["positions"], block.take(np.array([1000]))["positions"]
    )


def test_nothing_is_held_after_close(block: Block, tmp_path: Path) -> None:
    StoreWriter(tmp_path / "a.zarr", {"profile": "raw", **CHUNKS}).write(block)
    gc.collect()
    files, before = len(os.listdir("/proc/self/fd")), mapped_files()
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    batch = reader.read_batch([3, 1])
    assert mapped_files() > before
    held = batch["positions"].clone()
    reader.close()
    gc.collect()
    assert mapped_files() == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == files
    assert (batch["positions"] == held).all()


def test_a_cut_or_lost_chunk_is_told_before_it_is_touched(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    StoreWriter(path, {"profile": "raw", **CHUNKS}).write(block)
    chunk = path / "core/forces/c/1/0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-5000])
    with pytest.raises(CorruptStoreError, match="cut short"):
        AtomicDataZarrReader(path).read_batch([0])
    assert AtomicDataZarrReader(path, fields=["positions"]).read_batch([0]).num_graphs == 1
    chunk.unlink()
    with pytest.raises(MissingChunkError, match="1/0"):
        AtomicDataZarrReader(path).read_batch([0])


def test_other_processes_map_for_themselves(block: Block, tmp_path: Path) -> None:
    StoreWriter(tmp_path / "a.zarr", {"profile": "raw", **CHUNKS}).write(block)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    want = reader.read_block([7, 3])["positions"]
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(copy.read_block([7, 3])["positions"], want)
    # And across a fork, in which the maps of the parent go on.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(_positions, (reader,)), want)


def _positions(reader: Any) -> Any:
    return reader.read_block([7, 3])["positions"]


def test_too_many_files_are_read_the_other_way(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alchemi_xr.store import mapped

    StoreWriter(tmp_path / "a.zarr", {"profile": "raw", **CHUNKS}).write(block)
    monkeypatch.setattr(mapped, "_MOST_FILES", mapped_files() + 1)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    np.testing.assert_array_equal(
        reader.read_block([7, 3])["positions"], block.take(np.array([7, 3]))["positions"]
    )


RSS = """
import sys, numpy as np, torch
from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset
def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))
torch.set_num_threads(1)
reader = AtomicDataZarrReader(sys.argv[1])
loader = DataLoader(Dataset(reader, device="cpu", skip_validation=True), batch_size=64, shuffle=True, prefetch_factor=4)
first = None
for epoch in range(20):
    loader.set_epoch(epoch)
    for batch in loader:
        pass
    if epoch == 3:
        first = anonymous()
print(first, anonymous())
"""


@pytest.mark.slow
def test_memory_is_flat_over_epochs_and_with_the_store(tmp_path: Path) -> None:
    peaks = []
    for count in (3_000, 12_000):
        path = tmp_path / f"{count}.zarr"
        StoreWriter(path, "raw").write(make(count))
        out = subprocess.run(
            [sys.executable, "-c", RSS, str(path)], capture_output=True, text=True, check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).stdout  # fmt: skip
        first, last = map(int, out.split())
        assert last < 1.1 * first
        peaks.append(last)
    assert peaks[1] < 1.2 * peaks[0]


def test_batches_that_are_kept_stay_as_they_are(block: Block, tmp_path: Path) -> None:
    """Memory is used again, but never under a batch, a field or a sample that is held."""
    StoreWriter(tmp_path / "a.zarr", "raw").write(block)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    loader = DataLoader(
        Dataset(reader, device="cpu", skip_validation=True),
        batch_size=400,
        shuffle=True,
        prefetch_factor=2,
    )
    kept: list[Any] = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number % 2 == epoch % 2:
                continue
            held = batch if number % 3 else batch["positions"][5:50]
            copy = (held if number % 3 == 0 else held["positions"]).clone()
            kept.append((held, copy))
    for held, copy in kept:
        now = held if torch.is_tensor(held) else held["positions"]
        assert torch.equal(now, copy)

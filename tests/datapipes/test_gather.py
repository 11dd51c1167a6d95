from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes import budget as budget_module
from alchemi_xr.data.datapipes import gather as gather_module
from alchemi_xr.data.datapipes.cache import PieceCache
from alchemi_xr.data.datapipes.cuts import plan_cuts
from alchemi_xr.data.datapipes.gather import Gatherer, piece_rows
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


# Nothing cached, pieces that never fit, pieces of which some are dropped, everything cached.
LIMITS = [None, 10, 600, 10**9]


@pytest.mark.parametrize("limit", LIMITS)
@given(samples=st.lists(st.integers(0, COUNT - 1), max_size=40))
def test_a_gather_is_a_take_in_memory(
    block: Block, snapshot: Snapshot, limit: int | None, samples: list[int]
) -> None:
    index = np.asarray(samples, dtype=np.int64)
    cache = None if limit is None else PieceCache(limit)
    expected = block.take(index)
    read = Gatherer(snapshot, cache)
    for _ in range(2):  # the second time out of the cache
        found = read(index, block.names)
        assert np.array_equal(found.atoms_ptr, expected.atoms_ptr)
        assert np.array_equal(found.edges_ptr, expected.edges_ptr)
        assert set(found.arrays) == set(expected.arrays)
        for name, values in expected.arrays.items():
            there = found.arrays[name]
            assert there.dtype == values.dtype
            assert np.array_equal(there, values, equal_nan=values.dtype.kind == "f"), name
            # What is handed out is the caller's to change; the cache is not.
            there[...] = 0
        assert np.array_equal(found.has("forces"), expected.has("forces"))
        assert cache is None or cache.nbytes <= cache.limit


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "_PIECE_BYTES", 64)


def test_every_piece_is_read_once(block: Block, snapshot: Snapshot) -> None:
    cache, asked = PieceCache(), []
    read = Gatherer(snapshot, cache)
    before = Snapshot.read_rows

    def read_rows(self: Snapshot, name: str, start: int, stop: int) -> Any:
        asked.append((name, start))
        return before(self, name, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "read_rows", read_rows)
        patch.setattr(gather_module, "chunk_reader", lambda snapshot, name: None)
        first = read(np.arange(COUNT), block.names)
        assert len(asked) == len(set(asked)) > 10
        patch.setattr(Snapshot, "read_rows", None)  # a read would fail
        patch.setattr(Snapshot, "read_block", None)
        again = read(np.array([5, 2, 28]), block.names)
    assert len(cache) == 0  # complete fields are one array each, and counted
    assert cache.nbytes == sum(first.arrays[name].nbytes for name in block.names)
    want = block.take(np.array([5, 2, 28]))
    assert all(
        np.array_equal(again.arrays[n], want.arrays[n], equal_nan=want.arrays[n].dtype.kind == "f")
        for n in block.names
    )


@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=30),
    size=st.integers(1, 9),
)
def test_cuts_cover_a_request_once(ranges: list[tuple[int, int]], size: int) -> None:
    starts = np.array([a for a, _ in ranges], dtype=np.int64)
    stops = starts + np.array([n for _, n in ranges], dtype=np.int64)
    targets = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64)
    out = np.full(targets[-1], -1)
    cuts = plan_cuts(starts, stops, targets[:-1], size)
    for cut in cuts:
        piece = np.arange(cut.piece * size, (cut.piece + 1) * size)
        for a, b, place in zip(cut.starts, cut.stops, cut.targets, strict=True):
            assert (out[place : place + b - a] == -1).all()
            out[place : place + b - a] = piece[a:b]
    assert out.tolist() == [row for a, b in zip(starts, stops, strict=True) for row in range(a, b)]
    assert len({cut.piece for cut in cuts}) == len(cuts)


def test_small_chunks_are_read_many_at_a_time(snapshot: Snapshot) -> None:
    assert piece_rows(snapshot, "positions") == 4
    assert piece_rows(snapshot, "energy") == 8


def test_some_fields_alone(block: Block, snapshot: Snapshot) -> None:
    found = Gatherer(snapshot)(np.array([3, 1]), ["energy"])
    assert found.names == ["energy"]
    assert found.arrays["energy"].tolist() == [[3.0], [1.0]]


def test_an_order_that_decodes_again_and_again_is_told_once(
    block: Block, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ZarrWriteConfig(core={"chunk_size": 16}, meta={"chunk_size": 16})
    StoreWriter(tmp_path / "s.zarr", config).write(block)
    snapshot = open_store(tmp_path / "s.zarr")
    rng = np.random.default_rng(0)
    read = Gatherer(snapshot, PieceCache(600))
    with caplog.at_level("WARNING", logger=gather_module.__name__):
        for _ in range(200):
            read(rng.permutation(COUNT)[:2], block.names)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "shuffle='block'" in caplog.text
        assert "cache_bytes=" in caplog.text
        caplog.clear()
        # In order, or with room for all, there is nothing to tell.
        for cache in (PieceCache(10**9), PieceCache(600)):
            read = Gatherer(snapshot, cache)
            for _ in range(40):
                order = rng.permutation(COUNT) if cache.limit > 600 else np.arange(COUNT)
                for start in range(0, COUNT, 8):
                    read(order[start : start + 8], block.names)
        assert caplog.records == []


def test_a_sample_that_reaches_into_a_piece_does_not_decode_it_again(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "HEAD_SHARE", 2)
    config = ZarrWriteConfig(core={"chunk_size": 20}, meta={"chunk_size": 64})
    StoreWriter(tmp_path / "s.zarr", config).write(block)
    snapshot = open_store(tmp_path / "s.zarr")
    names = ["positions", "atomic_numbers"]
    # Room for a piece of each and the heads: none is there when it is needed again.
    cache = PieceCache(20 * (24 + 8) + 500)
    read = Gatherer(snapshot, cache)
    owner = snapshot.atoms_ptr[:-1] // 20
    pieces = 2 * (int(owner[-1]) + 1)
    rng = np.random.default_rng(0)
    loads = []
    for _ in range(3):
        before = cache.loads
        for number in rng.permutation(int(owner[-1]) + 1):
            index = rng.permutation(np.flatnonzero(owner == number))
            found, want = read(index, names), block.take(index)
            assert all(np.array_equal(found.arrays[n], want.arrays[n]) for n in names)
            assert cache.nbytes <= cache.limit
        loads.append(cache.loads - before)
    assert loads[0] > pieces
    assert loads[1] <= pieces
    assert loads[2] <= pieces

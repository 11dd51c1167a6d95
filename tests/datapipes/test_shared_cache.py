"""One budget of decoded chunks for all readers of a process."""

from __future__ import annotations

import gc
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.codecs import ZstdCodec

from alchemi_xr import set_options
from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
)
from alchemi_xr.data.datapipes import cache as cache_module
from alchemi_xr.data.datapipes import gather as gather_module
from alchemi_xr.data.datapipes.budget import CacheBudget
from alchemi_xr.data.datapipes.cache import PieceCache, process_cache
from alchemi_xr.store import StoreWriter

SAMPLES, ATOMS, CHUNK = 60, 10, 50
#: Positions, numbers and energies decoded.
WHOLE = SAMPLES * (ATOMS * (12 + 8) + 8)


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> CacheBudget:
    """The process's own, as it is when the first reader is made; pieces are single chunks."""
    monkeypatch.setattr(cache_module, "_process", None)
    monkeypatch.setattr(gather_module, "_PIECE_BYTES", 64)
    return process_cache()


def write(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    rows = SAMPLES * ATOMS
    arrays: dict[str, Any] = {
        "positions": rng.normal(size=(rows, 3)).astype(np.float32),
        "atomic_numbers": rng.integers(1, 9, rows),
        "energy": np.arange(SAMPLES, dtype=float)[:, None] + 1000 * seed,
    }
    levels: Any = {"atomic_numbers": "atom", "positions": "atom", "energy": "system"}
    config = {
        "core": {"chunk_size": CHUNK, "compressors": (ZstdCodec(),)},
        "meta": {"chunk_size": CHUNK},
    }
    ptr = np.arange(SAMPLES + 1) * ATOMS
    block = Block(ptr, np.zeros(SAMPLES + 1, np.int64), arrays, levels)
    StoreWriter(path, config).write(block)
    return path


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "a.zarr", 1), write(tmp_path / "b.zarr", 2)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Store, field and first row of each piece that is decoded."""
    seen: list[tuple[str, str, int]] = []
    before = gather_module.Gatherer._load

    def load(self: Any, name: str, start: int, stop: int) -> Any:
        seen.append((self.snapshot.where, name, start))
        return before(self, name, start, stop)

    monkeypatch.setattr(gather_module.Gatherer, "_load", load)
    return seen


def held(budget: CacheBudget) -> int:
    """Bytes of all arrays that the budget and the readers' plans reach, counted anew."""
    found = {id(k.rows): k.rows.nbytes for k in budget._pieces.values()}
    for space in budget._spaces:
        found |= {id(rows): rows.nbytes for rows in space.heads.values()}
        found |= {id(k.rows): k.rows.nbytes for k in space.wholes.values()}
        for gatherer in space.listeners:
            found |= {id(f.rows): f.rows.nbytes for f in gatherer._mapped.values() if f}
    return sum(found.values())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.2, 3.0])
def test_two_loaders_stay_within_one_budget(
    paths: tuple[Path, Path], budget: CacheBudget, share: float
) -> None:
    """Of both sets, some of one, one and a fifth, all: never more bytes, always the same rows."""
    limit = int(share * WHOLE)
    with set_options(cache_bytes=limit):
        datasets = [Dataset(AtomicDataZarrReader(p), device="cpu") for p in paths]
        expected = [
            Dataset(AtomicDataZarrReader(p, cache_bytes=0), device="cpu").get_batch(range(SAMPLES))
            for p in paths
        ]
        most = 0
        for epoch in range(3):
            loaders = [DataLoader(d, batch_size=7, shuffle=True, seed=epoch) for d in datasets]
            seen: list[list[float]] = [[], []]
            for number, batches in enumerate(zip(*loaders, strict=True)):
                for which, batch in enumerate(batches):
                    index = (batch.energy.flatten() - 1000 * (which + 1)).long().tolist()
                    want = expected[which].index_select(index)
                    for name in ("positions", "atomic_numbers", "energy"):
                        assert (batch[name] == want[name]).all()
                    seen[which] += index
                if number % 3 == 0:
                    assert held(budget) <= limit
                assert budget.nbytes <= limit
                most = max(most, budget.nbytes)
            assert [sorted(one) for one in seen] == [list(range(SAMPLES))] * 2
        assert most >= 0.5 * min(limit, 2 * WHOLE)
        if share == 3.0:
            assert budget.nbytes == 2 * WHOLE  # each field one array, of both stores
        for dataset in datasets:
            dataset.close()
    assert budget.nbytes == held(budget) == 0


def test_readers_of_one_generation_decode_once(
    paths: tuple[Path, Path], loads: list[Any], budget: CacheBudget
) -> None:
    first, second = (AtomicDataZarrReader(paths[0]) for _ in range(2))
    for start in range(0, SAMPLES, 12):  # in turns: each finds what the other decoded
        index = range(start, start + 12)
        a, b = first.read_batch(index), second.read_batch(index)
        assert (a.positions == b.positions).all()
    assert len(loads) == len(set(loads)) == 2 * -(-SAMPLES * ATOMS // CHUNK) + -(-SAMPLES // CHUNK)
    done = len(loads)
    second.read_batch([5, 3])
    late = AtomicDataZarrReader(paths[0])
    late.read_batch(range(SAMPLES))  # out of the arrays that the others have joined
    assert len(loads) == done
    assert budget.nbytes == WHOLE
    first.close()
    late.close()
    assert budget.nbytes == WHOLE  # somebody reads it still
    second.read_batch(range(SAMPLES))
    assert len(loads) == done
    second.close()
    assert budget.nbytes == 0


def test_what_is_not_the_same_is_not_shared(
    paths: tuple[Path, Path], tmp_path: Path, loads: list[Any]
) -> None:
    shutil.copytree(paths[0], tmp_path / "copy.zarr")  # of one identity, and on its own from here
    readers = [AtomicDataZarrReader(p) for p in (*paths, tmp_path / "copy.zarr")]
    for path in (paths[0], tmp_path / "copy.zarr"):
        AtomicDataZarrWriter(path).delete([0 if path == paths[0] else 1])
    readers += [AtomicDataZarrReader(p) for p in (paths[0], tmp_path / "copy.zarr")]
    energies = [reader.read_batch([0, 1]).energy.flatten().tolist() for reader in readers]
    assert energies == [[1000, 1001], [2000, 2001], [1000, 1001], [1001, 1002], [1000, 1002]]
    energy = [where for where, name, _ in loads if name == "energy"]
    assert len(energy) == len(readers)


def test_refresh_and_the_collector_give_back(paths: tuple[Path, Path], budget: CacheBudget) -> None:
    reader = AtomicDataZarrReader(paths[0])
    reader.read_batch(range(SAMPLES))
    assert budget.nbytes == WHOLE
    AtomicDataZarrWriter(paths[0]).delete([3])
    reader.refresh()
    assert budget.nbytes == 0
    assert reader.read_batch([3]).energy.item() == 1004
    assert budget.nbytes > 0
    del reader
    gc.collect()
    assert budget.nbytes == 0


def test_a_size_of_its_own_is_its_own(paths: tuple[Path, Path], budget: CacheBudget) -> None:
    with AtomicDataZarrReader(paths[0], cache_bytes=3000) as reader:
        for start in range(0, SAMPLES, 5):
            reader.read_batch(range(start, start + 5))
            assert 0 < reader._cache.nbytes <= 3000
        assert budget.nbytes == 0
        other = pickle.loads(pickle.dumps(reader))
        assert (other._cache.limit, other._cache.is_shared) == (3000, False)


def test_another_process_shares_its_own_budget(paths: tuple[Path, Path]) -> None:
    with AtomicDataZarrReader(paths[0]) as reader:
        reader.read_batch(range(SAMPLES))
        text = pickle.dumps(reader)
        with AtomicDataZarrWriter(paths[0]).transaction() as writer:
            for _ in range(3):
                writer.append(reader.read_block(range(SAMPLES)))
        with AtomicDataZarrReader(paths[0]) as larger:
            # The place and the generation: nothing that grows with the store.
            assert abs(len(pickle.dumps(larger)) - len(text)) < 32
        with pickle.loads(text) as other:
            assert other._cache.is_shared
            assert other.read_batch([4]).energy.item() == 1004


def test_the_limit_may_be_lowered_meanwhile(paths: tuple[Path, Path], budget: CacheBudget) -> None:
    readers = [AtomicDataZarrReader(p) for p in paths]
    readers[0].read_batch(range(SAMPLES))
    with set_options(cache_bytes=WHOLE // 2):
        readers[1].read_batch([0])
        assert 0 < budget.nbytes <= WHOLE // 2
        want = np.arange(SAMPLES) + 1000.0
        assert (readers[0].read_batch(range(SAMPLES)).energy.flatten().numpy() == want).all()


def piece(size: int = 10) -> Any:
    return lambda: np.zeros(size, dtype=np.int8)


def test_the_oldest_goes_first_whoever_it_is_of() -> None:
    budget = CacheBudget(40)
    a, b = (PieceCache(budget=budget, key=key) for key in "ab")
    for number in (1, 2):
        a.get(number, piece())
    b.get(1, piece())
    whole = a.join("field", [1, 2])
    assert whole is not None
    assert (a.nbytes, len(a), a.wholes) == (20, 0, 1)
    b.get(2, piece())
    b.get(1, piece())

    class Told:
        names: list[str]

        def forget(self, name: str) -> None:
            self.names.append(name)

    told = Told()
    told.names = []
    a.listen(told)
    whole.touch()
    b.get(3, piece())  # the second of b was not used for longest
    assert (a.nbytes, b.nbytes, told.names) == (20, 20, [])
    b.get(1, piece())
    b.get(4, piece())
    b.get(5, piece())
    assert (a.nbytes, told.names, whole.gone) == (0, ["field"], True)
    assert budget.nbytes == b.nbytes <= 40


def test_heads_of_a_store_that_came_later_get_their_share() -> None:
    budget = CacheBudget(1600)
    a, b = (PieceCache(budget=budget, key=key) for key in "ab")
    for number in range(10):
        a.keep_head(number, np.zeros(10, np.int8))
    assert a.nbytes == 100
    for number in range(10):
        b.keep_head(number, np.zeros(10, np.int8))
    assert (a.nbytes, b.nbytes) == (50, 50)
    a.close()
    assert budget.nbytes == 50


@pytest.fixture
def busy() -> Iterator[threading.Event]:
    stop = threading.Event()
    yield stop
    stop.set()


def test_threads_of_two_stores_agree_with_the_bytes(
    paths: tuple[Path, Path], budget: CacheBudget, busy: threading.Event
) -> None:
    """Joined, dropped, joined again while others read: same rows, and no byte is lost count of."""
    errors: list[BaseException] = []

    def read(which: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with AtomicDataZarrReader(paths[which]) as reader:
                for _ in range(150):
                    index = rng.integers(0, SAMPLES, 25)
                    found = reader.read_batch(index).energy.flatten().numpy()
                    assert (found == index + 1000 * (which + 1)).all()
        except BaseException as error:
            errors.append(error)

    with set_options(cache_bytes=int(1.3 * WHOLE)):
        threads = [threading.Thread(target=read, args=(n % 2, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert budget.nbytes <= 1.3 * WHOLE
            threads[0].join(0.002)
        for thread in threads:
            thread.join()
    assert errors == []
    assert budget.nbytes == held(budget) == 0
    assert budget._head_bytes == 0

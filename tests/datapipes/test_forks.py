"""A fork while threads read: the child has its own locks and threads, and reads on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes.cache import PieceCache
from alchemi_xr.data.datapipes.pool import BufferPool
from alchemi_xr.store import StoreWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# Forks again and again while two threads read in a circle; a child that does not come to its
# end stands still at a lock that a thread of the parent held.
CHILD = """
    import os, sys, threading, time, warnings
    import numpy as np
    from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset

    warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads: that is the test
    path, forks, cache = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dataset = Dataset(AtomicDataZarrReader(path, cache_bytes=cache), device="cpu")
    expected = dataset.get_batch(range(40)).energy.sum()
    stop = threading.Event()

    def read(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            dataset.get_batch(rng.integers(0, len(dataset), 32))

    threads = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    steps = iter(DataLoader(dataset, batch_size=8, prefetch_factor=2))
    begun = next(steps).energy.sum()
    failed = 0
    for number in range(forks):
        time.sleep(0.003 * (number % 5))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert dataset.get_batch(range(40)).energy.sum() == expected
                dataset.prefetch(3)
                assert float(dataset[3][0].energy) == 3.0
                rest = begun + sum(batch.energy.sum() for batch in steps)
                whole = sum(b.energy.sum() for b in DataLoader(dataset, batch_size=8))
                assert rest == whole
                code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + 60
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                failed += status != 0
                break
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                failed += 1
                break
            time.sleep(0.001)
    stop.set()
    for thread in threads:
        thread.join()
    dataset.close()
    sys.exit(failed)
"""


def write(path: Path, profile: str) -> None:
    rng = np.random.default_rng(0)
    ptr = np.arange(401) * 20
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 9, 8000),
        "positions": rng.normal(size=(8000, 3)).astype(np.float32),
        "energy": np.arange(400, dtype=float)[:, None],
    }
    levels: Any = {"atomic_numbers": "atom", "positions": "atom", "energy": "system"}
    StoreWriter(path, profile).write(Block(ptr, np.zeros(401, np.int64), arrays, levels))


@pytest.mark.parametrize(
    ("profile", "cache"),
    [("mixed", 2**25), ("balanced", 100_000)],
)
def test_a_child_forked_while_threads_read_reads_on(
    tmp_path: Path, profile: str, cache: int
) -> None:
    write(tmp_path / "a.zarr", profile)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "a.zarr"), "12", str(cache)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_locks_and_what_was_flying_are_renewed() -> None:
    """What ``os.register_at_fork`` calls, without a fork: the state that hung before."""
    cache, pool = PieceCache(1000), BufferPool()
    cache.get("a", lambda: np.zeros(4))
    budget, space = cache.budget, cache._space
    with budget._lock, pool._lock:
        space.flying["b"] = None  # type: ignore[assignment]
        budget._bytes = space.nbytes = 7  # the fork came between a piece and its bytes
        budget.renew()
        pool.renew()
        assert cache.get("b", lambda: np.ones(3)).tolist() == [1, 1, 1]
        assert cache.nbytes == budget.nbytes == 32 + 24
        assert pool.empty((1 << 17,), np.dtype(np.uint8)).nbytes == 1 << 17

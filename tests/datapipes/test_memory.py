"""Peak memory of iterating hangs on the batch, not on the store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store import StoreWriter

ATOMS = 48
STEP = 5_000

# Run in a process of its own: its peak is taken after the imports and the first batches, which
# would otherwise hide what iterating takes.
CHILD = """
import json, sys
from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(l.split()[1]) * 1024 for l in lines if l.startswith(key + ":"))

path, shuffle = sys.argv[1], sys.argv[2] == "shuffle"
warm = sys.argv[3]
for where in (warm, path):
    with Dataset(AtomicDataZarrReader(where, cache_bytes=2**23), device="cpu") as dataset:
        loader = DataLoader(dataset, batch_size=64, shuffle=shuffle, prefetch_factor=4)
        if where == path:
            # Pages of mapped files are the system's to take back: they are not counted.
            base = peak = status("RssAnon")
        atoms = 0
        for number, batch in enumerate(loader):
            atoms += batch.num_nodes
            if where == path:
                peak = max(peak, status("RssAnon"))
            if number == (40 if shuffle else -1):
                break
print(json.dumps({"base": base, "peak": peak, "atoms": atoms}))
"""


def write(path: Path, samples: int) -> int:
    """A store of so many samples, made piece by piece; its bytes in memory."""
    rng = np.random.default_rng(0)
    total = 0
    for start in range(0, samples, STEP):
        rows = STEP * ATOMS
        block = Block(
            counts_to_ptr(np.full(STEP, ATOMS)),
            np.zeros(STEP + 1, dtype=np.int64),
            {
                "positions": rng.normal(size=(rows, 3)).astype(np.float32),
                "forces": rng.normal(size=(rows, 3)).astype(np.float32),
                "atomic_numbers": rng.integers(1, 9, rows),
                "energy": rng.normal(size=(STEP, 1)),
            },
            {
                "positions": "atom",
                "forces": "atom",
                "atomic_numbers": "atom",
                "energy": "system",
            },
        )
        total += block.nbytes
        if start:
            StoreWriter(path).append(block)
        else:
            StoreWriter(path).write(block)
    return total


def measure(path: Path, order: str, warm: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), order, str(warm)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, int]:
    """A store to warm up on, one of N samples, one of 4 N; all larger than the cache."""
    folder = tmp_path_factory.mktemp("memory")
    warm, small, large = (folder / f"{name}.zarr" for name in ("warm", "small", "large"))
    write(warm, 8 * STEP)
    write(small, 8 * STEP)
    return warm, small, large, write(large, 32 * STEP)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("order", ["sequential", "shuffle"])
def test_peak_memory_does_not_grow_with_the_store(
    stores: tuple[Path, Path, Path, int], order: str
) -> None:
    warm, small, large, large_bytes = stores
    assert large_bytes > 200 * 2**20
    one, four = measure(small, order, warm), measure(large, order, warm)
    if order == "sequential":
        assert four["atoms"] == 4 * one["atoms"] == 32 * STEP * ATOMS
    assert four["peak"] < 1.2 * one["peak"]
    assert four["peak"] - one["peak"] < 24 * 2**20, (one, four)
    # The imports are most of a peak: what iterating adds to it is far from the whole store.
    assert four["peak"] - four["base"] < large_bytes / 3, (one, four)

"""defragment, merge and sort at 25,000 to 200,000 samples: time beside linear growth, peak RSS.

Data: 16 to 48 atoms a sample; atomic numbers, positions and forces float64, energy;
a tenth of the samples deleted. Two threads; a fresh process a row; the peer of each row
is the same work at 25,000, scaled. The peak is in the note: it grows until the store is
larger than what is in flight, and from there on by the pointers and the order alone
(about 45 to 60 bytes a sample at 1 to 4 million). Predicted before the profile: pieces held by the graph;
found: whole copies of the pointers in every task, and what glibc keeps in the arenas of
threads that free what others made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Row

COUNTS = (25_000, 50_000, 100_000, 200_000)
WORK = ("defragment", "sort", "merge")

CODE = """
import sys, time
import numpy as np
from alchemi_xr import etl
from alchemi_xr.config import set_options
from alchemi_xr.data.block import Block
from alchemi_xr.store import StoreWriter

def make(path, count):
    writer, rng = StoreWriter(path), np.random.default_rng(0)
    for start in range(0, count, 12500):
        n = min(12500, count - start)
        ptr = np.concatenate([[0], np.cumsum(rng.integers(16, 49, n))])
        v = int(ptr[-1])
        block = Block(ptr, ptr * 0,
            {"atomic_numbers": rng.integers(1, 9, v), "positions": rng.normal(size=(v, 3)),
             "forces": rng.normal(size=(v, 3)), "energy": rng.normal(size=(n, 1))},
            {"atomic_numbers": "atom", "positions": "atom", "forces": "atom", "energy": "system"})
        writer.append(block) if start else writer.write(block)
    writer.delete(rng.permutation(count)[: count // 10])

if __name__ == "__main__":
    act, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    set_options(progress="off")
    start = time.perf_counter()
    if act == "make":
        make(path, count)
    elif act == "merge":
        etl.merge([path, path], path + ".merged", threads=2)
    elif act == "sort":
        etl.sort(path, "energy", destination=path + ".sorted", threads=2)
    else:
        etl.defragment(path, destination=path + ".whole", threads=2)
    seconds = time.perf_counter() - start
    peak = next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM"))
    print(seconds, int(peak) // 1024)
"""


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this part."""
    first: dict[str, float] = {}
    for count in COUNTS:
        with tempfile.TemporaryDirectory(prefix="alchemi_xr_bench_") as folder:
            script = Path(folder) / "work.py"
            script.write_text(CODE)
            path = Path(folder) / "a.zarr"
            _run(script, "make", path, count)
            for work in WORK:
                seconds, peak = _run(script, work, path, count)
                base = first.setdefault(work, seconds)
                yield Row(
                    f"{work}, {count:,} samples",
                    f"itself at {COUNTS[0]:,}, scaled",
                    seconds,
                    base * count / COUNTS[0],
                    0.9,
                    note=f"peak RSS {peak} MiB",
                )


def _run(script: Path, work: str, path: Path, count: int) -> tuple[float, int]:
    root = str(Path(__file__).resolve().parents[1])
    out = subprocess.run(
        [sys.executable, str(script), work, str(path), str(count)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    seconds, peak = out.stdout.split()
    return float(seconds), int(peak)

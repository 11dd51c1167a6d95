"""Peak memory of defragmentation and of reading by blocks does not grow with the store."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import numpy as np
from alchemi_xr.data.block import Block
from alchemi_xr.store import BulkWriter, FieldLayout, StoreWriter, open_store

path, num, act = sys.argv[1], int(sys.argv[2]), sys.argv[3]
atoms = 32
if act == "make":
    writer = BulkWriter.create(
        path,
        [FieldLayout("positions", "atom", "float64", (3,)),
         FieldLayout("forces", "atom", "float64", (3,)),
         FieldLayout("atomic_numbers", "atom", "int64")],
        np.full(num, atoms), np.zeros(num, int), config="raw",
    )
    unit = writer.shard_rows("atom")
    rng = np.random.default_rng(0)
    for start in range(0, num * atoms, unit):
        n = min(unit, num * atoms - start)
        writer.write_rows("positions", start, rng.random((n, 3)))
        writer.write_rows("forces", start, rng.random((n, 3)))
        writer.write_rows("atomic_numbers", start, np.ones(n, int))
    writer.commit()
elif act == "defragment":
    StoreWriter(path, "raw").delete(slice(None, None, 10))
    StoreWriter(path, "raw").defragment()
else:
    for block in open_store(path).iter_blocks(max_bytes=8 << 20):
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak(path, num, act):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path), str(num), act],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.slow
def test_peak_memory_is_flat(tmp_path):
    peaks = {}
    for num in (20_000, 80_000):
        peak(tmp_path / f"{num}.zarr", num, "make")
        peaks[num] = [peak(tmp_path / f"{num}.zarr", num, act) for act in ("read", "defragment")]
    # 80,000 samples hold 143 MB; a fifth of growth is 30 MB of a process of 150.
    for small, large in zip(*peaks.values(), strict=True):
        assert large < 1.2 * small, peaks

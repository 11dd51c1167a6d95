"""A store of 200,000 frames is analysed in bounded memory, and in the same numbers however cut."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr import analysis

WRITE = """
import sys
import numpy as np
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store.writer import StoreWriter

path, frames, atoms = sys.argv[1], 200_000, 24
rng = np.random.default_rng(0)
x = rng.random((atoms, 3)) * 8
for start in range(0, frames, 20_000):
    steps = rng.normal(size=(20_000, atoms, 3)).astype(np.float32) * 0.05
    path_ = x + np.cumsum(steps, axis=0)
    x = path_[-1]
    ptr = counts_to_ptr(np.full(20_000, atoms))
    flat = np.mod(path_, 8.0).astype(np.float32).reshape(-1, 3)
    block = Block(
        ptr, np.zeros_like(ptr),
        {"positions": flat, "forces": flat, "atomic_numbers": np.full(len(flat), 18, np.int32),
         "energy": np.zeros((20_000, 1)),
         "cell": np.tile(np.eye(3, dtype=np.float32) * 8, (20_000, 1, 1)),
         "pbc": np.ones((20_000, 3), bool)},
        {"positions": "atom", "forces": "atom", "atomic_numbers": "atom", "energy": "system",
         "cell": "system", "pbc": "system"},
    )
    StoreWriter(path).write(block) if start == 0 else StoreWriter(path).append(block)
    del steps, path_, flat, block
"""

ANALYSE = """
import sys
from alchemi_xr import analysis, open_dataset

ds, frames = open_dataset(sys.argv[1]), 200_000
analysis.fmax(ds)
analysis.statistics(ds)
analysis.msd(ds, blocks=2)
analysis.rmsd(ds.ragged.isel(slice(0, 40_000)))
analysis.rdf(ds.ragged.isel(slice(0, frames, 20)), 4.0)
analysis.composition(ds)
# Not ru_maxrss: that begins with what the process was forked from.
peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
print(peak // 1024)
"""


@pytest.mark.slow
def test_200k_frames_stay_under_600_mb(tmp_path):
    out = ""
    for code in (WRITE, ANALYSE):
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "s.zarr")],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        out = run.stdout
    assert int(out) < 600


@given(st.data())
@settings(max_examples=6, deadline=None)
def test_no_result_depends_on_the_blocks(tmp_path_factory, data):
    from alchemi_xr.data.block import Block
    from alchemi_xr.data.csr import counts_to_ptr
    from alchemi_xr.ragged import open_dataset
    from alchemi_xr.store.writer import StoreWriter
    from alchemi_xr.testing.strategies import sample_chunks

    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    rng = np.random.default_rng(len(counts))
    ptr = counts_to_ptr(np.array(counts))
    n, v = len(counts), int(ptr[-1])
    arrays = {
        "positions": rng.random((v, 3)) * 4,
        "forces": rng.normal(size=(v, 3)),
        "velocities": rng.normal(size=(v, 3)),
        "atomic_numbers": rng.choice([1, 8], v),
        "energy": rng.normal(size=(n, 1)),
        "cell": np.tile(np.eye(3) * 5, (n, 1, 1)),
        "pbc": rng.random((n, 3)) < 0.5,
    }
    levels = dict.fromkeys(arrays, "atom") | dict.fromkeys(["energy", "cell", "pbc"], "system")
    path = str(tmp_path_factory.mktemp("c") / "s.zarr")
    StoreWriter(path).write(Block(ptr, np.zeros_like(ptr), arrays, levels))
    whole = open_dataset(path)
    cut = open_dataset(path, chunks=data.draw(sample_chunks(n)))
    for function in (
        analysis.fmax,
        analysis.temperature,
        analysis.coordination,
        analysis.bond_lengths,
        analysis.angles,
        analysis.statistics,
        analysis.composition,
        analysis.baseline,
        analysis.duplicates,
        lambda ds: analysis.rdf(ds, 3.0, bins=10),
    ):
        one, two = function(whole), function(cut)
        if isinstance(one, xr.DataArray):
            one, two = one.to_dataset(name="x"), two.to_dataset(name="x")
        for name in one.data_vars:
            np.testing.assert_allclose(
                two[name].values, one[name].values, rtol=1e-7, atol=1e-9, err_msg=str(name)
            )

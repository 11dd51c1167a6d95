"""Ragged xarray beside plain xarray on the same store and a loop over samples.

Data: 20,000 samples of 2 to 100 atoms (about 1 M atoms), positions and forces
float32, written with the default profile.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.ragged import open_dataset
from alchemi_xr.store.writer import StoreWriter
from benchmarks.report import Row, compare

SAMPLES = 20_000


def _write(path: str) -> Block:
    rng = np.random.default_rng(0)
    ptr = counts_to_ptr(rng.integers(2, 101, SAMPLES))
    atoms = int(ptr[-1])
    block = Block(
        ptr,
        np.zeros_like(ptr),
        {
            "atomic_numbers": rng.integers(1, 90, atoms),
            "positions": rng.normal(size=(atoms, 3)).astype(np.float32),
            "forces": rng.normal(size=(atoms, 3)).astype(np.float32),
            "energy": rng.normal(size=(SAMPLES, 1)),
        },
        {
            "atomic_numbers": "atom",
            "positions": "atom",
            "forces": "atom",
            "energy": "system",
        },
    )
    StoreWriter(path).write(block)
    return block


def _write_large(path: str) -> None:
    ptr = counts_to_ptr(np.full(200_000, 10))
    arrays = {"positions": np.zeros((2_000_000, 3), np.float32), "energy": np.zeros((200_000, 1))}
    block = Block(ptr, np.zeros_like(ptr), dict(arrays), {"positions": "atom", "energy": "system"})
    StoreWriter(path).write(block)


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room."""
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    try:
        yield from _rows(str(folder / "samples.zarr"))
    finally:
        shutil.rmtree(folder)


def _rows(path: str) -> Iterator[Row]:
    block = _write(path)
    ptr = block.atoms_ptr
    yield compare(
        "open a store",
        lambda: open_dataset(path),
        "xarray.open_zarr(group='core'), without pointers",
        lambda: xr.open_zarr(path, group="core", consolidated=False, chunks=None),
        # Ours reads two pointers and a mask besides.
        target=0.5,
    )
    large = path.replace("samples", "large")
    _write_large(large)
    yield compare(
        "open a store of 200,000 samples (100 ms are promised)",
        lambda: open_dataset(large),
        "xarray.open_zarr(group='core'), without pointers",
        lambda: xr.open_zarr(large, group="core", consolidated=False, chunks=None),
        target=0.2,
    )

    def fmax(ds: xr.Dataset) -> xr.DataArray:
        norm = np.sqrt(xr.dot(ds.forces, ds.forces, dim="xyz"))
        return ds.ragged.reduce(norm, "max").compute()

    def fmax_loop() -> list[float]:
        forces = xr.open_zarr(path, group="core", consolidated=False).forces.values
        return [
            float(np.sqrt((forces[a:b] ** 2).sum(axis=1)).max()) for a, b in itertools.pairwise(ptr)
        ]

    yield compare(
        "largest force of 20,000 samples, opening included",
        lambda: fmax(open_dataset(path, chunks={})),
        "loop over samples, field in memory",
        fmax_loop,
        target=3,
    )
    lowest = np.sort(np.argsort(block["energy"][:, 0], kind="stable")[:200])

    ours = open_dataset(path, fields=["positions", "energy"])
    plain = xr.open_dataset(path, engine="zarr", group="core", consolidated=False, cache=False)
    plain = plain[["positions", "energy"]]

    def select_plain() -> xr.Dataset:
        at = np.concatenate([np.arange(ptr[i], ptr[i + 1]) for i in lowest])
        return plain.isel(sample=lowest, atom=at).load()

    yield compare(
        "positions and energy of 200 scattered samples",
        lambda: ours.ragged.isel(lowest).load(),
        "plain xarray, isel by rows made by hand",
        select_plain,
        target=1,
    )

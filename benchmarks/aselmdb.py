"""ASE LMDB files to a store beside ASE's own reader (which only reads).

Data: 4,000 rows of 64 atoms with forces, energy, cell and a text, as OMol25 and OMat24
have them (33 MB). Ours reads every row twice, for its counts and for its values.
Predicted: 4 to 6 times, half of our time going to zlib.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alchemi_xr.data.block import Block
from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.exporting import export
from alchemi_xr.store.writer import StoreWriter
from benchmarks.report import Row, compare

ROWS, ATOMS = 4_000, 64


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room; none where ``ase-db-backends`` is missing."""
    try:
        import ase_db_backends  # noqa: F401
    except ImportError:
        return
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    try:
        yield from _rows(folder)
    finally:
        shutil.rmtree(folder)


def _block() -> Block:
    rng = np.random.default_rng(0)
    ptr = np.arange(ROWS + 1) * ATOMS
    total = ROWS * ATOMS
    arrays = {
        "atomic_numbers": rng.integers(1, 9, total),
        "positions": rng.normal(size=(total, 3)),
        "forces": rng.normal(size=(total, 3)),
        "energy": rng.normal(size=(ROWS, 1)),
        "cell": np.tile(np.eye(3) * 9, (ROWS, 1, 1)),
        "pbc": np.ones((ROWS, 3), dtype=bool),
        "tag": np.array([f"t{i % 5}" for i in range(ROWS)], dtype=object),
    }
    atom = ("atomic_numbers", "positions", "forces")
    return Block(ptr, ptr * 0, arrays, {n: "atom" if n in atom else "system" for n in arrays})


def _rows(folder: Path) -> Iterator[Row]:
    from ase.db import connect

    StoreWriter(folder / "in.zarr").write(_block())
    path = folder / "in.aselmdb"
    export(folder / "in.zarr", path, progress=False)
    number = itertools.count()

    def ours() -> None:
        dst = folder / f"{next(number)}.zarr"
        convert(path, dst, threads=1, progress=False)
        shutil.rmtree(dst)

    def ase() -> None:
        with connect(path, type="aselmdb", readonly=True) as database:
            for row in database.select():
                row.toatoms()

    note = f"{ROWS:,} rows x {ATOMS} atoms, {path.stat().st_size / 1e6:.0f} MB"
    yield compare(
        "aselmdb to store, one thread", ours, "ase select, toatoms (reads only)", ase,
        target=5, rounds=5, note=note,
    )  # fmt: skip

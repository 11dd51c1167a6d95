"""ASE databases, LMDB and SQLite, to a store beside ASE's own reader (which only reads).

Data: 4,000 rows of 64 atoms with forces, energy, cell and a text, as OMol25 and OMat24
have them (33 MB of LMDB, 18 MB of SQLite). ASE's side makes ``Atoms`` of every row and asks
them for energy and forces, as who trains on them does. Ours decodes every row once, and
puts it down uncompressed for the writing. Predicted for LMDB from what libdeflate, the
reading of the numbers and the writing of the store take: 5 to 7 times; for SQLite, whose
numbers need no reading, 8 to 10 times. Measured on two cores that others used too: 6.2 to
6.5 times for LMDB (7.4 by CPU time), 3.6 to 6.4 for SQLite (6.6 by CPU time), where the
writing of the store is half of it; if ASE is not asked for energy and forces, 4.4 and 2.1
times by CPU time.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from alchemi_xr.data.block import Block
from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.exporting import export
from alchemi_xr.store.writer import StoreWriter
from benchmarks.report import Row, compare

ROWS, ATOMS = 4_000, 64


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room; LMDB needs ``ase-db-backends``."""
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    try:
        StoreWriter(folder / "in.zarr").write(_block())
        if find_spec("ase_db_backends") is not None:
            yield _row(folder, "aselmdb", 5.0)
        yield _row(folder, "db", 3.0)
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


def _row(folder: Path, kind: str, target: float) -> Row:
    from ase.db import connect

    path = folder / f"in.{kind}"
    export(folder / "in.zarr", path, progress=False)
    number = itertools.count()

    def ours() -> None:
        dst = folder / f"{next(number)}.zarr"
        convert(path, dst, threads=1, progress=False)
        shutil.rmtree(dst)

    def ase() -> None:
        given = {"readonly": True} if kind == "aselmdb" else {}
        with connect(path, type=kind, use_lock_file=False, **given) as database:
            for row in database.select():
                atoms = row.toatoms()
                atoms.get_potential_energy()
                atoms.get_forces()

    note = f"{ROWS:,} rows x {ATOMS} atoms, {path.stat().st_size / 1e6:.0f} MB"
    return compare(
        f"{kind} to store, one thread", ours, "ase select, toatoms, energy, forces (reads only)", ase,
        target=target, rounds=5, note=note,
    )  # fmt: skip

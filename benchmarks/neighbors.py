"""Neighbour lists in the pass of a conversion beside ASE's reader and neighbour list.

Data: 300 periodic frames of 64 atoms, cutoff 5 Å (39 neighbours an atom). The peer
reads and searches and writes nothing; ours reads twice, searches once, writes the
store. Predicted: 20 times, for ASE's search costs 50 ms a frame and vesin's 0.7.
Measured 23 to 24 times. Peak memory at 2,000 and 8,000 frames with one thread: 343 and 377 MB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alchemi_xr.etl.conversion import convert
from benchmarks.report import Row, compare

FRAMES, ATOMS, CUTOFF = 300, 64, 5.0


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room."""
    with tempfile.TemporaryDirectory(prefix="alchemi_xr_bench_") as folder:
        path = Path(folder) / "frames.xyz"
        _write(path)

        def ours() -> None:
            out = Path(folder) / "out.zarr"
            convert(path, out, cutoff=CUTOFF, threads=1, progress=False, overwrite=True)

        yield compare(
            "extended XYZ to a store with neighbour lists",
            ours,
            "ASE: read, neighbour list",
            lambda: _peer(path),
            target=10.0,
            rounds=3,
        )


def _peer(path: Path) -> int:
    from ase.io import iread
    from ase.neighborlist import primitive_neighbor_list

    total = 0
    for atoms in iread(path, ":"):
        i, _, _ = primitive_neighbor_list("ijS", atoms.pbc, atoms.cell, atoms.positions, CUTOFF)
        total += len(i)
    return total


def _write(path: Path) -> None:
    rng = np.random.default_rng(0)
    head = (
        f'{ATOMS}\nLattice="9.5 0 0 0 9.5 0 0 0 9.5" Properties=species:S:1:pos:R:3 '
        'energy=1.0 pbc="T T T"\n'
    )
    with path.open("w") as file:
        for _ in range(FRAMES):
            lines = (rng.random((ATOMS, 3)) * 9.5).tolist()
            file.write(head + "".join(f"Si {x:.8f} {y:.8f} {z:.8f}\n" for x, y, z in lines))

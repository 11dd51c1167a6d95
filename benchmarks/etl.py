"""Extended XYZ to a store beside ASE's reader (which only reads) on the same file.

Data: 4,000 frames of 64 atoms as ASE writes them: positions, forces, cell,
energy, one text key (27 MB). The fixed-width lines of that writer take the fast
way; the second row has the shortest exact form of each number instead.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.sources.extxyz import ExtxyzSource
from benchmarks.report import Row, compare

FRAMES, ATOMS = 4_000, 64


def _write(path: Path, form: str) -> None:
    rng = np.random.default_rng(0)
    symbols = np.array(["H", "C", "O", "Si"])
    with path.open("w") as file:
        for _ in range(FRAMES):
            file.write(
                f'{ATOMS}\nLattice="12.0 0.0 0.0 0.0 12.0 0.0 0.0 0.0 12.0" '
                "Properties=species:S:1:pos:R:3:forces:R:3 config_type=bulk "
                f'energy={float(rng.normal())!r} pbc="T T T"\n'
            )
            numbers = rng.normal(size=(ATOMS, 6)).tolist()
            for symbol, row in zip(symbols[rng.integers(0, 4, ATOMS)], numbers, strict=True):
                file.write(f"{symbol:<2} " + " ".join(form.format(v) for v in row) + "\n")


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room."""
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    try:
        yield from _rows(folder)
    finally:
        shutil.rmtree(folder)


def _rows(folder: Path) -> Iterator[Row]:
    from ase.io import iread

    number = itertools.count()
    for title, form in (("fixed-width", "{:15.8f}"), ("shortest exact", "{!r}")):
        path = folder / f"{form[1:3].strip(':!')}.extxyz"
        _write(path, form)

        def ours(path: Path = path) -> None:
            dst = folder / f"{next(number)}.zarr"
            convert(path, dst, threads=1, progress=False)
            shutil.rmtree(dst)

        def parse(path: Path = path) -> None:
            source = ExtxyzSource([str(path)])
            for partition in source.scan().partitions:
                source.read(partition)

        def ase(path: Path = path) -> None:
            for _ in iread(path, index=":", format="extxyz"):
                pass

        note = f"{FRAMES:,} frames x {ATOMS} atoms, {path.stat().st_size / 1e6:.0f} MB"
        yield compare(
            f"extxyz to store, one thread, {title}", ours, "ase iread (reads only)", ase,
            target=15, rounds=3, note=note,
        )  # fmt: skip
        yield compare(
            f"extxyz to arrays, {title}", parse, "ase iread", ase, target=15, rounds=3, note=note
        )

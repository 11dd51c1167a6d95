"""Extended XYZ to a store beside ASE's reader and the C parser `extxyz` (which only read).

Data: 12,000 frames of 64 atoms as ASE writes them: positions, forces, cell,
energy, one text key (80 MB), with fixed decimals and with the shortest exact form
of each number; and 36,000 molecules of 5 to 20 atoms. Predicted before the C
reader was written: 8 to 12 times ASE with the store, 20 without, the rest going to
the files of the store and their fsync; two processes 1.6 times one, for the scan of
one file and the last commit are not parted.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.sources.extxyz import ExtxyzSource
from benchmarks.report import Row, compare

FRAMES, ATOMS = 12_000, 64


def _write(path: Path, form: str, frames: int, least: int, most: int) -> None:
    rng = np.random.default_rng(0)
    symbols = np.array(["H", "C", "O", "Si"])
    with path.open("w") as file:
        for atoms in rng.integers(least, most + 1, frames).tolist():
            file.write(
                f'{atoms}\nLattice="12.0 0.0 0.0 0.0 12.0 0.0 0.0 0.0 12.0" '
                "Properties=species:S:1:pos:R:3:forces:R:3 config_type=bulk "
                f'energy={float(rng.normal())!r} pbc="T T T"\n'
            )
            numbers = rng.normal(size=(atoms, 6)).tolist()
            for symbol, row in zip(symbols[rng.integers(0, 4, atoms)], numbers, strict=True):
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
    kinds = (
        ("64 atoms, fixed decimals", "{:15.8f}", FRAMES, ATOMS, ATOMS),
        ("64 atoms, shortest exact", "{!r}", FRAMES, ATOMS, ATOMS),
        ("5 to 20 atoms", "{:15.8f}", 3 * FRAMES, 5, 20),
    )
    for title, form, frames, least, most in kinds:
        path = folder / f"{next(number)}.extxyz"
        _write(path, form, frames, least, most)

        def ours(path: Path = path, **how: Any) -> None:
            dst = folder / f"{next(number)}.zarr"
            convert(path, dst, progress=False, **(how or {"threads": 1}))
            shutil.rmtree(dst)

        def parse(path: Path = path) -> None:
            source = ExtxyzSource([str(path)])
            for partition in source.scan().partitions:
                source.read(partition)

        def ase(path: Path = path) -> None:
            for _ in iread(path, index=":", format="extxyz"):
                pass

        size = path.stat().st_size
        found = [
            compare(
                f"extxyz to store, one thread, {title}", ours, "ase iread (reads only)", ase,
                target=15, rounds=3,
            ),
            compare(f"extxyz to arrays, {title}", parse, "ase iread", ase, target=15, rounds=3),
        ]  # fmt: skip
        if find_spec("extxyz") is not None:
            import extxyz

            def parser(path: Path = path) -> None:
                for _ in extxyz.iread_dicts(str(path)):
                    pass

            found.append(
                compare(
                    f"extxyz to store, one thread, {title}", ours, "extxyz (reads only)", parser,
                    target=1,
                )
            )  # fmt: skip
        found.append(
            compare(
                f"extxyz to store, two threads, {title}", lambda ours=ours: ours(threads=2),
                "one thread", ours, target=1.8,
            )
        )  # fmt: skip
        if frames == FRAMES:
            found.append(_workers(title, ours))
        for row in found:
            yield replace(row, note=_rates(row, size, frames))


def _workers(title: str, ours: Callable[..., None]) -> Row:
    """Processes of a local cluster, which is there before the clock runs."""
    from distributed import Client, LocalCluster

    with ExitStack() as stack:
        clients = []
        for count in (1, 2):
            cluster = LocalCluster(
                n_workers=count, threads_per_worker=1, processes=True, dashboard_address=None
            )
            stack.enter_context(cluster)
            clients.append(stack.enter_context(Client(cluster, set_as_default=False)))
        one, two = clients
        return compare(
            f"extxyz to store, two workers, {title}", lambda: ours(client=two),
            "one worker", lambda: ours(client=one), target=1.8,
        )  # fmt: skip


def _rates(row: Row, size: int, frames: int) -> str:
    """Throughput of ours and of the peer."""
    each = [f"{size / 1e6 / s:.0f} MB/s, {frames / s:,.0f}/s" for s in (row.ours_s, row.peer_s)]
    return f"{frames:,} structures, {size / 1e6:.0f} MB: {each[0]} against {each[1]}"

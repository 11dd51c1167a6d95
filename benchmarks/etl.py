"""Extended XYZ to a store beside ASE's reader and the C parser `extxyz` (which only read).

Data: 12,000 frames of 64 atoms as ASE writes them: positions, forces, cell,
energy, one text key (80 MB), with fixed decimals and with the shortest exact form
of each number; and 36,000 molecules of 5 to 20 atoms. Predicted before the C
reader was written: 8 to 12 times ASE with the store, 20 without, the rest going to
the files of the store and their fsync; two workers 1.6 times one on four files, for
what comes before and after the parts is not shared out. Measured on two cores that
others used too: into arrays 20 to 22 times ASE by CPU time (64 atoms), into a store
10 to 11 times, for molecules 25 times; two threads 1.5 times one on a disk in memory,
1.0 to 1.2 times on the disk (how much of that is the disk and how much the other
work was not told apart).
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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

        size = path.stat().st_size

        def ours(src: Any = path, **how: Any) -> None:
            dst = folder / f"{next(number)}.zarr"
            convert(src, dst, progress=False, **(how or {"threads": 1}))
            shutil.rmtree(dst)

        def parse(path: Path = path) -> None:
            source = ExtxyzSource([str(path)])
            for partition in source.scan().partitions:
                source.read(partition)

        def ase(path: Path = path) -> None:
            for _ in iread(path, index=":", format="extxyz"):
                pass

        beside = partial(_beside, title, size, frames)

        yield beside("extxyz to store, one thread", ours, ase, "ase iread (reads only)", 15)
        yield beside("extxyz to arrays", parse, ase, "ase iread", 15)
        if find_spec("extxyz") is not None:
            import extxyz

            def parser(path: Path = path) -> None:
                for _ in extxyz.iread_dicts(str(path)):
                    pass

            yield beside("extxyz to store, one thread", ours, parser, "extxyz (reads only)", 1)
        if frames == FRAMES:
            yield from _scaling(title, path, frames, ours)


def _beside(
    title: str, size: int, frames: int, work: str, ours: Any, peer: Any, name: str, target: float
) -> Row:
    one, other = _Clocked(ours), _Clocked(peer)
    row = compare(f"{work}, {title}", one, name, other, target=target, rounds=3)
    cpu = f"CPU {one.median:.2f} s against {other.median:.2f}, {other.median / one.median:.1f}x"
    return replace(row, note=f"{_rates(row, size, frames)}; {cpu}")


def _scaling(title: str, path: Path, frames: int, ours: Callable[..., None]) -> Iterator[Row]:
    """Two threads and two processes, which are there before the clock runs; four files."""
    from distributed import Client, LocalCluster

    files = [path.with_suffix(f".{i}.extxyz") for i in range(4)]
    for file in files:
        file.hardlink_to(path)
    size = 4 * path.stat().st_size

    def row(what: str, one: Any, two: Any) -> Row:
        found = compare(
            f"extxyz to store, two {what}s, {title}", lambda: ours(files, **two),
            f"one {what}", lambda: ours(files, **one), target=1.8,
        )  # fmt: skip
        return replace(found, note=_rates(found, size, 4 * frames))

    yield row("thread", {"threads": 1}, {"threads": 2})
    with ExitStack() as stack:
        clients = []
        for count in (1, 2):
            cluster = LocalCluster(
                n_workers=count, threads_per_worker=1, processes=True, dashboard_address=":0"
            )
            stack.enter_context(cluster)
            clients.append(stack.enter_context(Client(cluster, set_as_default=False)))
        yield row("worker", {"client": clients[0]}, {"client": clients[1]})


class _Clocked:
    """A call with the CPU time that it took: others use this machine too."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._times: list[float] = []

    def __call__(self) -> None:
        begun = time.process_time()
        self._call()
        self._times.append(time.process_time() - begun)

    @property
    def median(self) -> float:
        return statistics.median(self._times[1:])


def _rates(row: Row, size: int, frames: int) -> str:
    """Throughput of ours and of the peer."""
    each = [f"{size / 1e6 / s:.0f} MB/s, {frames / s:,.0f}/s" for s in (row.ours_s, row.peer_s)]
    return f"{frames:,} structures, {size / 1e6:.0f} MB: {each[0]} against {each[1]}"

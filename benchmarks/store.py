"""The store's writer beside nvalchemi-toolkit and h5py, in one run.

Data A: samples of 64 atoms with atomic_numbers int64, positions and forces
float32, energy float64, cell and pbc. Ours forces every commit to the medium;
the toolkit and plain h5py do not. The toolkit runs in the interpreter named by
``ALCHEMI_BENCH_PEER_PYTHON``; without it its rows are left out. ``python -m
benchmarks store`` prints all; ``ALCHEMI_BENCH_SAMPLES`` changes the size.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store.writer import StoreWriter
from benchmarks.report import Row
from benchmarks.store_peer import arrays

SAMPLES = int(os.environ.get("ALCHEMI_BENCH_SAMPLES", 50_000))
TOOLKIT = "nvalchemi-toolkit"
ATOM = ("atomic_numbers", "positions", "forces")


class Peer:
    """The toolkit in its own interpreter, kept alive over all rows."""

    def __init__(self, python: str, folder: Path) -> None:
        script = Path(__file__).with_name("store_peer.py")
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, what: str, num: int, store: str = "peer.zarr", **more: int) -> float:
        """Seconds of one call, measured there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"what": what, "num": num, "store": store, **more}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer's interpreter ended in {what}")
        return float(json.loads(answer))

    def close(self) -> None:
        self._process.communicate()


def block(num: int, seed: int = 0) -> Block:
    """Data A."""
    flat = arrays(num, seed)
    levels = {name: "atom" if name in ATOM else "system" for name in flat}
    atoms_ptr = counts_to_ptr(np.full(num, 64))
    return Block(atoms_ptr, np.zeros_like(atoms_ptr), flat, levels)


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternated(
    work: str,
    ours: Callable[[], float],
    peer_name: str,
    peer: Callable[[], float],
    *,
    target: float,
    rounds: int = 5,
    note: str = "",
) -> Row:
    """As ``benchmarks.report.compare``, for sides that measure themselves."""
    ours()
    peer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        times[0].append(ours())
        times[1].append(peer())
    return Row(
        work, peer_name, statistics.median(times[0]), statistics.median(times[1]), target, note
    )


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room."""
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    python = os.environ.get("ALCHEMI_BENCH_PEER_PYTHON")
    peer = Peer(python, folder) if python else None
    if peer is None:
        print(f"no {TOOLKIT}: ALCHEMI_BENCH_PEER_PYTHON names no interpreter", file=sys.stderr)
    try:
        yield from _bulk(folder, peer)
        if peer is not None:
            yield from _appends(folder, peer)
            yield from _removals(folder, peer)
    finally:
        if peer is not None:
            peer.close()
        shutil.rmtree(folder)


def _bulk(folder: Path, peer: Peer | None) -> Iterator[Row]:
    data = block(SAMPLES)

    def ours() -> float:
        path = folder / "ours.zarr"
        shutil.rmtree(path, ignore_errors=True)
        return timed(lambda: StoreWriter(path, "raw").write(data))

    what = f"write {SAMPLES:,} x 64 atoms, raw, durable"
    if peer is not None:
        yield alternated(what, ours, TOOLKIT, lambda: peer("write", SAMPLES), target=3)
    try:
        import h5py
    except ImportError:
        print("no h5py: its rows are left out", file=sys.stderr)
        return

    def by_h5py(*, force: bool) -> float:
        path = folder / "peer.h5"
        path.unlink(missing_ok=True)

        def write() -> None:
            with h5py.File(path, "w") as file:
                for name, values in data.arrays.items():
                    file.create_dataset(name, data=values)
                file.create_dataset("atoms_ptr", data=data.atoms_ptr)
            if force:
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

        return timed(write)

    yield alternated(
        what, ours, "h5py uncompressed, not forced", lambda: by_h5py(force=False), target=0.8
    )
    yield alternated(
        what, ours, "h5py uncompressed, forced", lambda: by_h5py(force=True), target=0.8
    )


def _appends(folder: Path, peer: Peer) -> Iterator[Row]:
    data, one, thousand = block(SAMPLES), block(1, 1), block(1_000, 2)
    peer("write", SAMPLES)
    for profile in ("raw", "mixed", "fast"):
        path = folder / f"{profile}.zarr"
        writer = StoreWriter(path, profile)
        writer.write(data)
        yield alternated(
            f"append 1 sample, durable, {profile}",
            lambda writer=writer: timed(lambda: writer.append(one)),
            TOOLKIT,
            lambda: peer("append", 1),
            target=10,
            rounds=15,
        )

        def transaction(writer: StoreWriter = writer) -> float:
            def appends() -> None:
                with writer.transaction():
                    for _ in range(1_000):
                        writer.append(one)

            return timed(appends) / 1_000

        yield alternated(
            f"append 1 sample, one of 1,000 in a transaction, {profile}",
            transaction,
            TOOLKIT,
            lambda: peer("append", 1),
            target=100,
        )
        yield alternated(
            f"append 1,000 samples, durable, {profile}",
            lambda writer=writer: timed(lambda: writer.append(thousand)),
            TOOLKIT,
            lambda: peer("append", 1_000),
            target=8,
            rounds=9,
        )


def _removals(folder: Path, peer: Peer) -> Iterator[Row]:
    data = block(SAMPLES)
    path = folder / "removals.zarr"

    def fresh() -> StoreWriter:
        shutil.rmtree(path, ignore_errors=True)
        writer = StoreWriter(path, "raw")
        writer.write(data)
        return writer

    few, first = 20, itertools.count(0, 1_000)
    peer("write", SAMPLES)
    tenth = np.arange(0, SAMPLES, 10)

    def delete() -> float:
        writer = fresh()
        return timed(lambda: writer.delete(tenth))

    yield alternated(
        f"delete 10 % of {SAMPLES:,}, durable, raw",
        delete,
        TOOLKIT,
        lambda: peer("delete", few, first=next(first)) * len(tenth) / few,
        target=300,
        note=f"peer: {few} samples, times {len(tenth) // few}",
    )
    share = max(1, SAMPLES // 5_000)

    def defragment() -> float:
        writer = fresh()
        writer.delete(tenth)
        return timed(writer.defragment)

    def by_peer() -> float:
        peer("write", 5_000, "small.zarr")
        peer("delete", 500, "small.zarr")
        return peer("defragment", 0, "small.zarr") * share

    yield alternated(
        f"defragment {SAMPLES:,} after that, durable, raw",
        defragment,
        TOOLKIT,
        by_peer,
        target=100,
        rounds=3,
        note=f"peer: 5,000 samples, times {share}",
    )

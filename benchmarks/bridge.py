"""Reading for training beside nvalchemi-toolkit, atompack and a packed memmap, in one run.

Data A: 50,000 samples of 64 atoms; B: as many of 2 to 300; C: 5,000 with about 20
edges an atom. Every side has a process of its own over the whole run (time to the
first batch: a new one each round), sides take turns, medians are printed; files are
in the page cache. All sides give the same flat tensors (that is tested first),
unchecked. The toolkit reads our store: no slower than its own layout. It is given
``ALCHEMI_BENCH_PEER_SAMPLES`` samples an epoch, drawn from the whole store, since its
epochs take many seconds, and the ``prefetch_factor`` at which it is fastest: 16, and
2 in memory. A rate's row is the time of 1,000 structures; CPU times, of
all threads, stand beside it: on a busy machine only they can be trusted. A target of
0 marks a row that is for information. atompack has no row for C: its batch call
refuses arrays whose rows differ between samples, which edges are.

Peers run in the interpreter named by ``ALCHEMI_BENCH_PEER_PYTHON`` (nvalchemi-toolkit
and atompack-db installed); without it only the packed memmap's rows are printed.
``ALCHEMI_BENCH_SAMPLES`` and ``ALCHEMI_BENCH_ROUNDS`` change sizes and rounds: 8,000
and 3, with 1,024 for the toolkit, take under three minutes on two cores.

Predicted from a first look at our side alone (2.5 µs of CPU a structure of A): the
packed memmap beaten by two, atompack about as fast as we. At 8,000 samples both were
faster, by 1.5 and by two, and at 50,000 no less: most of ours was then Python around
the copy, a tenth of a millisecond a batch.

Predicted before batches were planned once and copied in windows: 1.0 µs of CPU a
structure of A, so as fast as atompack and 1.5 times the packed memmap; more batches of a
read, not threads, to make the default faster than ``prefetch_factor=0``; huge pages and
prefetch instructions to give little, as everything lies in a cache of 300 MB. Found:
0.8 to 1.1 µs, 2.6 and 3 times; the default faster than 0 at any size of batch tried;
prefetching rows 5 to 15 % of the copy of B, nothing for A and C.
docs/explanation/performance.md has the table.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bridge_data import BATCH, save
from benchmarks.report import Row

SAMPLES = int(os.environ.get("ALCHEMI_BENCH_SAMPLES", 50_000))
ROUNDS = int(os.environ.get("ALCHEMI_BENCH_ROUNDS", 5))
PEER_SAMPLES = int(os.environ.get("ALCHEMI_BENCH_PEER_SAMPLES", min(SAMPLES, 5_120)))
#: Times are those of so many structures: one alone is too short to print.
PER = 1_000
TOOLKIT = "nvalchemi-toolkit"
NUMBERS = {"A": SAMPLES, "B": SAMPLES, "C": max(SAMPLES // 10, BATCH)}

Seconds = dict[str, float]


class Process:
    """One side, in an interpreter of its own."""

    def __init__(self, command: list[str]) -> None:
        # A file: nobody empties a pipe meanwhile.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __call__(self, call: str, **arguments: Any) -> Any:
        """What the side answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(
                f"{self._process.args!r} ended in {call}:\n{self._errors.read()[-4000:]}"
            )
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


class Sides:
    """All sides of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peer_python = os.environ.get("ALCHEMI_BENCH_PEER_PYTHON")
        self.ours = self.start_ours()
        self.packed = self._start(sys.executable, "bridge_peer", "packed")
        self.toolkit = self.start_toolkit()
        self.atompack = (
            self._start(self._peer_python, "bridge_peer", "atompack") if self._peer_python else None
        )

    def _start(self, python: str, module: str, *arguments: str) -> Process:
        command = [python, "-W", "ignore", "-m", f"benchmarks.{module}", str(self._folder)]
        return Process([*command, *arguments])

    def start_ours(self) -> Process:
        return self._start(sys.executable, "bridge_ours")

    def start_toolkit(self) -> Process | None:
        if self._peer_python is None:
            return None
        return self._start(self._peer_python, "bridge_peer", "toolkit")

    def close(self) -> None:
        for side in (self.ours, self.packed, self.toolkit, self.atompack):
            if side is not None:
                side.close()


def alternated(
    work: str,
    ours: Callable[[], Seconds],
    peer_name: str,
    peer: Callable[[], Seconds],
    *,
    target: float,
    note: str = "",
    rounds: int = ROUNDS,
    warm: bool = True,
    per: int = PER,
) -> Row:
    """Both sides in turns; the row's ratio is the median of the rounds' ratios."""
    if warm:
        ours()
        peer()
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(ours())
        theirs.append(peer())
    middle = {
        (side, clock): statistics.median(t[clock] for t in times)
        for side, times in (("ours", mine), ("peer", theirs))
        for clock in ("wall", "cpu")
    }
    ratio = statistics.median(b["wall"] / a["wall"] for a, b in zip(mine, theirs, strict=True))
    if per > 1:
        rates = " : ".join(f"{1 / middle[side, 'wall'] / 1e3:.1f} k/s" for side in ("ours", "peer"))
        cpu = " : ".join(f"{middle[side, 'cpu'] * 1e6:.2f}" for side in ("ours", "peer"))
        times = statistics.median(b["cpu"] / a["cpu"] for a, b in zip(mine, theirs, strict=True))
        note = "; ".join(filter(None, (f"{rates}, CPU {cpu} µs = {times:.2f}x", note)))
    print(f"  {work}: {peer_name} {ratio:.2f}x  {note}", file=sys.stderr)
    seconds = middle["ours", "wall"] * per
    return Row(work, peer_name, seconds, seconds * ratio, target, note)


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room."""
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    sides: Sides | None = None
    try:
        row_bytes = {kind: save(folder, kind, num) for kind, num in NUMBERS.items()}
        sides = Sides(folder)
        if sides.toolkit is None:
            print("no peers: ALCHEMI_BENCH_PEER_PYTHON names no interpreter", file=sys.stderr)
        for kind in NUMBERS:
            sides.ours("write", kind=kind, profile="raw")
        yield from _shuffled(sides)
        yield from _beside_itself(sides)
        yield from _compressed(sides, row_bytes)
        if sides.toolkit is not None:
            yield from _sequential(sides, sides.toolkit)
            yield from _in_memory(sides, sides.toolkit)
            yield from _small(sides, sides.toolkit)
        for kind in NUMBERS:
            _print_layers(sides.ours, kind, row_bytes[kind])
    finally:
        if sides is not None:
            sides.close()
        shutil.rmtree(folder)


def _label(kind: str) -> str:
    return f"{kind}, {NUMBERS[kind]:,} samples"


def _check(side: Process, ours: Process, kind: str) -> None:
    """Both give the same tensors, or the comparison is none."""
    theirs, mine = side("digest", kind=kind), ours("digest", kind=kind, profile="raw")
    if theirs != mine:
        raise ValueError(f"the sides differ in data {kind}: ours {mine}, the peer's {theirs}")


def _shuffled(sides: Sides) -> Iterator[Row]:
    toolkit, atompack, packed = sides.toolkit, sides.atompack, sides.packed
    for kind, num in NUMBERS.items():
        work = f"full shuffle, raw, {_label(kind)}"
        ours = partial(sides.ours, "epoch", kind=kind, profile="raw", order="full")
        if toolkit is not None:
            _check(toolkit, sides.ours, kind)
            theirs = partial(
                toolkit,
                "epoch",
                kind=kind,
                profile="raw",
                order="full",
                num=min(PEER_SAMPLES, num),
            )
            yield alternated(work, ours, TOOLKIT, theirs, target=60)
        # Its batch call refuses arrays with a number of rows of their own: no edges.
        if atompack is not None and kind != "C":
            atompack("write", kind=kind, compression="none")
            _check(atompack, sides.ours, kind)
            theirs = partial(atompack, "epoch", kind=kind, compression="none")
            yield alternated(work, ours, "atompack, uncompressed", theirs, target=2)
        _check(packed, sides.ours, kind)
        theirs = partial(packed, "epoch", kind=kind)
        yield alternated(work, ours, "packed memmap, NumPy/torch", theirs, target=1.5)
        if kind == "A":
            yield alternated(
                work,
                ours,
                "the same, equal samples as rows",
                partial(packed, "epoch", kind=kind, equal=True),
                target=0,
                note="no target: ragged data has no such rows",
            )
    packed("close")


def _beside_itself(sides: Sides) -> Iterator[Row]:
    """The same number of random samples out of longer stores, and with the checks on."""
    epoch = partial(sides.ours, "epoch", kind="A", profile="raw", order="full")
    for times in (4, 16):
        sides.ours("write", kind="A", profile="raw", times=times)
        yield alternated(
            f"full shuffle, raw, A, {SAMPLES:,} out of {times * SAMPLES:,}",
            partial(epoch, times=times, num=SAMPLES),
            f"itself, of {SAMPLES:,}",
            partial(epoch, num=SAMPLES),
            target=0.9,
        )
    yield alternated(
        "full shuffle, raw, A, batches validated",
        partial(epoch, validate=True),
        "itself, unchecked",
        epoch,
        target=0,
        note="no target",
    )
    num = min(PEER_SAMPLES, SAMPLES)
    yield alternated(
        f"a transform of some ms a batch in 2 workers, raw, A, {num:,} samples",
        partial(sides.ours, "transformed", kind="A", workers=2, num=num),
        "itself, in no worker",
        partial(sides.ours, "transformed", kind="A", workers=0, num=num),
        target=0,
        note="no target; CPU of this process alone",
    )
    sides.ours("close")


def _compressed(sides: Sides, row_bytes: dict[str, int]) -> Iterator[Row]:
    toolkit, atompack = sides.toolkit, sides.atompack
    for kind in ("A", "B"):
        ours = partial(sides.ours, "epoch", kind=kind)
        if toolkit is not None:
            sides.ours("write", kind=kind, profile="mixed")
            how = {"kind": kind, "profile": "mixed", "order": "full"}
            yield alternated(
                f"full shuffle, mixed (default), {_label(kind)}",
                partial(sides.ours, "epoch", **how),
                TOOLKIT,
                partial(toolkit, "epoch", num=PEER_SAMPLES, **how),
                target=60,
            )
        if atompack is None:
            continue
        atompack("write", kind=kind, compression="zstd")
        theirs = partial(atompack, "epoch", kind=kind, compression="zstd")
        for profile, codec in (("balanced", "zstd"), ("fast", "lz4")):
            sides.ours("write", kind=kind, profile=profile)
            yield alternated(
                f"block shuffle, {profile} ({codec}), {_label(kind)}",
                partial(ours, profile=profile, order="block"),
                "atompack zstd, full shuffle",
                theirs,
                target=4,
                note="decoded once, as it fits in the cache",
            )
        # A set far larger than the cache is decoded anew in every epoch.
        cache = row_bytes[kind] * SAMPLES // 3
        yield alternated(
            f"block shuffle, balanced (zstd), {_label(kind)}, decoded every epoch",
            partial(ours, profile="balanced", order="block", cache=cache),
            "atompack zstd, full shuffle",
            theirs,
            target=4,
            note=f"cache of {cache / 2**20:.0f} MiB, a third of the set",
        )
        # As few as the toolkit's, as without a cache every batch may decode most of the store.
        yield alternated(
            f"full shuffle, balanced (zstd), {_label(kind)}",
            partial(ours, profile="balanced", order="full", num=min(PEER_SAMPLES, SAMPLES)),
            "atompack zstd, full shuffle",
            theirs,
            target=0,
            note="no target",
        )
    sides.ours("close")


def _sequential(sides: Sides, toolkit: Process) -> Iterator[Row]:
    for kind, num in NUMBERS.items():
        how = {"kind": kind, "profile": "raw", "order": "sequential"}
        yield alternated(
            f"sequential, raw, {_label(kind)}",
            partial(sides.ours, "epoch", **how),
            TOOLKIT,
            partial(toolkit, "epoch", num=min(PEER_SAMPLES, num), **how),
            target=100,
        )


def _in_memory(sides: Sides, toolkit: Process) -> Iterator[Row]:
    for kind, num in NUMBERS.items():
        how = {"kind": kind, "profile": "raw", "order": "full", "memory": True}
        yield alternated(
            f"in memory, shuffled, {_label(kind)}",
            partial(sides.ours, "epoch", **how),
            TOOLKIT,
            partial(toolkit, "epoch", num=min(PEER_SAMPLES, num), **how),
            target=150,
        )
        sides.ours("close")
        toolkit("close")


def _first(start: Callable[[], Process | None], kind: str) -> Seconds:
    side = start()
    assert side is not None
    found: Seconds = side("first", kind=kind, profile="raw")
    side.close()
    return found


def _small(sides: Sides, toolkit: Process) -> Iterator[Row]:
    for kind in NUMBERS:
        yield alternated(
            f"reader.read(i), raw, {_label(kind)}",
            partial(sides.ours, "one", kind=kind, profile="raw"),
            TOOLKIT,
            partial(toolkit, "one", kind=kind, profile="raw"),
            target=100,
            per=1,
        )
    for kind in NUMBERS:
        yield alternated(
            f"first batch, new process, raw, {_label(kind)}",
            partial(_first, sides.start_ours, kind),
            TOOLKIT,
            partial(_first, sides.start_toolkit, kind),
            target=10,
            warm=False,
            per=1,
        )
    for call, work in (
        ("construct", "AtomicData(...), a sample of A"),
        ("join", f"Batch.from_data_list, a sample of {BATCH}"),
    ):
        yield alternated(
            work, partial(sides.ours, call), TOOLKIT, partial(toolkit, call), target=4, per=1
        )


def _print_layers(ours: Process, kind: str, row_bytes: int) -> None:
    """The share of memory-copy bandwidth, and where the rest goes."""
    plain = ours("copy", kind=kind, row_bytes=row_bytes)
    print(
        f"\nwhere the time goes, full shuffle of raw {_label(kind)} ({row_bytes:,} bytes each); "
        f"a plain copy of such batches: {plain / 1e9:.1f} GB/s, {row_bytes / plain * 1e6:.2f} µs"
    )
    for name, times in ours("layers", kind=kind, profile="raw").items():
        share = row_bytes / times["wall"] / plain
        print(
            f"  {name:32} {times['wall'] * 1e6:8.2f} µs wall {times['cpu'] * 1e6:8.2f} µs CPU "
            f"{100 * share:5.1f} % of a plain copy"
        )
    for line in ours("profile", kind=kind, profile="raw"):
        print(f"    {line}")
    print()

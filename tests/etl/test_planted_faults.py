"""A hundred thousand frames with faults of many kinds: those are reported, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.etl.conversion import convert
from alchemi_xr.store.reader import open_store

ATOMS = 10
COLUMNS = "Properties=species:S:1:pos:R:3:forces:R:3:tag:I:1:mark:L:1:Z:I:1"
LATTICE = 'Lattice="12.0 0.0 0.0 0.0 12.0 0.0 0.0 0.0 12.0"'
OPTIONS: dict[str, Any] = {
    "on_error": "quarantine",
    "nonfinite": "quarantine",
    "max_force": 50.0,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Fault:
    """What is done to a frame, and what is to be said of it.

    Parameters
    ----------
    old, new : str
        Of the frame's text: what is replaced, once, and by what.
    field : str
    reason : str
        Pattern.
    scanned : bool
        Found before the offsets were fixed: the frame has no rows in the store.
    """

    old: str
    new: str
    field: str
    reason: str
    scanned: bool = False


def _line(text: str, number: int) -> str:
    return text.split("\n")[number]


FAULTS = [
    # The head of a frame.
    Fault("10\n", "11\n", "", r"says 11 atoms, but line \d+ holds", scanned=True),
    Fault("10\n", "9\n", "", r"says 9 atoms, but line \d+ holds", scanned=True),
    Fault("10\n", "ten\n", "", "found 'ten', expected an atom count", scanned=True),
    Fault("10\n", "-10\n", "", "found '-10', expected an atom count", scanned=True),
    Fault("10\n", "99999999999\n", "", r"file ends inside frame \d+", scanned=True),
    Fault("energy=", "energy=x", "energy", "expected 1 numbers", scanned=True),
    Fault("energy=", 'energy="1 2" was=', "energy", "found 2 numbers", scanned=True),
    Fault(" 12.0", "", "Lattice", "found 8 numbers, expected 9", scanned=True),
    Fault(" 12.0", " wide", "Lattice", "expected 9 numbers", scanned=True),
    Fault('pbc="T T T"', 'pbc="T T"', "pbc", "expected three of T or F", scanned=True),
    Fault('stress="1', 'stress="1 1', "stress", "found 7 numbers", scanned=True),
    Fault("pos:R:3", "pos:R:2", "Properties", "found no pos:R:3", scanned=True),
    Fault("forces:R:3", "forces:R:three", "Properties", "forces", scanned=True),
    Fault("forces:R:3", "forces:R:2", "forces", r"found 2 column\(s\), expected 3", scanned=True),
    # Its atoms.
    Fault("\nC ", "\nCc ", "species", "atom 1: found the unknown element 'Cc'"),
    Fault("\nC ", "\nN ", "Z", "atom 1: species and Z name different elements"),
    Fault("\nC ", "\n", "", "atom 1: atom line has 9 words, expected 10"),
    Fault("\nC ", "\nC 0.5 ", "", "atom 1: atom line has 11 words, expected 10"),
    Fault("\nC 0", "\nC o", "pos", "atom 1: found 'o"),
    Fault("\nC 0.", "\nC 0.1.", "pos", r"atom 1: found '0\.1\."),
    Fault("\nC 0.", "\nC 0,", "pos", "atom 1: found '0,"),
    Fault("\nC 0.", "\nC 1_0.", "pos", "atom 1: found '1_0"),
    Fault("\nC 0.", "\nC ********* ", "", "atom 1: atom line has 11 words"),
    Fault("\nC 0.", "\nC 0\x00.", "pos", r"atom 1: found '0.*x00"),
    Fault("\nC 0.", "\nC ٣.", "pos", "atom 1: found '٣"),
    Fault("\nC 0.", "\nC nan", "pos", "atom 1: found 'nan"),
    Fault(" 17 T", " 17.5 T", "tag", "atom 2: found '17.5', expected whole numbers"),
    Fault(" 17 T", " 99999999999999999999 T", "tag", "atom 2: .*expected whole numbers"),
    Fault(" 17 T", " 17 yes", "mark", "atom 2: found 'yes', expected T or F"),
    # What is read, and not taken.
    Fault("\nC 0.25 ", "\nC nan ", "positions", "NaN"),
    Fault("\nC 0.25 ", "\nC -inf ", "positions", "inf"),
    Fault("\nC 0.25 ", "\nC 1e300 ", "positions", "too large for float32"),
    Fault(" 0.125 17", " 51.0 17", "forces", "50"),
    Fault('stress="1', 'stress="nan', "stress", "NaN"),
]


def _frames() -> list[str]:
    """Some frames without a fault; each begins with its count, its energy is to be put in."""
    rng = np.random.default_rng(5)
    texts = []
    for _ in range(31):
        lines = []
        for atom in range(ATOMS):
            x, y, z, fx, fy = rng.normal(size=5).round(6).tolist()
            symbol, number = [("H", 1), ("C", 6), ("O", 8)][atom % 3]
            first = "0.25" if symbol == "C" else repr(x)
            lines.append(f"{symbol} {first} {y} {z} {fx} {fy} 0.125 {15 + atom} T {number}")
        texts.append(
            f'{ATOMS}\n{LATTICE} {COLUMNS} config=bulk stress="1 2 3 4 5 6" pbc="T T T" '
            "energy={} \n" + "\n".join(lines) + "\n"
        )
    return texts


def write(path: Path, frames: int, *, every: int) -> dict[int, Fault]:
    """A file of so many frames, each of so many with a fault; the last is cut off."""
    planted = {}
    good = _frames()
    with path.open("w", encoding="utf-8", newline="") as file:
        for i in range(frames - 1):
            text = good[i % len(good)].replace("{}", f"{-i}.0")
            if i % every == every // 2:
                fault = FAULTS[i // every % len(FAULTS)]
                assert fault.old in text
                text = text.replace(fault.old, fault.new, 1)
                planted[i] = fault
            file.write(text)
        text = good[0].replace("{}", "5.0")
        file.write(text[: -len(text) // 3])
        planted[frames - 1] = Fault("", "", "", r"file ends inside frame \d+", scanned=True)
    return planted


def check(report: Any, store: Path, planted: dict[int, Fault], frames: int, path: Path) -> None:
    found = {reject.frame: reject for reject in report.rejects}
    assert len(found) == len(report.rejects)
    assert sorted(found) == sorted(planted)
    text = path.read_bytes()
    before = counted = lines = 0
    for number, fault in planted.items():
        reject = found[number]
        assert reject.field == fault.field, (number, fault, reject)
        assert re.search(fault.reason, reject.reason), (number, fault, reject)
        assert (reject.sample is None) == fault.scanned, (number, fault, reject)
        assert reject.file == str(path)
        assert reject.offset is not None
        assert reject.line is not None
        # It begins where the message says: with its count, one line before its comment.
        assert reject.offset > before
        before = reject.offset
        stop = text.index(b"\n", reject.offset) + 1
        assert text.startswith(LATTICE[:9].encode(), stop)
        lines += text.count(b"\n", counted, reject.offset)
        counted = reject.offset
        assert reject.line == lines + 1
    assert (report.records, report.rejected) == (frames, len(planted))
    assert report.samples == frames - len(planted)
    listed = [json.loads(line) for line in Path(report.rejects_path).read_text().splitlines()]
    assert [row["frame"] for row in listed] == [reject.frame for reject in report.rejects]
    snapshot = open_store(store)
    energies = snapshot.read_rows("energy", 0, snapshot.num_samples).ravel()[snapshot.active]
    kept = np.setdiff1d(np.arange(frames), list(planted))
    np.testing.assert_array_equal(energies, -kept.astype(float))


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def test_every_kind_of_fault_is_found_beside_every_other(tmp_path: Path) -> None:
    path = tmp_path / "in.xyz"
    frames = 2 * len(FAULTS) + 1
    planted = write(path, frames, every=2)
    assert set(planted.values()) >= set(FAULTS)
    report = convert(path, tmp_path / "out.zarr", **OPTIONS)
    check(report, tmp_path / "out.zarr", planted, frames, path)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """MB that this process had at most. (Not ru_maxrss: that cannot be reset.)"""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]


@pytest.mark.slow
def test_a_large_file_here_and_on_a_cluster(tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    frames = 100_000
    path, quarter = tmp_path / "in.xyz", tmp_path / "quarter.xyz"
    planted = write(path, frames, every=139)
    assert len(planted) > 700
    write(quarter, frames // 4, every=139)
    here = convert(path, tmp_path / "here.zarr", threads=1, **OPTIONS)
    check(here, tmp_path / "here.zarr", planted, frames, path)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        peaks = []
        for file in (quarter, quarter, path):
            client.run(reset_peak)
            there = convert(file, tmp_path / f"{len(peaks)}.zarr", client=client, **OPTIONS)
            peaks.append(max(client.run(peak).values()))
    assert there.rejects == here.rejects
    assert tree(tmp_path / "2.zarr") == tree(tmp_path / "here.zarr")
    size = path.stat().st_size >> 20
    assert size > 70
    assert peaks[2] < 1000
    # Four times the input, and much less than it: what a worker holds is a few parts of it.
    assert peaks[2] < peaks[1] + size // 2, (peaks, size)

"""One row of a benchmark: ours and a peer, alternated, medians and their ratio."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__all__ = ["Row", "compare", "machine", "print_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """A measured row; times in seconds a call, ratio = peer / ours (bigger is better)."""

    work: str
    peer: str
    ours_s: float
    peer_s: float
    target: float
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.peer_s / self.ours_s if self.ours_s else float("inf")


def compare(
    work: str,
    ours: Callable[[], object],
    peer_name: str,
    peer: Callable[[], object],
    *,
    target: float,
    rounds: int = 5,
    note: str = "",
) -> Row:
    """Run ours and the peer in turns (A B A B ...) after one warm call each."""
    ours()
    peer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, into in ((ours, times[0]), (peer, times[1])):
            start = time.perf_counter()
            run()
            into.append(time.perf_counter() - start)
    return Row(
        work, peer_name, statistics.median(times[0]), statistics.median(times[1]), target, note
    )


def machine() -> str:
    """One line on where this ran and with which versions."""
    found = []
    for name in ("alchemi_xr", "torch", "numpy", "zarr", "dask", "xarray", "ase", "warp-lang"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{platform.machine()}, Python {platform.python_version()}; " + ", ".join(found)


def print_rows(rows: list[Row]) -> None:
    """A table in text; a missed target is said to be missed."""
    print(f"{'work':52} {'ours':>10} {'peer':>10} {'ratio':>8} {'target':>7}  peer")
    for row in rows:
        mark = "" if row.ratio >= row.target else "  MISSED"
        print(
            f"{row.work:52} {row.ours_s * 1e3:8.3f}ms {row.peer_s * 1e3:8.3f}ms "
            f"{row.ratio:7.2f}x {row.target:6.2f}x  {row.peer}{mark}"
            + (f"  ({row.note})" if row.note else "")
        )

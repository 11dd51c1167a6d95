"""A conversion killed anywhere and taken up again is the undisturbed one, byte for byte.

Twenty seeded points: fifteen where the whole process dies, five where a worker of a
cluster does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.etl.conversion import convert
from alchemi_xr.store.verify import verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kill,
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here"),
]

SMALL = {name: {"chunk_size": 64} for name in ("core", "custom", "meta")}
OPTIONS: dict[str, Any] = {
    "profile": SMALL,
    "options": {"partition_bytes": 3000},
    "on_error": "quarantine",
    "wrap": True,
    "progress": False,
}
# The frames that are broken on purpose.
BROKEN = (100, 400)
# Lines of the journal that a conversion surely has before it ends.
LINES = 30

RUN = f"""
import sys
from alchemi_xr.etl.conversion import convert
if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2], threads=1, **{OPTIONS!r})
"""


def write_frames(path: Path, count: int) -> Path:
    """Periodic frames of 1 to 9 atoms, some with a dipole, two broken."""
    rng = np.random.default_rng(5)
    with path.open("w") as file:
        for i in range(count):
            n = int(rng.integers(1, 10))
            dipole = f' dipole="{i} 0 1"' if i % 3 else ""
            file.write(
                f'{n}\nLattice="4 0 0 0 4 0 0 0 4" Properties=species:S:1:pos:R:3:forces:R:3 '
                f'energy={float(rng.normal())!r} label=frame{i}{dipole} pbc="T T F"\n'
            )
            for row in 4 * rng.normal(size=(n, 6)):
                last = "bad" if i in BROKEN else f"{row[5]:.8f}"
                file.write("C " + " ".join(f"{v:.8f}" for v in row[:5]) + f" {last}\n")
    return path


def tree(path: Path) -> dict[str, bytes]:
    """All files below a folder with their bytes."""
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def wait_for(journal: Path, lines: int, *, alive: Any = lambda: True) -> None:
    """Until the journal has so many lines (0: until it is there)."""
    deadline = time.monotonic() + 60
    while alive() and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.0005)
    raise AssertionError(f"the journal never had {lines} lines")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_frames(tmp_path_factory.mktemp("in") / "in.xyz", 500)


@pytest.fixture(scope="module")
def want(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("calm") / "out.zarr"
    report = convert(source, path, **OPTIONS)
    assert [r.frame for r in report.rejects] == list(BROKEN)
    return tree(path)


def test_the_process_dies(source: Path, want: dict[str, bytes], tmp_path: Path) -> None:
    rng = np.random.default_rng(20)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    for point in range(15):
        dst = tmp_path / f"{point}" / "out.zarr"
        dst.parent.mkdir()
        journal = dst.parent / ".out.zarr.building" / "journal.jsonl"
        process = subprocess.Popen([sys.executable, str(script), str(source), str(dst)])
        try:
            lines = int(rng.integers(0, LINES))
            wait_for(journal, lines, alive=lambda p=process: p.poll() is None)
            # Not always just after a line.
            time.sleep(float(rng.uniform(0, 0.002)))
        finally:
            process.kill()
        assert process.wait(60) == -signal.SIGKILL
        assert not dst.exists()
        report = convert(source, dst, **OPTIONS)
        assert report.resumed or lines < 2
        assert tree(dst) == want, lines
        assert [r.frame for r in report.rejects] == list(BROKEN)
        assert not journal.parent.exists()
    assert verify(dst).ok


@pytest.mark.parametrize("point", range(5))
def test_a_worker_dies(source: Path, want: dict[str, bytes], tmp_path: Path, point: int) -> None:
    from distributed import Client, LocalCluster

    rng = np.random.default_rng([21, point])
    dst = tmp_path / "out.zarr"
    journal = tmp_path / ".out.zarr.building" / "journal.jsonl"
    # A cluster each: a nanny whose worker dies while it starts gives up at times.
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        victim = int(rng.permutation(sorted(client.run(os.getpid).values()))[0])
        lines = int(rng.integers(0, LINES))
        killed = threading.Event()

        def kill() -> None:
            wait_for(journal, lines)
            os.kill(victim, signal.SIGKILL)
            killed.set()

        watcher = threading.Thread(target=kill)
        watcher.start()
        report = convert(source, dst, client=client, **OPTIONS)
        watcher.join()
    assert killed.is_set()
    assert tree(dst) == want, lines
    assert [r.frame for r in report.rejects] == list(BROKEN)
    assert not journal.parent.exists()
    assert verify(dst).ok

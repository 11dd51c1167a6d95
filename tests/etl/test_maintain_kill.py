"""Workers and whole jobs killed in the middle of merge and defragment: the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr import etl
from alchemi_xr.config import set_options
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import verify

CONFIG = {"core": {"chunk_size": 64}, "custom": {"chunk_size": 64}, "meta": {"chunk_size": 64}}

RUN = f"""
CONFIG = {CONFIG!r}
import sys
from alchemi_xr import etl
from alchemi_xr.config import set_options
if __name__ == "__main__":
    set_options(stream_bytes=1 << 17)
    act, store, out = sys.argv[1:]
    if act == "merge":
        etl.merge([store, store], out, config=CONFIG, threads=1, progress=False)
    else:
        getattr(etl, act)(store, threads=1, progress=False)
"""


def tree(path: Path) -> dict[str, bytes]:
    """All files below a folder with their bytes."""
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def run(act: str, store: Path, out: Path, **how: Any) -> Path:
    """Do it, and give the path of the result."""
    if act == "merge":
        etl.merge([store, store], out, config=CONFIG, **how)
        return out
    getattr(etl, act)(store, **how)
    return store


@pytest.fixture(autouse=True)
def _small_extents() -> Iterator[None]:
    with set_options(stream_bytes=1 << 17):
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 1,000 samples, a tenth of them deleted; only copied."""
    rng = np.random.default_rng(0)
    atoms = rng.integers(1, 20, 1000)
    edges = rng.integers(0, 30, 1000)
    total = int(atoms.sum())
    pairs = (rng.random((edges.sum(), 2)) * np.repeat(atoms, edges)[:, None]).astype(np.int64)
    block = Block(
        counts_to_ptr(atoms),
        counts_to_ptr(edges),
        {
            "atomic_numbers": rng.integers(1, 9, total),
            "positions": rng.normal(size=(total, 3)),
            "neighbor_list": pairs,
            "energy": rng.normal(size=(1000, 1)),
        },
        {"atomic_numbers": "atom", "positions": "atom", "neighbor_list": "edge"}
        | {"energy": "system"},
    )
    path = tmp_path_factory.mktemp("start") / "a.zarr"
    StoreWriter(path, CONFIG).write(block)
    StoreWriter(path).delete(rng.permutation(1000)[:100])
    return path


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_killed_workers(start: Path, tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    copies = {}
    for word in ("calm", "killed"):
        copies[word] = tmp_path / word / "a.zarr"
        shutil.copytree(start, copies[word])
    out = tmp_path / "out.zarr"
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        for act in ("merge", "defragment"):
            # The merge reads one and the same store: its path is in the provenance.
            source = copies["calm"]
            want = tree(run(act, source, out))
            if act == "merge":
                shutil.rmtree(out)
            else:
                source = copies["killed"]
            place = out if act == "merge" else source
            word = "building" if act == "merge" else "rewriting"
            journal = place.parent / f".{place.name}.{word}" / "journal.jsonl"
            victims = sorted(client.run(os.getpid).values())
            killed = threading.Event()

            def kill(
                journal: Path = journal,
                victim: int = victims[0],
                killed: threading.Event = killed,
            ) -> None:
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    if journal.exists() and journal.read_bytes().count(b"\n") > 20:
                        os.kill(victim, signal.SIGKILL)
                        killed.set()
                        return
                    time.sleep(0.001)

            watcher = threading.Thread(target=kill)
            watcher.start()
            result = run(act, source, out, client=client, progress=False)
            watcher.join()
            assert killed.is_set()
            assert tree(result) == want
            assert verify(result).ok
            assert not journal.parent.exists()
            client.wait_for_workers(2, timeout=60)


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("act", ["merge", "defragment"])
def test_a_killed_job_is_taken_up(start: Path, tmp_path: Path, act: str) -> None:
    store = tmp_path / "a.zarr"
    out = tmp_path / "out.zarr"
    shutil.copytree(start, store)
    # The lease of the killed one is a dead owner's; the same call goes on.
    place = out if act == "merge" else store
    word = "building" if act == "merge" else "rewriting"
    journal = tmp_path / f".{place.name}.{word}" / "journal.jsonl"
    script = tmp_path / "run.py"
    script.write_text(RUN)
    for least in (3, 60):
        process = subprocess.Popen([sys.executable, str(script), act, str(store), str(out)])
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") > least:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        assert process.wait(60) == -signal.SIGKILL
        with open_store(store) as snapshot:
            assert snapshot.generation == 2
    subprocess.run([sys.executable, str(script), act, str(store), str(out)], check=True)
    found = tree(place)
    assert verify(place).ok
    assert not journal.parent.exists()
    if act == "merge":
        shutil.rmtree(out)
    else:
        shutil.rmtree(store)
        shutil.copytree(start, store)
    assert tree(run(act, store, out, progress=False)) == found


MEASURE = """
import sys
import numpy as np
from alchemi_xr import etl, open_dataset
from alchemi_xr.config import set_options
from alchemi_xr.data.block import Block
from alchemi_xr.store import StoreWriter

CONFIG = {"core": {"chunk_size": 16384}, "meta": {"chunk_size": 16384}}

def make(path, count):
    writer = StoreWriter(path, CONFIG)
    rng = np.random.default_rng(0)
    for start in range(0, count, 2500):
        n = min(2500, count - start)
        atoms = rng.integers(16, 49, n)
        ptr = np.concatenate([[0], np.cumsum(atoms)])
        v = int(ptr[-1])
        block = Block(ptr, ptr * 0,
            {"atomic_numbers": rng.integers(1, 9, v), "positions": rng.normal(size=(v, 3)),
             "forces": rng.normal(size=(v, 3)), "energy": rng.normal(size=(n, 1))},
            {"atomic_numbers": "atom", "positions": "atom", "forces": "atom", "energy": "system"})
        writer.append(block) if start else writer.write(block)
    writer.delete(rng.permutation(count)[: count // 10])

def run(act, path):
    if act == "merge":
        etl.merge([path, path], path + ".merged", config=CONFIG, threads=2)
    elif act == "split":
        etl.split(path, {path + ".x": 0.5, path + ".y": 0.5}, threads=2)
    elif act == "to_zarr":
        ds = open_dataset(path)
        ds.ragged.where(ds.energy > 0).ragged.to_zarr(path + ".out", config=CONFIG, threads=2)
    elif act == "delete":
        etl.delete(path, lambda ds: ds.ragged.reduce("forces", "norm") > 8)
    elif act in ("sort", "defragment"):
        getattr(etl, act)(path, threads=2)

if __name__ == "__main__":
    set_options(stream_bytes=8 << 20, progress="off")
    make(sys.argv[1], int(sys.argv[2]))
    for act in ("warm", "merge", "split", "to_zarr", "delete", "sort", "defragment"):
        # Forget the peak so far. (Not ru_maxrss: that remembers it from before exec.)
        open("/proc/self/clear_refs", "w").write("5")
        run(act, sys.argv[1])
        peak = next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM"))
        print(act, int(peak) // 1024)
"""


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)

    peaks: dict[str, list[int]] = {}
    for count in (10_000, 40_000):
        out = subprocess.run(
            [sys.executable, str(script), str(tmp_path / f"{count}.zarr"), str(count)],
            capture_output=True,
            text=True,
            check=True,
        )
        for line in out.stdout.splitlines():
            act, size = line.split()
            peaks.setdefault(act, []).append(int(size))
    # 40,000 samples hold 72 MB; pointers and orders of the 30,000 more take one.
    for act, (small, large) in peaks.items():
        assert large < 1.2 * small, (act, peaks)

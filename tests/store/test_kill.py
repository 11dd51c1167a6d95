"""SIGKILL at random moments of a store's life (C26): the last commit or the next, nothing else."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from alchemi_xr.store import StoreWriter
from alchemi_xr.store.verify import repair, verify

KILLS = 200

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kill,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL"),
]


@pytest.fixture(scope="module")
def life():
    spec = importlib.util.spec_from_file_location("life", Path(__file__).with_name("life.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["life"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def zygote():
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("life.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def child(*words):
        process.stdin.write("\t".join(str(w) for w in words) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield child
    process.communicate()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(log, pid, seconds):
    """Wait for the child's first step, then so many seconds; or until it has ended."""
    deadline = time.monotonic() + 20
    while (
        not (log.exists() and log.stat().st_size) and is_alive(pid) and time.monotonic() < deadline
    ):
        time.sleep(0.0005)
    end = time.monotonic() + seconds
    while time.monotonic() < end and is_alive(pid):
        time.sleep(min(0.002, max(0.0, end - time.monotonic())))


def test_killed_two_hundred_times(life, zygote, tmp_path):
    path = tmp_path / "a.zarr"
    model = life.Model(list(range(30)), [True] * 30)
    StoreWriter(path, life.CONFIG).write(life.block_of(model.ids))
    StoreWriter(life.other_of(path), life.CONFIG).write(life.block_of(life.OTHER))
    rng = random.Random(11)
    interrupted, committed = Counter(), Counter()
    for seed in range(1, KILLS + 1):
        # Every tenth child dies by itself, exactly between the two renames of a swap.
        mode = "between" if seed % 10 == 0 else rng.choice(("exchange", "renames"))
        log = tmp_path / f"log{seed}"
        pid = zygote(path, seed, mode, log)
        # A child that begins with a field is killed within that step.
        longest = 0.004 if life.begins_with_field(seed, 0) else 0.12
        wait_for(log, pid, 5 if mode == "between" else rng.uniform(0, longest))
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
        while is_alive(pid):
            time.sleep(0.0005)
        lines = log.read_text().split("\n")[:-1]
        assert not any(line.startswith("error") for line in lines), (seed, lines[-1])
        done = sum(line.startswith("done") for line in lines)
        steps = [life.step(model, seed, number) for number in range(done)]
        committed.update(steps)
        following = model.copy()
        name = life.step(following, seed, done) if len(lines) > 2 * done else ""
        interrupted[name] += 1
        merged = "merge" in (*steps, name)
        before = life.differences(path, model, merged=merged)
        if before:
            assert name, (seed, before)
            after = life.differences(path, following, merged=merged)
            assert not after, (seed, name, before, after)
            model = following
        if seed % 10 == 0:
            report = verify(path, checksums=True)
            assert report.ok, (seed, report)
    assert repair(path).clean
    assert not life.differences(path, model)
    assert verify(life.merged_of(path), checksums=True).ok
    steps = ("append", "delete", "add_custom", "defragment", "merge")
    assert all(interrupted[name] >= 5 for name in steps), interrupted
    assert committed.total() > KILLS / 2

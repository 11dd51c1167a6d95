"""SIGKILL at random moments of an append (C26): the old state or the new, nothing else."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import repair, verify

CHILD = """
import pickle, sys
from alchemi_xr.store import StoreWriter, open_store
import alchemi_xr.store.verify
path, file, act = sys.argv[1:]
block = pickle.load(open(file, "rb"))
writer = StoreWriter(path)
print("ready", flush=True)
sys.stdin.readline()
print("go", flush=True)
if act == "append":
    writer.append(block)
elif act == "delete":
    writer.delete(slice(None, None, 2))
else:
    writer.defragment()
print("done", flush=True)
"""

FIELDS = {"positions": "f8", "atomic_numbers": "i8", "energy": "f8", "neighbor_list": "i8"}
CONFIG = {"core": {"chunk_size": 256}, "meta": {"chunk_size": 256}}


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize(("act", "kills"), [("append", 15), ("delete", 4), ("defragment", 5)])
def test_sigkill(make, same, tmp_path, act, kills):
    import pickle

    start = tmp_path / "start" / "a.zarr"
    StoreWriter(start, CONFIG).write(make(0, 1000, fields=FIELDS))
    if act == "defragment":
        StoreWriter(start).delete(slice(0, 500))
    block = make(1, 500, fields={**FIELDS, "charge": "f8"})
    (tmp_path / "block").write_bytes(pickle.dumps(block))
    old = open_store(start)
    before, active = old.read_block(slice(None)), len(old.active)
    after = {"append": 1500, "delete": 500, "defragment": 500}[act]
    rng = random.Random(7)
    for number in range(kills):
        folder = tmp_path / f"k{number}"
        shutil.copytree(start.parent, folder)
        path = folder / "a.zarr"
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(tmp_path / "block"), act],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "go\n"
        time.sleep(rng.uniform(0, 0.4))
        os.kill(child.pid, signal.SIGKILL)
        rest = child.communicate()[0]
        snapshot = open_store(path)
        found = len(snapshot.active)
        assert found in (active, after), (number, found)
        if "done" in rest:
            assert found == after
        if act == "append":
            same(
                snapshot.read_block(slice(0, 1000), before.names).select_fields(before.names),
                before,
            )
            if found == after:
                same(snapshot.read_block(slice(1000, 1500)), block)
        elif act == "defragment":
            same(snapshot.read_block(snapshot.active), before.take(np.arange(500, 1000)))
        assert verify(path).ok, verify(path)
        StoreWriter(path).append(make(2, 3, fields=FIELDS))
        snapshot = open_store(path)
        assert len(snapshot.active) == found + 3
        total = snapshot.num_samples
        last = snapshot.read_block(slice(total - 3, total), list(FIELDS))
        same(last, make(2, 3, fields=FIELDS))
        assert repair(path).clean
        shutil.rmtree(folder)

"""One writer at a time; a dead one is replaced."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from alchemi_xr.errors import StoreError, StoreLockedError
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.lease import STALE_SECONDS, Lease
from alchemi_xr.store.locate import locate
from alchemi_xr.store.verify import verify
from alchemi_xr.testing.faults import bury_lease


def test_the_second_writer_is_told_who_is_first(make, anywhere):
    StoreWriter(anywhere).write(make(0))
    with Lease(locate(anywhere)):
        with pytest.raises(StoreLockedError, match=rf"pid {os.getpid()}") as caught:
            StoreWriter(anywhere).append(make(1))
        assert "Mend" in str(pickle.loads(pickle.dumps(caught.value)))
        assert open_store(anywhere).num_samples == 4
    StoreWriter(anywhere).append(make(1))


def test_waiting_when_asked_to(make, anywhere):
    StoreWriter(anywhere).write(make(0))
    lease = Lease(locate(anywhere))
    lease.acquire()
    threading.Timer(0.2, lease.release).start()
    StoreWriter(anywhere, lock_timeout=20).append(make(1))
    assert open_store(anywhere).num_samples == 8


def test_a_dead_owner_is_replaced(make, tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0))
    Lease(locate(path)).acquire()
    with pytest.raises(StoreLockedError):
        StoreWriter(path).append(make(1))
    bury_lease(path)
    StoreWriter(path).append(make(1))
    assert not (tmp_path / ".a.zarr.lease").exists()


@pytest.mark.parametrize("text", ["{", '{"owner": "x"}', "[]"])
def test_a_lease_that_was_cut_off_while_written_is_replaced(make, tmp_path, text):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0))
    (tmp_path / ".a.zarr.lease").write_text(text)
    StoreWriter(path).append(make(1))


def test_an_owner_elsewhere_lives_by_its_heartbeat(make, tmp_path):
    path, lease = tmp_path / "a.zarr", tmp_path / ".a.zarr.lease"
    StoreWriter(path).write(make(0))
    lease.write_text(
        json.dumps({"owner": "ana", "host": "node7", "namespace": "node7|x|y", "pid": 1})
    )
    with pytest.raises(StoreLockedError, match=r"ana@node7 \(pid 1"):
        StoreWriter(path).append(make(1))
    old = time.time() - STALE_SECONDS - 1
    os.utime(lease, (old, old))
    StoreWriter(path).append(make(1))


def test_a_reused_pid_is_not_the_owner(make, tmp_path):
    path, lease = tmp_path / "a.zarr", tmp_path / ".a.zarr.lease"
    StoreWriter(path).write(make(0))
    Lease(locate(path)).acquire()
    owner = json.loads(lease.read_text())
    if owner["started"] is None:
        pytest.skip("this system does not tell when a process started")
    lease.write_text(json.dumps({**owner, "started": "1"}))
    StoreWriter(path).append(make(1))


def test_many_contenders_for_a_dead_lease(make, tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0))
    Lease(locate(path)).acquire()
    bury_lease(path)
    holders, most, refused = [], [], []
    gate = threading.Barrier(8)

    def contend():
        gate.wait()
        try:
            with Lease(locate(path)):
                holders.append(1)
                most.append(len(holders))
                time.sleep(0.01)
                holders.pop()
        except StoreLockedError:
            refused.append(1)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) + len(refused) == 8


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(make, tmp_path):
    StoreWriter(tmp_path / "a.zarr").write(make(0))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            StoreWriter(tmp_path / "a.zarr").append(make(1))
        assert open_store(tmp_path / "a.zarr").num_samples == 4
    finally:
        tmp_path.chmod(0o700)


APPENDER = textwrap.dedent(
    """
    import sys, time
    import numpy as np
    from alchemi_xr.data.block import Block
    from alchemi_xr.errors import StoreLockedError
    from alchemi_xr.store import StoreWriter

    path, first, times = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    writer = StoreWriter(path)
    ptr = np.arange(38)
    refused = 0
    for k in range(times):
        energy = np.full((37, 1), first + k)
        block = Block(ptr, ptr * 0, {
            "positions": np.zeros((37, 3)), "atomic_numbers": np.ones(37, int), "energy": energy,
        }, {"positions": "atom", "atomic_numbers": "atom", "energy": "system"})
        while True:
            try:
                writer.append(block)
                break
            except StoreLockedError as error:
                assert "pid" in str(error)
                refused += 1
                time.sleep(0.005)
    print(refused)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "times"), [(2, 10), (8, 4)])
def test_processes_append_at_once_and_nothing_is_lost(make, tmp_path, writers, times):
    """C24, and more of them."""
    path = tmp_path / "a.zarr"
    fields = {"positions": "f8", "atomic_numbers": "i8", "energy": "f8"}
    config = {"core": {"chunk_size": 50}, "meta": {"chunk_size": 50}}
    StoreWriter(path, config).write(make(0, 37, fields=fields))
    start = open_store(path).read_rows("energy", 0, 37).sum()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(path), str(100 * first), str(times)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(1, writers + 1)
    ]
    refused = [int(run.communicate(timeout=120)[0]) for run in runs]
    assert [run.returncode for run in runs] == [0] * writers
    # Eight at once do not pass by each other all the time.
    assert writers == 2 or sum(refused) > 0
    snapshot = open_store(path)
    commits = writers * times
    assert snapshot.num_samples == 37 * (1 + commits)
    assert snapshot.generation == 1 + commits
    added = snapshot.read_rows("energy", 37, 37 * (1 + commits)).reshape(commits, 37)
    assert (added == added[:, :1]).all()
    wanted = [100.0 * w + k for w in range(1, writers + 1) for k in range(times)]
    assert sorted(added[:, 0].tolist()) == wanted
    assert snapshot.read_rows("energy", 0, 37).sum() == start
    assert verify(path).clean

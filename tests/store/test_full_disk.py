"""A disk that is full or fails at any write: what is committed stays, and the next try succeeds."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.errors import AlchemiError
from alchemi_xr.store import StoreWriter, fs, open_store
from alchemi_xr.store.verify import verify
from alchemi_xr.testing.faults import stop_at

FIELDS = {"positions": "f8", "neighbor_list": "i8"}
OPERATIONS = ["append", "add_custom", "delete", "defragment", "transaction"]


def act(operation, writer, make):
    if operation == "append":
        writer.append(make(1, 3, fields={"positions": "f8", "energy": "f8"}))
    elif operation == "add_custom":
        writer.add_custom("tag", np.arange(5.0), "system")
    elif operation == "delete":
        writer.delete([0, 1])
    elif operation == "defragment":
        writer.defragment()
    else:
        with writer.transaction(max_bytes=100):
            writer.append(make(1, 2, fields=FIELDS))
            writer.append(make(2, 1, fields=FIELDS))
            writer.delete([1, 5])


def state(path):
    with open_store(path) as snapshot:
        return snapshot.read_block(slice(None)), snapshot.samples_mask.tolist()


def is_same(a, b, same):
    if a[1] != b[1] or a[0].names != b[0].names:
        return False
    same(a[0], b[0])
    return True


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["raw", "fast"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_at_each_write(make, same, tmp_path, operation, profile):
    config = {"profile": profile, "core": {"chunk_size": 3}, "meta": {"chunk_size": 4}}
    source = tmp_path / "start" / "a.zarr"
    StoreWriter(source, config).write(make(0, 5, fields=FIELDS))
    StoreWriter(source).delete([4])
    old = state(source)
    shutil.copytree(source.parent, tmp_path / "count")
    with stop_at(None) as calls:
        act(operation, StoreWriter(tmp_path / "count" / "a.zarr", config), make)
    new = state(tmp_path / "count" / "a.zarr")
    writes = [
        k for k, name in enumerate(calls.names) if name in ("pwrite", "open", "fsync", "fdatasync")
    ]
    assert len(writes) > 10
    # Every second one in each profile; one after the other is full and broken.
    for number in writes[profile == "raw" :: 2]:
        code = errno.ENOSPC if number % 4 < 2 else errno.EIO
        folder = tmp_path / f"k{number}"
        shutil.copytree(source.parent, folder)
        path = folder / "a.zarr"
        writer = StoreWriter(path, config)
        error = None
        with stop_at(number, dead=False, code=code) as stopped:
            try:
                act(operation, writer, make)
            except (OSError, AlchemiError) as raised:
                error = raised
        assert stopped.stopped
        # Where nothing is raised the lease was not given back, after the commit.
        assert error is None or code in (
            getattr(error, "errno", None),
            getattr(error.__cause__, "errno", None),
        )
        if not is_same(state(path), new, same):
            assert is_same(state(path), old, same), (number, calls.names[number])
            if fs.sibling(path, "lease").exists():
                # The disk refused to give the lease back; its owner lives, so say who it was.
                fs.sibling(path, "lease").unlink()
            act(operation, writer, make)
            assert is_same(state(path), new, same), number
        assert verify(path, checksums=True).ok
        shutil.rmtree(folder)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if not sys.platform.startswith("linux"):
        pytest.skip("needs tmpfs")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("profile", ["raw", "fast"])
def test_a_disk_that_is_really_full(make, same, small_disk, profile):
    path = small_disk / "a.zarr"
    config = {"profile": profile, "core": {"chunk_size": 1024}, "meta": {"chunk_size": 1024}}
    writer = StoreWriter(path, config)
    blocks = [make(0, 50, fields=FIELDS)]
    writer.write(blocks[0])
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    with pytest.raises(OSError) as refused:
        for seed in range(1, 500):
            block = make(seed, 200, fields=FIELDS)
            writer.append(block)
            blocks.append(block)
    assert errno.ENOSPC in (refused.value.errno, getattr(refused.value.__cause__, "errno", None))
    assert len(blocks) > 3
    for operation in ("transaction", "defragment"):
        with pytest.raises((OSError, AlchemiError)):
            if operation == "defragment":
                writer.defragment()
            else:
                with writer.transaction():
                    writer.append(make(1, 2_000, fields=FIELDS))
    same(open_store(path).read_block(slice(None)), Block.concat(blocks))
    assert verify(path, checksums=True).ok
    ballast.unlink()
    writer.append(make(999, 5, fields=FIELDS))
    writer.delete([0])
    same(
        open_store(path).read_block(slice(None)),
        Block.concat([*blocks, make(999, 5, fields=FIELDS)]),
    )
    assert verify(path, checksums=True).clean, verify(path)

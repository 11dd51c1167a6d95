"""A writer stopped at any call leaves the old generation or the new one, whole."""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.store import StoreWriter, fs, open_store
from alchemi_xr.store.verify import repair, verify
from alchemi_xr.testing.faults import bury_lease, stop_at

CONFIG = {"core": {"chunk_size": 3}, "meta": {"chunk_size": 4}}
FIELDS = {"positions": "f8", "neighbor_list": "i8"}
MORE = {"positions": "f8", "energy": "f8"}


@pytest.fixture
def start(make, tmp_path):
    """A store of five samples, one of them deleted, and its content."""
    path = tmp_path / "start" / "a.zarr"
    writer = StoreWriter(path, CONFIG)
    writer.write(make(0, 5, fields=FIELDS))
    writer.delete([4])
    return path, make(0, 5, fields=FIELDS)


def cases(make, first):
    more, again = make(1, 3, fields=MORE), make(2, 2, fields=FIELDS, text=True)

    def tagged(block):
        return block.with_field("tag", np.arange(5.0), "system")

    return {
        "append": (lambda w: w.append(more), Block.concat([first, more]), [1, 1, 1, 1, 0, 1, 1, 1]),
        "append text": (
            lambda w: w.append(again),
            Block.concat([first, again]),
            [1, 1, 1, 1, 0, 1, 1],
        ),
        "delete": (lambda w: w.delete([0, 1]), first, [0, 0, 1, 1, 0]),
        "undelete": (lambda w: w.undelete([4]), first, [1] * 5),
        "add_custom": (
            lambda w: w.add_custom("tag", np.arange(5.0), "system"),
            tagged(first),
            [1, 1, 1, 1, 0],
        ),
        "defragment": (lambda w: w.defragment(), first.take(np.arange(4)), [1] * 4),
        "overwrite": (lambda w: w.write(more, overwrite=True), more, [1] * 3),
    }


OPERATIONS = [
    "append",
    "append text",
    "delete",
    "undelete",
    "add_custom",
    "defragment",
    "overwrite",
]


def check(path, old, new, make, same):
    """Old or new, whole; the next append works and all is clean; True when new."""
    with open_store(path) as snapshot:
        found, mask = snapshot.read_block(slice(None)), snapshot.samples_mask.astype(int).tolist()
    done = mask == new[1] and found.names == new[0].names
    same(found, (new if done else old)[0])
    assert mask == (new if done else old)[1]
    assert verify(path).ok
    bury_lease(path)
    StoreWriter(path, CONFIG).append(make(7, 1, fields=FIELDS))
    with open_store(path) as snapshot:
        same(
            snapshot.read_block(slice(None)),
            Block.concat([(new if done else old)[0], make(7, 1, fields=FIELDS)]),
        )
        assert snapshot.samples_mask.astype(int).tolist() == [*(new if done else old)[1], 1]
    report = verify(path)
    if not report.clean:
        report = repair(path)
    assert report.clean, report
    return done


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_any_call(make, same, tmp_path, start, monkeypatch, operation, kernel):
    if not kernel:
        if operation not in ("defragment", "overwrite"):
            pytest.skip("does not swap folders")
        monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    source, first = start
    act, *new = cases(make, first)[operation]
    old = (first, [1, 1, 1, 1, 0])
    with stop_at(None) as calls:
        shutil.copytree(source.parent, tmp_path / "count")
        act(StoreWriter(tmp_path / "count" / "a.zarr", CONFIG))
    # Around a commit every call; elsewhere about every third, another third each run of CI.
    total = calls.count
    chosen = sorted(
        {*range(total % 3, total, max(1, total // 9)), *range(max(0, total - 9), total)}
    )
    outcomes = []
    for number in chosen:
        folder = tmp_path / f"k{number}"
        shutil.copytree(source.parent, folder)
        with stop_at(number, dead=True) as calls, contextlib.suppress(Exception):
            act(StoreWriter(folder / "a.zarr", CONFIG))
        assert calls.stopped
        outcomes.append(check(folder / "a.zarr", old, new, make, same))
        shutil.rmtree(folder)
    # Once it is committed it stays so at all later calls.
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]


def test_a_first_write_that_is_killed_leaves_no_store(make, tmp_path):
    with stop_at(None) as calls:
        StoreWriter(tmp_path / "count.zarr").write(make(0))
    for number in range(0, calls.count, 6):
        path = tmp_path / f"k{number}" / "a.zarr"
        with stop_at(number), contextlib.suppress(OSError):
            StoreWriter(path).write(make(0))
        if path.exists():
            assert open_store(path).num_samples == 4
        else:
            bury_lease(path)
            StoreWriter(path).write(make(0))
        assert verify(path).ok

"""Where a store may be built, by whom, and what is left when that fails."""

from __future__ import annotations

import os
import shutil
import threading

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError, StoreError, StoreExistsError, StoreLockedError
from alchemi_xr.plan.job import Job, check_destination
from alchemi_xr.store import fs
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.writer import StoreWriter


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "a.zarr"
    arrays = {"positions": np.zeros((2, 3)), "atomic_numbers": np.ones(2, np.int64)}
    levels = dict.fromkeys(arrays, "atom")
    block = Block(np.array([0, 2]), np.zeros(2, np.int64), arrays, levels, {})
    StoreWriter(str(path)).write(block)
    return path


@pytest.mark.parametrize("wrong", [None, 5, "", "a\0b", b"a"])
def test_what_is_no_path_is_refused(wrong):
    with pytest.raises(ConfigError, match="is no path"):
        check_destination(wrong, overwrite=False)


@pytest.mark.parametrize("inside", ["b.zarr", "core/b.zarr"])
def test_no_store_inside_a_store(store, inside):
    with pytest.raises(ConfigError, match="lies inside the store"):
        check_destination(store / inside, overwrite=True)


def test_a_link_stands_for_the_store_that_it_leads_to(store, tmp_path):
    (tmp_path / "link").symlink_to(store)
    with pytest.raises(StoreExistsError):
        check_destination(tmp_path / "link", overwrite=False)
    assert check_destination(tmp_path / "link", overwrite=True) == store
    # Not through the link: publishing over it would take the root document of the store.
    assert open_store(str(store)).num_samples == 1


@pytest.mark.parametrize("place", ["/proc/a.zarr", "{tmp}/" + "x" * 250])
def test_a_place_where_nothing_can_be_made_is_told(tmp_path, place):
    if not os.path.isdir("/proc"):
        pytest.skip("no folder here that refuses everybody")
    path = check_destination(place.format(tmp=tmp_path), overwrite=False)
    with pytest.raises(ConfigError, match="no store can be built there"), Job(path):
        pass


def test_a_full_disk_is_a_typed_error_and_the_work_so_far_stays(tmp_path):
    job = Job(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match="No space left on device"), job:
        raise OSError(28, "No space left on device", "chunk")
    assert job.folder.is_dir()


def test_a_lock_whose_folder_was_removed_under_it_is_taken_anew(tmp_path, monkeypatch):
    first, second = Job(tmp_path / "a.zarr"), Job(tmp_path / "a.zarr")
    opened = second._open_lock()
    shutil.rmtree(first.folder)
    with first:
        # The second opened the lock that is gone; locking that one proves nothing.
        assert not second._take(opened)
        with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"), second:
            pass
    opened.close()


def test_jobs_that_come_and_go_never_meet(tmp_path):
    inside, most, errors = [], [], []

    def work():
        for _ in range(50):
            try:
                with Job(tmp_path / "a.zarr"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except StoreLockedError:
                pass
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert max(most) == 1


@pytest.mark.parametrize("way", ["job", "check"])
def test_a_swap_killed_between_its_renames_is_finished_first(store, monkeypatch, way):
    # What a process leaves that dies there, where names cannot be exchanged.
    monkeypatch.setattr(fs, "exchange", lambda first, second: False)
    built = fs.sibling(store, "building") / "store"
    shutil.copytree(store, built)
    StoreWriter(built).append(open_store(store).read_block(slice(None)))
    monkeypatch.setattr(fs, "rename", _die_at_the_second(fs.rename))
    with pytest.raises(KeyboardInterrupt):
        fs.swap(built, store, fs.previous_path(store))
    monkeypatch.undo()
    assert not store.exists()
    assert open_store(store).num_samples == 2
    # Another job begins there, finds what is no journal of its own, and fails.
    if way == "job":
        with pytest.raises(ConfigError), Job(store) as job:
            job.clear()
            raise ConfigError("x", "a bad record")
    else:
        with pytest.raises(StoreExistsError):
            check_destination(store, overwrite=False)
    assert open_store(store).num_samples == 2
    assert store.exists()


def _die_at_the_second(rename):
    calls = []

    def dying(old, new):
        calls.append(new)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(old, new)

    return dying

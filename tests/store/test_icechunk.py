"""Stores in Icechunk repositories, in a folder, in memory and on a real S3 server."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    MissingChunkError,
    StaleSnapshotError,
    StoreConflictError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from alchemi_xr.store import StoreWriter, copy_store, open_repository, open_store
from alchemi_xr.store._compat import wait
from alchemi_xr.store.icechunk import Repository
from alchemi_xr.store.verify import repair, verify

icechunk = pytest.importorskip("icechunk", reason="extra icechunk is missing")


@pytest.fixture
def location(tmp_path: Path) -> str:
    return f"icechunk:{tmp_path / 'repo'}"


def test_everything(location: str, make: Any, same: Any) -> None:
    first, second = make(1, 5, text=True, holes=("energy",)), make(2, 4, text=True)
    writer = StoreWriter(location)
    writer.write(first)
    held = open_store(location)
    writer.append(second)
    same(held.read_block(slice(None)), first)
    same(held.refresh().read_block(slice(5, 9)), second)
    writer.delete([1, 8])
    writer.undelete([8])
    writer.add_custom("mark", np.arange(9.0), "system")
    before = open_store(location)
    assert before.active.tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert verify(location, data=True).clean
    writer.defragment("small")
    after = open_store(location)
    assert (after.num_samples, after.generation) == (8, before.generation + 1)
    assert after.read_rows("mark", 0, 8).ravel().tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert verify(location, data=True).clean
    # Nothing is ever gone: the rewrite took nothing from those who read.
    same(held.read_block(slice(None)), first)
    assert before.read_rows("mark", 8, 9).ravel().tolist() == [8]
    with pytest.raises(StoreExistsError):
        writer.write(first)
    writer.write(second, overwrite=True)
    same(open_store(location).read_block(slice(None)), second)
    assert repair(location).clean
    messages = [s.message for s in open_repository(location).ancestry(branch="main")]
    assert messages[0] == "write: 4 samples, generation 1"
    assert "delete: 9 samples, generation 3" in messages


def test_time_travel(location: str, make: Any, same: Any) -> None:
    first, second = make(1, 5), make(2, 4)
    writer = StoreWriter(location)
    writer.write(first)
    old = open_store(location).snapshot_id
    writer.append(second)
    writer.delete([0])
    writer.defragment()
    same(open_store(location, snapshot=old).read_block(slice(None)), first)
    repository = open_repository(location)
    repository.create_tag("v1", old)
    repository.create_branch("trial", old)
    trial = StoreWriter(location, branch="trial")
    trial.append(first)
    assert open_store(location, branch="trial").num_samples == 10
    assert open_store(repository, tag="v1").num_samples == 5
    assert open_store(location).num_samples == 8
    for refs in ({"branch": "none"}, {"tag": "none"}, {"snapshot": "none"}):
        with pytest.raises(StoreNotFoundError, match="'none'"):
            open_store(location, **refs)
    with pytest.raises(ConfigError, match="give one of"):
        open_store(location, branch="trial", tag="v1")
    with pytest.raises(StoreNotFoundError, match="branch 'none'"):
        StoreWriter(location, branch="none").append(first)


def test_a_dataset_of_a_snapshot(location: str, make: Any) -> None:
    xr = pytest.importorskip("xarray")
    from alchemi_xr.ragged import open_dataset

    block = make(1, 5)
    writer = StoreWriter(location)
    writer.write(block)
    old = open_store(location).snapshot_id
    writer.append(block)
    assert open_dataset(location).sizes["sample"] == 10
    ds = open_dataset(location, snapshot=old, chunks={"sample": 2})
    np.testing.assert_array_equal(ds.positions.values, block["positions"])
    again = pickle.loads(pickle.dumps(ds))
    np.testing.assert_array_equal(again.positions.values, block["positions"])
    assert xr.open_dataset(location).sizes["sample"] == 10
    assert xr.open_dataset(location, engine="alchemi_xr", snapshot=old).sizes["sample"] == 5


def test_nothing_is_made_by_looking(location: str, make: Any, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="no Icechunk repository"):
        open_store(location)
    with pytest.raises(StoreNotFoundError):
        StoreWriter(location).append(make(0, 1))
    with pytest.raises(StoreNotFoundError):
        open_repository(location)
    assert list(tmp_path.iterdir()) == []
    open_repository(location, create=True)
    with pytest.raises(StoreNotFoundError, match="no store"):
        open_store(location)
    with pytest.raises(ConfigError, match="Icechunk storage"):
        StoreWriter("icechunk:ftp://a/b").write(make(0, 1))
    with pytest.raises(ConfigError, match="no location"):
        open_store("icechunk:")


def test_a_refused_write_leaves_nothing(location: str, make: Any, same: Any) -> None:
    block = make(1, 5)
    writer = StoreWriter(location)
    writer.write(block)
    before = open_store(location).snapshot_id
    with pytest.raises(FieldError):
        writer.add_custom("mark", np.arange(3.0), "system")
    assert open_store(location).snapshot_id == before
    writer.append(block)
    assert open_store(location).num_samples == 10


def test_a_missing_chunk(location: str, make: Any) -> None:
    StoreWriter(location).write(make(1, 5))
    repository = open_repository(location)
    session = repository.writable_session("main")
    wait(session.store.delete("core/positions/c/0/0"))
    session.commit("lost")
    with pytest.raises(MissingChunkError, match="core/positions"):
        open_store(location).read_rows("positions", 0, 1)
    assert any("core/positions" in p for p in verify(location).problems)


# -- conflicts ---------------------------------------------------------------


def _meanwhile(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """Let another writer commit just before the next commit."""
    end = Repository.end

    def end_second(self: Repository, *, keep: bool) -> None:
        monkeypatch.setattr(Repository, "end", end)
        write()
        end(self, keep=keep)

    monkeypatch.setattr(Repository, "end", end_second)


def test_an_append_lands_behind_a_faster_one(
    location: str, make: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, ours, theirs = make(1, 5), make(2, 3), make(3, 4)
    StoreWriter(location).write(first)
    _meanwhile(monkeypatch, lambda: StoreWriter(location).append(theirs))
    StoreWriter(location).append(ours)
    snapshot = open_store(location)
    same(snapshot.read_block(slice(5, 9)), theirs)
    same(snapshot.read_block(slice(9, 12)), ours)
    assert verify(location, data=True).clean


def test_a_rewrite_sees_a_faster_append(
    location: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StoreWriter(location)
    writer.write(make(1, 5))
    writer.delete([0])
    _meanwhile(monkeypatch, lambda: StoreWriter(location).append(make(2, 3)))
    writer.defragment()
    assert open_store(location).num_samples == 7


def test_positions_are_not_used_on_a_rewritten_store(
    location: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = StoreWriter(location), StoreWriter(location)
    writer.write(make(1, 5))
    writer.delete([0])
    _meanwhile(monkeypatch, other.defragment)
    with pytest.raises(StaleSnapshotError, match="mean other samples"):
        writer.delete([2])
    assert open_store(location).samples_mask.all()
    _meanwhile(monkeypatch, lambda: other.append(make(2, 3)))
    writer.delete([2])
    assert np.flatnonzero(~open_store(location).samples_mask).tolist() == [2]


def test_a_field_for_fewer_samples_than_there_are_now(
    location: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoreWriter(location).write(make(1, 5))
    _meanwhile(monkeypatch, lambda: StoreWriter(location).append(make(2, 3)))
    with pytest.raises(FieldError, match="does not match expected size 8"):
        StoreWriter(location).add_custom("mark", np.arange(5.0), "system")


def test_threads_each_with_a_writer(location: str, tagged: Any) -> None:
    StoreWriter(location).write(tagged(0))

    def append(first: int) -> None:
        writer = StoreWriter(location)
        for seed in range(first, first + 3):
            writer.append(tagged(seed))

    threads = [threading.Thread(target=append, args=(10 * n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _check_landed(open_store(location), [0, 10, 11, 12, 20, 21, 22, 30, 31, 32])


@pytest.mark.parametrize("home", ["s3", "folder"])
def test_eight_processes_all_land(
    home: str, request: pytest.FixtureRequest, location: str, appenders: Any, tagged: Any
) -> None:
    options = None
    if home == "s3":
        s3 = request.getfixturevalue("s3")
        location, options = f"icechunk:{s3.url()}", s3.icechunk_options
    StoreWriter(location, storage_options=options).write(tagged(0))
    seeds = [[10 * n, 10 * n + 1][: 1 if home == "s3" else 2] for n in range(1, 9)]
    jobs = [{"place": location, "options": options, "seeds": s, "wait": 0} for s in seeds]
    answers = appenders.run(jobs)
    assert [answer["done"] for answer in answers] == seeds
    assert not any(answer["refused"] for answer in answers)
    landed = [0, *(seed for pair in seeds for seed in pair)]
    _check_landed(open_store(location, storage_options=options), landed)


def _check_landed(snapshot: Any, seeds: list[int]) -> None:
    energy = snapshot.read_rows("energy", 0, snapshot.num_samples).ravel()
    assert sorted(energy.tolist()) == sorted([float(seed) for seed in seeds for _ in range(2)])
    assert snapshot.generation == len(seeds)
    assert verify(snapshot.place).clean


def test_a_conflict_that_never_ends_is_told(
    location: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoreWriter(location).write(make(1, 5))

    def never(self: Repository, *, keep: bool) -> None:
        self._session = None
        raise StoreConflictError("here", "another writer committed in between")

    monkeypatch.setattr(Repository, "end", never)
    monkeypatch.setattr("alchemi_xr.store.icechunk._TRIES", 3)
    with pytest.raises(StoreConflictError):
        StoreWriter(location).append(make(2, 1))


# -- repositories and sessions of one's own ------------------------------------


def test_a_repository_in_memory(make: Any, same: Any) -> None:
    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    block = make(1, 5)
    StoreWriter(repository).write(block)
    same(open_store(repository).read_block(slice(None)), block)
    with pytest.raises(TypeError, match="memory of this process"):
        pickle.dumps(open_store(repository))


def test_ones_own_session_is_ones_own_transaction(location: str, make: Any, same: Any) -> None:
    block = make(1, 5)
    StoreWriter(location).write(block)
    repository = open_repository(location)
    session = repository.writable_session("main")
    writer = StoreWriter(session)
    writer.append(block)
    writer.append(block)
    assert open_store(session.store).num_samples == 15
    assert open_store(location).num_samples == 5
    session.commit("two appends")
    assert open_store(location).num_samples == 15
    assert open_store(repository.readonly_session("main")).num_samples == 15
    with pytest.raises(StoreError, match="Icechunk"):
        StoreWriter(repository.writable_session("main")).defragment()
    with pytest.raises(ConfigError, match="its branch already"):
        open_store(session, branch="main")


def test_a_snapshot_is_not_written_to(location: str, make: Any) -> None:
    StoreWriter(location).write(make(1, 5))
    place = open_store(location).place.for_other_processes(open_store(location).store)
    with pytest.raises(StoreError, match="cannot be written to"):
        StoreWriter(place).append(make(1, 5))


def test_copies_both_ways(location: str, make: Any, same: Any, tmp_path: Path) -> None:
    block = make(3, 6, text=True, holes=("energy",))
    StoreWriter(tmp_path / "a.zarr").write(block)
    same(copy_store(tmp_path / "a.zarr", location).read_block(slice(None)), block)
    same(copy_store(location, tmp_path / "b.zarr").read_block(slice(None)), block)
    assert verify(location, data=True).clean
    with pytest.raises(StoreExistsError):
        copy_store(tmp_path / "a.zarr", location)
    assert sorted(os.listdir(tmp_path)) == [".repo.commit", "a.zarr", "b.zarr", "repo"]

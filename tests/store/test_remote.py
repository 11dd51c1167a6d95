"""Stores in an object store, against a real S3 server, and behind fsspec."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from alchemi_xr.errors import (
    ConfigError,
    MissingChunkError,
    StaleSnapshotError,
    StoreError,
    StoreExistsError,
    StoreLockedError,
    StoreNotFoundError,
)
from alchemi_xr.store import StoreWriter, copy_store, open_store
from alchemi_xr.store import lease as lease_module
from alchemi_xr.store._compat import buffer_prototype, to_buffer, wait
from alchemi_xr.store.lease import LEASE_OBJECT, Lease
from alchemi_xr.store.locate import local_path, locate
from alchemi_xr.store.remote import RemoteStore
from alchemi_xr.store.verify import verify


@dataclass
class Elsewhere:
    """A place that is no folder, and how it is given."""

    store: Any
    options: dict[str, Any] | None = None

    def writer(self, **more: Any) -> StoreWriter:
        return StoreWriter(self.store, storage_options=self.options, **more)

    def open(self, **more: Any) -> Any:
        return open_store(self.store, storage_options=self.options, **more)

    @property
    def raw(self) -> Any:
        return locate(self.store, storage_options=self.options).store

    def names(self) -> list[str]:
        async def names() -> list[str]:
            return [key async for key in self.raw.list()]

        return sorted(wait(names()))

    def remove(self, key: str) -> None:
        wait(self.raw.delete(key))


@pytest.fixture(params=["s3fs", "obstore", "memory"])
def elsewhere(request: pytest.FixtureRequest) -> Elsewhere:
    if request.param == "memory":
        return Elsewhere(f"memory://{uuid.uuid4().hex}.zarr")
    s3 = request.getfixturevalue("s3")
    if request.param == "s3fs":
        return Elsewhere(s3.url(), s3.options)
    return Elsewhere(s3.obstore(s3.prefix()))


@pytest.fixture(params=["obstore", "memory"])
def here(request: pytest.FixtureRequest) -> Elsewhere:
    """The same without a server between, for what does not depend on it."""
    if request.param == "memory":
        return Elsewhere(f"memory://{uuid.uuid4().hex}.zarr")
    return request.getfixturevalue("objects")


@pytest.fixture
def objects() -> Elsewhere:
    """An object store in the memory of this process, with conditional puts."""
    obstore = pytest.importorskip("obstore.store", reason="extra cloud is missing")
    return Elsewhere(obstore.MemoryStore())


# -- what a store does -------------------------------------------------------


def test_everything_but_a_rewrite(elsewhere: Elsewhere, make: Any, same: Any) -> None:
    first, second = make(1, 5, text=True, holes=("energy",)), make(2, 4, text=True)
    writer = elsewhere.writer()
    with pytest.raises(StoreNotFoundError):
        elsewhere.open()
    writer.write(first, provenance={"by": "test"})
    before = elsewhere.open()
    writer.append(second)
    same(before.read_block(slice(None)), first)
    after = elsewhere.open()
    same(after.read_block(slice(5, 9)), second)
    assert after.schema.provenance == {"by": "test"}
    same(elsewhere.open(generation=1).read_block(slice(None)), first)
    writer.delete([1, 8])
    writer.undelete([8])
    writer.add_custom("mark", np.arange(9.0), "system")
    newest = before.refresh()
    assert newest.active.tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert newest.read_rows("mark", 0, 9).ravel().tolist() == list(range(9))
    assert verify(writer.place, data=True).clean
    assert not [key for key in elsewhere.names() if LEASE_OBJECT in key]
    with pytest.raises(StoreError, match=r"defragment\(dest=.*Icechunk"):
        writer.defragment()
    with pytest.raises(StoreExistsError, match="replace a store in one step"):
        writer.write(first, overwrite=True)
    same(elsewhere.open().read_block(slice(5, 9), second.names), second)


def test_a_snapshot_reaches_other_processes(elsewhere: Elsewhere, make: Any, same: Any) -> None:
    block = make(1, 5)
    elsewhere.writer().write(block)
    snapshot = elsewhere.open()
    if locate(elsewhere.store).store.is_process_memory:
        with pytest.raises(TypeError, match="memory of this process"):
            pickle.dumps(snapshot)
        return
    same(pickle.loads(pickle.dumps(snapshot)).read_block(slice(None)), block)


@pytest.mark.parametrize("profile", ["raw", "fast", "small"])
def test_a_tail_chunk_put_anew_keeps_its_committed_rows(
    objects: Elsewhere, make: Any, same: Any, profile: str
) -> None:
    """Readers of every generation get its rows, though appends put the same objects anew."""
    config = {"profile": profile, "core": {"chunk_size": 4, "shard_size": 16}}
    blocks = [make(seed, 3) for seed in range(8)]
    writer = objects.writer(config=config)
    writer.write(blocks[0])
    held = [objects.open()]
    for block in blocks[1:]:
        writer.append(block)
        held.append(objects.open())
    for generation, snapshot in enumerate(held):
        for number, block in enumerate(blocks[: generation + 1]):
            same(snapshot.read_block(slice(3 * number, 3 * number + 3)), block)


@pytest.mark.parametrize("profile", ["raw", "fast", "small"])
def test_a_shard_put_anew_while_it_is_read(
    objects: Elsewhere, make: Any, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    """The index of the old object and the chunk of the new one give no wrong row."""
    config = {"profile": profile, "core": {"chunk_size": 64, "shard_size": 1024}}
    writer = objects.writer(config=config)
    first = make(1, 60)
    # Easy to compress, which what is appended is not: the last chunk changes its length.
    first.arrays["positions"][:] = 1
    writer.write(first)
    snapshot, key = objects.open(), "core/positions/c/0/0"
    old = zarr.storage.MemoryStore()
    wait(old.set(key, wait(objects.raw.get(key, buffer_prototype()))))
    writer.append(make(2, 30))
    get, asked = RemoteStore.get, []

    async def get_old_first(self: Any, name: str, *more: Any, **named: Any) -> Any:
        if name == key:
            asked.append(named)
            if len(asked) == 1:
                return await old.get(name, *more, **named)
        return await get(self, name, *more, **named)

    monkeypatch.setattr(RemoteStore, "get", get_old_first)
    # Not all rows, so that the shard is not read in one piece.
    rows = snapshot.read_rows("positions", 1, snapshot.num_atoms)
    np.testing.assert_array_equal(rows, first["positions"][1:])
    # The old index was served; how the chunks are asked for is each zarr's own way.
    assert asked


def test_other_objects_are_not_built_upon(here: Elsewhere, make: Any) -> None:
    wait(here.raw.set("notes.txt", to_buffer(b"mine")))
    with pytest.raises(StoreExistsError, match=r"notes\.txt"):
        here.writer().write(make(0, 2))
    assert here.names() == ["notes.txt"]


def test_defragment_to_a_destination(here: Elsewhere, make: Any, same: Any, tmp_path: Path) -> None:
    block = make(3, 6)
    writer = here.writer()
    writer.write(block)
    writer.delete([0, 4])
    writer.defragment(dest=tmp_path / "whole.zarr")
    assert open_store(tmp_path / "whole.zarr").num_samples == 4
    same(open_store(tmp_path / "whole.zarr").read_block(slice(None)), block.take(np.r_[1, 2, 3, 5]))
    assert here.open().num_samples == 6
    memory: dict[str, Any] = {}
    writer.defragment("small", dest=memory)
    assert open_store(memory).num_samples == 4
    with pytest.raises(StoreExistsError):
        writer.defragment(dest=memory)


def test_copies_both_ways(here: Elsewhere, make: Any, same: Any, tmp_path: Path) -> None:
    block = make(3, 6, text=True, holes=("energy",))
    writer = StoreWriter(tmp_path / "a.zarr")
    writer.write(block)
    writer.delete([2])
    there = copy_store(tmp_path / "a.zarr", here.store, storage_options=here.options)
    same(there.read_block(slice(None)), block)
    assert there.active.tolist() == [0, 1, 3, 4, 5]
    assert verify(there.place).clean
    with pytest.raises(StoreExistsError):
        copy_store(tmp_path / "a.zarr", here.store, storage_options=here.options)
    back = copy_store(here.store, tmp_path / "b.zarr", source_options=here.options)
    same(back.read_block(slice(None)), block)
    here.writer().append(block)
    assert here.open().num_samples == 12


# -- what is lost is told ----------------------------------------------------


def test_a_missing_chunk(elsewhere: Elsewhere, make: Any) -> None:
    elsewhere.writer().write(make(1, 5))
    snapshot = elsewhere.open()
    lost = next(key for key in elsewhere.names() if key.startswith("core/positions/c/"))
    elsewhere.remove(lost)
    with pytest.raises(MissingChunkError, match="core/positions"):
        snapshot.read_rows("positions", 0, snapshot.num_atoms)
    report = verify(snapshot.place)
    assert any("core/positions" in problem for problem in report.problems)
    lost = next(key for key in elsewhere.names() if key.startswith("meta/samples_mask/c/"))
    elsewhere.remove(lost)
    with pytest.raises(MissingChunkError, match="meta/samples_mask"):
        elsewhere.open()


def test_a_store_that_was_removed(objects: Elsewhere, make: Any) -> None:
    objects.writer().write(make(1, 5))
    snapshot = objects.open()
    for key in objects.names():
        objects.remove(key)
    with pytest.raises(StaleSnapshotError):
        snapshot.read_rows("positions", 0, 1)
    with pytest.raises(StoreNotFoundError):
        snapshot.refresh()


def test_a_server_that_is_away(s3: Any) -> None:
    pytest.importorskip("s3fs")
    options = {**s3.options, "endpoint_url": "http://127.0.0.1:9", "max_retries": 0}
    options["config_kwargs"] = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    with pytest.raises(StoreError, match="storage_options"):
        open_store(s3.url(), storage_options=options)


# -- interrupted writers -----------------------------------------------------


class _Died(Exception):
    pass


def test_an_append_that_fails_at_any_put(
    objects: Elsewhere, make: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(1, 4, text=True), make(2, 3, text=True)
    objects.writer().write(first)
    put = RemoteStore.set
    left = [0]

    async def set_some(self: RemoteStore, key: str, value: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise _Died
        await put(self, key, value)

    monkeypatch.setattr(RemoteStore, "set", set_some)
    failures = 0
    while True:
        left[0] = failures
        try:
            objects.writer().append(second)
            break
        except _Died:
            failures += 1
        monkeypatch.setattr(RemoteStore, "set", put)
        snapshot = objects.open()
        assert snapshot.generation == 1
        same(snapshot.read_block(slice(None)), first)
        monkeypatch.setattr(RemoteStore, "set", set_some)
    assert failures > 15
    monkeypatch.setattr(RemoteStore, "set", put)
    assert objects.open().num_samples == 7
    same(objects.open().read_block(slice(4, 7)), second)
    assert verify(locate(objects.store), data=True).clean


def test_a_write_that_was_killed_is_done_anew(objects: Elsewhere, make: Any, same: Any) -> None:
    unfinished = {"attributes": {"alchemi_xr": {"building": {}}}, "node_type": "group"}
    wait(objects.raw.set("zarr.json", to_buffer(json.dumps(unfinished).encode())))
    wait(objects.raw.set("core/forces/c/0/0", to_buffer(b"garbage")))
    block = make(4, 3)
    objects.writer().write(block)
    same(objects.open().read_block(slice(None)), block)


_KILLED = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from conftest import make_block
import importlib.util
spec = importlib.util.spec_from_file_location("above", sys.argv[1] + "/../conftest.py")
above = importlib.util.module_from_spec(spec)
spec.loader.exec_module(above)
S3 = above.S3
from alchemi_xr.store import StoreWriter
from alchemi_xr.store.remote import RemoteStore
server = S3.__new__(S3)
server.endpoint = sys.argv[2]
put, left = RemoteStore.set, [int(sys.argv[4])]
async def set_some(self, key, value):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    await put(self, key, value)
RemoteStore.set = set_some
StoreWriter(server.obstore(sys.argv[3])).append(make_block(9, 3))
"""


@pytest.mark.kill
@pytest.mark.parametrize("after", [4, 15])
def test_the_lease_of_a_killed_writer_is_taken_over(
    s3: Any, make: Any, same: Any, after: int
) -> None:
    prefix = s3.prefix()
    first, second = make(1, 4), make(2, 3)
    StoreWriter(s3.obstore(prefix)).write(first)
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, os.path.dirname(__file__), s3.endpoint, prefix, str(after)],
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    place = Elsewhere(f"s3://bucket/{prefix}", s3.options)
    assert LEASE_OBJECT in place.names()
    same(place.open().read_block(slice(None)), first)
    place.writer().append(second)
    assert LEASE_OBJECT not in place.names()
    same(place.open().read_block(slice(4, 7)), second)
    assert verify(locate(place.store, storage_options=place.options)).clean


# -- the lease ---------------------------------------------------------------


def _lease(place: Elsewhere) -> Lease:
    return Lease(locate(place.store, storage_options=place.options))


def test_a_second_writer_is_refused_by_name(here: Elsewhere, make: Any) -> None:
    here.writer().write(make(1, 2))
    with _lease(here):
        with pytest.raises(StoreLockedError, match=rf"pid {os.getpid()}"):
            here.writer().append(make(2, 2))
        with pytest.raises(StoreLockedError):
            here.writer(lock_timeout=0.3).delete([0])
    here.writer().append(make(2, 2))
    assert here.open().num_samples == 4


def _foreign_lease(place: Elsewhere) -> None:
    owner = {"owner": "ana", "host": "node7", "namespace": "node7|x|y", "pid": 1, "token": "t"}
    wait(place.raw.set(LEASE_OBJECT, to_buffer(json.dumps(owner).encode())))


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
def test_an_owner_on_another_host_is_dead_when_its_heart_stopped(
    s3: Any, make: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = Elsewhere(s3.url(), s3.options)
    if kind == "obstore":
        place = Elsewhere(s3.obstore(s3.prefix()))
    place.writer().write(make(1, 2))
    _foreign_lease(place)
    with pytest.raises(StoreLockedError, match="ana@node7"):
        place.writer().append(make(2, 2))
    time.sleep(1.1)  # the server's clock has whole seconds
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.5)
    taken = _lease(place)
    taken.acquire()
    assert taken.took_over
    with pytest.raises(StoreLockedError, match=rf"pid {os.getpid()}"):
        _lease(place).acquire()
    taken.release()


def test_one_of_two_takes_a_dead_owners_lease_over(
    objects: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    _foreign_lease(objects)
    monkeypatch.setattr(lease_module, "STALE_SECONDS", -1.0)
    other = _lease(objects)
    real = lease_module.server_time

    def between(*arguments: Any) -> Any:
        # The other one is faster by just this.
        monkeypatch.setattr(lease_module, "server_time", real)
        other.acquire()
        return real(*arguments)

    monkeypatch.setattr(lease_module, "server_time", between)
    with pytest.raises(StoreLockedError):
        _lease(objects).acquire()
    assert other.took_over
    other.release()


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
def test_the_heart_beats(s3: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    place = Elsewhere(s3.url(), s3.options)
    if kind == "obstore":
        place = Elsewhere(s3.obstore(s3.prefix()))
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)

    def beat() -> float | None:
        found = wait(place.raw.get(LEASE_OBJECT, buffer_prototype()))
        return json.loads(found.to_bytes()).get("beat")

    with _lease(place) as lease:
        deadline = time.monotonic() + 10
        while beat() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert beat() is not None
        lease.check()
    assert place.names() == []


def test_a_writer_that_lost_its_lease_writes_no_more(
    objects: Elsewhere, make: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped for so long that another may have taken over."""
    first = make(1, 4)
    writer = objects.writer()
    writer.write(first)
    acquire = Lease.acquire

    def acquire_then_sleep(self: Lease) -> None:
        acquire(self)
        self._renewed -= lease_module.STALE_SECONDS

    monkeypatch.setattr(Lease, "acquire", acquire_then_sleep)
    before = [key for key in objects.names() if key != LEASE_OBJECT]
    with pytest.raises(StoreLockedError, match="lost its lease"):
        writer.append(make(2, 3))
    assert [key for key in objects.names() if key != LEASE_OBJECT] == before
    same(objects.open().read_block(slice(None)), first)


def test_two_processes_of_which_one_is_refused(s3: Any, appenders: Any, tagged: Any) -> None:
    url = s3.url()
    StoreWriter(url, storage_options=s3.options).write(tagged(0))
    seeds = [list(range(100 * n, 100 * n + 4)) for n in (1, 2)]
    jobs = [{"place": url, "options": s3.options, "seeds": s, "wait": 0} for s in seeds]
    answers = appenders.run(jobs)
    done = [seed for answer in answers for seed in answer["done"]]
    refused = [text for answer in answers for text in answer["refused"]]
    assert len(done) + len(refused) == 8
    assert all("is being written by" in text for text in refused)
    _check_landed(open_store(url, storage_options=s3.options), [0, *done])


def test_eight_processes_that_wait(s3: Any, appenders: Any, tagged: Any) -> None:
    url = s3.url()
    StoreWriter(url, storage_options=s3.options).write(tagged(0))
    seeds = [[10 * n] for n in range(1, 9)]
    jobs = [{"place": url, "options": s3.options, "seeds": s, "wait": 120} for s in seeds]
    answers = appenders.run(jobs)
    assert [answer["done"] for answer in answers] == seeds
    _check_landed(
        open_store(url, storage_options=s3.options), [0, *(seed for pair in seeds for seed in pair)]
    )


def _check_landed(snapshot: Any, seeds: list[int]) -> None:
    energy = snapshot.read_rows("energy", 0, snapshot.num_samples).ravel()
    assert sorted(energy.tolist()) == sorted([float(seed) for seed in seeds for _ in range(2)])
    assert snapshot.generation == len(seeds)
    assert verify(snapshot.place).clean


def test_a_place_without_conditional_puts(make: Any, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from fsspec.implementations.dirfs import DirFileSystem

    files = DirFileSystem(str(tmp_path), fs=fsspec.filesystem("file", auto_mkdir=True))
    store = zarr.storage.FsspecStore(AsyncFileSystemWrapper(files, asynchronous=True), path="a")
    with pytest.raises(StoreError, match="single_writer=True"):
        StoreWriter(store).write(make(1, 3))
    StoreWriter(store, single_writer=True).write(make(1, 3))
    assert open_store(store).num_samples == 3


# -- how a place is given ----------------------------------------------------


def test_file_urls_and_stores_of_folders_are_folders(make: Any, tmp_path: Path) -> None:
    obstore = pytest.importorskip("obstore.store", reason="extra cloud is missing")
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(1, 3))
    for given in (
        f"file://{path}",
        f"local://{path}",
        zarr.storage.FsspecStore.from_url(f"file://{path}"),
        obstore.LocalStore(str(path)),
        zarr.storage.StorePath(zarr.storage.LocalStore(tmp_path), "a.zarr"),
    ):
        assert locate(given).path == path
        assert open_store(given).num_samples == 3


@pytest.mark.parametrize("text", ["memory://1234", "s3://bucket/a.zarr"])
def test_a_url_that_became_a_path_makes_no_folder(
    text: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Path("memory://1")`` is the relative path ``memory:/1``: once a folder came of it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="made a Path"):
        StoreWriter(Path(text)).write(make(1, 3))
    with pytest.raises(ConfigError, match="made a Path"):
        open_store(str(Path(text)))
    with pytest.raises(ConfigError, match="copy_store"):
        local_path(text, "here")
    with pytest.raises(ConfigError, match="made a Path"):
        local_path(Path(text), "here")
    assert list(tmp_path.iterdir()) == []


def test_the_text_of_a_store_in_memory_is_no_path(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = zarr.storage.MemoryStore()
    StoreWriter(memory).write(make(1, 3))
    snapshot = open_store(memory)
    for give in (lambda: pickle.dumps(snapshot), lambda: open_store(str(memory))):
        with pytest.raises((TypeError, StoreNotFoundError)):
            give()
    StoreWriter(str(memory)).write(make(1, 3))
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_go_with_a_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local path"):
        locate(tmp_path, storage_options={"key": "x"})
    with pytest.raises(ConfigError, match="storage_options go with a URL"):
        locate({}, storage_options={"key": "x"})
    with pytest.raises(ConfigError, match="Icechunk"):
        open_store(tmp_path, tag="v1")
    with pytest.raises(ConfigError, match="nosuch"):
        locate("nosuch://place")


# -- the doors above ---------------------------------------------------------


def test_an_xarray_dataset_at_a_url(s3: Any, make: Any) -> None:
    xr = pytest.importorskip("xarray")
    from alchemi_xr.ragged import open_dataset

    block = make(5, 6)
    url = s3.url()
    StoreWriter(url, storage_options=s3.options).write(block)
    ds = open_dataset(url, storage_options=s3.options, chunks={"sample": 2})
    np.testing.assert_array_equal(ds.positions.values, block["positions"])
    pickle.loads(pickle.dumps(ds))
    again = xr.open_dataset(url, engine="alchemi_xr", storage_options=s3.options)
    np.testing.assert_array_equal(again.energy.values, block["energy"].ravel())


def test_tensors_at_a_url(s3: Any) -> None:
    torch = pytest.importorskip("torch")
    from alchemi_xr.data import AtomicData
    from alchemi_xr.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter

    url = s3.url()
    data = [
        AtomicData(positions=torch.ones(n, 3) * n, atomic_numbers=torch.ones(n, dtype=torch.long))
        for n in (2, 3)
    ]
    writer = AtomicDataZarrWriter(url, storage_options=s3.options)
    writer.write(data)
    writer.append(data[0])
    reader = AtomicDataZarrReader(url, storage_options=s3.options)
    assert torch.equal(reader.read_batch([1]).positions, data[1].positions)
    reader.check_integrity()
    reader.close()
    reader.reopen()
    assert len(reader) == 3


def test_convert_to_a_url(elsewhere: Elsewhere, tmp_path: Path) -> None:
    pytest.importorskip("ase")
    from alchemi_xr.etl import convert

    if not isinstance(elsewhere.store, str):
        pytest.skip("a URL")
    source = tmp_path / "a.xyz"
    source.write_text("2\nProperties=species:S:1:pos:R:3 energy=-1.0\nH 0 0 0\nH 0 0 0.7\n" * 3)
    report = convert(source, elsewhere.store, progress=False, storage_options=elsewhere.options)
    assert (report.destination, report.samples) == (elsewhere.store, 3)
    assert elsewhere.open().num_atoms == 6
    with pytest.raises(StoreExistsError):
        convert(source, elsewhere.store, progress=False, storage_options=elsewhere.options)
    with pytest.raises(ConfigError, match="overwrite"):
        convert(source, elsewhere.store, overwrite=True, storage_options=elsewhere.options)


def test_a_campaign_needs_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from alchemi_xr.campaign import Campaign

    monkeypatch.chdir(tmp_path)
    for source, results in (("s3://bucket/a", "b.zarr"), ("a.zarr", "s3://bucket/b")):
        with pytest.raises(ConfigError, match="copy_store"):
            Campaign(source, lambda: None, results)
    assert list(tmp_path.iterdir()) == []

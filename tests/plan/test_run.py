"""Plans carried out: edges, holes, bounded flight, journal, quarantine, progress."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ConfigError
from alchemi_xr.plan.client import Runner, open_runner
from alchemi_xr.plan.graph import build_graph
from alchemi_xr.plan.journal import Journal
from alchemi_xr.plan.plan import Extent, make_plan
from alchemi_xr.plan.progress import LogProgress, NoProgress, RichProgress, open_progress
from alchemi_xr.plan.rejects import Quarantine, Reject
from alchemi_xr.plan.run import run_plan
from alchemi_xr.plan.tasks import PartResult, PartStats
from alchemi_xr.store.bulk import BulkWriter, FieldLayout
from alchemi_xr.store.reader import open_store

SMALL = {"core": {"chunk_size": 16}, "custom": {"chunk_size": 16}, "meta": {"chunk_size": 16}}
LAYOUTS = (
    FieldLayout("positions", "atom", "float64", (3,)),
    FieldLayout("neighbor_list", "edge", "int64", (2,)),
    FieldLayout("energy", "system", "float64", (1,), holes=True),
)


@dataclass(frozen=True)
class Part:
    """Payload: which samples."""

    start: int
    stop: int


def _sample_counts(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 7, n), rng.integers(0, 9, n)


@dataclass
class Making:
    """A reader that makes its samples, and counts what is in flight."""

    total: int
    now: int = 0
    calls: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self, payload: Part) -> PartResult:
        with self.lock:
            self.calls.append(payload.start)
        atoms, edges = _sample_counts(self.total)
        pick = slice(payload.start, payload.stop)
        atoms_ptr = counts_to_ptr(atoms[pick])
        edges = np.where(atoms > 0, edges, 0)
        edges_ptr = counts_to_ptr(edges[pick])
        n = payload.stop - payload.start
        rng = np.random.default_rng(payload.start)
        limit = np.repeat(atoms[pick], edges[pick])
        pairs = (rng.random((len(limit), 2)) * limit[:, None]).astype(np.int64)
        index = np.arange(payload.start, payload.stop)
        energy = index.astype(np.float64)[:, None]
        block = Block(
            atoms_ptr,
            edges_ptr,
            {
                "positions": np.repeat(index, atoms[pick])[:, None] * np.ones(3),
                "neighbor_list": pairs,
                "energy": energy,
            },
            {"positions": "atom", "neighbor_list": "edge", "energy": "system"},
            {"energy": index % 3 > 0},
        )
        assert n == block.num_samples
        return PartResult(block)


def _setup(tmp_path: Path, n: int = 60, step: int = 7) -> tuple[Any, Making, BulkWriter]:
    atoms, edges = _sample_counts(n)
    edges = np.where(atoms > 0, edges, 0)
    extents = [
        Extent(
            min(i + step, n) - i,
            int(atoms[i : i + step].sum()),
            int(edges[i : i + step].sum()),
            Part(i, min(i + step, n)),
        )
        for i in range(0, n, step)
    ]
    writer = BulkWriter.create(tmp_path / "out.zarr", LAYOUTS, atoms, edges, config=SMALL)
    rows = {level: writer.shard_rows(level) for level in ("atom", "edge", "system")}
    return make_plan(extents, LAYOUTS, rows), Making(n), writer  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_straddle_partitions(tmp_path: Path, threads: int) -> None:
    plan, reader, writer = _setup(tmp_path)
    runner = open_runner("sync" if threads == 1 else None, threads=threads)
    with runner, Journal(tmp_path / "j", "x") as journal:
        run_plan(plan, reader, writer, journal, runner, NoProgress())
    assert journal.shards == set(range(len(plan.shards)))
    writer.commit()
    store = open_store(tmp_path / "out.zarr")
    block = store.read_block(store.active)
    index = np.repeat(np.arange(60), np.diff(block.atoms_ptr))
    assert (block["positions"][:, 0] == index).all()
    whole = Block.concat([reader(e.payload).block for e in plan.extents])
    np.testing.assert_array_equal(block["neighbor_list"], whole["neighbor_list"])
    assert (block.has("energy") == (np.arange(60) % 3 > 0)).all()
    assert np.isnan(block["energy"][::3]).all()
    assert sorted(reader.calls[: len(plan.extents)]) == [e.payload.start for e in plan.extents]


def test_a_resumed_run_reads_only_what_is_missing(tmp_path: Path) -> None:
    plan, reader, writer = _setup(tmp_path)
    with open_runner("sync") as runner, Journal(tmp_path / "j", "x") as journal:
        run_plan(plan, reader, writer, journal, runner, NoProgress())
        last = max(journal.shards)
        journal.shards.discard(last)
        task = next(t for t in plan.shards if t.number == last)
        reader.calls.clear()
        run_plan(plan, reader, writer, journal, runner, NoProgress())
    assert sorted(reader.calls) == [plan.extents[p.extent].payload.start for p in task.pieces]


def test_reading_waits_for_writing(tmp_path: Path) -> None:
    """No scheduler can have more extents in flight than the window."""
    plan, reader, writer = _setup(tmp_path, n=200, step=2)
    window = 3
    work = build_graph(plan, reader, writer, window=window)
    order: list[tuple[str, int]] = []
    graph = work.graph
    reads = {k: v for k, v in graph.items() if str(k[0]).startswith("read-")}
    for key, task in reads.items():
        needed = {k[1] for k in task[1]}
        allowed = {t.number for t in plan.shards if t.pieces[-1].extent <= int(key[1]) - window}
        before = {t.number for t in plan.shards if t.pieces[-1].extent == int(key[1]) - window}
        assert needed == before <= allowed
        order.append(key)
    assert len(order) == len(plan.extents)


def test_graph_keys_of_two_runs_differ(tmp_path: Path) -> None:
    plan, reader, writer = _setup(tmp_path)
    one = build_graph(plan, reader, writer, window=3)
    two = build_graph(plan, reader, writer, window=3)
    assert not set(one.graph) & set(two.graph)


def test_a_failing_task_raises_its_own_error(tmp_path: Path) -> None:
    plan, _, writer = _setup(tmp_path)

    def broken(payload: Part) -> PartResult:
        raise ConfigError("here", "it broke")

    with (
        open_runner(None, threads=2) as runner,
        Journal(tmp_path / "j", "x") as journal,
        pytest.raises(ConfigError, match="it broke"),
    ):
        run_plan(plan, broken, writer, journal, runner, NoProgress())


def test_journal_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    stats = PartStats([Reject("f", 3, "why", field="é")], ["n"], {"e": {"samples": 1}}, 2)
    journal = Journal(path, "abc").open()
    journal.shard_done(4)
    journal.extent_done(1, stats)
    journal.close()
    with path.open("a") as file:
        file.write('{"shard": 9')
    with Journal(path, "abc") as again:
        assert again.resumed
        assert again.shards == {4}
        assert again.extents == {1: stats}
        again.shard_done(5)
    with Journal(path, "abc") as again:
        assert again.shards == {4, 5}
    with Journal(path, "other") as fresh:
        assert not fresh.resumed


def test_quarantine_file(tmp_path: Path) -> None:
    file = Quarantine(tmp_path / "r.jsonl")
    rejects = [Reject("a.xyz", 1, "bad", 10, 3, "pos"), Reject("b.xyz", 0, "wörse", sample=4)]
    assert file.write(rejects) == 2
    assert file.read() == rejects
    assert file.write([]) == 0
    assert not file.path.exists()
    assert file.read() == []
    text = str(rejects[0].error())
    for word in ("a.xyz", "frame 1", "line 3", "byte 10", "'pos'", "bad", "Mend"):
        assert word in text


def test_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with LogProgress(out, every=0.0) as progress:
        progress.start("convert", 10, "samples")
        progress.advance(4, "1 rejected")
        progress.advance(6)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("convert: 4/10 samples")
    assert "1 rejected" in lines[0]
    assert "s left" in lines[0]
    assert lines[-1].startswith("convert: 10/10")


def test_progress_modes() -> None:
    from alchemi_xr.config import set_options

    mine = LogProgress(io.StringIO())
    assert open_progress(mine) is mine
    assert isinstance(open_progress(False), NoProgress)
    with set_options(progress="bar"):
        assert isinstance(open_progress(True), RichProgress)
        with open_progress(True) as bar:
            bar.start("convert", 2, "samples")
            bar.advance(2, "note")
    with set_options(progress="log"):
        assert isinstance(open_progress(True), LogProgress)


@pytest.mark.parametrize("client", [True, 0, 3.5, "tcp://127.0.0.1:1"])
def test_what_is_no_client(client: Any) -> None:
    with pytest.raises(ConfigError):
        open_runner(client)


def test_an_address_that_nobody_answers_is_nobodys_default() -> None:
    """A client that never connected must not take the caller's Dask computations."""
    from distributed.client import _get_global_client

    # The exception holds the frames that hold the client: it is not just collected.
    # (An address without a port fails before Client would clear away after itself.)
    with pytest.raises(ConfigError, match="no scheduler answers") as kept:
        open_runner("foo bar")
    assert kept.value.__cause__ is not None
    assert _get_global_client() is None


def test_a_runner_closes_only_its_own() -> None:
    closed: list[int] = []
    with Runner(threads=1, threads_per_worker=1, closing=[lambda: closed.append(1)]):
        pass
    assert closed == [1]


def test_a_shard_is_on_the_medium_before_the_journal_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power the journal must not name bytes that are gone."""
    from alchemi_xr.plan.journal import Journal
    from alchemi_xr.store import fs

    events: list[tuple[str, str]] = []

    def recorded(name: str, what: str) -> None:
        before = getattr(fs, name)

        def call(*arguments: Any) -> Any:
            first = arguments[0]
            path = str(getattr(first, "name", first)) if what != "folder" else str(first)
            result = before(*arguments)
            events.append((what, str(arguments[1]) if what == "renamed" else path))
            if what == "renamed":
                names[str(arguments[1])] = str(first)
            return result

        monkeypatch.setattr(fs, name, call)

    names: dict[str, str] = {}
    recorded("sync_open", "forced")
    recorded("rename", "renamed")
    recorded("fsync_dir", "folder")
    done = Journal.shard_done

    def shard_done(self: Journal, number: int) -> None:
        events.append(("journal", str(number)))
        done(self, number)

    monkeypatch.setattr(Journal, "shard_done", shard_done)
    merge_two(tmp_path)
    seen_forced: set[str] = set()
    open_folders: set[str] = set()
    shards = 0
    for what, path in events:
        if what == "forced":
            seen_forced.add(path)
        elif what == "renamed" and "/c/" in path:
            assert names[path] in seen_forced
            open_folders.add(str(Path(path).parent))
        elif what == "folder":
            open_folders.discard(path)
        elif what == "journal":
            shards += 1
            assert not open_folders
    assert shards > 4


def merge_two(tmp_path: Path) -> None:
    """A bulk job of many small shards, one thread."""
    import numpy as np

    from alchemi_xr import etl
    from alchemi_xr.data.block import Block
    from alchemi_xr.store import StoreWriter

    ptr = np.arange(0, 201, 4)
    block = Block(
        ptr,
        np.zeros_like(ptr),
        {"atomic_numbers": np.ones(200, int), "positions": np.ones((200, 3))},
        {"atomic_numbers": "atom", "positions": "atom"},
    )
    StoreWriter(tmp_path / "a.zarr").write(block)
    small = {"core": {"chunk_size": 64}, "meta": {"chunk_size": 64}}
    path = tmp_path / "a.zarr"
    etl.merge([path, path], tmp_path / "b.zarr", config=small, threads=1, progress=False)

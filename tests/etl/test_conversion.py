"""convert as a whole: destinations, resume, equal bytes everywhere, bounded memory."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.errors import (
    AlchemiError,
    ConfigError,
    FieldError,
    NotAStoreError,
    PlanError,
    SourceError,
    SourceNotFoundError,
    StoreExistsError,
    StoreLockedError,
    UnknownFieldError,
)
from alchemi_xr.etl.conversion import append, convert, plan_convert
from alchemi_xr.plan.job import Job
from alchemi_xr.store.reader import open_store

# Small shards and partitions: many tasks from little data.
SMALL = {
    "core": {"chunk_size": 64},
    "custom": {"chunk_size": 64},
    "meta": {"chunk_size": 64},
}
OPTIONS: dict[str, Any] = {"profile": SMALL, "options": {"partition_bytes": 3000}}


def write_frames(path: Path, count: int, *, seed: int = 0, broken: tuple[int, ...] = ()) -> Path:
    """Frames of 1 to 9 atoms; the numbers in ``broken`` have a bad atom line."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(count):
            n = int(rng.integers(1, 10))
            virial = f' dipole="{i} 0 1"' if i % 3 else ""
            file.write(
                f"{n}\nProperties=species:S:1:pos:R:3:forces:R:3 energy={rng.normal()!r} "
                f'label=frame{i}{virial} pbc="F F F"\n'
            )
            for row in rng.normal(size=(n, 6)):
                last = "bad" if i in broken else f"{row[5]:16.8f}"
                file.write("C " + "".join(f"{v:16.8f}" for v in row[:5]) + f" {last}\n")
    return path


def tree(path: Path) -> dict[str, bytes]:
    """All files below a folder with their bytes."""
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "input"
    folder.mkdir()
    return write_frames(folder / "in.xyz", 300)


# -- destinations --------------------------------------------------------------


def test_an_existing_store_is_replaced_only_when_told(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.zarr"
    convert(source, dst)
    before = tree(dst)
    with pytest.raises(StoreExistsError, match="--overwrite"):
        convert(source, dst)
    assert tree(dst) == before
    short = write_frames(tmp_path / "short.xyz", 3)
    convert(short, dst, overwrite=True)
    assert open_store(dst).num_samples == 3


def test_a_failed_overwrite_leaves_the_old_store(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.zarr"
    convert(source, dst)
    before = tree(dst)
    bad = write_frames(tmp_path / "bad.xyz", 50, broken=(40,))
    with pytest.raises(SourceError):
        convert(bad, dst, overwrite=True, **OPTIONS)
    assert tree(dst) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.xyz", "input", "out.zarr"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["photos", "file", "empty", "other zarr"])
def test_what_is_no_store_is_never_touched(
    source: Path, tmp_path: Path, overwrite: bool, what: str
) -> None:
    dst = tmp_path / "out.zarr"
    if what == "file":
        dst.write_bytes(b"mine")
    else:
        dst.mkdir()
    if what == "photos":
        (dst / "a.jpg").write_bytes(b"\xff\xd8")
    if what == "other zarr":
        (dst / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    before = tree(dst) if dst.is_dir() else dst.read_bytes()
    with pytest.raises(NotAStoreError, match="no store"):
        convert(source, dst, overwrite=overwrite)
    assert (tree(dst) if dst.is_dir() else dst.read_bytes()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input", "out.zarr"]


def test_two_at_a_time_are_refused(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.zarr"
    with Job(dst), pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
        convert(source, dst)
    assert not dst.exists()


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"nowhere\.xyz"):
        convert(tmp_path / "nowhere.xyz", tmp_path / "out.zarr")
    with pytest.raises(SourceNotFoundError, match="match"):
        convert(str(tmp_path / "*.xyz"), tmp_path / "out.zarr")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "name"), [(b"", "in.xyz"), (b"\x89PNG\r\n\x1a\n" + bytes(500), "in.xyz")]
)
@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
def test_nothing_to_read_is_an_error(
    tmp_path: Path, content: bytes, name: str, on_error: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=name):
        convert(tmp_path / name, tmp_path / "out.zarr", on_error=on_error)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_wrong_options(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.zarr"
    cases: list[tuple[dict[str, Any], type[AlchemiError], str]] = [
        ({"on_error": "ignore"}, ConfigError, "on_error"),
        ({"format": "extxy"}, ConfigError, "extxyz"),
        ({"units": {"energy": "furlong"}}, ConfigError, "furlong"),
        ({"units": {"label": "eV"}}, ConfigError, "no unit"),
        ({"dtype": "float33"}, ConfigError, "float33"),
        ({"fields": ["force_s"]}, UnknownFieldError, "forces"),
        ({"profile": "tiny"}, ConfigError, "tiny"),
        ({"client": True}, ConfigError, "bool"),
        ({"memory": 1000}, PlanError, "worker"),
    ]
    for options, error, match in cases:
        with pytest.raises(error, match=match):
            convert(source, dst, **options)
        assert not dst.exists()
        assert not dst.with_name(".out.zarr.building").exists()


# -- what is written -------------------------------------------------------------


def test_fields_and_dtypes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a.zarr", fields=["energy"], dtype="float32")
    store = open_store(tmp_path / "a.zarr")
    assert store.fields == ["atomic_numbers", "positions", "energy"]
    assert store.dtype("positions") == np.float32
    assert store.dtype("energy") == np.float64
    convert(source, tmp_path / "b.zarr", dtype={"energy": "float32"})
    store = open_store(tmp_path / "b.zarr")
    assert store.dtype("energy") == np.float32
    assert store.dtype("positions") == np.float64


def test_small_shards_hold_the_same(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "one.zarr")
    convert(source, tmp_path / "many.zarr", **OPTIONS)
    one, many = open_store(tmp_path / "one.zarr"), open_store(tmp_path / "many.zarr")
    assert many.chunk_rows("atom") == 64
    a, b = one.read_block(one.active), many.read_block(many.active)
    assert a.names == b.names
    for name in a.names:
        np.testing.assert_array_equal(a[name], b[name])
        np.testing.assert_array_equal(a.has(name), b.has(name))


def test_the_plan_keeps_its_word(source: Path, tmp_path: Path) -> None:
    from alchemi_xr.store.bulk import BulkWriter

    plan = plan_convert(source, **OPTIONS)
    assert list(tmp_path.iterdir()) == [tmp_path / "input"]
    writer = BulkWriter.create(
        tmp_path / "x.zarr", plan.layouts, [1, 1, 1], [0, 0, 0], config=SMALL
    )
    for level in ("atom", "system"):
        assert writer.shard_rows(level) == plan.shard_rows[level]
    text = plan.describe(2)
    assert "300 samples" in text
    assert "projected memory" in text


def test_append_after_convert(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.zarr"
    convert(source, dst)
    more = write_frames(tmp_path / "more.xyz", 20, seed=5, broken=(7,))
    report = append(more, dst, on_error="quarantine")
    assert (report.samples, report.rejected) == (19, 1)
    store = open_store(dst)
    assert len(store.active) == 319
    labels = store.read_block(store.active[-19:], ["label"])["label"]
    assert labels.tolist() == [f"frame{i}" for i in range(20) if i != 7]


# -- resume ----------------------------------------------------------------------

RUN = """
import sys
from alchemi_xr.etl.conversion import convert
if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2], on_error="quarantine", progress=False, threads=1,
            profile={"core": {"chunk_size": 64}, "custom": {"chunk_size": 64},
                     "meta": {"chunk_size": 64}},
            options={"partition_bytes": 3000})
"""


@pytest.mark.kill
@pytest.mark.slow
def test_a_killed_conversion_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    source = write_frames(tmp_path / "in.xyz", 1500, broken=(100, 1400))
    undisturbed = tmp_path / "whole.zarr"
    options = {**OPTIONS, "on_error": "quarantine"}
    convert(source, undisturbed, **options)
    want = tree(undisturbed)
    dst = tmp_path / "out.zarr"
    script = tmp_path / "run.py"
    script.write_text(RUN)
    journal = tmp_path / ".out.zarr.building" / "journal.jsonl"
    lines = []
    for least in (1, 30, 90):
        process = subprocess.Popen([sys.executable, str(script), str(source), str(dst)])
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") > least:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        assert process.wait(60) == -signal.SIGKILL
        lines.append(journal.read_bytes().count(b"\n"))
        assert not dst.exists()
    assert lines == sorted(lines)
    report = convert(source, dst, **options)
    assert report.resumed
    assert tree(dst) == want
    assert [r.frame for r in report.rejects] == [100, 1400]
    assert not journal.parent.exists()


def test_another_input_does_not_resume(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out.zarr"

    class Stop(BaseException):
        pass

    class Stopping:
        done = 0

        def start(self, title: str, total: int | None, unit: str) -> None:
            self.title = title

        def advance(self, count: int = 1, note: str = "") -> None:
            self.done += self.title == "convert"
            if self.done > 5:
                raise Stop

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

    with pytest.raises(Stop):
        convert(source, dst, progress=Stopping(), threads=1, **OPTIONS)
    building = tmp_path / ".out.zarr.building"
    assert (building / "journal.jsonl").exists()
    # Half a line, as a crash leaves it.
    with (building / "journal.jsonl").open("a") as file:
        file.write('{"shard": 1')
    write_frames(source, 200, seed=9)
    report = convert(source, dst, **OPTIONS)
    assert not report.resumed
    assert report.samples == 200
    other = tmp_path / "other.zarr"
    convert(source, other, **OPTIONS)
    assert tree(other) == tree(dst)


# -- Dask ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cluster_writes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    broken = write_frames(source.parent / "b.xyz", 60, seed=3, broken=(11,))
    options = {**OPTIONS, "on_error": "quarantine"}
    inputs = [source, broken]
    convert(inputs, tmp_path / "threads.zarr", threads=2, **options)
    want = tree(tmp_path / "threads.zarr")
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        # Not the default of the process: what runs on it must name it everywhere.
        Client(cluster, set_as_default=False) as client,
    ):
        for name, how in (
            ("cluster", cluster),
            ("client", client),
            ("address", cluster.scheduler_address),
        ):
            report = convert(inputs, tmp_path / f"{name}.zarr", client=how, **options)
            assert report.samples == 359
            assert tree(tmp_path / f"{name}.zarr") == want
        # An error on a worker arrives as our own.
        with pytest.raises(SourceError, match="frame 11"):
            convert(broken, tmp_path / "raises.zarr", client=client, **OPTIONS)
        assert len(client.scheduler_info()["workers"]) == 2
    assert not (tmp_path / "raises.zarr").exists()


def test_graph_of_many_files_is_small(tmp_path: Path) -> None:
    """Case C33: paths and offsets only."""
    from alchemi_xr.etl.request import Request
    from alchemi_xr.etl.source import plain_map
    from alchemi_xr.plan.graph import build_graph
    from alchemi_xr.store.bulk import BulkWriter
    from alchemi_xr.store.codecs import as_config

    text = write_frames(tmp_path / "one.txt", 100).read_text()
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(1000):
        (folder / f"part-{i:04d}.xyz").write_text(text)
    given = Request(
        str(folder / "*.xyz"),
        format=None,
        on_error="raise",
        energy_key=None,
        forces_key=None,
        key_map=None,
        units=None,
        dtype=None,
        fields=None,
        nonfinite="keep",
        max_force=None,
        options=None,
    )
    given.run_scan(None, plain_map)
    plan = given.plan(as_config(None))
    assert plan.num_samples == 100_000
    writer = BulkWriter.create(
        tmp_path / "out.zarr", plan.layouts, given.scan.num_atoms, given.scan.num_edges
    )
    work = build_graph(plan, given.reading, writer, window=5)
    assert len(pickle.dumps(work.graph)) < 2 * 10**6


@pytest.mark.slow
def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    """Case C33: one open file a running task."""
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(200):
        write_frames(folder / f"part-{i:04d}.xyz", 5, seed=i)
    most = 0

    class Watching:
        def start(self, title: str, total: int | None, unit: str) -> None:
            pass

        def advance(self, count: int = 1, note: str = "") -> None:
            nonlocal most
            most = max(most, len(os.listdir("/proc/self/fd")))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

    before = len(os.listdir("/proc/self/fd"))
    convert(str(folder / "*.xyz"), tmp_path / "out.zarr", progress=Watching(), threads=4, **OPTIONS)
    assert 0 < most < before + 50


MEASURE = """
import sys
from alchemi_xr.etl.conversion import convert
if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2], progress=False, threads=2,
            profile={"core": {"chunk_size": 4096}, "meta": {"chunk_size": 4096}},
            options={"partition_bytes": 500_000})
    # Not ru_maxrss: that remembers the peak of the process before exec.
    print(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    rng = np.random.default_rng(0)
    rows = "".join(
        "C " + "".join(f"{v:16.8f}" for v in row) + "\n" for row in rng.normal(size=(40, 6))
    )
    frame = f"40\nProperties=species:S:1:pos:R:3:forces:R:3 energy=-1.5\n{rows}"
    peaks = []
    for count in (6_000, 24_000):
        path = tmp_path / f"{count}.xyz"
        path.write_text(frame * count)
        out = subprocess.run(
            [sys.executable, str(script), str(path), str(tmp_path / f"{count}.zarr")],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(out.stdout))
        path.unlink()
    assert peaks[1] < 1.2 * peaks[0], peaks


def test_a_layout_that_does_not_hold_is_refused() -> None:
    """A source that gives another shape than it said is told apart from bad data."""
    from alchemi_xr.data.block import Block
    from alchemi_xr.plan.plan import Extent
    from alchemi_xr.plan.tasks import PartResult, PlanCore, ReadTask, load
    from alchemi_xr.store.bulk import FieldLayout

    ptr = np.array([0, 2], dtype=np.int64)
    block = Block(ptr, ptr * 0, {"positions": np.zeros((2, 3))}, {"positions": "atom"})
    core = PlanCore((FieldLayout("positions", "atom", "float64", (3,)),))
    bad = PlanCore((FieldLayout("positions", "atom", "float64", (2,)),))
    task = ReadTask(0, Extent(1, 2, 0, None), 0, 0)
    load(lambda payload: PartResult(block), core, task)
    with pytest.raises(FieldError, match="layout"):
        load(lambda payload: PartResult(block), bad, task)
    with pytest.raises(PlanError, match="scan counted"):
        load(lambda payload: PartResult(block), core, ReadTask(0, Extent(1, 3, 0, None), 0, 0))


def test_the_function_is_not_hidden_by_a_module() -> None:
    import alchemi_xr
    import alchemi_xr.cli.main
    from alchemi_xr import etl

    assert callable(etl.convert)
    assert alchemi_xr.convert is etl.convert is convert

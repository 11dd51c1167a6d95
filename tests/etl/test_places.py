"""Bulk jobs to places that are no folder: a real S3 server, and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr import etl
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ConfigError, PlanError, StoreExistsError, StoreNotFoundError
from alchemi_xr.plan.elsewhere import scratch_path
from alchemi_xr.ragged import open_dataset
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.locate import locate
from alchemi_xr.testing.reference import assert_same_samples, samples_of

SMALL = {"core": {"chunk_size": 16}, "meta": {"chunk_size": 16}, "custom": {"chunk_size": 16}}


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test, so that what is left in it is seen."""
    import tempfile

    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A store with a tenth of its samples deleted."""
    path, rng = tmp_path / "a.zarr", np.random.default_rng(4)
    ptr = counts_to_ptr(np.array([3, 0, 5, 1, 4, 4, 0, 2, 7, 1] * 6))
    v, n = int(ptr[-1]), len(ptr) - 1
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 9, v),
        "positions": rng.normal(size=(v, 3)),
        "energy": rng.normal(size=(n, 1)),
        "name": np.array([f"sample {i}" for i in range(n)], dtype=object),
    }
    levels: dict[str, Any] = {"atomic_numbers": "atom", "positions": "atom"}
    levels |= {"energy": "system", "name": "system"}
    writer = StoreWriter(path, SMALL)
    writer.write(Block(ptr, np.zeros_like(ptr), arrays, levels))
    writer.delete(np.arange(0, 60, 10))
    return path


COARSE = {group: {"chunk_size": 64} for group in SMALL}


def samples(store: Any, **more: Any) -> Any:
    with open_store(store, **more) as snapshot:
        return samples_of(snapshot.read_block(snapshot.active))


def left(scratch: Path) -> list[str]:
    return [str(p.relative_to(scratch)) for p in scratch.rglob("*") if p.is_file()]


def test_every_rewrite_reaches_a_bucket(s3: Any, local: Path, scratch: Path) -> None:
    options = {"storage_options": s3.options}
    want = samples(local)
    merged = s3.url()
    report = etl.merge([local, local], merged, config=COARSE, **options)
    assert (report.samples, report.destination) == (108, merged)
    assert report.output_bytes > 0
    assert_same_samples(samples(merged, **options), want + want)
    parts = {s3.url(): 0.5, s3.url(): 0.5}
    made = etl.split(local, parts, config=COARSE, **options)
    assert [r.samples for r in made.values()] == [27, 27]
    assert sum(len(samples(url, **options)) for url in parts) == 54
    # From the bucket to the bucket: what an object store cannot do in place.
    source = s3.obstore(merged.removeprefix("s3://bucket/"))
    for act in (etl.defragment, etl.sort, lambda s, **k: etl.rechunk(s, COARSE, **k)):
        target = s3.obstore(s3.prefix())
        act(source, destination=target)
        assert len(samples(target)) == 108
    with pytest.raises(StoreExistsError):
        etl.merge([local], merged, **options)
    with pytest.raises(ConfigError, match="overwrite"):
        etl.merge([local], merged, overwrite=True, **options)
    assert left(scratch) == []


def test_a_dataset_reaches_a_bucket_and_grows_there(s3: Any, local: Path, scratch: Path) -> None:
    place = s3.obstore(s3.prefix())
    ds = open_dataset(local, chunks=7)
    ds.ragged.to_zarr(place, config=SMALL)
    ds.ragged.head(5).ragged.to_zarr(place, mode="a", config=SMALL)
    want = samples(local)
    assert_same_samples(samples(place), want + want[:5])
    assert left(scratch) == []


@pytest.mark.slow
def test_workers_write_to_a_bucket(s3: Any, local: Path, scratch: Path) -> None:
    options = {"storage_options": s3.options}
    url = s3.url()
    etl.merge([local], url, config=SMALL, client=2, progress=False, **options)
    assert_same_samples(samples(url, **options), samples(local))


def test_what_other_processes_cannot_reach_is_refused(local: Path, scratch: Path) -> None:
    memory: dict[str, Any] = {}
    with pytest.raises(ConfigError, match="client="):
        etl.merge([local], memory, client=1, progress=False)
    etl.merge([local], memory)
    assert_same_samples(samples(memory), samples(local))


KILLED = """
import os, signal, sys
from alchemi_xr import etl
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.config import set_options
from alchemi_xr.plan import run
import json

given = json.loads(sys.argv[1])
count = 0
from alchemi_xr.plan.journal import Journal
done = Journal.shard_done

def shard_done(self, number):
    global count
    done(self, number)
    count += 1
    if count == given["after"]:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.shard_done = shard_done
set_options(progress="off", stream_bytes=65536)
etl.merge(given["sources"], given["url"], config=given["config"], threads=1,
          storage_options=given["options"])
"""


@pytest.mark.kill
def test_a_killed_job_is_taken_up_where_it_was(s3: Any, local: Path, scratch: Path) -> None:
    options, url = {"storage_options": s3.options}, s3.url()
    given = {
        "sources": [str(local)] * 3, "url": url, "config": SMALL, "options": s3.options, "after": 9
    }  # fmt: skip
    code = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(given)],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
    )
    assert code.returncode == -9, code.stderr.decode()[-2000:]
    with pytest.raises((StoreNotFoundError, ValueError), match=r"unfinished|no store"):
        open_store(url, **options)
    assert any(name.endswith("journal.jsonl") for name in left(scratch))
    from alchemi_xr.config import set_options

    with set_options(stream_bytes=65536):
        report = etl.merge([local] * 3, url, config=SMALL, threads=1, **options)
    assert report.resumed
    assert_same_samples(samples(url, **options), samples(local) * 3)
    assert left(scratch) == []


def test_an_error_leaves_nothing_there(s3: Any, local: Path, scratch: Path) -> None:
    place = s3.obstore(s3.prefix())
    with pytest.raises(PlanError, match="memory"):
        etl.merge([local], place, memory=1)
    ds = open_dataset(local, chunks=7)

    def broken(values: Any) -> Any:
        from alchemi_xr.errors import FieldError

        raise FieldError("energy", "is not there")

    ds["energy"] = ds.energy.copy(
        data=ds.energy.data.map_blocks(broken, dtype=float, meta=np.zeros(0))
    )
    with pytest.raises(Exception, match="is not there"):
        ds.ragged.to_zarr(place, config=SMALL)
    with pytest.raises(StoreNotFoundError):
        open_store(place)
    assert left(scratch) == []


def test_scratch_is_found_again() -> None:
    place = locate("memory://some/where.zarr")
    assert scratch_path(place) == scratch_path(place)
    assert scratch_path(place) != scratch_path(locate("memory://else/where.zarr"))

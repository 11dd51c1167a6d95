"""``ds.ragged.to_zarr``: what is written reads back the same, whatever it came from."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr import open_dataset
from alchemi_xr.config import set_options
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    LevelError,
    NotAStoreError,
    PlanError,
    StoreExistsError,
)
from alchemi_xr.ragged.array import StoreArray
from alchemi_xr.ragged.write import PendingWrite
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import verify
from alchemi_xr.testing.reference import assert_same_samples, samples_of
from alchemi_xr.testing.strategies import blocks

SMALL = {"core": {"chunk_size": 4}, "custom": {"chunk_size": 4}, "meta": {"chunk_size": 3}}


@pytest.fixture(autouse=True)
def _small_extents():
    """Many tasks from little data."""
    with set_options(stream_bytes=1 << 12):
        yield


def same(found: xr.Dataset, expected: xr.Dataset) -> None:
    """Equal variables, with values, levels and units (a store names no axis of a custom field)."""
    assert set(found.variables) == set(expected.variables)
    for name, var in expected.variables.items():
        got = found.variables[name]
        assert got.dims[:1] == var.dims[:1], name
        assert got.attrs.get("units") == var.attrs.get("units"), name
        assert got.dtype == var.dtype, name
        np.testing.assert_array_equal(got.values, var.values, err_msg=str(name))


def changed(ds: xr.Dataset) -> xr.Dataset:
    """Chosen, sorted, with new variables of every kind and level."""
    ds = ds.assign(
        fnorm=ds.ragged.reduce("forces", "norm") - ds.energy.mean(),
        doubled=(ds.forces * 2).assign_attrs(units="eV/nm"),
        in_memory=("sample", np.arange(ds.sizes["sample"]) * 1.5),
        per_edge=("edge", np.arange(ds.sizes["edge"]).astype(np.int16)),
        flag=ds.energy > 0,
    )
    return ds.ragged.where(ds.num_atoms > 0).ragged.sortby("energy", ascending=False)


@pytest.mark.parametrize("chunks", [None, {}, 2, "1KiB"])
def test_round_trip(holey_path, tmp_path, chunks) -> None:
    ds = open_dataset(holey_path, chunks=chunks)
    report = ds.ragged.to_zarr(tmp_path / "a.zarr", config=SMALL)
    assert (report.samples, report.atoms) == (7, ds.sizes["atom"])
    same(open_dataset(tmp_path / "a.zarr"), ds)
    assert verify(tmp_path / "a.zarr").ok
    new = changed(ds)
    new.ragged.to_zarr(tmp_path / "b.zarr", config=SMALL)
    same(open_dataset(tmp_path / "b.zarr"), new)
    with open_store(tmp_path / "b.zarr") as store:
        assert verify(tmp_path / "b.zarr").ok
        assert store.group("fnorm") == "custom"
        assert store.group("forces") == "core"
        assert store.group("name") == "text"
        assert store.tail("energy") == (1,)
        assert store.level("per_edge") == "edge"
        assert store.array("positions").chunks == (4, 3)
    # Through memory only.
    new.load().ragged.to_zarr(tmp_path / "c.zarr", config=SMALL)
    same(open_dataset(tmp_path / "c.zarr"), new)


def test_only_rows_asked_for_are_read(path, tmp_path, monkeypatch) -> None:
    """A chosen Dataset of a store is written block by block; no field is read whole."""
    ds = open_dataset(path)
    chosen = ds.ragged.where(ds.energy > 0)
    reads: list[tuple[str, int]] = []
    physical = StoreArray._physical

    def watched(self: StoreArray, rows: Any) -> Any:
        values = physical(self, rows)
        reads.append((self.name, len(values)))
        return values

    monkeypatch.setattr(StoreArray, "_physical", watched)
    with set_options(stream_bytes=1):
        # Blocks as small as can be: 4 KiB.
        pending = chosen.assign_coords().ragged.to_zarr(tmp_path / "a.zarr", compute=False)
        assert not [r for r in reads if r[0] == "positions"]
        pending.compute()
    rows = [n for name, n in reads if name == "positions"]
    assert sum(rows) == chosen.sizes["atom"]
    same(open_dataset(tmp_path / "a.zarr"), chosen)


def test_pending(path, tmp_path) -> None:
    pending = open_dataset(path).ragged.to_zarr(tmp_path / "a.zarr", compute=False)
    assert isinstance(pending, PendingWrite)
    assert "10 samples" in pending.describe(2)
    assert list(tmp_path.iterdir()) == []
    pending.compute()
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


def test_modes(own_path, tmp_path) -> None:
    own = Path(own_path)
    ds = open_dataset(own)
    want = samples_of(open_store(own).read_block(slice(None)))
    with pytest.raises(StoreExistsError):
        ds.ragged.to_zarr(own)
    with pytest.raises(ConfigError, match="mode"):
        ds.ragged.to_zarr(tmp_path / "x.zarr", mode="r+")
    # Over the store it reads, and still readable afterwards.
    ds.ragged.isel(slice(None, None, -1)).ragged.to_zarr(own, mode="w")
    assert_same_samples(samples_of(open_store(own).read_block(slice(None))), want[::-1])
    assert float(ds.energy[0]) == want[0]["energy"][0]
    ds.ragged.head(2).ragged.to_zarr(own, mode="a")
    assert_same_samples(samples_of(open_store(own).read_block([10, 11])), want[:2])
    ds.ragged.head(2).ragged.to_zarr(tmp_path / "fresh.zarr", mode="a")
    assert open_store(tmp_path / "fresh.zarr").num_samples == 2
    (tmp_path / "photos").mkdir()
    for mode in ("w-", "w", "a"):
        with pytest.raises(NotAStoreError):
            ds.ragged.to_zarr(tmp_path / "photos", mode=mode)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [".own.zarr.previous", "fresh.zarr", "own.zarr", "photos"]
    assert verify(own).ok


def test_append_is_refused_before_anything_is_written(own_path) -> None:
    ds = open_dataset(own_path)
    before = open_store(own_path).generation
    with pytest.raises(FieldError, match="'feature'"):
        ds.assign(feature=ds.feature[:, :2].rename({ds.feature.dims[1]: "two"})).ragged.to_zarr(
            own_path, mode="a"
        )
    with pytest.raises(LevelError, match="'feature'"):
        ds.drop_vars("feature").assign(feature=ds.energy).ragged.to_zarr(own_path, mode="a")
    with pytest.raises(FieldError, match="unit"):
        ds.assign(energy=ds.energy.assign_attrs(units="kcal/mol")).ragged.to_zarr(
            own_path, mode="a"
        )
    assert open_store(own_path).generation == before


def test_deleted_samples(holey_path, tmp_path) -> None:
    ds = open_dataset(holey_path, drop_deleted=False)
    ds.ragged.to_zarr(tmp_path / "a.zarr")
    same(open_dataset(tmp_path / "a.zarr", drop_deleted=False), ds)
    assert len(open_store(tmp_path / "a.zarr").active) == 7
    ds.ragged.to_zarr(tmp_path / "a.zarr", mode="a")
    assert open_store(tmp_path / "a.zarr").num_samples == 17


def test_what_a_store_has_no_place_for(path, tmp_path) -> None:
    ds = open_dataset(path)
    cases: list[tuple[xr.Dataset, type[Exception], str]] = [
        (ds.assign(table=("q", np.zeros(3))), FieldError, r"'table'[\s\S]*drop_vars\(\['table'\]"),
        (ds.assign_coords(xyz=["x", "y", "z"]), FieldError, r"drop_vars\(\['xyz'\]"),
        (ds.assign(when=("sample", np.zeros(10, "M8[s]"))), FieldError, "'when'"),
        (ds.assign(obj=("sample", np.array([{}] * 10, object))), FieldError, "'obj'"),
        (ds.assign(word=("atom", np.array(["C"] * 27))), LevelError, "'word'"),
        (ds.assign(energies=ds.energy), FieldError, "'energy'"),
        (ds.ragged.head(0), PlanError, "no sample"),
        (ds.isel(sample=slice(2)), FieldError, r"ds\.ragged\.isel"),
    ]
    for bad, error, match in cases:
        with pytest.raises(error, match=match):
            bad.ragged.to_zarr(tmp_path / "a.zarr")
        assert list(tmp_path.iterdir()) == []


def test_a_store_in_memory(path) -> None:
    ds = changed(open_dataset(path, chunks=3))
    memory: dict[str, Any] = {}
    ds.ragged.to_zarr(memory)
    same(open_dataset(memory), ds)
    with pytest.raises(StoreExistsError):
        ds.ragged.to_zarr(memory, mode="w")
    ds.ragged.to_zarr(memory, mode="a")
    assert open_store(memory).num_samples == 2 * ds.sizes["sample"]


def test_units_names_and_attributes_stay(path, tmp_path) -> None:
    ds = open_dataset(path).assign_attrs(comment="ours", run=7)
    ds = ds.assign(mine=ds.energy.assign_attrs(units="kcal/mol"))
    ds.ragged.to_zarr(tmp_path / "a.zarr")
    with open_store(tmp_path / "a.zarr") as store:
        assert store.unit("mine") == "kcal/mol"
        assert store.unit("forces") == "eV/Å"
        assert store.schema.provenance["attributes"] == {"comment": "ours", "run": 7}


@pytest.mark.slow
def test_a_cluster_writes_the_same(holey_path, tmp_path) -> None:
    """Fields of the store, Dask arrays and arrays in memory, on worker processes."""
    for number, chunks in enumerate((None, 2)):
        ds = changed(open_dataset(holey_path, chunks=chunks))
        dst = tmp_path / f"threads{number}.zarr"
        ds.ragged.to_zarr(dst, config=SMALL)
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        for number, chunks in enumerate((None, 2)):
            ds = changed(open_dataset(holey_path, chunks=chunks))
            dst = tmp_path / f"cluster{number}.zarr"
            ds.ragged.to_zarr(dst, config=SMALL, client=client)
    for number in (0, 1):
        trees = [
            {
                str(p.relative_to(root)): p.read_bytes()
                for p in sorted(root.rglob("*"))
                if p.is_file() and p.name != "zarr.json"
            }
            for root in (tmp_path / f"threads{number}.zarr", tmp_path / f"cluster{number}.zarr")
        ]
        assert trees[0] == trees[1]


KILLED_APPEND = """
import os, signal, sys
from alchemi_xr.config import set_options
from alchemi_xr.plan.job import Job
from alchemi_xr.ragged import open_dataset

Job.discard = lambda self: os.kill(os.getpid(), signal.SIGKILL)
set_options(progress="off", stream_bytes=1 << 12)
open_dataset(sys.argv[1]).ragged.to_zarr(sys.argv[2], mode="a")
"""


@pytest.mark.kill
def test_an_append_killed_after_its_commit_is_made_once(path, tmp_path) -> None:
    dst = tmp_path / "b.zarr"
    open_dataset(path).ragged.to_zarr(dst)
    once = open_store(dst).num_samples
    code = subprocess.run([sys.executable, "-c", KILLED_APPEND, str(path), str(dst)], check=False)
    assert code.returncode == -signal.SIGKILL
    assert open_store(dst).num_samples == 2 * once
    # The same call again only clears away; the one after it is meant.
    for samples in (2 * once, 3 * once):
        report = open_dataset(path).ragged.to_zarr(dst, mode="a")
        assert open_store(dst).num_samples == samples
        assert report.resumed == (samples == 2 * once)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.zarr"]


@settings(max_examples=8)
@given(block=blocks(max_samples=6, text=True), data=st.data())
def test_any_selection_of_any_block(tmp_path_factory, block, data) -> None:
    folder = tmp_path_factory.mktemp("any")
    StoreWriter(folder / "a.zarr").write(block)
    ds = open_dataset(folder / "a.zarr", chunks=data.draw(st.sampled_from([None, 1, 3])))
    order = data.draw(st.lists(st.integers(0, block.num_samples - 1), min_size=1, max_size=8))
    ds.ragged.isel(order).ragged.to_zarr(folder / "b.zarr", config=SMALL)
    with open_store(folder / "a.zarr") as one, open_store(folder / "b.zarr") as two:
        want = samples_of(one.read_block(order))
        assert_same_samples(samples_of(two.read_block(slice(None))), want)

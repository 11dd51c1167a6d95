"""defragment, rechunk, sort, merge and split agree with lists of samples in plain Python."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr import etl
from alchemi_xr.config import set_options
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    IndexRangeError,
    LevelError,
    NotAStoreError,
    PlanError,
    StoreExistsError,
    StoreLockedError,
    StoreNotFoundError,
    UnknownFieldError,
)
from alchemi_xr.etl.maintain import stable_order
from alchemi_xr.etl.parts import composition_hash
from alchemi_xr.plan.job import Job
from alchemi_xr.store import StoreWriter, fs, open_store
from alchemi_xr.store.verify import verify
from alchemi_xr.testing.reference import Sample, assert_same_samples, samples_of
from alchemi_xr.testing.strategies import blocks

SMALL = {"core": {"chunk_size": 16}, "custom": {"chunk_size": 16}, "meta": {"chunk_size": 16}}


def samples_at(path: Any) -> list[Sample]:
    """The samples of a store that are not deleted."""
    with open_store(path) as store:
        return samples_of(store.read_block(store.active))


def make_block(count: int, seed: int = 0, *, energy: bool = True) -> Block:
    """Samples of 1 to 9 atoms with edges, text, and a field with holes."""
    rng = np.random.default_rng(seed)
    atoms = rng.integers(1, 10, count)
    edges = rng.integers(0, 8, count)
    pairs = (rng.random((edges.sum(), 2)) * np.repeat(atoms, edges)[:, None]).astype(np.int64)
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 4, atoms.sum()),
        "positions": rng.normal(size=(atoms.sum(), 3)),
        "neighbor_list": pairs,
        "kind": np.array([f"kind {i}" for i in rng.integers(0, 5, count)], dtype=object),
        "number": np.arange(count),
    }
    levels: dict[str, Any] = dict.fromkeys(arrays, "system") | {
        "atomic_numbers": "atom",
        "positions": "atom",
        "neighbor_list": "edge",
    }
    present = {}
    if energy:
        arrays["energy"] = np.round(rng.normal(size=(count, 1)), 1)
        levels["energy"] = "system"
        present["energy"] = np.arange(count) % 7 > 0
    block = Block(counts_to_ptr(atoms), counts_to_ptr(edges), arrays, levels, present)
    block.fill_missing()
    return block.validate()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """120 samples in many chunks, some deleted."""
    path = tmp_path / "a.zarr"
    StoreWriter(path, SMALL).write(make_block(120))
    StoreWriter(path).delete([0, 5, 6, 7, 119])
    return path


@pytest.fixture(autouse=True)
def _small_extents() -> Iterator[None]:
    """Many tasks from little data."""
    with set_options(stream_bytes=1 << 15):
        yield


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# -- in place --------------------------------------------------------------------


def test_defragment(store: Path) -> None:
    want = samples_at(store)
    with open_store(store) as held:
        report = etl.defragment(store)
        assert (report.samples, report.removed, report.resumed) == (115, 5, False)
        assert_same_samples(samples_at(store), want)
        # The old generation is still there for its reader.
        assert held.num_samples == 120
        assert_same_samples(samples_of(held.read_block(held.active)), want)
    with open_store(store) as now:
        assert now.samples_mask.all()
        assert now.generation == 3
        assert [h["operation"] for h in now.schema.history] == ["write", "delete", "defragment"]
        assert now.array("positions").chunks == (16, 3)
    assert verify(store).ok
    names = sorted(p.name for p in store.parent.iterdir())
    assert names == [".a.zarr.previous", "a.zarr"]
    StoreWriter(store).append(make_block(3))
    assert len(samples_at(store)) == 118


def test_rechunk_keeps_what_is_deleted(store: Path) -> None:
    want = samples_at(store)
    report = etl.rechunk(store, {"core": {"chunk_size": 10, "shard_size": 30}, "profile": "raw"})
    assert report.deleted == 5
    with open_store(store) as now:
        array = now.array("positions")
        assert (array.chunks[0], array.shards[0]) == (10, 30)
        assert now.num_samples == 120
    assert_same_samples(samples_at(store), want)
    assert verify(store).ok
    StoreWriter(store).undelete([5])
    assert len(samples_at(store)) == 116


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("by", ["num_atoms", "kind", "energy", "callable"])
def test_sort(store: Path, by: str, ascending: bool) -> None:
    want = samples_at(store)

    def key(sample: Sample) -> Any:
        return {
            "num_atoms": len(sample["positions"]),
            "kind": str(sample["kind"]),
            "energy": sample["energy"][0] if "energy" in sample else None,
            "callable": sample["positions"][:, 0].max(),
        }[by]

    with_key = [s for s in want if key(s) is not None]
    # Python's sort is stable, with reverse=True too.
    want = sorted(with_key, key=key, reverse=not ascending)
    want += [s for s in samples_at(store) if key(s) is None]
    chosen: Any = by
    if by == "callable":
        chosen = lambda ds: ds.ragged.reduce("positions", "max")[:, 0]  # noqa: E731
    report = etl.sort(store, chosen, ascending=ascending)
    assert (report.samples, report.deleted) == (120, 5)
    assert_same_samples(samples_at(store), want)
    assert verify(store).ok


def test_orders_by_hand() -> None:
    values = np.array([3, 1, 3, 2], dtype=np.uint8)
    assert stable_order(values, None, ascending=True).tolist() == [1, 3, 0, 2]
    assert stable_order(values, None, ascending=False).tolist() == [0, 2, 3, 1]
    there = np.array([False, True, True, True])
    assert stable_order(values, there, ascending=False).tolist() == [2, 3, 1, 0]


def test_wrong_keys(store: Path) -> None:
    before = samples_at(store)
    with pytest.raises(UnknownFieldError, match="'energy'"):
        etl.sort(store, "enrgy")
    with pytest.raises(FieldError, match="reduce"):
        etl.sort(store, "positions")
    with pytest.raises(FieldError, match="one value a sample"):
        etl.sort(store, lambda ds: ds.positions[:, 0])
    assert_same_samples(samples_at(store), before)


def test_the_lease_is_held(store: Path) -> None:
    tried = []

    def key(ds: xr.Dataset) -> Any:
        with pytest.raises(StoreLockedError):
            StoreWriter(store).append(make_block(1))
        tried.append(1)
        return ds.num_atoms

    etl.sort(store, key)
    assert tried
    with StoreWriter(store).rewriting(), pytest.raises(StoreLockedError):
        etl.defragment(store)


def test_a_destination(store: Path, tmp_path: Path) -> None:
    want = samples_at(store)
    before = fs.journal_path(store).parent
    etl.defragment(store, destination=tmp_path / "b.zarr")
    assert_same_samples(samples_at(tmp_path / "b.zarr"), want)
    with pytest.raises(StoreExistsError):
        etl.sort(store, destination=tmp_path / "b.zarr")
    etl.sort(store, destination=tmp_path / "b.zarr", overwrite=True)
    memory: dict[str, Any] = {}
    etl.rechunk(store, "raw", destination=memory)
    assert_same_samples(samples_at(memory), want)
    with pytest.raises(StoreExistsError):
        etl.rechunk(store, "raw", destination=memory)
    etl.sort(memory, "number", ascending=False)
    assert_same_samples(samples_at(memory), want[::-1])
    assert open_store(store).num_samples == 120
    assert before.is_dir()


def test_a_failing_rewrite_leaves_the_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = samples_at(store)
    with pytest.raises(PlanError, match="memory"):
        etl.defragment(store, memory=1000)
    chunk = next(p for p in (store / "core" / "positions" / "c").rglob("*") if p.is_file())
    data = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(Exception, match="missing"):
        etl.defragment(store)
    chunk.write_bytes(data)
    assert_same_samples(samples_at(store), want)
    assert sorted(p.name for p in store.parent.iterdir()) == ["a.zarr"]
    monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    etl.defragment(store)
    assert_same_samples(samples_at(store), want)


def test_no_sample_left(store: Path) -> None:
    StoreWriter(store).delete(slice(None))
    with pytest.raises(PlanError, match="no sample"):
        etl.defragment(store)
    assert etl.undelete(store, lambda ds: ds.num_atoms > 0) == 120


# -- merge -----------------------------------------------------------------------


def test_merge_unites_fields(store: Path, tmp_path: Path) -> None:
    other = make_block(50, 1, energy=False)
    other.arrays["positions"] = other.arrays["positions"].astype(np.float32)
    other.arrays["number"] = other.arrays["number"].astype(np.uint8)
    other = other.with_field("tag", np.arange(50, dtype=np.float32), "system")
    StoreWriter(tmp_path / "b.zarr").write(other)
    report = etl.merge([store, tmp_path / "b.zarr", store], tmp_path / "m.zarr")
    assert (report.samples, report.removed) == (115 + 50 + 115, 10)
    with open_store(tmp_path / "m.zarr") as merged:
        assert merged.dtype("positions") == np.float64
        assert merged.dtype("number") == np.int64
        assert merged.dtype("tag") == np.float32
        tags = merged.present("tag")
        assert tags is not None
        assert tags.sum() == 50
        assert merged.schema.provenance["num_stores"] == 3
    found = samples_at(tmp_path / "m.zarr")
    assert_same_samples(found[:115], samples_at(store))
    assert_same_samples(found[165:], samples_at(store))
    for mine, theirs in zip(found[115:165], samples_at(tmp_path / "b.zarr"), strict=True):
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value)
    assert verify(tmp_path / "m.zarr").ok
    etl.merge([store], tmp_path / "few.zarr", fields=["energies", "positions"])
    assert open_store(tmp_path / "few.zarr").fields == ["positions", "energy"]


@pytest.mark.parametrize("client", [None, 2])
def test_merge_of_what_a_condition_keeps(store: Path, tmp_path: Path, client: int | None) -> None:
    StoreWriter(tmp_path / "b.zarr").write(make_block(50, 1, energy=False))
    report = etl.merge(
        [store, tmp_path / "b.zarr"],
        tmp_path / "m.zarr",
        fields=["positions", "number"],
        where="energy < 0 or natoms == 1",
        client=client,
    )
    with open_store(store) as snapshot:
        block, there = snapshot.read_block(snapshot.active), snapshot.present("energy")
        assert there is not None
        known = there[snapshot.active]
    single = np.diff(block.atoms_ptr) == 1
    first = (known & (block["energy"][:, 0] < 0)) | single
    other = make_block(50, 1, energy=False)
    second = np.diff(other.atoms_ptr) == 1
    with open_store(tmp_path / "m.zarr") as merged:
        assert merged.fields == ["positions", "number"]
        found = merged.read_block(slice(None))
        expected = [*block["number"][first], *other["number"][second]]
        np.testing.assert_array_equal(found["number"], expected)
        told = merged.schema.provenance
    # Without an energy, a sample of more than one atom may or may not meet it.
    undecided = int((~known & ~single).sum()) + int((~second).sum())
    assert report.undecided == undecided > 0
    assert report.removed == 120 + 50 - len(expected)
    assert (told["where"], told["undecided"]) == ("energy < 0 or natoms == 1", undecided)
    assert f"({undecided} undecided" in report.summary()


def test_conditions_that_a_merge_refuses(store: Path, tmp_path: Path) -> None:
    for where, error, match in (
        ("nrg < 0", UnknownFieldError, "nrg"),
        ("positions < 0", ConfigError, "not one value a sample"),
        ("natoms > 1000", ConfigError, "no sample of the stores meets it"),
        ("natoms >", ConfigError, "cannot be read"),
    ):
        with pytest.raises(error, match=match):
            etl.merge([store, store], tmp_path / "m.zarr", where=where)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr"]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (("x", np.zeros((4, 2)), "system", ""), FieldError, "another shape"),
        (("x", np.zeros(8), "atom", ""), LevelError, "another level"),
        (("x", np.array(list("abcd"), object), "system", ""), FieldError, "text"),
        (("x", np.arange(4, dtype=np.uint64), "system", ""), FieldError, "no dtype holds"),
        (("x", np.zeros(4), "system", ""), FieldError, "no dtype holds"),
        (("x", np.zeros(4, np.int64), "system", "m"), FieldError, "another unit"),
    ],
)
def test_what_cannot_be_one_field(
    tmp_path: Path, change: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    ptr = np.arange(5) * 2
    base = Block(ptr, ptr * 0, {"positions": np.zeros((8, 3))}, {"positions": "atom"})
    one = base.with_field("x", np.zeros(4, np.int64), "system")
    one.units["x"] = "s"
    name, values, level, unit = change
    two = base.with_field(name, values, level)
    if unit:
        two.units[name] = unit
    StoreWriter(tmp_path / "one.zarr").write(one)
    StoreWriter(tmp_path / "two.zarr").write(two)
    with pytest.raises(error, match=match) as caught:
        etl.merge([tmp_path / "one.zarr", tmp_path / "two.zarr"], tmp_path / "m.zarr")
    assert "'x'" in str(caught.value)
    assert "one.zarr" in str(caught.value)
    assert "two.zarr" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.zarr", "two.zarr"]
    etl.merge(
        [tmp_path / "one.zarr", tmp_path / "two.zarr"], tmp_path / "m.zarr", fields=["positions"]
    )


def test_merge_refuses(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="list"):
        etl.merge(str(store), tmp_path / "m.zarr")
    with pytest.raises(ConfigError, match="no store"):
        etl.merge([], tmp_path / "m.zarr")
    with pytest.raises(StoreNotFoundError):
        etl.merge([store, tmp_path / "nowhere.zarr"], tmp_path / "m.zarr")
    with pytest.raises(StoreExistsError):
        etl.merge([store], store)
    with pytest.raises(UnknownFieldError, match="positions"):
        etl.merge([store], tmp_path / "m.zarr", fields=["position"])
    (tmp_path / "photos").mkdir()
    with pytest.raises(NotAStoreError):
        etl.merge([store], tmp_path / "photos", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr", "photos"]


def test_an_int32_list_of_edges_grows(store: Path, tmp_path: Path) -> None:
    """Numbers on disk count the atoms of the whole store; int8 stands in for int32 here."""
    from alchemi_xr.etl.gather import Counted
    from alchemi_xr.etl.union import unify
    from alchemi_xr.store.schema import FieldInfo

    info = FieldInfo("neighbor_list", "edge", np.dtype(np.int32), (2,))
    order = np.zeros(1, np.int64)
    parts = [
        Counted("a", b"", {info.name: info}, frozenset(), order, np.array([2**30]), order)
        for _ in range(2)
    ]
    assert unify(parts[:1])[0].dtype == "int32"
    assert unify([*parts, parts[0]])[0].dtype == "int64"


# -- split -------------------------------------------------------------------------


def test_split_by_fractions(store: Path, tmp_path: Path) -> None:
    want = samples_at(store)
    parts = {tmp_path / "train.zarr": 0.7, tmp_path / "val.zarr": 0.2, tmp_path / "test.zarr": 0.1}
    reports = etl.split(store, parts, seed=3)
    assert [r.samples for r in reports.values()] == [81, 23, 11]
    numbers = [[int(s["number"]) for s in samples_at(path)] for path in parts]
    assert all(found == sorted(found) for found in numbers)
    assert sorted(itertools.chain(*numbers)) == [int(s["number"]) for s in want]
    by_number = {int(s["number"]): s for s in want}
    for path, found in zip(parts, numbers, strict=True):
        assert_same_samples(samples_at(path), [by_number[i] for i in found])
        assert verify(path).ok
    again = {tmp_path / "t2.zarr": 0.7, tmp_path / "v2.zarr": 0.3}
    etl.split(store, again, seed=3)
    assert [int(s["number"]) for s in samples_at(tmp_path / "t2.zarr")] == numbers[0]
    etl.split(store, again, seed=4, overwrite=True)
    assert [int(s["number"]) for s in samples_at(tmp_path / "t2.zarr")] != numbers[0]
    with pytest.raises(StoreExistsError):
        etl.split(store, again, seed=4)


def test_split_keeps_groups_together(store: Path, tmp_path: Path) -> None:
    parts = {tmp_path / "x.zarr": 0.5, tmp_path / "y.zarr": 0.5}
    etl.split(store, parts, by="kind")
    one, two = ({str(s["kind"]) for s in samples_at(p)} for p in parts)
    assert one
    assert two
    assert not one & two
    found = etl.split(store, tmp_path / "k-{}.zarr", by="kind")
    assert sorted(Path(p).name for p in found) == [f"k-kind_{i}.zarr" for i in range(5)]
    assert sum(r.samples for r in found.values()) == 115
    for path in found:
        assert len({str(s["kind"]) for s in samples_at(path)}) == 1


def test_split_by_composition_does_not_move_what_was_there(store: Path, tmp_path: Path) -> None:
    def parts(word: str) -> dict[Path, float]:
        return {tmp_path / f"{word}-{i}.zarr": share for i, share in enumerate((0.6, 0.4))}

    def formulas(path: Path) -> set[tuple[int, ...]]:
        return {tuple(sorted(s["atomic_numbers"].tolist())) for s in samples_at(path)}

    etl.split(store, parts("before"), by="composition", seed=1)
    one, two = map(formulas, parts("before"))
    assert not one & two
    StoreWriter(store).append(make_block(200, 9))
    etl.split(store, parts("after"), by="composition", seed=1)
    grown_one, grown_two = map(formulas, parts("after"))
    assert one < grown_one
    assert two < grown_two
    assert not grown_one & grown_two
    share = len(samples_at(tmp_path / "after-0.zarr")) / 315
    assert 0.5 < share < 0.7


def test_composition_hash_is_one_of_contents(tmp_path: Path) -> None:
    numbers = np.array([8, 1, 1, 1, 1, 8, 1, 8, 6])
    ptr = counts_to_ptr(np.array([3, 3, 0, 2, 1]))
    block = Block(ptr, ptr * 0, {"atomic_numbers": numbers}, {"atomic_numbers": "atom"})
    StoreWriter(tmp_path / "a.zarr").write(block)
    with open_store(tmp_path / "a.zarr") as snapshot:
        one = composition_hash(snapshot, snapshot.active, 0)
        assert one[0] == one[1]
        assert len(set(one.tolist())) == 4
        assert (composition_hash(snapshot, snapshot.active, 1) != one).all()


def test_split_refuses(store: Path, tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ({"x": 0.5, "y": 0.4}, None, ConfigError, "add up to 1"),
        ({"x": 1.5, "y": -0.5}, None, ConfigError, "more than 0"),
        ({}, None, ConfigError, "path of its own"),
        ({"x": 0.5, "./x": 0.5}, None, ConfigError, "path of its own"),
        ({"x": 0.999, "y": 0.001}, None, ConfigError, "no sample would go"),
        ("part.zarr", "kind", ConfigError, "{}"),
        ("{}.zarr", None, ConfigError, "{}"),
        ({"x": 0.5, "y": 0.5}, "energy", FieldError, "no value"),
        ({"x": 0.5, "y": 0.5}, "knd", UnknownFieldError, "kind"),
    ]
    for parts, by, error, match in cases:
        if isinstance(parts, dict):
            parts = {f"{tmp_path}/{name}": share for name, share in parts.items()}
        with pytest.raises(error, match=match):
            etl.split(store, parts, by=by)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr"]


# -- delete ------------------------------------------------------------------------


def test_delete_by_condition(store: Path) -> None:
    from alchemi_xr import open_dataset

    want = [s for s in samples_at(store) if len(s["positions"]) < 7]
    assert etl.delete(store, lambda ds: ds.num_atoms >= 7) == 115 - len(want)
    assert_same_samples(samples_at(store), want)
    ds = open_dataset(store)
    mask = ds.ragged.reduce("positions", "norm") > 4.0
    assert etl.delete(store, mask) == int(mask.sum())
    want = [s for s in want if np.sqrt((s["positions"] ** 2).sum()) <= 4.0]
    assert_same_samples(samples_at(store), want)
    with pytest.raises(IndexRangeError, match="another length"):
        etl.delete(store, mask)
    assert etl.delete(store, mask.values[:0].tolist()) == 0
    assert etl.undelete(store, lambda ds: ~ds.samples_mask) == 120 - len(want)
    assert etl.delete(store, [3, -1]) == 2
    assert etl.delete(store, [3]) == 0


def test_conditions_that_are_none(store: Path) -> None:
    with pytest.raises(FieldError, match="reduce"):
        etl.delete(store, lambda ds: ds.positions[:, 0] > 0)
    with pytest.raises(FieldError, match="no mask"):
        etl.delete(store, lambda ds: ds.number)
    with pytest.raises(IndexRangeError):
        etl.delete(store, [500])
    assert len(samples_at(store)) == 115


# -- against plain Python ----------------------------------------------------------


@settings(max_examples=10)
@given(st.data())
def test_property(data: st.DataObject) -> None:
    """Any chain of operations over any samples, beside the same on a list."""
    with _folder() as folder:
        path = folder / "a.zarr"
        StoreWriter(path, {"core": {"chunk_size": 5}, "meta": {"chunk_size": 3}}).write(
            data.draw(blocks(max_samples=8, text=True))
        )
        model = samples_at(path)
        for _ in range(data.draw(st.integers(1, 3))):
            act = data.draw(st.sampled_from(["delete", "defragment", "sort", "rechunk", "merge"]))
            if act == "delete" and len(model) > 1:
                keep = data.draw(st.lists(st.booleans(), min_size=len(model), max_size=len(model)))
                keep[data.draw(st.integers(0, len(model) - 1))] = True
                etl.delete(path, ~np.array(keep))
                model = [s for s, k in zip(model, keep, strict=True) if k]
            elif act == "defragment":
                etl.defragment(path)
            elif act == "sort":
                up = data.draw(st.booleans())
                etl.sort(path, ascending=up)
                model = sorted(model, key=lambda s: len(s["positions"]), reverse=not up)
            elif act == "rechunk":
                etl.rechunk(path, {"core": {"chunk_size": data.draw(st.integers(1, 20))}})
            elif act == "merge":
                times = data.draw(st.integers(1, 3))
                etl.merge([path] * times, folder / "m.zarr", overwrite=True)
                assert_same_samples(samples_at(folder / "m.zarr"), model * times)
            assert_same_samples(samples_at(path), model)
        assert verify(path).ok
        share = data.draw(st.sampled_from([0.5, 0.3]))
        if len(model) * share >= 1:
            parts = {folder / "x.zarr": share, folder / "y.zarr": 1 - share}
            etl.split(path, parts, seed=data.draw(st.integers(0, 9)))
            found = [samples_at(p) for p in parts]
            assert abs(len(found[0]) - share * len(model)) < 1 + 1e-9
            # Disjoint, complete, in order: a merge by identity gives the list again.
            text = [sorted(map(_words, side)) for side in (itertools.chain(*found), model)]
            assert text[0] == text[1]


def _words(sample: Sample) -> str:
    return json.dumps({k: [str(v.dtype), v.tolist()] for k, v in sample.items()}, default=str)


@settings(max_examples=10)
@given(first=blocks(max_samples=4), second=blocks(max_samples=4))
def test_merge_of_any_two(first: Block, second: Block) -> None:
    with _folder() as folder:
        for name, block in (("a", first), ("b", second)):
            StoreWriter(folder / name).write(block)
        sides = [samples_at(folder / "a"), samples_at(folder / "b")]
        try:
            etl.merge([folder / "a", folder / "b"], folder / "m")
        except FieldError as error:
            if "no dtype holds" not in str(error):
                raise
            return
        found = samples_at(folder / "m")
        assert verify(folder / "m").ok
    assert len(found) == len(sides[0]) + len(sides[1])
    for mine, theirs in zip(found, [*sides[0], *sides[1]], strict=True):
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value)
            assert np.can_cast(value.dtype, mine[name].dtype, "safe")


# -- stopped and taken up ----------------------------------------------------------


class Stop(BaseException):
    """Stands for Ctrl-C."""


class Stopping:
    """A progress display that stops the job after so many parts."""

    def __init__(self, after: int) -> None:
        self.left = after

    def start(self, title: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, count: int = 1, note: str = "") -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def tree(path: Path) -> dict[str, bytes]:
    """All files below a folder with their bytes."""
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def test_stopped_jobs_resume_to_the_same_bytes(store: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin" / "a.zarr"
    shutil.copytree(store, twin)
    etl.sort(twin, "energy")
    with pytest.raises(Stop):
        etl.sort(store, "energy", progress=Stopping(1), threads=1)
    assert open_store(store).generation == 2
    report = etl.sort(store, "energy")
    assert report.resumed
    assert tree(store) == tree(twin)
    parts = {tmp_path / "x.zarr": 0.5, tmp_path / "y.zarr": 0.5}
    with pytest.raises(Stop):
        etl.split(store, parts, progress=Stopping(3), threads=1)
    assert not any(path.exists() for path in parts)
    reports = etl.split(store, parts)
    assert any(r.resumed for r in reports.values())
    # Stopped between the two: the other one is put in place, the first is left alone.
    kept = tree(tmp_path / "x.zarr")
    shutil.rmtree(tmp_path / "y.zarr")
    etl.split(store, parts)
    assert tree(tmp_path / "x.zarr") == kept
    assert len(samples_at(tmp_path / "x.zarr")) + len(samples_at(tmp_path / "y.zarr")) == 115


def test_a_store_that_changed_meanwhile_is_not_taken_up(store: Path) -> None:
    with pytest.raises(Stop):
        etl.defragment(store, progress=Stopping(1), threads=1)
    StoreWriter(store).append(make_block(4, 5))
    want = samples_at(store)
    assert not etl.defragment(store).resumed
    assert_same_samples(samples_at(store), want)


def test_finished_but_not_in_place(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = samples_at(store)

    def stop(*a: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(fs, "swap", stop)
        with pytest.raises(Stop):
            etl.defragment(store)
    assert fs.looks_like_store(Job(store, "rewriting").store)
    assert etl.defragment(store).resumed
    assert_same_samples(samples_at(store), want)


def test_sizes_of_parts() -> None:
    from alchemi_xr.etl.parts import _sizes

    for total in (1, 10, 97):
        for shares in ([0.5, 0.5], [0.8, 0.1, 0.1], [1 / 3] * 3):
            sizes = _sizes(np.array(shares), total)
            assert sizes.sum() == total
            assert all(abs(n - s * total) < 1 for n, s in zip(sizes, shares, strict=True))
            assert math.isclose(sum(shares), 1)


def test_scattered_orders_go_through_sorted_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, holes and edges come through, with the bytes of gathering; a stop is taken up."""
    from alchemi_xr.etl import rebuild
    from alchemi_xr.etl.spool import Runs

    block = make_block(900, 3)
    block.arrays["kind"][7] = "é ✓"
    order = np.random.default_rng(1).permutation(900)
    block.arrays["number"] = order
    path = tmp_path / "a.zarr"
    StoreWriter(path, {"core": {"chunk_size": 256}, "meta": {"chunk_size": 64}}).write(block)
    StoreWriter(path).delete([4, 5])
    calls: list[int] = []
    write = Runs.write
    monkeypatch.setattr(Runs, "write", lambda self, k: (calls.append(k), write(self, k))[1])
    with pytest.raises(Stop):
        etl.sort(path, "number", destination=tmp_path / "b.zarr", progress=Stopping(4), threads=1)
    done = len(calls)
    etl.sort(path, "number", destination=tmp_path / "b.zarr")
    assert 1 < done < len(calls) <= len(set(calls)) + 1
    want = sorted(samples_at(path), key=lambda s: int(s["number"]))
    assert_same_samples(samples_at(tmp_path / "b.zarr"), want)
    monkeypatch.setattr(rebuild, "is_scattered", lambda *a: False)
    etl.sort(path, "number", destination=tmp_path / "c.zarr")
    assert tree(tmp_path / "c.zarr") == tree(tmp_path / "b.zarr")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr", "b.zarr", "c.zarr"]

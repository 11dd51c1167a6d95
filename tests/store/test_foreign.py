"""Stores that nvalchemi-toolkit wrote, or wrote to after us."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import zarr

from alchemi_xr.errors import CorruptStoreError
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.edges import find_bases
from alchemi_xr.store.verify import repair, verify

STORES = ["ragged", "appended", "soft_deleted", "sharded"]


def folder(shared):
    return shared / "fixtures" / "toolkit_stores"


@pytest.mark.compat
@pytest.mark.parametrize("name", STORES)
def test_every_fixture_gives_the_values_that_went_in(shared, name):
    wanted = json.loads((folder(shared) / "expected.json").read_text())["stores"][name]["samples"]
    snapshot = open_store(folder(shared) / f"{name}.zarr")
    assert snapshot.is_foreign
    assert len(snapshot.active) == len(wanted)
    for position, fields in zip(snapshot.active.tolist(), wanted, strict=True):
        block = snapshot.read_block(position)
        assert set(block.names) == set(fields)
        for field, facts in fields.items():
            values = block[field]
            assert list(values.shape) == facts["shape"]
            assert str(values.dtype) == facts["dtype"]
            assert float(values.sum()) == pytest.approx(facts["sum"], abs=1e-5)
            if len(values):
                np.testing.assert_allclose(np.ravel(values[0]), facts["first_row"], rtol=1e-6)
    assert verify(folder(shared) / f"{name}.zarr").clean


@pytest.mark.compat
@pytest.mark.parametrize("name", STORES)
def test_our_writer_goes_on_with_a_fixture(shared, same, tmp_path, name):
    path = tmp_path / "a.zarr"
    shutil.copytree(folder(shared) / f"{name}.zarr", path)
    snapshot = open_store(path)
    before = snapshot.read_block(snapshot.active)
    num = before.num_samples
    writer = StoreWriter(path)
    writer.append(before)
    writer.delete([0])
    writer.undelete([0])
    snapshot = open_store(path)
    assert not snapshot.is_foreign
    assert snapshot.schema.foreign_samples == 5
    both = snapshot.read_block(snapshot.active)
    same(both.take(np.arange(num)), before)
    same(both.take(np.arange(num, 2 * num)), before)
    # As the toolkit's own reader has it: global numbers, less the pointer.
    raw = zarr.open_group(path, mode="r")
    edges, atoms = raw["meta/edges_ptr"][:], raw["meta/atoms_ptr"][:]
    assert raw["core/neighbor_list"][edges[5] :].min() >= atoms[5]
    writer.defragment()
    snapshot = open_store(path)
    assert snapshot.schema.foreign_samples == 0
    same(snapshot.read_block(slice(None)), both)
    assert verify(path).clean


@pytest.mark.compat
def test_repair_writes_wrong_bases_anew(shared, same, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(folder(shared) / "appended.zarr", path)
    block = open_store(path).read_block(slice(None))
    assert "2 samples have a wrong base" in str(verify(path))
    assert repair(path).clean
    assert open_store(path).schema.foreign_samples == 0
    same(open_store(path).read_block(slice(None)), block)
    raw = zarr.open_group(path, mode="r")
    assert raw["core/neighbor_list"][12:14].tolist() == [[8, 9], [9, 8]]


@pytest.mark.compat
def test_the_torn_fixture_is_reported_and_what_can_be_is_saved(shared, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(folder(shared) / "torn_v020.zarr", path)
    for act in (open_store, lambda p: StoreWriter(p).delete([0]), repair):
        with pytest.raises(CorruptStoreError, match=r"'forces' has fewer rows.*13 rows.*15 rows"):
            act(path)
    assert "forces" in verify(path).problems[0]
    assert repair(path, drop=["forces"]).clean
    snapshot = open_store(path)
    assert "forces" not in snapshot
    assert snapshot.num_samples == 5
    assert snapshot.read_block(slice(None))["energy"].shape == (5, 1)


def as_the_toolkit_appends(path, samples=1, atoms=3, *, leave_out=(), last=True):
    """Grow core arrays, pointers, masks and the count, and nothing that is ours."""
    group = zarr.open_group(path, mode="r+")
    root = dict(group.attrs)
    levels = root["fields"]["core"]
    grow = {"atom": atoms * samples, "edge": 0, "system": samples}

    def extend(array, values):
        start = array.shape[0]
        array.resize((start + len(values), *array.shape[1:]))
        array[start:] = values

    ptr = group["meta/atoms_ptr"]
    extend(ptr, ptr[-1] + atoms * np.arange(1, samples + 1))
    edges = group["meta/edges_ptr"]
    extend(edges, np.full(samples, edges[-1]))
    for name, level in levels.items():
        if name not in leave_out and grow[level]:
            array = group[f"core/{name}"]
            extend(array, np.full((grow[level], *array.shape[1:]), 7, array.dtype))
    extend(group["meta/atoms_mask"], np.ones(grow["atom"], bool))
    extend(group["meta/samples_mask"], np.ones(samples, bool))
    if last:
        group.attrs["num_samples"] = root["num_samples"] + samples


def ours(make, path):
    writer = StoreWriter(path, {"core": {"chunk_size": 4}, "meta": {"chunk_size": 5}})
    writer.write(make(0, 4, text=True, holes=("forces",)))
    writer.add_custom("tag", np.arange(1, 5), "system", unit="eV")
    return open_store(path).read_block(slice(None))


def test_another_tools_append_to_our_store_is_noticed(make, same, tmp_path):
    path = tmp_path / "a.zarr"
    before = ours(make, path)
    as_the_toolkit_appends(path, 2)
    snapshot = open_store(path)
    assert snapshot.is_foreign
    assert snapshot.num_samples == 6
    same(snapshot.read_block(slice(0, 4)), before)
    later = snapshot.read_block([4, 5])
    assert later["energy"].tolist() == [[7.0], [7.0]]
    assert later.has("forces").all()
    assert later.has("tag").tolist() == [False, False]
    assert later["tag"].tolist() == [0, 0]
    assert later.has("name").tolist() == [False, False]
    assert later["name"].tolist() == ["", ""]
    assert snapshot.unit("tag") == "eV"
    assert verify(path).clean
    StoreWriter(path).append(make(1, 1))
    snapshot = open_store(path)
    assert not snapshot.is_foreign
    assert snapshot.generation == 3
    same(snapshot.read_block(slice(0, 4)), before)
    same(snapshot.read_block([4, 5]), later)
    assert snapshot.present("tag").tolist() == [True] * 4 + [False] * 3
    assert verify(path).clean


def test_another_tools_torn_append_is_named_and_cut_back(make, same, tmp_path):
    path = tmp_path / "a.zarr"
    before = ours(make, path)
    # The count did not change, so it is our commit that holds.
    as_the_toolkit_appends(path, leave_out=("energy",), last=False)
    same(open_store(path).read_block(slice(None)), before)
    assert verify(path).ok
    assert not verify(path).clean
    assert repair(path).clean
    same(open_store(path).read_block(slice(None)), before)
    as_the_toolkit_appends(path, leave_out=("energy",))
    with pytest.raises(CorruptStoreError, match="'energy' has fewer rows"):
        open_store(path)


def test_a_foreign_store_torn_in_an_append_is_cut_back(make, same, tmp_path):
    path = tmp_path / "a.zarr"
    block = make(0, 4)
    StoreWriter(path).write(block)
    document = json.loads((path / "zarr.json").read_text())
    del document["attributes"]["alchemi_xr"]
    (path / "zarr.json").write_text(json.dumps(document))
    same(open_store(path).read_block(slice(None)), block)
    group = zarr.open_group(path, mode="r+")
    group["meta/atoms_ptr"].resize((6,))
    group["meta/atoms_ptr"][5] = block.num_atoms + 3
    with pytest.raises(CorruptStoreError, match="disagree on the number of samples"):
        open_store(path)
    assert repair(path).clean
    same(open_store(path).read_block(slice(None)), block)


def test_another_tools_deletion_is_honoured(make, tmp_path):
    path = tmp_path / "a.zarr"
    ours(make, path)
    zarr.open_group(path, mode="r+")["meta/samples_mask"][1] = False
    assert open_store(path).active.tolist() == [0, 2, 3]


def test_another_tools_custom_field_is_seen(make, tmp_path):
    path = tmp_path / "a.zarr"
    ours(make, path)
    group = zarr.open_group(path, mode="r+")
    group.create_array("custom/theirs", data=np.arange(8.0).reshape(4, 2))
    fields = dict(group.attrs["fields"])
    fields["custom"]["theirs"] = "system"
    group.attrs["fields"] = fields
    assert open_store(path).read_rows("theirs", 1, 2).tolist() == [[2.0, 3.0]]
    StoreWriter(path).append(make(1, 1))
    snapshot = open_store(path)
    assert snapshot.present("theirs").tolist() == [True] * 4 + [False]
    # Nor is an array that nobody declares taken for a leftover of ours.
    group.create_array("custom/undeclared", data=np.arange(4.0))
    StoreWriter(path).append(make(1, 1))
    assert (path / "custom" / "undeclared").is_dir()


def test_consolidated_metadata_of_others_is_not_believed(make, tmp_path):
    path = tmp_path / "a.zarr"
    ours(make, path)
    with pytest.warns(UserWarning, match="[Cc]onsolidated"):
        zarr.consolidate_metadata(path)
    StoreWriter(path).append(make(1, 2))
    assert open_store(path).num_samples == 6
    assert "consolidated_metadata" not in (path / "zarr.json").read_text()


# -- edge bases --------------------------------------------------------------


def bases(atoms, edges, values, *, active=None):
    atoms_ptr = np.concatenate(([0], np.cumsum(atoms))).astype(np.int64)
    edges_ptr = np.concatenate(([0], np.cumsum(edges))).astype(np.int64)
    values = np.array(values, dtype=np.int64).reshape(-1, 2)
    mask = np.ones(len(atoms), bool) if active is None else np.array(active)
    return find_bases(
        atoms_ptr, edges_ptr, mask, lambda a, b: values[a:b], foreign_samples=len(atoms)
    )


def test_right_edges_are_left_alone_even_when_sparse():
    found = bases([3, 5, 2], [1, 1, 1], [[0, 1], [4, 5], [8, 9]])
    assert found.bases.tolist() == [0, 3, 8]
    assert found.unknown.tolist() == []


def test_edges_that_span_their_sample_prove_their_base():
    # Moved by a defragmentation: the base is that of no sample.
    found = bases([3, 2], [2, 1], [[0, 1], [1, 2], [107, 108]])
    assert found.bases.tolist() == [0, 107]
    assert found.unknown.tolist() == []


def test_the_base_of_an_append_is_found_when_only_one_fits():
    # Sample 2 has 4 atoms, of which the edges name two; 0 and 2 are possible bases.
    found = bases([6, 2, 4], [1, 1, 1], [[0, 5], [6, 7], [0, 1]])
    assert found.bases.tolist() == [0, 6, 0]
    assert found.unknown.tolist() == []


def test_what_is_not_proven_is_reported():
    # Bases 0 and 1 both put these edges into the sample's five atoms.
    found = bases([6, 1, 5], [1, 0, 1], [[0, 5], [2, 3]])
    assert found.unknown.tolist() == [2]
    # No base at all.
    found = bases([3, 3], [1, 1], [[0, 1], [0, 7]])
    assert found.unknown.tolist() == [1]


def test_after_a_wrong_sample_one_that_fits_both_ways_is_not_trusted():
    found = bases([1, 2, 6], [0, 1, 1], [[0, 1], [4, 5]])
    assert found.bases[1] == 0
    assert found.unknown.tolist() == [2]


def test_deleted_samples_and_samples_without_atoms_are_passed_over():
    found = bases([2, 0, 3], [1, 0, 2], [[0, 1], [0, 0], [0, 0]], active=[True, True, False])
    assert found.unknown.tolist() == []
    assert found.bases.tolist() == [0, 2, 2]
    assert bases([], [], []).bases.tolist() == []


def test_reading_an_unproven_sample_is_refused_and_the_others_read(make, tmp_path):
    path = tmp_path / "a.zarr"
    fields = {"positions": "f8", "atomic_numbers": "i8", "neighbor_list": "i8"}
    block = make(0, 12, fields=fields)
    StoreWriter(path).write(block)
    document = json.loads((path / "zarr.json").read_text())
    del document["attributes"]["alchemi_xr"]
    (path / "zarr.json").write_text(json.dumps(document))
    with_edges = np.flatnonzero(np.diff(block.edges_ptr))
    bad = int(with_edges[-1])
    row = int(block.edges_ptr[bad])
    zarr.open_group(path, mode="r+")["core/neighbor_list"][row] = [900, 990]
    snapshot = open_store(path)
    snapshot.read_block([int(with_edges[0])])
    snapshot.read_block(bad, ["positions"])
    with pytest.raises(CorruptStoreError, match=f"edges of sample {bad}"):
        snapshot.read_block(bad)
    assert "no provable base" in str(verify(path))

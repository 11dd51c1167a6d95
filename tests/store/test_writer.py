"""Append, custom fields, deletion, rewriting: what is kept, filled, refused."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    IndexRangeError,
    LevelError,
    NotAStoreError,
    StaleSnapshotError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnknownFieldError,
)
from alchemi_xr.store import StoreWriter, fs, open_store
from alchemi_xr.store.verify import verify

SMALL = {"core": {"chunk_size": 4}, "custom": {"chunk_size": 3}, "meta": {"chunk_size": 5}}
PLAIN = {"positions": "f8", "atomic_numbers": "i8", "energy": "f8", "forces": "f8"}


def tree(path):
    return {p.relative_to(path): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# -- write -------------------------------------------------------------------


def test_write_refuses_what_is_there_even_an_empty_folder(make, tmp_path):
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(StoreExistsError, match="already exists"):
        StoreWriter(tmp_path / "a.zarr").write(make(0))
    StoreWriter(tmp_path / "b.zarr").write(make(0))
    before = tree(tmp_path / "b.zarr")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        StoreWriter(tmp_path / "b.zarr").write(make(1))
    assert tree(tmp_path / "b.zarr") == before
    store = {}
    StoreWriter(store).write(make(0))
    with pytest.raises(StoreExistsError, match="already exists"):
        StoreWriter(store).write(make(1))


def test_overwrite_replaces_a_store_and_never_another_folder(make, same, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(StoreExistsError, match="no store is not replaced"):
        StoreWriter(photos).write(make(0), overwrite=True)
    assert tree(photos) == {p.relative_to(photos): b"meow" for p in photos.iterdir()}
    StoreWriter(tmp_path / "a.zarr").write(make(0))
    StoreWriter(tmp_path / "a.zarr").write(make(1), overwrite=True)
    same(open_store(tmp_path / "a.zarr").read_block(slice(None)), make(1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr", "photos"]


def test_overwrite_in_memory(make, same):
    store: dict = {}
    StoreWriter(store).write(make(0, text=True))
    StoreWriter(store).write(make(1), overwrite=True)
    same(open_store(store).read_block(slice(None)), make(1))


def test_a_refused_block_leaves_nothing_behind(make, tmp_path):
    block = make(0)
    block.arrays["forces"] = block.arrays["forces"][:-1]
    with pytest.raises(FieldError, match="'forces'"):
        StoreWriter(tmp_path / "a.zarr").write(block)
    with pytest.raises(FieldError, match="empty"):
        StoreWriter(tmp_path / "a.zarr").write(make(0).take([]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "values", "level", "error", "words"),
    [
        ("energy", np.zeros((4, 1), int), "system", FieldError, "'energy' has the wrong dtype"),
        ("atomic_numbers", None, "atom", FieldError, "'atomic_numbers' has the wrong dtype"),
        ("when", np.zeros(4, "M8[s]"), "system", FieldError, "cannot be stored"),
        ("thing", np.array([{}] * 4, object), "system", FieldError, "not text"),
        ("a/b", np.zeros(4), "system", FieldError, "cannot be the name"),
        ("dipole", np.zeros((4, 3)), "atom", FieldError, "dipole"),
    ],
)
def test_write_refuses_by_name(make, tmp_path, name, values, level, error, words):
    block = make(0)
    block.arrays[name] = block["energy"] * 0 + 1.5 if values is None else values
    if values is None:
        block.arrays[name] = np.ones(block.num_atoms)
    block.levels[name] = level
    with pytest.raises(error, match=words):
        StoreWriter(tmp_path / "a.zarr").write(block)
    assert not (tmp_path / "a.zarr").exists()


def test_provenance_is_kept(make, tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0), provenance={"source": "x.xyz"})
    StoreWriter(path).append(make(1))
    StoreWriter(path).defragment()
    assert open_store(path).schema.provenance == {"source": "x.xyz"}


@pytest.mark.parametrize("store", ["a.zarr", None])
def test_annotate(make, tmp_path, store):
    place = {} if store is None else tmp_path / store
    writer = StoreWriter(place)
    writer.write(make(0), provenance={"source": "x.xyz", "by": "me"})
    writer.annotate({"by": "you", "method": {"functional": "PBE", "k": (2, 2)}})
    known = {"source": "x.xyz", "by": "you", "method": {"functional": "PBE", "k": [2, 2]}}
    assert open_store(place).schema.provenance == known
    # What is known already is no commit, nor is what is refused.
    writer.annotate({"by": "you"})
    for facts in ({"x": float("nan")}, {"x": object()}, "text"):
        with pytest.raises(ConfigError, match="no JSON object"):
            writer.annotate(facts)
    with writer.transaction(), pytest.raises(StoreError, match="inside a transaction"):
        writer.annotate({"by": "them"})
    writer.append(make(1))
    snapshot = open_store(place)
    assert snapshot.schema.provenance == known
    assert [e["operation"] for e in snapshot.schema.history] == ["write", "annotate", "append"]


# -- append ------------------------------------------------------------------


def test_append_to_nothing(make, tmp_path):
    with pytest.raises(StoreNotFoundError, match="no store is here"):
        StoreWriter(tmp_path / "a.zarr").append(make(0))
    (tmp_path / "f").write_text("x")
    with pytest.raises(NotAStoreError, match="file"):
        StoreWriter(tmp_path / "f").append(make(0))


def test_missing_and_new_fields_become_holes_both_ways(make, same, anywhere):
    """C17, without its parser."""
    a = make(0, 2, fields=PLAIN)
    b = make(1, 2, fields={**{k: v for k, v in PLAIN.items() if k != "forces"}, "charge": "f8"})
    writer = StoreWriter(anywhere)
    writer.write(a)
    writer.append(b)
    snapshot = open_store(anywhere)
    same(snapshot.read_block(slice(None)), Block.concat([a, b]))
    assert snapshot.present("forces").tolist() == [True, True, False, False]
    assert snapshot.present("charge").tolist() == [False, False, True, True]
    assert snapshot.present("energy") is None
    # A later whole block closes no hole of others.
    writer.append(make(2, 1, fields={**PLAIN, "charge": "f8"}))
    assert open_store(anywhere).present("forces").tolist() == [True, True, False, False, True]


def test_a_custom_field_gets_holes_too(make, anywhere):
    writer = StoreWriter(anywhere, SMALL)
    writer.write(make(0, 3))
    writer.add_custom("tag", np.arange(3, dtype="i4"), "system", unit="eV")
    writer.append(make(1, 2))
    snapshot = open_store(anywhere)
    assert snapshot.group("tag") == "custom"
    assert snapshot.unit("tag") == "eV"
    assert snapshot.present("tag").tolist() == [True] * 3 + [False] * 2
    assert snapshot.read_rows("tag", 0, 5).tolist() == [0, 1, 2, 0, 0]
    more = make(2, 1).with_field("tag", np.array([7], "i4"), "system")
    writer.append(more)
    snapshot = open_store(anywhere)
    assert snapshot.group("tag") == "custom"
    assert snapshot.read_rows("tag", 5, 6).tolist() == [7]


def test_edges_appended_to_a_store_without_edges(make, same, anywhere):
    a, b = make(0, 3, fields=PLAIN), make(1, 3, fields={**PLAIN, "neighbor_list": "i8"})
    writer = StoreWriter(anywhere, SMALL)
    writer.write(a)
    writer.append(b)
    writer.append(a)
    same(open_store(anywhere).read_block(slice(None)), Block.concat([a, b, a]))


def test_samples_with_edges_but_no_list(make, same, anywhere):
    whole = make(5, 4, fields={**PLAIN, "neighbor_list": "i4", "neighbor_list_shifts": "f4"})
    bare = whole.select_fields([n for n in whole.names if n != "neighbor_list"])
    for first, second in ((whole, bare), (bare, whole)):
        store: dict = {}
        StoreWriter(store, SMALL).write(first)
        StoreWriter(store, SMALL).append(second)
        same(open_store(store).read_block(slice(None)), Block.concat([first, second]))


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("forces", lambda v: v.astype(int), FieldError, "'forces' has the wrong dtype"),
        ("flags", lambda v: v.astype("f4"), FieldError, "'flags' has another kind of dtype"),
        ("small", lambda v: v.astype("i8") + 1000, FieldError, "'small' do not fit"),
        ("small", lambda v: v[:, :1], FieldError, "'small' have another shape"),
    ],
)
def test_append_refuses_by_name_and_writes_nothing(make, tmp_path, name, change, error, words):
    fields = {**PLAIN, "flags": "", "small": ""}
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0, fields=fields))
    before = tree(path)
    block = make(1, fields=fields)
    block.arrays[name] = change(block.arrays[name])
    with pytest.raises(error, match=words):
        StoreWriter(path).append(block)
    assert tree(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


def test_append_refuses_another_level(make, tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0, fields={**PLAIN, "flags": ""}))
    block = make(1, fields=PLAIN)
    block = block.with_field("flags", np.zeros(block.num_samples, bool), "system")
    with pytest.raises(LevelError, match="'flags' has another level"):
        StoreWriter(path).append(block)


def test_dtype_on_disk_stays_and_narrowing_is_said_once(make, tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0, fields={**PLAIN, "positions": "f4"}))
    writer = StoreWriter(path)
    block = make(1, fields=PLAIN)
    with pytest.warns(UserWarning, match="'positions' is float32 in the store"):
        writer.append(block)
    writer.append(make(2, fields=PLAIN))
    snapshot = open_store(path)
    assert snapshot.dtype("positions") == np.float32
    np.testing.assert_array_equal(
        snapshot.read_block(slice(4, 8))["positions"], block["positions"].astype("f4")
    )


def test_int32_edges_stay_int32_and_odd_ones_become_int64(make):
    for given, kept in (("i4", "int32"), ("i8", "int64"), ("u1", "int64"), ("i2", "int64")):
        store: dict = {}
        StoreWriter(store).write(make(0, fields={**PLAIN, "neighbor_list": given}))
        assert str(open_store(store).dtype("neighbor_list")) == kept


def test_a_foreign_byte_order_is_stored_natively(make):
    block = make(0)
    block.arrays["positions"] = block["positions"].astype(">f8")
    store: dict = {}
    StoreWriter(store).write(block)
    np.testing.assert_array_equal(
        open_store(store).read_block([0, 1])["positions"], make(0).take([0, 1])["positions"]
    )
    assert open_store(store).dtype("positions").isnative


def test_an_alias_becomes_its_field(make):
    block = make(0, fields={k: v for k, v in PLAIN.items() if k != "energy"})
    block = block.with_field("energies", np.ones((4, 1)), "system")
    store: dict = {}
    StoreWriter(store).write(block)
    snapshot = open_store(store)
    assert "energy" in snapshot.fields
    assert "energies" in snapshot
    assert snapshot.read_rows("energies", 0, 4).tolist() == [[1.0]] * 4


def test_empty_append_changes_nothing(make, anywhere):
    StoreWriter(anywhere).write(make(0))
    StoreWriter(anywhere).append(make(0).take([]))
    assert open_store(anywhere).generation == 1


# -- custom fields -----------------------------------------------------------


def test_add_custom_at_every_level(make, anywhere):
    block = make(0)
    writer = StoreWriter(anywhere)
    writer.write(block)
    writer.delete([0])
    writer.add_custom("a", np.ones((block.num_atoms, 2)), "node")
    writer.add_custom("b", np.ones(block.num_edges, "i4"), "edge")
    writer.add_custom("c", ["x", "y", "z", ""], "system")
    writer.add_custom("d", np.ones(4, ">f4"), "system")
    snapshot = open_store(anywhere)
    assert [snapshot.level(n) for n in "abcd"] == ["atom", "edge", "system", "system"]
    assert snapshot.read_rows("c", 0, 4).tolist() == ["x", "y", "z", ""]
    assert snapshot.group("c") == "text"


def test_add_custom_refusals(make, anywhere):
    writer = StoreWriter(anywhere)
    writer.write(make(0).with_field("mine", np.zeros(4), "system"))
    for name in ("forces", "energies", "dipole"):
        with pytest.raises(FieldError, match="core field"):
            writer.add_custom(name, np.zeros(4), "system")
    writer.add_custom("tag", np.zeros(4), "system")
    for name in ("tag", "mine"):
        with pytest.raises(FieldError, match="already exists"):
            writer.add_custom(name, np.zeros(4), "system")
    with pytest.raises(FieldError, match="does not match expected size 4"):
        writer.add_custom("x", np.zeros(3), "system")
    with pytest.raises(LevelError, match="Invalid level"):
        writer.add_custom("x", np.zeros(4), "molecule")
    with pytest.raises(LevelError, match="text"):
        writer.add_custom("x", np.array(["a"] * make(0).num_atoms), "atom")
    assert open_store(anywhere).generation == 2


# -- deletion ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "left"),
    [
        ([1, -1], [0, 2]),
        (2, [0, 1, 3]),
        (np.array([True, False, False, True]), [1, 2]),
        ([False, True, False, False], [0, 2, 3]),
        (slice(1, 3), [0, 3]),
        ([], [0, 1, 2, 3]),
        ([1, 1], [0, 2, 3]),
    ],
)
def test_delete_by_any_index(make, same, anywhere, indices, left):
    block = make(0)
    writer = StoreWriter(anywhere)
    writer.write(block)
    writer.delete(indices)
    snapshot = open_store(anywhere)
    assert snapshot.active.tolist() == left
    same(snapshot.read_block(slice(None)), block)
    assert verify(anywhere).clean
    writer.undelete(indices)
    assert open_store(anywhere).active.tolist() == [0, 1, 2, 3]
    assert verify(anywhere).clean


def test_delete_refuses_what_is_out_of_range(make, anywhere):
    writer = StoreWriter(anywhere)
    writer.write(make(0))
    for wrong in (4, -5, [0, 9], [True], 0.5):
        with pytest.raises(IndexRangeError):
            writer.delete(wrong)
    assert open_store(anywhere).generation == 1


def test_masks_of_rows_follow_over_many_chunks(make, tmp_path):
    import zarr

    path = tmp_path / "a.zarr"
    block = make(0, 60)
    writer = StoreWriter(path, SMALL)
    writer.write(block)
    gone = [0, 7, 8, 30, 59]
    writer.delete(gone)
    mask = np.ones(60, bool)
    mask[gone] = False
    group = zarr.open_group(path, mode="r")
    np.testing.assert_array_equal(group["meta/samples_mask"][:], mask)
    np.testing.assert_array_equal(
        group["meta/atoms_mask"][:], np.repeat(mask, np.diff(block.atoms_ptr))
    )
    np.testing.assert_array_equal(
        group["meta/edges_mask"][:], np.repeat(mask, np.diff(block.edges_ptr))
    )
    assert not (path / "meta" / "pending").exists()


# -- rewriting ---------------------------------------------------------------


def test_defragment_drops_what_is_deleted(make, same, anywhere):
    fields = {**PLAIN, "neighbor_list": "i8", "tiny": "", "bond_kind": ""}
    blocks = [make(s, 20, fields=fields, text=True, holes=("forces",)) for s in range(3)]
    writer = StoreWriter(anywhere, SMALL)
    writer.write(blocks[0])
    for block in blocks[1:]:
        writer.append(block)
    whole = Block.concat(blocks)
    gone = np.arange(0, 60, 3)
    writer.delete(gone)
    writer.defragment()
    left = np.setdiff1d(np.arange(60), gone)
    snapshot = open_store(anywhere)
    same(snapshot.read_block(slice(None)), whole.take(left))
    assert len(snapshot.active) == 40
    assert verify(anywhere).clean
    writer.append(blocks[0])
    same(open_store(anywhere).read_block(slice(40, 60)), blocks[0])


def test_defragment_with_another_config(make, same, tmp_path):
    path = tmp_path / "a.zarr"
    writer = StoreWriter(path)
    writer.write(make(0, 50))
    writer.defragment({"core": {"chunk_size": 8, "shard_size": 16}, "profile": "small"})
    snapshot = open_store(path)
    assert snapshot.array("positions").chunks[0] == 8
    assert snapshot.chunk_rows("atom") == 16
    same(snapshot.read_block(slice(None)), make(0, 50))
    writer.append(make(1, 50))
    same(open_store(path).read_block(slice(50, 100)), make(1, 50))


def test_all_deleted_becomes_a_valid_empty_store(make, same, anywhere):
    writer = StoreWriter(anywhere)
    writer.write(make(0, text=True))
    writer.delete(slice(None))
    assert len(open_store(anywhere).active) == 0
    writer.defragment()
    snapshot = open_store(anywhere)
    assert snapshot.num_samples == 0
    assert snapshot.fields == make(0, text=True).names
    assert snapshot.read_block([]).num_samples == 0
    assert list(snapshot.iter_blocks()) == []
    assert verify(anywhere).clean
    writer.append(make(1, text=True))
    same(open_store(anywhere).read_block(slice(None)), make(1, text=True))


def test_the_old_generation_stays_readable_to_its_holder(make, same, tmp_path):
    import pickle

    path = tmp_path / "a.zarr"
    writer = StoreWriter(path, SMALL)
    writer.write(make(0, 30))
    writer.delete([0])
    held = open_store(path)
    data = pickle.dumps(held)
    writer.defragment()
    same(held.read_block(slice(None)), make(0, 30))
    same(pickle.loads(data).read_block(slice(None)), make(0, 30))
    same(open_store(path, generation=2).read_block(slice(None)), make(0, 30))
    new = held.refresh()
    assert new.num_samples == 29
    assert held.num_samples == 30
    writer.delete([0])
    writer.defragment()
    with pytest.raises(StaleSnapshotError, match="no longer on disk"):
        held.read_block(slice(None))
    with pytest.raises(StaleSnapshotError):
        pickle.loads(data)
    assert new.read_block(slice(None)).num_samples == 29


def test_a_snapshot_does_not_see_later_appends_and_deletions(make, same, tmp_path):
    path = tmp_path / "a.zarr"
    writer = StoreWriter(path, SMALL)
    writer.write(make(0, 6))
    held = open_store(path)
    writer.append(make(1, 5, text=True))
    writer.delete([1])
    assert held.num_samples == 6
    assert held.fields == make(0).names
    same(held.read_block(slice(None)), make(0, 6))
    assert len(held.active) == 6
    assert len(open_store(path).active) == 10
    # An older generation can be opened as long as only appends came since.
    with pytest.raises(StaleSnapshotError):
        open_store(path, generation=1)
    assert open_store(path, generation=3).num_samples == 11
    writer.append(make(2, 2))
    assert open_store(path, generation=3).num_samples == 11
    with pytest.raises(StaleSnapshotError):
        open_store(path, generation=9)


@pytest.mark.parametrize("kernel", [True, False])
def test_swap_with_and_without_exchange(make, same, tmp_path, monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    path = tmp_path / "a.zarr"
    writer = StoreWriter(path)
    writer.write(make(0))
    writer.delete([0])
    writer.defragment()
    same(open_store(path).read_block(slice(None)), make(0).take([1, 2, 3]))
    writer.write(make(1), overwrite=True)
    same(open_store(path).read_block(slice(None)), make(1))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.zarr.previous", "a.zarr"]


# -- reading errors ----------------------------------------------------------


def test_unknown_field_and_closed_reader(make, anywhere):
    StoreWriter(anywhere).write(make(0))
    snapshot = open_store(anywhere)
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        snapshot.read_rows("forcs", 0, 1)
    with pytest.raises(FieldError, match="not committed"):
        snapshot.read_rows("energy", 0, 5)
    with pytest.raises(IndexRangeError):
        snapshot.read_block([7])
    with snapshot:
        pass
    with pytest.raises(StoreClosedError, match="closed"):
        snapshot.read_block([0])


def test_what_is_no_store(make, tmp_path):
    import zarr

    with pytest.raises(StoreNotFoundError, match="no store is here"):
        open_store(tmp_path / "none")
    (tmp_path / "f.xyz").write_text("1\n")
    with pytest.raises(NotAStoreError, match="convert"):
        open_store(tmp_path / "f.xyz")
    (tmp_path / "d").mkdir()
    with pytest.raises(NotAStoreError, match=r"zarr\.json"):
        open_store(tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []
    zarr.create_group(tmp_path / "v2", zarr_format=2)
    with pytest.raises(NotAStoreError, match="format 2"):
        open_store(tmp_path / "v2")
    zarr.create_group(tmp_path / "v3")
    with pytest.raises(NotAStoreError, match="meta"):
        open_store(tmp_path / "v3")
    zarr.create_array(tmp_path / "arr", shape=(1,), dtype="f4")
    with pytest.raises(NotAStoreError, match="group"):
        open_store(tmp_path / "arr")
    with pytest.raises(StoreNotFoundError):
        open_store({})


def test_other_names_of_fields_and_axes_of_one(tmp_path) -> None:
    """``energies`` [N] is ``energy`` [N, 1], as everywhere else."""
    ptr = np.array([0, 1, 3])
    levels = {"positions": "atom", "atomic_numbers": "atom", "energies": "system"}
    arrays = {
        "positions": np.zeros((3, 3)),
        "atomic_numbers": np.ones(3, int),
        "energies": np.array([1.0, 2.0]),
    }
    block = Block(ptr, ptr * 0, arrays, levels, {"energies": np.array([True, False])})
    writer = StoreWriter(tmp_path / "a.zarr")
    writer.write(block)
    writer.append(block)
    with open_store(tmp_path / "a.zarr") as store:
        assert store.info("energy").tail == (1,)
        assert store.read_rows("energy", 0, 4)[[0, 2]].tolist() == [[1.0], [1.0]]
        assert store.present("energy").tolist() == [True, False, True, False]
    both = Block(
        ptr, ptr * 0, {**arrays, "energy": np.zeros((2, 1))}, {**levels, "energy": "system"}
    )
    with pytest.raises(FieldError, match="given twice"):
        StoreWriter(tmp_path / "b.zarr").write(both)


def test_text_that_is_no_unicode_is_named(tmp_path) -> None:
    ptr = np.array([0, 1, 3])
    block = Block(
        ptr,
        ptr * 0,
        {
            "positions": np.zeros((3, 3)),
            "atomic_numbers": np.ones(3, int),
            "name": np.array(["fine", "a\ud800"], dtype=object),
        },
        {"positions": "atom", "atomic_numbers": "atom", "name": "system"},
    )
    with pytest.raises(FieldError, match="'name' of sample 1 is no valid Unicode"):
        StoreWriter(tmp_path / "a.zarr").write(block)
    assert list(tmp_path.iterdir()) == []

"""Chunks written without zarr are those that zarr writes, and read by it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from alchemi_xr.errors import CorruptStoreError, MissingChunkError
from alchemi_xr.store import StoreWriter, layout, open_store
from alchemi_xr.store.codecs import ZarrWriteConfig, as_config
from alchemi_xr.store.commit import Session
from alchemi_xr.store.direct import parse
from alchemi_xr.store.locate import Place
from alchemi_xr.store.schema import FieldInfo
from alchemi_xr.store.stage import Stage

PROFILES = ["raw", "fast", "balanced", "small"]
DTYPES = ["bool", "i1", "u8", "i8", "f2", "f4", "f8", "c16"]


def spec_of(dtype, rows, profile, tail=(3,)):
    info = FieldInfo("x", "atom", np.dtype(dtype), tail, "custom")
    config = ZarrWriteConfig(profile=profile, custom={"chunk_size": 7})
    return layout.field_spec(info, rows, config)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_those_of_zarr(tmp_path, profile, dtype):
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(17, 3)) * 50).astype(dtype)
    spec = spec_of(dtype, 17, profile)
    held = {}
    layout.create(MemoryStore(held), spec)[:] = values
    array = parse(tmp_path / "custom/x", layout.document(spec))
    stage = Stage(tmp_path)
    array.save(stage)
    array.write(stage, 0, values, behind=False)
    stage.land()
    found = {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*") if p.is_file()}
    wanted = {k: v.to_bytes() for k, v in held.items() if k.startswith("custom/x/")}
    assert sorted(found) == sorted(wanted)
    for key, data in wanted.items():
        if key.endswith("zarr.json"):
            assert json.loads(found[key].read_bytes()) == json.loads(data)
        elif not key.endswith("c/2/0"):
            # The last chunk is partly filled; what is behind its rows is nobody's.
            assert found[key].read_bytes() == data, key
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "custom/x")[:], values)


@pytest.mark.parametrize("profile", [*PROFILES, "raw in shards"])
def test_rows_added_in_pieces_of_any_length(make, same, tmp_path, profile):
    from alchemi_xr.data.block import Block

    core = {"chunk_size": 5, "shard_size": 10 if "shards" in profile else None}
    config = ZarrWriteConfig(profile=profile.split()[0], core=core, meta={"chunk_size": 3})
    blocks = [make(i, n, text=True) for i, n in enumerate((2, 1, 7, 1, 1, 4))]
    writer = StoreWriter(tmp_path / "a.zarr", config)
    writer.write(blocks[0])
    for block in blocks[1:]:
        writer.append(block)
    found = open_store(tmp_path / "a.zarr").read_block(slice(None))
    same(found, Block.concat(blocks))


def test_committed_bytes_of_a_raw_chunk_stay_in_their_file(make, tmp_path):
    path = tmp_path / "a.zarr"
    writer = StoreWriter(path, "raw")
    writer.write(make(0, 5))
    file = path / "core/energy/c/0/0"
    node, before = file.stat().st_ino, file.read_bytes()[: 5 * 8]
    writer.append(make(1, 2))
    assert file.stat().st_ino == node
    assert file.read_bytes()[: 5 * 8] == before
    np.testing.assert_array_equal(zarr.open_array(path / "core/energy")[5:], make(1, 2)["energy"])


@pytest.mark.parametrize("profile", ["raw", "fast"])
def test_a_lost_or_cut_tail_chunk_refuses_the_append(make, tmp_path, profile):
    path = tmp_path / "a.zarr"
    StoreWriter(path, profile).write(make(0, 5))
    file = path / "core/energy/c/0/0"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptStoreError, match="'core/energy' cannot be decoded"):
        StoreWriter(path).append(make(1, 2))
    file.unlink()
    with pytest.raises(MissingChunkError, match="'core/energy' is missing"):
        StoreWriter(path).append(make(1, 2))
    file.write_bytes(data)
    StoreWriter(path).append(make(1, 2))
    assert open_store(path).num_samples == 7


def test_what_zarr_alone_can_write_is_left_to_it(tmp_path):
    sharded = {"custom": {"chunk_size": 2, "shard_size": 4}}
    info = FieldInfo("x", "atom", np.dtype("f8"), (3,), "custom")
    document = layout.document(layout.field_spec(info, 9, as_config(sharded)))
    assert parse(tmp_path, document) is None
    session = Session(Place("here", path=tmp_path))
    session.new_field(info, 0, as_config(sharded))
    session.extend("custom/x", 0, np.ones((9, 3)))
    session.flush()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "custom/x")[:], np.ones((9, 3)))


def test_a_stage_lands_in_phases_and_drops_what_is_not_wanted(tmp_path):
    stage = Stage(tmp_path)
    stage.put(tmp_path / "a/one", [b"old"])
    stage.put(tmp_path / "a/one", [b"n", b"ew"], size=5)
    assert not (tmp_path / "a/one").exists()
    stage.land()
    assert (tmp_path / "a/one").read_bytes() == b"new\0\0"
    stage.patch(tmp_path / "a/one", 3, b"!!", size=5)
    with pytest.raises(EOFError):
        Stage(tmp_path).patch(tmp_path / "a/one", 0, b"x", size=9)
    stage.put(tmp_path / "a/three", [b"x"])
    stage.drop()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["one"]


def test_more_files_than_may_be_open(tmp_path):
    stage = Stage(tmp_path)
    for number in range(300):
        stage.put(tmp_path / f"f{number}", [bytes([number % 256])], size=2)
    stage.patch(tmp_path / "f0", 1, b"x", size=2)
    stage.land()
    assert (tmp_path / "f0").read_bytes() == b"\0x"
    assert (tmp_path / "f299").read_bytes() == bytes([299 % 256, 0])
    assert len(list(tmp_path.iterdir())) == 300

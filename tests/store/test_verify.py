"""Damage is named, committed data stays, leftovers go."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alchemi_xr.errors import (
    CorruptStoreError,
    MissingChunkError,
    StoreVersionError,
    UnknownFieldError,
)
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import repair, verify

SMALL = {"core": {"chunk_size": 50}, "meta": {"chunk_size": 64}}


@pytest.fixture
def path(make, tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path, SMALL).write(make(0, 200))
    return path


def edit_root(path, change):
    document = json.loads((path / "zarr.json").read_text())
    change(document["attributes"])
    (path / "zarr.json").write_text(json.dumps(document))


def test_a_missing_chunk_is_named_by_all_and_the_rest_still_reads(path, make, same):
    """C28."""
    (path / "core" / "forces" / "c" / "3" / "0").unlink()
    report = verify(path)
    assert not report.ok
    assert any("'3/0'" in p and "'core/forces'" in p for p in report.problems)
    snapshot = open_store(path)
    whole = make(0, 200)
    np.testing.assert_array_equal(snapshot.read_rows("forces", 0, 150), whole["forces"][:150])
    np.testing.assert_array_equal(snapshot.read_rows("forces", 200, 250), whole["forces"][200:250])
    words = "chunk '3/0' of array 'core/forces'"
    for read in (
        lambda: snapshot.read_rows("forces", 100, 160),
        lambda: snapshot.take_rows("forces", [0, 170]),
        lambda: snapshot.read_block(slice(None)),
        lambda: list(snapshot.iter_blocks()),
        lambda: snapshot.array("forces")[150:160],
    ):
        with pytest.raises(MissingChunkError, match=words):
            read()
    good = [i for i in range(200) if whole.atoms_ptr[i + 1] <= 150]
    same(snapshot.read_block(good), whole.take(np.array(good)))


def test_a_missing_chunk_with_a_pipeline_of_its_own_file_access(path):
    zarrs = pytest.importorskip("zarrs")
    import zarr

    assert zarrs
    (path / "core" / "forces" / "c" / "3" / "0").unlink()
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        snapshot = open_store(path)
        snapshot.read_rows("forces", 0, 150)
        with pytest.raises(MissingChunkError, match="'3/0'"):
            snapshot.read_rows("forces", 100, 160)


@pytest.mark.parametrize("array", ["meta/atoms_ptr", "meta/edges_ptr", "meta/samples_mask"])
def test_a_missing_chunk_of_a_pointer(path, array):
    (path / array / "c" / "1").unlink()
    with pytest.raises(MissingChunkError, match=array):
        open_store(path)
    assert any(array in p for p in verify(path).problems)


def test_a_truncated_chunk(path):
    chunk = path / "core" / "positions" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    with pytest.raises(CorruptStoreError, match="'core/positions' cannot be decoded"):
        open_store(path).read_rows("positions", 60, 70)
    assert verify(path).ok
    assert "core/positions" in str(verify(path, data=True))
    assert len(open_store(path).read_rows("positions", 0, 50)) == 50


def test_a_missing_array(path):
    (path / "core" / "forces" / "zarr.json").unlink()
    with pytest.raises(CorruptStoreError, match="'core/forces' is missing"):
        open_store(path).read_block([0])
    assert "core/forces" in str(verify(path))


def test_a_pointer_that_falls(path):
    import zarr

    zarr.open_group(path, mode="r+")["meta/atoms_ptr"][7] = 0
    with pytest.raises(CorruptStoreError, match="falls at sample 6"):
        open_store(path)
    assert not verify(path).ok


def test_masks_that_disagree(path):
    import zarr

    zarr.open_group(path, mode="r+")["meta/atoms_mask"][5] = False
    assert "disagree on sample" in verify(path).problems[0]


def test_edges_of_others(path):
    import zarr

    zarr.open_group(path, mode="r+")["core/neighbor_list"][0] = [400, 401]
    assert "names atoms of others" in verify(path).problems[0]


def test_a_newer_format(path):
    edit_root(path, lambda a: a["alchemi_xr"].update(format=99))
    with pytest.raises(StoreVersionError, match="found 99"):
        open_store(path)


def test_a_root_that_cannot_be_understood(path):
    edit_root(path, lambda a: a["alchemi_xr"].pop("generation"))
    with pytest.raises(CorruptStoreError, match="cannot be understood"):
        open_store(path)
    (path / "zarr.json").write_text("{")
    with pytest.raises(CorruptStoreError, match="no JSON"):
        open_store(path)


def test_leftovers_are_told_and_cut_off(path, make, same):
    import zarr

    group = zarr.open_group(path, mode="r+")
    group["core/energy"].resize((203, 1))
    (path / "core" / ".x.partial").write_bytes(b"")
    (path.parent / ".a.zarr.rewrite-12345678").mkdir()
    report = verify(path)
    assert report.ok
    assert not report.clean
    assert len(report.leftovers) == 3
    assert "3 uncommitted rows at the end of 'core/energy'" in str(report)
    same(open_store(path).read_block(slice(None)), make(0, 200))
    assert repair(path).clean
    assert [p.name for p in path.parent.iterdir()] == ["a.zarr"]
    same(open_store(path).read_block(slice(None)), make(0, 200))


def test_drop_of_what_is_not_there(path):
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        repair(path, drop="forcs")
    assert repair(path, drop="forces").clean
    assert "forces" not in open_store(path)
    assert not (path / "core" / "forces").exists()


def test_verify_writes_nothing(path):
    before = {p: p.stat().st_mtime_ns for p in path.parent.rglob("*")}
    verify(path, data=True)
    open_store(path).read_block([0])
    assert {p: p.stat().st_mtime_ns for p in path.parent.rglob("*")} == before

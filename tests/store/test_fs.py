"""Publishing never replaces what is no store; removal tells its readers."""

from __future__ import annotations

import pytest

from alchemi_xr.errors import NotAStoreError, StaleSnapshotError, StoreExistsError
from alchemi_xr.store import StoreWriter, fs, open_store


def built(make, tmp_path, seed=0):
    path = tmp_path / f"built{seed}"
    StoreWriter(path).write(make(seed))
    return path


def test_publish_to_a_free_place(make, same, tmp_path):
    fs.publish(built(make, tmp_path), tmp_path / "a.zarr")
    same(open_store(tmp_path / "a.zarr").read_block(slice(None)), make(0))
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


@pytest.mark.parametrize("kernel", [True, False])
def test_publish_over_a_store(make, same, tmp_path, monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(fs, "exchange", lambda a, b: False)
    fs.publish(built(make, tmp_path), tmp_path / "a.zarr")
    held = open_store(tmp_path / "a.zarr")
    new = built(make, tmp_path, 1)
    with pytest.raises(StoreExistsError, match="already exists"):
        fs.publish(new, tmp_path / "a.zarr")
    fs.publish(new, tmp_path / "a.zarr", overwrite=True)
    same(open_store(tmp_path / "a.zarr").read_block(slice(None)), make(1))
    with pytest.raises(StaleSnapshotError):
        held.read_block([0])
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


@pytest.mark.parametrize("what", ["folder", "file", "other zarr"])
def test_publish_never_replaces_anything_else(make, tmp_path, what):
    import zarr

    dest = tmp_path / "dest"
    if what == "file":
        dest.write_text("x")
    elif what == "folder":
        dest.mkdir()
        (dest / "cat.jpg").write_text("x")
    else:
        zarr.create_group(dest).create_array("x", shape=(1,), dtype="f4")
    with pytest.raises(NotAStoreError, match="not replaced"):
        fs.publish(built(make, tmp_path), dest, overwrite=True)
    assert dest.exists()
    assert (tmp_path / "built0").exists()


def test_write_file_leaves_no_trace_when_it_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(fs.os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        fs.write_file(tmp_path / "a", b"x")
    assert list(tmp_path.iterdir()) == []

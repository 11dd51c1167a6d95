"""A store reached through a link: the link stays, the store behind it is written."""

from __future__ import annotations

import os

import pytest

from alchemi_xr.store import StoreWriter, fs, open_store


@pytest.fixture
def linked(tmp_path, make):
    """A store of two samples in another folder, and a link to it."""
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real.zarr", tmp_path / "link.zarr"
    StoreWriter(real).write(make(1, 2))
    link.symlink_to(real)
    return real, link


def test_every_write_goes_behind_the_link(linked, make):
    real, link = linked
    StoreWriter(link).append(make(2, 3))
    StoreWriter(link).delete([0])
    StoreWriter(link).defragment()
    assert link.is_symlink()
    assert open_store(real).num_samples == open_store(link).num_samples == 4
    StoreWriter(link).write(make(3, 7), overwrite=True)
    assert link.is_symlink()
    assert open_store(real).num_samples == 7
    visible = sorted(n for n in os.listdir(link.parent) if not n.startswith("."))
    assert visible == ["far", "link.zarr"]


def test_publish_replaces_what_the_link_leads_to(linked, make):
    real, link = linked
    built = real.with_name("built.zarr")
    StoreWriter(built).write(make(4, 6))
    fs.publish(built, link, overwrite=True)
    assert link.is_symlink()
    assert open_store(real).num_samples == 6


def test_removing_a_link_leaves_its_target(linked):
    real, link = linked
    fs.remove_tree(link)
    assert not os.path.lexists(link)
    assert open_store(real).num_samples == 2

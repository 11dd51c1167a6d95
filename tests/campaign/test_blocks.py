"""Blocks on disk between worker and merge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.campaign.blocks import BlockFolder, BlockFolderWriter
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import CampaignError, FieldError


def make_block(counts, seed=0, holes=False, edges=True):
    rng = np.random.default_rng(seed)
    counts = np.asarray(counts, dtype=np.int64)
    ptr = counts_to_ptr(counts)
    num_edges = counts if edges else np.zeros_like(counts)
    edges_ptr = counts_to_ptr(num_edges)
    n, v, e = len(counts), int(ptr[-1]), int(edges_ptr[-1])
    return Block(
        ptr,
        edges_ptr,
        {
            "positions": rng.normal(size=(v, 3)).astype(np.float32),
            "flag/odd name": rng.integers(0, 2, v).astype(bool),
            "weight": rng.normal(size=e),
            "energy": rng.normal(size=(n, 1)),
            "step": np.arange(n),
        },
        {
            "positions": "atom",
            "flag/odd name": "atom",
            "weight": "edge",
            "energy": "system",
            "step": "system",
        },
        {"energy": rng.integers(0, 2, n).astype(bool)} if holes else {},
        {"weight": "eV"},
    )


def assert_equal(found, expected):
    np.testing.assert_array_equal(found.atoms_ptr, expected.atoms_ptr)
    np.testing.assert_array_equal(found.edges_ptr, expected.edges_ptr)
    assert set(found.arrays) == set(expected.arrays)
    for name in expected.arrays:
        np.testing.assert_array_equal(found[name], expected[name])
        assert found[name].dtype == expected[name].dtype
        assert found.levels[name] == expected.levels[name]
        np.testing.assert_array_equal(found.has(name), expected.has(name))


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_what_is_appended_is_taken(tmp_path_factory, parts, holes, data):
    path = tmp_path_factory.mktemp("blocks") / "b"
    blocks = [make_block(p, seed=i, holes=holes and i % 2 == 1) for i, p in enumerate(parts)]
    writer = BlockFolderWriter(path)
    for block in blocks:
        writer.append(block)
    writer.close()
    whole = Block.concat(blocks)
    folder = BlockFolder(path)
    assert folder.num_samples == whole.num_samples
    assert_equal(folder.take(np.arange(whole.num_samples)), whole)
    if whole.num_samples:
        chosen = np.array(
            data.draw(st.lists(st.integers(0, whole.num_samples - 1), max_size=6)), dtype=np.int64
        )
        assert_equal(folder.take(chosen), whole.take(chosen))
        sizes = folder.sample_bytes()
        assert int(sizes.sum()) == whole.nbytes


def test_units_travel(tmp_path):
    writer = BlockFolderWriter(tmp_path / "b")
    writer.append(make_block([2, 1]))
    writer.close()
    assert BlockFolder(tmp_path / "b").take(np.array([0])).units == {"weight": "eV"}


def test_an_empty_folder_is_readable(tmp_path):
    BlockFolderWriter(tmp_path / "b").close()
    assert BlockFolder(tmp_path / "b").num_samples == 0


def test_an_unfinished_folder_is_refused(tmp_path):
    writer = BlockFolderWriter(tmp_path / "b")
    writer.append(make_block([2]))
    writer.abandon()
    with pytest.raises(CampaignError, match="unfinished"):
        BlockFolder(tmp_path / "b")


def test_other_fields_are_refused(tmp_path):
    writer = BlockFolderWriter(tmp_path / "b")
    writer.append(make_block([2]))
    with pytest.raises(FieldError, match="fields of a later block differ"):
        writer.append(make_block([2]).select_fields(["positions"]))
    writer.abandon()
    writer = BlockFolderWriter(tmp_path / "c")
    with pytest.raises(FieldError, match="not numeric"):
        writer.append(make_block([1]).with_field("name", np.array(["x"]), "system"))
    writer.abandon()

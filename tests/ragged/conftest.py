"""Stores and blocks for the tests of ragged: small, seeded, with empty samples and holes."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import fill_for

COUNTS = [3, 0, 5, 1, 4, 4, 0, 2, 7, 1]


def build_block(counts: list[int], seed: int = 0, *, holes: bool = True) -> Block:
    """Random samples of these sizes: every level, several dtypes, text, one field with holes."""
    rng = np.random.default_rng(seed)
    atoms = np.asarray(counts, dtype=np.int64)
    edges = np.where(atoms > 0, rng.integers(0, 6, len(atoms)), 0)
    n, v, e = len(atoms), int(atoms.sum()), int(edges.sum())
    limit = np.repeat(atoms, edges)
    pairs = (rng.random((e, 2)) * limit[:, None]).astype(np.int64)
    arrays = {
        "atomic_numbers": rng.integers(1, 90, v),
        "positions": rng.normal(size=(v, 3)),
        "forces": rng.normal(size=(v, 3)).astype(np.float32),
        "neighbor_list": pairs,
        "shifts": rng.normal(size=(e, 3)),
        "energy": rng.normal(size=(n, 1)),
        "cell": rng.normal(size=(n, 3, 3)),
        "pbc": rng.random((n, 3)) < 0.5,
        "dataset_index": rng.permutation(n)[:, None] + 100,
        "feature": rng.normal(size=(v, 4)).astype(np.float32),
        "name": np.array([f"sample-{i}" for i in range(n)], dtype=object),
    }
    levels = dict.fromkeys(arrays, "system") | {
        "atomic_numbers": "atom",
        "positions": "atom",
        "forces": "atom",
        "feature": "atom",
        "neighbor_list": "edge",
        "shifts": "edge",
    }
    present = {}
    if holes and n:
        present["dipole"] = np.arange(n) % 3 != 1
        arrays["dipole"] = rng.normal(size=(n, 3))
        levels["dipole"] = "system"
        arrays["dipole"][~present["dipole"]] = fill_for(arrays["dipole"].dtype)
        if present["dipole"].all():
            present = {}
    return Block(counts_to_ptr(atoms), counts_to_ptr(edges), arrays, levels, present).validate()


@pytest.fixture
def make_block() -> Callable[..., Block]:
    return build_block


@pytest.fixture
def block() -> Block:
    return build_block(COUNTS)


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> str:
    """The block as a store, written once: only read it."""
    from alchemi_xr.store.writer import StoreWriter

    path = str(tmp_path_factory.mktemp("ragged") / "samples.zarr")
    StoreWriter(path).write(build_block(COUNTS))
    return path


@pytest.fixture(scope="session")
def holey_path(path, tmp_path_factory) -> str:
    """The same store with samples 2, 3 and 8 deleted: only read it."""
    from alchemi_xr.store.writer import StoreWriter

    copy = str(tmp_path_factory.mktemp("ragged") / "holey.zarr")
    shutil.copytree(path, copy)
    StoreWriter(copy).delete([2, 3, 8])
    return copy


@pytest.fixture
def own_path(path, tmp_path) -> str:
    """A copy of the store that a test may change."""
    return shutil.copytree(path, str(tmp_path / "own.zarr"))


def compare(ds, block: Block) -> None:
    """Every value of a Dataset equals the block's."""
    ds = ds.compute()
    np.testing.assert_array_equal(ds.atoms_ptr.values, block.atoms_ptr)
    np.testing.assert_array_equal(ds.edges_ptr.values, block.edges_ptr)
    np.testing.assert_array_equal(ds.num_atoms.values, np.diff(block.atoms_ptr))
    np.testing.assert_array_equal(ds.num_edges.values, np.diff(block.edges_ptr))
    for name, values in block.arrays.items():
        got = ds[name].values
        if block.levels[name] == "system" and values.shape[1:] == (1,):
            values = values[:, 0]
        assert got.dtype.kind == values.dtype.kind, name
        np.testing.assert_array_equal(got, values, err_msg=name)
    for name, mask in block.present.items():
        np.testing.assert_array_equal(ds[f"{name}_present"].values, mask)


@pytest.fixture
def assert_equal() -> Callable[..., None]:
    return compare

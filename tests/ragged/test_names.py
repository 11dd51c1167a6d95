"""Fields of a store that are named like what the Dataset itself has."""

from __future__ import annotations

import numpy as np
import pytest

import alchemi_xr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ArgumentTypeError, ConfigError, FieldError, UnknownFieldError
from alchemi_xr.store.writer import StoreWriter


def _write(path, extra: dict, levels: dict, present: dict | None = None) -> str:
    counts = np.array([2, 1, 3])
    arrays = {
        "atomic_numbers": np.ones(6, np.int64),
        "positions": np.arange(18.0).reshape(6, 3),
        **extra,
    }
    names = {"atomic_numbers": "atom", "positions": "atom", **levels}
    edges = np.zeros(4, np.int64)
    block = Block(counts_to_ptr(counts), edges, arrays, names, present or {})
    StoreWriter(str(path)).write(block)
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        "num_atoms",
        "num_edges",
        "atoms_ptr",
        "edges_ptr",
        "sample_row",
        "sample",
        "atom",
        "edge",
        "xyz",
        "row",
        "sample_ptr",
        "samples_mask",
    ],
)
def test_a_field_named_like_a_coordinate_is_shown_under_another_name(tmp_path, name):
    path = _write(tmp_path / "a.zarr", {name: np.array([7, 8, 9])}, {name: "system"})
    ds = alchemi_xr.open_dataset(path, drop_deleted=False)
    assert ds[f"{name}_field"].values.tolist() == [7, 8, 9]
    assert ds[f"{name}_field"].attrs["store_name"] == name
    assert f"{name}_field" in ds.data_vars
    assert ds.num_atoms.values.tolist() == [2, 1, 3]
    assert ds.samples_mask.dtype == bool
    chosen = ds.ragged.isel([2, 0])
    assert chosen[f"{name}_field"].values.tolist() == [9, 7]
    assert chosen.num_atoms.values.tolist() == [3, 2]


def test_a_field_named_like_a_mask_does_not_become_it(tmp_path):
    path = _write(
        tmp_path / "a.zarr",
        {"foo": np.array([1.0, np.nan, 3.0]), "foo_present": np.array([5, 6, 7])},
        {"foo": "system", "foo_present": "system"},
        {"foo": np.array([True, False, True])},
    )
    ds = alchemi_xr.open_dataset(path)
    assert ds.foo_present.values.tolist() == [True, False, True]
    assert ds.foo_present_field.values.tolist() == [5, 6, 7]
    assert "foo" not in list(ds.ragged.iter_samples())[1]


def test_a_renamed_field_keeps_its_mask(tmp_path):
    path = _write(
        tmp_path / "a.zarr",
        {"num_atoms": np.array([1.0, np.nan, 3.0])},
        {"num_atoms": "system"},
        {"num_atoms": np.array([True, False, True])},
    )
    samples = list(alchemi_xr.open_dataset(path).ragged.iter_samples())
    assert ["num_atoms_field" in sample for sample in samples] == [True, False, True]


@pytest.mark.parametrize("dims", [{"sample": "s"}, {"atom": "node"}, {"edge": "bond"}])
def test_a_renamed_dim_is_told_for_its_variables_would_stay_behind(own_path, dims):
    (dim,) = dims
    ds = alchemi_xr.open_dataset(own_path).rename(dims)
    with pytest.raises(FieldError, match=f"expected {dim}"):
        ds.ragged.isel([0])


def test_pointers_made_variables_become_coordinates_again(own_path):
    ds = alchemi_xr.open_dataset(own_path)
    chosen = ds.reset_coords().ragged.isel([4, 2])
    assert "atoms_ptr" in chosen.coords
    assert chosen.identical(ds.ragged.isel([4, 2]))


@pytest.mark.parametrize("chunks", ["0B", "-1MiB"])
def test_blocks_of_no_bytes_are_refused(own_path, chunks):
    with pytest.raises(ConfigError, match="no number of bytes"):
        alchemi_xr.open_dataset(own_path, chunks=chunks)


def test_arguments_of_a_wrong_kind_are_told(own_path):
    with pytest.raises(ArgumentTypeError, match="list of names"):
        alchemi_xr.open_dataset(own_path, fields=5)
    with pytest.raises(UnknownFieldError, match="'5'"):
        alchemi_xr.open_dataset(own_path, fields=[5])
    ds = alchemi_xr.open_dataset(own_path)
    for call in (
        lambda: ds.ragged.head("x"),
        lambda: ds.ragged.head(1.5),
        lambda: ds.ragged.sample("x"),
        lambda: ds.ragged.sample(1, seed="x"),
    ):
        with pytest.raises(ArgumentTypeError, match="whole number"):
            call()

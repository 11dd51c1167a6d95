"""What a ragged Dataset carries, and how a torn one is found."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from alchemi_xr.errors import FieldError
from alchemi_xr.ragged import open_dataset
from alchemi_xr.ragged.conventions import Structure, field_dims, level_of, pointer_coords

TORN = {
    "fewer samples": lambda ds: ds.isel(sample=slice(0, 4)),
    "one sample": lambda ds: ds.isel(sample=[2]),
    "another order": lambda ds: ds.isel(sample=[1, 0, *range(2, 10)]),
    "sorted": lambda ds: ds.sortby("energy"),
    "fewer atoms": lambda ds: ds.isel(atom=slice(0, 5)),
    "fewer edges": lambda ds: ds.isel(edge=slice(1, None)),
    "order, no pointers": lambda ds: ds[["energy", "forces"]].isel(sample=[1, 0, *range(2, 10)]),
}


@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_torn_dataset_is_refused_with_the_call_that_was_meant(path, tear, chunks):
    ds = open_dataset(path, chunks=chunks)
    ds.ragged.validate()
    torn = tear(ds.drop_vars("name"))
    for call in (
        lambda d: d.ragged.validate(),
        lambda d: d.ragged.reduce("forces", "sum"),
        lambda d: d.ragged.isel([0]),
        lambda d: d.ragged.broadcast("energy"),
    ):
        with pytest.raises(FieldError, match=r"(?s)torn from their atoms.*ds.ragged.isel"):
            call(torn)


@pytest.mark.parametrize("chunks", [None, 2])
def test_equal_sizes_do_not_hide_a_tear(tmp_path, make_block, chunks):
    from alchemi_xr.store.writer import StoreWriter

    path = str(tmp_path / "equal.zarr")
    StoreWriter(path).write(make_block([4] * 6))
    ds = open_dataset(path, chunks=chunks, fields=["positions", "energy"])
    with pytest.raises(FieldError, match="another order"):
        ds.isel(sample=[0, 2, 1, 3, 4, 5]).ragged.validate()
    ds.ragged.isel([0, 2, 1, 3, 4, 5]).ragged.validate()


def test_what_is_no_ragged_dataset_is_told(path):
    with pytest.raises(FieldError, match="not ragged"):
        xr.Dataset({"x": ("atom", [1.0])}).ragged.validate()
    ds = open_dataset(path)
    with pytest.raises(FieldError, match=r"(?s)neither 'edges_ptr' nor 'num_edges'"):
        ds.drop_vars(["edges_ptr", "num_edges"]).ragged.validate()
    with pytest.raises(FieldError, match=r"(?s)outer product.*broadcast"):
        ds.assign(x=ds.atomic_numbers * ds.energy).ragged.validate()
    with pytest.raises(FieldError, match=r"instead of ds.where\("):
        ds.drop_vars("name").where(ds.energy > 0, drop=True).ragged.validate()


def test_a_dataset_made_by_hand_is_ragged_by_its_counts():
    ds = xr.Dataset(
        {"x": ("atom", np.arange(5.0))}, coords={"num_atoms": ("sample", np.array([2, 0, 3]))}
    )
    assert ds.ragged.num_samples == 3
    assert ds.ragged.reduce("x", "sum").values.tolist() == [1.0, 0.0, 9.0]
    assert ds.ragged.isel([2]).x.values.tolist() == [2.0, 3.0, 4.0]


def test_coordinates_are_a_cf_contiguous_ragged_array(path, block):
    ds = open_dataset(path)
    assert ds.attrs["Conventions"].startswith("CF-")
    assert ds.atoms_ptr.dims == ds.edges_ptr.dims == ("sample_ptr",)
    assert ds.sizes["sample_ptr"] == ds.sizes["sample"] + 1
    assert ds.atoms_ptr.dtype == np.int64
    for level, plural in (("atom", "atoms"), ("edge", "edges")):
        counts = ds[f"num_{plural}"]
        # CF: a count variable lies along the instance dimension alone, is of whole numbers,
        # names the sample dimension, and adds up to its length.
        assert counts.dims == ("sample",)
        assert counts.dtype.kind == "i"
        assert counts.attrs["sample_dimension"] == level
        assert int(counts.sum()) == ds.sizes[level]
        owners = [v for v in ds.variables.values() if "sample_dimension" in v.attrs]
        assert len(owners) == 2


def test_every_variable_says_what_it_is(path):
    ds = open_dataset(path)
    for name, var in ds.variables.items():
        assert var.attrs["long_name"], name
        assert var.attrs["level"] in ("atom", "edge", "system"), name
    assert ds.positions.attrs["units"] == "Å"
    assert ds.energy.attrs["units"] == "eV"
    assert ds.dipole.attrs["ancillary_variables"] == "dipole_present"
    assert "units" not in ds.pbc.attrs
    assert ds.cell.dims == ("sample", "row", "xyz")
    assert ds.neighbor_list.dims == ("edge", "pair")


def test_dims_of_fields():
    assert field_dims("energy", "system", ()) == ("sample",)
    assert field_dims("x", "edge", (2, 3), ("a", None)) == ("edge", "a", "x_2")
    assert field_dims("x", "atom", (2, 2), ("a", "a")) == ("atom", "a", "x_2")
    assert field_dims("x", "atom", (2,), ("sample",)) == ("atom", "x_1")
    assert level_of(("xyz",)) is None
    assert level_of(("xyz", "edge")) == "edge"


def test_pointers_without_edges():
    struct = Structure(np.array([0, 2]), None)
    assert set(pointer_coords(struct)) == {"atoms_ptr", "num_atoms", "sample_row"}
    with pytest.raises(FieldError, match="no edges_ptr"):
        struct.ptr("edge")

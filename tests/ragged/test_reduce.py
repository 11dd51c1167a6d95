"""Every reduction equals a slow loop over samples, in NumPy, from the store and over Dask."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.errors import ConfigError, FieldError, UnknownFieldError
from alchemi_xr.ragged import open_dataset
from alchemi_xr.ragged.reduce import OPS

CHUNKS = [None, 1, 4]
LOOP = {
    "sum": lambda x: x.sum(axis=0),
    "mean": lambda x: x.mean(axis=0) if len(x) else np.full(x.shape[1:], np.nan),
    "min": lambda x: x.min(axis=0) if len(x) else np.full(x.shape[1:], np.nan),
    "max": lambda x: x.max(axis=0) if len(x) else np.full(x.shape[1:], np.nan),
    "norm": lambda x: np.sqrt((x.astype(np.float64) ** 2).sum()),
    "any": lambda x: x.any(axis=0),
    "all": lambda x: x.all(axis=0),
    "argmin": lambda x: x.argmin(axis=0) if len(x) else np.full(x.shape[1:], -1),
    "argmax": lambda x: x.argmax(axis=0) if len(x) else np.full(x.shape[1:], -1),
}


def slow(values, ptr, op):
    """One sample after the other."""
    return np.array([LOOP[op](values[a:b]) for a, b in itertools.pairwise(ptr)])


@pytest.fixture(params=CHUNKS, ids=str)
def chunks(request):
    return request.param


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["forces", "shifts"])
def test_equals_the_slow_loop(path, block, chunks, op, name):
    ds = open_dataset(path, chunks=chunks)
    out = ds.ragged.reduce(name, op)
    assert (out.chunks is not None) == (chunks is not None)
    want = slow(block[name], block.ptr(block.levels[name]), op)
    np.testing.assert_allclose(out.values, want, rtol=1e-5)
    assert out.compute().dtype == out.dtype
    assert out.dims == (("sample",) if op == "norm" else ("sample", *ds[name].dims[1:]))
    loaded = ds.load().ragged.reduce(name, op)
    assert loaded.dtype == out.dtype
    np.testing.assert_array_equal(loaded.values, out.values)


@pytest.mark.parametrize("op", ["sum", "any", "all", "mean"])
def test_whole_numbers(path, block, chunks, op):
    out = open_dataset(path, chunks=chunks).ragged.reduce("atomic_numbers", op)
    np.testing.assert_allclose(out.values, slow(block["atomic_numbers"], block.atoms_ptr, op))
    assert out.dtype.kind == {"sum": "i", "any": "b", "all": "b", "mean": "f"}[op]


def test_extremes_of_whole_numbers_need_a_start_for_empty_samples(path, block, chunks):
    ds = open_dataset(path, chunks=chunks)
    with pytest.raises(FieldError, match="initial"):
        ds.ragged.reduce("atomic_numbers", "max").compute()
    out = ds.ragged.reduce("atomic_numbers", "max", initial=0)
    ptr = block.atoms_ptr
    want = [max(block["atomic_numbers"][a:b], default=0) for a, b in itertools.pairwise(ptr)]
    assert out.values.tolist() == want


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=10),
    st.sampled_from([None, 1, 2, "64B"]),
    st.sampled_from(sorted(LOOP)),
)
def test_any_sizes_any_blocks(make_block, counts, chunks, op):
    from alchemi_xr.ragged.conventions import Structure, pointer_coords

    block = make_block(counts, seed=len(counts))
    import xarray as xr

    ds = xr.Dataset(
        {"x": (("atom", "xyz"), block["positions"])},
        pointer_coords(Structure(block.atoms_ptr, block.edges_ptr)),
    )
    if chunks is not None:
        # The pointers stay as they are; only the field is cut, first where it must not be.
        ds = ds.assign(x=ds.x.chunk({"atom": 2}) if ds.sizes["atom"] else ds.x.chunk())
        ds = ds.ragged.chunk(chunks)
    out = ds.ragged.reduce("x", op)
    np.testing.assert_allclose(out.values, slow(block["positions"], block.atoms_ptr, op))


def test_an_expression_of_atoms(path, block, chunks):
    ds = open_dataset(path, chunks=chunks)
    fmax = ds.ragged.reduce((ds.forces**2).sum("xyz") ** 0.5, "max")
    want = slow(np.linalg.norm(block["forces"], axis=1), block.atoms_ptr, "max")
    np.testing.assert_allclose(fmax.values, want, rtol=1e-6)
    assert fmax.dims == ("sample",)


def test_blocks_across_samples_are_moved_to_boundaries(path, block):
    ds = open_dataset(path)
    ds["positions"] = ds.positions.chunk({"atom": 2})  # by hand, across samples
    out = ds.ragged.reduce("positions", "sum")
    np.testing.assert_allclose(out.values, slow(block["positions"], block.atoms_ptr, "sum"))


def test_attributes_and_coordinates(path):
    ds = open_dataset(path).assign_coords(sample=[f"s{i}" for i in range(10)])
    out = ds.ragged.reduce("forces", "mean")
    assert out.name == "forces"
    assert out.attrs["units"] == "eV/Å"
    assert out.attrs["cell_methods"] == "atom: mean"
    assert out.attrs["long_name"] == "mean of forces, -dE/dR over the atoms of each sample"
    assert set(out.coords) >= {"sample", "num_atoms", "num_edges"}
    assert "atoms_ptr" not in out.coords
    assert "units" not in ds.ragged.reduce("forces", "any").attrs
    ds["mean_force"] = out
    ds.ragged.validate()


def test_reading_is_bounded(path, block, monkeypatch):
    from alchemi_xr.ragged import reduce as module
    from alchemi_xr.store.reader import Snapshot

    sizes = []
    original = Snapshot.read_rows

    def record(self, name, start, stop):
        sizes.append(stop - start)
        return original(self, name, start, stop)

    monkeypatch.setattr(Snapshot, "read_rows", record)
    monkeypatch.setattr(module, "READ_BYTES", 24 * 8)
    out = open_dataset(path).ragged.reduce("positions", "sum")
    assert max(sizes) <= 8
    assert sum(sizes) == block.num_atoms
    np.testing.assert_allclose(out.values, slow(block["positions"], block.atoms_ptr, "sum"))


def test_only_the_field_asked_for_is_read(path, monkeypatch):
    from alchemi_xr.store.reader import Snapshot

    names = set()
    original = Snapshot.read_rows
    monkeypatch.setattr(
        Snapshot,
        "read_rows",
        lambda self, name, a, b: (names.add(name), original(self, name, a, b))[1],
    )
    ds = open_dataset(path, chunks=3)
    out = ds.ragged.reduce("forces", "norm")
    assert names == set()
    out.compute()
    assert names == {"forces"}


def test_wrong_requests_are_named(path):
    ds = open_dataset(path)
    with pytest.raises(ConfigError, match="Nearest: 'mean'"):
        ds.ragged.reduce("forces", "meann")
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        ds.ragged.reduce("force", "sum")
    with pytest.raises(FieldError, match="one value a sample already"):
        ds.ragged.reduce("energy", "sum")
    with pytest.raises(FieldError, match="along no level"):
        ds.assign(axis=("xyz", [1, 2, 3])).ragged.reduce("axis", "sum")
    with pytest.raises(FieldError, match="of another Dataset"):
        ds.ragged.reduce(ds.ragged.head(3).forces, "sum")
    with pytest.raises(FieldError, match=r"(?s)outer product of atom and sample.*broadcast"):
        ds.ragged.reduce(ds.atomic_numbers * ds.energy, "sum")

"""A sample's value stands on each of its rows, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.errors import FieldError, LevelError
from alchemi_xr.ragged import open_dataset
from alchemi_xr.ragged.chunks import level_chunks


def slow(values, ptr):
    out = [values[i] for i in range(len(ptr) - 1) for _ in range(ptr[i], ptr[i + 1])]
    return np.array(out)


@pytest.mark.parametrize("chunks", [None, {}, 1, 3, "200B"], ids=str)
@pytest.mark.parametrize("level", ["atom", "edge"])
@pytest.mark.parametrize("name", ["energy", "cell", "pbc", "name"])
def test_equals_the_slow_loop(path, block, chunks, level, name):
    ds = open_dataset(path, chunks=chunks)
    out = ds.ragged.broadcast(name, level)
    want = slow(block[name], block.ptr(level))
    want = want[:, 0] if name == "energy" else want
    np.testing.assert_array_equal(out.values, want)
    assert out.dims == (level, *ds[name].dims[1:])
    assert out.dtype == ds[name].dtype
    assert out.attrs["level"] == level
    assert (out.chunks is not None) == (chunks is not None)


def test_blocks_are_those_of_the_atoms(path, block):
    ds = open_dataset(path, chunks=3)
    out = ds.ragged.broadcast("energy")
    assert out.chunks[0] == ds.chunksizes["atom"]
    # A value in memory follows the Dask fields it will be used with.
    from_memory = ds.assign(e=("sample", np.arange(10.0))).ragged.broadcast("e")
    assert from_memory.chunks[0] == level_chunks(block.atoms_ptr, (3, 3, 3, 1))


def test_centre_of_mass_free_positions(path, block):
    for chunks in (None, 2):
        ds = open_dataset(path, chunks=chunks)
        ds["centre"] = ds.ragged.reduce("positions", "mean")
        moved = ds.positions - ds.ragged.broadcast("centre")
        assert moved.dims == ("atom", "xyz")
        ds["moved"] = moved
        centres = ds.ragged.reduce("moved", "mean").values
        full = np.diff(block.atoms_ptr) > 0
        np.testing.assert_allclose(centres[full], 0, atol=1e-12)


def test_it_undoes_itself(path):
    ds = open_dataset(path)
    back = ds.ragged.reduce(ds.ragged.broadcast("energy"), "mean")
    full = ds.num_atoms.values > 0
    np.testing.assert_allclose(back.values[full], ds.energy.values[full])


def test_wrong_requests_are_named(path):
    ds = open_dataset(path)
    with pytest.raises(LevelError, match="Invalid level 'bond'"):
        ds.ragged.broadcast("energy", "bond")
    with pytest.raises(FieldError, match="from atom to edge"):
        ds.ragged.broadcast("forces", "edge")
    with pytest.raises(FieldError, match="from system to system"):
        ds.ragged.broadcast("energy", "sample")

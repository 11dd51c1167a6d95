"""The engine: what a store looks like in xarray, lazily, and what is no store."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import xarray as xr
import zarr

from alchemi_xr.data.block import Block
from alchemi_xr.errors import NotAStoreError, StoreNotFoundError, UnknownFieldError
from alchemi_xr.ragged import open_dataset
from alchemi_xr.ragged.array import StoreArray, is_lazy, origin
from alchemi_xr.ragged.backend import AlchemiBackend
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.writer import StoreWriter


@pytest.mark.parametrize("chunks", [None, {}, 3, "auto"], ids=str)
def test_shows_what_was_written(path, block, assert_equal, chunks):
    ds = open_dataset(path, chunks=chunks)
    assert_equal(ds, block)
    ds.ragged.validate()
    assert ds.energy.dims == ("sample",)
    assert ds.attrs["generation"] == open_store(path).generation


def test_deleted_samples_are_left_out(holey_path, block, assert_equal):
    live = np.array([0, 1, 4, 5, 6, 7, 9])
    ds = open_dataset(holey_path)
    assert_equal(ds, block.take(live))
    assert ds.ragged.num_samples == 7
    everything = open_dataset(holey_path, drop_deleted=False)
    assert_equal(everything, block)
    np.testing.assert_array_equal(np.flatnonzero(everything.samples_mask), live)


def test_all_deleted(own_path, block, assert_equal):
    StoreWriter(own_path).delete(range(10))
    ds = open_dataset(own_path, chunks={})
    assert ds.sizes["sample"] == ds.sizes["atom"] == 0
    assert_equal(ds, block.take(np.empty(0, dtype=np.int64)))


def test_appended_samples_with_other_fields(own_path, block, make_block, assert_equal):
    more = make_block([2, 0, 6], seed=9, holes=False)
    del more.arrays["shifts"], more.levels["shifts"]
    StoreWriter(own_path).append(more)
    ds = open_dataset(own_path)
    assert_equal(ds, Block.concat([block, more]))
    assert not ds.shifts_present.values[10:].any()


def test_indexing_equals_numpy(holey_path, block):
    """Every kind of xarray indexing, through the map of row ranges."""
    ds = open_dataset(holey_path)
    part = block.take(np.array([0, 1, 4, 5, 6, 7, 9]))
    rng = np.random.default_rng(0)
    for name, dim in (("positions", "atom"), ("neighbor_list", "edge"), ("cell", "sample")):
        values, n = part[name], ds.sizes[dim]
        for key in (
            slice(None),
            slice(2, 7),
            slice(None, None, -1),
            slice(7, 1, -2),
            slice(0, 0),
            slice(1, None, 3),
            -1,
            3,
            [0],
            [],
            rng.integers(-n, n, 9),
            np.arange(n) % 3 == 0,
        ):
            key = np.array(key, dtype=np.int64) if isinstance(key, list) else key
            np.testing.assert_array_equal(ds[name].isel({dim: key}).values, values[key])
        np.testing.assert_array_equal(ds[name][1:4, 1].values, values[1:4, 1])
        np.testing.assert_array_equal(ds[name][[3, 1], ::-1].values, values[[3, 1]][:, ::-1])
        at = xr.DataArray([1, 2, 0], dims="p")
        tail = ds[name].dims[1]
        np.testing.assert_array_equal(
            ds[name].isel({dim: at, tail: xr.DataArray([0, 1, 0], dims="p")}).values,
            values[[1, 2, 0], [0, 1, 0]],
        )
    assert float(ds.energy[2]) == part["energy"][2, 0]
    assert str(ds["name"][2].values) == part["name"][2]


def test_fields_chooses_and_understands_aliases(path):
    ds = open_dataset(path, fields=["numbers", "energies", "dipole"])
    assert set(ds.data_vars) == {"atomic_numbers", "energy", "dipole", "dipole_present"}
    assert set(open_dataset(path, fields="positions").data_vars) == {"positions"}
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        open_dataset(path, fields=["force_"])


# -- the engine -------------------------------------------------------------


def test_xarray_opens_by_engine_and_by_guess(path, block, assert_equal):
    assert_equal(xr.open_dataset(path, engine="alchemi_xr"), block)
    guessed = xr.open_dataset(path)
    assert_equal(guessed, block)
    guessed.ragged.validate()
    assert "num_edges" in guessed.coords


@pytest.mark.parametrize("cache", [True, False])
def test_verbs_push_down_through_xarrays_wrappers(path, block, assert_equal, cache):
    ds = xr.open_dataset(path, engine="alchemi_xr", cache=cache)
    assert isinstance(origin(ds.positions), StoreArray)
    out = ds.ragged.isel([9, 3, 0])
    assert isinstance(origin(out.positions), StoreArray)
    assert_equal(out, block.take(np.array([9, 3, 0])))


def test_chunks_of_xarray_end_at_samples_without_a_warning(path, block, assert_equal):
    ds = xr.open_dataset(path, engine="alchemi_xr", chunks={}, sample_chunks=4)
    assert ds.chunksizes["sample"] == (4, 4, 2)
    ptr = block.atoms_ptr
    assert np.cumsum(ds.chunksizes["atom"]).tolist() == ptr[[4, 8, 10]].tolist()
    assert isinstance(origin(ds.positions), StoreArray)
    assert_equal(ds, block)
    ds.ragged.validate()
    assert_equal(ds.ragged.isel([7, 0]), block.take(np.array([7, 0])))


@pytest.mark.parametrize("chunks", ["auto", {"sample": 10}, {}], ids=str)
def test_other_chunks_of_xarray_are_cut_anew_by_the_verbs(path, block, assert_equal, chunks):
    # Dask itself refuses "auto" for text.
    ds = xr.open_dataset(path, engine="alchemi_xr", chunks=chunks, drop_variables="name")
    del block.arrays["name"], block.levels["name"]
    out = ds.ragged.reduce("forces", "sum")
    np.testing.assert_allclose(out.values.sum(0), block["forces"].sum(0), rtol=1e-4, atol=1e-5)
    assert_equal(ds.ragged.isel([7, 0]), block.take(np.array([7, 0])))


def test_drop_variables_and_options(holey_path):
    ds = xr.open_dataset(
        holey_path, engine="alchemi_xr", drop_variables=["forces", "nothing"], drop_deleted=False
    )
    assert "forces" not in ds
    assert ds.sizes["sample"] == 10
    one = xr.open_dataset(holey_path, engine="alchemi_xr", drop_variables="forces")
    assert "forces" not in one


def test_guess_is_cheap_and_never_raises(path, tmp_path):
    guess = AlchemiBackend().guess_can_open
    assert guess(path)
    assert guess(os.fsencode(path).decode())
    plain = tmp_path / "plain.zarr"
    zarr.create_group(str(plain))
    assert not guess(str(plain))
    broken = tmp_path / "broken.zarr"
    broken.mkdir()
    for text in ("", "[1]", "{", '{"attributes": 3}', '{"attributes": null}', "\xff"):
        (broken / "zarr.json").write_text(text)
        assert not guess(str(broken))
    (broken / "zarr.json").write_bytes(b"\xff\xfe\x00")
    assert not guess(str(broken))
    for other in (None, 3, b"x", str(tmp_path), "https://somewhere.org/x", "a\0b", object()):
        assert not guess(other)
    # As nvalchemi-toolkit writes it.
    (broken / "zarr.json").write_text(
        json.dumps({"attributes": {"num_samples": 1, "fields": {"core": {}, "custom": {}}}})
    )
    assert guess(str(broken))


def test_what_is_no_store(tmp_path):
    with pytest.raises(StoreNotFoundError):
        open_dataset(tmp_path / "nothing")
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    zarr.create_group(str(tmp_path / "plain.zarr"))
    for name in ("file.txt", "folder", "plain.zarr"):
        with pytest.raises(NotAStoreError):
            open_dataset(tmp_path / name)
        with pytest.raises(NotAStoreError):
            xr.open_dataset(str(tmp_path / name), engine="alchemi_xr")


# -- others read it too -----------------------------------------------------


def test_plain_xarray_reads_the_same_numbers(path):
    ours = open_dataset(path)
    plain = xr.open_zarr(path, group="core", consolidated=False)
    for name in plain.data_vars:
        mine, theirs = ours[name], plain[name]
        if name == "neighbor_list":
            first = np.repeat(ours.atoms_ptr.values[:-1], ours.num_edges.values)
            mine = mine + first[:, None]
        np.testing.assert_array_equal(mine.values.reshape(theirs.shape), theirs.values)
        assert theirs.dims[0] == mine.dims[0]
        if mine.ndim == theirs.ndim:
            assert mine.dims == theirs.dims
    snapshot = open_store(path)
    assert set(plain.data_vars) == {n for n in snapshot.fields if snapshot.group(n) == "core"}


@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf", "scipy"])
def test_written_to_netcdf_it_stays_ragged(path, block, tmp_path, engine):
    pytest.importorskip({"netcdf4": "netCDF4"}.get(engine, engine))
    ds = open_dataset(path)
    if engine == "scipy":
        # netCDF 3 knows no bool, no 64-bit whole numbers; xarray narrows what fits.
        ds = ds.drop_vars("name")
    file = str(tmp_path / "samples.nc")
    ds.to_netcdf(file, engine=engine)
    with xr.open_dataset(file, engine=engine) as back:
        back.ragged.validate()
        assert back.num_atoms.attrs["sample_dimension"] == "atom"
        out = back.ragged.isel([4, 2]).load()
        np.testing.assert_array_equal(out.positions, block.take(np.array([4, 2]))["positions"])


# -- laziness and memory ----------------------------------------------------


def test_everything_is_lazy_and_small_when_pickled(path, block, assert_equal):
    ds = open_dataset(path, chunks=None).drop_vars(["atoms_ptr", "edges_ptr"])
    for name in ds.data_vars:
        assert is_lazy(ds[name]), name
    text = pickle.dumps(open_dataset(path))
    assert_equal(pickle.loads(text), block)
    chosen = open_dataset(path).ragged.isel([5, 4, 9])
    assert_equal(pickle.loads(pickle.dumps(chosen)), block.take(np.array([5, 4, 9])))
    chunked = open_dataset(path, chunks=3)
    assert_equal(pickle.loads(pickle.dumps(chunked)), block)


def test_pickle_does_not_grow_with_what_was_read(tmp_path, make_block):
    path = str(tmp_path / "s.zarr")
    StoreWriter(path).write(make_block([50] * 100))
    ds = open_dataset(path)
    before = len(pickle.dumps(ds))
    ds.positions.values
    assert len(pickle.dumps(ds)) == before
    cached = open_dataset(path, cache=True)
    cached.positions.values
    assert len(pickle.dumps(cached)) > before


def _write(path: str, samples: int) -> None:
    atoms = 20
    rng = np.random.default_rng(0)
    block = Block(
        np.arange(samples + 1) * atoms,
        np.zeros(samples + 1, dtype=np.int64),
        {
            "atomic_numbers": np.ones(samples * atoms, dtype=np.int64),
            "positions": rng.normal(size=(samples * atoms, 3)),
            "energy": rng.normal(size=(samples, 1)),
        },
        {"atomic_numbers": "atom", "positions": "atom", "energy": "system"},
    )
    writer = StoreWriter(path)
    writer.write(block)
    writer.delete(range(0, samples, 7))


def _peak(call) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_opening_costs_pointers_alone(tmp_path):
    small, large = 20_000, 80_000
    for n in (small, large):
        _write(str(tmp_path / str(n)), n)
    open_dataset(str(tmp_path / str(small)))  # imports and caches
    peaks = {
        n: _peak(lambda path=str(tmp_path / str(n)): open_dataset(path)) for n in (small, large)
    }
    growth = (peaks[large] - peaks[small]) / (large - small)
    # A sample has two pointers and two counts of 8 bytes, as stored and as shown, row ranges
    # of two levels, masks and what is live: some hundred bytes. Its atoms take 640.
    assert growth < 250, f"{growth:.0f} bytes a sample"


def test_selecting_and_reducing_hold_no_field(tmp_path, monkeypatch):
    from alchemi_xr.ragged import reduce as module

    samples = 120_000
    path = str(tmp_path / "s")
    _write(path, samples)
    ds = open_dataset(path)
    ds.ragged.where(ds.energy > 0)
    peak = _peak(lambda: ds.ragged.where(ds.energy > 0))
    assert peak < samples * 250
    monkeypatch.setattr(module, "READ_BYTES", 2**20)
    peak = _peak(lambda: ds.ragged.reduce("positions", "mean"))
    # The field is 49 MB; blocks of 1 MB, stored chunks of 1.5 MB, a result of 2.5 MB, pointers.
    assert peak < 20 * 2**20


def test_dask_names_tell_stores_and_selections_apart(tmp_path, make_block):
    names = set()
    for seed in (0, 1):
        path = str(tmp_path / "s.zarr")
        StoreWriter(path).write(make_block([2, 3, 4], seed=seed), overwrite=True)
        ds = open_dataset(path, chunks=1)
        names |= {
            ds.positions.data.name,
            ds.forces.data.name,
            ds.ragged.isel([0, 1]).positions.data.name,
            ds.ragged.isel([1, 0]).positions.data.name,
        }
        assert open_dataset(path, chunks=1).positions.data.name in names
    assert len(names) == 8


def test_stores_in_memory(block, assert_equal):
    store = zarr.storage.MemoryStore()
    StoreWriter(store).write(block)
    assert_equal(open_dataset(store, chunks=2), block)
    assert_equal(open_dataset(store).ragged.head(2), block.take(np.arange(2)))


def test_importing_and_opening_needs_no_torch(path):
    code = (
        "import sys, alchemi_xr.ragged\n"
        "assert 'xarray' not in sys.modules\n"
        f"ds = alchemi_xr.ragged.open_dataset({path!r}, chunks=2)\n"
        "ds.ragged.isel([3, 1]).ragged.reduce('positions', 'sum').compute()\n"
        "assert 'torch' not in sys.modules and 'warp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())

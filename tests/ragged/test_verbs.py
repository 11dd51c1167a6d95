"""map_blocks, groupby, to_padded, trajectory, concat, batches, tables and repr, each beside
the same done sample by sample in plain Python, for arrays in a store, in memory and on Dask."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import (
    ArgumentTypeError,
    ConfigError,
    FieldError,
    IndexRangeError,
    StoreNotFoundError,
)
from alchemi_xr.ragged import concat, from_padded, open_dataset, open_mfdataset
from alchemi_xr.ragged.chunks import find_partition, is_aligned
from alchemi_xr.ragged.conventions import level_of, structure
from alchemi_xr.store.writer import StoreWriter


@pytest.fixture(params=["store", "memory", "dask", "computed"])
def ds(request, path):
    if request.param == "store":
        return open_dataset(path)
    if request.param == "memory":
        return open_dataset(path).load()
    ds = open_dataset(path, chunks=3)
    if request.param == "computed":
        ds = ds.assign(positions=ds.positions * 1.0, energy=ds.energy + 0.0)
    return ds


def loop(block, i):
    """Sample i of a block as a dict of arrays."""
    one = block.take(np.array([i]))
    return one.arrays


def centered(ds, scale=1.0):
    mean = ds.ragged.reduce("positions", "mean")
    out = (ds.positions - ds.ragged.broadcast(mean)) * scale
    return out.rename("centered").assign_attrs(units="Å")


def test_map_blocks_gives_what_the_loop_gives(ds, block):
    out = ds.ragged.map_blocks(centered, scale=2.0)
    want = np.concatenate(
        [2 * (p - p.mean(0)) for p in (loop(block, i)["positions"] for i in range(10)) if len(p)]
    )
    assert out.dims == ("atom", "xyz")
    assert out.attrs["units"] == "Å"
    np.testing.assert_allclose(out.values, want)
    assert bool(out.chunks) == bool(ds.positions.chunks)


def test_map_blocks_of_a_dataset(ds, block):
    def both(ds):
        first = ds.ragged.reduce("forces", "norm")
        return xr.Dataset({"fnorm": first, "twice": ds.shifts * 2}, attrs={"made": "here"})

    out = ds.ragged.map_blocks(both)
    out.ragged.validate()
    assert out.attrs["made"] == "here"
    assert "block_start" not in out.attrs
    np.testing.assert_array_equal(out.twice, 2 * block["shifts"])
    want = [np.sqrt((loop(block, i)["forces"].astype(float) ** 2).sum()) for i in range(10)]
    np.testing.assert_allclose(out.fnorm, want, rtol=1e-6)
    assert out.fnorm.dtype == np.float32


def test_map_blocks_runs_by_block_and_says_where_each_starts(path):
    ds = open_dataset(path, chunks=4)
    starts = []

    def note(ds):
        starts.append((ds.attrs["block_start"], ds.sizes["sample"]))
        return ds.energy * 1

    out = ds.ragged.map_blocks(note)
    assert starts == [(0, 1)]
    out.compute(scheduler="sync")
    assert sorted(starts[1:]) == [(0, 4), (4, 4), (8, 2)]


def test_map_blocks_refuses_what_it_cannot_join(ds):
    with pytest.raises(FieldError, match="blocks cannot be joined"):
        ds.ragged.map_blocks(lambda ds: ds.positions.mean("atom"))
    with pytest.raises(ArgumentTypeError, match="ndarray"):
        ds.ragged.map_blocks(lambda ds: ds.positions.values)
    with pytest.raises(FieldError, match="another shape"):
        ds.ragged.map_blocks(lambda ds: ds.energy[:1]).compute()


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "norm"])
@pytest.mark.parametrize("name", ["energy", "positions", "forces", "shifts"])
def test_group_reductions_equal_the_loop(ds, block, name, op):
    group = xr.DataArray(np.arange(10) % 3, dims="sample", name="kind")
    out = ds.ragged.groupby(group).reduce(name, op)
    numpy_op = {"norm": lambda x, axis: np.sqrt((x.astype(float) ** 2).sum())}.get(
        op, getattr(np, op, None)
    )
    assert out.dims[0] == "kind"
    assert out.attrs["units"] == ds[name].attrs["units"]
    assert bool(out.chunks) == bool(ds[name].chunks)
    for kind in range(3):
        rows = np.concatenate([loop(block, i)[name] for i in range(10) if i % 3 == kind])
        want = numpy_op(rows.astype(np.float64), axis=0)
        got = out.sel(kind=kind).values
        np.testing.assert_allclose(
            got, want[0] if np.size(want) == 1 and np.ndim(want) else want, rtol=1e-5
        )
    assert out.dtype == ds[name].dtype


def test_groups_are_samples_of_one_label(ds, block):
    by = xr.DataArray(np.array(list("abcabcabca"), dtype=object), dims="sample", name="kind")
    groups = ds.ragged.groupby(by)
    assert len(groups) == 3
    assert groups.count().values.tolist() == [4, 3, 3]
    for k, (label, part) in enumerate(groups):
        assert label == "abc"[k]
        np.testing.assert_array_equal(
            part.positions.values, block.take(np.arange(k, 10, 3))["positions"]
        )
        part.ragged.validate()
    np.testing.assert_array_equal(groups["b"].energy, block["energy"][1::3, 0])
    with pytest.raises(IndexRangeError, match="no sample has kind 'z'"):
        groups["z"]
    with pytest.raises(ConfigError, match="mean"):
        groups.reduce("energy", "meen")
    means = groups.map(lambda ds: ds.energy.mean())
    np.testing.assert_allclose(means, groups.mean("energy"))


def test_groups_without_atoms_are_nan_not_infinite(path):
    ds = open_dataset(path)  # samples 1 and 6 have no atoms
    group = xr.DataArray(np.isin(np.arange(10), [1, 6]), dims="sample", name="empty")
    for op in ("min", "max", "mean"):
        out = ds.ragged.groupby(group).reduce("positions", op)
        assert np.isnan(out.sel(empty=True)).all()
        assert np.isfinite(out.sel(empty=False)).all()
    with pytest.raises(FieldError):
        ds.ragged.groupby(group).reduce("atomic_numbers", "max")


def test_padded_and_back(ds, block, assert_equal):
    padded = ds.ragged.to_padded()
    assert padded.positions.dims == ("sample", "atom_slot", "xyz")
    assert padded.positions.shape == (10, 7, 3)
    assert bool(padded.forces.chunks) == bool(ds.forces.chunks)
    for i, n in enumerate(np.diff(block.atoms_ptr)):
        np.testing.assert_array_equal(padded.positions[i, :n], loop(block, i)["positions"])
        assert np.isnan(padded.positions[i, n:]).all()
        assert (padded.atomic_numbers[i, n:] == 0).all()
    assert (padded.neighbor_list.values[0, padded.num_edges.values[0] :] == -1).all()
    back = from_padded(padded)
    back.ragged.validate()
    assert_equal(back, block)
    for name in ds.variables:
        assert back[name].dtype == ds[name].dtype
        if name not in ("atoms_ptr",):
            assert back[name].attrs == ds[name].attrs, name


def test_padded_fill_must_fit(ds):
    assert (ds.ragged.to_padded({"forces": 0.0}).forces[1] == 0).all()
    with pytest.raises(FieldError, match="'atomic_numbers' cannot hold the fill"):
        ds.ragged.to_padded(np.nan)
    padded = ds.ragged.to_padded()
    with pytest.raises(FieldError, match="num_atoms does not fit"):
        from_padded(padded.assign_coords(num_atoms=padded.num_atoms + 5))
    with pytest.raises(FieldError, match="no num_atoms"):
        from_padded(padded.drop_vars("num_atoms"))


@given(st.lists(st.integers(0, 5), max_size=7), st.integers(1, 4), st.booleans())
@settings(max_examples=12, deadline=None)
def test_any_sizes_pad_and_map(tmp_path_factory, make_block, counts, size, dask):
    block = make_block([*counts, 2], seed=len(counts))
    path = str(tmp_path_factory.mktemp("h") / "s.zarr")
    StoreWriter(path).write(block)
    ds = open_dataset(path, chunks=size if dask else None).ragged.head(len(counts))
    block = block.take(np.arange(len(counts)))
    back = from_padded(ds.ragged.to_padded())
    np.testing.assert_array_equal(back.positions, block["positions"])
    np.testing.assert_array_equal(back.neighbor_list, block["neighbor_list"])
    np.testing.assert_allclose(
        ds.ragged.map_blocks(lambda d: d.ragged.reduce("positions", "sum")),
        [loop(block, i)["positions"].sum(0) for i in range(len(counts))] or np.zeros((0, 3)),
        atol=1e-12,
    )
    if any(counts):
        twice = concat([ds, ds])
        np.testing.assert_array_equal(twice.positions, np.tile(block["positions"], (2, 1)))


# -- trajectories ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """Three systems of 2, 5 and 3 atoms, interleaved frames, written out of order."""
    rng = np.random.default_rng(1)
    sizes, system = {7: 2, 3: 5, 9: 3}, rng.permutation(np.repeat([7, 3, 9], [6, 8, 5]))
    step = np.zeros(len(system), dtype=int)
    for label in sizes:
        step[system == label] = rng.permutation((system == label).sum()) * 10
    counts = np.array([sizes[s] for s in system])
    ptr = counts_to_ptr(counts)
    numbers = np.concatenate(
        [np.arange(n) + label for n, label in zip(counts, system, strict=True)]
    )
    block = Block(
        ptr,
        np.zeros_like(ptr),
        {
            "positions": rng.normal(size=(ptr[-1], 3)),
            "atomic_numbers": numbers,
            "energy": rng.normal(size=(len(system), 1)),
            "system_id": system[:, None],
            "step": step,
        },
        {"positions": "atom", "atomic_numbers": "atom"}
        | dict.fromkeys(["energy", "system_id", "step"], "system"),
    )
    path = str(tmp_path_factory.mktemp("t") / "frames.zarr")
    StoreWriter(path).write(block)
    return path, block


@pytest.mark.parametrize("chunks", [None, 4])
def test_trajectory_is_dense_lazy_and_in_the_order_of_time(frames, chunks):
    path, block = frames
    ds = open_dataset(path, chunks=chunks)
    seen = {}
    for label, dense in ds.ragged.groupby("system_id").trajectories(time_step=0.5):
        at = np.flatnonzero(block["system_id"][:, 0] == label)
        at = at[np.argsort(block["step"][at])]
        want = np.stack([loop(block, i)["positions"] for i in at])
        assert dense.positions.dims == ("frame", "atom", "xyz")
        assert dense.positions.chunks
        np.testing.assert_array_equal(dense.positions, want)
        assert dense.atomic_numbers.dims == ("atom",)
        np.testing.assert_array_equal(dense.time, np.arange(len(at)) * 5.0)
        assert dense.time.attrs["units"] == "fs"
        np.testing.assert_array_equal(dense.energy, block["energy"][at, 0])
        xr.testing.assert_identical(dense.load(), ds.ragged.trajectory(label, time_step=0.5).load())
        seen[label] = len(at)
    assert seen == {7: 6, 3: 8, 9: 5}


def test_trajectory_says_what_is_no_trajectory(frames, path):
    ds = open_dataset(frames[0])
    with pytest.raises(FieldError, match="no sample has system_id 4"):
        ds.ragged.trajectory(4)
    with pytest.raises(FieldError, match="not frames of one system"):
        ds.ragged.trajectory()
    with pytest.raises(FieldError, match="change from frame to frame"):
        ds.ragged.isel([0, 0]).assign(
            atomic_numbers=("atom", np.arange(2 * int(ds.num_atoms[0])))
        ).ragged.trajectory()


# -- several stores -------------------------------------------------------------------------


def test_stores_open_as_one(tmp_path, make_block):
    blocks = [make_block([2, 0, 3], seed=1), make_block([4], seed=2, holes=False)]
    del blocks[1].arrays["charge" if "charge" in blocks[1].arrays else "feature"]
    for k, block in enumerate(blocks):
        block.levels = {n: v for n, v in block.levels.items() if n in block.arrays}
        StoreWriter(tmp_path / f"part{k}.zarr").write(block)
    ds = open_mfdataset(str(tmp_path / "part*.zarr"))
    ds.ragged.validate()
    assert ds.store_index.values.tolist() == [0, 0, 0, 1]
    assert len(ds.store_index.attrs["stores"]) == 2
    assert ds.positions.chunks
    np.testing.assert_array_equal(ds.positions, np.concatenate([b["positions"] for b in blocks]))
    assert ds.feature_present.values.tolist() == [True, True, True, False]
    assert np.isnan(ds.feature.values[5:]).all()
    # What was joined is chosen and cut like any other.
    part = ds.ragged.where(ds.store_index == 1)
    np.testing.assert_array_equal(part.positions, blocks[1]["positions"])
    picked = ds.ragged.isel([3, 0])
    np.testing.assert_array_equal(
        picked.forces, np.concatenate([blocks[1]["forces"], loop(blocks[0], 0)["forces"]])
    )
    with pytest.raises(StoreNotFoundError, match="fits the pattern"):
        open_mfdataset(str(tmp_path / "nothing*.zarr"))


def test_concat_keeps_memory_in_memory_and_widens(path):
    one = open_dataset(path).load()
    other = one.assign(forces=one.forces.astype(np.float64))
    both = concat([one, other])
    assert both.forces.dtype == np.float64
    assert not both.forces.chunks
    assert both.dipole_present.values.tolist() == one.dipole_present.values.tolist() * 2
    wrong = one.assign(energy=one.energy.assign_attrs(units="kcal/mol"))
    with pytest.raises(FieldError, match="other units"):
        concat([one, wrong])
    with pytest.raises(ArgumentTypeError):
        concat([])


def test_concat_of_computed_blocks_stays_whole(path):
    ds = open_dataset(path, chunks=3)
    both = concat([ds, ds.ragged.isel([4, 2])])
    struct = structure(both)
    sizes = find_partition(both, struct)
    for name in ("positions", "energy", "shifts"):
        assert is_aligned(both[name].variable, struct, sizes)
        assert level_of(both[name].dims)


# -- out of xarray --------------------------------------------------------------------------


def test_batches_hold_the_samples(ds, block):
    pytest.importorskip("torch")
    batch = ds.ragged.to_batch()
    assert batch.num_graphs == 10
    np.testing.assert_array_equal(batch.positions.numpy(), block["positions"])
    assert batch.energy.shape == (10, 1)
    assert not batch.has("dipole")[1]
    local = batch.to_block()["neighbor_list"]
    np.testing.assert_array_equal(local, block["neighbor_list"])
    seen = list(ds.ragged.iter_batches(4))
    assert [b.num_graphs for b in seen] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([b.energy for b in seen]), block["energy"])
    seen = list(ds.ragged.iter_batches(max_atoms=8, shuffle=True, seed=1))
    assert all(b.num_nodes <= 8 for b in seen)
    order = np.concatenate([b.dataset_index[:, 0] for b in seen])
    assert sorted(order) == sorted(block["dataset_index"][:, 0])
    assert order.tolist() != block["dataset_index"][:, 0].tolist()
    assert len(list(ds.ragged.iter_batches(4, drop_last=True))) == 2
    with pytest.raises(ConfigError, match="more atoms than a batch"):
        ds.ragged.iter_batches(max_atoms=6)
    with pytest.raises(ConfigError, match="batch_size"):
        ds.ragged.iter_batches(0)


def test_tables_have_one_row_a_sample_or_atom(ds, block):
    pytest.importorskip("pandas")
    table = ds.ragged.to_dataframe()
    assert len(table) == 10
    np.testing.assert_array_equal(table["energy"], block["energy"][:, 0])
    np.testing.assert_array_equal(table["cell_x_y"], block["cell"][:, 0, 1])
    assert table["name"].tolist() == [f"sample-{i}" for i in range(10)]
    assert "positions_x" not in table
    atoms = ds.ragged.to_dataframe("atom", ["forces"])
    assert list(atoms.columns) == ["forces_x", "forces_y", "forces_z"]
    assert atoms.loc[(2, 1)].to_numpy().tolist() == loop(block, 2)["forces"][1].tolist()


def test_repr_tells_counts_sizes_and_blocks(ds):
    text = repr(ds.ragged)
    assert "10" in text.splitlines()[1]
    assert "27 (median 2, mean 2.7)" in text
    assert ("blocks" in text) == bool(ds.positions.chunks)
    page = ds.ragged._repr_html_()
    assert "<svg" in page
    assert "positions" in page
    torn = ds.isel(sample=[0, 1])
    assert "ds.ragged.isel" in repr(torn.ragged)
    assert "ds.ragged.isel" in torn.ragged._repr_html_()


def test_deleted_samples_are_left_out_shown_or_shown_alone(holey_path, block):
    assert open_dataset(holey_path).sizes["sample"] == 7
    kept = open_dataset(holey_path, deleted="keep")
    assert kept.samples_mask.values.sum() == 7
    only = xr.open_dataset(holey_path, engine="alchemi_xr", deleted="only")
    only.ragged.validate()
    np.testing.assert_array_equal(only.positions, block.take(np.array([2, 3, 8]))["positions"])
    assert not only.samples_mask.any()
    assert open_dataset(holey_path, drop_deleted=False).sizes["sample"] == 10
    with pytest.raises(ConfigError, match="'gone' is not understood"):
        open_dataset(holey_path, deleted="gone")
    with pytest.raises(ConfigError, match="contradicts"):
        open_dataset(holey_path, deleted="only", drop_deleted=True)


def test_composed_selections_read_only_their_rows(path, monkeypatch):
    from alchemi_xr.ragged.array import StoreArray

    ds = open_dataset(path)
    limit = float(np.median(ds.energy))
    read = {}
    physical = StoreArray._physical

    def count(self, rows):
        number = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        read[self.name] = read.get(self.name, 0) + number
        return physical(self, rows)

    monkeypatch.setattr(StoreArray, "_physical", count)
    out = ds.ragged.where(ds.energy < limit).ragged.isel(sample=slice(0, 3))
    assert read == {"energy": 10}
    values = out.positions.values
    assert read == {"energy": 10, "positions": len(values)}
    assert len(values) == int(out.num_atoms.sum())
    out.ragged.reduce("forces", "norm")
    assert read["forces"] == len(values)


@pytest.mark.slow
def test_blocks_run_on_workers_that_never_saw_the_accessor(path, block):
    from distributed import Client, LocalCluster

    ds = open_dataset(path, chunks=3)
    sums = [loop(block, i)["positions"].sum(0) for i in range(10)]
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster),
    ):
        out = ds.ragged.map_blocks(lambda d: d.ragged.reduce("positions", "sum")).compute()
        np.testing.assert_allclose(out, sums)
        assert ds.ragged.to_padded().compute().positions.shape == (10, 7, 3)

"""Every selection equals the same done on the block, and reads no row it does not need."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.errors import FieldError, IndexRangeError, UnknownFieldError
from alchemi_xr.ragged import open_dataset
from alchemi_xr.ragged.chunks import find_partition, is_aligned
from alchemi_xr.ragged.conventions import level_of, structure

CHUNKS = [None, 3, "200B"]
PICKS = [
    slice(None),
    slice(2, 6),
    slice(None, None, -1),
    slice(8, 2, -2),
    [0],
    [],
    [9, 0, 4],
    [3, 3, 3],
    [-1, -10],
    4,
    np.arange(10) % 2 == 0,
    [True, False] * 5,
]


def computed(ds):
    """The same values, none of them any longer a plain field of the store."""
    return ds.assign({n: v + v.dtype.type(0) for n, v in ds.items() if v.dtype.kind in "fi"})


@pytest.fixture(params=CHUNKS, ids=str)
def chunks(request):
    return request.param


@pytest.fixture(params=["stored", "computed"])
def ds(request, path, chunks):
    ds = open_dataset(path, chunks=chunks)
    if request.param == "stored":
        return ds
    if chunks is None:
        return ds.load()
    return computed(ds)


@pytest.mark.parametrize("pick", PICKS, ids=str)
def test_isel_is_the_block_taken(ds, block, assert_equal, pick):
    positions = np.atleast_1d(np.arange(10)[pick])
    out = ds.ragged.isel(pick)
    assert_equal(out, block.take(positions.astype(np.int64)))
    out.ragged.validate()
    assert out.attrs == ds.attrs
    assert list(out.data_vars) == list(ds.data_vars)
    assert out.energy.attrs == ds.energy.attrs


@pytest.mark.parametrize("as_computed", [False, True])
@pytest.mark.parametrize("pick", PICKS, ids=str)
def test_blocks_stay_whole_samples(path, pick, as_computed):
    ds = open_dataset(path, chunks=3)
    if as_computed:
        ds = computed(ds)
    out = ds.ragged.isel(pick)
    struct = structure(out)
    sizes = find_partition(out, struct)
    for var in out.variables.values():
        if level_of(var.dims) and var.chunks:
            assert is_aligned(var, struct, sizes)
    assert out.positions.chunks


@given(
    st.lists(st.lists(st.integers(-10, 9), max_size=12), min_size=1, max_size=3),
    st.sampled_from(CHUNKS),
    st.booleans(),
)
def test_selections_compose(store_and_block, assert_equal, picks, chunks, as_computed):
    path, block = store_and_block
    ds = open_dataset(path, chunks=chunks)
    if as_computed and chunks is not None:
        ds = computed(ds)
    for pick in picks:
        n = block.num_samples
        pick = np.array([p % n for p in pick] if n else [], dtype=np.int64)
        ds, block = ds.ragged.isel(pick), block.take(pick)
    assert_equal(ds, block)


@pytest.fixture(scope="module")
def store_and_block(tmp_path_factory):
    from alchemi_xr.store.writer import StoreWriter

    here = tmp_path_factory.mktemp("select")
    rng = np.random.default_rng(5)
    build = _builder()
    block = build(rng.integers(0, 6, 10).tolist(), seed=3)
    StoreWriter(str(here / "s.zarr")).write(block)
    return str(here / "s.zarr"), block


def _builder():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location(
        "ragged_conftest", Path(__file__).with_name("conftest.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_block


def test_where_takes_masks_arrays_and_functions(ds, block, assert_equal):
    mask = block["energy"][:, 0] > 0
    want = block.take(np.flatnonzero(mask))
    assert_equal(ds.ragged.where(ds.energy > 0), want)
    assert_equal(ds.ragged.where(mask), want)
    assert_equal(ds.ragged.where(lambda d: d.energy > 0), want)


def test_where_of_a_reduction(ds, block, assert_equal):
    big = (ds.forces**2).sum("xyz") ** 0.5
    out = ds.ragged.where(ds.ragged.reduce(big, "max", initial=0) > 1.5)
    norms = np.linalg.norm(block["forces"], axis=1)
    keep = [
        i for i in range(10) if (norms[block.atoms_ptr[i] : block.atoms_ptr[i + 1]] > 1.5).any()
    ]
    assert 0 < len(keep) < 10
    assert_equal(out, block.take(np.array(keep)))


def test_sel_by_label_labels_and_range(ds, block, assert_equal):
    index = block["dataset_index"][:, 0]
    at = {int(v): i for i, v in enumerate(index)}
    assert_equal(ds.ragged.sel(dataset_index=104), block.take(np.array([at[104]])))
    assert_equal(
        ds.ragged.sel(dataset_index=[107, 101, 107]),
        block.take(np.array([at[107], at[101], at[107]])),
    )
    inside = np.flatnonzero((index >= 103) & (index <= 106))
    assert_equal(ds.ragged.sel(dataset_index=slice(103, 106)), block.take(inside))
    assert_equal(
        ds.ragged.sel(dataset_index=slice(103, 106), name=["sample-1", "sample-2", "sample-5"]),
        block.take(np.array([i for i in inside if i in (1, 2, 5)], dtype=np.int64)),
    )
    assert_equal(ds.ragged.sel(name="sample-7"), block.take(np.array([7])))


def test_sel_takes_every_sample_with_a_label(path, block, assert_equal):
    ds = open_dataset(path).assign(config=("sample", np.array(list("abacabaabb"))))
    out = ds.ragged.sel(config=["b", "c"])
    assert_equal(out.drop_vars("config"), block.take(np.array([1, 5, 8, 9, 3])))
    assert out.config.values.tolist() == ["b", "b", "b", "b", "c"]


def test_sortby_is_stable_both_ways_and_puts_nan_last(path, block, assert_equal):
    key = np.array([2.0, 1.0, np.nan, 1.0, 2.0, 0.0, np.nan, 1.0, 3.0, 0.0])
    ds = open_dataset(path).assign(key=("sample", key))
    up = ds.ragged.sortby("key")
    assert_equal(up.drop_vars("key"), block.take(np.array([5, 9, 1, 3, 7, 0, 4, 8, 2, 6])))
    down = ds.ragged.sortby("key", ascending=False)
    assert_equal(down.drop_vars("key"), block.take(np.array([8, 0, 4, 1, 3, 7, 5, 9, 2, 6])))
    by_array = ds.ragged.sortby(-ds.key)
    assert by_array.key.values[:2].tolist() == [3.0, 2.0]


def test_head_and_sample(ds, block, assert_equal):
    assert_equal(ds.ragged.head(3), block.take(np.arange(3)))
    assert_equal(ds.ragged.head(99), block)
    drawn = ds.ragged.sample(4, seed=1)
    index = np.searchsorted(
        np.sort(block["dataset_index"][:, 0]), drawn.dataset_index.values
    )  # dataset_index is a permutation: it names the samples
    names = [int(n.split("-")[1]) for n in drawn.name.values]
    assert names == sorted(set(names))
    assert len(index) == 4
    assert_equal(drawn, block.take(np.array(names)))


def test_deleted_samples_and_selections_compose(holey_path, block, assert_equal, chunks):
    ds = open_dataset(holey_path, chunks=chunks)
    live = np.array([0, 1, 4, 5, 6, 7, 9])
    assert_equal(ds.ragged.isel([6, 2, 0]), block.take(live[[6, 2, 0]]))


def test_other_variables_and_indexes_follow(path):
    ds = open_dataset(path).assign_coords(sample=[f"s{i}" for i in range(10)])
    ds["extra"] = ("atom", np.arange(ds.sizes["atom"]))
    ds["scalar"] = 3.0
    ds["axis"] = ("xyz", [1.0, 2.0, 3.0])
    out = ds.ragged.isel([9, 2])
    assert out.sample.values.tolist() == ["s9", "s2"]
    assert out.extra.values.tolist() == [*range(26, 27), *range(3, 8)]
    assert float(out.scalar) == 3.0
    assert out.axis.values.tolist() == [1.0, 2.0, 3.0]


def test_a_transposed_variable_follows(path, block, chunks):
    ds = open_dataset(path, chunks=chunks)
    ds["positions"] = ds.positions.transpose("xyz", "atom")
    out = ds.ragged.isel([4, 0])
    want = block.take(np.array([4, 0]))["positions"]
    assert out.positions.dims == ("xyz", "atom")
    np.testing.assert_array_equal(out.positions.values.T, want)


def test_a_sliced_axis_is_kept(path, block, chunks):
    ds = open_dataset(path, chunks=chunks).isel(xyz=[0, 2])
    out = ds.ragged.isel([4, 0])
    want = block.take(np.array([4, 0]))["positions"][:, [0, 2]]
    np.testing.assert_array_equal(out.positions.values, want)


def test_choice_of_variables_keeps_the_pointers(path, block):
    ds = open_dataset(path)
    out = ds.ragged[["forces"]].ragged.isel([8, 2])
    assert list(out.data_vars) == ["forces"]
    np.testing.assert_array_equal(out.forces, block.take(np.array([8, 2]))["forces"])
    assert list(ds.ragged["energy"].data_vars) == ["energy"]
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        ds.ragged[["force"]]
    # Plain ds[[...]] with a sample-level variable keeps the counts, which suffice.
    again = ds[["energy", "forces"]].ragged.isel([8, 2])
    np.testing.assert_array_equal(again.forces, out.forces)
    with pytest.raises(FieldError, match=r"(?s)not ragged.*ds.ragged\[\[...\]\]"):
        ds[["forces"]].ragged.isel([0])


@pytest.mark.parametrize("pick", [[10], [-11], 10, np.ones(9, dtype=bool), [0.5]], ids=str)
def test_positions_out_of_range(path, pick):
    with pytest.raises(IndexRangeError):
        open_dataset(path).ragged.isel(pick)


def test_wrong_conditions_and_keys_are_named(path):
    ds = open_dataset(path)
    with pytest.raises(FieldError, match=r"(?s)not one value a sample.*ragged.reduce"):
        ds.ragged.where(ds.atomic_numbers > 6)
    with pytest.raises(FieldError, match="no mask"):
        ds.ragged.where(ds.energy)
    with pytest.raises(IndexRangeError, match="of another Dataset"):
        ds.ragged.where(ds.ragged.head(3).energy > 0)
    with pytest.raises(IndexRangeError, match="no sample has dataset_index 7 "):
        ds.ragged.sel(dataset_index=[7, 8, 100])
    with pytest.raises(UnknownFieldError, match="Nearest: 'energy'"):
        ds.ragged.sortby("energie")
    with pytest.raises(FieldError, match="not one value a sample"):
        ds.ragged.sortby("cell")
    with pytest.raises(IndexRangeError, match="more samples asked for"):
        ds.ragged.sample(11)


# -- nothing is read that is not needed -------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Rows asked of the snapshot, by field, from the moment the test clears it."""
    from alchemi_xr.store.reader import Snapshot

    log: dict[str, list[int]] = {}
    read_rows, take_rows = Snapshot.read_rows, Snapshot.take_rows
    inside = []

    def read(self, name, start, stop):
        if not inside:
            log.setdefault(name, []).extend(range(start, stop))
        return read_rows(self, name, start, stop)

    def take(self, name, rows):
        # What it reads in turn is whole chunks; the objects touched have their own test.
        log.setdefault(name, []).extend(np.asarray(rows).tolist())
        inside.append(name)
        try:
            return take_rows(self, name, rows)
        finally:
            inside.pop()

    monkeypatch.setattr(Snapshot, "read_rows", read)
    monkeypatch.setattr(Snapshot, "take_rows", take)
    return log


def test_a_selection_reads_only_its_rows(path, block, reads, chunks):
    ds = open_dataset(path, chunks=chunks)
    assert reads == {}
    out = ds.ragged.where(ds.energy > 0).ragged.isel(slice(0, 2))
    assert set(reads) == {"energy"}
    reads.clear()
    chosen = np.flatnonzero(block["energy"][:, 0] > 0)[:2]
    out.positions.values
    want = [r for i in chosen for r in range(block.atoms_ptr[i], block.atoms_ptr[i + 1])]
    assert sorted(set(reads.pop("positions"))) == sorted(want)
    assert reads == {}


def test_selecting_reads_nothing(path, reads, chunks):
    ds = open_dataset(path, chunks=chunks)
    ds.ragged.isel([5, 1]).ragged.head(1)
    ds.ragged.sample(3, seed=0)
    repr(ds)
    assert reads == {}


def test_sort_then_head_reads_the_key_and_the_head(path, block, reads):
    ds = open_dataset(path)
    first = ds.ragged.sortby("energy").ragged.head(1)
    assert set(reads) == {"energy"}
    reads.clear()
    first.load()
    i = int(np.argmin(block["energy"][:, 0]))
    own = set(range(block.atoms_ptr[i], block.atoms_ptr[i + 1]))
    assert set(reads["forces"]) == own
    assert set(reads["energy"]) == {i}


class _Counting:
    """Names of the objects asked of a Zarr store."""

    def __init__(self, path):
        from zarr.storage import LocalStore, WrapperStore

        keys = self.keys = []

        class Store(WrapperStore):
            async def get(self, key, *args, **kwargs):
                keys.append(key)
                return await self._store.get(key, *args, **kwargs)

            async def get_partial_values(self, prototype, key_ranges):
                key_ranges = list(key_ranges)
                keys.extend(k for k, _ in key_ranges)
                return await self._store.get_partial_values(prototype, key_ranges)

            def _with_store(self, store):
                return type(self)(store)

        self.store = Store(LocalStore(path, read_only=True))


def test_a_selection_touches_only_the_objects_of_its_rows(tmp_path, make_block):
    from alchemi_xr.store.codecs import ZarrArrayConfig, ZarrWriteConfig
    from alchemi_xr.store.writer import StoreWriter

    block = make_block([4] * 50, seed=2)
    path = str(tmp_path / "chunked.zarr")
    array = ZarrArrayConfig(chunk_size=20)
    StoreWriter(path, ZarrWriteConfig(core=array, custom=array, meta=array)).write(block)
    counting = _Counting(path)
    ds = open_dataset(counting.store)
    counting.keys.clear()
    out = ds.ragged.isel([12, 40])
    assert [k for k in counting.keys if "/c/" in k] == []
    np.testing.assert_array_equal(out.positions, block.take(np.array([12, 40]))["positions"])
    touched = {k for k in counting.keys if "/c/" in k}
    # Rows 48:52 and 160:164 of chunks of 20.
    assert touched == {"core/positions/c/2/0", "core/positions/c/8/0"}


def test_xarray_alignment_is_not_fooled(path):
    """Arithmetic between two selections keeps the samples of each, as lengths differ."""
    ds = open_dataset(path)
    with pytest.raises(ValueError):
        xr.align(ds, ds.ragged.head(2), join="exact")

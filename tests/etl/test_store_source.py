"""Stores as input of a conversion: what merge gives, and what can be changed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError
from alchemi_xr.etl import convert, merge
from alchemi_xr.store import StoreWriter, open_store


def block_of(count: int, seed: int, **more: Any) -> Block:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 6, count)
    edges = rng.integers(0, 4, count)
    ptr = np.concatenate([[0], np.cumsum(counts)])
    edges_ptr = np.concatenate([[0], np.cumsum(edges)])
    v = int(ptr[-1])
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 9, v),
        "positions": rng.normal(size=(v, 3)).astype(np.float32),
        "energy": rng.normal(size=(count, 1)),
        "neighbor_list": (
            rng.random((int(edges_ptr[-1]), 2)) * np.repeat(counts, edges)[:, None]
        ).astype(int),
        "config": np.array([f"c{i % 3}" for i in range(count)], dtype=object),
        **more,
    }
    levels: dict[str, Any] = dict.fromkeys(arrays, "system")
    levels |= {"atomic_numbers": "atom", "positions": "atom", "neighbor_list": "edge"}
    return Block(ptr, edges_ptr, arrays, levels)


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    StoreWriter(paths[0]).write(block_of(30, 1))
    StoreWriter(paths[0]).delete([3, 4, 29])
    StoreWriter(paths[1]).write(block_of(20, 2, extra=np.arange(20.0)))
    return paths


def whole(path: Path) -> Block:
    with open_store(path) as store:
        assert len(store.active) == store.num_samples
        return store.read_block(slice(None))


def same(one: Block, other: Block) -> None:
    assert set(one.names) == set(other.names)
    np.testing.assert_array_equal(one.atoms_ptr, other.atoms_ptr)
    np.testing.assert_array_equal(one.edges_ptr, other.edges_ptr)
    for name in one.names:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(one.has(name), other.has(name), err_msg=name)
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("size", [1, 700, 2**24])
@pytest.mark.parametrize("client", [None, 2])
def test_it_is_what_merge_gives(tmp_path: Path, stores: list[Path], size: int, client: Any) -> None:
    merge(stores, tmp_path / "merged.zarr", progress=False)
    report = convert(
        stores, tmp_path / "out.zarr", options={"partition_bytes": size}, client=client,
        progress=False,
    )  # fmt: skip
    assert (report.source, report.samples) == ("store", 47)
    same(whole(tmp_path / "out.zarr"), whole(tmp_path / "merged.zarr"))
    with open_store(tmp_path / "out.zarr") as store:
        assert store.group("energy") == "core"
        assert store.unit("energy") == "eV"


def test_changed_on_the_way(tmp_path: Path, stores: list[Path]) -> None:
    report = convert(
        stores[0],
        tmp_path / "out.zarr",
        where="nedges > 0 and kind != 'c1'",
        key_map={"config": "kind"},
        dtype={"positions": "float64"},
        progress=False,
    )
    before = whole_active(stores[0])
    kept = np.flatnonzero((np.diff(before.edges_ptr) > 0) & (before["config"] != "c1"))
    assert (report.left_out, report.undecided) == (27 - len(kept), 0)
    after = whole(tmp_path / "out.zarr")
    np.testing.assert_array_equal(after["kind"], before["config"][kept])
    assert after["positions"].dtype == np.float64
    np.testing.assert_array_equal(after["neighbor_list"], before.take(kept)["neighbor_list"])


def whole_active(path: Path) -> Block:
    with open_store(path) as store:
        return store.read_block(store.active)


def test_in_its_own_place(tmp_path: Path, stores: list[Path]) -> None:
    before = whole_active(stores[0])
    convert(stores[0], stores[0], fields=["energy"], overwrite=True, progress=False)
    after = whole(stores[0])
    assert set(after.names) == {"energy", "positions", "atomic_numbers"}
    np.testing.assert_array_equal(after["energy"], before["energy"])


def test_a_name_of_another_level(tmp_path: Path, stores: list[Path]) -> None:
    with pytest.raises(ConfigError, match="atom level"):
        convert(stores[0], tmp_path / "out.zarr", key_map={"config": "forces"}, progress=False)


def test_stores_of_the_toolkit(shared: Path, tmp_path: Path) -> None:
    folders = sorted((shared / "fixtures" / "toolkit_stores").glob("*/"))
    done = 0
    for folder in folders:
        try:
            with open_store(folder) as store:
                want = store.read_block(store.active)
        except Exception:  # the torn one, and folders that are none
            continue
        convert(folder, tmp_path / f"{folder.name}.out", progress=False)
        got = whole(tmp_path / f"{folder.name}.out")
        np.testing.assert_array_equal(got["positions"], want["positions"])
        np.testing.assert_array_equal(got.edges_ptr, want.edges_ptr)
        done += 1
    assert done >= 3

"""Batches of planned windows are those that blocks give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.batch import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes import AtomicDataZarrReader, Dataset
from alchemi_xr.data.datapipes.validate import cast_floats
from alchemi_xr.errors import IndexRangeError
from alchemi_xr.native import available
from alchemi_xr.store import StoreWriter

COUNT = 17
GONE = [0, 5, 6]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    samples: list[dict[str, Any]] = []
    for number in range(COUNT):
        atoms, pairs = int(rng.integers(1, 6)), int(rng.integers(0, 4))
        samples.append(
            {
                "positions": rng.normal(size=(atoms, 3)),
                "atomic_numbers": rng.integers(1, 9, atoms),
                "neighbor_list": rng.integers(0, atoms, (pairs, 2)),
                "energy": np.array([float(number)], np.float32),
                "pbc": rng.integers(0, 2, 3).astype(bool),
            }
        )
        if number % 3 == 0:
            samples[-1]["forces"] = rng.normal(size=(atoms, 3))
    levels = {"positions": "atom", "atomic_numbers": "atom", "neighbor_list": "edge"}
    levels |= {"energy": "system", "forces": "atom", "pbc": "system"}
    folder = tmp_path_factory.mktemp("windows") / "s.zarr"
    writer = StoreWriter(folder, "raw")
    writer.write(Block.from_samples(samples, levels))  # type: ignore[arg-type]
    writer.delete(GONE)
    return folder


def same(a: Batch, b: Batch) -> None:
    assert [name for name, _ in a] == [name for name, _ in b]
    for (name, mine), (_, theirs) in zip(a, b, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert mine.shape == theirs.shape, name
        assert np.array_equal(mine.numpy(), theirs.numpy(), equal_nan=mine.is_floating_point())
        assert a.level_of(name) == b.level_of(name)
    assert a.present.keys() == b.present.keys()
    assert all(torch.equal(a.present[n], b.present[n]) for n in a.present)
    assert torch.equal(a.atoms_ptr, b.atoms_ptr)
    assert torch.equal(a.edges_ptr, b.edges_ptr)
    assert torch.equal(a.batch_idx, b.batch_idx)
    assert a.num_graphs == b.num_graphs


@given(
    lists=st.lists(
        st.lists(st.integers(-COUNT + len(GONE), COUNT - len(GONE) - 1), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    fields=st.sampled_from(
        [None, ["energy"], ["neighbor_list", "positions"], ["forces", "R", "energy"]]
    ),
    dtype=st.sampled_from([None, torch.float32, torch.float64, torch.float16]),
    arrays=st.booleans(),
)
def test_windows_are_blocks_made_batches(
    path: Path, lists: list[list[int]], fields: Any, dtype: Any, arrays: bool
) -> None:
    if fields is not None:
        fields = [name if name != "R" else "positions" for name in fields]
    with AtomicDataZarrReader(path) as reader:
        asked = [np.array(one) for one in lists] if arrays else lists
        names = reader._names(fields)
        assert reader._gather.windows(names, dtype) is not None
        found = reader.read_batches(asked, fields, dtype=dtype)
        for one, batch in zip(lists, found, strict=True):
            want = Batch.from_block(reader.read_block(one, fields))
            same(batch, want if dtype is None else cast_floats(want, dtype))


def test_batches_of_a_window_are_each_their_own(path: Path) -> None:
    with AtomicDataZarrReader(path) as reader:
        one, two = reader.read_batches([[1, 2], [2, 1]])
        leaf = one.positions.requires_grad_()
        out = (leaf * leaf).sum()
        # Another batch changed in place is no change of what autograd has kept.
        two.positions.add_(1)
        two.positions.requires_grad_()
        out.backward()
        assert torch.equal(leaf.grad, 2 * leaf.detach())
        assert torch.equal(two.positions[: len(two.positions)].isfinite().all(), torch.tensor(True))


def test_an_index_out_of_range_is_named(path: Path) -> None:
    with AtomicDataZarrReader(path) as reader:
        for wrong in (COUNT - len(GONE), -COUNT):
            with pytest.raises(IndexRangeError, match=f"index {wrong} is out of range"):
                reader.read_batches([[0, 1], [2, wrong]])
        with pytest.raises(IndexRangeError):
            reader.read_batches([[0.5]])


def test_a_cast_keeps_what_a_sample_has_not(path: Path) -> None:
    reader = AtomicDataZarrReader(path)
    with Dataset(reader, device="cpu", dtype=torch.float32) as dataset:
        batch = dataset.get_batch([0, 1, 2])
        assert batch.forces.dtype == torch.float32
        assert batch.has("forces").tolist() == [False, False, True]
        whole = reader.read_batch([0, 1, 2])
        assert cast_floats(whole, torch.float32).has("forces").tolist() == [False, False, True]


@pytest.mark.skipif(not available()["rows"], reason="files are mapped in C")
def test_fields_left_out_are_not_mapped(path: Path) -> None:
    with AtomicDataZarrReader(path) as reader:
        reader.read_batches([[0, 1]], ["energy"])
        assert set(reader._gather._mapped) == {"energy"}

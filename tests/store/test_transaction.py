"""A transaction is one commit of all that was asked for in it, or of nothing."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.errors import FieldError, StoreError, StoreLockedError
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import verify


@pytest.mark.parametrize("max_bytes", [0, 500, 1 << 20])
def test_appends_are_one_commit_at_the_end(make, same, anywhere, max_bytes):
    writer = StoreWriter(anywhere, {"core": {"chunk_size": 4}})
    blocks = [make(i, n) for i, n in enumerate((3, 1, 2, 1, 5))]
    writer.write(blocks[0])
    with writer.transaction(max_bytes=max_bytes) as inside:
        assert inside is writer
        for block in blocks[1:]:
            writer.append(block)
            assert open_store(anywhere).num_samples == 3
    snapshot = open_store(anywhere)
    assert snapshot.generation == 2
    same(snapshot.read_block(slice(None)), Block.concat(blocks))
    assert verify(anywhere).clean
    writer.append(make(9, 1))
    assert open_store(anywhere).num_samples == 13


def test_other_fields_and_dtypes_in_one_transaction(make, same, tmp_path):
    writer = StoreWriter(tmp_path / "a.zarr")
    blocks = [
        make(0, 2),
        make(1, 2, fields={"positions": "f8", "energy": "f8"}),
        make(2, 1, text=True),
        make(3, 2, fields={"positions": "f8", "charge": "f8"}),
    ]
    writer.write(blocks[0])
    with writer.transaction():
        for block in blocks[1:]:
            writer.append(block)
    same(open_store(writer.where).read_block(slice(None)), Block.concat(blocks))


@pytest.mark.parametrize("max_bytes", [0, 1 << 20])
def test_an_error_takes_all_of_it_back(make, same, anywhere, max_bytes):
    writer = StoreWriter(anywhere, {"core": {"chunk_size": 4}})
    writer.write(make(0, 3))
    with pytest.raises(KeyError), writer.transaction(max_bytes=max_bytes):
        writer.append(make(1, 2, fields={"positions": "f8", "charge": "f8"}))
        writer.delete([0])
        raise KeyError("stop")
    snapshot = open_store(anywhere)
    same(snapshot.read_block(slice(None)), make(0, 3))
    assert snapshot.generation == 1
    assert snapshot.samples_mask.all()
    assert verify(anywhere).clean, verify(anywhere)
    writer.append(make(2, 1))
    same(open_store(anywhere).read_block(slice(None)), Block.concat([make(0, 3), make(2, 1)]))


def test_deletions_reach_samples_of_the_same_transaction(make, same, anywhere):
    writer = StoreWriter(anywhere, {"meta": {"chunk_size": 2}})
    writer.write(make(0, 4))
    writer.delete([1])
    with writer.transaction():
        writer.append(make(1, 2))
        writer.delete([0, 4, -1])
        writer.undelete([1, 5])
        writer.append(make(2, 1))
    snapshot = open_store(anywhere)
    assert snapshot.samples_mask.tolist() == [False, True, True, True, False, True, True]
    assert snapshot.generation == 3
    same(snapshot.read_block(slice(None)), Block.concat([make(0, 4), make(1, 2), make(2, 1)]))
    assert verify(anywhere).clean, verify(anywhere)


def test_what_does_not_fit_is_refused_at_once_and_the_rest_may_go_on(make, tmp_path):
    writer = StoreWriter(tmp_path / "a.zarr")
    writer.write(make(0, 2, fields={"positions": "f8", "energy": "f8"}))
    wrong = make(1, 1, fields={"positions": "f8"}).with_field(
        "energy", np.zeros((1, 1), bool), "system"
    )
    with writer.transaction():
        with pytest.raises(FieldError, match="energy"):
            writer.append(wrong)
        writer.append(make(2, 1, fields={"positions": "f8"}))
    assert open_store(writer.where).num_samples == 3


def test_no_transaction_in_a_transaction(make, tmp_path):
    writer = StoreWriter(tmp_path / "a.zarr")
    writer.write(make(0, 2))
    with writer.transaction():
        for act in (
            lambda: writer.transaction().__enter__(),
            lambda: writer.add_custom("x", np.zeros(2), "system"),
            lambda: writer.write(make(1), overwrite=True),
            writer.defragment,
        ):
            with pytest.raises(StoreError, match="inside a transaction"):
                act()
        with pytest.raises(StoreLockedError):
            StoreWriter(tmp_path / "a.zarr").append(make(1))
    assert open_store(writer.where).generation == 1


def test_samples_of_torch_in_one_commit(tmp_path):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    from alchemi_xr.data import AtomicData, AtomicDataZarrWriter

    def sample(n):
        return AtomicData(
            positions=torch.full((n, 3), float(n)), atomic_numbers=torch.ones(n).int()
        )

    writer = AtomicDataZarrWriter(tmp_path / "a.zarr")
    writer.write(sample(1))
    with writer.transaction() as inside:
        for n in range(2, 6):
            inside.append(sample(n))
        inside.delete([0])
    snapshot = open_store(tmp_path / "a.zarr")
    assert snapshot.generation == 2
    assert np.diff(snapshot.atoms_ptr).tolist() == [1, 2, 3, 4, 5]
    assert snapshot.active.tolist() == [1, 2, 3, 4]

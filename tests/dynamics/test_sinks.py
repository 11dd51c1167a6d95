"""One contract for all sinks, and what each has of its own."""

from __future__ import annotations

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.block import Block
from alchemi_xr.dynamics import DataSink, GPUBuffer, HostMemory, ZarrData, sinks


@pytest.fixture(
    params=[
        "host",
        "preallocated",
        "zarr",
        "zarr-grouped",
        "zarr-dict",
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def make_sink(request, tmp_path):
    """A maker of an empty sink of each kind."""

    def make(capacity=4):
        if request.param == "host":
            return HostMemory(capacity)
        if request.param == "preallocated":
            return sinks._Preallocated(capacity, max_atoms=5, max_edges=0, device="cpu")
        if request.param == "gpu":
            return GPUBuffer(capacity, max_atoms=5, max_edges=0)
        if request.param == "zarr-dict":
            return ZarrData({}, capacity)
        flush = 3 if request.param == "zarr-grouped" else 1
        return ZarrData(tmp_path / "sink.zarr", capacity, flush_every=flush)

    return make


def numbered(kit, sizes, start=0):
    batch = kit.systems(sizes)
    ids = torch.arange(start, start + len(sizes)).reshape(-1, 1)
    batch.set("tag", ids, level="system")
    batch.set("mark", torch.arange(batch.num_nodes), level="atom")
    batch["pbc"] = torch.ones(len(sizes), 3, dtype=torch.bool)
    return batch


def test_contract(kit, make_sink):
    sink = make_sink(4)
    assert isinstance(sink, DataSink)
    assert (len(sink), sink.capacity, sink.global_rank, sink.local_rank) == (0, 4, 0, 0)
    assert not sink.is_full
    assert not sink.is_full()
    with pytest.raises(RuntimeError, match=r"Cannot read from empty (buffer|store)\."):
        sink.read()
    with pytest.raises(RuntimeError, match="Cannot read from empty"):
        sink.drain()
    first, second = numbered(kit, [2, 3]), numbered(kit, [1, 4, 2], start=2)
    sink.write(first)
    first["positions"] += 100  # a sink keeps a copy
    with pytest.raises(ValueError, match="mask length 1 != num_graphs 3"):
        sink.write(second, torch.tensor([True]))
    with pytest.raises(
        RuntimeError, match=r"is full\. Cannot add 3 samples to .* with 2/4 samples\."
    ):
        sink.write(second)
    assert len(sink) == 2
    sink.write(second, torch.tensor([False, False, False]))
    sink.write(second, torch.tensor([True, False, True]))
    assert len(sink) == 4
    assert sink.is_full
    assert sink.is_full()
    out = sink.read().cpu()
    assert out["tag"].reshape(-1).tolist() == [0, 1, 2, 4]
    assert out.num_nodes_list == [2, 3, 1, 2]
    assert out["pbc"].dtype == torch.bool
    torch.testing.assert_close(out["positions"][:5], numbered(kit, [2, 3])["positions"])
    torch.testing.assert_close(out["positions"][5:6], second["positions"][:1])
    assert len(sink) == 4
    assert len(sink.drain()) == 4
    assert len(sink) == 0
    sink.write(second)
    assert sink.read()["tag"].reshape(-1).tolist() == [2, 3, 4]


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match="capacity"):
        HostMemory(capacity)


def test_host_memory_holds_blocks_not_systems(kit):
    sink = HostMemory(100)
    for start in range(3):
        sink.write(numbered(kit, [2, 3, 1], start))
    assert all(isinstance(block, Block) for block in sink._blocks)
    assert len(sink._blocks) == 3
    read = sink.read()
    read["positions"].zero_()
    assert float(sink.read()["positions"].abs().max()) > 0


def test_host_memory_joins_unlike_batches(kit):
    sink = HostMemory(10)
    with_energy = kit.systems([2])
    with_energy["energy"] = torch.ones(1, 1)
    sink.write(with_energy)
    sink.write(kit.systems([3]))
    out = sink.read()
    assert out.has("energy").tolist() == [True, False]


def test_a_sink_is_true_even_when_empty():
    assert bool(HostMemory(1))


def test_gpu_buffer_needs_cuda():
    with pytest.raises(RuntimeError, match="CUDA device is required"):
        GPUBuffer(4, 5, 5, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA here"):
            GPUBuffer(4, 5, 5)
    with pytest.raises(ValueError, match="max_atoms"):
        GPUBuffer(4, -1, 5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_buffer_capacity_is_per_system(kit, device):
    kind = GPUBuffer if device == "cuda" else sinks._Preallocated
    sink = kind(3, max_atoms=4, max_edges=0, device=device)
    sink.write(numbered(kit, [2, 7]).to(device))  # 9 of 12 atoms
    with pytest.raises(RuntimeError, match="Atom capacity exceeded"):
        sink.write(numbered(kit, [5]).to(device))
    assert sink.read().num_nodes_list == [2, 7]
    assert sink.read()["mark"].dtype == torch.int64


def test_a_sink_leaves_the_batch_as_it_was(kit, make_sink):
    batch = numbered(kit, [2, 3])
    names = [name for name, _ in batch]
    make_sink(4).write(batch)
    assert [name for name, _ in batch] == names
    with pytest.raises(ValueError, match="requires copied_mask or a prior put"):
        batch.defrag()


def test_zarr_data_continues_an_existing_store(kit, tmp_path):
    path = tmp_path / "results.zarr"
    with ZarrData(path, capacity=5) as sink:
        sink.write(numbered(kit, [2, 3]))
    again = ZarrData(path, capacity=5)
    assert len(again) == 2
    again.write(numbered(kit, [1], start=2))
    assert again.read()["tag"].reshape(-1).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="Store is full"):
        again.write(numbered(kit, [1, 1, 1]))
    assert len(ZarrData(path)) == 3


def test_a_commit_that_failed_can_be_tried_again(kit, tmp_path, monkeypatch):
    """What the sink refused it does not keep: a second try is not a second copy."""
    from alchemi_xr.store.writer import StoreWriter

    sink = ZarrData(tmp_path / "results.zarr", flush_every=3)
    sink.write(numbered(kit, [2, 3]))

    def fail(self, *args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "write", fail)
        with pytest.raises(OSError, match="disk full"):
            sink.write(numbered(kit, [1], start=2))
    assert len(sink) == 2
    sink.write(numbered(kit, [1], start=2))
    assert sink.read()["tag"].reshape(-1).tolist() == [0, 1, 2]


def test_zarr_data_groups_writes_into_commits(kit, tmp_path):
    from alchemi_xr.store.reader import open_store

    path = tmp_path / "results.zarr"
    with ZarrData(path, flush_every=4) as sink:
        sink.write(numbered(kit, [2]))
        assert not path.exists()
        sink.write(numbered(kit, [3, 1, 1], start=1))
        assert open_store(path).num_samples == 4
        sink.write(numbered(kit, [2], start=4))
        assert open_store(path).num_samples == 4
        assert len(sink) == 5
    snapshot = open_store(path)
    assert snapshot.num_samples == 5
    assert snapshot.level("tag") == "system"
    assert snapshot.level("mark") == "atom"


def test_zarr_data_refuses_a_folder_that_is_no_store(kit, tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises((ValueError, FileExistsError)):
        sink = ZarrData(folder)
        sink.write(numbered(kit, [2]))
    assert (folder / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("flush_every", [0, 1.5])
def test_bad_flush(tmp_path, flush_every):
    with pytest.raises(ValueError, match="flush_every"):
        ZarrData(tmp_path / "x.zarr", flush_every=flush_every)


def test_zero_takes_only_the_store_out_of_a_shared_place():
    """Beside the store of a sink other things may live in one bucket or mapping."""
    from zarr.core.buffer import default_buffer_prototype
    from zarr.storage import MemoryStore

    from alchemi_xr.store._compat import wait

    place = MemoryStore()
    sink = ZarrData(place, capacity=10)
    sink.write(
        Batch.from_data_list(
            [AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([18]))]
        )
    )
    wait(place.set("notes/mine.txt", default_buffer_prototype().buffer.from_bytes(b"keep")))
    sink.zero()
    assert len(sink) == 0
    assert sorted(place._store_dict) == ["notes/mine.txt"]

"""Batches between two real processes over gloo."""

import multiprocessing
import pickle
import traceback

import pytest
import torch
import torch.distributed as dist

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.comm import pack, unpack
from alchemi_xr.testing.reference import assert_same_samples, samples_of


def messages():
    first = AtomicData(
        atomic_numbers=torch.tensor([8, 1, 1]),
        positions=torch.randn(3, 3, generator=torch.Generator().manual_seed(1)),
        neighbor_list=torch.tensor([[0, 1], [2, 0]]),
        pbc=True,
        cell=torch.eye(3),
    )
    second = AtomicData(
        atomic_numbers=torch.tensor([2]),
        positions=torch.zeros(1, 3, dtype=torch.float32),
        energy=-1e5,
    )
    first.add_node_property("half", torch.ones(3, dtype=torch.float16))
    mixed = Batch.from_data_list([first, second, second])
    mixed.set("flag", torch.tensor([True, False, True]), level="system")
    mixed.set("brain", torch.ones(3, 2, dtype=torch.bfloat16), level="system")
    mixed.units["energy"] = "Hartree"
    buffer = Batch.empty(num_systems=9, num_nodes=30, num_edges=30, template=mixed)
    buffer.put(mixed, [True, False, True])
    return [mixed, Batch.empty_like(mixed), buffer, Batch.from_data_list([second])]


def worker(rank, path, results):
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        batches = messages()
        if rank == 0:
            for tag, batch in enumerate(batches):
                batch.send(1, tag=tag)
            handles = [batch.isend(1) for batch in batches]
            batches[0].positions.fill_(77.0)  # what is sent was taken when it was asked for
            for handle in handles:
                handle.wait()
            results.put((rank, None))
        else:
            got = [
                Batch.recv(0, "cpu", template=batches[0], tag=tag) for tag in range(len(batches))
            ]
            handles = []
            for _ in batches:
                handle = Batch.irecv(0, torch.device("cpu"))
                handles.append(handle.wait())
                assert handle.wait() is handles[-1]
            results.put((rank, pickle.dumps((got, handles))))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()))


@pytest.mark.slow
def test_two_processes(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, tmp_path / "rendezvous", results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert found[0] is None, found[0]
    assert isinstance(found[1], bytes), found[1]
    for received in pickle.loads(found[1]):
        for got, sent in zip(received, messages(), strict=True):
            assert len(got) == len(sent)
            if not len(sent):
                continue
            assert_same_samples(samples_of(got.to_block()), samples_of(sent.to_block()))
            assert got.keys == sent.keys
            assert got.units == sent.units
            assert got.num_nodes == sum(got.num_nodes_list)
    with_template = pickle.loads(found[1])[0][1]
    assert with_template.keys == messages()[0].keys


def test_unpacked_parts_are_their_own():
    batch = messages()[0]
    header, body = pack(batch, torch.device("cpu"))
    flat = unpack(header, body, torch.device("cpu"))
    body.zero_()
    again = Batch._of(flat)
    assert torch.equal(again.brain, batch.brain)
    assert again.brain.dtype == torch.bfloat16
    assert_same_samples(samples_of(again.to_block()), samples_of(batch.to_block()))
    storages = {values.untyped_storage().data_ptr() for _, values in again}
    assert len(storages) == len(list(again))

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
)
from alchemi_xr.data.datapipes.prefetch import batch_tensors
from alchemi_xr.data.datapipes.streams import (
    Staged,
    make_streams,
    on_stream,
    record_event,
    resolve_device,
)


class FakeEvent:
    waits = 0

    def wait(self) -> None:
        self.waits += 1


class FakeStream:
    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


def test_a_staged_value_waits_for_its_event_once() -> None:
    stream = FakeStream()
    with on_stream(stream):
        value = torch.ones(3)
    staged = Staged(value, record_event(stream), lambda v: [v])
    assert stream.events[0].waits == 0
    assert staged.wait() is value
    staged.wait()
    assert stream.events[0].waits == 1


def test_without_a_stream_there_is_no_event() -> None:
    assert record_event(None) is None
    assert Staged(5).wait() == 5


def test_streams_exist_for_cuda_alone() -> None:
    assert make_streams(torch.device("cpu"), 4) == []
    assert make_streams(None, 4) == []


def test_devices() -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device(None).type == here
    assert resolve_device("auto").type == here
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(torch.device("cpu")).type == "cpu"
    with pytest.raises(TypeError, match="device"):
        resolve_device(3)  # type: ignore[arg-type]


class FakeCuda:
    """Stands for a tensor on a second GPU: who waits, and who uses its memory, is noted."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def __init__(self) -> None:
        self.used_by: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.used_by.append(stream)


def test_the_stream_of_the_tensors_device_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the thread's current device, which is what an event takes by itself."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    waited: list[object] = []

    class Event:
        def wait(self, stream: object = None) -> None:
            waited.append(stream)

    tensors = [FakeCuda(), FakeCuda()]
    staged = Staged(tensors, Event(), lambda t: t)  # type: ignore[arg-type, return-value]
    assert staged.wait() is tensors
    assert waited == ["stream of cuda:1"]
    assert [t.used_by for t in tensors] == [["stream of cuda:1"], ["stream of cuda:1"]]
    staged.wait()
    assert len(waited) == 1


def test_pointers_made_on_the_device_are_kept_too() -> None:
    """A transform on a side stream may ask for them: their memory is in use like any other."""
    sample = AtomicData(positions=torch.zeros(2, 3), atomic_numbers=torch.ones(2, dtype=torch.long))
    batch = Batch.from_data_list([sample, sample])
    before = len(list(batch_tensors(batch)))
    index = batch.batch_idx
    assert len(list(batch_tensors(batch))) > before
    assert any(one is index for one in batch_tensors(batch))


@pytest.mark.parametrize("kind", ["stored", "resident", "many"])
def test_the_path_with_a_stream_is_the_path_without(store: Path, kind: str) -> None:
    """Every batch is staged with an event of its stream, and waited for before it is given."""
    plain = Dataset(AtomicDataZarrReader(store), device="cpu", transforms=[_double])
    expected = [b.energy.flatten().tolist() for b in DataLoader(plain, batch_size=5)]
    dataset: Any = plain
    if kind == "resident":
        dataset = InMemoryDataset(
            reader=AtomicDataZarrReader(store), batch_transforms=[_double], device="cpu"
        )
    elif kind == "many":
        dataset = MultiDataset(plain)
    loader = DataLoader(dataset, batch_size=5, prefetch_factor=1, num_streams=2)
    streams = [FakeStream(), FakeStream()]
    loader._streams = streams  # type: ignore[assignment]
    assert [b.energy.flatten().tolist() for b in loader] == expected
    events = [event for stream in streams for event in stream.events]
    assert len(events) == len(expected)
    assert all(event.waits == 1 for event in events)
    assert all(stream.events for stream in streams)
    dataset.close()


def _double(batch: Batch) -> Batch:
    batch["energy"] = batch["energy"] * 2
    return batch


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_batches_on_the_gpu_are_whole_while_streams_overlap(
    store: Path, pinned: bool, resident: bool
) -> None:
    """Buffers are used again at once here; a copy still under way would show in a value."""
    with Dataset(AtomicDataZarrReader(store), device="cpu") as plain:
        whole = plain.get_batch(range(len(plain)))
        dataset: Any
        if resident:
            dataset = InMemoryDataset(whole.to("cuda"))
        else:
            dataset = Dataset(AtomicDataZarrReader(store), device="cuda")
        loader = DataLoader(
            dataset, batch_size=3, shuffle=True, pin_memory=pinned, num_streams=3, prefetch_factor=2
        )
        busy = torch.randn(1500, 1500, device="cuda")
        for epoch in range(20):
            loader.set_epoch(epoch)
            for batch in loader:
                busy = busy @ busy
                busy /= busy.norm()  # the consumer's stream is behind all the time
                chosen = batch.energy.flatten().long().tolist()
                wanted = plain.get_batch(chosen)
                assert torch.equal(batch.positions.cpu(), wanted.positions)
                assert torch.equal(batch.batch_idx.cpu(), wanted.batch_idx)
                assert torch.equal(batch.forces.cpu(), wanted.forces)
        dataset.close()


@pytest.mark.gpu
def test_staging_does_not_wait_for_the_consumer(store: Path) -> None:
    """A read on a side stream is through while the consumer's stream has work for long."""
    with Dataset(AtomicDataZarrReader(store), device="cuda") as dataset:
        dataset.pin_memory = True
        (stream,) = make_streams(torch.device("cuda"), 1)
        dataset.stage_batches([[0, 1, 2]], stream)
        busy = torch.randn(8000, 8000, device="cuda")
        torch.cuda.synchronize()
        for _ in range(20):
            busy = busy @ busy
        behind = torch.cuda.current_stream().record_event()
        (staged,) = dataset.stage_batches([[3, 4, 5]], stream)
        stream.synchronize()
        assert not behind.query()  # the copies overtook the products
        assert staged.wait().energy.flatten().tolist() == [3.0, 4.0, 5.0]


@pytest.mark.gpu
def test_a_copy_on_a_side_stream_arrives() -> None:
    device = torch.device("cuda")
    (stream,) = make_streams(device, 1)
    source = torch.arange(1_000_000, dtype=torch.float32).pin_memory()
    with on_stream(stream):
        value = source.to(device, non_blocking=True)
        event = record_event(stream)
    found = Staged(value, event, lambda v: [v]).wait() * 2
    assert torch.equal(found.cpu(), source * 2)

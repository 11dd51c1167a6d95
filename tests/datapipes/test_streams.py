from __future__ import annotations

import pytest
import torch

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

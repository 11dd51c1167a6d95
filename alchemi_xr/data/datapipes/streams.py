"""A side stream fills, the consumer's stream waits: work staged with an event.

The host never waits. Without CUDA the same code runs with no stream and no
event; any object with ``record_event`` serves as a stream, which is how the
tests exercise the path on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from alchemi_xr.data.batch import Batch
from alchemi_xr.errors import ArgumentTypeError, ConfigError

__all__ = ["Staged", "make_streams", "move_batch", "on_stream", "record_event", "resolve_device"]

T = TypeVar("T")


class Staged(Generic[T]):
    """A value whose tensors may still be on their way.

    Parameters
    ----------
    value : object
    event : object, optional
        Recorded on the stream that fills the value; has ``wait()``.
    tensors : callable, optional
        Gives the value's tensors, so that their memory is not reused before
        the consumer's stream is done with them.
    """

    __slots__ = ("_event", "_tensors", "_value")

    def __init__(
        self,
        value: T,
        event: Any = None,
        tensors: Callable[[T], Iterable[Tensor]] | None = None,
    ) -> None:
        self._value = value
        self._event = event
        self._tensors = tensors

    def wait(self) -> T:
        """The value, safe to use on the current stream."""
        if self._event is None:
            return self._value
        event, self._event = self._event, None
        tensors = list(self._tensors(self._value)) if self._tensors else []
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        # The stream of the tensors' device: that of the thread's current device, which an
        # event takes by itself, may be another GPU's.
        consumer = None if device is None else torch.cuda.current_stream(device)
        event.wait() if consumer is None else event.wait(consumer)
        for tensor in tensors:
            if consumer is not None and tensor.is_cuda:
                # Allocated on the side stream: without this the allocator may hand the
                # memory out again while a kernel of this stream still reads it.
                tensor.record_stream(consumer)
        return self._value


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Context in which CUDA work goes to ``stream``; does nothing for others."""
    if stream is not None and isinstance(stream, torch.cuda.Stream):
        return torch.cuda.stream(stream)
    return nullcontext()


def record_event(stream: Any) -> Any:
    """An event after all work on ``stream`` so far, or None without a stream."""
    record = getattr(stream, "record_event", None)
    return record() if record is not None else None


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device; the copy is asynchronous from pinned memory."""
    if batch.device == device:
        return batch
    moved = batch.to(device, non_blocking=True)
    if moved.device.type == "cuda":
        # Made here, in the thread that reads and on its stream: made where they are first
        # used they would let the host wait in the middle of a training step.
        for rows in (moved._atoms, moved._edges) if moved.num_edges else (moved._atoms,):
            _ = rows.ptr32, rows.index32
    return moved


def make_streams(device: torch.device | None, count: int) -> list[torch.cuda.Stream]:
    """``count`` side streams of a CUDA device; none for any other device."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return []
    made: list[torch.cuda.Stream] = [torch.cuda.Stream(device) for _ in range(count)]
    return made


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device itself; None and ``"auto"`` mean CUDA when there, else the CPU.

    Raises
    ------
    ArgumentTypeError
        Neither a string nor a ``torch.device``.
    ConfigError
        Torch does not know it, or it is not there.
    """
    if device is None or (isinstance(device, str) and device == "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, (str, torch.device)):
        raise ArgumentTypeError(
            "device",
            "is no device",
            found=type(device).__name__,
            expected="a string, a torch.device or None",
        )
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            "device",
            "is not known to torch",
            found=repr(device),
            expected="'cpu', 'cuda', 'cuda:0', 'auto' …",
        ) from error
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ConfigError(
            "device",
            f"{found} is not there",
            found=f"{count} CUDA devices",
            mend="device='auto' takes a GPU where there is one, else the CPU",
        )
    return found

"""An object on its way to another process: all its tensors in one piece of shared memory.

Each tensor sent by itself costs a file descriptor and a connection between the two
processes; a batch has ten of them. What is no tensor is pickled.
"""

from __future__ import annotations

import io
import pickle
from math import prod
from typing import Any

import cloudpickle
import torch
from torch import Tensor

__all__ = ["Packed", "pack", "unpack"]

#: Bytes up to which the memory goes through the pipe itself. Shared memory has to be fetched
#: from a thread of the process that made it, which waits for a transform in Python (5 ms each
#: time that it wants the interpreter); a pipe waits for nobody.
_THROUGH_PIPE = 4 * 2**20
# Rows begin at cache lines.
_ALIGN = 64

#: Offset in bytes, shape and dtype of a tensor.
_Slot = tuple[int, tuple[int, ...], torch.dtype]


class Packed:
    """What ``pack`` made; it goes through any queue of ``multiprocessing``.

    Parameters
    ----------
    data : bytes
        The object without its tensors.
    slots : list
        Where each tensor lies in the memory.
    memory : Tensor
        uint8, shared.
    """

    __slots__ = ("data", "memory", "slots")

    def __init__(self, data: bytes, slots: list[_Slot], memory: Tensor) -> None:
        self.data, self.slots, self.memory = data, slots, memory

    def pin_memory(self) -> Packed:
        """The same with its tensors in page-locked memory, in one copy."""
        return Packed(self.data, self.slots, self.memory.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        if self.memory.numel() <= _THROUGH_PIPE:
            return (_from_pipe, (self.data, self.slots, self.memory.numpy().tobytes()))
        if not self.memory.is_shared():
            self.memory.share_memory_()
        return (Packed, (self.data, self.slots, self.memory))


def _from_pipe(data: bytes, slots: list[_Slot], memory: bytes) -> Packed:
    return Packed(data, slots, torch.frombuffer(bytearray(memory), dtype=torch.uint8))


def pack(value: Any, *, by_value: bool = False) -> Packed:
    """An object ready to be sent.

    Parameters
    ----------
    value : object
    by_value : bool
        Functions and classes of a script or a notebook go along whole, as the other
        process may not have them.

    Raises
    ------
    Exception
        Whatever the pickling of something in it raises.
    """
    into = io.BytesIO()
    pickler = (_ByValue if by_value else _Plain)(into)
    pickler.dump(value)
    slots: list[_Slot] = []
    end = 0
    for tensor in pickler.tensors:
        slots.append((end, tuple(tensor.shape), tensor.dtype))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    memory = torch.empty(max(end, 1), dtype=torch.uint8)
    if end > _THROUGH_PIPE:
        memory.share_memory_()
    for tensor, place in zip(pickler.tensors, _views(slots, memory), strict=True):
        place.copy_(tensor)
    return Packed(into.getvalue(), slots, memory)


def unpack(packed: Packed) -> Any:
    """The object again; its tensors lie in the memory that it came in."""
    return _Unpickler(packed).load()


def _views(slots: list[_Slot], memory: Tensor) -> list[Tensor]:
    storage = memory.untyped_storage()
    found = []
    for offset, shape, dtype in slots:
        # Not a view of a common tensor, for these share what autograd counts.
        tensor = torch.empty(0, dtype=dtype)
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        found.append(tensor.set_(storage, offset // dtype.itemsize, shape, strides))
    return found


class _Collects:
    """Leaves tensors out of a pickle and keeps them."""

    tensors: list[Tensor]
    _known: dict[int, int]

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or not _is_plain(value):
            return None
        number = self._known.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Plain(_Collects, pickle.Pickler):
    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into, protocol=5)
        self.tensors, self._known = [], {}


class _ByValue(_Collects, cloudpickle.Pickler):
    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into, protocol=5)
        self.tensors, self._known = [], {}


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.data))
        self._tensors = _views(packed.slots, packed.memory)

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
    )

"""A Batch as a message between ranks, over torch.distributed.

Two messages: a header of whole numbers, then one buffer that holds the schema,
the pointers and every field. As the schema travels with the data, a receiver
needs no template and cannot misread a sender whose fields have changed. A
batch of no system is the header alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from alchemi_xr.data.collate import Flat
from alchemi_xr.data.level import LevelRows
from alchemi_xr.errors import FieldError

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["ReceiveHandle", "SendHandle", "irecv", "isend"]

# graphs, nodes, edges, bytes of schema, bytes in all
_HEADER = 5
_ALIGN = 16


def _wire_device(device: torch.device, group: Any) -> torch.device:
    """Where messages live: NCCL sends from the device, all else from the host."""
    if "nccl" in str(dist.get_backend(group)):
        return device if device.type == "cuda" else torch.device("cuda")
    return torch.device("cpu")


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _bytes_of(values: Tensor) -> Tensor:
    return values.detach().contiguous().view(-1).view(torch.uint8)


def pack(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Header and body of a batch."""
    entries: list[tuple[str, Tensor]] = [
        ("ptr:atoms", batch.atoms_ptr),
        ("ptr:edges", batch.edges_ptr),
    ]
    entries += [(f"field:{name}", batch._used(name)) for name, _ in batch]
    entries += [(f"present:{name}", mask) for name, mask in sorted(batch.present.items())]
    schema = {
        "entries": [
            [key, str(values.dtype).removeprefix("torch."), list(values.shape)]
            for key, values in entries
        ],
        "levels": batch._levels,
        "units": batch._units,
    }
    text = json.dumps(schema).encode()
    sizes = [_padded(len(text))]
    sizes += [_padded(values.numel() * values.element_size()) for _, values in entries]
    body = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    body[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    at = sizes[0]
    for (_, values), size in zip(entries, sizes[1:], strict=True):
        if values.numel():
            raw = _bytes_of(values)
            body[at : at + len(raw)] = raw.to(device)
        at += size
    header = torch.tensor(
        [len(batch), batch._atoms.used, batch._edges.used, len(text), len(body)],
        dtype=torch.int64,
        device=device,
    )
    return header, body


def unpack(header: Tensor, body: Tensor, device: torch.device) -> Flat:
    """The batch of a header and a body."""
    num, nodes, edges, text_bytes, _ = (int(n) for n in header.tolist())
    schema = json.loads(bytes(body[:text_bytes].cpu().numpy()))
    at = _padded(text_bytes)
    parts: dict[str, dict[str, Tensor]] = {"ptr": {}, "field": {}, "present": {}}
    for key, dtype_name, shape in schema["entries"]:
        dtype = getattr(torch, dtype_name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # A copy: the parts must not keep the whole message alive, nor share its storage.
        values = body[at : at + size].clone().view(dtype).reshape(shape).to(device)
        kind, _, name = key.partition(":")
        parts[kind][name] = values
        at += _padded(size)
    home = next(iter(parts["field"].values())).device if parts["field"] else device
    return Flat(
        parts["field"],
        schema["levels"],
        parts["present"],
        LevelRows(parts["ptr"]["atoms"].cpu().numpy(), nodes, home),
        LevelRows(parts["ptr"]["edges"].cpu().numpy(), edges, home),
        num,
        home,
        schema["units"],
    )


class SendHandle:
    """A batch under way; keeps its buffers until they are sent."""

    def __init__(self, works: list[Any], buffers: list[Tensor]) -> None:
        self._works = works
        self._buffers = buffers

    def wait(self) -> None:
        """Return when the buffers are sent."""
        for work in self._works:
            work.wait()
        self._works, self._buffers = [], []

    def is_completed(self) -> bool:
        """Whether all is sent."""
        return all(work.is_completed() for work in self._works)


class ReceiveHandle:
    """A batch that is on its way here."""

    def __init__(
        self,
        header: Tensor,
        work: Any,
        src: int,
        device: torch.device,
        template: Batch | None,
        tag: int,
        group: Any,
    ) -> None:
        self._header = header
        self._work = work
        self._src = src
        self._device = device
        self._template = template
        self._tag = tag
        self._group = group
        self._result: Batch | None = None

    def wait(self) -> Batch:
        """The batch, when it has come; of no system when the sender sent none."""
        from alchemi_xr.data.batch import Batch

        if self._result is not None:
            return self._result
        self._work.wait()
        if int(self._header[0]) == 0:
            self._result = (
                Batch(device=self._device)
                if self._template is None
                else Batch.empty_like(self._template, device=self._device)
            )
            return self._result
        body = torch.empty(int(self._header[4]), dtype=torch.uint8, device=self._header.device)
        work = dist.irecv(body, self._src, group=self._group, tag=self._tag)
        if work is None:
            raise FieldError("Batch.irecv", "this rank is not in the group")
        work.wait()
        self._result = Batch._of(unpack(self._header, body, self._device))
        return self._result


def isend(batch: Batch, dst: int, *, tag: int = 0, group: Any = None) -> SendHandle:
    """Start sending the systems of a batch to a rank.

    The batch is copied into the message, and may be changed at once.

    Parameters
    ----------
    dst : int
        Rank of the receiver.
    tag : int
    group : ProcessGroup, optional
    """
    device = _wire_device(batch.device, group)
    if len(batch) == 0:
        messages = [torch.zeros(_HEADER, dtype=torch.int64, device=device)]
    else:
        messages = list(pack(batch, device))
    works = [dist.isend(message, dst, group=group, tag=tag) for message in messages]
    if any(work is None for work in works):
        raise FieldError("Batch.isend", "this rank is not in the group")
    return SendHandle(works, messages)


def irecv(
    src: int, device: torch.device, *, template: Batch | None, tag: int = 0, group: Any = None
) -> ReceiveHandle:
    """Start receiving a batch from a rank.

    Parameters
    ----------
    src : int
        Rank of the sender.
    device : torch.device
        Where the batch goes.
    template : Batch, optional
        Gives the fields of the empty batch that stands for "nothing sent".
    """
    wire = _wire_device(device, group)
    header = torch.zeros(_HEADER, dtype=torch.int64, device=wire)
    work = dist.irecv(header, src, group=group, tag=tag)
    if work is None:
        raise FieldError("Batch.irecv", "this rank is not in the group")
    return ReceiveHandle(header, work, src, device, template, tag, group)

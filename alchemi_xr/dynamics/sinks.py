"""Where finished systems and snapshots go: GPU memory, host memory, a store.

A sink takes whole batches and gives back one batch; it never holds an object
for each system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from alchemi_xr.data.batch import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.dynamics.options import global_rank, local_rank
from alchemi_xr.errors import ConfigError, DynamicsError, FieldError, StoreNotFoundError

__all__ = ["DataSink", "GPUBuffer", "HostMemory", "ZarrData"]


class _Flag(int):
    """A truth that may also be called: ``sink.is_full`` and ``sink.is_full()`` are both in use."""

    def __call__(self) -> bool:
        return bool(self)


class DataSink(ABC):
    """A place for batches of systems, up to a number of systems.

    Parameters
    ----------
    capacity : int
        Most systems it holds.
    """

    _noun: ClassVar[str] = "buffer"

    def __init__(self, capacity: int) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ConfigError(
                type(self).__name__, "capacity must be an integer of at least 1", found=capacity
            )
        self._capacity = capacity

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def is_full(self) -> _Flag:
        """Whether no further system fits; also callable."""
        return _Flag(len(self) >= self.capacity)

    @property
    def local_rank(self) -> int:
        return local_rank()

    @property
    def global_rank(self) -> int:
        return global_rank()

    def write(self, batch: Batch, mask: torch.Tensor | None = None) -> None:
        """Add the systems of a batch, or those of a mask, bool [B].

        Raises
        ------
        FieldError
            The mask has the wrong length.
        DynamicsError
            They do not fit; nothing is written.
        """
        if mask is not None:
            mask = torch.as_tensor(mask).reshape(-1)
            if len(mask) != batch.num_graphs:
                raise FieldError(
                    type(self).__name__,
                    f"mask length {len(mask)} != num_graphs {batch.num_graphs}",
                )
            chosen = mask.to(torch.bool).nonzero().reshape(-1)
            if not len(chosen):
                return
            if len(chosen) < batch.num_graphs:
                batch = batch.index_select(chosen)
        if not batch.num_graphs:
            return
        if len(self) + batch.num_graphs > self.capacity:
            raise DynamicsError(
                type(self).__name__,
                f"{self._noun.capitalize()} is full. Cannot add {batch.num_graphs} samples to "
                f"{self._noun} with {len(self)}/{self.capacity} samples",
                mend="give a larger capacity, drain() it, or add a second sink",
            )
        self._write(batch)

    def read(self) -> Batch:
        """All systems, in the order written.

        Raises
        ------
        DynamicsError
            It is empty.
        """
        if not len(self):
            raise DynamicsError(type(self).__name__, f"Cannot read from empty {self._noun}")
        return self._read()

    def drain(self) -> Batch:
        """`read`, then `zero`."""
        batch = self.read()
        self.zero()
        return batch

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def zero(self) -> None:
        """Forget everything."""

    @abstractmethod
    def _write(self, batch: Batch) -> None: ...

    @abstractmethod
    def _read(self) -> Batch: ...

    def __bool__(self) -> bool:
        # An empty sink is still a sink: ``if sink`` must not depend on its length.
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)}/{self.capacity})"


class HostMemory(DataSink):
    """Host memory: one flat block a write, joined when read."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks: list[Block] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _write(self, batch: Batch) -> None:
        # to() copies, so that the batch may go on changing.
        self._blocks.append(batch.to("cpu").to_block())
        self._count += batch.num_graphs

    def _read(self) -> Batch:
        joined = Block.concat(self._blocks, where="HostMemory")
        if len(self._blocks) == 1:
            return Batch.from_block(joined).clone()
        self._blocks = [joined]  # the next read joins nothing
        return Batch.from_block(joined).clone()

    def zero(self) -> None:
        self._blocks, self._count = [], 0

    def held(self) -> list[Block]:
        """What it holds now, not copied; `hold` goes back to it."""
        return list(self._blocks)

    def hold(self, blocks: list[Block]) -> None:
        """Hold these and nothing else."""
        self._blocks, self._count = list(blocks), sum(block.num_samples for block in blocks)


class _Preallocated(DataSink):
    """A buffer allocated once, on any device; `GPUBuffer` is the one that is offered."""

    def __init__(
        self, capacity: int, max_atoms: int, max_edges: int, device: str | torch.device
    ) -> None:
        super().__init__(capacity)
        for name, value in (("max_atoms", max_atoms), ("max_edges", max_edges)):
            if not isinstance(value, int) or value < 0:
                raise ConfigError(
                    type(self).__name__, f"{name} must be an integer ≥ 0", found=value
                )
        self._device = torch.device(device)
        self.max_atoms = max_atoms
        self.max_edges = max_edges
        self._buffer: Batch | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    def __len__(self) -> int:
        return 0 if self._buffer is None else self._buffer.num_graphs

    def _write(self, batch: Batch) -> None:
        batch = batch if batch.device == self._device else batch.to(self._device)
        self._check_room(batch)
        if self._buffer is None:
            self._buffer = Batch.empty(
                num_systems=self.capacity,
                num_nodes=self.capacity * self.max_atoms,
                num_edges=self.capacity * self.max_edges,
                template=batch,
                device=self._device,
            )
        # put notes on its source what a later defrag() is to drop: that is not the sink's to say.
        noted = batch._copied
        # A mask on the host: for one on the device put would have to wait.
        self._buffer.put(batch, torch.ones(batch.num_graphs, dtype=torch.bool))
        batch._copied = noted

    def _check_room(self, batch: Batch) -> None:
        held = self._buffer
        for word, new, old, limit in (
            ("Atom", batch.num_nodes_list, held and held.num_nodes_list, self.max_atoms),
            ("Edge", batch.num_edges_list, held and held.num_edges_list, self.max_edges),
        ):
            rows = sum(new) + sum(old or ())
            if rows > self.capacity * limit:
                raise DynamicsError(
                    type(self).__name__,
                    f"{word} capacity exceeded",
                    found=rows,
                    expected=f"{self.capacity} systems of {limit}",
                    mend=f"raise max_{word.lower()}s",
                )

    def _read(self) -> Batch:
        assert self._buffer is not None
        return self._buffer.index_select(slice(0, len(self)))

    def zero(self) -> None:
        if self._buffer is not None:
            self._buffer.zero()


class GPUBuffer(_Preallocated):
    """A buffer in GPU memory, allocated once.

    Parameters
    ----------
    capacity : int
    max_atoms, max_edges : int
        Of one system; ``capacity`` times as many rows are allocated.
    device : str

    Raises
    ------
    DynamicsError
        There is no CUDA device.
    """

    def __init__(
        self, capacity: int, max_atoms: int, max_edges: int, device: str | torch.device = "cuda"
    ) -> None:
        super().__init__(capacity, max_atoms, max_edges, device)
        if self._device.type != "cuda" or not torch.cuda.is_available():
            raise DynamicsError(
                "GPUBuffer",
                "a CUDA device is required",
                found=str(self._device) + ("" if torch.cuda.is_available() else ", no CUDA here"),
                mend="use HostMemory",
            )


class ZarrData(DataSink):
    """A store on disk; what is written survives the process.

    A store that exists is opened and continued. Each write is one commit, or
    one in ``flush_every`` (then `flush`, `read` and the end of a ``with`` block
    commit the rest).

    Parameters
    ----------
    store : str, Path, Zarr store or dict
    capacity : int
    config : ZarrWriteConfig or dict, optional
        Acts when the store is created.
    flush_every : int
        Systems gathered in host memory before a commit.
    """

    _noun: ClassVar[str] = "store"

    def __init__(
        self,
        store: Any,
        capacity: int = 1_000_000,
        config: Any = None,
        *,
        flush_every: int = 1,
    ) -> None:
        super().__init__(capacity)
        if not isinstance(flush_every, int) or flush_every < 1:
            raise ConfigError("ZarrData", "flush_every must be at least 1", found=flush_every)
        from alchemi_xr.store.writer import StoreWriter

        self.store = store
        self.flush_every = flush_every
        self._writer = StoreWriter(store, config)
        self._pending = HostMemory(capacity)
        self._committed = self._count_committed()

    def _count_committed(self) -> int:
        from alchemi_xr.store.reader import open_store

        try:
            snapshot = open_store(self.store)
        except StoreNotFoundError:
            return 0
        count = len(snapshot.active)
        snapshot.close()
        return count

    def __len__(self) -> int:
        return self._committed + len(self._pending)

    def _write(self, batch: Batch) -> None:
        before = self._pending.held()
        self._pending.write(batch)
        if len(self._pending) < self.flush_every:
            return
        try:
            self.flush()
        except Exception:
            # The caller still has this batch and may try again: it must not come twice.
            self._pending.hold(before)
            raise

    def flush(self) -> None:
        """Commit what was gathered."""
        if not len(self._pending):
            return
        block = self._pending.read().to_block()
        if self._exists():
            self._writer.append(block)
        else:
            self._writer.write(block)
        self._committed += block.num_samples
        self._pending.zero()

    def _exists(self) -> bool:
        from alchemi_xr.store.reader import open_store

        if self._committed:
            return True
        try:
            open_store(self.store).close()
        except StoreNotFoundError:
            return False
        return True

    def _read(self) -> Batch:
        from alchemi_xr.store.reader import open_store

        self.flush()
        snapshot = open_store(self.store)
        block = snapshot.read_block(snapshot.active)
        snapshot.close()
        return Batch.from_block(block)

    def zero(self) -> None:
        """Delete the store, if it is one."""
        self._pending.zero()
        if self._exists():
            _remove_store(self.store)
        self._committed = 0

    def __enter__(self) -> ZarrData:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.flush()


def _remove_store(store: Any) -> None:
    """Remove a store, and of a place that is shared with other things only what is its own."""
    from alchemi_xr.store import fs
    from alchemi_xr.store._compat import wait
    from alchemi_xr.store.locate import locate

    place = locate(store)
    if place.path is not None:
        fs.remove_tree(place.path)
        return
    assert place.store is not None
    # The root document first: without it nothing here is a store.
    wait(place.store.delete(place.key("zarr.json")))
    for member in ("meta", "core", "custom"):
        wait(place.store.delete_dir(place.key(member)))

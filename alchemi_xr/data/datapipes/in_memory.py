"""A dataset that is one Batch: read once, then only rows are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from alchemi_xr.data.batch import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes.backends.base import as_reader
from alchemi_xr.data.datapipes.dataset import compose_batch
from alchemi_xr.data.datapipes.prefetch import Loaded, PrefetchingDataset, batch_tensors
from alchemi_xr.data.datapipes.streams import Staged, on_stream, record_event, resolve_device
from alchemi_xr.data.datapipes.validate import match_dtypes, validate_batch
from alchemi_xr.data.datapipes.windows import WindowPlan, plan_windows
from alchemi_xr.data.transforms import Compose
from alchemi_xr.errors import ArgumentTypeError, ConfigError
from alchemi_xr.native import available

__all__ = ["InMemoryDataset"]


class InMemoryDataset(PrefetchingDataset):
    """All samples in one Batch.

    Parameters
    ----------
    in_memory_batch : Batch, optional
    reader : Reader, optional
        Read whole and closed. Exactly one of the two.
    chunk_size : int
        Samples of one read.
    device : str or torch.device, optional
        Where batches are given; None leaves them where the data is. The data
        itself stays where it is.
    skip_validation : bool
        Trust the reader.
    batch_transforms : sequence of callable, optional
        ``Batch -> Batch``, applied once: to the batch, or to each chunk read.

    Raises
    ------
    ConfigError
        None or both of batch and reader; a chunk size below 1; an empty reader.
    """

    def __init__(
        self,
        in_memory_batch: Batch | None = None,
        *,
        reader: Any = None,
        chunk_size: int = 4096,
        device: str | torch.device | None = None,
        skip_validation: bool = False,
        batch_transforms: Sequence[Callable[[Batch], Batch]] | None = None,
    ) -> None:
        # Nothing is read: choosing rows in a thread would only cost the hand-over.
        super().__init__(num_workers=0)
        if (in_memory_batch is None) == (reader is None):
            raise ConfigError(
                "InMemoryDataset",
                "Pass exactly one of in_memory_batch and reader",
                found="none" if reader is None else "both",
            )
        if in_memory_batch is not None and not isinstance(in_memory_batch, Batch):
            raise ArgumentTypeError(
                "InMemoryDataset",
                "in_memory_batch is no Batch",
                found=type(in_memory_batch).__name__,
                mend="Batch.from_data_list(samples), or reader=... for a reader",
            )
        self.target_device = None if device is None else resolve_device(device)
        transform = compose_batch(batch_transforms, name="batch_transforms")
        if in_memory_batch is not None:
            self.in_memory_batch = transform(in_memory_batch) if transform else in_memory_batch
        else:
            self.in_memory_batch = _read_all(
                reader, chunk_size, transform, validate=not skip_validation
            )
        self._pin_memory = False
        # Streams that wait already for the data to be all there.
        self._ordered: set[int] = set()
        self._planned: tuple[tuple[Any, ...], WindowPlan | None] | None = None

    @property
    def device(self) -> torch.device:
        """Where batches are given."""
        return self.target_device or self.in_memory_batch.device

    @property
    def pin_memory(self) -> bool:
        """Whether the data is in page-locked memory (never without CUDA)."""
        return self._pin_memory

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        on_cpu = self.in_memory_batch.device.type == "cpu"
        if value and not self._pin_memory and on_cpu and torch.cuda.is_available():
            self.in_memory_batch.pin_memory()
        self._pin_memory = bool(value)

    @property
    def field_names(self) -> list[str]:
        return [name for name, _ in self.in_memory_batch]

    def __len__(self) -> int:
        return int(self.in_memory_batch.num_graphs)

    def get_metadata(self, index: int) -> tuple[int, int]:
        position = self._positions([index])[0]
        batch = self.in_memory_batch
        atoms = batch.atoms_ptr[position + 1] - batch.atoms_ptr[position]
        edges = batch.edges_ptr[position + 1] - batch.edges_ptr[position]
        return int(atoms), int(edges)

    def settle_in_worker(self) -> None:
        super().settle_in_worker()
        self.target_device, self._pin_memory = None, False

    def _select(self, positions: Sequence[int]) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.long)
        batch = self.in_memory_batch.index_select(index.to(self.in_memory_batch.device))
        if self.target_device is None or batch.device == self.target_device:
            return batch
        return batch.to(self.target_device, non_blocking=True)

    def _plan(self) -> WindowPlan | None:
        """The gather of the batch as it is now, or None where torch has to choose the rows."""
        batch = self.in_memory_batch
        # A field that was set anew has other memory.
        key = (batch._atoms, batch._edges, *batch._fields.values(), *batch._present.values())
        if self._planned is not None:
            held = self._planned[0]
            if len(held) == len(key) and all(a is b for a, b in zip(held, key, strict=True)):
                return self._planned[1]
        plan = None
        plain = all(
            value.device.type == "cpu" and not value.requires_grad and value.is_contiguous()
            and value.dtype != torch.bfloat16
            for value in batch._fields.values()
        )  # fmt: skip
        if plain and available()["rows"]:
            plan = plan_windows(
                {name: value.numpy() for name, value in batch._fields.items()},
                batch._levels,
                batch._atoms.host,
                batch._edges.host,
                present={name: mask.numpy() for name, mask in batch._present.items()},
                units=batch._units,
            )
        self._planned = key, plan
        return plan

    def _chosen(self, lists: Sequence[Sequence[int]]) -> list[Batch]:
        plan = self._plan()
        if plan is None:
            return [self._select(positions) for positions in lists]
        samples = np.concatenate([np.asarray(one, dtype=np.int64) for one in lists])
        bounds = np.fromiter(accumulate(map(len, lists), initial=0), np.int64, len(lists) + 1)
        batches = plan(samples, bounds)
        assert batches is not None  # positions are checked
        if self.target_device is None or self.target_device.type == "cpu":
            return batches
        return [batch.to(self.target_device, non_blocking=True) for batch in batches]

    def __getstate__(self) -> dict[str, Any]:
        # Addresses and streams are of this process.
        return {**super().__getstate__(), "_planned": None, "_ordered": set()}

    def _order(self, stream: Any) -> None:
        """Rows are chosen on ``stream`` only after the data was put together on this one."""
        home = self.in_memory_batch.device
        if stream is not None and home.type == "cuda" and id(stream) not in self._ordered:
            stream.wait_stream(torch.cuda.current_stream(home))
            self._ordered.add(id(stream))

    def _load(self, positions: list[int], stream: Any) -> Staged[Loaded]:
        self._order(stream)
        with on_stream(stream):
            loaded = Loaded(self._select(positions), [{} for _ in positions])
            event = record_event(stream)
        return Staged(loaded, event, Loaded.tensors)

    def _stage_batches(self, lists: Sequence[Sequence[int]], stream: Any) -> list[Staged[Batch]]:
        if stream is None:
            return [Staged(batch) for batch in self._chosen(lists)]
        staged = []
        self._order(stream)
        for positions in lists:
            with on_stream(stream):
                (batch,) = self._chosen([positions])
                staged.append(Staged(batch, record_event(stream), batch_tensors))
        return staged


def _read_all(source: Any, chunk_size: int, transform: Compose | None, *, validate: bool) -> Batch:
    """A reader's samples as one Batch on the CPU; the reader is closed."""
    reader = as_reader(source)
    try:
        if chunk_size < 1:
            raise ConfigError(
                "InMemoryDataset", "chunk_size is too small", found=chunk_size, expected=">= 1"
            )
        if len(reader) == 0:
            raise ConfigError(reader.where, "Cannot materialize an empty reader")
        warned: set[tuple[str, torch.dtype]] = set()
        blocks = []
        for start in range(0, len(reader), chunk_size):
            indices = range(start, min(start + chunk_size, len(reader)))
            chunk = reader.read_batch(indices)
            if validate:
                validate_batch(chunk, indices, where=reader.where)
                match_dtypes(chunk, warned, where=reader.where)
            blocks.append((transform(chunk) if transform else chunk).to_block())
    finally:
        reader.close()
    return Batch.from_block(Block.concat(blocks, where=reader.where))

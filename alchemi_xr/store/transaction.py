"""Many appends and deletions, one commit.

Samples are gathered in memory up to a number of bytes; what exceeds it is
written behind the committed end, where no reader looks. All of it becomes true
at the end of the ``with`` block in one replacement of the root document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from alchemi_xr._typing import BoolArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index
from alchemi_xr.store import layout
from alchemi_xr.store.growth import Growth
from alchemi_xr.store.incoming import Incoming, receive

if TYPE_CHECKING:
    from alchemi_xr.store.commit import Session
    from alchemi_xr.store.schema import StoreSchema

__all__ = ["TRANSACTION_BYTES", "Transaction"]

TRANSACTION_BYTES = 64 * 2**20
"""Bytes of samples held in memory before they are written behind the committed end."""


class Transaction:
    """What was asked for since the ``with`` block began.

    Parameters
    ----------
    growth : Growth
    schema : StoreSchema
        The committed one.
    max_bytes : int
    """

    def __init__(self, growth: Growth, schema: StoreSchema, *, max_bytes: int) -> None:
        self.growth = growth
        self.before = schema
        self.schema = schema
        self.max_bytes = max_bytes
        self.generation = schema.generation + 1
        self._blocks: list[Block] = []
        self._samples = 0
        self._bytes = 0
        self._signature: Any = None
        self._alive: list[tuple[Any, bool]] = []

    @property
    def num_samples(self) -> int:
        """Samples of the store as it will be, deleted ones included."""
        return self.schema.counts.samples + self._samples

    @property
    def session(self) -> Session:
        return self.growth.session

    def append(self, block: Block) -> None:
        """Add samples; refused here, not at the end, when they do not fit the store."""
        incoming = receive(block, where=self.growth.where)
        if block.num_samples == 0:
            return
        signature = _signature(block, incoming)
        if signature != self._signature:
            # Only like is joined with like, so that joining changes no dtype.
            self._write()
            self.growth.check(self.schema, incoming)
            self._signature = signature
        elif self._narrows(incoming):
            self.growth.check(self.schema, incoming)
        self._blocks.append(block)
        self._samples += block.num_samples
        self._bytes += sum(item.values.nbytes for item in incoming.values())
        if self._bytes > self.max_bytes:
            self._write()

    def _narrows(self, incoming: dict[str, Incoming]) -> bool:
        """Whether values are looked at one by one, as whole numbers of another dtype are."""
        fields = self.schema.fields
        return any(
            name in fields and item.values.dtype != fields[name].dtype
            for name, item in incoming.items()
        )

    def mark(self, indices: Any, *, alive: bool) -> None:
        """Delete or undelete samples, those of this transaction included."""
        index = as_index(indices, self.num_samples, where=self.growth.where)
        if len(index):
            self._alive.append((index, alive))

    def _write(self) -> None:
        """Write what is held behind the committed end."""
        if not self._blocks:
            return
        blocks, self._blocks = self._blocks, []
        self._samples = self._bytes = 0
        joined = Block.concat(blocks, where=self.growth.where)
        blocks.clear()
        incoming = receive(joined, where=self.growth.where)
        self.schema = self.growth.add(self.schema, joined, incoming, self.generation)

    def finish(self) -> tuple[StoreSchema, BoolArray | None, Any]:
        """Write the rest; the schema to commit, the new sample mask, the samples it changes."""
        self._write()
        samples = self.schema.counts.samples
        if not self._alive:
            return self.schema, None, None
        known = self.before.counts.samples
        mask = np.ones(samples, dtype=bool)
        held = self.session.array(layout.SAMPLES_MASK) if known else None
        if held is not None:
            mask[:known] = np.asarray(held[:known]).astype(bool)
        was = mask.copy()
        for index, alive in self._alive:
            mask[index] = alive
        changed = np.flatnonzero(was != mask)
        if not len(changed):
            return self.schema, None, None
        return self.schema, mask, changed


def _signature(block: Block, incoming: dict[str, Incoming]) -> Any:
    return (
        tuple(sorted(block.units.items())),
        *((n, i.info.level, i.values.dtype, i.info.tail) for n, i in incoming.items()),
    )

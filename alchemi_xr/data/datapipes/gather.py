"""Samples in any order out of a snapshot, as one flat block.

Storage is read in ascending order, each sample once; the order asked for,
repeats included, is made in memory. A plan knows the rows of a read before any
byte moves, so that another way to the bytes (mapped chunks, a cache of decoded
ones) takes the place of ``Snapshot.read_block`` and of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import coalesce
from alchemi_xr.store.reader import Snapshot

__all__ = ["GatherPlan", "gather", "plan_gather"]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """What a request for samples means for storage.

    Parameters
    ----------
    samples : int64 array, [M]
        Physical positions to read, ascending, none twice.
    order : int64 array, [B], optional
        Place of each requested sample among these; None when they are the
        request as it stands.
    """

    samples: IntArray
    order: IntArray | None

    def runs(self) -> list[tuple[int, int]]:
        """Half-open runs of neighbouring samples."""
        starts, stops = coalesce(self.samples, self.samples + 1)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))


def plan_gather(samples: IntArray) -> GatherPlan:
    """The plan of a request for physical positions.

    Examples
    --------
    >>> plan = plan_gather(np.array([7, 2, 7, 3]))
    >>> plan.samples, plan.order, plan.runs()
    (array([2, 3, 7]), array([2, 0, 2, 1]), [(2, 4), (7, 8)])
    """
    if len(samples) < 2 or bool((np.diff(samples) > 0).all()):
        return GatherPlan(samples, None)
    unique, order = np.unique(samples, return_inverse=True)
    return GatherPlan(unique, order.astype(np.int64, copy=False))


def gather(snapshot: Snapshot, samples: IntArray, fields: Sequence[str]) -> Block:
    """The samples as a block, in the order given.

    Parameters
    ----------
    snapshot : Snapshot
    samples : int64 array, [B]
        Physical positions, in range; any order, repeats allowed.
    fields : sequence of str

    Returns
    -------
    Block
        Arrays of its own, edges local to each sample.
    """
    plan = plan_gather(samples)
    block = snapshot.read_block(plan.samples, fields)
    return block if plan.order is None else block.take(plan.order)

"""The order of an epoch: pure functions of the seed and the epoch's number.

An order is an array that can be made again, so a state of a loader is three
whole numbers and resuming costs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.errors import IndexRangeError

__all__ = ["cut", "cut_lists", "epoch_order"]


def epoch_order(length: int, *, shuffle: bool, seed: int, epoch: int) -> IntArray:
    """Indices of one epoch, int64 [length].

    Examples
    --------
    >>> epoch_order(3, shuffle=False, seed=0, epoch=0)
    array([0, 1, 2])
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(length).astype(np.int64, copy=False)


def cut(order: IntArray, size: int, *, drop_last: bool, skip: int = 0) -> Iterator[IntArray]:
    """Batches of an order as views, from batch ``skip`` on.

    Examples
    --------
    >>> [list(map(int, b)) for b in cut(np.arange(5), 2, drop_last=False, skip=1)]
    [[2, 3], [4]]
    """
    stop = len(order) - len(order) % size if drop_last else len(order)
    for start in range(skip * size, stop, size):
        yield order[start : min(start + size, stop)]


def cut_lists(indices: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[Sequence[int]]:
    """Batches of any sampler's indices, drawn as they are needed."""
    batch: list[int] = []
    for index in indices:
        try:
            # A fraction is a slip, not an index to be cut off.
            batch.append(operator.index(index))
        except TypeError:
            raise IndexRangeError(
                "sampler", "gave what is no index", found=repr(index)[:60], expected="whole numbers"
            ) from None
        if len(batch) == size:
            yield batch
            batch = []
    if batch and not drop_last:
        yield batch

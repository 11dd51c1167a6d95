"""The order of an epoch and its batches: pure functions of the seed and the epoch's number.

An order is an array that can be made again, so a state of a loader is three
whole numbers and resuming costs nothing. Batches are bounds in it, and with
many ranks each takes every so manieth batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

# NumPy loads it when it is asked for, which would be in the first batch.
from numpy.random import default_rng

from alchemi_xr._typing import IntArray
from alchemi_xr.errors import IndexRangeError

__all__ = ["batch_bounds", "cut_lists", "epoch_order", "of_rank"]


def epoch_order(
    length: int,
    *,
    shuffle: bool | str,
    seed: int,
    epoch: int,
    block_starts: IntArray | None = None,
    blocks_at_once: int = 1,
) -> IntArray:
    """Indices of one epoch, int64 [length].

    Parameters
    ----------
    length : int
    shuffle : bool or "block"
        ``"block"``: blocks in random order, and samples in random order within
        each ``blocks_at_once`` of them. Storage is then read block by block.
    seed, epoch : int
    block_starts : int64 array, optional
        First sample of each block, ascending, from 0.
    blocks_at_once : int

    Examples
    --------
    >>> epoch_order(3, shuffle=False, seed=0, epoch=0)
    array([0, 1, 2])
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    rng = default_rng([seed, epoch])
    if shuffle != "block" or block_starts is None or len(block_starts) < 2:
        return rng.permutation(length).astype(np.int64, copy=False)
    bounds = np.append(block_starts, length)
    order = np.empty(length, dtype=np.int64)
    blocks, done = rng.permutation(len(block_starts)), 0
    for first in range(0, len(blocks), blocks_at_once):
        some = blocks[first : first + blocks_at_once]
        parts = [np.arange(bounds[b], bounds[b + 1]) for b in some.tolist()]
        mixed = rng.permutation(np.concatenate(parts))
        order[done : done + len(mixed)] = mixed
        done += len(mixed)
    return order


def batch_bounds(
    length: int,
    *,
    batch_size: int | None,
    limits: Sequence[tuple[IntArray, int]] = (),
    drop_last: bool = False,
    world_size: int = 1,
) -> IntArray:
    """Bounds of the batches of an order, int64 [batches + 1].

    The number of batches is a multiple of ``world_size``, so that all ranks make
    the same number of steps: the widest of the last batches are cut in two, or
    with ``drop_last`` the last incomplete round is left out. Where there are too
    few samples for that, see `of_rank`.

    Parameters
    ----------
    length : int
    batch_size : int, optional
        The most samples of a batch.
    limits : sequence of (array, int)
        Sizes of the samples in their order, none above the number, and the most
        of them in a batch, such as atoms. Batches are filled one after the other.
    drop_last : bool
        Also leaves out a last batch of less than ``batch_size``.
    world_size : int

    Examples
    --------
    >>> batch_bounds(5, batch_size=2).tolist()
    [0, 2, 4, 5]
    >>> batch_bounds(5, batch_size=2, world_size=2).tolist()
    [0, 2, 3, 4, 5]
    >>> batch_bounds(4, batch_size=None, limits=[(np.array([3, 3, 2, 9]), 9)]).tolist()
    [0, 3, 4]
    """
    if not limits:
        assert batch_size is not None
        bounds = np.arange(0, length + 1, batch_size, dtype=np.int64)
        if bounds[-1] < length and not drop_last:
            bounds = np.append(bounds, length)
    else:
        bounds = _filled(length, batch_size, limits)
    count = len(bounds) - 1
    missing = -count % world_size
    if not missing:
        return bounds
    if drop_last:
        return bounds[: count - count % world_size + 1]
    return _split(bounds, missing, world_size)


def _filled(
    length: int, batch_size: int | None, limits: Sequence[tuple[IntArray, int]]
) -> IntArray:
    """Bounds of batches that take what fits."""
    ends = [(np.cumsum(sizes), limit) for sizes, limit in limits]
    bounds, start = [0], 0
    while start < length:
        stop = length if batch_size is None else min(length, start + batch_size)
        for end, limit in ends:
            before = int(end[start - 1]) if start else 0
            stop = min(stop, int(np.searchsorted(end, before + limit, side="right")))
        start = max(stop, start + 1)
        bounds.append(start)
    return np.array(bounds, dtype=np.int64)


def _split(bounds: IntArray, missing: int, world_size: int) -> IntArray:
    """More batches out of the last ones, the widest cut first, as far as that goes."""
    first = max(0, len(bounds) - 1 - 2 * world_size)
    # Batches of one sample cannot be cut: begin where there is enough to cut after.
    spare = np.cumsum((np.diff(bounds) - 1)[::-1])
    enough = len(spare) - 1 - int(np.searchsorted(spare, missing))
    first = max(0, min(first, enough))
    tail = bounds[first:].tolist()
    for _ in range(missing):
        widths = np.diff(tail)
        widest = int(np.argmax(widths)) if len(widths) else 0
        if not len(widths) or widths[widest] < 2:
            break
        tail.insert(widest + 1, (tail[widest] + tail[widest + 1] + 1) // 2)
    return np.concatenate([bounds[:first], np.array(tail, dtype=np.int64)])


def of_rank(bounds: IntArray, rank: int, world_size: int) -> IntArray:
    """Numbers of the batches that a rank takes, in their order.

    With fewer samples than would make a whole round, the last batch is taken by
    more than one rank.

    Examples
    --------
    >>> of_rank(np.array([0, 2, 3, 4, 5]), 1, 2).tolist()
    [1, 3]
    """
    count = len(bounds) - 1
    numbers = np.arange(rank, -(-count // world_size) * world_size, world_size)
    return np.minimum(numbers, count - 1)


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

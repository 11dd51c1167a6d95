"""Reading ahead: windows of batches in flight while one is given away.

An iteration has its own threads, and they end with it, however it ends. What is
read and in which order is decided elsewhere.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from time import perf_counter
from typing import Any, TypeAlias

from alchemi_xr.data.batch import Batch
from alchemi_xr.data.datapipes.prefetch import FUSED_QUEUE, THREAD_PREFIX
from alchemi_xr.data.datapipes.streams import Staged

__all__ = ["read_ahead", "read_now"]

#: Seconds below which a read ahead takes more batches, and how many at most.
_WORTH_A_THREAD = 1.5e-3
_MOST_AT_ONCE = 32
_MOST_OF_NO_THREAD = 8

#: Batches, the seconds they took, and the error that came after them.
_Read: TypeAlias = tuple[deque[Staged[Batch]], float, Exception | None]
#: Dataset, indices of each batch, batches of one read, stream.
_Ask: TypeAlias = tuple[Any, list[Sequence[int]], int, Any]


def read_now(dataset: Any, plan: Iterator[Sequence[int]]) -> Generator[Batch, None, None]:
    """One read a batch, when it is asked for."""
    for indices in plan:
        yield from dataset.load_batches([indices])


def read_ahead(
    dataset: Any, plan: Iterator[Sequence[int]], *, window: int, streams: Sequence[Any] = ()
) -> Generator[Batch, None, None]:
    """Batches in order, two reads in flight while one is given away.

    Parameters
    ----------
    dataset : Dataset
    plan : iterator of sequence of int
        Indices of each batch.
    window : int
        Batches of one read; reads of no time are put together.
    streams : sequence
        CUDA streams that the reads take in turn.
    """
    workers = int(getattr(dataset, "num_workers", 1))
    if workers == 0:
        # Nothing is in flight, but a few batches of one gather cost less than each alone.
        most, turn = window, 0
        while lists := list(islice(plan, most)):
            ready, seconds, error = _stage_many(dataset, lists, window, _turn(streams, turn))
            turn += 1
            if seconds < _WORTH_A_THREAD and most < _MOST_OF_NO_THREAD:
                most *= 2
            while ready:
                yield ready.popleft().wait()
            if error is not None:
                raise error
        return
    executor = ThreadPoolExecutor(min(workers, FUSED_QUEUE), THREAD_PREFIX)
    flying: deque[tuple[Future[_Read], _Ask]] = deque()
    # What was found out in the epoch before still holds in this one.
    reads = min(int(getattr(dataset, "_together", 1)), max(1, _MOST_AT_ONCE // window))
    number, process = 0, os.getpid()
    try:
        while True:
            if os.getpid() != process:
                # Forked meanwhile: the threads that would bring these are in the parent.
                process = os.getpid()
                executor = ThreadPoolExecutor(min(workers, FUSED_QUEUE), THREAD_PREFIX)
                flying = deque((executor.submit(_stage_many, *ask), ask) for _, ask in flying)
            while len(flying) < FUSED_QUEUE:
                lists = list(islice(plan, window * reads))
                if not lists:
                    break
                ask = dataset, lists, window, _turn(streams, number)
                flying.append((executor.submit(_stage_many, *ask), ask))
                number += 1
            if not flying:
                return
            ready, seconds, error = flying.popleft()[0].result()
            # Handing over to a thread and back costs as much as a hundred samples out of
            # mapped files: what is read in no time is read many at once.
            if seconds < _WORTH_A_THREAD and reads * window < _MOST_AT_ONCE:
                reads *= 2
            elif seconds > 8 * _WORTH_A_THREAD and reads > 1:
                reads //= 2
            if hasattr(dataset, "_together"):
                dataset._together = reads
            while ready:
                # Taken out before it is given: nothing here keeps a batch alive.
                yield ready.popleft().wait()
            if error is not None:
                raise error
    finally:
        # A forked child ends nothing: locks of these may be held for ever.
        if os.getpid() == process:
            for future, _ in flying:
                future.cancel()
            executor.shutdown(wait=True, cancel_futures=True)


def _turn(streams: Sequence[Any], number: int) -> Any:
    return streams[number % len(streams)] if streams else None


def _stage_many(dataset: Any, lists: list[Sequence[int]], size: int, stream: Any) -> _Read:
    """Reads put together, and the seconds they took."""
    start = perf_counter()
    try:
        return _stage(dataset, lists, stream), perf_counter() - start, None
    except Exception:
        if len(lists) <= size:
            raise
    # One of them fails; those before it are given first.
    ready: deque[Staged[Batch]] = deque()
    for place in range(0, len(lists), size):
        try:
            ready += _stage(dataset, lists[place : place + size], stream)
        except Exception as error:
            return ready, perf_counter() - start, error
    return ready, perf_counter() - start, None


def _stage(dataset: Any, lists: list[Sequence[int]], stream: Any) -> deque[Staged[Batch]]:
    """Batches of one read."""
    stage = getattr(dataset, "stage_batches", None)
    if stage is not None:
        return deque(stage(lists, stream))
    return deque(Staged(batch) for batch in dataset.load_batches(lists, stream))

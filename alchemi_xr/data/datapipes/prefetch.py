"""What every dataset shares: reading ahead in threads, and the calls around it.

A dataset gives two methods, ``_load`` (samples of one read, with metadata) and
``_stage_batches`` (many batches of one read); everything that users call stands
on these. One read in the background serves ``ds[i]`` and ``get_batch`` alike.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import numpy as np
from torch import Tensor

from alchemi_xr._typing import IntArray
from alchemi_xr.data.atomic_data import AtomicData
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.csr import as_index
from alchemi_xr.data.datapipes.streams import Staged
from alchemi_xr.errors import (
    ArgumentTypeError,
    ConfigError,
    FieldError,
    IndexRangeError,
    StoreClosedError,
    StoreError,
)

__all__ = [
    "BLOCK_SAMPLES",
    "FetchedSamples",
    "THREAD_PREFIX",
    "Loaded",
    "PrefetchingDataset",
    "batch_tensors",
    "sample_sizes",
]

#: Samples of a block where the storage has no blocks of its own.
BLOCK_SAMPLES = 1024

#: Name that our threads start with, so that a leak can be seen.
THREAD_PREFIX = "alchemi_xr-prefetch"

#: Fused requests that may wait at once, as in nvalchemi-toolkit.
FUSED_QUEUE = 2

#: Datasets whose threads run: a forked process has none of these threads.
_THREADED: WeakSet[PrefetchingDataset] = WeakSet()


def _after_fork() -> None:
    """In a forked child: forget threads that are not there, and what they would have read."""
    for dataset in list(_THREADED):
        dataset._forget()
    _THREADED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class Loaded:
    """Samples of one read.

    ``samples`` is there only when a sample transform made it; otherwise single
    samples are cut out of the batch when they are asked for.
    """

    batch: Batch | None
    metadata: list[dict[str, Any]]
    samples: list[AtomicData] | None = field(default=None)

    def sample(self, position: int) -> tuple[AtomicData, dict[str, Any]]:
        """One sample with its metadata."""
        if self.samples is not None:
            return self.samples[position], self.metadata[position]
        assert self.batch is not None
        return self.batch.get_data(position), self.metadata[position]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, for the bookkeeping of streams."""
        if self.batch is not None:
            yield from batch_tensors(self.batch)
        for sample in self.samples or ():
            yield from (v for v in sample.to_dict().values() if isinstance(v, Tensor))


class FetchedSamples(Sequence[Any]):
    """Samples of one read: their Batch, and the list of them for who asks for it.

    Parameters
    ----------
    dataset : PrefetchingDataset
    indices : sequence of int
    """

    def __init__(self, dataset: PrefetchingDataset, indices: Sequence[int]) -> None:
        self._dataset = dataset
        self._indices = list(indices)
        self._samples: list[Any] | None = None

    @property
    def batch(self) -> Batch:
        """All of them as one Batch."""
        return self._dataset.get_batch(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: Any) -> Any:
        if self._samples is None:
            self._samples = self._dataset.read_many(self._indices)
        return self._samples[place]


@dataclass(frozen=True, slots=True)
class _Pending:
    """Where a prefetched sample will be: place in a read, and the batch it is part of."""

    future: Future[Staged[Loaded]]
    place: int
    key: tuple[int, ...] | None


def batch_tensors(batch: Batch) -> Iterator[Tensor]:
    """Every tensor that a Batch holds, pointers that were made on its device included."""
    yield from (value for _, value in batch if isinstance(value, Tensor))
    yield from batch.present.values()
    for rows in (batch._atoms, batch._edges):
        yield from rows.tensors()


def sample_sizes(dataset: Any) -> tuple[IntArray, IntArray]:
    """Numbers of atoms and edges of all samples, int64 [N] each."""
    find = getattr(dataset, "sample_sizes", None)
    if find is not None:
        atoms, edges = find()
        return np.asarray(atoms, np.int64), np.asarray(edges, np.int64)
    pairs = [dataset.get_metadata(i) for i in range(len(dataset))]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


class PrefetchingDataset(ABC):
    """Samples and batches by index, read ahead on request.

    Parameters
    ----------
    num_workers : int
        Threads that read ahead; 0 reads in the calling thread.

    Raises
    ------
    ConfigError
        ``num_workers`` is negative.
    """

    def __init__(self, *, num_workers: int = 2) -> None:
        if not isinstance(num_workers, int):
            raise ArgumentTypeError(
                type(self).__name__, "num_workers is no whole number", found=repr(num_workers)
            )
        if num_workers < 0:
            raise ConfigError(
                type(self).__name__, "num_workers is negative", found=num_workers, expected=">= 0"
            )
        self.num_workers = num_workers
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        # Reads that the loader puts together, as far as it has found that out.
        self._together = 1
        self._samples: dict[int, _Pending] = {}
        self._batches: dict[tuple[int, ...], Future[Staged[Loaded]]] = {}
        self._fused: deque[Future[list[Staged[Batch]]]] = deque()

    # -- what a dataset gives --------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def _load(self, positions: list[int], stream: Any) -> Staged[Loaded]:
        """Samples with metadata, on the device; positions are checked."""

    @abstractmethod
    def _stage_batches(self, lists: Sequence[Sequence[int]], stream: Any) -> list[Staged[Batch]]:
        """One Batch a list, on the device; positions are checked, no list is empty."""

    @property
    @abstractmethod
    def field_names(self) -> list[str]:
        """Names of the fields that samples can have."""

    # -- samples ---------------------------------------------------------------

    def __getitem__(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        """One sample on the device, and its metadata; waits for its prefetch if any."""
        found = self._positions([index])
        if len(found) != 1:
            raise IndexRangeError(
                type(self).__name__,
                "takes one index",
                found=f"{len(found)} indices",
                mend="get_batch(indices) gives several samples as one Batch",
            )
        position = found[0]
        pending = self._samples.pop(position, None)
        if pending is None:
            return self._load([position], None).wait().sample(0)
        if pending.key is not None:
            # Taken one by one: the batch itself is not waited for any more.
            self._batches.pop(pending.key, None)
        return pending.future.result().wait().sample(pending.place)

    def __iter__(self) -> Iterator[tuple[AtomicData, dict[str, Any]]]:
        for index in range(len(self)):
            yield self[index]

    def load_sample(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        """One sample, read now."""
        return self._load(self._positions([index]), None).wait().sample(0)

    def read_many(self, indices: Sequence[int]) -> list[tuple[AtomicData, dict[str, Any]]]:
        """Several samples out of one read, in the order asked for."""
        positions = self._positions(indices)
        if not positions:
            return []
        loaded = self._load(positions, None).wait()
        return [loaded.sample(place) for place in range(len(positions))]

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Numbers of atoms and edges of a sample."""
        sample, _ = self.load_sample(index)
        return int(sample.num_nodes), int(sample.num_edges)

    # -- batches ---------------------------------------------------------------

    def get_batch(self, indices: Sequence[int]) -> Batch:
        """Several samples as one Batch on the device.

        Takes what ``prefetch_many`` of the same indices has read.

        Raises
        ------
        FieldError
            No index.
        """
        positions = tuple(self._positions(indices))
        future = self._batches.pop(positions, None)
        if future is None:
            return self.load_batches([positions])[0]
        for position in positions:
            held = self._samples.get(position)
            if held is not None and held.future is future:
                del self._samples[position]
        batch = future.result().wait().batch
        assert batch is not None
        return batch

    def load_batches(
        self, batch_index_lists: Sequence[Sequence[int]], stream: Any = None
    ) -> list[Batch]:
        """One Batch for each list of indices, out of one read.

        Raises
        ------
        FieldError
            One of the lists is empty.
        """
        return [staged.wait() for staged in self.stage_batches(batch_index_lists, stream)]

    def stage_batches(
        self, batch_index_lists: Sequence[Sequence[int]], stream: Any = None
    ) -> list[Staged[Batch]]:
        """As ``load_batches``, but the consumer waits for the stream, later."""
        lists: list[Any] = self._checked(batch_index_lists)
        for number, positions in enumerate(lists):
            if not len(positions):
                raise FieldError(
                    type(self).__name__,
                    f"list {number} of the batch is empty",
                    expected="at least one index in each list",
                )
        return self._stage_batches(lists, stream) if lists else []

    # -- reading ahead ---------------------------------------------------------

    @property
    def prefetch_count(self) -> int:
        """Samples that are prefetched and not yet taken."""
        return len(self._samples)

    def prefetch(self, index: int, stream: Any = None) -> None:
        """Start to read a sample; nothing happens when it is on its way already."""
        self.prefetch_many([index], stream)

    def prefetch_batch(self, indices: Sequence[int], streams: Sequence[Any] | None = None) -> None:
        """Start to read samples, their copies spread over the streams in turn."""
        if not streams:
            self.prefetch_many(indices)
            return
        positions = self._positions(indices)
        for number, stream in enumerate(streams):
            if positions[number :: len(streams)]:
                self.prefetch_many(positions[number :: len(streams)], stream)

    def prefetch_many(self, indices: Sequence[int], stream: Any = None) -> None:
        """Start one read of several samples; those on their way are left out."""
        key = tuple(self._positions(indices))
        if key in self._batches:
            return
        positions = list(dict.fromkeys(p for p in key if p not in self._samples))
        if not positions:
            return
        future = self._submit(self._load, positions, stream)
        whole = key if tuple(positions) == key else None
        if whole is not None:
            self._batches[whole] = future
        for place, position in enumerate(positions):
            self._samples[position] = _Pending(future, place, whole)

    def prefetch_fused_batches(
        self, batch_index_lists: Sequence[Sequence[int]], stream: Any = None
    ) -> None:
        """Start one read of several batches, to be taken with ``get_fused_batches``.

        Raises
        ------
        StoreError
            Two requests wait already.
        """
        if len(self._fused) >= FUSED_QUEUE:
            raise StoreError(
                type(self).__name__,
                "the fused batch prefetch queue is full",
                found=len(self._fused),
                mend="take one with get_fused_batches() first",
            )
        self._fused.append(self._submit(self.stage_batches, list(batch_index_lists), stream))

    def get_fused_batches(self) -> list[Batch]:
        """Batches of the oldest request; an error of its thread is raised here.

        Raises
        ------
        StoreError
            None waits.
        """
        if not self._fused:
            raise StoreError(
                type(self).__name__,
                "No fused batch prefetch pending",
                mend="call prefetch_fused_batches(...) first",
            )
        return [staged.wait() for staged in self._fused.popleft().result()]

    def has_pending_fused_batches(self) -> bool:
        """Whether a fused request waits."""
        return bool(self._fused)

    def cancel_prefetch(self, index: int | None = None) -> None:
        """Forget one prefetched sample, or everything.

        What a thread is reading right now it reads to the end; the result is
        dropped.
        """
        if index is not None:
            held = self._samples.pop(self._positions([index])[0], None)
            if held is not None and held.key is not None:
                self._batches.pop(held.key, None)
            return
        for pending in self._samples.values():
            pending.future.cancel()
        for fused in self._fused:
            fused.cancel()
        self._samples.clear()
        self._batches.clear()
        self._fused.clear()

    def __getitems__(self, indices: Sequence[int]) -> FetchedSamples:
        """Several samples of one read: what ``torch.utils.data.DataLoader`` asks for.

        A list of ``(AtomicData, metadata)`` to any ``collate_fn``;
        ``torch_compat.as_batch`` takes the Batch behind it.
        """
        return FetchedSamples(self, indices)

    # -- other processes ---------------------------------------------------------

    def version(self) -> Any:
        """What differs when a refresh has brought other samples."""
        return len(self)

    def settle_in_worker(self) -> None:
        """Make this copy one that reads in its own thread, onto the CPU."""
        self.num_workers = 0

    # -- life ------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and give back what is held; safe to call twice."""
        self.cancel_prefetch()
        self._closed = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # Threads and what they read stay behind when a dataset goes to another process.
        kept: dict[str, Any] = {
            "_executor": None,
            "_samples": {},
            "_batches": {},
            "_fused": deque(),
        }
        return {**self.__dict__, **kept}

    def _forget(self) -> None:
        self._executor = None
        self._samples, self._batches, self._fused = {}, {}, deque()

    def _checked(self, lists: Sequence[Any]) -> list[Any]:
        """Positions of each list: arrays where arrays were given, looked at all together."""
        if not lists or not all(
            isinstance(one, np.ndarray) and one.ndim == 1 and one.dtype == np.int64 for one in lists
        ):
            return [self._positions(indices) for indices in lists]
        whole = lists[0] if len(lists) == 1 else np.concatenate(lists)
        # Negatives are above every length here: one look instead of two.
        if whole.size and whole.view(np.uint64).max() < len(self):
            return list(lists)
        found = as_index(whole, len(self), where=type(self).__name__)
        return np.split(found, np.cumsum([len(one) for one in lists])[:-1])

    def _positions(self, indices: Any) -> list[int]:
        if not isinstance(indices, (Sequence, slice, range)) and not hasattr(indices, "__array__"):
            indices = list(indices) if isinstance(indices, Iterable) else indices
        found: list[int] = as_index(indices, len(self), where=type(self).__name__).tolist()
        return found

    def _submit(self, call: Any, *arguments: Any) -> Future[Any]:
        """Run a call in the pool (started now if need be), or here without workers."""
        if self._closed:
            raise StoreClosedError(type(self).__name__, "Cannot prefetch from a closed dataset")
        if self.num_workers == 0:
            done: Future[Any] = Future()
            try:
                done.set_result(call(*arguments))
            except Exception as error:
                done.set_exception(error)
            return done
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.num_workers, THREAD_PREFIX)
            _THREADED.add(self)
        return self._executor.submit(call, *arguments)

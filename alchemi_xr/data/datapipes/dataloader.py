"""Batches of a dataset, in an order that can be made again, read ahead.

The loader owns order, position and reading ahead; what a batch is belongs to
the dataset. An iteration has its own threads: they end with it, however it
ends.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import torch

from alchemi_xr.data.batch import Batch
from alchemi_xr.data.datapipes.ahead import read_ahead, read_now
from alchemi_xr.data.datapipes.dataset import compose_batch, few, noting
from alchemi_xr.data.datapipes.epochs import EpochPlan
from alchemi_xr.data.datapipes.orders import cut_lists
from alchemi_xr.data.datapipes.streams import make_streams
from alchemi_xr.data.datapipes.workers import WorkerPool, start_method
from alchemi_xr.errors import ArgumentTypeError, ConfigError

__all__ = ["DataLoader"]

_STATE_VERSION = 1


class DataLoader:
    """Iterates over a dataset in batches.

    Parameters
    ----------
    dataset : Dataset
        Or another object with ``__len__`` and ``load_batches``.
    batch_size : int, optional
        1 by default; with ``max_atoms`` or ``max_edges`` no limit by default.
    shuffle : bool or "block"
        A new order each epoch, from ``seed`` and the epoch's number. ``"block"``
        takes the blocks of the storage in random order and shuffles within some
        at a time: nearly sequential reads, for stores that have to be decoded.
    drop_last : bool
        Leave out a last batch that is not full, and with many ranks a last round
        that is not complete.
    sampler : iterable of int, optional
        Gives the order instead of ``shuffle``.
    batch_sampler : iterable of sequence of int, optional
        Gives whole batches; ``batch_size`` and ``drop_last`` are then its own.
    prefetch_factor : int
        Batches of one read; two reads are in flight. Reads that take less than a
        millisecond or two are put together, up to 32 batches. 0 reads on demand. A batch
        that is kept keeps the memory of its read; `clone` it to keep one for long.
    num_streams : int
        CUDA streams that the copies take in turn.
    use_streams : bool
    pin_memory : bool
        Read into page-locked memory, for asynchronous copies.
    batch_transforms : sequence of callable, optional
        ``Batch -> Batch``, in the thread that iterates, or in the workers.
    num_workers : int
        Processes that read and transform, for transforms that take longer than to send
        a batch; 0 does both in this process. `prefetch_factor` is then the batches under
        way for each, and 1 at least. Transforms run on the CPU, and draw from
        generators (`torch`, `numpy.random`, `random`) that are seeded for each batch by
        `seed`, epoch, its number and the rank.
    multiprocessing_context : str or context, optional
        ``"forkserver"`` by default, or ``"spawn"`` where there is none; ``"fork"``
        needs no pickling, and is for processes without threads of their own.
    persistent_workers : bool
        The processes live on between epochs, with the transforms as they were at first,
        until ``close``.
    seed : int
        Of the shuffle; torch's global seed has no part in it.
    max_atoms, max_edges : int, optional
        Most atoms and edges of a batch: samples are taken in their order for as
        long as they fit.
    rank, world_size : int
        This process takes each ``world_size``-th batch of an epoch, beginning with
        number ``rank``. All ranks make the same number of steps and no sample
        comes twice: the last batches are cut smaller where that is needed. (Batches
        of one cannot be cut: the last one is repeated then, unless ``drop_last``.)
    shuffle_blocks : int
        Blocks that are shuffled together with ``shuffle="block"``.

    Notes
    -----
    Every ``iter`` starts the next epoch, unless ``set_epoch`` names one.
    ``state_dict`` holds epoch and position after the last batch given, not after
    the last one read ahead. A sampler of one's own is resumed by its own
    ``state_dict`` where it has one, else by skipping: it has to give the same
    order again, as one with ``set_epoch`` does.

    Raises
    ------
    ConfigError
        A size is too small, or ``batch_sampler`` with ``sampler`` or ``shuffle``.
    TypeError
        ``batch_transforms`` is no sequence.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool | Literal["block"] = False,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        prefetch_factor: int = 2,
        num_streams: int = 4,
        use_streams: bool = True,
        pin_memory: bool = False,
        batch_transforms: Sequence[Callable[[Batch], Batch]] | None = None,
        seed: int = 0,
        max_atoms: int | None = None,
        max_edges: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle_blocks: int = 8,
        num_workers: int = 0,
        multiprocessing_context: Any = None,
        persistent_workers: bool = False,
    ) -> None:
        for name, most in (("max_atoms", max_atoms), ("max_edges", max_edges)):
            if most is not None:
                _at_least(name, most, 1)
        if batch_size is None and max_atoms is None and max_edges is None:
            batch_size = 1
        if batch_size is not None:
            _at_least("batch_size", batch_size, 1)
        _at_least("world_size", world_size, 1)
        _at_least("rank", rank, 0)
        _at_least("shuffle_blocks", shuffle_blocks, 1)
        if rank >= world_size:
            raise ConfigError(
                "DataLoader", "rank is not below world_size", found=f"{rank} of {world_size}"
            )
        if isinstance(shuffle, str) and shuffle != "block":
            raise ConfigError(
                "DataLoader", "shuffle is not known", found=shuffle, expected="a bool or 'block'"
            )
        sampled = sampler is not None or batch_sampler is not None
        if sampled and (world_size > 1 or max_atoms is not None or max_edges is not None):
            raise ConfigError(
                "DataLoader",
                "a sampler decides its batches and ranks itself",
                mend="leave out the sampler, or max_atoms, max_edges, rank and world_size",
            )
        _at_least("prefetch_factor", prefetch_factor, 0)
        _at_least("num_streams", num_streams, 0)
        _at_least("seed", seed, 0)
        _at_least("num_workers", num_workers, 0)
        method = start_method(multiprocessing_context)
        if batch_sampler is not None and (sampler is not None or shuffle):
            raise ConfigError(
                "DataLoader",
                "batch_sampler excludes sampler and shuffle",
                mend="give the order to the batch_sampler itself",
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "load_batches"):
            raise ArgumentTypeError(
                "DataLoader",
                "reads a dataset",
                found=type(dataset).__name__,
                expected="Dataset, InMemoryDataset or MultiDataset",
                mend="wrap a reader first: DataLoader(Dataset(reader))",
            )
        for name, given in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            if given is not None and not isinstance(given, Iterable):
                raise ArgumentTypeError(
                    "DataLoader", f"{name} gives no indices", found=type(given).__name__
                )
        self.dataset = dataset
        self.batch_size = None if batch_size is None else operator.index(batch_size)
        self.shuffle = shuffle
        self.max_atoms, self.max_edges = max_atoms, max_edges
        self.rank, self.world_size = rank, world_size
        self.shuffle_blocks = shuffle_blocks
        self.drop_last = drop_last
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.prefetch_factor = prefetch_factor
        self.num_streams = num_streams
        self.seed = seed
        self._plan = EpochPlan(
            dataset,
            batch_size=self.batch_size,
            limits={"max_atoms": max_atoms, "max_edges": max_edges},
            shuffle=shuffle,
            shuffle_blocks=shuffle_blocks,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._transform = compose_batch(batch_transforms, name="batch_transforms")
        device: torch.device | None = getattr(dataset, "device", None)
        self._streams = make_streams(device, num_streams) if use_streams else []
        self.use_streams = bool(self._streams)
        self.pin_memory = pin_memory
        if pin_memory and hasattr(dataset, "pin_memory"):
            dataset.pin_memory = True
        self.num_workers = num_workers
        self._workers: Any = num_workers and WorkerPool(
            dataset,
            self._transform,
            workers=num_workers,
            method=method,
            persistent=persistent_workers,
            ahead=prefetch_factor,
            seed=seed,
            rank=int(getattr(self._source(), "rank", rank)),
            pin=pin_memory and torch.cuda.is_available(),
            streams=self._streams,
        )
        # Epoch and first batch of the next iteration.
        self._next_epoch = int(getattr(self._source(), "epoch", 0) or 0)
        self._next_step = 0
        # The position was restored for ``_next_epoch`` and for no other.
        self._restored = False
        # What the sampler was last told, to notice when its owner tells it himself.
        self._told = self._next_epoch
        # Epoch and batches given of the iteration under way, None between two.
        self._under_way: tuple[int, int] | None = None
        # State of a sampler that has one, as of the last batch given: reading ahead, it is
        # itself further on already.
        self._sampler_state: Any = None

    # -- size ------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of an epoch (of the one under way or next, where it differs)."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        if self.sampler is not None:
            assert self.batch_size is not None
            samples = len(self.sampler)  # type: ignore[arg-type]
            return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)
        return self._plan.count(self.epoch)

    @property
    def effective_read_window(self) -> int:
        """Samples of one read: what storage may put in order before it reads."""
        size = getattr(self.batch_sampler, "batch_size", self.batch_size)
        if size is None:
            size = -(-len(self.dataset) // max(1, len(self) * self.world_size))
        return (1 if self.num_workers else max(1, self.prefetch_factor)) * int(size)

    # -- where the order stands ------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one."""
        return self._next_epoch if self._under_way is None else self._under_way[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, here and in the sampler.

        A position that was restored for another epoch is given up.
        """
        _at_least("epoch", epoch, 0)
        if self._restored and epoch != self._next_epoch:
            self._next_step, self._restored = 0, False
        self._next_epoch = epoch
        self._under_way = None
        self._forward_epoch(epoch)

    def set_epoch_step(self, step: int) -> None:
        """Leave out the first batches of the next iteration."""
        _at_least("step", step, 0)
        self._next_step, self._restored = step, False

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, as plain values.

        Between two epochs, that is the beginning of the next one.
        """
        epoch, step = self._under_way or (self._next_epoch, self._next_step)
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "step": step,
            **self._identity(),
        }
        source = self._source()
        if hasattr(source, "state_dict"):
            given = self._under_way is not None and self._sampler_state is not None
            state["sampler"] = self._sampler_state if given else source.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, from the next iteration on.

        ``prefetch_factor`` may differ; what decides the order may not.

        Raises
        ------
        ConfigError
            The state is of a loader with another order.
        """
        if state.get("version") != _STATE_VERSION:
            raise ConfigError(
                "DataLoader",
                "the state has an unknown version",
                found=state.get("version"),
                expected=_STATE_VERSION,
            )
        mine = self._identity()
        for name in dict.fromkeys([*mine, *state]):
            if name in ("version", "epoch", "step", "sampler"):
                continue
            if state.get(name) != mine.get(name):
                raise ConfigError(
                    "DataLoader",
                    f"the state is of a loader with another {name}",
                    found=state.get(name),
                    expected=mine.get(name),
                    mend=f"make the loader with {name}={state.get(name)!r}",
                )
        self._next_epoch, self._next_step = int(state["epoch"]), int(state["step"])
        self._restored = True
        self._under_way = None
        self._forward_epoch(self._next_epoch)
        source = self._source()
        if "sampler" in state and hasattr(source, "load_state_dict"):
            source.load_state_dict(state["sampler"])

    # -- iteration -------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        theirs = getattr(self._source(), "epoch", self._told)
        if isinstance(theirs, int) and theirs != self._told:
            self.set_epoch(theirs)  # the sampler's owner called its set_epoch
        epoch, step = self._next_epoch, self._next_step
        self._next_epoch, self._next_step, self._restored = epoch + 1, 0, False
        self._under_way = (epoch, step)
        self._forward_epoch(epoch)
        save = getattr(self._source(), "state_dict", None)
        self._sampler_state = None if save is None else save()
        return self._iterate(epoch, step)

    def _iterate(self, epoch: int, step: int) -> Generator[Batch, None, None]:
        states: deque[Any] = deque()
        plan = self._index_batches(epoch, step)
        if self._sampler_state is not None:
            plan = _noting(plan, self._source(), states)
        pool = self._workers
        batches = pool.batches(plan, epoch, step) if pool else self._give(plan)
        try:
            for batch in batches:
                step += 1
                self._under_way = (epoch, step)
                if states:
                    self._sampler_state = states.popleft()
                yield batch
            if self._under_way == (epoch, step):
                self._under_way = None
        finally:
            batches.close()

    def close(self) -> None:
        """End worker processes that wait for a next iteration; the loader can go on after it.

        Those of an iteration end with it, however it ends.
        """
        if self._workers:
            self._workers.close()

    def iterate_part(self, part: int, parts: int) -> Generator[Batch, None, None]:
        """Each ``parts``-th batch of the next iteration, from number ``part`` on.

        For worker processes that share an iteration: the position here stays, so
        ``set_epoch`` and ``set_epoch_step`` say what the next one gives.
        """
        epoch, step = self._next_epoch, self._next_step
        self._forward_epoch(epoch)
        plan = islice(self._index_batches(epoch, step), part, None, parts)
        yield from self._give(plan)

    def _give(self, plan: Iterator[Any]) -> Generator[Batch, None, None]:
        """The batches of a plan, transformed; an error says which samples it is about."""
        if self._transform is None:
            yield from self._read(plan)
            return
        lists: deque[Sequence[int]] = deque()
        batches = self._read(_keeping(plan, lists))
        try:
            for batch in batches:
                with noting(f"in batch_transforms, on the batch of samples {few(lists.popleft())}"):
                    ready = self._transform(batch)
                yield ready
        finally:
            batches.close()

    def _read(self, plan: Iterator[Any]) -> Generator[Batch, None, None]:
        if not self.prefetch_factor:
            return read_now(self.dataset, plan)
        return read_ahead(self.dataset, plan, window=self.prefetch_factor, streams=self._streams)

    def _index_batches(self, epoch: int, skip: int) -> Iterator[Any]:
        """Indices of each batch of an epoch, from batch ``skip`` on."""
        source = self._source()
        if source is None:
            return self._plan.lists(epoch, skip)
        if hasattr(source, "load_state_dict"):
            skip = 0  # it stands where it was left
        if self.batch_sampler is not None:
            return islice(self.batch_sampler, skip, None)
        assert self.batch_size is not None
        lists = cut_lists(source, self.batch_size, drop_last=self.drop_last)
        return islice(lists, skip, None)

    # -- inside ----------------------------------------------------------------

    def _source(self) -> Any:
        return self.batch_sampler if self.batch_sampler is not None else self.sampler

    def _forward_epoch(self, epoch: int) -> None:
        source = self._source()
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        self._told = epoch

    def _identity(self) -> dict[str, Any]:
        """What decides the order, beside epoch, step and rank."""
        known: dict[str, Any] = {
            "num_samples": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }
        if self.shuffle == "block":
            known["shuffle_blocks"] = self.shuffle_blocks
        if self.world_size > 1:
            known["world_size"] = self.world_size
        for name in ("max_atoms", "max_edges"):
            if getattr(self, name) is not None:
                known[name] = getattr(self, name)
        return known


def _noting(
    plan: Iterator[Sequence[int]], source: Any, states: deque[Any]
) -> Iterator[Sequence[int]]:
    """The same plan; the sampler's state after each batch is kept beside it."""
    for indices in plan:
        states.append(source.state_dict())
        yield indices


def _keeping(plan: Iterator[Sequence[int]], lists: deque[Sequence[int]]) -> Iterator[Sequence[int]]:
    """The same plan; what it gave is kept beside it."""
    for indices in plan:
        lists.append(indices)
        yield indices


def _at_least(name: str, value: int, least: int) -> None:
    try:
        operator.index(value)
    except TypeError:
        raise ArgumentTypeError(
            "DataLoader", f"{name} is no whole number", found=repr(value)[:60], expected=">= 0"
        ) from None
    if value < least:
        raise ConfigError("DataLoader", f"{name} is too small", found=value, expected=f">= {least}")

"""Worker processes of a loader: batches are read and transformed there, and come in order.

The processes are those of ``concurrent.futures``: a death of one is noticed at once, and
each batch goes to whoever is free. The memory of batches is torch's shared memory, which
has no name and cannot be left behind. Nothing of it depends on the main thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from weakref import WeakSet

import torch
import torch.multiprocessing

from alchemi_xr.config import get_options
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.datapipes import in_worker
from alchemi_xr.data.datapipes.cache import DEFAULT_BYTES, process_cache
from alchemi_xr.data.datapipes.forks import renew_in_child
from alchemi_xr.data.datapipes.in_worker import Failure, Task, Work
from alchemi_xr.data.datapipes.packing import Packed, pack, unpack
from alchemi_xr.data.datapipes.prefetch import batch_tensors
from alchemi_xr.data.datapipes.streams import Staged, move_batch, on_stream, record_event
from alchemi_xr.errors import ArgumentTypeError, ConfigError, WorkerError

__all__ = ["WorkerPool", "start_method"]

#: Seconds that a worker has to finish the batch that it is at, when the iteration ends.
PATIENCE = 5.0
_NEVER = 2**62


def start_method(given: Any) -> str:
    """Name of a way to start processes; by default the one that is safe beside threads.

    Parameters
    ----------
    given : str or multiprocessing context, optional

    Raises
    ------
    ConfigError
        The system has no such way.
    ArgumentTypeError
        Neither a name nor a context.
    """
    known = multiprocessing.get_all_start_methods()
    if given is None:
        return "forkserver" if "forkserver" in known else "spawn"
    name = given if isinstance(given, str) else getattr(given, "get_start_method", lambda: None)()
    if not isinstance(name, str):
        raise ArgumentTypeError(
            "DataLoader",
            "multiprocessing_context is no way to start processes",
            found=type(given).__name__,
            expected=f"one of {', '.join(known)}",
        )
    if name not in known:
        raise ConfigError(
            "DataLoader",
            "multiprocessing_context is not known here",
            found=repr(name),
            expected=f"one of {', '.join(known)}",
        )
    return name


class _Crew:
    """Worker processes that have begun, for one iteration at a time."""

    def __init__(self, payload: Packed | Work, *, workers: int, method: str, version: Any) -> None:
        self.version = version
        self.process = os.getpid()
        self.is_broken = False
        self._ended = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._turn = 0
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            _preload()
        self._executor = ProcessPoolExecutor(
            workers, context, initializer=in_worker.start, initargs=(payload, self._ended)
        )

    def begin(self) -> int:
        """Number of a new iteration."""
        self._turn += 1
        return self._turn

    def submit(self, task: Task) -> Future[Any]:
        """Have a batch made."""
        return self._executor.submit(in_worker.run, task)

    def drop(self, flying: deque[Future[Any]]) -> None:
        """Nobody waits for these any more; what is begun is finished and thrown away."""
        self._ended[0] = self._turn
        for future in flying:
            future.cancel()

    def _processes(self) -> list[Any]:
        return list((getattr(self._executor, "_processes", None) or {}).values())

    def broke(self) -> WorkerError:
        """One of the processes died: what to tell of it."""
        self.is_broken = True
        processes = self._processes()
        self.end()
        # The others were ended with SIGTERM when one had died.
        codes = {process.exitcode for process in processes} - {None, 0, -signal.SIGTERM}
        found = ", ".join(_ending(code) for code in sorted(codes))
        return WorkerError(
            "DataLoader",
            "a worker process died",
            found=found or None,
            mend="if memory ran out: fewer workers or smaller batches. A script that reads with "
            "workers begins under `if __name__ == '__main__':`. num_workers=0 shows an error in "
            "a transform where it happens",
        )

    def end(self) -> None:
        """End the processes; those that are stuck in a batch are given no mercy."""
        self._ended[0] = _NEVER
        processes = self._processes()
        late = threading.Timer(PATIENCE, _terminate, [processes])
        late.daemon = True
        late.start()
        try:
            self._executor.shutdown(wait=True, cancel_futures=True)
        finally:
            late.cancel()
            late.join()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _terminate(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()


def _preload() -> None:
    """Let the server import torch once, for all workers, unless somebody chose already."""
    try:
        from multiprocessing.forkserver import _forkserver

        if _forkserver._preload_modules in ([], ["__main__"]):  # type: ignore[attr-defined]
            multiprocessing.set_forkserver_preload(["__main__", in_worker.__name__])
    except (ImportError, AttributeError):  # slower to begin, and else the same
        pass


# Crews of a parent process: in a forked child they are kept, for to end them would end its.
_PARENTS: list[_Crew] = []


class WorkerPool:
    """Makes the batches of a plan in worker processes.

    Parameters
    ----------
    dataset : Dataset
        Goes to the workers, without device: batches are moved in this process.
    transform : callable, optional
        Of whole batches.
    workers : int
    method : str
        How processes are started.
    persistent : bool
        They live on for the next iteration, until ``close``.
    ahead : int
        Batches under way for each worker.
    seed, rank : int
        Of the random numbers in transforms.
    pin : bool
        Have batches in page-locked memory.
    streams : sequence
        CUDA streams that the copies take in turn.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Batch], Batch] | None,
        *,
        workers: int,
        method: str,
        persistent: bool,
        ahead: int,
        seed: int,
        rank: int,
        pin: bool,
        streams: Sequence[Any],
    ) -> None:
        self._dataset, self._transform = dataset, transform
        self._workers, self._method, self._persistent = workers, method, persistent
        self._most = workers * max(1, ahead)
        self._seed, self._rank = seed, rank
        self._pin, self._streams = pin, streams
        self._copies = 0
        self._idle: _Crew | None = None
        self._crews: WeakSet[_Crew] = WeakSet()
        renew_in_child(self)

    def renew(self) -> None:
        """In a forked child: the processes are the parent's."""
        _PARENTS.extend(self._crews)
        self._idle, self._crews = None, WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": None, "_crews": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._crews = WeakSet()
        renew_in_child(self)

    def close(self) -> None:
        """End the processes that wait for a next iteration."""
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.end()

    # -- iteration -------------------------------------------------------------------

    def batches(
        self, plan: Iterator[Sequence[int]], epoch: int, step: int
    ) -> Generator[Batch, None, None]:
        """The batches of a plan, in its order.

        Parameters
        ----------
        plan : iterator of sequence of int
        epoch : int
        step : int
            Number of the plan's first batch in the epoch.
        """
        crew = self._crew()
        turn, flying = crew.begin(), deque[Future[Any]]()
        tasks = (Task(turn, epoch, number, indices) for number, indices in enumerate(plan, step))
        late: Exception | None = None

        def fill() -> None:
            nonlocal late
            while late is None and len(flying) < self._most:
                try:
                    flying.append(crew.submit(next(tasks)))
                except StopIteration:
                    return
                except Exception as error:  # what was planned before it is given first
                    late = error

        try:
            fill()
            while flying:
                if os.getpid() != crew.process:
                    raise WorkerError(
                        "DataLoader",
                        "this process was forked while worker processes read for its parent",
                        mend="begin another iteration here",
                    )
                try:
                    ready = flying[0].result()
                except BrokenProcessPool as error:
                    raise crew.broke() from error
                flying.popleft()
                if isinstance(ready, Failure):
                    raise ready.error()
                fill()
                yield self._deliver(ready)
            if isinstance(late, BrokenProcessPool):
                raise crew.broke() from late
            if late is not None:
                raise late
        finally:
            if os.getpid() == crew.process:
                crew.drop(flying)
                self._leave(crew)

    def _deliver(self, packed: Packed) -> Batch:
        """The batch on the device of the dataset."""
        batch: Batch = unpack(packed.pin_memory() if self._pin else packed)
        device = getattr(self._dataset, "device", None)
        if device is None or batch.device == device:
            return batch
        stream = None
        if self._streams:
            stream = self._streams[self._copies % len(self._streams)]
            self._copies += 1
        with on_stream(stream):
            moved = move_batch(batch, device)
            staged = Staged(moved, record_event(stream), batch_tensors)
        return staged.wait()

    # -- processes -------------------------------------------------------------------

    def _crew(self) -> _Crew:
        find = getattr(self._dataset, "version", None)
        version = len(self._dataset) if find is None else find()
        idle, self._idle = self._idle, None
        if idle is not None:
            if idle.version == version:
                return idle
            idle.end()  # they read what was there before a refresh
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                "DataLoader",
                "a daemonic process cannot have worker processes",
                mend="num_workers=0 here",
            )
        crew = _Crew(self._payload(), workers=self._workers, method=self._method, version=version)
        self._crews.add(crew)
        return crew

    def _leave(self, crew: _Crew) -> None:
        """An iteration has ended, this way or another."""
        if self._persistent and not crew.is_broken and self._idle is None:
            self._idle = crew
        else:
            crew.end()

    def _payload(self) -> Packed | Work:
        for dataset in getattr(self._dataset, "datasets", (self._dataset,)):
            held = getattr(dataset, "in_memory_batch", None)
            if held is not None and held.device.type != "cpu":
                raise ConfigError(
                    "DataLoader",
                    "worker processes cannot read what is in the memory of a device",
                    found=f"an InMemoryDataset on {held.device}",
                    mend="keep the batch on the CPU and give InMemoryDataset(device=...), or "
                    "num_workers=0: choosing rows on the device takes no time",
                )
        limit = process_cache().limit
        share = max(min(DEFAULT_BYTES, limit), limit // self._workers)
        options = {**get_options(), "cache_bytes": share}
        work = Work(self._dataset, self._transform, self._seed, self._rank, options)
        if self._method == "fork":
            return work
        try:
            return pack(work, by_value=True)
        except Exception as error:
            raise ArgumentTypeError(
                "DataLoader",
                f"{self._culprit()} cannot be sent to worker processes",
                found=f"{type(error).__name__}: {error}",
                mend="read a store from a path or URL (one in memory: write it to a path), open "
                "files in the worker and not before, or multiprocessing_context='fork'",
            ) from error

    def _culprit(self) -> str:
        try:
            pack(self._transform, by_value=True)
        except Exception:
            return "batch_transforms"
        return f"the {type(self._dataset).__name__}, its reader or one of its transforms"

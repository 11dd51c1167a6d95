"""What a worker process of a loader does: read a batch, transform it, send it.

It has a dataset of its own and nothing else of its loader. Which batch it makes does
not hang on which worker it is: random numbers are seeded anew for each batch.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from alchemi_xr.config import set_options
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.datapipes.dataset import few, noting
from alchemi_xr.data.datapipes.packing import Packed, pack, unpack
from alchemi_xr.errors import WorkerError

__all__ = ["Failure", "Task", "Work", "run", "start"]

#: Seconds between two looks at whether the loader's process is alive.
_LOOK = 2.0
#: Errors of a chain of causes that are sent.
_CAUSES = 4


@dataclass(frozen=True, slots=True)
class Task:
    """One batch: ``step`` counts from the beginning of the epoch, ``turn`` iterations."""

    turn: int
    epoch: int
    step: int
    indices: Sequence[int]


@dataclass(slots=True)
class Work:
    """What all batches have in common.

    Parameters
    ----------
    dataset : Dataset
    transform : callable, optional
        Of whole batches, after the dataset's own.
    seed, rank : int
    options : dict
        Those of the loader's process.
    """

    dataset: Any
    transform: Callable[[Batch], Batch] | None
    seed: int
    rank: int
    options: Mapping[str, Any]

    def settle(self) -> None:
        """Once, in the worker."""
        set_options(**self.options)
        settle = getattr(self.dataset, "settle_in_worker", None)
        if settle is not None:
            settle()

    def batch(self, task: Task) -> Batch:
        """The batch of a task on the CPU."""
        self._seed(task)
        try:
            (batch,) = self.dataset.load_batches([task.indices])
        except Exception as error:
            self._blame(task.indices, error)
            raise
        if self.transform is not None:
            about = f"in batch_transforms, on the batch of samples {few(task.indices)}"
            with noting(about):
                batch = self.transform(batch)
        return batch

    def _seed(self, task: Task) -> None:
        entropy = [self.seed, task.epoch, task.step, self.rank]
        words = np.random.SeedSequence(entropy).generate_state(3).tolist()
        random.seed(words[0])
        np.random.seed(words[1])  # noqa: NPY002 - for transforms that draw from it
        torch.default_generator.manual_seed(words[2])

    def _blame(self, indices: Sequence[int], error: Exception) -> None:
        """Find the sample that an error of reading is about, where it does not say so."""
        if getattr(error, "__notes__", None):
            return
        for index in indices:
            try:
                self.dataset.load_batches([[int(index)]])
            except Exception as alone:
                if type(alone) is type(error):
                    error.add_note(f"on sample {index}")
                    return


class Failure:
    """An error on its way out of a worker, with its causes, notes and traceback.

    Parameters
    ----------
    error : Exception
    task : Task
    """

    def __init__(self, error: BaseException, task: Task) -> None:
        self.text = "".join(traceback.format_exception(error))
        self.where = (
            f"in worker process {os.getpid()}, batch {task.step} of epoch {task.epoch}, "
            f"samples {few(task.indices)}"
        )
        self.kind = type(error).__name__
        self.notes = list(getattr(error, "__notes__", ()))
        self.chain: list[bytes] = []
        one: BaseException | None = error
        while one is not None and len(self.chain) < _CAUSES:
            try:
                self.chain.append(cloudpickle.dumps(one))
            except Exception:
                break
            one = one.__cause__

    def error(self) -> BaseException:
        """The error as it was raised; a WorkerError where it cannot be made again."""
        made: list[BaseException] = []
        for data in self.chain:
            try:
                one = pickle.loads(data)
            except Exception:
                break
            if not isinstance(one, BaseException):
                break
            if made:
                made[-1].__cause__ = one
            made.append(one)
        if made:
            error = made[0]
            error.__notes__ = list(self.notes)
        else:
            error = WorkerError(
                "DataLoader",
                f"a worker process raised {self.kind}, which cannot be sent to this one",
                mend="see its traceback below",
            )
            for note in self.notes:
                error.add_note(note)
        error.add_note(f"{self.where}\n\n{self.text}")
        return error


_payload: Any = None
_work: Any = None
_ended: Tensor | None = None


def start(payload: Packed | Work, ended: Tensor) -> None:
    """Begin a worker process.

    Parameters
    ----------
    payload : Packed or Work
        Packed, but for a forked worker.
    ended : int64 tensor, [1], shared
        Tasks of iterations up to this number are no longer wanted.
    """
    global _payload, _work, _ended
    # Ctrl-C reaches all processes of a terminal: the loader's own ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _payload, _work, _ended = payload, None, ended
    threading.Thread(target=_watch, name="alchemi_xr-watch", daemon=True).start()


def _watch() -> None:
    """End with the process that has started this one, however that ended."""
    parent, before = parent_process(), os.getppid()
    while os.getppid() == before:
        if parent is None:
            threading.Event().wait(_LOOK)
        elif connection.wait([parent.sentinel], _LOOK):
            break
    os._exit(1)


def run(task: Task) -> Packed | Failure | None:
    """The packed batch of a task, or what came instead; None when nobody wants it."""
    global _payload, _work
    assert _ended is not None
    if task.turn <= int(_ended[0]):
        return None
    try:
        if _work is None:
            work: Work = unpack(_payload) if isinstance(_payload, Packed) else _payload
            work.settle()
            _work, _payload = work, None
        batch = _work.batch(task)
        try:
            return pack(batch)
        except Exception:
            return pack(batch, by_value=True)  # of a class of the script, say
    except BaseException as error:
        return Failure(error, task)

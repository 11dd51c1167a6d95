"""Instructions to tasks, and the ends of tasks to events.

An executor runs units somewhere: in this process, or on Dask workers. The loop
here only carries messages between it and the state machine, which decides.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from alchemi_xr.campaign.results import CampaignFolder, Rejected, UnitFacts
from alchemi_xr.campaign.state import (
    Abort,
    CampaignState,
    Event,
    Fatal,
    Finish,
    LimitHit,
    Reject,
    SlotsChanged,
    Submit,
    Unit,
    UnitDone,
    UnitFailed,
)
from alchemi_xr.errors import CampaignError, ConfigError

__all__ = ["DaskExecutor", "Executor", "InlineExecutor", "drive", "open_executor"]

#: Seconds after which a task that no worker can take is given up. Without it
#: a campaign whose last worker died for good would wait for ever.
NO_WORKERS_TIMEOUT = "60s"


class Executor(Protocol):
    """Where units run."""

    slots: int

    def submit(self, instruction: Submit) -> None:
        """Begin a unit."""

    def next_events(self) -> list[tuple[Event, Any]]:
        """Wait for something to happen; each event with the outcome of its unit, if any."""

    def close(self) -> None:
        """Stop everything that runs and what was started for it."""


def _event(outcome: Any) -> Event:
    """What an outcome means to the state machine."""
    if outcome.kind == "limit":
        return LimitHit(outcome.key, outcome.rejected, outcome.reason)
    if outcome.kind == "fatal":
        return Fatal(outcome.reason, outcome.traceback)
    return UnitDone(outcome.key, outcome.finished, outcome.rejected)


class InlineExecutor:
    """Runs units in this process, one after the other: for debugging and small work."""

    slots = 1

    def __init__(self, folder: CampaignFolder, token: str) -> None:
        self._folder = folder
        self._token = token
        self._next: Submit | None = None

    def submit(self, instruction: Submit) -> None:
        self._next = instruction

    def next_events(self) -> list[tuple[Event, Any]]:
        from alchemi_xr.campaign.worker import run_unit

        task, self._next = self._next, None
        assert task is not None, "nothing was submitted"
        try:
            outcome = run_unit(
                str(self._folder.path), self._token, task.unit, task.scale, task.budget
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            failed = UnitFailed(task.unit.key, reason, traceback.format_exc(), broken=True)
            return [(failed, None)]
        return [(_event(outcome), outcome)]

    def close(self) -> None:
        self._next = None


def _run_on_worker(directory: str, token: str, unit: Unit, scale: float, budget: int | None) -> Any:
    from alchemi_xr.campaign.worker import run_unit

    return run_unit(directory, token, unit, scale, budget)


class DaskExecutor:
    """Runs units as tasks of a Dask cluster.

    Parameters
    ----------
    client : distributed.Client
    folder : CampaignFolder
        On a file system that the workers share.
    token : str
    resources : dict, optional
        What each task takes of a worker, such as ``{"GPU": 1}``.
    closing : list of callables
        What to close at the end, first to last.
    """

    def __init__(
        self,
        client: Any,
        folder: CampaignFolder,
        token: str,
        *,
        resources: dict[str, float] | None = None,
        closing: list[Callable[[], object]] | None = None,
    ) -> None:
        as_completed: Any = _distributed().as_completed

        self._client = client
        self._folder = folder
        self._token = token
        self._resources = resources
        self._closing = closing or []
        self._tasks: dict[Any, Submit] = {}
        self._done = as_completed(loop=client.loop, raise_errors=False)
        self.slots = self._count_slots()

    def _count_slots(self) -> int:
        """Units that run at once: threads, or how often the resources fit."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        slots = 0
        for worker in workers:
            fits = [int(worker["nthreads"])]
            for name, amount in (self._resources or {}).items():
                fits.append(int(worker.get("resources", {}).get(name, 0) // amount))
            slots += min(fits)
        # No more than can run: a task that only waits on a worker would be
        # blamed when another one kills that worker.
        return slots

    def submit(self, instruction: Submit) -> None:
        future = self._client.submit(
            _run_on_worker,
            str(self._folder.path),
            self._token,
            instruction.unit,
            instruction.scale,
            instruction.budget,
            key=f"unit-{instruction.unit.key}-{self._token}-{os.urandom(3).hex()}",
            pure=False,
            retries=0,
            resources=self._resources,
        )
        self._tasks[future] = instruction
        self._done.add(future)

    def next_events(self) -> list[tuple[Event, Any]]:
        future = next(self._done)
        task = self._tasks.pop(future)
        events = [self._ended(future, task)]
        slots = self._count_slots()
        if slots and slots != self.slots:
            self.slots = slots
            events.append((SlotsChanged(slots), None))
        return events

    def _ended(self, future: Any, task: Submit) -> tuple[Event, Any]:
        from distributed import KilledWorker
        from distributed.scheduler import NoValidWorkerError

        key = task.unit.key
        if future.status == "finished":
            outcome = future.result()
            return _event(outcome), outcome
        if future.status == "cancelled":
            why = "the task was cancelled, or its scheduler lost it"
            return UnitFailed(key, why, begun=False), None
        error = future.exception()
        if isinstance(error, NoValidWorkerError):
            return Fatal(f"no worker could take unit {key} within {NO_WORKERS_TIMEOUT}"), None
        if isinstance(error, KilledWorker):
            # Did the unit do anything there? Its temporary folder says so.
            begun = self._folder.sweep(key)
            return UnitFailed(key, "its worker died (killed, or out of memory)", begun=begun), None
        trace = "".join(traceback.format_exception(error))
        return UnitFailed(key, f"{type(error).__name__}: {error}", trace, broken=True), None

    def close(self) -> None:
        if self._tasks:
            with contextlib.suppress(Exception):
                self._client.cancel(list(self._tasks), force=True)
        for close in self._closing:
            with contextlib.suppress(Exception):
                close()
        self._closing = []


def open_executor(workers: Any, folder: CampaignFolder, token: str, *, device: str) -> Executor:
    """An executor for any way to name one.

    Parameters
    ----------
    workers : None, int, str, cluster or distributed.Client
        None: one worker a GPU where there are any and ``device`` allows, else
        one a core. A number of CPU workers (0: no Dask, this process). The
        address of a scheduler, a cluster or a client, used as they are.
    folder : CampaignFolder
    token : str
    device : {"auto", "cpu", "cuda"}

    Raises
    ------
    ConfigError
        It is none of these.
    """
    if isinstance(workers, bool):
        raise ConfigError("workers", "not a way to name workers", found=workers)
    if isinstance(workers, int) and workers < 0:
        raise ConfigError("workers", "fewer than none", found=workers)
    if workers == 0:
        return InlineExecutor(folder, token)
    gpus = _gpus() if device != "cpu" else 0
    if workers is None or isinstance(workers, int):
        if gpus:
            return _gpu_cluster(min(workers or gpus, gpus), folder, token)
        return _cpu_cluster(workers or len(os.sched_getaffinity(0)), folder, token)
    Client = _distributed().Client
    if isinstance(workers, Client):
        return _of_client(workers, folder, token, [])
    if isinstance(workers, str) or hasattr(workers, "scheduler_address"):
        try:
            client = Client(workers, timeout=10, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "workers",
                f"no scheduler answers at {workers!r} ({error})",
                mend="give the address that the scheduler prints, or a number of workers",
            ) from error
        return _of_client(client, folder, token, [client.close])
    raise ConfigError(
        "workers",
        "not a way to name workers",
        found=type(workers).__name__,
        expected="None, a number, an address, a cluster or a Client",
    )


def _distributed() -> Any:
    """The package, untyped as it is; imported when a cluster is wanted."""
    return importlib.import_module("distributed")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def _campaign_settings() -> Iterator[None]:
    """Scheduler settings under which one bad unit takes one worker, not all."""
    import dask

    with dask.config.set(
        {
            # We count attempts ourselves; Dask's own three retries would let a
            # unit that kills its worker take four of them.
            "distributed.scheduler.allowed-failures": 0,
            "distributed.scheduler.no-workers-timeout": NO_WORKERS_TIMEOUT,
        }
    ):
        yield


def _cpu_cluster(workers: int, folder: CampaignFolder, token: str) -> DaskExecutor:
    dd = _distributed()
    with _campaign_settings():
        cluster = dd.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",  # None would take the common port and warn about it
            silence_logs=50,
            env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        client = dd.Client(cluster, set_as_default=False)
    return _started(client, cluster, folder, token)


def _gpu_cluster(workers: int, folder: CampaignFolder, token: str) -> DaskExecutor:
    dd = _distributed()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(workers)]
    spec = {
        f"gpu-{i}": {
            "cls": dd.Nanny,
            "options": {
                "nthreads": 1,
                "resources": {"GPU": 1},
                "env": {"CUDA_VISIBLE_DEVICES": names[i], "OMP_NUM_THREADS": "1"},
            },
        }
        for i in range(workers)
    }
    with _campaign_settings():
        cluster = dd.SpecCluster(
            workers=spec,
            scheduler={"cls": dd.Scheduler, "options": {"port": 0, "dashboard_address": ":0"}},
            silence_logs=50,
        )
        client = dd.Client(cluster, set_as_default=False)
    return _started(client, cluster, folder, token, resources={"GPU": 1})


def _started(
    client: Any, cluster: Any, folder: CampaignFolder, token: str, **options: Any
) -> DaskExecutor:
    """An executor on a cluster of its own, which is closed also when it never starts."""
    try:
        client.wait_for_workers(1, timeout=120)
        closing = [client.close, cluster.close]
        return DaskExecutor(client, folder, token, closing=closing, **options)
    except BaseException:
        client.close()
        cluster.close()
        raise


def _of_client(
    client: Any, folder: CampaignFolder, token: str, closing: list[Callable[[], object]]
) -> DaskExecutor:
    client.wait_for_workers(1, timeout=60)
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    # Workers that declare GPUs are asked for one each, the others for a thread.
    gpu = any(w.get("resources", {}).get("GPU") for w in workers)
    return DaskExecutor(
        client, folder, token, resources={"GPU": 1} if gpu else None, closing=closing
    )


def drive(
    state: CampaignState,
    executor: Executor,
    folder: CampaignFolder,
    *,
    advance: Callable[[int, str], None],
) -> None:
    """Run a campaign to its end.

    Parameters
    ----------
    state : CampaignState
    executor : Executor
    folder : CampaignFolder
        Told of everything.
    advance : callable
        Told of settled samples, with a note: the progress display.

    Raises
    ------
    CampaignError
        The campaign was aborted: its failure limit, or something fatal.
    """
    todo = [*state.handle(SlotsChanged(executor.slots))]
    while True:
        for instruction in todo:
            match instruction:
                case Submit():
                    executor.submit(instruction)
                case Reject():
                    _commit_rejected(folder, instruction)
                    advance(instruction.unit.size, _note(state))
                case Abort():
                    folder.record("abort", reason=instruction.reason)
                    raise CampaignError(
                        str(folder.path),
                        instruction.reason,
                        mend=_abort_mend(instruction),
                    )
                case Finish():
                    return
        todo = []
        for event, outcome in executor.next_events():
            _tell(folder, event, outcome)
            todo += state.handle(event)
            if isinstance(event, UnitDone):
                advance(event.finished + event.rejected, _note(state))


def _abort_mend(abort: Abort) -> str:
    mend = (
        "what is finished is kept; mend the cause (reasons: rejects.jsonl in this folder) and "
        "run again, or allow more with max_failures"
    )
    return f"{mend}\n{abort.traceback}" if abort.traceback else mend


def _note(state: CampaignState) -> str:
    notes = []
    if state.rejected:
        notes.append(f"{state.rejected} failed")
    if state.lost:
        notes.append(f"{state.lost} units lost and redone")
    return ", ".join(notes)


def _tell(folder: CampaignFolder, event: Event, outcome: Any) -> None:
    match event:
        case UnitDone():
            folder.record(
                "done",
                unit=event.key,
                finished=event.finished,
                rejected=event.rejected,
                seconds=outcome.seconds,
                steps=outcome.steps,
                retries=outcome.retries,
            )
        case UnitFailed():
            folder.record("lost", unit=event.key, reason=event.reason, begun=event.begun)
        case LimitHit():
            folder.remember_abandoned(outcome.rejects)
            folder.record("limit", unit=event.key, rejected=event.rejected, reason=event.reason)
        case Fatal():
            folder.record("fatal", reason=event.reason, traceback=event.traceback)
        case SlotsChanged():
            folder.record("workers", slots=event.slots)


def _commit_rejected(folder: CampaignFolder, instruction: Reject) -> None:
    """A unit whose every sample is set aside, committed by the driver."""
    import numpy as np

    unit = instruction.unit
    rejects = [
        Rejected(int(i), instruction.reason, "worker", instruction.traceback, unit.key)
        for i in unit.samples()
    ]
    facts = UnitFacts(
        key=unit.key,
        ranges=unit.ranges,
        finished=0,
        rejected=unit.size,
        steps=0,
        frames=0,
        seconds=0.0,
        retries=0,
    )
    writer = folder.begin(unit)
    try:
        writer.commit(None, np.empty(0, dtype=np.int64), rejects, facts)
    finally:
        writer.abandon()
    folder.record("rejected", unit=unit.key, reason=instruction.reason)

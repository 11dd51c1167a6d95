"""Carry a plan out: graph, journal and progress together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from alchemi_xr.plan.client import Runner
from alchemi_xr.plan.graph import Inputs, build_graph
from alchemi_xr.plan.journal import Journal
from alchemi_xr.plan.plan import Plan
from alchemi_xr.plan.progress import Progress
from alchemi_xr.plan.tasks import Reader
from alchemi_xr.store.bulk import BulkWriter

__all__ = ["run_plan"]


def run_plan(
    plan: Plan,
    reader: Reader,
    writer: BulkWriter,
    journal: Journal,
    runner: Runner,
    progress: Progress,
    *,
    title: str = "convert",
    inputs: Inputs | None = None,
) -> None:
    """Write every shard that the journal does not hold yet.

    Afterwards the journal has all shards and the statistics of all extents;
    the store is complete but for its commit. ``inputs`` are results of another
    graph that the reader takes beside the payloads.
    """
    work = build_graph(
        plan,
        reader,
        writer,
        window=plan.window(runner.threads),
        done_shards=journal.shards,
        done_extents=journal.extents,
        inputs=inputs,
    )
    progress.start(title, plan.num_samples, "samples")
    for number in journal.extents:
        progress.advance(plan.extents[number].samples)
    rejected = sum(len(stats.rejects) for stats in journal.extents.values())
    # A worker elsewhere forces what it writes; here that need not wait for the disk.
    writer.defers = runner.client is None

    def report(key: Any, result: Any) -> None:
        nonlocal rejected
        if key in work.writes:
            forced.add(work.writes[key])
            return
        number = work.stats[key]
        journal.extent_done(number, result)
        rejected += len(result.rejects)
        progress.advance(plan.extents[number].samples, f"{rejected} rejected" if rejected else "")

    with _Forced(writer, journal.shard_done) as forced:
        runner.run(work.graph, work.keys, report)


class _Forced:
    """Shards that are told of once they are on the medium.

    Where the tasks leave that to us, a thread forces all that was written since it
    last began, while the tasks go on: the journal is behind, and never ahead.
    """

    def __init__(self, writer: BulkWriter, done: Callable[[int], None]) -> None:
        self._writer, self._done = writer, done
        self._waiting: list[int] = []
        self._running: tuple[Future[None], list[int]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="alchemi-force")

    def __enter__(self) -> _Forced:
        return self

    def add(self, number: int) -> None:
        """A shard that is written."""
        if not self._writer.defers:
            self._done(number)
            return
        self._waiting.append(number)
        if self._running is None or self._running[0].done():
            self._next()

    def _next(self) -> None:
        """Tell of what is forced by now, and begin with what is not."""
        running, self._running = self._running, None
        if running is not None:
            running[0].result()
            for number in running[1]:
                self._done(number)
        if self._waiting:
            self._running = self._pool.submit(self._writer.flush), self._waiting
            self._waiting = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            while kind is None and (self._running or self._waiting):
                self._next()
        finally:
            self._pool.shutdown()
            self._writer.defers = False

"""Carry a plan out: graph, journal and progress together."""

from __future__ import annotations

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

    def report(key: Any, result: Any) -> None:
        nonlocal rejected
        if key in work.writes:
            journal.shard_done(work.writes[key])
            return
        number = work.stats[key]
        journal.extent_done(number, result)
        rejected += len(result.rejects)
        progress.advance(plan.extents[number].samples, f"{rejected} rejected" if rejected else "")

    runner.run(work.graph, work.keys, report)

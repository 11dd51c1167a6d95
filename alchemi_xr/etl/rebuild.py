"""Stores made from stores through the plan: in place by a swap, or at a destination.

In place, the writer's lease is held from the count to the swap, so that what
was counted is what is read; the old generation stays readable for those who
hold it. A job that was stopped is taken up by the same call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray
from alchemi_xr._version import __version__
from alchemi_xr.errors import (
    AlchemiError,
    StoreExistsError,
    StoreNotFoundError,
)
from alchemi_xr.etl.gather import Counted, Gather, count, digest, hold, opened, release
from alchemi_xr.etl.report import MaintainReport
from alchemi_xr.etl.spool import Runs, is_scattered
from alchemi_xr.etl.union import unify
from alchemi_xr.plan.client import Runner, open_runner
from alchemi_xr.plan.elsewhere import Destination, check_place, check_reach, open_job
from alchemi_xr.plan.job import Job, Recipe, build
from alchemi_xr.plan.plan import plan_samples
from alchemi_xr.plan.progress import Progress, open_progress
from alchemi_xr.store import fs
from alchemi_xr.store.bulk import FieldLayout
from alchemi_xr.store.codecs import ZarrArrayConfig, ZarrWriteConfig, as_config
from alchemi_xr.store.locate import Place, locate
from alchemi_xr.store.reader import Snapshot, open_store
from alchemi_xr.store.rewrite import clear_unfinished, copy_samples, rewrite
from alchemi_xr.store.writer import StoreWriter

__all__ = ["Choose", "How", "build_new", "kept_config", "recipe_of", "rewritten"]

Choose = Callable[[Snapshot], tuple[IntArray, BoolArray | None]]
"""Physical positions in their new order, and which of them stay undeleted (None: all)."""


@dataclass(frozen=True)
class How:
    """Where and how a job runs: those arguments of the public functions."""

    client: Any = None
    threads: int | None = None
    memory: int | None = None
    progress: bool | Progress = True
    resume: bool = True

    @contextmanager
    def running(self) -> Iterator[tuple[Runner, Progress]]:
        """A runner and a progress display, closed at the end."""
        with (
            open_runner(self.client, threads=self.threads) as runner,
            open_progress(self.progress) as shown,
        ):
            try:
                yield runner, shown
            finally:
                release()

    def check(self, recipe: Recipe, runner: Runner, where: str) -> None:
        """Refuse a plan that needs more memory than a worker has."""
        limit = self.memory or runner.memory
        if limit:
            recipe.plan.check_memory(limit, runner.threads_per_worker, where)


def kept_config(snapshot: Snapshot) -> ZarrWriteConfig:
    """The chunks, shards and codecs that the fields of a store have.

    Those of a store that another tool wrote are not kept: they follow the
    length of its first write.
    """
    if snapshot.schema.foreign_samples:
        return ZarrWriteConfig()
    overrides = {}
    for name in snapshot.fields:
        array: Any = snapshot.array(name)
        overrides[name] = ZarrArrayConfig(
            compressors=tuple(array.compressors),
            filters=tuple(array.filters),
            serializer=None if snapshot.group(name) == "text" else array.serializer,
            chunk_size=int(array.chunks[0]),
            shard_size=None if array.shards is None else int(array.shards[0]),
        )
    return ZarrWriteConfig(field_overrides=overrides)


def recipe_of(
    stores: Sequence[Counted],
    layouts: Sequence[FieldLayout],
    config: ZarrWriteConfig,
    *,
    operation: str,
    provenance: dict[str, Any],
    samples_mask: BoolArray | None = None,
    before: Snapshot | None = None,
) -> Recipe:
    """What makes one store of the chosen samples of several.

    With ``before`` the result is the next generation of that store.
    """
    num_atoms = _joined([store.num_atoms for store in stores])
    num_edges = _joined([store.num_edges for store in stores])
    plan = plan_samples(num_atoms, num_edges, layouts, config)
    mask = np.ones(0, np.int64) if samples_mask is None else samples_mask
    fingerprint = plan.fingerprint(
        {
            "version": __version__,
            "operation": operation,
            "sources": [repr(store.token) for store in stores],
            "order": digest(*(store.order for store in stores), mask),
            "config": repr(config),
            "provenance": provenance,
        }
    )
    schema = None if before is None else before.schema
    return Recipe(
        plan,
        num_atoms,
        num_edges,
        config,
        fingerprint,
        provenance,
        generation=1 if schema is None else schema.generation + 1,
        operation=operation,
        samples_mask=samples_mask,
        others={} if schema is None else schema.others,
        history=() if schema is None else schema.history,
    )


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rewritten(
    store: Any,
    choose: Choose,
    how: How,
    *,
    operation: str,
    config: Any,
    destination: Any,
    overwrite: bool,
) -> MaintainReport:
    """A store's chosen samples, in its place or at a destination."""
    begun = time.perf_counter()
    place = locate(store)
    if destination is not None:
        report = _elsewhere(place, locate(destination), choose, how, operation, config, overwrite)
    elif place.path is None:
        report = _in_memory(place, choose, config, operation)
    else:
        report = _in_place(place, place.path, choose, how, operation, config)
    report.seconds = time.perf_counter() - begun
    return report


def _in_place(
    place: Place, path: Path, choose: Choose, how: How, operation: str, config: Any
) -> MaintainReport:
    with ExitStack() as stack:
        snapshot = stack.enter_context(StoreWriter(place).rewriting())
        runner, shown = stack.enter_context(how.running())
        job = stack.enter_context(Job(path, "rewriting"))
        chosen = kept_config(snapshot) if config is None else as_config(config)
        recipe, counted = _next(snapshot, choose, chosen, operation)
        how.check(recipe, runner, snapshot.where)
        clear_unfinished(path)
        reader = _reader([counted], recipe, job, runner, shown)
        resumed = build(recipe, reader, job, runner, shown, title=operation, resume=how.resume)
        removed = snapshot.num_samples - len(counted.order)
        report = _made(place.where, recipe, job.built_bytes(), removed=removed, resumed=resumed)
        fs.fsync_dir(job.folder)
        fs.swap(job.store, path, fs.previous_path(path))
    return report


def _elsewhere(
    place: Place,
    target: Place,
    choose: Choose,
    how: How,
    operation: str,
    config: Any,
    overwrite: bool,
) -> MaintainReport:
    with open_store(place) as snapshot:
        chosen = kept_config(snapshot) if config is None else as_config(config)
        if target.path is None and not target.is_remote:
            return _copied(snapshot, choose, target, chosen, operation)
        recipe, counted = _next(snapshot, choose, chosen, operation)
        with how.running() as running:
            part = (target.path or target, recipe, [counted])
            (report,) = build_new([part], how, *running, overwrite=overwrite)
        report.removed = snapshot.num_samples - len(counted.order)
        return report


def _next(
    snapshot: Snapshot, choose: Choose, config: ZarrWriteConfig, operation: str
) -> tuple[Recipe, Counted]:
    order, mask = choose(snapshot)
    counted = count(snapshot, order)
    hold(counted, snapshot)
    recipe = recipe_of(
        [counted],
        unify([counted]),
        config,
        operation=operation,
        provenance=snapshot.schema.provenance,
        samples_mask=mask,
        before=snapshot,
    )
    return recipe, counted


def _copied(
    snapshot: Snapshot, choose: Choose, target: Place, config: ZarrWriteConfig, operation: str
) -> MaintainReport:
    """A copy to a store that is no folder, written by this thread alone."""
    try:
        open_store(target).close()
    except StoreNotFoundError:
        pass
    else:
        raise StoreExistsError(target.where, "already exists", mend="give another place")
    order, mask = choose(snapshot)
    copy_samples(snapshot, order, target, config, operation=operation, samples_mask=mask)
    with open_store(target) as made:
        return _seen(operation, made, removed=snapshot.num_samples - len(order))


def _in_memory(place: Place, choose: Choose, config: Any, operation: str) -> MaintainReport:
    with StoreWriter(place).rewriting() as before:
        chosen = kept_config(before) if config is None else as_config(config)
        rewrite(place, chosen, operation=operation, choose=choose)
        with open_store(place) as made:
            return _seen(operation, made, removed=before.num_samples - made.num_samples)


def build_new(
    parts: Sequence[tuple[Destination, Recipe, Sequence[Counted]]],
    how: How,
    runner: Runner,
    shown: Progress,
    *,
    overwrite: bool,
) -> list[MaintainReport]:
    """New stores, each at its place; of those on this machine none appears before all are built.

    Raises
    ------
    StoreExistsError, NotAStoreError
    ConfigError
        Workers of a cluster cannot write to a destination.
    """
    # A run that was stopped between two of its stores left some at their place.
    there = [how.resume and _is_there(path, recipe) for path, recipe, _ in parts]
    if all(there):
        there = [False] * len(parts)
    for (path, recipe, _), done in zip(parts, there, strict=True):
        if not done:
            check_place(path, overwrite=overwrite)
            check_reach(path, runner)
        how.check(recipe, runner, _where(path))
    reports = []
    with ExitStack() as stack:
        jobs = [stack.enter_context(open_job(path)) for path, _, _ in parts]
        for (path, recipe, stores), job, done in zip(parts, jobs, there, strict=True):
            resumed, size = True, 0
            if not done:
                reader = _reader(stores, recipe, job, runner, shown)
                resumed = build(
                    recipe, reader, job, runner, shown, title=recipe.operation, resume=how.resume
                )
                size = job.built_bytes()
            elif isinstance(path, Path):
                size = fs.tree_bytes(path)
            reports.append(_made(_where(path), recipe, size, resumed=resumed))
        for job, done in zip(jobs, there, strict=True):
            if not done:
                job.publish(overwrite=overwrite)
    return reports


def _where(dst: Destination) -> str:
    return str(dst) if isinstance(dst, Path) else dst.where


def _reader(
    stores: Sequence[Counted], recipe: Recipe, job: Job, runner: Runner, shown: Progress
) -> Gather | Runs:
    """What reads the chosen samples: from where they stand, or from sorted runs."""
    names = [layout.name for layout in recipe.plan.layouts]
    if len(stores) == 1 and not job.is_done(recipe):
        snapshot, order = opened(stores[0].source), stores[0].order
        if is_scattered(snapshot, order, recipe.plan):
            folder = job.folder / f"runs-{recipe.identity}"
            runs = Runs(stores[0], snapshot, names, recipe.plan, folder)
            runs.prepare(runner, shown, recipe.operation)
            return runs
    return Gather(stores, names, job.folder)


def _made(
    where: str, recipe: Recipe, size: int, *, removed: int = 0, resumed: bool = False
) -> MaintainReport:
    mask, plan = recipe.samples_mask, recipe.plan
    return MaintainReport(
        where,
        recipe.operation,
        plan.num_samples,
        plan.num_atoms,
        plan.num_edges,
        removed=removed,
        deleted=0 if mask is None else int((~mask).sum()),
        output_bytes=size,
        resumed=resumed,
    )


def _seen(operation: str, snapshot: Snapshot, *, removed: int = 0) -> MaintainReport:
    return MaintainReport(
        snapshot.where,
        operation,
        snapshot.num_samples,
        snapshot.num_atoms,
        snapshot.num_edges,
        removed=removed,
        deleted=snapshot.num_samples - len(snapshot.active),
    )


def _is_there(dst: Destination, recipe: Recipe) -> bool:
    if isinstance(dst, Path) and not fs.looks_like_store(dst):
        return False
    try:
        with open_store(dst) as snapshot:
            schema = snapshot.schema
            return schema.identity == recipe.identity and schema.generation == recipe.generation
    except AlchemiError:
        if isinstance(dst, Path):
            raise
        return False

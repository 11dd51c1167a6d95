"""Convert files to a store: scan, plan, run, publish.

On a path of this machine the store is built in a hidden folder beside its
destination and appears there in one step when all is done; elsewhere its root
document is put last. A killed conversion is taken up where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alchemi_xr._typing import BoolArray, PathLike
from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl.finishing import finished, make_finish
from alchemi_xr.etl.rebuild import How
from alchemi_xr.etl.report import ConvertReport, FieldReport
from alchemi_xr.etl.request import Request
from alchemi_xr.etl.source import Mapper, Scan, plain_map
from alchemi_xr.etl.stages import make_stages
from alchemi_xr.plan.client import Runner, open_runner
from alchemi_xr.plan.elsewhere import check_place, check_reach, destination_of, open_job
from alchemi_xr.plan.job import Recipe
from alchemi_xr.plan.journal import Journal
from alchemi_xr.plan.plan import Plan
from alchemi_xr.plan.progress import Progress, open_progress
from alchemi_xr.plan.rejects import Quarantine, Reject
from alchemi_xr.plan.run import run_plan
from alchemi_xr.store import fs
from alchemi_xr.store.codecs import ZarrWriteConfig, as_config
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["append", "convert", "plan_convert"]

OnError = Literal["raise", "quarantine"]


def convert(
    src: PathLike | Sequence[PathLike],
    dst: PathLike,
    *,
    format: str | None = None,
    on_error: OnError = "raise",
    overwrite: bool = False,
    energy_key: str | Sequence[str] | None = None,
    forces_key: str | Sequence[str] | None = None,
    key_map: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    fields: Sequence[str] | None = None,
    nonfinite: Literal["keep", "quarantine"] = "keep",
    max_force: float | None = None,
    where: str | None = None,
    function: Callable[[Block], Block] | str | None = None,
    wrap: bool = False,
    baseline: Mapping[str, float] | None = None,
    cutoff: float | None = None,
    dedup: bool | float = False,
    sort: str | None = None,
    split: Mapping[str, float] | None = None,
    split_by: str | None = None,
    seed: int = 0,
    profile: Any = None,
    client: Any = None,
    threads: int | None = None,
    memory: int | None = None,
    progress: bool | Progress = True,
    resume: bool = True,
    options: Mapping[str, Any] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> ConvertReport:
    """Convert files to a store and report what came of every record.

    Parameters
    ----------
    src : path, pattern, folder, or several of them
    dst : path or URL
        Where the store appears, in one step, when all is done. At a URL objects
        are put where they belong, and the root document, put last, makes them a
        store; the journal, from which an interrupted conversion is taken up,
        lies below ``TMPDIR``.
    format : str, optional
        Name of a source; by default each says whether a file is its own.
    on_error : {"raise", "quarantine"}
        What a broken record does: stop the conversion, or be listed in
        ``<dst>.rejects.jsonl``.
    overwrite : bool
        Replace a store that is there (never anything else).
    energy_key, forces_key : str or sequence of str, optional
        Names under which the input has them, in order of preference.
    key_map : dict of str to str, optional
        Name in the input to field.
    units : dict of str to str, optional
        Unit of a field in the input, such as ``{"energy": "kcal/mol"}``.
    dtype : str or dict of str to str, optional
        Cast all floats but ``energy``, or fields by name.
    fields : sequence of str, optional
        Keep only these (and positions and atomic numbers).
    nonfinite : {"keep", "quarantine"}
    max_force : float, optional
        Set samples aside that have a larger force, eV/Å.
    where : str, optional
        Keep the samples of which this is true: ``"natoms < 200 and fmax < 50"``; see
        :class:`~alchemi_xr.etl.predicate.Predicate`.
    function : callable or "module:name", optional
        Of a :class:`~alchemi_xr.data.block.Block`, flat arrays of many samples: gives
        one with the same samples and other values or fields.
    wrap : bool
        Put positions into the cell, along periodic axes.
    baseline : dict of str to float, optional
        Energy of an atom of each element, eV, that is taken off the energy.
    cutoff : float, optional
        Give every sample its neighbour list, all pairs nearer than it, Å:
        ``neighbor_list`` and ``neighbor_list_shifts``. The input is read twice.
    dedup : bool or float
        Keep the first of the samples that are one structure, however it is turned,
        moved or numbered; a number is the tolerance of their fingerprints.
    sort : str, optional
        ``"num_atoms"``, ``"num_edges"`` or a field with one value a sample.
    split : dict of str to float, optional
        Several stores: fractions by what stands for ``{}`` in ``dst``.
    split_by : str, optional
        With ``split``, the field (or ``"composition"``) that keeps samples together;
        without, each of its values becomes a store.
    seed : int
        Of the draw of ``split``.
    profile : str, ZarrWriteConfig or mapping, optional
        How the store is cut and compressed.
    client : None, int, str, LocalCluster or Client
        Where it runs: threads here, so many worker processes, or a cluster.
    threads : int, optional
        Threads here, where there is no client.
    memory : int, optional
        Bytes that a worker may use; a plan that needs more is refused.
    progress : bool or Progress
    resume : bool
        Take up an interrupted conversion of the same input.
    options : dict, optional
        Further arguments of the source.
    storage_options : dict, optional
        For a URL: endpoint, credentials and the like.

    Raises
    ------
    SourceNotFoundError, SourceError, StoreExistsError, NotAStoreError, ConfigError, PlanError
        Nothing is left at ``dst`` that was not there before.

    Examples
    --------
    >>> report = convert("train.extxyz", "train.zarr")  # doctest: +SKIP
    """
    begun = time.perf_counter()
    config = as_config(profile)
    asked: dict[str, Any] = {
        "format": format,
        "on_error": on_error,
        "energy_key": energy_key,
        "forces_key": forces_key,
        "key_map": key_map,
        "units": units,
        "dtype": dtype,
        "fields": fields,
        "nonfinite": nonfinite,
        "max_force": max_force,
        "options": options,
    }
    stages = make_stages(
        function=function, wrap=wrap, baseline=baseline, where=where, cutoff=cutoff
    )
    finish = make_finish(dedup=dedup, sort_by=sort, split=split, split_by=split_by, seed=seed)
    if finish.any:
        with open_runner(client, threads=threads) as runner:

            def build(whole: Path) -> ConvertReport:
                return convert(
                    src,
                    whole,
                    **asked,
                    overwrite=True,
                    where=where,
                    function=function,
                    wrap=wrap,
                    baseline=baseline,
                    cutoff=cutoff,
                    profile=config,
                    client=runner.client,
                    threads=threads,
                    memory=memory,
                    progress=progress,
                    resume=resume,
                )

            return finished(
                src,
                dst,
                finish,
                build,
                How(runner.client, threads, memory, progress, resume),
                request=(asked, stages.identity(), repr(config)),
                overwrite=overwrite,
                storage_options=storage_options,
            )
    given_place = destination_of(dst, storage_options=storage_options)
    destination = check_place(given_place, overwrite=overwrite)
    name = os.fspath(dst) if isinstance(given_place, Path) else given_place.where
    given = Request(src, **asked, stages=stages)
    with open_runner(client, threads=threads) as runner:
        with open_progress(progress) as shown, open_job(destination) as job:
            check_reach(destination, runner)
            given.run_scan(str(job.spool), _scanning(runner, shown, given.kind, len(given.paths)))
            # What lies below TMPDIR here, workers elsewhere cannot reach.
            near = isinstance(destination, Path) or runner.client is None
            given.survey(runner, shown, job.spool if near else None)
            plan = given.plan(config)
            limit = memory or runner.memory
            if limit:
                plan.check_memory(limit, runner.threads_per_worker, name)
            recipe = _recipe(given, plan, config)
            writer, journal = job.prepare(recipe, resume=resume)
            resumed = journal.resumed
            with journal:
                run_plan(plan, given.reading, writer, journal, runner, shown)
            # A worker that was killed in this run leaves half-written files.
            job.sweep()
            report = _report(given, plan, journal, name)
            mask = np.ones(plan.num_samples, dtype=bool)
            mask[[r.sample for r in report.rejects if r.sample is not None]] = False
            for stats in journal.extents.values():
                for first, count in (*stats.left_out, *stats.undecided):
                    mask[first : first + count] = False
            _check_some_left(mask, report, given)
            _count_kept(report, given.scan, mask)
            kept = {**recipe.provenance, **_left_behind(report)}
            writer.schema = writer.schema.evolve(provenance=kept)
            writer.commit(None if mask.all() else mask)
            report.output_bytes = job.built_bytes()
            job.publish(overwrite=overwrite)
            thin = isinstance(destination, Path) and bool(report.left_out or report.undecided)
            if thin:
                # The rows of samples that are left out go below, and with them these places.
                report.rejects = [replace(r, sample=None) for r in report.rejects]
            if Quarantine(job.rejects).write(report.rejects):
                report.rejects_path = str(job.rejects)
        if thin and isinstance(destination, Path):
            from alchemi_xr.etl.maintain import defragment

            made = defragment(
                destination,
                client=runner.client,
                threads=runner.threads,
                memory=memory,
                progress=progress,
            )
            # The generation before is of this call alone: nobody was told of it.
            fs.remove_tree(fs.previous_path(destination))
            report.output_bytes = made.output_bytes
        elif report.left_out or report.undecided:
            report.notes.append(
                "the rows of samples that are left out are marked as deleted; defragment with a "
                "destination writes a store without them"
            )
    report.resumed = resumed
    report.seconds = time.perf_counter() - begun
    return report


def plan_convert(
    src: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    on_error: OnError = "raise",
    profile: Any = None,
    energy_key: str | Sequence[str] | None = None,
    forces_key: str | Sequence[str] | None = None,
    key_map: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    fields: Sequence[str] | None = None,
    nonfinite: Literal["keep", "quarantine"] = "keep",
    max_force: float | None = None,
    where: str | None = None,
    function: Callable[[Block], Block] | str | None = None,
    wrap: bool = False,
    baseline: Mapping[str, float] | None = None,
    cutoff: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """What :func:`convert` would do, from a scan (and a survey of the edges) alone.

    Nothing is written.

    Examples
    --------
    >>> print(plan_convert("train.extxyz").describe())  # doctest: +SKIP
    """
    given = Request(
        src,
        format=format,
        on_error=on_error,
        energy_key=energy_key,
        forces_key=forces_key,
        key_map=key_map,
        units=units,
        dtype=dtype,
        fields=fields,
        nonfinite=nonfinite,
        max_force=max_force,
        options=options,
        stages=make_stages(
            function=function, wrap=wrap, baseline=baseline, where=where, cutoff=cutoff
        ),
    )
    given.run_scan(None, plain_map)
    with open_runner(None, threads=None) as runner, open_progress(False) as shown:
        given.survey(runner, shown)
    return given.plan(as_config(profile))


def _scanning(runner: Runner, shown: Progress, kind: type[Any], files: int) -> Mapper:
    shown.start("scan", files, "files")
    # What reads in C lets other threads run; all else only waits for them.
    threads = runner.threads if getattr(kind, "scans_in_threads", False) else 1

    def mapper(function: Any, items: Sequence[Any]) -> list[Any]:
        if runner.client is not None:
            results = runner.map(function, items)
            shown.advance(len(items))
            return results
        results = []
        with ThreadPoolExecutor(threads) as pool:
            for result in (pool.map if threads > 1 else map)(function, items):
                results.append(result)
                shown.advance()
        return results

    return mapper


def _recipe(given: Request, plan: Plan, config: ZarrWriteConfig) -> Recipe:
    return Recipe(
        plan,
        given.scan.num_atoms,
        given.scan.num_edges,
        config,
        plan.fingerprint(given.identity(config)),
        given.provenance(),
    )


def _left_behind(report: ConvertReport) -> dict[str, int]:
    """Counts of the records that are not in the store, for those who only have the store."""
    names = ("rejected", "left_out", "undecided")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def _check_some_left(mask: BoolArray, report: ConvertReport, given: Request) -> None:
    if not mask.any():
        raise SourceError(
            given.paths[0],
            f"every sample was {_why_none(report)}",
            mend="look at the input, or loosen nonfinite=, max_force= and where=",
        )


def _why_none(report: ConvertReport) -> str:
    if report.rejects and not (report.left_out or report.undecided):
        return f"rejected (the first: {report.rejects[0].reason})"
    return (
        f"rejected ({len(report.rejects):,}), left out by the condition ({report.left_out:,}) "
        f"or undecided ({report.undecided:,})"
    )


def _report(given: Request, plan: Plan, journal: Journal, dst: str) -> ConvertReport:
    stats = [journal.extents[i] for i in range(len(plan.extents))]
    rejects = _in_input_order(
        [*given.scan.rejects, *(r for s in stats for r in s.rejects)], given.paths
    )
    fields = {}
    for layout in plan.layouts:
        found = [s.fields[layout.name] for s in stats if layout.name in s.fields]
        fields[layout.name] = FieldReport(
            layout.level,
            layout.dtype,
            layout.unit,
            *(sum(f[k] for f in found) for k in ("samples", "nan", "inf")),
        )
    return ConvertReport(
        destination=dst,
        source=given.kind.name,
        records=given.scan.records,
        samples=plan.num_samples,
        atoms=plan.num_atoms,
        edges=plan.num_edges,
        rejected=len(rejects),
        keys=given.scan.keys,
        fields=fields,
        nonfinite_samples=sum(s.nonfinite_samples for s in stats),
        notes=[*given.notes(), *(n for s in stats for n in s.notes)],
        rejects=rejects,
        input_bytes=given.input_bytes,
        left_out=sum(n for s in stats for _, n in s.left_out),
        undecided=sum(n for s in stats for _, n in s.undecided),
    )


def _in_input_order(rejects: list[Reject], paths: Sequence[str]) -> list[Reject]:
    place = {path: i for i, path in enumerate(paths)}
    return sorted(rejects, key=lambda r: (place.get(r.file, len(place)), r.frame))


def _count_kept(report: ConvertReport, scan: Scan, mask: BoolArray) -> None:
    report.samples = int(mask.sum())
    report.atoms = int(scan.num_atoms[mask].sum())
    report.edges = int(scan.num_edges[mask].sum())


def append(
    src: PathLike | Sequence[PathLike],
    dst: PathLike,
    *,
    format: str | None = None,
    on_error: OnError = "raise",
    energy_key: str | Sequence[str] | None = None,
    forces_key: str | Sequence[str] | None = None,
    key_map: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    fields: Sequence[str] | None = None,
    nonfinite: Literal["keep", "quarantine"] = "keep",
    max_force: float | None = None,
    where: str | None = None,
    function: Callable[[Block], Block] | str | None = None,
    wrap: bool = False,
    baseline: Mapping[str, float] | None = None,
    cutoff: float | None = None,
    progress: bool | Progress = True,
    options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Add files to a store that is there; arguments as in :func:`convert`.

    Each partition is one commit: a reader sees whole samples at any time, and
    an interrupted append leaves the whole partitions written so far. With
    ``on_error="raise"`` a broken comment line stops it before the first
    commit, a broken atom line before the commit of its partition.

    Raises
    ------
    StoreNotFoundError, NotAStoreError, SourceNotFoundError, SourceError
    """
    from alchemi_xr.store.writer import StoreWriter

    begun = time.perf_counter()
    with open_store(os.fspath(dst)) as snapshot:
        _check_same_cutoff(snapshot, cutoff)
    given = Request(
        src,
        format=format,
        on_error=on_error,
        energy_key=energy_key,
        forces_key=forces_key,
        key_map=key_map,
        units=units,
        dtype=dtype,
        fields=fields,
        nonfinite=nonfinite,
        max_force=max_force,
        options=options,
        stages=make_stages(
            function=function, wrap=wrap, baseline=baseline, where=where, cutoff=cutoff
        ),
    )
    given.run_scan(None, plain_map)
    writer = StoreWriter(os.fspath(dst))
    samples = atoms = edges = left_out = undecided = 0
    rejects = list(given.scan.rejects)
    with open_progress(progress) as shown:
        shown.start("append", len(given.scan.num_atoms), "samples")
        for partition in given.scan.partitions:
            result = given.read_whole(partition)
            keep = result.kept()
            left_out += len(result.left_out)
            undecided += len(result.undecided)
            block = result.block if keep.all() else result.block.take(np.flatnonzero(keep))
            rejects += result.rejects
            if block.num_samples:
                writer.append(block)
            samples += block.num_samples
            atoms += block.num_atoms
            edges += block.num_edges
            shown.advance(partition.samples)
    report = ConvertReport(
        destination=os.fspath(dst),
        source=given.kind.name,
        records=given.scan.records,
        samples=samples,
        atoms=atoms,
        edges=edges,
        rejected=len(rejects),
        keys=given.scan.keys,
        notes=given.notes(),
        rejects=_in_input_order(rejects, given.paths),
        input_bytes=given.input_bytes,
        seconds=time.perf_counter() - begun,
        left_out=left_out,
        undecided=undecided,
    )
    if rejects:
        path = os.path.abspath(os.fspath(dst)) + ".rejects.jsonl"
        Quarantine(path).write(report.rejects)
        report.rejects_path = path
    return report


def _check_same_cutoff(snapshot: Snapshot, cutoff: float | None) -> None:
    """Refuse samples whose neighbour lists would differ from those that are there."""
    there = snapshot.schema.provenance.get("stages", {}).get("cutoff")
    if there != cutoff and (there is not None or "neighbor_list" in snapshot):
        was = "its edges come from the input" if there is None else f"a cutoff of {there} Å"
        raise ConfigError(
            snapshot.where,
            "the samples would get other neighbour lists than those in the store",
            found=f"cutoff={cutoff}; {was}",
            mend="give no cutoff" if there is None else f"give cutoff={there}",
        )

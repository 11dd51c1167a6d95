"""``alchemi-xr verify``, ``repair``, ``defragment``, ``rechunk``, ``sort``, ``merge``, ``split``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from alchemi_xr.cli.convert import parse_bytes
from alchemi_xr.errors import ConfigError

__all__ = ["register"]

Store = Annotated[str, typer.Argument(help="The store.")]
Dest = Annotated[
    str | None, typer.Option("--dest", help="Write the result there, not in place of the store.")
]
Profile = Annotated[
    str | None, typer.Option("--profile", help="Codecs: raw, fast, balanced, small, lossy:<bits>.")
]
Chunk = Annotated[int | None, typer.Option("--chunk-rows", help="Rows of a chunk.")]
Shard = Annotated[int | None, typer.Option("--shard-rows", help="Rows of a storage object.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store that is there.")]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Worker processes of a local cluster.")
]
Scheduler = Annotated[str | None, typer.Option("--scheduler", help="Address of a Dask scheduler.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads, without cluster.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="What a worker may use, such as 2GiB.")
]
NoResume = Annotated[bool, typer.Option("--no-resume", help="Do not take up an interrupted run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, one line at the end.")]
ReportPath = Annotated[
    Path | None, typer.Option("--report", help="Write the whole report there, as JSON.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("verify")(verify)
    app.command("repair")(repair)
    for command in (defragment, rechunk, sort, merge, split):
        app.command(command.__name__)(command)


def verify(
    store: Store,
    data: Annotated[
        bool, typer.Option("--data", help="The same as --checksums, its older name.")
    ] = False,
    checksums: Annotated[
        bool,
        typer.Option("--checksums", help="Decode every chunk too (reads the whole store)."),
    ] = False,
) -> None:
    """Check a store; exit code 1 when committed data is not sound."""
    from alchemi_xr.store.verify import verify as check

    _end(check(store, checksums=data or checksums))


def repair(
    store: Store,
    drop: Annotated[
        list[str] | None, typer.Option("--drop", help="Remove a field that cannot be trusted.")
    ] = None,
) -> None:
    """Bring a store back to its last commit."""
    from alchemi_xr.store.verify import repair as mend

    _end(mend(store, drop=drop or ()))


def defragment(
    store: Store,
    dest: Dest = None,
    profile: Profile = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    threads: Threads = None,
    memory: Memory = None,
    no_resume: NoResume = False,
    quiet: Quiet = False,
    report: ReportPath = None,
) -> None:
    """Rewrite a store without its deleted samples."""
    from alchemi_xr.etl.maintain import defragment as run

    result = run(
        store,
        destination=dest,
        config=profile,
        overwrite=overwrite,
        **_how(workers, scheduler, threads, memory, no_resume, quiet),
    )
    if report is not None:
        report.write_text(result.to_json() + "\n", encoding="utf-8", errors="replace")
    typer.echo(
        f"{result.destination}: {result.removed:,} deleted samples removed, "
        f"{result.samples:,} kept; {result.seconds:.1f} s" + ("; resumed" * result.resumed)
    )


def rechunk(
    store: Store,
    dest: Dest = None,
    profile: Profile = None,
    chunk_rows: Chunk = None,
    shard_rows: Shard = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    threads: Threads = None,
    memory: Memory = None,
    no_resume: NoResume = False,
    quiet: Quiet = False,
    report: ReportPath = None,
) -> None:
    """Rewrite a store with other chunks, shards and codecs."""
    from alchemi_xr.etl.maintain import rechunk as run

    config = _config(profile, chunk_rows, shard_rows)
    if config is None:
        raise typer.BadParameter("give --profile, --chunk-rows or --shard-rows")
    result = run(
        store,
        config,
        destination=dest,
        overwrite=overwrite,
        **_how(workers, scheduler, threads, memory, no_resume, quiet),
    )
    _show(result, report)


def sort(
    store: Store,
    by: Annotated[
        str, typer.Option("--by", help="num_atoms, num_edges, or a field with one value a sample.")
    ] = "num_atoms",
    descending: Annotated[bool, typer.Option("--descending", help="Largest first.")] = False,
    dest: Dest = None,
    profile: Profile = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    threads: Threads = None,
    memory: Memory = None,
    no_resume: NoResume = False,
    quiet: Quiet = False,
    report: ReportPath = None,
) -> None:
    """Rewrite a store with its samples in the order of a key."""
    from alchemi_xr.etl.maintain import sort as run

    result = run(
        store,
        by,
        ascending=not descending,
        destination=dest,
        config=profile,
        overwrite=overwrite,
        **_how(workers, scheduler, threads, memory, no_resume, quiet),
    )
    _show(result, report)


def merge(
    stores: Annotated[
        list[str], typer.Argument(metavar="SRC... DST", help="The stores; the new store.")
    ],
    field: Annotated[
        list[str] | None, typer.Option("--field", help="Keep this field (repeatable).")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", help="Keep samples of which this is true: 'natoms < 200'."),
    ] = None,
    profile: Profile = None,
    chunk_rows: Chunk = None,
    shard_rows: Shard = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    threads: Threads = None,
    memory: Memory = None,
    no_resume: NoResume = False,
    quiet: Quiet = False,
    report: ReportPath = None,
) -> None:
    """Make one store of many, with the fields of all."""
    if len(stores) < 2:
        raise typer.BadParameter("give at least one SRC, and DST last")
    from alchemi_xr.etl.maintain import merge as run

    result = run(
        stores[:-1],
        stores[-1],
        fields=field or None,
        where=where,
        config=_config(profile, chunk_rows, shard_rows),
        overwrite=overwrite,
        **_how(workers, scheduler, threads, memory, no_resume, quiet),
    )
    _show(result, report)


def split(
    store: Store,
    parts: Annotated[
        list[str],
        typer.Argument(
            metavar="PART=FRACTION...", help="Or one path with {} for the value of --by."
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option("--by", help="Keep samples of equal value together; or composition."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal parts.")] = 0,
    profile: Profile = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    threads: Threads = None,
    memory: Memory = None,
    no_resume: NoResume = False,
    quiet: Quiet = False,
    report: ReportPath = None,
) -> None:
    """Part a store into several; each sample goes into exactly one."""
    from alchemi_xr.etl.parts import split as run

    results = run(
        store,
        _parts(parts),
        by=by,
        seed=seed,
        config=profile,
        overwrite=overwrite,
        **_how(workers, scheduler, threads, memory, no_resume, quiet),
    )
    if report is not None:
        lines = ",\n".join(f"{json.dumps(k)}: {v.to_json()}" for k, v in results.items())
        report.write_text("{" + lines + "}\n", encoding="utf-8", errors="replace")
    for result in results.values():
        typer.echo(result.summary())


def _parts(texts: list[str]) -> Any:
    if len(texts) == 1 and "{}" in texts[0]:
        return texts[0]
    parts: dict[str, float] = {}
    for text in texts:
        path, equals, share = text.rpartition("=")
        try:
            fraction = float(share)
        except ValueError:
            fraction = float("nan")
        if not (path and equals) or fraction != fraction or path in parts:
            raise typer.BadParameter(f"{text!r} is not PART=FRACTION, or is given twice")
        parts[path] = fraction
    return parts


def _config(profile: str | None, chunk_rows: int | None, shard_rows: int | None) -> Any:
    if chunk_rows is None and shard_rows is None:
        return profile
    sizes = {"chunk_size": chunk_rows, "shard_size": shard_rows}
    config: dict[str, Any] = {"core": sizes, "custom": sizes}
    return config if profile is None else {**config, "profile": profile}


def _how(
    workers: int | None,
    scheduler: str | None,
    threads: int | None,
    memory: str | None,
    no_resume: bool,
    quiet: bool,
) -> dict[str, Any]:
    if workers is not None and scheduler is not None:
        raise ConfigError("options", "give --workers or --scheduler, not both")
    return {
        "client": workers if scheduler is None else scheduler,
        "threads": threads,
        "memory": None if memory is None else parse_bytes(memory),
        "progress": not quiet,
        "resume": not no_resume,
    }


def _show(result: Any, report: Path | None) -> None:
    if report is not None:
        report.write_text(result.to_json() + "\n", encoding="utf-8", errors="replace")
    typer.echo(result.summary())


def _end(report: Any) -> None:
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)

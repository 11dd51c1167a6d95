"""``alchemi-xr export``: a store out to another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alchemi_xr.cli.convert import values

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("export")(export)


def export(
    store: Annotated[str, typer.Argument(help="The store.")],
    dest: Annotated[str, typer.Argument(help="The file or folder that is made.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="extxyz, ase-db, aselmdb, npz, parquet, deepmd, packed, ase."
        ),
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", help="Write only this field (repeatable).")
    ] = None,
    sample: Annotated[
        list[int] | None, typer.Option("--sample", help="Write only this sample (repeatable).")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is there, if it is of this format.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="NAME=VALUE for the export, such as ase_format=cif."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, one line at the end.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write the whole report there, as JSON.")
    ] = None,
) -> None:
    """Write a store to a file of another format; says what that cannot hold."""
    from alchemi_xr.etl.exporting import export as run

    result = run(
        store,
        dest,
        format=format,
        fields=field or None,
        samples=sample or None,
        overwrite=overwrite,
        progress=not quiet,
        options=values(option),
    )
    if report is not None:
        report.write_text(result.to_json() + "\n", encoding="utf-8", errors="replace")
    typer.echo(result.summary() if quiet else str(result))

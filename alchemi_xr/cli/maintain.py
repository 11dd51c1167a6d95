"""``alchemi-xr verify``, ``repair`` and ``defragment``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

__all__ = ["register"]

Store = Annotated[str, typer.Argument(help="The store.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("verify")(verify)
    app.command("repair")(repair)
    app.command("defragment")(defragment)


def verify(
    store: Store,
    data: Annotated[
        bool, typer.Option("--data", help="Decode every chunk too (reads the whole store).")
    ] = False,
) -> None:
    """Check a store; exit code 1 when committed data is not sound."""
    from alchemi_xr.store.verify import verify as check

    _end(check(store, data=data))


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
    profile: Annotated[
        str | None, typer.Option("--profile", help="New codecs: raw, fast, balanced, small …")
    ] = None,
) -> None:
    """Rewrite a store without its deleted samples."""
    from alchemi_xr.store.reader import open_store
    from alchemi_xr.store.writer import StoreWriter

    with open_store(store) as before:
        deleted = before.num_samples - len(before.active)
    StoreWriter(store).defragment(profile)
    with open_store(store) as after:
        typer.echo(f"{store}: {deleted:,} deleted samples removed, {after.num_samples:,} kept")


def _end(report: Any) -> None:
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)

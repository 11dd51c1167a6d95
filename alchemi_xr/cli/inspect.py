"""``alchemi-xr info``: what a store holds, from its metadata."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("info")(info)


def info(
    store: Annotated[str, typer.Argument(help="The store.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    history: Annotated[
        int, typer.Option("--history", help="Show so many of the last commits.", min=0)
    ] = 5,
) -> None:
    """Show counts, fields, chunks, codecs, sizes, provenance and history."""
    from alchemi_xr.store.describe import describe

    facts = describe(store)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=1))
        return
    from rich.console import Console

    console = Console()
    deleted = f" ({facts['deleted']:,} more are deleted)" if facts["deleted"] else ""
    console.print(
        f"{store}: {facts['samples']:,} samples{deleted}, {facts['atoms']:,} atoms, "
        f"{facts['edges']:,} edges; generation {facts['generation']}"
        + ("; written by another tool" if facts["foreign"] else ""),
        highlight=False,
        soft_wrap=True,
    )
    console.print(_fields(facts))
    console.print()
    console.print(_storage(facts))
    console.print(
        f"{_size(facts['stored_bytes'])} stored for {_size(facts['raw_bytes'])} of values"
        + (f", {facts['ratio']:.2f} times smaller" if facts["ratio"] else ""),
        highlight=False,
        soft_wrap=True,
    )
    for title in ("encoding", "provenance"):
        for key, value in facts[title].items():
            console.print(f"{key}: {value}", highlight=False, markup=False, soft_wrap=True)
    for entry in facts["history"][len(facts["history"]) - history :] if history else []:
        console.print(
            f"generation {entry['generation']}: {entry['operation']}, "
            f"{entry['samples']:,} samples, {entry['atoms']:,} atoms, {entry['edges']:,} edges",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _fields(facts: dict[str, Any]) -> Any:
    table = _new_table(("field", "level", "dtype", "row", "unit"), ("samples", "holes"))
    for name, entry in facts["fields"].items():
        table.add_row(
            name,
            entry["level"],
            entry["dtype"],
            str(entry["row"]) if entry["row"] else "",
            entry["unit"],
            f"{entry['samples']:,}",
            f"{entry['holes']:,}" if entry["holes"] else "",
        )
    return table


def _storage(facts: dict[str, Any]) -> Any:
    table = _new_table(("field", "codecs"), ("chunk rows", "stored", "ratio"))
    for name, entry in facts["fields"].items():
        rows = f"{entry['chunk_rows']:,}"
        table.add_row(
            name,
            " ".join(entry["codecs"]) or "none",
            rows if entry["shard_rows"] is None else f"{rows} of {entry['shard_rows']:,}",
            _size(entry["stored_bytes"]),
            "" if entry["ratio"] is None else f"{entry['ratio']:.2f}",
        )
    return table


def _new_table(left: tuple[str, ...], right: tuple[str, ...]) -> Any:
    from rich.table import Table

    # Nothing is cut off where the terminal is narrow.
    table = Table(box=None, pad_edge=False)
    for title in left:
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right", overflow="fold")
    return table


def _size(nbytes: int | None) -> str:
    """Bytes for people."""
    if nbytes is None:
        return "?"
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

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
) -> None:
    """Show counts, fields, units and where a store came from."""
    facts = describe(store)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    deleted = f" ({facts['deleted']:,} more are deleted)" if facts["deleted"] else ""
    console.print(
        f"{store}: {facts['samples']:,} samples{deleted}, {facts['atoms']:,} atoms, "
        f"{facts['edges']:,} edges; generation {facts['generation']}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for title in ("field", "level", "dtype", "row", "unit", "samples"):
        table.add_column(title, justify="right" if title == "samples" else "left")
    for name, entry in facts["fields"].items():
        table.add_row(
            name,
            entry["level"],
            entry["dtype"],
            str(entry["row"]) if entry["row"] else "",
            entry["unit"],
            f"{entry['samples']:,}",
        )
    console.print(table)
    for key, value in facts["provenance"].items():
        console.print(f"{key}: {value}", highlight=False, markup=False, soft_wrap=True)


def describe(store: str) -> dict[str, Any]:
    """The facts of a store as plain values; samples that are not deleted are counted."""
    import numpy as np

    from alchemi_xr.store.reader import open_store

    with open_store(store) as snapshot:
        mask = snapshot.samples_mask
        fields = {}
        for name in snapshot.fields:
            present = snapshot.present(name)
            carried = mask if present is None else mask & present
            is_text = snapshot.group(name) == "text"
            fields[name] = {
                "level": snapshot.level(name),
                "dtype": "text" if is_text else snapshot.dtype(name).name,
                "row": list(snapshot.tail(name)),
                "unit": snapshot.unit(name),
                "group": snapshot.group(name),
                "samples": int(carried.sum()),
            }
        return {
            "store": store,
            "samples": int(mask.sum()),
            "deleted": int((~mask).sum()),
            "atoms": int(np.diff(snapshot.atoms_ptr)[mask].sum()),
            "edges": int(np.diff(snapshot.edges_ptr)[mask].sum()),
            "generation": snapshot.generation,
            "fields": fields,
            "provenance": dict(snapshot.schema.provenance),
        }

"""``alchemi-xr stats``: what a set of structures is like."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from alchemi_xr.cli.convert import EnergyKey, ForcesKey, Format, KeyMap, Units, Where, pairs

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("stats")(stats)


def stats(
    paths: Annotated[
        list[str], typer.Argument(metavar="STORE | SRC...", help="A store, or files as they are.")
    ],
    where: Where = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    format: Format = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    key_map: KeyMap = None,
    units: Units = None,
) -> None:
    """Show sizes, elements, energies, forces and fields, in one pass."""
    from alchemi_xr.etl.set_stats import stats as run

    given: dict[str, Any] = {
        "format": format,
        "energy_key": energy_key or None,
        "forces_key": forces_key or None,
        "key_map": pairs(key_map, "--map") or None,
        "units": pairs(units, "--units") or None,
    }
    result = run(
        paths[0] if len(paths) == 1 else paths,
        where=where,
        progress=not as_json,
        **{name: value for name, value in given.items() if value is not None},
    )
    typer.echo(result.to_json() if as_json else str(result))

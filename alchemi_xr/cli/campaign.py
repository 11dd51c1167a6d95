"""``alchemi-xr campaign status``: where a campaign stands, while it runs or later."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    campaign = typer.Typer(no_args_is_help=True, help="Look at campaigns.")
    campaign.callback()(_group)
    campaign.command("status")(status)
    app.add_typer(campaign, name="campaign")


def _group() -> None:
    # Without a callback, typer would make the only command the group itself.
    pass


def status(
    directory: Annotated[
        str, typer.Argument(help="Folder of the campaign, such as results.zarr.campaign.")
    ],
    rejects: Annotated[
        int, typer.Option("--rejects", min=0, help="How many samples set aside to name.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what is finished, what was set aside and why, and who runs it."""
    from alchemi_xr.campaign import campaign_status

    found = campaign_status(directory, rejects=rejects)
    if as_json:
        facts = {**dataclasses.asdict(found), "directory": str(found.directory)}
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        typer.echo(str(found))

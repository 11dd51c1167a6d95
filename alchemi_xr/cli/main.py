"""Entry of the command line: the app, and how errors end it.

Exit codes: 0 when all was done as asked, 1 with a reason in one or two lines
otherwise, 2 for a command line that is not understood, 130 when interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from alchemi_xr._version import __version__
from alchemi_xr.errors import AlchemiError

__all__ = ["app", "main"]


class ErrorGroup(TyperGroup):
    """Ends our own errors with their message and exit code 1, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except AlchemiError as error:
            if _debug(ctx):
                raise
            typer.echo(f"error: {error}", err=True)
        except (OSError, MemoryError) as error:
            if _debug(ctx):
                raise
            typer.echo(f"error: {type(error).__name__}: {error}", err=True)
        except KeyboardInterrupt:
            typer.echo("interrupted; the same command takes it up again", err=True)
            raise typer.Exit(130) from None
        raise typer.Exit(1)


def _debug(ctx: Any) -> bool:
    return bool(ctx.params.get("debug")) or bool(os.environ.get("ALCHEMI_XR_DEBUG"))


app = typer.Typer(
    name="alchemi-xr",
    cls=ErrorGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Atomistic data as lazy, ragged Zarr stores: convert, look, check, mend.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"alchemi-xr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _add_commands() -> None:
    from alchemi_xr.cli import analyse, bench_io, campaign, convert, inspect, maintain, recommend
    from alchemi_xr.cli import export as out
    from alchemi_xr.cli import stats as statistics

    for module in (
        convert,
        out,
        inspect,
        statistics,
        maintain,
        recommend,
        bench_io,
        analyse,
        campaign,
    ):
        module.register(app)


_add_commands()


def main() -> None:
    """What the installed command calls."""
    # ``--debug`` may stand anywhere; click wants it before the command.
    if "--debug" in sys.argv[2:]:
        sys.argv.remove("--debug")
        sys.argv.insert(1, "--debug")
    app()

"""``alchemi-xr convert`` and ``append``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from alchemi_xr.errors import ConfigError

__all__ = ["register"]

Paths = Annotated[
    list[str], typer.Argument(metavar="SRC... DST", help="Files, patterns or folders; the store.")
]
Format = Annotated[str | None, typer.Option("--format", help="Source: extxyz, ase-db, ase …")]
OnError = Annotated[str, typer.Option("--on-error", help="Broken records: raise or quarantine.")]
EnergyKey = Annotated[
    list[str] | None, typer.Option("--energy-key", help="Name of the energy (repeatable).")
]
ForcesKey = Annotated[
    list[str] | None, typer.Option("--forces-key", help="Name of the forces (repeatable).")
]
KeyMap = Annotated[
    list[str] | None, typer.Option("--map", help="THEIRS=FIELD, such as dft_stress=stress.")
]
Units = Annotated[
    list[str] | None, typer.Option("--units", help="FIELD=UNIT of the input: energy=kcal/mol.")
]
Dtype = Annotated[
    list[str] | None,
    typer.Option("--dtype", help="float32 for all but the energy, or FIELD=DTYPE."),
]
Fields = Annotated[list[str] | None, typer.Option("--field", help="Keep this field (repeatable).")]
Nonfinite = Annotated[str, typer.Option("--nonfinite", help="NaN and infinity: keep, quarantine.")]
MaxForce = Annotated[
    float | None, typer.Option("--max-force", help="Set aside samples above it, eV/Å.")
]
Where = Annotated[
    str | None, typer.Option("--where", help="Keep samples of which this is true: 'fmax < 50'.")
]
Function = Annotated[
    str | None, typer.Option("--function", help="MODULE:NAME of a function of blocks.")
]
Wrap = Annotated[bool, typer.Option("--wrap", help="Put positions into the periodic cell.")]
Baseline = Annotated[
    list[str] | None,
    typer.Option(
        "--baseline", help="ELEMENT=eV taken off the energy (repeatable), or a JSON file of them."
    ),
]
Cutoff = Annotated[
    float | None,
    typer.Option("--cutoff", help="Neighbour lists of all pairs nearer than this, Å."),
]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", help="NAME=VALUE for the source, such as stress=-kbar."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, one line at the end.")]
ReportPath = Annotated[
    Path | None, typer.Option("--report", help="Write the whole report there, as JSON.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("convert")(convert)
    app.command("append")(append)


def convert(
    paths: Paths,
    format: Format = None,
    on_error: OnError = "raise",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a store that is there.")
    ] = False,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    key_map: KeyMap = None,
    units: Units = None,
    dtype: Dtype = None,
    field: Fields = None,
    nonfinite: Nonfinite = "keep",
    max_force: MaxForce = None,
    where: Where = None,
    function: Function = None,
    wrap: Wrap = False,
    baseline: Baseline = None,
    cutoff: Cutoff = None,
    dedup: Annotated[
        bool, typer.Option("--dedup", help="Keep one of each structure, however it is turned.")
    ] = False,
    sort: Annotated[
        str | None, typer.Option("--sort", help="Order: num_atoms, num_edges or a field.")
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option("--split", help="NAME=FRACTION (repeatable); DST has {} for the name."),
    ] = None,
    split_by: Annotated[
        str | None, typer.Option("--split-by", help="Field (or composition) that stays together.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of --split.")] = 0,
    option: Option = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="raw, fast, balanced, small, lossy:<bits>.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Worker processes of a local cluster.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", help="Address of a Dask scheduler.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads, without cluster.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="What a worker may use, such as 2GiB.")
    ] = None,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Do not take up an interrupted run.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be done, and write nothing.")
    ] = False,
    quiet: Quiet = False,
    report: ReportPath = None,
) -> None:
    """Convert files to a store, with a report of every record."""
    sources, destination = _split(paths)
    options = _options(
        format, on_error, energy_key, forces_key, key_map, units, dtype, field, nonfinite, max_force
    )
    options |= _stages(where, function, wrap, baseline, cutoff)
    options["options"] = values(option) or None
    if workers is not None and scheduler is not None:
        raise ConfigError("convert", "give --workers or --scheduler, not both")
    from alchemi_xr.etl.conversion import convert as run
    from alchemi_xr.etl.conversion import plan_convert

    parts = {name: _number(share) for name, share in pairs(split, "--split").items()} or None
    if plan:
        typer.echo(plan_convert(sources, profile=profile, **options).describe(threads or 1))
        return
    result = run(
        sources,
        destination,
        overwrite=overwrite,
        dedup=dedup,
        sort=sort,
        split=parts,
        split_by=split_by,
        seed=seed,
        profile=profile,
        client=workers if scheduler is None else scheduler,
        threads=threads,
        memory=None if memory is None else parse_bytes(memory),
        progress=not quiet,
        resume=not no_resume,
        **options,
    )
    _show(result, quiet, report)


def append(
    paths: Paths,
    format: Format = None,
    on_error: OnError = "raise",
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    key_map: KeyMap = None,
    units: Units = None,
    dtype: Dtype = None,
    field: Fields = None,
    nonfinite: Nonfinite = "keep",
    max_force: MaxForce = None,
    where: Where = None,
    function: Function = None,
    wrap: Wrap = False,
    baseline: Baseline = None,
    cutoff: Cutoff = None,
    option: Option = None,
    quiet: Quiet = False,
    report: ReportPath = None,
) -> None:
    """Add files to a store that is there."""
    sources, destination = _split(paths)
    options = _options(
        format, on_error, energy_key, forces_key, key_map, units, dtype, field, nonfinite, max_force
    )
    options |= _stages(where, function, wrap, baseline, cutoff)
    options["options"] = values(option) or None
    from alchemi_xr.etl.conversion import append as run

    _show(run(sources, destination, progress=not quiet, **options), quiet, report)


def _split(paths: list[str]) -> tuple[list[str], str]:
    if len(paths) < 2:
        raise typer.BadParameter("give at least one SRC, and DST last")
    return paths[:-1], paths[-1]


def _options(
    format: str | None,
    on_error: str,
    energy_key: list[str] | None,
    forces_key: list[str] | None,
    key_map: list[str] | None,
    units: list[str] | None,
    dtype: list[str] | None,
    field: list[str] | None,
    nonfinite: str,
    max_force: float | None,
) -> dict[str, Any]:
    return {
        "format": format,
        "on_error": on_error,
        "energy_key": energy_key or None,
        "forces_key": forces_key or None,
        "key_map": pairs(key_map, "--map"),
        "units": pairs(units, "--units"),
        "dtype": _dtypes(dtype),
        "fields": field or None,
        "nonfinite": nonfinite,
        "max_force": max_force,
    }


def _stages(
    where: str | None,
    function: str | None,
    wrap: bool,
    baseline: list[str] | None,
    cutoff: float | None,
) -> dict[str, Any]:
    if function is not None and "" not in sys.path:
        # A command has no folder of its own to import from, unlike a script.
        sys.path.insert(0, "")
    return {
        "where": where,
        "function": function,
        "wrap": wrap,
        "baseline": _baseline(baseline),
        "cutoff": cutoff,
    }


def _baseline(texts: list[str] | None) -> dict[str, Any] | None:
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        try:
            found = json.loads(Path(texts[0]).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                "--baseline", f"{texts[0]!r} is no JSON file ({error})", expected='{"H": -13.6, …}'
            ) from None
        return dict(found) if isinstance(found, dict) else found
    return dict(pairs(texts, "--baseline"))


def pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dict."""
    out = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        out[name] = value
    return out


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no fraction", param_hint="--split") from None


def values(texts: list[str] | None) -> dict[str, Any]:
    """``NAME=VALUE`` texts as a dict; a value that is JSON is what that says."""
    out: dict[str, Any] = {}
    for name, value in pairs(texts, "--option").items():
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


def _dtypes(texts: list[str] | None) -> str | dict[str, str] | None:
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    return pairs(texts, "--dtype")


def parse_bytes(text: str) -> int:
    """Bytes from ``2GiB``, ``500MB`` or a plain number.

    Raises
    ------
    ConfigError
    """
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    number = text.strip().rstrip("KMGTiBbkmgt ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ConfigError("memory", f"{text!r} is no size", expected="such as 2GiB") from None


def _show(result: Any, quiet: bool, report: Path | None) -> None:
    if report is not None:
        report.write_text(result.to_json() + "\n", encoding="utf-8", errors="replace")
    typer.echo(result.summary() if quiet else str(result))

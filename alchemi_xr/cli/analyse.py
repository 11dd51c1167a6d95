"""``alchemi-xr analyse`` and ``alchemi-xr plot``: an analysis of a store, as a file or figure."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["register"]

_TABLES = (".nc", ".csv", ".json")
_FIGURES = (".png", ".pdf", ".svg")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("analyse")(analyse)
    app.command("analyze", hidden=True)(analyse)
    app.command("plot")(plot)


def analyse(
    store: Annotated[str, typer.Argument(help="The store.")],
    name: Annotated[str, typer.Argument(help="rdf, msd, vacf, rmsd, statistics, composition …")],
    output: Annotated[
        list[Path] | None,
        typer.Option("-o", "--output", help="Figure (png, pdf, svg) or data (nc, csv, json)."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An argument of the analysis."),
    ] = None,
    samples: Annotated[
        str | None, typer.Option("--samples", metavar="START:STOP:STEP", help="Only these.")
    ] = None,
) -> None:
    """Analyse a store; without -o the result is shown as text."""
    from alchemi_xr import analysis
    from alchemi_xr.errors import ConfigError, nearest

    files = _checked(output or [])
    known = [n for n in analysis.__all__ if n not in ("outliers", "diffusion", "fingerprints")]
    if name not in known:
        raise ConfigError(
            "analyse", f"{name!r} is no analysis. {nearest(name, known)}", expected=known
        )
    function = getattr(analysis, name)
    options = _options(option or [], function)
    result = function(_open(store, samples), **options).compute()
    if name == "msd":
        result = _with_diffusion(result)
    for path in files:
        _write(result, path)
        typer.echo(f"wrote {path}")
    if not files:
        typer.echo(_text(result))


def plot(
    store: Annotated[str, typer.Argument(help="The store.")],
    name: Annotated[str, typer.Argument(help="sizes, energies, forces, rdf, msd …")],
    output: Annotated[Path, typer.Option("-o", "--output", help="png, pdf or svg.")],
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An argument of the analysis."),
    ] = None,
    samples: Annotated[
        str | None, typer.Option("--samples", metavar="START:STOP:STEP", help="Only these.")
    ] = None,
) -> None:
    """Draw a distribution or an analysis of a store."""
    (path,) = _checked([output], _FIGURES)
    from alchemi_xr import analysis

    function = getattr(analysis, name, None) if name in analysis.__all__ else None
    options = _options(option or [], function)
    _use_files()
    _save(_open(store, samples).ragged.plot(name, **options), path)
    typer.echo(f"wrote {path}")


def _checked(paths: list[Path], kinds: tuple[str, ...] = _TABLES + _FIGURES) -> list[Path]:
    """Paths that can be written, before anything is computed."""
    from alchemi_xr.errors import ConfigError

    for path in paths:
        if path.suffix.lower() not in kinds:
            raise ConfigError(str(path), "its ending names no format", expected=", ".join(kinds))
        if not path.absolute().parent.is_dir():
            raise ConfigError(str(path), "its folder is not there", mend="make the folder first")
    return paths


def _open(store: str, samples: str | None) -> Any:
    from alchemi_xr import open_dataset
    from alchemi_xr.errors import ConfigError

    ds = open_dataset(store)
    if samples is None:
        return ds
    try:
        parts = [int(p) if p else None for p in samples.split(":")]
        chosen = slice(*parts)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            "--samples", f"{samples!r} is no range", expected="such as 0:1000 or ::10"
        ) from error
    return ds.ragged.isel(chosen)


def _options(pairs: list[str], function: Any) -> dict[str, Any]:
    """Arguments of an analysis; values are JSON, or else text."""
    from alchemi_xr.errors import ConfigError, nearest

    known = list(inspect.signature(function).parameters)[1:] if function else []

    out: dict[str, Any] = {}
    for pair in pairs:
        key, found, text = pair.partition("=")
        if not found or not key.isidentifier():
            raise ConfigError("--set", f"{pair!r} is not understood", expected="NAME=VALUE")
        if key not in known:
            raise ConfigError(
                "--set", f"no argument {key!r}. {nearest(key, known)}", expected=known
            )
        try:
            out[key] = json.loads(text)
        except ValueError:
            out[key] = text
    return out


def _with_diffusion(result: Any) -> Any:
    """The MSD with its diffusion coefficients, where there are frames enough to fit them."""
    from alchemi_xr import analysis

    if result.sizes["lag"] < 20:
        return result
    found = analysis.diffusion(result)
    return result.merge(found, combine_attrs="override").assign_attrs(result.attrs)


def _text(result: Any) -> str:
    import xarray as xr

    if isinstance(result, xr.DataArray):
        result = result.to_dataset()
    lines = []
    one = {n: v for n, v in result.data_vars.items() if v.ndim == 0}
    lines += [f"{n}: {v.item():.6g} {v.attrs.get('units', '')}".rstrip() for n, v in one.items()]
    by_dim: dict[Any, list[Any]] = {}
    for name, var in result.data_vars.items():
        if var.ndim == 1:
            by_dim.setdefault(var.dims[0], []).append(name)
        elif var.ndim > 1:
            shape = ", ".join(f"{d} {n}" for d, n in zip(var.dims, var.shape, strict=True))
            lines.append(f"{name} ({shape}): {var.attrs.get('long_name', '')}; write it with -o")
    for dim, names in by_dim.items():
        table = result[names].reset_coords(drop=True).to_dataframe()
        units = {n: result[n].attrs.get("units", "") for n in names}
        table = table.rename(columns={n: f"{n} ({u})" for n, u in units.items() if u})
        shown = table
        if len(table) > 40:
            # Formulas come most frequent first; of samples and atoms the distribution says more.
            shown = table.head(20) if dim == "formula" else table.describe()
        lines.append(f"by {dim}" + (f" ({len(table):,} in all)" if len(table) > 40 else ""))
        lines.append(shown.to_string(float_format=lambda x: f"{x:.6g}"))
    return "\n".join(lines)


def _write(result: Any, path: Path) -> None:
    kind = path.suffix.lower()
    if kind in _FIGURES:
        from alchemi_xr.analysis.plot import draw

        _use_files()
        _save(draw(result), path)
    elif kind == ".nc":
        _plain(result).to_netcdf(path)
    elif kind == ".json":
        path.write_text(json.dumps(_plain(result).to_dict(), default=str), encoding="utf-8")
    else:
        import xarray as xr

        result = result.to_dataset() if isinstance(result, xr.DataArray) else result
        main = next(iter(result.data_vars))
        same = [n for n, v in result.data_vars.items() if v.dims == result[main].dims]
        table = result[same].drop_vars("sample_row", errors="ignore").to_dataframe()
        table.to_csv(path)


def _plain(result: Any) -> Any:
    """Without what only the ragged Dataset knows."""
    return result.drop_vars(["sample_row"], errors="ignore")


def _use_files() -> None:
    from alchemi_xr._optional import import_optional

    matplotlib: Any = import_optional("matplotlib", extra="viz", why="plots")
    # No window is opened, wherever this runs.
    matplotlib.use("Agg")


def _save(ax: Any, path: Path) -> None:
    ax.figure.savefig(path, dpi=200)

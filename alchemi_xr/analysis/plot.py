"""A figure of each analysis, and of what a data set holds.

Each function takes a result (or, for distributions, a ragged Dataset) and
draws on the axes given, or on new ones; labels and units come from the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._optional import import_optional
from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError, nearest
from alchemi_xr.ragged.conventions import structure
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["DISTRIBUTIONS", "PLOTS", "draw", "energies", "forces", "sizes"]

# Paul Tol's bright scheme: told apart by all eyes, and in print.
COLORS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB"]
_STYLE = {
    "figure.figsize": (5.6, 3.8),
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "font.size": 10,
}


def draw(result: xr.Dataset | xr.DataArray, *, ax: Any = None, **options: Any) -> Any:
    """The figure of a result of `alchemi_xr.analysis`.

    Parameters
    ----------
    result : Dataset or DataArray
    ax : matplotlib Axes, optional
    **options
        Of the plot of this analysis.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ConfigError
        It is no result of an analysis.
    OptionalDependencyError
        matplotlib is not installed.
    """
    kind = str(result.attrs.get("analysis", ""))
    if kind not in PLOTS:
        raise ConfigError(
            "plot",
            f"this is no result of an analysis (its attribute 'analysis' is {kind!r})",
            expected=list(PLOTS),
        )
    return _on_axes(PLOTS[kind], result.compute(), ax, options)


def _on_axes(func: Callable[..., Any], data: Any, ax: Any, options: dict[str, Any]) -> Any:
    matplotlib: Any = import_optional("matplotlib", extra="viz", why="plots")
    if ax is not None:
        func(data, ax, **options)
        return ax
    pyplot: Any = import_optional("matplotlib.pyplot", extra="viz", why="plots")
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": matplotlib.cycler(color=COLORS)}):
        _, ax = pyplot.subplots()
        func(data, ax, **options)
    return ax


def _label(var: xr.DataArray, name: str | None = None) -> str:
    text = name or str(var.attrs.get("long_name", var.name))
    units = var.attrs.get("units")
    return f"{text} ({_unit(str(units))})" if units else text


def _unit(units: str) -> str:
    return units.replace("^", "").replace("1/cm", "cm⁻¹").replace("degree", "°")


def _lines(ax: Any, x: xr.DataArray, curves: xr.DataArray, dim: str, order: Any = None) -> None:
    """One line for each label of ``dim``; the most telling where there are many."""
    labels = curves[dim].values
    at = np.arange(len(labels)) if order is None else np.argsort(-np.asarray(order), kind="stable")
    good = [k for k in at if np.isfinite(curves.isel({dim: k}).values).any()]
    for k, color in zip(good, COLORS, strict=False):
        ax.plot(x.values, curves.isel({dim: k}).values, label=str(labels[k]), color=color)
    if len(good) > len(COLORS):
        ax.plot([], [], " ", label=f"… {len(good) - len(COLORS)} more")
    if len(good) > 4:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    elif good and len(labels) > 1:
        ax.legend()


def _first_system(result: xr.Dataset, over: str) -> xr.Dataset:
    """Without the dim of the systems: their mean."""
    extra = [d for d in result[over].dims if d not in ("element", "lag", "frequency")]
    return result.mean(extra, keep_attrs=True) if extra else result


def _rdf(result: xr.Dataset, ax: Any) -> None:
    has_g = bool(np.isfinite(result.g).any())
    curves = result.g if has_g else result["counts"]
    _lines(ax, result.r, curves, "pair", result["counts"].sum("r").values)
    if has_g:
        ax.axhline(1.0, color="0.6", lw=0.8, ls="--", zorder=0)
    ax.set(xlabel=_label(result.r), ylabel="g(r)" if has_g else "pairs in each shell")
    ax.set_xlim(0, float(result.attrs.get("rmax", result.r[-1])))
    ax.set_ylim(bottom=0)


def _msd(result: xr.Dataset, ax: Any) -> None:
    result = _first_system(result, "msd")
    # The last lags are means of few times: half of them says what there is to say.
    half = result.isel(lag=slice(0, max(2, result.sizes["lag"] // 2)))
    lag, text = _time(half.lag)
    _lines(ax, lag, half.msd, "element")
    ax.set(xlabel=text, ylabel=_label(result.msd))
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)


def _time(lag: xr.DataArray, name: str | None = None) -> tuple[xr.DataArray, str]:
    """In ps where fs would give long numbers."""
    name = name or str(lag.attrs.get("long_name", "time"))
    if lag.attrs.get("units") == "fs" and float(lag.max()) >= 2000:
        return lag / 1000.0, f"{name} (ps)"
    units = lag.attrs.get("units")
    return lag, f"{name} ({units})" if units else name


def _vacf(result: xr.Dataset, ax: Any, *, what: str = "spectrum") -> None:
    if what == "vacf":
        result = _first_system(result, "vacf")
        lag, text = _time(result.lag)
        _lines(ax, lag, result.vacf, "element")
        ax.axhline(0.0, color="0.6", lw=0.8, zorder=0)
        ax.set(xlabel=text, ylabel="velocity autocorrelation")
        ax.set_xlim(left=0)
        return
    result = _first_system(result, "spectrum")
    x = result.wavenumber if "wavenumber" in result.coords else result.frequency
    _lines(ax, x, result.spectrum, "element")
    ax.set(xlabel=_label(x), ylabel=f"spectrum ({_unit(result.spectrum.attrs['units'])})")
    total = np.cumsum(np.abs(result.spectrum.isel(element=0).values))
    if total[-1] > 0:
        # What lies far above has next to nothing of the whole.
        last = int(np.searchsorted(total, 0.98 * total[-1]))
        ax.set_xlim(0, 1.4 * float(x[min(last, len(x) - 1)]))


def _rmsd(result: xr.DataArray, ax: Any) -> None:
    time = result["time"] if "time" in result.coords else None
    x, text = (np.arange(result.size), "frame") if time is None else _time(time, "time")
    ax.plot(np.asarray(x), result.values, color=COLORS[0])
    ax.set(xlabel=text, ylabel=_label(result))
    ax.set_ylim(bottom=0)


def _rmsf(result: xr.DataArray, ax: Any) -> None:
    ax.plot(np.arange(result.size), result.values, color=COLORS[0])
    ax.set(xlabel="atom", ylabel=_label(result))
    ax.set_ylim(bottom=0)


def _distribution(dim: str, axis: str) -> Callable[[xr.Dataset, Any], None]:
    def plot(result: xr.Dataset, ax: Any) -> None:
        _lines(ax, result[axis], result.density, dim, result.number.values)
        ax.set(
            xlabel=_label(result[axis]), ylabel=f"density ({_unit(result.density.attrs['units'])})"
        )
        total = np.cumsum(result["counts"].sum(dim).values)
        if total[-1] > 0:
            # A few of a rare kind far out would press the others together.
            there = np.searchsorted(total, np.array([0.001, 0.998]) * total[-1])
            step = float(result[axis][1] - result[axis][0]) if result.sizes[axis] > 1 else 1.0
            pad = max(5 * step, 0.08 * step * (there[-1] - there[0]))
            ax.set_xlim(float(result[axis][there[0]]) - pad, float(result[axis][there[-1]]) + pad)
        ax.set_ylim(bottom=0)

    return plot


def _coordination(result: xr.DataArray, ax: Any) -> None:
    counts = np.bincount(result.values) if result.size else np.zeros(1, int)
    ax.bar(np.arange(len(counts)), counts / max(1, counts.sum()), color=COLORS[0], width=0.8)
    ax.set(xlabel="coordination number", ylabel="fraction of the atoms")
    _whole_ticks(ax)


def _whole_ticks(ax: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _series(result: xr.DataArray, ax: Any) -> None:
    time = result["time"] if "time" in result.coords else None
    if time is None:
        ax.plot(np.arange(result.size), result.values, color=COLORS[0], lw=0.8)
        ax.set_xlabel("sample")
    else:
        x, text = _time(time, "time")
        ax.plot(x.values, result.values, color=COLORS[0], lw=0.8)
        ax.set_xlabel(text)
    ax.set_ylabel(_label(result))
    if np.isfinite(result.values).any():
        mean = float(np.nanmean(result.values))
        label = f"mean {mean:.4g} {_unit(str(result.attrs.get('units', '')))}"
        ax.axhline(mean, color=COLORS[1], lw=1.2, label=label)
        ax.legend()


def _drift(result: xr.Dataset, ax: Any) -> None:
    x, text = _time(result.time, "time")
    away = (result.energy - result.energy.mean()) * 1e3
    ax.plot(np.asarray(x), away.values, ".", ms=2.5, color=COLORS[0])
    ax.set(xlabel=text, ylabel="total energy per atom\nminus its mean (meV)")
    if result.drift.size == 1:
        value = float(result.drift.values.reshape(-1)[0])
        ax.set_title(f"drift {value:.3g} {result.drift.attrs['units']} per atom", fontsize=10)


def _statistics(result: xr.Dataset, ax: Any) -> None:
    dim = str(result["mean"].dims[0])
    x = np.arange(result.sizes[dim])
    ax.bar(x, result["mean"].values, yerr=result["std"].values, color=COLORS[0], capsize=3)
    ax.plot(x, result["max"].values, "v", color=COLORS[1], ms=5, label="largest")
    ax.set_xticks(x, [str(v) for v in result[dim].values], rotation=45 if len(x) > 10 else 0)
    ax.set_xlim(-0.7, len(x) - 0.3)
    for at in np.flatnonzero(~np.isfinite(result["mean"].values)):
        bad = int(result["non_finite"].values[at])
        ax.text(at, 0, f"{bad} NaN", rotation=90, ha="center", va="bottom", color=COLORS[1])
    name = str(result["mean"].attrs["long_name"]).removeprefix("mean of ")
    ax.set(ylabel=_label(result["mean"], f"{name}: mean ± std"), xlabel=dim.replace("_", " "))
    top, mean = float(np.nanmax(result["max"])), float(np.nanmax(np.abs(result["mean"])))
    if top > 30 * mean > 0:
        ax.set_yscale("symlog", linthresh=mean)
    ax.legend()


def _composition(result: xr.Dataset, ax: Any, *, what: str = "element") -> None:
    values, label = (result.atoms, "atoms") if what == "element" else (result.samples, "samples")
    dim = str(values.dims[0])
    values = values.isel({dim: np.argsort(-values.values, kind="stable")[:20]})
    x = np.arange(values.size)
    ax.bar(x, values.values, color=COLORS[0])
    ax.set_xticks(x, values[dim].values, rotation=60 if values.size > 8 else 0)
    ax.set(ylabel=label, xlabel=dim)
    if values.size and values.max() > 100 * values.min():
        ax.set_yscale("log")


def _baseline(result: xr.Dataset, ax: Any) -> None:
    values = result.residual.values * 1e3
    values = values[np.isfinite(values)]
    if values.size:
        middle, spread = np.median(values), np.median(np.abs(values - np.median(values)))
        reach = max(8 * 1.4826 * spread, 1e-9)
        out = int((np.abs(values - middle) > reach).sum())
        label = f"{out:,} of {values.size:,} lie outside" if out else None
        ax.hist(
            values, bins=80, range=(middle - reach, middle + reach), color=COLORS[0], label=label
        )
        if label:
            ax.legend()
    ax.set(xlabel="energy above the baseline (meV/atom)", ylabel="samples")


def _duplicates(result: xr.DataArray, ax: Any) -> None:
    _, counts = np.unique(result.values, return_counts=True)
    kinds = np.bincount(counts) if counts.size else np.zeros(2, int)
    ax.bar(np.arange(1, len(kinds)), kinds[1:], color=COLORS[0])
    ax.set(xlabel="times that a structure occurs", ylabel="structures")
    ax.set_yscale("log")
    _whole_ticks(ax)


def _diffusion(result: xr.Dataset, ax: Any) -> None:
    values = (
        result.D
        if result.D.ndim == 1
        else result.D.mean([d for d in result.D.dims if d != "element"], keep_attrs=True)
    )
    error = result.get("D_error")
    x = np.arange(values.size)
    bars = None
    if error is not None:
        bars = error.mean([d for d in error.dims if d != "element"]).values
    ax.bar(x, values.values, yerr=bars, color=COLORS[0], capsize=4)
    ax.set_xticks(x, [str(v) for v in values["element"].values])
    ax.set(ylabel=_label(result.D))


PLOTS: dict[str, Callable[..., Any]] = {
    "angles": _distribution("triple", "angle"),
    "baseline": _baseline,
    "bond_lengths": _distribution("pair", "r"),
    "composition": _composition,
    "coordination": _coordination,
    "diffusion": _diffusion,
    "duplicates": _duplicates,
    "energy_drift": _drift,
    "fmax": _series,
    "msd": _msd,
    "pressure": _series,
    "rdf": _rdf,
    "rmsd": _rmsd,
    "rmsf": _rmsf,
    "statistics": _statistics,
    "temperature": _series,
    "vacf": _vacf,
}


# -- distributions of a data set ------------------------------------------------------------


def sizes(ds: xr.Dataset, *, ax: Any = None) -> Any:
    """Histogram of the number of atoms of the samples."""
    return _on_axes(_sizes, np.diff(structure(ds).atoms_ptr), ax, {})


def _sizes(counts: Any, ax: Any) -> None:
    if len(counts):
        low, high = int(counts.min()), int(counts.max())
        step = max(1, -(-(high - low + 1) // 60))
        ax.hist(counts, bins=np.arange(low - 0.5, high + step + 0.5, step), color=COLORS[0])
        ax.axvline(np.median(counts), color=COLORS[1], label=f"median {np.median(counts):g}")
        ax.legend()
    ax.set(xlabel="atoms in a sample", ylabel="samples")
    _whole_ticks(ax)


def energies(ds: xr.Dataset, *, ax: Any = None) -> Any:
    """Histogram of the energies per atom; of values far from the rest it says how many."""
    values = np.asarray(apply_blocks(ds, ["energy"], _per_atom, rows="system"))
    return _on_axes(
        _energies, values[np.isfinite(values)], ax, {"lost": int((~np.isfinite(values)).sum())}
    )


def _per_atom(block: Block) -> Any:
    counts = np.diff(block.atoms_ptr).astype(np.float64)
    energy = np.where(block.has("energy"), block["energy"].astype(float).reshape(-1), np.nan)
    return energy / np.where(counts == 0, np.nan, counts)


def _energies(values: Any, ax: Any, *, lost: int) -> None:
    if len(values):
        low, high = np.percentile(values, [0.1, 99.9])
        pad = 0.02 * (high - low) or 0.5
        inside = (values >= low - pad) & (values <= high + pad)
        out = int((~inside).sum()) + lost
        label = f"{out:,} of {len(values) + lost:,} not shown" if out else None
        ax.hist(values[inside], bins=80, color=COLORS[0], label=label)
        if label:
            ax.legend()
    ax.set(xlabel="energy per atom (eV)", ylabel="samples")


def forces(ds: xr.Dataset, *, ax: Any = None) -> Any:
    """Distribution of the force norms on all atoms, both axes logarithmic."""
    edges = np.logspace(-5, 4, 181)
    parts = apply_blocks(ds, ["forces"], _norms, edges, rows="block", tail=(len(edges) + 1,))
    return _on_axes(_forces, (edges, np.asarray(parts.sum(axis=0))), ax, {})


def _norms(block: Block, edges: Any) -> Any:
    norm = np.linalg.norm(block["forces"].astype(np.float64), axis=1)
    counts = np.histogram(norm[np.isfinite(norm)], bins=edges)[0]
    return np.append(counts, [(norm < edges[0]).sum(), (~np.isfinite(norm)).sum()])


def _forces(data: Any, ax: Any) -> None:
    edges, counts = data
    ax.stairs(counts[:-2], edges, fill=True, color=COLORS[0])
    there = np.flatnonzero(counts[:-2])
    ax.set(xlabel="force on an atom (eV/Å)", ylabel="atoms", xscale="log", yscale="log")
    if len(there):
        ax.set_xlim(edges[there[0]] / 1.5, edges[there[-1] + 1] * 1.5)
    notes = [
        f"{int(n):,} {what}"
        for n, what in zip(counts[-2:], ("below 10⁻⁵", "not finite"), strict=True)
        if n
    ]
    if notes:
        ax.set_title(", ".join(notes), fontsize=9)


DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    "sizes": sizes,
    "energies": energies,
    "forces": forces,
}


def run(
    ds: xr.Dataset, name: str, *, ax: Any = None, what: str | None = None, **options: Any
) -> Any:
    """Compute an analysis and draw it; see ``ds.ragged.plot``."""
    if name in DISTRIBUTIONS:
        return DISTRIBUTIONS[name](ds, ax=ax)
    if name not in PLOTS or name == "diffusion":
        known = [*PLOTS, *DISTRIBUTIONS]
        raise ConfigError("plot", f"{name!r} is no plot. {nearest(name, known)}")
    from alchemi_xr import analysis

    extra = {} if what is None else {"what": what}
    return draw(getattr(analysis, name)(ds, **options), ax=ax, **extra)

"""``alchemi-xr bench-io``: how fast your store gives batches here, and which settings to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    from alchemi_xr.data.datapipes.measure import Advice, Measured

__all__ = ["register"]

_MIB = 2**20


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("bench-io")(bench_io)


def bench_io(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A path or URL.")],
    seconds: Annotated[float, typer.Option("--seconds", help="To measure in, all of it.")] = 30.0,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", help="Again for more; 16, 64, 256, 1024.")
    ] = None,
    prefetch: Annotated[
        list[int] | None, typer.Option("--prefetch", help="Again for more; 0, 2, 8.")
    ] = None,
    order: Annotated[
        list[str] | None, typer.Option("--order", help="Again for more; sequential, block, full.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", help="Read this one; again for more.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, auto.")] = "auto",
    cache: Annotated[
        str | None, typer.Option("--cache", help="Bytes for decoded chunks, such as 2GiB.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="A figure: .png, .pdf, .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure orders, batch sizes and read-ahead on a store, and recommend settings."""
    from alchemi_xr.cli.convert import parse_bytes

    if plot is not None:
        _pyplot()  # says that it is not there now, not after half a minute
        if not plot.parent.is_dir():
            raise ConfigError("bench-io", "no folder to write the plot to", found=str(plot.parent))
    from alchemi_xr.data.datapipes import AtomicDataZarrReader, Dataset
    from alchemi_xr.data.datapipes.measure import advise, copy_bandwidth, sweep

    given = {"orders": order, "batch_sizes": batch_size, "prefetch_factors": prefetch}
    options: dict[str, Any] = {name: values for name, values in given.items() if values}
    cache_bytes = None if cache is None else parse_bytes(cache)
    reader = AtomicDataZarrReader(store, cache_bytes=cache_bytes)
    with Dataset(reader, device=device, fields=field or None) as dataset:
        found = sweep(dataset, seconds=seconds, **options)
        advice = advise(found)
        facts = {
            "store": store,
            "samples": len(dataset),
            "device": str(dataset.device),
            "copy_bytes_per_s": copy_bandwidth(),
            "recommended": {
                "shuffle": advice.shuffle,
                "batch_size": advice.setting.batch_size,
                "prefetch_factor": advice.setting.prefetch_factor,
            },
            "reasons": advice.reasons,
            "measured": [one.facts() for one in found],
        }
    if plot is not None:
        _draw(found, advice, plot)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    _show(facts, found, advice)
    if plot is not None:
        typer.echo(f"plot: {plot}")


def _show(facts: dict[str, Any], found: list[Measured], advice: Advice) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{facts['store']}: {facts['samples']:,} samples, batches on {facts['device']}; a copy in "
        f"memory gives {facts['copy_bytes_per_s'] / 1e9:.1f} GB/s here",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("order")
    for title in ("batch", "prefetch", "structures/s", "MB/s", "of a copy", "first batch ms"):
        table.add_column(title, justify="right")
    for one in found:
        table.add_row(
            one.setting.order,
            str(one.setting.batch_size),
            str(one.setting.prefetch_factor),
            f"{one.rate:,.0f}",
            f"{one.bandwidth / 1e6:,.0f}",
            f"{one.bandwidth / facts['copy_bytes_per_s']:.0%}",
            f"{one.first_batch_s * 1e3:.1f}",
            style="bold" if one.setting == advice.setting else None,
        )
    console.print(table)
    chosen = facts["recommended"]
    console.print(
        f"recommended: DataLoader(dataset, batch_size={chosen['batch_size']}, "
        f"shuffle={chosen['shuffle']!r}, prefetch_factor={chosen['prefetch_factor']})",
        highlight=False,
        soft_wrap=True,
    )
    for reason in advice.reasons:
        console.print(f"  {reason}", highlight=False, soft_wrap=True, markup=False)


def _pyplot() -> Any:
    from alchemi_xr._optional import import_optional

    matplotlib: Any = import_optional("matplotlib", extra="viz", why="bench-io --plot")
    matplotlib.use("Agg")
    return import_optional("matplotlib.pyplot", extra="viz", why="bench-io --plot")


def _draw(found: list[Measured], advice: Advice, path: Path) -> None:
    """Structures a second over batch size: a panel an order, a line a number read ahead."""
    pyplot = _pyplot()
    orders = list(dict.fromkeys(one.setting.order for one in found))
    factors = sorted({one.setting.prefetch_factor for one in found})
    figure, panels = pyplot.subplots(
        1,
        len(orders),
        sharey=True,
        squeeze=False,
        figsize=(2.2 + 2.6 * len(orders), 3.6),
        layout="constrained",
    )
    for panel, order in zip(panels[0], orders, strict=True):
        for number, factor in enumerate(factors):
            line = sorted(
                (one.setting.batch_size, one.rate, min(one.rates), max(one.rates))
                for one in found
                if (one.setting.order, one.setting.prefetch_factor) == (order, factor)
            )
            if not line:
                continue
            sizes, rates, low, high = zip(*line, strict=True)
            color = f"C{number}"
            panel.plot(sizes, rates, "o-", color=color, label=f"prefetch {factor}")
            panel.fill_between(sizes, low, high, color=color, alpha=0.15)
        panel.set_xscale("log", base=2)
        panel.set_title(f"{order} order")
        panel.set_xlabel("batch size")
        panel.grid(alpha=0.25)
        if order == advice.setting.order:
            panel.axvline(advice.setting.batch_size, color="0.4", linestyle=":", label="advice")
    panels[0][0].set_ylabel("structures / s")
    panels[0][0].set_ylim(bottom=0)
    panels[0][-1].legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

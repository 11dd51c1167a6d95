"""Relax molecules in a campaign, then look at the results: the main job, end to end.

    python pipelines/relax_and_analyse.py [INPUT] --out OUT

1. **Convert.** INPUT (extended XYZ, or anything ASE reads) becomes the store
   ``OUT/input.zarr``. Without INPUT the 162 molecules of the G2 set are taken
   from the database file that ships inside ASE.
2. **Relax.** A campaign sends every molecule through FIRE on workers of this
   machine (one a core, or one a GPU), in batches that are refilled as molecules
   converge. By default energies and forces are GFN2-xTB, through ``tblite``
   (``pip install 'alchemi_xr[demo]'``). A molecule whose calculation fails is set
   aside with its reason; the others go on.
3. **Look.** ``OUT/relaxed.zarr`` (final states) and ``OUT/trajectory.zarr`` (every
   step of every molecule) open lazily with xarray; a table goes to the terminal
   and to ``OUT/table.csv``, a figure to ``OUT/relaxation.png``.

Stopped at any point, the same command goes on where it was and ends with the
same results. Radicals: initial magnetic moments of the input become the spin
multiplicity of each molecule, as they do when ASE runs the same calculator.

The forces threshold of 0.01 eV/Å leaves energies within 1 meV of those that
ASE's own FIRE reaches with the same calculator; ``tests/pipelines`` checks it.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr
from rich.console import Console
from rich.table import Table

import alchemi_xr as ax
from alchemi_xr.campaign import CampaignReport
from alchemi_xr.errors import AlchemiError, OptionalDependencyError

#: ASE's FIRE starts with 0.1 Å·√(amu/eV), which is this many femtoseconds.
ASE_TIMESTEP = 1.018050571
#: What a calculator is called in a figure.
LEVELS = {"tblite": "GFN2-xTB", "emt": "EMT", "lj": "Lennard-Jones"}
#: Curves in the figure, and rows in the printed table; the CSV has all.
MAX_CURVES, MAX_ROWS = 300, 200


def make_stages(calculator: str, fmax: float, max_steps: int):
    """The stage graph, built on each worker: FIRE until ``fmax`` (eV/Å) or ``max_steps``."""
    from alchemi_xr.dynamics import FIRE, ConvergenceHook

    return FIRE(
        make_model(calculator),
        dt=ASE_TIMESTEP,
        n_steps=max_steps,
        convergence_hook=ConvergenceHook.from_fmax(fmax),
        init_fn=set_multiplicity,
    )


def set_multiplicity(batch):
    """New systems get the spin multiplicity of their magnetic moments: rounded sum plus one."""
    name = next((n for n in ("initial_magmoms", "magmoms") if n in batch), None)
    if name is not None and "spin" not in batch:
        moments = batch[name].nan_to_num(0.0)  # without moments: a singlet
        total = moments.new_zeros(batch.num_graphs).index_add_(0, batch.batch_idx.long(), moments)
        batch.set("spin", total.round().abs()[:, None] + 1.0, level="system")
    return batch


def make_model(calculator: str):
    """The model of a calculator's name."""
    from alchemi_xr.models import ASECalculatorModel, LennardJonesModel

    if calculator == "tblite":
        from tblite.ase import TBLite

        return ASECalculatorModel(functools.partial(TBLite, method="GFN2-xTB", verbosity=0))
    if calculator == "emt":
        from ase.calculators.emt import EMT

        return ASECalculatorModel(EMT)
    return LennardJonesModel(epsilon=0.0104, sigma=3.40, cutoff=8.5)  # argon, eV and Å


def default_input() -> Path:
    """The G2 set inside the installed ASE."""
    import ase.collections

    return Path(ase.collections.__file__).parent / "g2.json"


def main(argv: list[str] | None = None) -> int:
    """Run everything; 0 when it ended with no more failures than were allowed."""
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        run(options, console)
    except AlchemiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description="Relax molecules in a campaign and analyse the results."
    )
    parser.add_argument(
        "input", nargs="?", type=Path, help="structures; by default ASE's G2 molecules"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for everything; by default demo_out/<name of the input>"
    )
    parser.add_argument("--calculator", choices=("tblite", "emt", "lj"), default="tblite")
    parser.add_argument("--fmax", type=float, default=0.01, help="largest force at the end, eV/Å")
    parser.add_argument("--max-steps", type=int, default=500, help="most steps of a molecule")
    parser.add_argument("--workers", type=int, help="worker processes; by default all cores")
    parser.add_argument("--batch-size", type=int, default=32, help="molecules in flight a worker")
    parser.add_argument(
        "--max-failures",
        type=float,
        default=0.1,
        help="part of the molecules that may fail before the campaign stops",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="start anew instead of going on with OUT"
    )
    options = parser.parse_args(argv)
    options.input = options.input or default_input()
    options.out = options.out or Path("demo_out") / (options.input.name.split(".")[0] or "input")
    return options


def run(options: argparse.Namespace, console: Console) -> None:
    """Convert, relax, look."""
    started = time.perf_counter()
    out: Path = options.out
    need_calculator(options.calculator)
    job = job_of(options)
    refuse_other(out, job, overwrite=options.overwrite)

    console.rule("1. convert")
    structures = convert(options.input, out / "input.zarr", options.overwrite, console)
    # Only now: an input that could not be read leaves the folder free for another.
    (out / "job.json").write_text(json.dumps(job, indent=2) + "\n", encoding="utf-8")

    console.rule("2. relax")
    report = ax.Campaign(
        structures,
        functools.partial(make_stages, options.calculator, options.fmax, options.max_steps),
        out / "relaxed.zarr",
        trajectory=out / "trajectory.zarr",
        max_batch_size=options.batch_size,
        workers=options.workers,
        max_failures=options.max_failures,
        overwrite=options.overwrite,
    ).run()
    console.print(str(report), highlight=False, soft_wrap=True)

    console.rule("3. look")
    relaxed = ax.open_dataset(report.results)
    frames = ax.open_dataset(report.trajectory, chunks="auto")
    show(relaxed, report, options, console)
    figure = out / "relaxation.png"
    draw(relaxed, frames, options, figure)
    seconds = time.perf_counter() - started
    console.print(f"figure: {figure}", highlight=False, soft_wrap=True)
    console.print(f"table:  {out / 'table.csv'}", highlight=False, soft_wrap=True)
    console.print(f"done in {seconds:.1f} s", highlight=False)


def need_calculator(name: str) -> None:
    """Say now, not on every worker, that the calculator's package is missing."""
    if name == "tblite" and importlib.util.find_spec("tblite") is None:
        raise OptionalDependencyError(
            "--calculator tblite",
            "the package 'tblite' is not installed",
            mend="pip install 'alchemi_xr[demo]', or take --calculator emt",
        )


def job_of(options: argparse.Namespace) -> dict:
    """What a folder's results depend on; an edited input is another one."""
    job = {
        "input": str(options.input.resolve()),
        "calculator": options.calculator,
        "fmax": options.fmax,
        "max_steps": options.max_steps,
    }
    if options.input.is_file():
        state = options.input.stat()
        job["state of the input"] = [state.st_size, state.st_mtime_ns]
    return job


def refuse_other(out: Path, job: dict, *, overwrite: bool) -> None:
    """Refuse to go on in a folder that holds another job."""
    note = out / "job.json"
    if note.exists() and not overwrite:
        before = json.loads(note.read_text(encoding="utf-8"))
        changed = sorted(key for key in job if before.get(key) != job[key])
        if changed:
            raise AlchemiError(
                str(out),
                f"holds a job with another {', '.join(changed)}",
                found=f"{before.get(changed[0])} there, {job[changed[0]]} asked for",
                mend="--overwrite starts anew (make: DEMO_ARGS=--overwrite), "
                "--out takes another folder (make: OUT=...)",
            )
    out.mkdir(parents=True, exist_ok=True)


def convert(source: Path, store: Path, overwrite: bool, console: Console) -> Path:
    """The input as a store."""
    if store.exists() and not overwrite:
        console.print(f"{store} is there already", highlight=False, soft_wrap=True)
        return store
    report = ax.convert(str(source), str(store), on_error="quarantine", overwrite=overwrite)
    console.print(str(report), highlight=False, soft_wrap=True)
    lost = [
        f"not converted: {reject.file}, frame {reject.frame}: {reject.reason}"
        for reject in report.rejects
    ]
    (store.parent / "not_converted.txt").write_text("".join(f"{line}\n" for line in lost))
    return store


# What there is to see --------------------------------------------------------------------------


def names_of(relaxed: xr.Dataset) -> list[str]:
    """A name for each molecule: the input's, else its number there."""
    if "name" in relaxed:
        return [str(name) for name in relaxed["name"].values]
    return [f"#{index}" for index in relaxed["dataset_index"].values]


def formulas(relaxed: xr.Dataset, rows: int) -> list[str]:
    """Chemical formulas of the first molecules."""
    from ase.formula import Formula
    from ase.symbols import Symbols

    head = relaxed.ragged.isel(slice(0, rows))
    ptr, numbers = head["atoms_ptr"].values, head["atomic_numbers"].values
    texts = [str(Symbols(numbers[a:b])) for a, b in itertools.pairwise(ptr)]
    return [Formula(text).format("hill") if text else "" for text in texts]


def rows_of(relaxed: xr.Dataset, fmax: float) -> Iterator[tuple]:
    """Name, atoms, steps, energies (eV), gain (eV), fmax (eV/Å), converged."""
    columns = [
        relaxed[n].values for n in ("num_atoms", "steps", "energy_initial", "energy", "fmax")
    ]
    for name, atoms, steps, before, after, force in zip(names_of(relaxed), *columns, strict=True):
        yield name, int(atoms), int(steps), before, after, before - after, force, force <= fmax


def show(
    relaxed: xr.Dataset, report: CampaignReport, options: argparse.Namespace, console: Console
) -> None:
    """The table, shortened on the terminal, whole in a file; then the totals."""
    table = Table(title="Relaxed molecules", title_justify="left")
    for heading in ("name", "formula"):
        table.add_column(heading, no_wrap=True)
    for heading in ("atoms", "steps", "E before\n(eV)", "E after\n(eV)", "gain\n(eV)"):
        table.add_column(heading, justify="right")
    table.add_column("fmax\n(eV/Å)", justify="right")
    table.add_column("converged", justify="center")
    texts = formulas(relaxed, MAX_ROWS)
    converged = 0
    with (options.out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "name",
                "atoms",
                "steps",
                "energy_initial_eV",
                "energy_eV",
                "gain_eV",
                "fmax_eV_per_A",
                "converged",
            ]
        )
        for row, entry in enumerate(rows_of(relaxed, options.fmax)):
            writer.writerow(entry)
            converged += bool(entry[-1])
            if row < MAX_ROWS:
                name, atoms, steps, before, after, gain, force, done = entry
                table.add_row(
                    name,
                    texts[row],
                    str(atoms),
                    str(steps),
                    f"{before:.4f}",
                    f"{after:.4f}",
                    f"{gain:.4f}",
                    f"{force:.4f}",
                    "yes" if done else "[red]no[/red]",
                )
    console.print(table)
    if report.finished > MAX_ROWS:
        console.print(f"... and {report.finished - MAX_ROWS:,} more in table.csv", highlight=False)
    lost = (options.out / "not_converted.txt").read_text().splitlines()
    for line in lost:
        console.print(line, highlight=False, soft_wrap=True)
    for reject in report.rejects:
        console.print(f"set aside: sample {reject.dataset_index}: {reject.reason}", soft_wrap=True)
    atoms = int(relaxed["num_atoms"].sum())
    console.print(
        f"{report.finished:,} molecules ({atoms:,} atoms), {converged:,} converged to "
        f"{options.fmax} eV/Å, {report.rejected:,} set aside, {len(lost):,} not converted; "
        f"{report.steps:,} steps, {report.frames:,} frames; {report.throughput:.1f} molecules/s",
        highlight=False,
        soft_wrap=True,
    )


def draw(relaxed: xr.Dataset, frames: xr.Dataset, options: argparse.Namespace, path: Path) -> None:
    """Energy and force along the way, the gain, and the steps it took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LogNorm

    # One pass over the lazy trajectory: per frame a step, an energy and a force.
    force = frames.ragged.reduce((frames["forces"] ** 2).sum("xyz") ** 0.5, "max", initial=0.0)
    system, step = frames["dataset_index"].values, frames["step"].values
    energy, force = frames["energy"].values, force.values
    first = np.flatnonzero(np.diff(system, prepend=-1))
    chosen = np.unique(np.linspace(0, len(first) - 1, min(len(first), MAX_CURVES)).astype(int))
    last = np.append(first[1:], len(system))

    size = frames["num_atoms"].values[first[chosen]]
    norm = LogNorm(max(size.min(), 1), max(size.max(), size.min() + 1))
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")

    def curves(axis, values, floor):
        """One line a molecule, and the median of those still moving at each step."""
        lines = [
            np.column_stack([step[a:b], np.maximum(values[a:b], floor)])
            for a, b in zip(first[chosen], last[chosen], strict=True)
        ]
        drawn = LineCollection(lines, array=size, cmap="viridis", norm=norm, lw=0.7, alpha=0.45)
        axis.add_collection(drawn)
        steps = np.arange(step.max() + 1)
        middle = np.array([np.median(values[step == s]) for s in steps])
        enough = np.bincount(step, minlength=len(steps)) >= min(5, len(first))
        axis.plot(
            steps[enough], np.maximum(middle, floor)[enough], color="black", lw=2,
            label="median of those still moving",
        )  # fmt: skip
        axis.set(yscale="log", xlabel="step", xlim=(0, max(step.max(), 1)))
        axis.set_ylim(floor, max(values.max() * 1.5, floor * 10))
        axis.grid(alpha=0.25, which="major")
        axis.legend(frameon=False, loc="upper right")
        return drawn

    above = energy - np.repeat(energy[last - 1], last - first)
    drawn = curves(axes[0, 0], above * 1000, 1e-2)
    axes[0, 0].set(title="Energy above the relaxed state", ylabel="E − E(final)  (meV)")
    curves(axes[0, 1], force, max(options.fmax / 20, 1e-4))
    axes[0, 1].axhline(options.fmax, color="crimson", lw=1.2, ls="--")
    axes[0, 1].annotate(
        f"threshold {options.fmax:g} eV/Å",
        (0.99, options.fmax * 0.93),
        xycoords=("axes fraction", "data"),
        color="crimson",
        ha="right",
        va="top",
        fontsize=9,
    )
    axes[0, 1].set(title="Largest force on an atom", ylabel="fmax  (eV/Å)")
    bar = figure.colorbar(drawn, ax=axes[0, :], label="atoms in the molecule", pad=0.01)
    ticks = [
        t for t in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000) if norm.vmin <= t <= norm.vmax
    ]
    bar.set_ticks(ticks, labels=[str(t) for t in ticks])
    bar.ax.minorticks_off()

    gain = (relaxed["energy_initial"] - relaxed["energy"]).values
    positive = gain[gain > 1e-6]
    if len(positive):
        low, high = np.log10(positive.min()), np.log10(positive.max())
        bins = np.logspace(low, max(high, low + 0.1), 31)
        axes[1, 0].hist(positive, bins=bins, color="#3b6ea5", edgecolor="white")
        axes[1, 0].axvline(np.median(positive), color="black", lw=1, ls=":")
        axes[1, 0].annotate(
            f"median {np.median(positive):.3g} eV",
            (0.03, 0.93),
            xycoords="axes fraction",
            fontsize=9,
        )
    axes[1, 0].set(
        xscale="log",
        xlabel="E(input) − E(relaxed)  (eV)",
        ylabel="molecules",
        title=f"Energy gained ({len(gain) - len(positive)} at rest from the start)",
    )

    atoms, steps = relaxed["num_atoms"].values, relaxed["steps"].values
    converged = relaxed["fmax"].values <= options.fmax
    jitter = np.random.default_rng(0).uniform(-0.25, 0.25, len(atoms))
    axes[1, 1].scatter(
        (atoms + jitter)[converged], steps[converged], s=14, alpha=0.7, color="#3b6ea5",
        label=f"converged ({converged.sum()})",
    )  # fmt: skip
    if not converged.all():
        axes[1, 1].scatter(
            (atoms + jitter)[~converged], steps[~converged], s=22, marker="x", color="crimson",
            label=f"not converged ({(~converged).sum()})",
        )  # fmt: skip
    axes[1, 1].set(title="Work by size", xlabel="atoms", ylabel="steps")
    axes[1, 1].legend(frameon=False)
    axes[1, 1].grid(alpha=0.25)

    figure.suptitle(
        f"{len(gain)} structures relaxed with FIRE and {LEVELS[options.calculator]} "
        f"({len(system):,} frames)"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())

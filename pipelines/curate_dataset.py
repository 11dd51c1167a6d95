"""A store to training sets: filtered, without repeats, energies above a baseline, split.

    python pipelines/curate_dataset.py STORE --out OUT [--where "natoms < 200 and fmax < 50"]

1. **Filter.** Samples of which ``--where`` is true stay; those about which it cannot
   be decided (a value is missing, or NaN) do not, and are counted apart.
2. **Repeats.** Of samples that are the same structure (fingerprints of distances,
   within ``--tolerance``) the first stays.
3. **Baseline.** The energy of each element is fitted by least squares, and taken off
   the energies; samples further than ``--outliers`` standard deviations from it are
   left out. The table goes to ``OUT/baseline.json``.
4. **Split.** ``OUT/train.zarr``, ``OUT/valid.zarr`` and ``OUT/test.zarr``: all samples of
   one composition go into one of them, by its hash, so that no molecule is in two.

Nothing of STORE is changed, memory is bounded by blocks of samples, and what each step
left out stands in ``OUT/report.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import xarray as xr

import alchemi_xr as ax
from alchemi_xr import analysis, etl
from alchemi_xr.errors import AlchemiError


def main(argv: list[str] | None = None) -> int:
    """Run everything; 0 when the parts stand in OUT."""
    options = parse(argv)
    try:
        run(options)
    except AlchemiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Make training sets of a store.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for everything")
    parser.add_argument("--where", help="keep samples of which this is true")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of two fingerprints")
    parser.add_argument("--keep-repeats", action="store_true", help="do not look for repeats")
    parser.add_argument(
        "--outliers", type=float, default=8.0, help="standard deviations from the baseline"
    )
    parser.add_argument("--fractions", type=float, nargs=3, default=(0.8, 0.1, 0.1))
    parser.add_argument("--by", default="composition", help="what stays together: a field's name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="worker processes of a local cluster")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in OUT")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Filter, repeats, baseline, split."""
    options.out.mkdir(parents=True, exist_ok=True)
    ds = ax.open_dataset(options.store, chunks="auto")
    report: dict[str, object] = {"store": str(options.store), "samples": ds.sizes["sample"]}

    if options.where is not None:
        keep, unknown = decide(options.store, options.where)
        report |= {
            "where": options.where,
            "left_out": int((~keep & ~unknown).sum()),
            "undecided": int(unknown.sum()),
        }
        ds = ds.ragged.where(keep)
    if not options.keep_repeats:
        same = analysis.duplicates(ds, tolerance=options.tolerance)
        first = same.values == np.arange(same.size)
        report["repeats"] = int((~first).sum())
        ds = ds.ragged.where(first)
    ds = above_baseline(ds, options, report)

    curated = options.out / "curated.zarr"
    mode = "w" if options.overwrite else "w-"
    ds.ragged.to_zarr(curated, mode=mode, client=options.workers)
    names = ("train", "valid", "test")
    shares = zip(names, options.fractions, strict=True)
    parts = etl.split(
        curated,
        {options.out / f"{name}.zarr": share for name, share in shares if share > 0},
        by=options.by or None,
        seed=options.seed,
        client=options.workers,
        overwrite=options.overwrite,
    )
    report["parts"] = {Path(path).stem: part.samples for path, part in parts.items()}
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


def decide(store: Path, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Which samples of a store a condition keeps, and about which it says nothing."""
    condition = etl.Predicate(text)
    keep, unknown = [], []
    with ax.open_store(store) as snapshot:
        condition.check({n: (snapshot.level(n), snapshot.tail(n)) for n in snapshot.fields})
        needed = [n for n in snapshot.fields if n in condition.fields] or ["atomic_numbers"]
        for block in snapshot.iter_blocks(samples=snapshot.active, fields=needed):
            verdict = condition(block)
            keep.append(verdict.keep)
            unknown.append(verdict.unknown)
    return np.concatenate(keep), np.concatenate(unknown)


def above_baseline(
    ds: xr.Dataset, options: argparse.Namespace, report: dict[str, object]
) -> xr.Dataset:
    """The samples near the baseline, their energies without it."""
    if "energy" not in ds:
        return ds
    fitted = analysis.baseline(ds)
    table = dict(
        zip(fitted.element.values.tolist(), fitted.element_energy.values.tolist(), strict=True)
    )
    path = options.out / "baseline.json"
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    residual = fitted.residual.values  # eV an atom; one number a sample
    spread = float(np.nanstd(residual))
    # Without an energy there is nothing to be far from.
    far = np.abs(residual - np.nanmean(residual)) > options.outliers * max(spread, 1e-12)
    report |= {"baseline_rmse_eV_per_atom": float(fitted.rmse), "outliers": int(far.sum())}
    counts = np.diff(ds.ragged.ptr("atom"))
    energy = ds.energy.copy(data=residual * counts)
    energy.attrs["long_name"] = "energy above the elements' energies"
    return ds.assign(energy=energy).ragged.where(~far)


if __name__ == "__main__":
    sys.exit(main())

"""Files of any format to one store, checked, with a report of every record.

    python pipelines/convert_to_store.py SRC... DST [--where CONDITION] [--workers N]

1. **Convert.** Everything that SRC names (files, patterns, folders) becomes the store
   DST, on threads of this machine, on worker processes or on a Dask scheduler.
   Broken records are set aside in ``DST.rejects.jsonl``, with file, frame and
   reason. Stopped at any point, the same command goes on where it was.
2. **Check.** Every chunk is read once and held against its checksum.
3. **Look.** Sizes, elements, energies and forces go to the terminal, and all of it
   to ``DST.report.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import alchemi_xr as ax
from alchemi_xr import etl
from alchemi_xr.errors import AlchemiError
from alchemi_xr.store.verify import verify


def main(argv: list[str] | None = None) -> int:
    """Run everything; 0 when a whole store stands at DST."""
    options = parse(argv)
    try:
        run(options)
    except AlchemiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Convert files to a store and check it.")
    parser.add_argument("paths", nargs="+", metavar="SRC... DST", help="files, then the store")
    parser.add_argument("--format", help="extxyz, ase-db, npz …; by default each file says it")
    parser.add_argument("--where", help="keep samples of which this is true: 'fmax < 50'")
    parser.add_argument("--energy-key", action="append", help="name of the energy in the input")
    parser.add_argument("--forces-key", action="append", help="name of the forces in the input")
    parser.add_argument(
        "--units", action="append", type=pair, default=[], help="FIELD=UNIT of the input"
    )
    parser.add_argument("--cutoff", type=float, help="neighbour lists of pairs nearer than this, Å")
    parser.add_argument("--dtype", help="float32 for all but the energy; by default as given")
    parser.add_argument("--profile", default="mixed", help="mixed, raw, fast, balanced, small")
    parser.add_argument("--workers", type=int, help="worker processes of a local cluster")
    parser.add_argument("--scheduler", help="address of a Dask scheduler")
    parser.add_argument("--strict", action="store_true", help="stop at the first broken record")
    parser.add_argument("--overwrite", action="store_true", help="replace a store at DST")
    options = parser.parse_args(argv)
    if len(options.paths) < 2:
        parser.error("give at least one SRC, and DST last")
    if options.workers is not None and options.scheduler is not None:
        parser.error("give --workers or --scheduler, not both")
    options.destination = Path(options.paths.pop())
    return options


def pair(text: str) -> tuple[str, str]:
    """``FIELD=UNIT`` as two words."""
    name, equals, unit = text.partition("=")
    if not (name and equals and unit):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=UNIT")
    return name, unit


def run(options: argparse.Namespace) -> None:
    """Convert, check, look."""
    report = ax.convert(
        options.paths,
        options.destination,
        format=options.format,
        where=options.where,
        energy_key=options.energy_key,
        forces_key=options.forces_key,
        units=dict(options.units) or None,
        dtype=options.dtype,
        cutoff=options.cutoff,
        profile=options.profile,
        client=options.scheduler or options.workers,
        on_error="raise" if options.strict else "quarantine",
        overwrite=options.overwrite,
    )
    print(report)

    checked = verify(options.destination, checksums=True)
    print(checked)
    if not checked.ok:
        raise SystemExit(1)

    found = etl.stats(options.destination)
    print(found)
    everything = {"conversion": report.to_dict(), "statistics": found.to_dict()}
    path = options.destination.with_name(options.destination.name + ".report.json")
    path.write_text(json.dumps(everything, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"report: {path}")


if __name__ == "__main__":
    sys.exit(main())

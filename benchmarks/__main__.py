"""Print every row of every benchmark module: ``python -m benchmarks [module ...]``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from benchmarks.report import machine, print_rows


def main(names: list[str]) -> None:
    here = str(Path(__file__).parent)
    found = [
        m.name
        for m in pkgutil.iter_modules([here])
        if "_" not in m.name and m.name != "report"  # the others serve one of these
    ]
    print(machine())
    print("page cache warm; medians of alternated rounds")
    for name in names or found:
        print(f"\n# {name}")
        print_rows(list(importlib.import_module(f"benchmarks.{name}").rows()))


if __name__ == "__main__":
    main(sys.argv[1:])

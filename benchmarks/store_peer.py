"""The other side of ``benchmarks/store.py``: nvalchemi-toolkit, in its own interpreter.

Run by that module. Reads one command a line, answers with the seconds it took.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def arrays(num: int, seed: int, atoms: int = 64) -> dict[str, np.ndarray]:
    """Data A: samples of 64 atoms, flat."""
    rng = np.random.default_rng(seed)
    rows = num * atoms
    return {
        "atomic_numbers": rng.integers(1, 90, rows),
        "positions": rng.normal(size=(rows, 3)).astype(np.float32),
        "forces": rng.normal(size=(rows, 3)).astype(np.float32),
        "energy": rng.normal(size=(num, 1)),
        "cell": rng.normal(size=(num, 3, 3)).astype(np.float32),
        "pbc": np.ones((num, 3), dtype=bool),
    }


def batch(num: int, seed: int) -> Any:
    import torch
    from nvalchemi.data import AtomicData, Batch

    flat = {name: torch.from_numpy(values) for name, values in arrays(num, seed).items()}
    atom = ("atomic_numbers", "positions", "forces")
    return Batch.from_data_list(
        [
            AtomicData(
                **{
                    name: v[i * 64 : (i + 1) * 64] if name in atom else v[i : i + 1]
                    for name, v in flat.items()
                }
            )
            for i in range(num)
        ]
    )


def main(folder: Path) -> None:
    # What the toolkit prints, from C too, is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from nvalchemi.data import AtomicDataZarrWriter

    held: dict[int, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        path = folder / request["store"]
        what, num = request["what"], request["num"]
        if what in ("write", "append") and num not in held:
            held[num] = batch(num, 0)
        if what == "write":
            shutil.rmtree(path, ignore_errors=True)
        writer = AtomicDataZarrWriter(str(path))
        start = time.perf_counter()
        if what == "write":
            writer.write(held[num])
        elif what == "append":
            writer.append(held[num])
        elif what == "delete":
            first = request.get("first", 0)
            writer.delete(list(range(first, first + num * 10, 10)))
        else:
            writer.defragment()
        answers.write(json.dumps(time.perf_counter() - start) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

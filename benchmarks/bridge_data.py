"""Data of ``benchmarks/bridge.py``, and how its processes are asked.

Needs NumPy and torch alone: it is imported in every peer's interpreter. Data lie as one
``.npy`` file a field, mapped by all processes, so that all hold the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

BATCH = 64
LEVELS = {
    "atomic_numbers": "atom",
    "positions": "atom",
    "forces": "atom",
    "energy": "system",
    "cell": "system",
    "pbc": "system",
    "neighbor_list": "edge",
    "shifts": "edge",
}

Arrays = dict[str, np.ndarray]


#: Samples by which the sides are held against each other before they are measured.
PROBE = [5, 1, 63, 17, 5]


class Iterated(Protocol):
    """What a loader of any side gives."""

    def __iter__(self) -> Iterator[Any]: ...


def sizes(kind: str, num: int, rng: np.random.Generator) -> np.ndarray:
    """Atoms of each sample: 64 in A; log-normal from 2 to 300, mean about 60, else."""
    if kind == "A":
        return np.full(num, 64)
    return np.clip(rng.lognormal(3.85, 0.7, num), 2, 300).astype(np.int64)


def make(kind: str, num: int) -> Arrays:
    """Flat arrays and pointers of data A, B or C; the numbers are random."""
    rng = np.random.default_rng(ord(kind))
    atoms = sizes(kind, num, rng)
    atoms_ptr = np.concatenate([[0], np.cumsum(atoms)])
    rows = int(atoms_ptr[-1])
    arrays = {
        "atoms_ptr": atoms_ptr,
        "edges_ptr": np.zeros(num + 1, np.int64),
        "atomic_numbers": rng.integers(1, 90, rows),
        "positions": rng.normal(size=(rows, 3)).astype(np.float32),
        "forces": rng.normal(size=(rows, 3)).astype(np.float32),
        "energy": rng.normal(size=(num, 1)),
        "cell": rng.normal(size=(num, 3, 3)).astype(np.float32),
        "pbc": np.ones((num, 3), dtype=bool),
    }
    if kind == "C":
        edges = rng.integers(15, 26, num) * atoms
        arrays["edges_ptr"] = np.concatenate([[0], np.cumsum(edges)])
        top = np.repeat(atoms, edges)
        pairs = rng.random((len(top), 2)) * top[:, None]
        arrays["neighbor_list"] = pairs.astype(np.int64)  # local to its sample
        arrays["shifts"] = np.zeros((len(top), 3), np.float32)
    return arrays


def folder_of(root: Path, kind: str) -> Path:
    """Where the arrays of a kind of data lie."""
    return root / f"data_{kind}"


def save(root: Path, kind: str, num: int) -> int:
    """Write the arrays; bytes of one sample on the average, pointers left out."""
    folder = folder_of(root, kind)
    folder.mkdir()
    arrays = make(kind, num)
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return sum(values.nbytes for name, values in arrays.items() if name in LEVELS) // num


def load(root: Path, kind: str) -> Arrays:
    """The arrays, mapped."""
    return {
        path.stem: np.load(path, mmap_mode="r")
        for path in sorted(folder_of(root, kind).glob("*.npy"))
    }


def sample_fields(root: Path, num: int = 256) -> list[dict[str, Any]]:
    """Tensors of the first samples of data A, each of its own."""
    arrays = load(root, "A")
    ptr = arrays["atoms_ptr"]
    found = []
    for i in range(num):
        atoms = slice(ptr[i], ptr[i + 1])
        rows = {"atom": atoms, "system": slice(i, i + 1)}
        found.append(
            {
                name: torch.from_numpy(np.array(values[rows[LEVELS[name]]]))
                for name, values in arrays.items()
                if name in LEVELS
            }
        )
    return found


def timed(run: Callable[[], int]) -> dict[str, float]:
    """Wall-clock and CPU seconds of one structure; ``run`` says how many it did."""
    start, cpu = time.perf_counter(), time.process_time()
    num = run()
    return {
        "wall": (time.perf_counter() - start) / num,
        "cpu": (time.process_time() - cpu) / num,
    }


def count(loader: Iterated) -> int:
    """Run through a loader; the structures in it."""
    return sum(int(batch.num_graphs) for batch in loader)


def digest(batch: Callable[[str], Any], kind: str) -> dict[str, str]:
    """What tells two batches apart: dtype, shape and bytes of each field.

    ``batch`` gives the tensor of a field by its name.
    """
    found = {}
    for name in LEVELS:
        if kind == "C" or LEVELS[name] != "edge":
            values = np.ascontiguousarray(batch(name).numpy())
            bytes_ = hashlib.sha256(values.tobytes()).hexdigest()[:16]
            found[name] = f"{values.dtype} {values.shape} {bytes_}"
    return found


def serve(calls: Callable[[Path], dict[str, Callable[..., Any]]]) -> None:
    """Answer one JSON request a line, ``{"call": name, ...arguments}``, until input ends."""
    # What libraries print, from C too, is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    known = calls(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        answer = known[request.pop("call")](**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

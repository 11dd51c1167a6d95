"""Slow loops over samples: what the fast operations must equal.

Each function is written from its meaning, sample by sample, and shares no code
with the fast version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from alchemi_xr._typing import Level, NDArray
from alchemi_xr.data.block import Block

__all__ = [
    "Sample",
    "assert_same_samples",
    "block_of_samples",
    "gather_loop",
    "greedy_fit",
    "local_edges",
    "samples_of",
    "segment_loop",
]

Sample: TypeAlias = dict[str, NDArray]


def samples_of(block: Block) -> list[Sample]:
    """One dict a sample with copies of the fields it has; system fields without their axis."""
    samples = []
    for i in range(block.num_samples):
        sample: Sample = {}
        for name in block.names:
            mask = block.present.get(name)
            if mask is not None and not mask[i]:
                continue
            level = block.levels[name]
            if level == "system":
                sample[name] = np.array(block.arrays[name][i])
            else:
                ptr = block.atoms_ptr if level == "atom" else block.edges_ptr
                sample[name] = block.arrays[name][ptr[i] : ptr[i + 1]].copy()
        samples.append(sample)
    return samples


def block_of_samples(
    samples: Sequence[Mapping[str, NDArray]],
    levels: Mapping[str, Level],
    models: Mapping[str, NDArray],
) -> Block:
    """The samples one after the other, with fill where one lacks a field.

    Parameters
    ----------
    models : dict of str to array
        Any array of each field: gives dtype and row shape, also where no
        sample has the field.
    """
    atoms, edges = [0], [0]
    rows: dict[str, list[NDArray]] = {name: [] for name in levels}
    masks: dict[str, list[bool]] = {name: [] for name in levels}
    for sample in samples:
        num_atoms = len(sample["atomic_numbers"])
        num_edges = 0
        for name, level in levels.items():
            if level == "edge" and name in sample:
                num_edges = len(sample[name])
        atoms.append(atoms[-1] + num_atoms)
        edges.append(edges[-1] + num_edges)
        for name, level in levels.items():
            count = {"atom": num_atoms, "edge": num_edges, "system": 1}[level]
            model = models[name]
            if name in sample:
                value = sample[name][None] if level == "system" else sample[name]
            else:
                fill = np.nan if model.dtype.kind in "fc" else 0
                value = np.full((count, *model.shape[1:]), fill, dtype=model.dtype)
            rows[name].append(value)
            masks[name].append(name in sample)
    arrays = {
        name: np.concatenate([models[name][:0], *parts]).astype(models[name].dtype)
        for name, parts in rows.items()
    }
    present = {name: np.array(mask, bool) for name, mask in masks.items() if not all(mask)}
    return Block(
        np.array(atoms, np.int64), np.array(edges, np.int64), arrays, dict(levels), present
    )


def assert_same_samples(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    """Same fields, dtypes, shapes and bits in every sample (NaN equals NaN)."""
    assert len(found) == len(expected), f"{len(found)} samples, expected {len(expected)}"
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert set(mine) == set(theirs), f"sample {i}: {sorted(mine)} != {sorted(theirs)}"
        for name, value in theirs.items():
            got = mine[name]
            assert got.dtype == value.dtype, f"sample {i} {name}: {got.dtype} != {value.dtype}"
            assert got.shape == value.shape, f"sample {i} {name}: {got.shape} != {value.shape}"
            np.testing.assert_array_equal(got, value, err_msg=f"sample {i}, {name}")


def local_edges(pairs: NDArray, atoms_ptr: NDArray, edges_ptr: NDArray) -> list[NDArray]:
    """Batch-global edges as one local list a sample."""
    return [
        pairs[edges_ptr[i] : edges_ptr[i + 1]] - atoms_ptr[i] for i in range(len(atoms_ptr) - 1)
    ]


def gather_loop(values: NDArray, ptr: NDArray, samples: Sequence[int]) -> tuple[NDArray, NDArray]:
    """Rows of the chosen samples, and their pointer."""
    parts, new = [values[:0]], [0]
    for i in samples:
        parts.append(values[ptr[i] : ptr[i + 1]])
        new.append(new[-1] + int(ptr[i + 1] - ptr[i]))
    return np.concatenate(parts), np.array(new, np.int64)


def greedy_fit(counts: Sequence[Sequence[int]], room: Sequence[int]) -> list[bool]:
    """Each sample in order, taken if it still fits at every level."""
    free, taken = list(room), []
    for sizes in zip(*counts, strict=True):
        fits = all(size <= limit for size, limit in zip(sizes, free, strict=True))
        if fits:
            free = [limit - size for size, limit in zip(sizes, free, strict=True)]
        taken.append(fits)
    return taken


def segment_loop(values: NDArray, ptr: NDArray, op: str) -> NDArray:
    """One value a sample, as ``data.segment.segment_reduce`` (floats in double)."""
    floating = values.dtype.kind == "f"
    out: list[Any] = []
    for i in range(len(ptr) - 1):
        rows = values[ptr[i] : ptr[i + 1]]
        wide = rows.astype(np.float64 if floating else np.int64)
        empty = len(rows) == 0
        if op == "sum":
            out.append(wide.sum(axis=0))
        elif op == "mean":
            out.append(np.full(rows.shape[1:], np.nan) if empty else wide.mean(axis=0))
        elif op == "norm":
            out.append(np.sqrt((wide.astype(np.float64) ** 2).sum()))
        elif op in ("min", "max"):
            pick = rows.min if op == "min" else rows.max
            out.append(np.full(rows.shape[1:], np.nan, values.dtype) if empty else pick(axis=0))
        elif op in ("any", "all"):
            out.append(rows.any(axis=0) if op == "any" else rows.all(axis=0))
        else:
            pick_row = rows.argmin if op == "argmin" else rows.argmax
            out.append(np.full(rows.shape[1:], -1) if empty else pick_row(axis=0))
    kinds: dict[str, Any] = {
        "sum": values.dtype if floating else np.int64,
        "mean": values.dtype if floating else np.float64,
        "norm": values.dtype if floating else np.float64,
        "min": values.dtype,
        "max": values.dtype,
        "any": bool,
        "all": bool,
        "argmin": np.int64,
        "argmax": np.int64,
    }
    tail = () if op == "norm" else values.shape[1:]
    return np.array(out).reshape(len(ptr) - 1, *tail).astype(kinds[op])

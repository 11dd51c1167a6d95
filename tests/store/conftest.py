"""Blocks for the store's tests: random ones, and a strategy over all that is allowed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr, expand_mask
from alchemi_xr.data.fields import FIELDS, fill_for

CUSTOM = {
    "flags": ("atom", (), "?"),
    "small": ("atom", (2,), "i1"),
    "tiny": ("system", (), "u1"),
    "half": ("atom", (3,), "f2"),
    "wide": ("system", (2, 3), "f8"),
    "wave": ("system", (), "c8"),
    "bond_kind": ("edge", (), "i4"),
    "empty_tail": ("system", (0,), "f4"),
    "big": ("system", (), "u8"),
}
CORE = {
    "positions": ("f8", "f4", "f2"),
    "forces": ("f4", "f8"),
    "atomic_numbers": ("i8", "i4", "u1"),
    "energy": ("f8", "f4"),
    "cell": ("f8",),
    "pbc": ("?",),
    "neighbor_list": ("i8", "i4"),
    "neighbor_list_shifts": ("i8", "f4", "i1"),
    "node_attrs": ("f4",),
    "charge": ("f8",),
}


def values_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return rng.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)
    if kind.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)
    return rng.normal(size=shape).astype(kind)


def make_block(
    seed: int = 0,
    num: int = 4,
    *,
    fields: dict[str, str] | None = None,
    holes: tuple[str, ...] = (),
    text: bool = False,
    max_atoms: int = 5,
    max_edges: int = 6,
    tails: dict[str, int] | None = None,
) -> Block:
    """A seeded block; fields are core names to dtypes, or names of CUSTOM."""
    rng = np.random.default_rng(seed)
    if fields is None:
        fields = {
            "positions": "f8",
            "atomic_numbers": "i8",
            "energy": "f8",
            "forces": "f4",
            "neighbor_list": "i8",
        }
    num_atoms = rng.integers(0, max_atoms + 1, num)
    num_edges = np.where(num_atoms > 0, rng.integers(0, max_edges + 1, num), 0)
    if "neighbor_list" not in fields:
        num_edges = num_edges * 0
    atoms_ptr, edges_ptr = counts_to_ptr(num_atoms), counts_to_ptr(num_edges)
    rows = {"atom": int(atoms_ptr[-1]), "edge": int(edges_ptr[-1]), "system": num}
    arrays: dict[str, np.ndarray] = {}
    levels: dict[str, Any] = {}
    for name, dtype in fields.items():
        if name in FIELDS:
            level = FIELDS[name].level
            tail = tuple(
                (tails or {}).get(name, 4) if isinstance(n, str) else n for n in FIELDS[name].tail
            )
        else:
            level, tail, dtype = CUSTOM[name]
        if name == "neighbor_list":
            limit = np.repeat(num_atoms, num_edges)[:, None]
            arrays[name] = (rng.random((rows["edge"], 2)) * limit).astype(dtype)
        else:
            arrays[name] = values_of(rng, (rows[level], *tail), dtype)
        levels[name] = level
    if text:
        words = np.empty(num, dtype=object)
        words[:] = [f"name {i} é∑ {seed}" for i in range(num)]
        arrays["name"], levels["name"] = words, "system"
    block = Block(atoms_ptr, edges_ptr, arrays, levels)
    for name in holes:
        mask = rng.random(num) < 0.5
        mask[:1] = False
        block.present[name] = mask
        level = levels[name]
        gone = ~mask if level == "system" else ~expand_mask(mask, block.ptr(level))
        arrays[name][gone] = "" if arrays[name].dtype == object else fill_for(arrays[name].dtype)
    return block.validate()


def assert_same(found: Block, wanted: Block, *, note: str = "") -> None:
    """Two blocks equal in every bit: names, levels, dtypes, values, presence."""
    assert found.names == wanted.names, note
    np.testing.assert_array_equal(found.atoms_ptr, wanted.atoms_ptr, note)
    np.testing.assert_array_equal(found.edges_ptr, wanted.edges_ptr, note)
    for name in wanted.names:
        a, b = found[name], wanted[name]
        assert found.levels[name] == wanted.levels[name], (name, note)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (name, note)
        np.testing.assert_array_equal(a, b, f"{name} {note}")
        np.testing.assert_array_equal(found.has(name), wanted.has(name), f"{name} {note}")


@st.composite
def block_strategy(draw: Any, *, same_dtypes: bool = False) -> Block:
    names = draw(st.sets(st.sampled_from([*CORE, *CUSTOM]), max_size=7))
    names |= {"atomic_numbers", "positions"}
    if "bond_kind" in names or "neighbor_list_shifts" in names:
        names |= {"neighbor_list"}
    fields = {
        n: (CORE[n][0] if same_dtypes else draw(st.sampled_from(CORE[n]))) if n in CORE else ""
        for n in sorted(names)
    }
    text = draw(st.booleans())
    optional = sorted((names - {"atomic_numbers", "positions"}) | ({"name"} if text else set()))
    holes = draw(st.sets(st.sampled_from(optional), max_size=3)) if optional else set()
    return make_block(
        draw(st.integers(0, 2**31)),
        draw(st.integers(1, 6)),
        fields=fields,
        holes=tuple(sorted(holes)),
        text=text,
        max_atoms=draw(st.sampled_from([0, 1, 4])),
        max_edges=draw(st.sampled_from([0, 5])),
    )


def tagged_block(seed: int) -> Block:
    """A small block whose energies all say its seed."""
    block = make_block(seed, 2, fields={"positions": "f8", "atomic_numbers": "i8", "energy": "f8"})
    block.arrays["energy"][:] = seed
    return block


class Appenders:
    """Processes that append at once, each started once for all tests."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One job a process, begun together; their answers."""
        for _ in range(len(jobs) - len(self._processes)):
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("appender.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "ICECHUNK_LOG": "error"},
            )
            self._processes.append(process)
            process.ready = False
        chosen = self._processes[: len(jobs)]
        for process in chosen:
            if not process.ready:
                assert process.stdout.readline() == "ready\n"
                process.ready = True
        for process, job in zip(chosen, jobs, strict=True):
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in chosen]

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait(30)
            process.stdout.close()


@pytest.fixture(scope="session")
def appenders() -> Iterator[Appenders]:
    made = Appenders()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def tagged() -> Callable[[int], Block]:
    return tagged_block


@pytest.fixture(scope="session")
def make() -> Callable[..., Block]:
    return make_block


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    return assert_same


@pytest.fixture(scope="session")
def blocks() -> Callable[..., st.SearchStrategy[Block]]:
    return block_strategy


@pytest.fixture(params=["folder", "memory"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """A place for a store: a path, then a dict."""
    return tmp_path / "a.zarr" if request.param == "folder" else {}

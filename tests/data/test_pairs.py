"""Edge lists in NumPy: against ASE, the torch search, and a plain double loop."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.errors import FieldError

pytest.importorskip("vesin", reason="vesin, of the extra analysis, makes the search")

from alchemi_xr.data.pairs import FARTHEST, find_edges, iter_pairs


def block_of(samples: list[tuple[np.ndarray, np.ndarray, list[bool]]]) -> Block:
    counts = [len(p) for p, _, _ in samples]
    ptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    arrays = {
        "positions": np.concatenate([p for p, _, _ in samples]).reshape(-1, 3),
        "atomic_numbers": np.ones(ptr[-1], np.int64),
        "cell": np.array([c for _, c, _ in samples]),
        "pbc": np.array([p for _, _, p in samples]),
    }
    levels = {"positions": "atom", "atomic_numbers": "atom", "cell": "system", "pbc": "system"}
    return Block(ptr, np.zeros(len(ptr), np.int64), arrays, levels)


def as_sets(edges, sample: int) -> set[tuple[int, ...]]:
    rows = slice(edges.ptr[sample], edges.ptr[sample + 1])
    both = np.column_stack((edges.neighbor_list[rows], edges.shifts[rows]))
    return {tuple(row) for row in both.tolist()}


def by_ase(positions, cell, pbc, cutoff) -> set[tuple[int, ...]]:
    from ase import Atoms
    from ase.neighborlist import primitive_neighbor_list

    atoms = Atoms(f"H{len(positions)}", positions, cell=cell, pbc=pbc)
    i, j, s = primitive_neighbor_list(
        "ijS", atoms.pbc, atoms.cell.complete(), atoms.positions, cutoff
    )
    return {(a, b, *c) for a, b, c in zip(i.tolist(), j.tolist(), s.tolist(), strict=True)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.floats(0.8, 6.0))
def test_edges_are_those_of_ase_for_any_periodicity(seed: int, count: int, cutoff: float) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        atoms = int(rng.integers(0, 9))
        cell = np.diag(rng.uniform(2.0, 6.0, 3)) + rng.uniform(-1.0, 1.0, (3, 3))
        pbc = [bool(x) for x in rng.integers(0, 2, 3)]
        samples.append((rng.uniform(-8.0, 8.0, (atoms, 3)), cell, pbc))
    edges = find_edges(block_of(samples), cutoff)
    assert edges.failed == []
    for k, (positions, cell, pbc) in enumerate(samples):
        expected = by_ase(positions, cell, pbc, cutoff) if len(positions) else set()
        assert as_sets(edges, k) == expected
        alone = find_edges(block_of([samples[k]]), cutoff)
        rows = slice(edges.ptr[k], edges.ptr[k + 1])
        assert np.array_equal(edges.neighbor_list[rows], alone.neighbor_list)
        assert np.array_equal(edges.shifts[rows], alone.shifts)


def test_edges_and_their_order_are_those_of_the_torch_search() -> None:
    torch_side = pytest.importorskip("alchemi_xr.data.neighbors", reason="torch is not installed")
    rng = np.random.default_rng(3)
    samples = [
        (rng.uniform(0, 7.0, (n, 3)), np.eye(3) * 6.5, pbc)
        for n, pbc in ((12, [True] * 3), (7, [False] * 3), (9, [True, True, False]))
    ]
    block = block_of(samples)
    ours, theirs = find_edges(block, 4.0), torch_side.neighbor_list(block, 4.0)
    assert np.array_equal(ours.ptr, theirs.edges_ptr)
    assert np.array_equal(ours.neighbor_list, theirs.neighbor_list)
    assert np.array_equal(ours.shifts, theirs.neighbor_list_shifts)


def test_what_cannot_be_searched_is_named_and_has_no_edges() -> None:
    good = np.array([[0.0, 0, 0], [1.0, 0, 0]])
    nan, far = good.copy(), good.copy()
    nan[1, 2] = np.nan
    far[1, 0] = 2 * FARTHEST
    flat = np.array([[3.0, 0, 0], [0, 3.0, 0], [3.0, 3.0, 0]])
    none = [False] * 3
    block = block_of(
        [
            (good, np.eye(3), none),
            (nan, np.eye(3), none),
            (far, np.eye(3), none),
            (good, flat, [True] * 3),
        ]
    )
    edges = find_edges(block, 1.5)
    assert np.diff(edges.ptr).tolist() == [2, 0, 0, 0]
    assert [(s, f) for s, f, _ in edges.failed] == [(1, "positions"), (2, "positions"), (3, "cell")]
    assert "exploded" in edges.failed[1][2]
    with pytest.raises(FieldError, match="sample 12: positions of atom 1 are not finite"):
        list(iter_pairs(block, 1.5, first=11))
    skipped = find_edges(block, 1.5, np.array([True] * 4))
    assert skipped.failed == []
    assert len(skipped.neighbor_list) == 0


_WIDE = """
import numpy as np
from tests.data.test_pairs import block_of
from alchemi_xr.data.pairs import find_edges, iter_pairs

rng = np.random.default_rng(0)
none = [False] * 3
molecules = [(rng.uniform(0, 4.0, (3, 3)), np.eye(3), none) for _ in range(60_000)]
pair = np.array([[0.0, 0, 0], [1.0, 0, 0]])
for wide in (3e3, 1e5, 9e5):
    molecules.append((np.concatenate([pair, pair + [wide, 0, wide]]), np.eye(3), none))
    slab = (np.concatenate([pair, pair + [0, 0, wide]]), np.eye(3) * 10, [True, True, False])
    molecules.append(slab)
wire = np.arange(200_000)[:, None] * np.array([0, 0, 4.0])
molecules.append((wire, np.eye(3) * 30, [True, True, False]))
block = block_of(molecules)
edges = find_edges(block, 5.0)
assert not edges.failed
assert np.diff(edges.ptr)[-7:].tolist() == [4] * 6 + [2 * 199_999], np.diff(edges.ptr)[-7:]
half = sum(len(p.i) for p in iter_pairs(block, 5.0))
assert 2 * half == len(edges.neighbor_list), (half, len(edges.neighbor_list))
print("whole")
"""


def test_many_and_wide_molecules_do_not_end_the_process() -> None:
    # vesin divides by zero where a search in the open spans too many cells.
    done = subprocess.run(
        [sys.executable, "-c", _WIDE], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "whole", done.stderr[-2000:]

"""Pairs of near atoms of a block in NumPy: half lists for analysis, edge lists for stores.

The search is vesin's. It is given what it can bear: it ends the process where a
thin box has too many cells. So molecules are searched together in lots of a
bounded length, wide ones by themselves with their gaps closed, and where there are
too many cells for all that, in larger ones. :mod:`alchemi_xr.data.neighbors` does the same for
batches in torch, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import BoolArray, IntArray, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.cells import complete_cells, periodicity
from alchemi_xr.data.csr import counts_to_ptr, ptr_to_index
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.errors import FieldError

__all__ = ["FARTHEST", "Edges", "Pairs", "find_edges", "iter_pairs", "unsearchable"]

FARTHEST = 1.0e6
"""Å between atoms of one sample above which it has exploded; its cells could not be counted."""

_MOST_CELLS = 50_000  # of a search; above 100,000 vesin divides by zero for thin boxes
_WIDE = 20  # cutoffs; wider molecules are searched by themselves
_ABOVE = 1.0 + 1e-6  # search radius over the cutoff, before distances are taken exactly


@dataclass(frozen=True, slots=True)
class Pairs:
    """Each pair once.

    Parameters
    ----------
    i, j : int64 array, [P]
        Atoms of the block.
    distance : float64 array, [P], Å
    vector : float64 array, [P, 3], Å, or None
        From ``i`` to ``j``.
    """

    i: IntArray
    j: IntArray
    distance: NDArray
    vector: NDArray | None


@dataclass(frozen=True, slots=True)
class Edges:
    """Directed pairs nearer than a cutoff, ordered by sample, source, target and image.

    Parameters
    ----------
    ptr : int64 array, [N + 1]
    neighbor_list : int64 array, [E, 2]
        Source and target, counted from the first atom of their sample.
    shifts : int32 array, [E, 3]
        Lattice images: the vector of an edge is ``x[j] + shifts @ cell - x[i]``.
    failed : list of (int, str, str)
        Sample, field and reason of those that cannot be searched; they have no edges.
    """

    ptr: Ptr
    neighbor_list: IntArray
    shifts: NDArray
    failed: list[tuple[int, str, str]]


def iter_pairs(
    block: Block, cutoff: float, *, vectors: bool = False, first: int = 0
) -> Iterator[Pairs]:
    """All pairs nearer than a cutoff, periodic images included, some samples at a time.

    Parameters
    ----------
    block : Block
    cutoff : float
        Å.
    vectors : bool
    first : int
        Position of the block's first sample, for messages.

    Raises
    ------
    FieldError
        Positions that are not finite or too far apart, or a cell without volume.
    """
    positions = np.ascontiguousarray(block["positions"], dtype=np.float64)
    _need_near(block, first)
    cell, pbc = periodicity(block)
    boxed: NDArray = np.asarray(pbc.any(axis=1))
    boxes = complete_cells(cell[boxed], pbc[boxed], first)
    search = _Search(cutoff, full=False, quantities="ijdD" if vectors else "ijd")
    for rows, found in search.over(block.atoms_ptr, positions, boxes, pbc, boxed):
        i, j = (rows[x.astype(np.int64)] for x in found[:2])
        yield Pairs(i, j, found[2], found[3] if vectors else None)


def find_edges(block: Block, cutoff: float, skip: BoolArray | None = None) -> Edges:
    """The neighbour list of every sample, each pair in both directions.

    What a sample gets does not depend on the others of its block.

    Parameters
    ----------
    block : Block
        Periodic along the axes that ``pbc`` names; without it, not at all.
    cutoff : float
        Å; a pair at exactly this distance is none.
    skip : bool array, [N], optional
        Samples that get no edges.
    """
    positions = np.ascontiguousarray(block["positions"], dtype=np.float64)
    cell, pbc = periodicity(block)
    left = np.zeros(block.num_samples, dtype=bool) if skip is None else skip.copy()
    failed = []
    for sample, reason in unsearchable(block):
        if not left[sample]:
            failed.append((sample, "positions", reason))
            left[sample] = True
    boxes = np.zeros((block.num_samples, 3, 3))
    for i in np.flatnonzero(pbc.any(axis=1) & ~left).tolist():
        try:
            boxes[i] = complete_cells(cell[i : i + 1], pbc[i : i + 1])[0]
        except FieldError as error:
            failed.append((i, "cell", f"{error.what} (pbc {pbc[i].tolist()})"))
            left[i] = True
    counts = np.diff(block.atoms_ptr)
    kept = np.flatnonzero(~left & (counts > 0))
    rows = np.flatnonzero(np.isin(ptr_to_index(block.atoms_ptr), kept))
    ptr = counts_to_ptr(counts[kept])
    boxed: NDArray = np.asarray(pbc[kept].any(axis=1))
    search = _Search(cutoff * _ABOVE, full=True, quantities="ijS")
    parts: list[tuple[NDArray, NDArray, NDArray]] = []
    near = positions[rows]
    for own, found in search.over(ptr, near, boxes[kept][boxed], pbc[kept], boxed):
        source, target = (rows[own[x.astype(np.int64)]] for x in found[:2])
        parts.append((source, target, found[2].astype(np.int32)))
    return _ordered(block, positions, boxes, cutoff, parts, failed)


def _ordered(
    block: Block,
    positions: NDArray,
    boxes: NDArray,
    cutoff: float,
    parts: list[tuple[NDArray, NDArray, NDArray]],
    failed: list[tuple[int, str, str]],
) -> Edges:
    owner = ptr_to_index(block.atoms_ptr)
    i = np.concatenate([p[0] for p in parts] or [np.zeros(0, np.int64)])
    j = np.concatenate([p[1] for p in parts] or [np.zeros(0, np.int64)])
    shifts = np.concatenate([p[2] for p in parts] or [np.zeros((0, 3), np.int32)])
    vector = positions[j] - positions[i]
    moved = np.flatnonzero(shifts.any(axis=1))
    vector[moved] += np.einsum("ij,ijk->ik", shifts[moved].astype(float), boxes[owner[i[moved]]])
    near = np.flatnonzero(np.einsum("ij,ij->i", vector, vector) < cutoff * cutoff)
    order = near[np.lexsort((*shifts[near].T[::-1], j[near], i[near]))]
    i, j, shifts = i[order], j[order], shifts[order]
    sample = owner[i]
    start = block.atoms_ptr[sample]
    ptr = counts_to_ptr(np.bincount(sample, minlength=block.num_samples).astype(np.int64))
    return Edges(ptr, np.column_stack((i - start, j - start)), shifts, sorted(failed))


class _Search:
    """vesin, kept within what it can bear."""

    def __init__(self, cutoff: float, *, full: bool, quantities: str) -> None:
        self._full = full
        self._cutoff = cutoff
        self._quantities = quantities
        self._vesin = self._made(cutoff)

    def _made(self, cutoff: float) -> Any:
        vesin: Any = import_optional("vesin", extra="analysis", why="the neighbour search")
        return vesin.NeighborList(cutoff=cutoff, full_list=self._full, n_threads=1)

    def over(
        self, ptr: Ptr, positions: NDArray, boxes: NDArray, pbc: BoolArray, boxed: BoolArray
    ) -> Iterator[tuple[IntArray, tuple[NDArray, ...]]]:
        """Rows of the atoms that were searched together, and what was found among them."""
        alone = list(zip(np.flatnonzero(boxed).tolist(), boxes, strict=True))
        for molecules in self._lots(ptr, positions, ~boxed, alone):
            rows, moved = _side_by_side(ptr, positions, molecules, 1.5 * self._cutoff)
            found = self._vesin.compute(moved, np.eye(3), False, self._quantities)
            yield rows, found
        for sample, box in alone:
            rows = np.arange(ptr[sample], ptr[sample + 1])
            if len(rows):
                yield rows, self._in_box(positions[rows], box, pbc[sample])

    def _lots(
        self, ptr: Ptr, positions: NDArray, is_open: BoolArray, alone: list[tuple[int, NDArray]]
    ) -> Iterator[IntArray]:
        """Molecules to be searched together; the wide ones go to those searched alone."""
        molecules = np.flatnonzero(is_open & (np.diff(ptr) > 1))
        if len(molecules) == 0:
            return
        low = segment_reduce(positions, ptr, "min")[molecules]
        span = (segment_reduce(positions, ptr, "max")[molecules] - low) / self._cutoff
        wide = span.max(axis=1) > _WIDE
        alone += [(sample, np.eye(3)) for sample in molecules[wide].tolist()]
        molecules, span = molecules[~wide], span[~wide]
        if len(molecules) == 0:
            return
        across = np.ceil(span[:, 1:].max(axis=0) + 1.0).prod()
        ends = np.cumsum(span[:, 0] + 2.5)
        lot = (ends * across) // _MOST_CELLS
        yield from np.split(molecules, np.flatnonzero(np.diff(lot)) + 1)

    def _in_box(self, positions: NDArray, box: NDArray, pbc: BoolArray) -> tuple[NDArray, ...]:
        """One sample; axes that do not repeat are given room, so that no image is seen."""
        box = box.copy()
        for axis in np.flatnonzero(~pbc):
            unit = box[axis] / np.linalg.norm(box[axis])
            along = positions @ unit
            closer = _without_gaps(along, 2.0 * self._cutoff)
            positions = positions + (closer - along + self._cutoff)[:, None] * unit
            box[axis] = (closer.max() + 3.0 * self._cutoff) * unit
        heights = abs(np.linalg.det(box)) / np.linalg.norm(
            np.cross(box[[1, 2, 0]], box[[2, 0, 1]]), axis=1
        )
        radius = self._cutoff
        while np.maximum(np.floor(heights / radius), 1.0).prod() > _MOST_CELLS:
            radius *= 1.25
        search = self._vesin if radius == self._cutoff else self._made(radius)
        found: tuple[NDArray, ...] = search.compute(
            np.ascontiguousarray(positions), np.ascontiguousarray(box), True, self._quantities
        )
        if radius > self._cutoff and "d" in self._quantities:
            near = found[self._quantities.index("d")] <= self._cutoff
            found = tuple(values[near] for values in found)
        return found


def _without_gaps(along: NDArray, most: float) -> NDArray:
    """Places on an axis, from 0 on, with the gaps between neighbours at most so wide."""
    order = np.argsort(along, kind="stable")
    steps = np.diff(along[order], prepend=along[order[:1]])
    out = np.empty_like(along)
    out[order] = np.cumsum(np.minimum(steps, most))
    return out


def _side_by_side(
    ptr: Ptr, positions: NDArray, molecules: IntArray, gap: float
) -> tuple[IntArray, NDArray]:
    """Each molecule in its own stretch of the x axis: rows, and where they go."""
    counts = np.diff(ptr)[molecules]
    own = counts_to_ptr(counts)
    which = ptr_to_index(own)
    rows = np.arange(own[-1]) + (ptr[molecules] - own[:-1])[which]
    moved = positions[rows]
    low = segment_reduce(moved, own, "min")
    width = (segment_reduce(moved, own, "max") - low)[:, 0] + gap
    shift = -low
    shift[1:, 0] += np.cumsum(width)[:-1]
    return rows, moved + shift[which]


def unsearchable(block: Block) -> Iterator[tuple[int, str]]:
    """Samples, and why, with positions that are not finite or too far apart."""
    positions = block["positions"].astype(np.float64, copy=False)
    finite: NDArray = np.asarray(np.isfinite(positions).all(axis=1))
    with np.errstate(over="ignore"):
        some = np.where(finite[:, None], positions, 0.0)
        low = segment_reduce(some, block.atoms_ptr, "min")
        high = segment_reduce(some, block.atoms_ptr, "max")
        wide: NDArray = np.asarray(((high - low) > FARTHEST).any(axis=1))
    broken = np.flatnonzero(~finite)
    owner: IntArray = np.searchsorted(block.atoms_ptr, broken, side="right") - 1
    at = dict(zip(owner[::-1].tolist(), broken[::-1].tolist(), strict=True))
    for sample in np.union1d(owner, np.flatnonzero(wide)).tolist():
        if sample in at:
            atom = at[sample] - int(block.atoms_ptr[sample])
            yield sample, f"positions of atom {atom} are not finite"
        else:
            yield sample, f"its atoms are more than {FARTHEST:g} Å apart: it has exploded"


def _need_near(block: Block, first: int) -> None:
    for sample, reason in unsearchable(block):
        raise FieldError(
            f"sample {first + sample}",
            reason,
            mend="leave such samples out: finite = np.isfinite(ds.positions).all('xyz'); "
            "ds.ragged.where(ds.ragged.reduce(finite, 'all'))",
        )

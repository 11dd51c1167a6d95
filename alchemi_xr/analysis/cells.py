"""Cells, fractional coordinates and pairs of atoms, for any mix of periodic axes.

Pairs come from vesin. Molecules of a block are searched together, set apart
from each other by more than the cutoff; periodic samples one after the other.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import BoolArray, IntArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.errors import ConfigError, FieldError

__all__ = [
    "Pairs",
    "check_length",
    "complete_cells",
    "iter_pairs",
    "masses_of",
    "periodicity",
    "symbols",
    "volumes",
]


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


def check_length(value: float, where: str, what: str) -> float:
    """A length > 0, or an error that names it."""
    if not (isinstance(value, numbers.Real) and math.isfinite(value) and value > 0):
        raise ConfigError(where, f"{what} is no length", found=value, expected="a number > 0, in Å")
    return float(value)


def symbols() -> list[str]:
    """Element symbols by atomic number; 0 is ``X``."""
    from ase.data import chemical_symbols

    return list(chemical_symbols)


def masses_of(block: Block) -> NDArray:
    """Mass of each atom, amu: the field, or the standard ones."""
    if "atomic_masses" in block and "atomic_masses" not in block.present:
        return block["atomic_masses"].astype(np.float64)
    from ase.data import atomic_masses

    return np.asarray(atomic_masses)[block["atomic_numbers"]]


def periodicity(block: Block) -> tuple[NDArray, BoolArray]:
    """Cells [N, 3, 3] (zero where there is none) and periodic axes [N, 3]."""
    count = block.num_samples
    cell = np.zeros((count, 3, 3))
    if "cell" in block:
        cell = np.where(block.has("cell")[:, None, None], block["cell"], 0.0).astype(np.float64)
    pbc = np.zeros((count, 3), dtype=bool)
    if "pbc" in block:
        pbc = block["pbc"].astype(bool) & block.has("pbc")[:, None]
    return cell, pbc


def complete_cells(cell: NDArray, pbc: BoolArray, first: int = 0) -> NDArray:
    """Cells whose periodic vectors are the given ones, the others at right angles to them.

    A vector along an axis that is not periodic may be anything (zero, NaN, a
    dummy of 1 Å); it is replaced, by one of 1 Å.

    Raises
    ------
    FieldError
        The periodic vectors of a sample span no length, area or volume.
    """
    out = np.array(cell, dtype=np.float64)
    full = pbc.all(axis=1)
    for i in np.flatnonzero(~full).tolist():
        out[i] = _completed(out[i], pbc[i])
    size = np.linalg.norm(out, axis=2).prod(axis=1)
    volume = np.abs(np.linalg.det(np.nan_to_num(out, nan=0.0, posinf=0.0, neginf=0.0)))
    bad = ~(volume > 1e-9 * np.maximum(size, 1e-30))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise FieldError(
            f"sample {first + i}",
            "is periodic but its cell spans no volume along its periodic axes",
            found=cell[i].tolist(),
            expected=f"independent lattice vectors for pbc={pbc[i].tolist()}",
            mend="correct cell, or set pbc to False along axes that do not repeat",
        )
    return out


def _completed(cell: NDArray, pbc: BoolArray) -> NDArray:
    out = np.where(pbc[:, None], cell, 0.0)
    open_axes = np.flatnonzero(~pbc)
    if len(open_axes) == 3:
        return np.eye(3)
    if len(open_axes) == 1:
        a, b = (out[k] for k in range(3) if pbc[k])
        normal = np.cross(a, b)
        out[open_axes[0]] = normal / max(np.linalg.norm(normal), 1e-300)
        return out
    only = out[int(np.flatnonzero(pbc)[0])]
    axis = np.eye(3)[np.abs(only).argmin()]
    one = np.cross(only, axis)
    one /= max(np.linalg.norm(one), 1e-300)
    two = np.cross(only, one)
    out[open_axes[0]], out[open_axes[1]] = one, two / max(np.linalg.norm(two), 1e-300)
    return out


def volumes(block: Block) -> NDArray:
    """Volume of each sample, Å³; NaN unless it is periodic along all three axes."""
    cell, pbc = periodicity(block)
    usable: Any = pbc.all(axis=1) & np.isfinite(cell).all(axis=(1, 2))
    volume = np.abs(np.linalg.det(np.where(usable[:, None, None], cell, 0.0)))
    return np.where(volume > 0, volume, np.nan)


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
        Positions that are not finite, or a cell without volume.
    """
    positions = np.ascontiguousarray(block["positions"], dtype=np.float64)
    _need_finite(positions, block, first)
    cell, pbc = periodicity(block)
    is_open = ~pbc.any(axis=1)
    vesin: Any = import_optional("vesin", extra="analysis", why="the neighbour search")
    search = vesin.NeighborList(cutoff=cutoff, full_list=False, n_threads=1)
    quantities = "ijdD" if vectors else "ijd"
    molecules = np.flatnonzero(is_open & (np.diff(block.atoms_ptr) > 1))
    if len(molecules):
        yield _search_molecules(block, positions, molecules, cutoff, search, quantities)
    boxes = complete_cells(cell[~is_open], pbc[~is_open], first)
    for box, sample in zip(boxes, np.flatnonzero(~is_open), strict=True):
        start, stop = block.atoms_ptr[sample], block.atoms_ptr[sample + 1]
        if stop == start:
            continue
        found = search.compute(positions[start:stop], box, pbc[sample], quantities)
        i, j = (x.astype(np.int64) + start for x in found[:2])
        yield Pairs(i, j, found[2], found[3] if vectors else None)


def _search_molecules(
    block: Block,
    positions: NDArray,
    molecules: IntArray,
    cutoff: float,
    search: Any,
    quantities: str,
) -> Pairs:
    """One search over all, each molecule in its own stretch of the x axis."""
    low = segment_reduce(positions, block.atoms_ptr, "min")[molecules]
    high = segment_reduce(positions, block.atoms_ptr, "max")[molecules]
    keep = np.zeros(block.num_samples, dtype=bool)
    keep[molecules] = True
    owner = ptr_to_index(block.atoms_ptr)
    rows = np.flatnonzero(keep[owner])
    shift = -low
    ends = np.cumsum((high - low)[:, 0] + 1.5 * cutoff)
    shift[1:, 0] += ends[:-1]
    place = np.zeros(block.num_samples, dtype=np.int64)
    place[molecules] = np.arange(len(molecules))
    moved = positions[rows] + shift[place[owner[rows]]]
    found = search.compute(moved, np.eye(3), False, quantities)
    i, j = (rows[x.astype(np.int64)] for x in found[:2])
    return Pairs(i, j, found[2], found[3] if "D" in quantities else None)


def _need_finite(positions: NDArray, block: Block, first: int) -> None:
    bad = ~np.isfinite(positions).all(axis=1)
    if bad.any():
        atom = int(np.flatnonzero(bad)[0])
        sample = int(np.searchsorted(block.atoms_ptr, atom, side="right")) - 1
        raise FieldError(
            f"sample {first + sample}",
            f"positions of atom {atom - int(block.atoms_ptr[sample])} are not finite",
            found=positions[atom].tolist(),
            mend="leave such samples out: finite = np.isfinite(ds.positions).all('xyz'); "
            "ds.ragged.where(ds.ragged.reduce(finite, 'all'))",
        )

"""Cells and periodic axes of a block, for any mix of molecules, slabs and crystals."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.errors import FieldError

__all__ = ["complete_cells", "periodicity", "volumes"]


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

"""Turns periodic systems so that their cells stand in one standard way."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from alchemi_xr.data.neighbors import complete_cells
from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import ArgumentTypeError

if TYPE_CHECKING:
    from torch import Tensor

    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["AlignCellHook"]

# What turns with a system, beside positions and cell.
_VECTORS = ("velocities", "momenta", "forces", "fire_positions_last", "dipole", "shifts")
_TENSORS = ("stress", "virial")

_ROUNDING = 1e-12


class AlignCellHook:
    r"""Turns each periodic system until its cell is triangular.

    The first lattice vector then lies along x, the second in the xy plane with
    a positive y,

    .. math:: \begin{pmatrix} a_x & 0 & 0 \\ b_x & b_y & 0 \\ c_x & c_y & c_z \end{pmatrix}

    with lattice vectors as rows (upper-triangular where they are columns).
    Positions, velocities, forces and every other vector or tensor of the field
    table turn along, so energies, fractional coordinates and lattice images are
    what they were. It is a rotation, never a mirror: a left-handed cell keeps a
    negative :math:`c_z`. Cells that already stand so keep their bits; open
    systems and those without a cell are left alone.

    Parameters
    ----------
    frequency : int

    Raises
    ------
    ArgumentTypeError
        From the call: positions or cell are neither float32 nor float64 (a
        ``TypeError``).
    FieldError
        From the call: a periodic system's cell spans no volume.
    """

    def __init__(self, frequency: int = 1) -> None:
        self.frequency = frequency
        self.stage: Enum = DynamicsStage.BEFORE_STEP

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        batch = ctx.batch
        if "cell" not in batch or "pbc" not in batch:
            return
        for name in ("positions", "cell"):
            if batch[name].dtype not in (torch.float32, torch.float64):
                raise ArgumentTypeError(
                    "AlignCellHook",
                    f"{name!r} cannot be turned exactly enough",
                    found=batch[name].dtype,
                    expected="torch.float32 or torch.float64",
                )
        pbc = batch["pbc"].bool() & (batch.has("cell") & batch.has("pbc"))[:, None]
        full = _full_cells(batch["cell"].double(), pbc)
        rotation = _rotation(full)
        turns = pbc.any(dim=1) & ~_stands(full)
        if ctx.status_mask is not None:
            turns = turns & ctx.status_mask
        with torch.no_grad():
            _turn(batch, rotation, turns)


def _full_cells(cell: Tensor, pbc: Tensor) -> Tensor:
    """Cells with a volume: a slab's third vector may be zero, and any across will do."""
    solid = torch.linalg.det(torch.nan_to_num(cell)).abs() > 0.0
    return torch.where(solid[:, None, None], cell, complete_cells(cell, pbc))


def _rotation(cell: Tensor) -> Tensor:
    """Per system the matrix R of ``x @ R``, [B, 3, 3] float64."""
    x = torch.nn.functional.normalize(cell[:, 0], dim=-1)
    across = cell[:, 1] - (cell[:, 1] * x).sum(dim=-1, keepdim=True) * x
    y = torch.nn.functional.normalize(across, dim=-1)
    return torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


def _stands(cell: Tensor) -> Tensor:
    """Cells that are triangular already, bool [B]."""
    above = _is_rounding(cell)[:, (0, 0, 1), (1, 2, 2)]
    return above.all(dim=1) & (cell[:, 0, 0] > 0.0) & (cell[:, 1, 1] > 0.0)


def _is_rounding(cell: Tensor) -> Tensor:
    """Entries that are nothing beside the largest of their cell."""
    return cell.abs() <= _ROUNDING * cell.nan_to_num().abs().amax(dim=(1, 2), keepdim=True)


def _turn(batch: Batch, rotation: Tensor, turns: Tensor) -> None:
    """Turn the chosen systems, in place."""
    for name in ("positions", "cell", *_VECTORS, *_TENSORS):
        if name not in batch:
            continue
        values = batch[name]
        level = batch.level_of(name)
        matrix, chosen = rotation, turns
        if level != "system":
            index = (batch.batch_idx if level == "atom" else batch.edge_system).long()
            matrix, chosen = rotation[index], turns[index]
        turned = values.double()
        if name == "cell":
            turned = turned @ matrix
            # Zeros, not rounding: the next step is to find that the cell stands.
            above = torch.ones_like(turned, dtype=torch.bool).triu(1)
            turned = torch.where(above & _is_rounding(turned), 0.0, turned)
        elif name in _TENSORS:
            turned = matrix.mT @ turned @ matrix
        else:
            turned = (turned[:, None] @ matrix)[:, 0]
        chosen = chosen.reshape(-1, *(1,) * (values.ndim - 1))
        values.copy_(torch.where(chosen, turned.to(values.dtype), values))

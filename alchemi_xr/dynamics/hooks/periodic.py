"""Brings atoms back into their cell."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from alchemi_xr.data.neighbors import complete_cells
from alchemi_xr.dynamics.hook import DynamicsStage

if TYPE_CHECKING:
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["WrapPeriodicHook"]


class WrapPeriodicHook:
    """Moves every atom by whole lattice vectors into its cell.

    Only along the axes that are periodic in its system; systems without any are
    left alone. The physics does not change, but unwrapped paths are lost: a
    mean square displacement needs them.

    Parameters
    ----------
    frequency : int
    stage : DynamicsStage, optional
        By default AFTER_STEP.
    """

    def __init__(self, frequency: int = 1, stage: Enum | None = None) -> None:
        self.frequency = frequency
        self.stage = DynamicsStage.AFTER_STEP if stage is None else stage

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        batch = ctx.batch
        if "cell" not in batch or "pbc" not in batch:
            return
        positions = batch["positions"]
        pbc = batch["pbc"].bool()
        for name in ("cell", "pbc"):
            present = batch.present.get(name)
            if present is not None:
                pbc = pbc & present[:, None]
        # In double precision: a float32 quotient next to 1 would flip back and forth.
        cell = complete_cells(batch["cell"].double(), pbc)
        atoms = batch.batch_idx.long()
        fractional = torch.einsum("vi,vij->vj", positions.double(), torch.linalg.inv(cell)[atoms])
        images = torch.where(pbc[atoms], torch.floor(fractional), 0.0)
        moved = torch.einsum("vi,vij->vj", images, cell[atoms])
        # An atom that is nowhere stays there; one that is inside keeps its bits.
        moves = (images != 0.0).any(dim=1, keepdim=True)
        positions.copy_(
            torch.where(moves, (positions.double() - moved).to(positions.dtype), positions)
        )

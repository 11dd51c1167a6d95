"""Keeps the neighbours of the atoms in the batch."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from alchemi_xr.data.neighbors import VerletList
from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.models.base import NeighborListFormat

if TYPE_CHECKING:
    from torch import Tensor

    from alchemi_xr.data.neighbors import NeighborMatrix
    from alchemi_xr.dynamics.hook import DynamicsContext
    from alchemi_xr.models.base import NeighborConfig

__all__ = ["NeighborListHook"]


class NeighborListHook:
    """Writes neighbours into the batch before each model call.

    In COO form ``neighbor_list``, ``neighbor_list_shifts`` and ``shifts``, in
    matrix form ``neighbor_matrix``, ``num_neighbors`` and
    ``neighbor_matrix_shifts``. They reach out to cutoff + skin and are searched
    anew when an atom has moved more than half the skin, or when cells, atoms or
    systems have changed.

    Parameters
    ----------
    config : NeighborConfig
    skin : float
        Å; the larger of it and the config's counts.
    max_neighbors : int, optional
        First guess of the width of the matrix; never a limit.
    stage : DynamicsStage, optional
        By default BEFORE_COMPUTE.
    method : {"naive", "cell_list"}, optional

    Notes
    -----
    The batch also gets the plain attribute ``neighbor_table``, through which the
    models of this project see whether the list still fits before they use it.
    """

    def __init__(
        self,
        config: NeighborConfig,
        skin: float = 0.0,
        max_neighbors: int | None = None,
        stage: Enum | None = None,
        method: str | None = None,
    ) -> None:
        self.config = config
        self.frequency = 1
        self.stage = DynamicsStage.BEFORE_COMPUTE if stage is None else stage
        self.table = VerletList(
            config.cutoff,
            skin=max(skin, config.skin),
            half=config.half_list,
            method=method,
            max_neighbors=max_neighbors,
        )
        self._shown: NeighborMatrix | None = None
        self._written: Tensor | None = None

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        batch = ctx.batch
        coo = self.config.format is NeighborListFormat.COO
        name = "neighbor_list" if coo else "neighbor_matrix"
        matrix = self.table.matrix(batch)
        # What stands in the batch is this list, and not an earlier search or another batch's.
        fresh = matrix is self._shown and name in batch and batch[name] is self._written
        if not fresh and coo:
            edges = self.table.edges(batch)
            batch.set_edges(
                edges.neighbor_list,
                edges_ptr=edges.edges_ptr,
                neighbor_list_shifts=edges.neighbor_list_shifts,
            )
        elif not fresh:
            batch.set("neighbor_matrix", matrix.neighbors, level="atom")
            batch.set("neighbor_matrix_shifts", matrix.shifts, level="atom")
            batch.set("num_neighbors", matrix.counts, level="atom")
        if coo and "cell" in batch:
            # Cartesian, so they follow a cell that changes between two searches.
            images = batch["neighbor_list_shifts"].to(batch["cell"].dtype)
            cell = batch["cell"].detach()[batch.edge_system.long()]
            product = torch.einsum("ei,eij->ej", images, cell)
            # A system without periodic axes has no images, and maybe no cell (NaN).
            shifts = torch.where((images != 0).any(dim=1, keepdim=True), product, 0.0)
            batch.set("shifts", shifts, level="edge")
        self._shown, self._written = matrix, batch[name]
        batch.neighbor_table = self.table

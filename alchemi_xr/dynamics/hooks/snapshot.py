"""Hooks that hand systems to a sink while the simulation goes on."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import DynamicsError

if TYPE_CHECKING:
    from alchemi_xr.dynamics.hook import DynamicsContext
    from alchemi_xr.dynamics.sinks import DataSink

__all__ = ["ConvergedSnapshotHook", "SnapshotHook"]

# Neighbours are cheap to find again and dear to keep.
_NEIGHBOR_FIELDS = (
    "neighbor_matrix",
    "neighbor_matrix_shifts",
    "num_neighbors",
    "neighbor_list",
    "neighbor_list_shifts",
    "shifts",
    "edge_embeddings",
)


class SnapshotHook:
    """The whole batch to a sink.

    Parameters
    ----------
    sink : DataSink
    frequency : int
    stage : DynamicsStage
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self, sink: DataSink, frequency: int = 1, stage: Enum = DynamicsStage.AFTER_STEP
    ) -> None:
        self.sink = sink
        self.frequency = frequency
        self.stage = stage

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        self.sink.write(ctx.batch)


class ConvergedSnapshotHook:
    """Systems that have just converged to a sink, without their neighbour fields.

    Parameters
    ----------
    sink : DataSink
    frequency : int
    stage : DynamicsStage
        Only ON_CONVERGE knows which systems have converged.
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self, sink: DataSink, frequency: int = 1, stage: Enum = DynamicsStage.ON_CONVERGE
    ) -> None:
        self.sink = sink
        self.frequency = frequency
        self.stage = stage

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        if ctx.converged_mask is None:
            raise DynamicsError(
                type(self).__name__,
                f"nothing is known about convergence at {stage.name}",
                mend="register it at ON_CONVERGE",
            )
        if not bool(ctx.converged_mask.any()):
            return
        chosen = ctx.batch.index_select(ctx.converged_mask)
        for name in _NEIGHBOR_FIELDS:
            if name in chosen:
                del chosen[name]
        self.sink.write(chosen)

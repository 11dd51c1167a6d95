"""Adds a potential of the user's own to the model's."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import DynamicsError

if TYPE_CHECKING:
    from torch import Tensor

    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["BiasedPotentialHook"]


class BiasedPotentialHook:
    """Adds ``bias_fn(batch) -> (energy, forces)`` to energies and forces.

    Parameters
    ----------
    bias_fn : callable
        Energy [B, 1] or [B], eV, and forces [V, 3], eV/Å; they should belong
        together, or nothing is conserved.
    stage : DynamicsStage, optional
        By default AFTER_COMPUTE.
    frequency : int
        Leave it at 1: in the steps between there is no bias.
    inplace : bool
        Change the batch's tensors; else it gets new ones.

    Raises
    ------
    DynamicsError
        From the call: the bias has the wrong shapes.
    """

    def __init__(
        self,
        bias_fn: Callable[[Batch], tuple[Tensor, Tensor]],
        stage: Enum | None = None,
        frequency: int = 1,
        inplace: bool = True,
    ) -> None:
        self.bias_fn = bias_fn
        self.stage = DynamicsStage.AFTER_COMPUTE if stage is None else stage
        self.frequency = frequency
        self.inplace = inplace

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        batch = ctx.batch
        energy, forces = self.bias_fn(batch)
        for name, value in (("energy", energy), ("forces", forces)):
            target = batch[name]
            if value.numel() != target.numel():
                raise DynamicsError(
                    "BiasedPotentialHook",
                    f"the bias of {name!r} has the wrong shape",
                    found=list(value.shape),
                    expected=list(target.shape),
                )
            value = value.detach().reshape(target.shape).to(target)
            if self.inplace:
                target.add_(value)
            else:
                batch[name] = target + value

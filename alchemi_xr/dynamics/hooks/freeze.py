"""Holds chosen atoms in place."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import ConfigError, DynamicsError

if TYPE_CHECKING:
    from torch import Tensor

    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["FreezeAtomsHook"]

_STAGES = (
    DynamicsStage.BEFORE_PRE_UPDATE,
    DynamicsStage.AFTER_PRE_UPDATE,
    DynamicsStage.AFTER_COMPUTE,
    DynamicsStage.AFTER_POST_UPDATE,
)


class FreezeAtomsHook:
    """Atoms of one category, or of a mask, do not move.

    Their positions are put back before the model sees them and at the end of
    the step, whatever the integrator did.

    Parameters
    ----------
    frequency : int
        Leave it at 1: in the steps between, the atoms are free.
    freeze_category : int
        Value of ``atom_categories`` (-1 is ``AtomCategory.SPECIAL``).
    zero_forces : bool
        Their forces count as zero, so that they neither push an optimizer nor
        keep it from converging.
    stage : DynamicsStage
        Where positions are saved; must be BEFORE_PRE_UPDATE.
    mask_key : str, optional
        A bool field [V] of the batch to use instead of the category.
    zero_velocities : bool

    Raises
    ------
    ConfigError
        The stage is another.
    """

    def __init__(
        self,
        frequency: int = 1,
        freeze_category: int = -1,
        zero_forces: bool = True,
        stage: Enum = DynamicsStage.BEFORE_PRE_UPDATE,
        mask_key: str | None = None,
        zero_velocities: bool = True,
    ) -> None:
        if stage is not DynamicsStage.BEFORE_PRE_UPDATE:
            raise ConfigError(
                "FreezeAtomsHook", "it saves positions at BEFORE_PRE_UPDATE", found=stage
            )
        self.frequency = frequency
        self.freeze_category = int(freeze_category)
        self.zero_forces = zero_forces
        self.zero_velocities = zero_velocities
        self.mask_key = mask_key
        self.stage = stage
        # Kept to the next step: stages may share the hook, and each puts its own atoms back.
        self._saved: Tensor | None = None

    def _runs_on_stage(self, stage: Enum) -> bool:
        return stage in _STAGES

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        batch = ctx.batch
        frozen = self.frozen(batch)[:, None]
        if stage is DynamicsStage.BEFORE_PRE_UPDATE:
            self._saved = batch["positions"].clone()
        elif stage is not DynamicsStage.AFTER_COMPUTE and self._saved is not None:
            positions = batch["positions"]
            positions.copy_(torch.where(frozen, self._saved, positions))
        if self.zero_velocities and stage is not DynamicsStage.AFTER_COMPUTE:
            batch["velocities"].masked_fill_(frozen, 0.0)
        if self.zero_forces and "forces" in batch:
            batch["forces"].masked_fill_(frozen, 0.0)

    def frozen(self, batch: Batch) -> Tensor:
        """The atoms it holds, bool [V].

        Raises
        ------
        DynamicsError
            ``mask_key`` is no bool field of atoms.
        """
        if self.mask_key is None:
            held: Tensor = batch["atom_categories"] == self.freeze_category
            return held
        mask: Tensor = batch[self.mask_key]
        if batch.level_of(self.mask_key) != "atom" or mask.dtype != torch.bool or mask.ndim != 1:
            raise DynamicsError(
                "FreezeAtomsHook",
                f"{self.mask_key!r} is no mask of atoms",
                found=f"{batch.level_of(self.mask_key)} field, {mask.dtype} {list(mask.shape)}",
                expected="bool [V] at level 'atom'",
            )
        return mask

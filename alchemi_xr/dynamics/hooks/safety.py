"""Hooks that keep a simulation from going on with nonsense."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from alchemi_xr.dynamics.convergence import system_max
from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import ConfigError, DynamicsError

if TYPE_CHECKING:
    from torch import Tensor

    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["MaxForceClampHook", "NaNDetectorHook", "NonFiniteError"]


class MaxForceClampHook:
    """Shortens every atomic force above a limit to it; directions stay.

    Parameters
    ----------
    max_force : float
        eV/Å.
    stage : DynamicsStage
    frequency : int

    Raises
    ------
    ConfigError
        The limit is not positive.
    """

    def __init__(
        self,
        max_force: float,
        stage: Enum = DynamicsStage.AFTER_COMPUTE,
        frequency: int = 1,
    ) -> None:
        if not (math.isfinite(max_force) and max_force > 0.0):
            raise ConfigError("MaxForceClampHook", "max_force must be positive", found=max_force)
        self.max_force = float(max_force)
        self.stage = stage
        self.frequency = frequency

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        forces = ctx.batch["forces"]
        norm = torch.linalg.vector_norm(forces, dim=-1, keepdim=True)
        # One factor an atom, 1 below the limit; NaN forces stay NaN, to be found.
        forces.mul_(torch.where(norm > self.max_force, self.max_force / norm, 1.0))


class NonFiniteError(DynamicsError):
    """A field holds NaN or infinity.

    Attributes
    ----------
    systems : list of int
        Their places in the batch.
    system_ids : list of int
        Their ``system_id``; empty when the batch has none.
    """

    systems: list[int]
    system_ids: list[int]

    def __init__(
        self,
        *args: Any,
        systems: Iterable[int] = (),
        system_ids: Iterable[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.systems = list(systems)
        self.system_ids = list(system_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        build, arguments = super().__reduce__()
        return build, arguments, {"systems": self.systems, "system_ids": self.system_ids}


class NaNDetectorHook:
    """Stops the run when energies, forces or other fields are not finite.

    Parameters
    ----------
    frequency : int
    extra_keys : list of str, optional
        Further fields to look at; absent ones are skipped.
    stage : DynamicsStage

    Raises
    ------
    NonFiniteError
        From the call: names the step, the fields and the systems.
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self,
        frequency: int = 1,
        extra_keys: Iterable[str] | None = None,
        stage: Enum = DynamicsStage.AFTER_COMPUTE,
    ) -> None:
        self.frequency = frequency
        self.keys = ["forces", "energy", *(extra_keys or ())]
        self.stage = stage

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        batch = ctx.batch
        names = [name for name in dict.fromkeys(self.keys) if name in batch]
        masks = [_non_finite(batch, name) for name in names]
        if not masks:
            return
        found = torch.stack(masks)
        if ctx.status_mask is not None:
            found = found & ctx.status_mask
        # One wait for the device, whatever the number of fields.
        table = found.cpu()
        if not bool(table.any()):
            return
        systems = table.any(dim=0).nonzero().reshape(-1).tolist()
        fields = {
            name: table[k].nonzero().reshape(-1).tolist()
            for k, name in enumerate(names)
            if bool(table[k].any())
        }
        ids: list[int] = []
        if "system_id" in batch:
            ids = batch["system_id"].reshape(-1)[torch.tensor(systems)].tolist()
        text = "; ".join(f"{name!r} in graphs {graphs}" for name, graphs in fields.items())
        raise NonFiniteError(
            f"step {ctx.step_count}",
            f"values are not finite (NaN or infinity): {text}"
            + (f" (system_id {ids})" if ids and min(ids) >= 0 else ""),
            mend="look at the structures of these systems; a smaller time step or a "
            "MaxForceClampHook helps where they only start badly",
            systems=systems,
            system_ids=ids,
        )


def _non_finite(batch: Batch, name: str) -> Tensor:
    """Systems with a value that is not finite in a field they have, bool [B]."""
    values = batch[name].detach()
    bad = ~torch.isfinite(values).reshape(len(values), -1).all(dim=1)
    per_system = system_max(bad.to(torch.int64), batch, batch.level_of(name)) > 0
    present = batch.present.get(name)
    return per_system if present is None else per_system & present

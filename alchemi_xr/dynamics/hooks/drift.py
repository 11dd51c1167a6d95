"""Watches whether a simulation at constant energy keeps it."""

from __future__ import annotations

import math
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from alchemi_xr.data.thermo import kinetic_energy
from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import ConfigError, DynamicsError

if TYPE_CHECKING:
    from torch import Tensor

    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["EnergyDriftMonitorHook"]


class EnergyDriftMonitorHook:
    """Compares each system's energy with what it was when first seen.

    Parameters
    ----------
    threshold : float
        eV, or eV per atom and step.
    metric : {"per_atom_per_step", "absolute"}
    action : {"warn", "raise"}
    frequency : int
    include_kinetic : bool
        Total instead of potential energy.
    stage : DynamicsStage

    Raises
    ------
    ConfigError
        An option is not known.
    DynamicsError
        From the call, with ``action="raise"``: a system drifted too far.

    Notes
    -----
    The reference is a field of the batch, so that it goes with its system
    through refills; a system that enters another stage gets a new one.
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self,
        threshold: float,
        metric: str = "per_atom_per_step",
        action: str = "warn",
        frequency: int = 1,
        include_kinetic: bool = True,
        stage: Enum = DynamicsStage.AFTER_STEP,
    ) -> None:
        where = type(self).__name__
        if not (math.isfinite(threshold) and threshold > 0.0):
            raise ConfigError(where, "threshold must be positive", found=threshold)
        if metric not in ("per_atom_per_step", "absolute"):
            raise ConfigError(
                where,
                f"metric {metric!r} is not known",
                expected="'per_atom_per_step' or 'absolute'",
            )
        if action not in ("warn", "raise"):
            raise ConfigError(
                where, f"action {action!r} is not known", expected="'warn' or 'raise'"
            )
        self.threshold = float(threshold)
        self.metric = metric
        self.action = action
        self.frequency = frequency
        self.include_kinetic = include_kinetic
        self.stage = stage
        # Hooks that take the same energy at the same point may share a reference, others not.
        kind = "total" if include_kinetic else "potential"
        self._field = f"energy_drift_{kind}_{stage.name.lower()}"

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        batch = ctx.batch
        energy = batch["energy"].detach().double().reshape(-1)
        if self.include_kinetic:
            energy = energy + kinetic_energy(
                batch["velocities"], batch["atomic_masses"], batch.atoms_ptr
            ).double().reshape(-1)
        status = (
            batch["status"].reshape(-1).double() if "status" in batch else torch.zeros_like(energy)
        )
        # Columns: energy, step and status when first seen; NaN for a new system.
        if self._field not in batch:
            batch.set(self._field, energy.new_full((len(energy), 3), torch.nan), level="system")
        reference = batch[self._field]
        watched = torch.ones_like(status, dtype=torch.bool)
        if ctx.status_mask is not None:
            watched = ctx.status_mask
        known = torch.isfinite(reference[:, 0]) & (reference[:, 2] == status)
        now = torch.stack([energy, torch.full_like(energy, ctx.step_count), status], dim=1)
        reference.copy_(torch.where((watched & ~known)[:, None], now, reference))
        drift = self._drift(energy, reference, batch, ctx.step_count)
        # NaN drifts are the NaN detector's business.
        over = watched & known & (drift > self.threshold)
        if bool(over.any()):
            self._report(ctx, torch.where(over, drift, -torch.inf))

    def _drift(self, energy: Tensor, reference: Tensor, batch: Any, step: int) -> Tensor:
        change = (energy - reference[:, 0]).abs()
        if self.metric == "absolute":
            return change
        steps = (step - reference[:, 1]).clamp(min=1.0)
        per_step: Tensor = change / (steps * batch.atoms_ptr.diff().clamp(min=1))
        return per_step

    def _report(self, ctx: DynamicsContext, drift: Tensor) -> None:
        worst = int(drift.argmax())
        unit = "eV" if self.metric == "absolute" else "eV per atom and step"
        name = f"graph {worst}"
        if "system_id" in ctx.batch and int(ctx.batch["system_id"][worst]) >= 0:
            name += f" (system_id {int(ctx.batch['system_id'][worst])})"
        error = DynamicsError(
            f"step {ctx.step_count}",
            f"the energy of {name} drifts",
            found=f"{float(drift[worst]):.3g} {unit}",
            expected=f"at most {self.threshold:.3g}",
            mend="a smaller time step; see also whether forces are the energy's gradient",
        )
        if self.action == "raise":
            raise error
        warnings.warn(str(error), UserWarning, stacklevel=2)

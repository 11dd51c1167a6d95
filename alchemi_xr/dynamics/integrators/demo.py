r"""Velocity Verlet, the plainest integrator: for tests and examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from alchemi_xr.dynamics.base import BaseDynamics
from alchemi_xr.errors import ConfigError
from alchemi_xr.units import to_internal_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.hook import Hook
    from alchemi_xr.models.base import BaseModelMixin

__all__ = ["DemoDynamics"]


class DemoDynamics(BaseDynamics):
    r"""Newton's equations at constant energy, by velocity Verlet.

    .. math::

        v(t + \tfrac{\Delta t}{2}) &= v(t) + \tfrac{\Delta t}{2}\, F(t) / m \\
        x(t + \Delta t) &= x(t) + \Delta t\, v(t + \tfrac{\Delta t}{2}) \\
        v(t + \Delta t) &= v(t + \tfrac{\Delta t}{2}) + \tfrac{\Delta t}{2}\, F(t + \Delta t) / m

    A run knows :math:`F(t)` from the start. In a bare `step` a system whose
    forces are all zero starts with an Euler step (a whole kick at the end);
    that is decided for each system, on the device.

    Parameters
    ----------
    model : BaseModelMixin
    n_steps : int
    dt : float
        Time step, fs.
    hooks, convergence_hook, **kwargs
        See `BaseDynamics`.

    References
    ----------
    .. [1] W. C. Swope et al., J. Chem. Phys. 76, 637 (1982).
    """

    __needs_keys__: ClassVar[set[str]] = {"forces"}
    __provides_keys__: ClassVar[set[str]] = {"velocities", "positions"}
    _masks_itself: ClassVar[bool] = True

    def __init__(
        self,
        model: BaseModelMixin,
        n_steps: int,
        dt: float = 1.0,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: Any = None,
        **kwargs: Any,
    ) -> None:
        if not float(dt) > 0:
            raise ConfigError(type(self).__name__, "dt must be above 0 fs", found=dt)
        super().__init__(
            model, hooks=hooks, convergence_hook=convergence_hook, n_steps=n_steps, **kwargs
        )
        self.dt = float(dt)
        self._euler: torch.Tensor | None = None

    def _kick(self, batch: Batch, factor: torch.Tensor | float) -> torch.Tensor:
        """Change of the velocities by the forces at hand, over ``factor`` · dt."""
        masses = batch["atomic_masses"].reshape(-1, 1)
        return self._moving(batch, batch["forces"] * (factor * to_internal_time(self.dt)) / masses)

    def _moving(self, batch: Batch, change: torch.Tensor) -> torch.Tensor:
        """The change, for atoms that may move."""
        atoms = self.active_atoms(batch)
        # where, not a product: an idle system may hold NaN forces.
        return change if atoms is None else torch.where(atoms.unsqueeze(-1), change, 0.0)

    def pre_update(self, batch: Batch) -> None:
        """Half a kick, then the drift."""
        velocities = batch["velocities"]
        if self._primed:
            self._euler = None
        else:
            pulled = (batch["forces"] != 0).any(dim=-1)
            count = torch.zeros(batch.num_graphs, dtype=torch.int64, device=pulled.device)
            count.index_add_(0, batch.batch_idx.long(), pulled.long())
            self._euler = count == 0
        velocities.add_(self._kick(batch, 0.5))
        batch["positions"].add_(self._moving(batch, velocities * to_internal_time(self.dt)))

    def post_update(self, batch: Batch) -> None:
        """Half a kick by the new forces; a whole one after an Euler start."""
        factor: torch.Tensor | float = 0.5
        if self._euler is not None:
            euler = self._euler[batch.batch_idx.long()].unsqueeze(-1)
            factor = 0.5 * (1 + euler.long())
        batch["velocities"].add_(self._kick(batch, factor))

r"""FIRE, the fast inertial relaxation engine, for every system on its own.

Step for step the FIRE of ASE: same rules, unit masses, one step-length limit
per system. Each system's time step, mixing and counters are fields of the
batch, so that they follow it through refills, and a system's path does not
depend on what else is in its batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from alchemi_xr.data.kernels.segment import segment_reduce
from alchemi_xr.dynamics.base import BaseDynamics
from alchemi_xr.errors import ConfigError
from alchemi_xr.units import FS_PER_INTERNAL_TIME

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.convergence import ConvergenceHook
    from alchemi_xr.dynamics.hook import Hook
    from alchemi_xr.models.base import BaseModelMixin

__all__ = ["FIRE"]

Number = float | Tensor


class FIRE(BaseDynamics):
    r"""Fast inertial relaxation engine.

    For each system, with all atoms' forces :math:`F` and velocities :math:`v`
    as one vector each and unit masses:

    .. math::

        P = F \cdot v, \qquad
        v \leftarrow \begin{cases}
            (1 - \alpha)\, v + \alpha\, |v|\, F / |F| & P > 0 \\
            0 & P \le 0
        \end{cases}

    For :math:`P > 0` and once :math:`n > n_\mathrm{min}` such steps have
    followed one another, :math:`\Delta t \leftarrow \min(f_\mathrm{inc} \Delta t,
    \Delta t_\mathrm{max})` and :math:`\alpha \leftarrow f_\alpha \alpha`. For
    :math:`P \le 0`, :math:`\Delta t \leftarrow \max(f_\mathrm{dec} \Delta t,
    \Delta t_\mathrm{min})`, :math:`\alpha \leftarrow \alpha_\mathrm{start}`,
    :math:`n \leftarrow 0`. Then

    .. math::

        v \leftarrow v + \Delta t\, F, \qquad
        d = \Delta t\, v, \qquad
        x \leftarrow x + d \, \min(1, d_\mathrm{max} / |d|)

    A system starts at rest: velocities that it brings are not used. One whose
    fields say that it was on its way with these very numbers, in a batch that is
    run again, goes on from there.

    ====================== =============== ========================
    symbol                 parameter       field of the batch
    ====================== =============== ========================
    :math:`\Delta t`       ``dt``          ``fire_dt`` [B, 1], fs
    :math:`\alpha`         ``alpha_start`` ``fire_alpha`` [B, 1]
    :math:`n`              ``n_min``       ``fire_n_pos`` [B, 1]
    :math:`d_\mathrm{max}` ``maxstep``     (one for all)
    ====================== =============== ========================

    Parameters
    ----------
    model : BaseModelMixin
    dt : float
        First time step, fs.
    dt_max, dt_min : float, optional
        Its limits, fs; by default ten times ``dt``, and none below.
    maxstep : float
        Longest step of a system, Å: the norm over all its atoms, as in ASE.
    n_min : int
    f_dec, f_inc, alpha_start, f_alpha : float
    uphill : bool
        Take back a step that raised the energy, and start again from rest
        (``downhill_check`` of ASE).
    n_steps, hooks, convergence_hook, **kwargs
        See `BaseDynamics`.

    Raises
    ------
    ConfigError
        A number is outside its range.

    Notes
    -----
    Numbers may be tensors with one value per system: of the batch that is run,
    or, where systems come from a sampler (``dataset_index``), per sample of its
    data set.

    ``dt=1.018`` is ASE's default of 0.1 Å·√(amu/eV).

    References
    ----------
    .. [1] E. Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006).
    """

    __needs_keys__: ClassVar[set[str]] = {"forces"}
    __provides_keys__: ClassVar[set[str]] = {"positions", "velocities"}
    _masks_itself: ClassVar[bool] = True

    def __init__(
        self,
        model: BaseModelMixin,
        dt: Number = 1.0,
        dt_max: Number | None = None,
        dt_min: Number | None = None,
        maxstep: Number = 0.2,
        n_min: int | Tensor = 5,
        f_dec: Number = 0.5,
        f_inc: Number = 1.1,
        alpha_start: Number = 0.1,
        f_alpha: Number = 0.99,
        uphill: bool = False,
        *,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model, hooks=hooks, convergence_hook=convergence_hook, n_steps=n_steps, **kwargs
        )
        if dt_max is None:
            dt_max = 10.0 * dt
        if dt_min is None:
            dt_min = 0.0
        self.uphill = bool(uphill)
        self._numbers: dict[str, Number] = {}
        for name, value, low, high in (
            ("dt", dt, 0.0, None),
            ("dt_max", dt_max, 0.0, None),
            ("dt_min", dt_min, None, None),
            ("maxstep", maxstep, 0.0, None),
            ("n_min", n_min, None, None),
            ("f_dec", f_dec, 0.0, 1.0),
            ("f_inc", f_inc, 0.0, None),
            ("alpha_start", alpha_start, None, 1.0),
            ("f_alpha", f_alpha, 0.0, 1.0),
        ):
            self._numbers[name] = _checked(name, value, low, high)
        # Marks whose state a system carries: of this optimizer, with these numbers.
        self._tag = self._make_tag()
        for name, kind in (("fire_dt", torch.float64), ("fire_alpha", torch.float64)):
            self.register_bookkeeping_key(name, _zeros(kind))
        for name in ("fire_n_pos", "fire_started"):
            self.register_bookkeeping_key(name, _zeros(torch.int64))
        for name, value in self._numbers.items():
            if isinstance(value, Tensor):
                self.register_bookkeeping_key(f"fire_{name}_given", self._dealer(name, value))
        if self.uphill:
            self.register_bookkeeping_key("fire_energy_last", _zeros(torch.float64))
            self.register_bookkeeping_key(
                "fire_positions_last", lambda batch: batch["positions"].clone(), level="atom"
            )

    def __getattr__(self, name: str) -> Any:
        numbers = self.__dict__.get("_numbers", {})
        if name in numbers:
            return numbers[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _needed_outputs(self) -> set[str]:
        return super()._needed_outputs() | ({"energy"} if self.uphill else set())

    def pre_update(self, batch: Batch) -> None:
        """One FIRE step by the forces at hand; the model call then brings the next."""
        positions, forces = batch["positions"], batch["forces"].to(batch["positions"].dtype)
        atoms = batch.batch_idx.long()
        state, tag = self._state(batch)
        dt, alpha, steps, started = state
        velocities = torch.where(started[atoms], batch["velocities"], 0.0)
        if self.uphill:
            positions, climbed = self._downhill(batch, positions, started, atoms)
        else:
            climbed = torch.zeros_like(started)

        # One reduction for the three products that the rules look at.
        pairs = ((forces, velocities), (velocities, velocities), (forces, forces))
        power, speed2, force2 = _dots(pairs, batch)
        goes = started & (power > 0.0) & ~climbed
        stops = started & ~goes
        mixing = alpha * (speed2 / force2).sqrt()
        mixed = (1.0 - alpha[atoms]).to(forces) * velocities + mixing[atoms].to(forces) * forces
        # where, not a product: |F| may be zero, and then the mixture is NaN.
        velocities = torch.where(goes[atoms], mixed, 0.0)

        grows = goes & (steps > self._number("n_min", batch))
        dt = torch.where(
            grows,
            torch.minimum(dt * self._number("f_inc", batch), self._number("dt_max", batch)),
            torch.where(
                stops,
                torch.maximum(dt * self._number("f_dec", batch), self._number("dt_min", batch)),
                dt,
            ),
        )
        alpha = torch.where(
            grows,
            alpha * self._number("f_alpha", batch),
            torch.where(stops, self._number("alpha_start", batch), alpha),
        )
        steps = torch.where(goes, steps + 1, torch.where(stops, 0, steps))

        step = (dt / FS_PER_INTERNAL_TIME)[atoms].to(forces)
        velocities = velocities + step * forces
        move = step * velocities
        (length2,) = _dots([(move, move)], batch)
        length = length2.sqrt()
        maxstep = self._number("maxstep", batch)
        scale = torch.where(length > maxstep, maxstep / length, 1.0)
        positions = positions + move * scale[atoms].to(forces)
        self._write(batch, "positions", positions)
        self._write(batch, "velocities", velocities)
        for name, value in (
            ("fire_dt", dt),
            ("fire_alpha", alpha),
            ("fire_n_pos", steps),
            ("fire_started", tag),
        ):
            self._write(batch, name, value)

    def _state(self, batch: Batch) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """dt, alpha, n and whether a system has started, each [B, 1]; and the new mark."""
        # The stage of a system is part of the mark: in `opt_a + opt_b` it starts twice.
        tag = torch.full_like(batch["fire_started"], self._tag)
        if "status" in batch:
            tag = tag + batch["status"].reshape(-1, 1)
        started = batch["fire_started"] == tag
        first = self._number("dt", batch)
        dt = torch.where(started, batch["fire_dt"], first)
        alpha = torch.where(started, batch["fire_alpha"], self._number("alpha_start", batch))
        steps = torch.where(started, batch["fire_n_pos"], 0)
        return (dt, alpha, steps, started), tag

    def _downhill(
        self, batch: Batch, positions: Tensor, started: Tensor, atoms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Positions to step from, and the systems whose energy rose.

        Those step from where they stood before, by the forces of where they are,
        as ASE does.
        """
        energy = batch["energy"].to(torch.float64).reshape(-1, 1)
        climbed = started & (energy > batch["fire_energy_last"])
        positions = torch.where(climbed[atoms], batch["fire_positions_last"], positions)
        self._write(
            batch, "fire_energy_last", torch.where(climbed, batch["fire_energy_last"], energy)
        )
        self._write(batch, "fire_positions_last", positions)
        return positions, climbed

    def _write(self, batch: Batch, name: str, values: Tensor) -> None:
        """New values into a field, in the systems that move."""
        target = batch[name]
        active = self.active_mask
        if active is not None:
            if batch.level_of(name) == "atom":
                active = active[batch.batch_idx.long()]
            values = torch.where(active[:, None], values, target)
        target.copy_(values)

    def _number(self, name: str, batch: Batch) -> Tensor:
        """A parameter as [B, 1] or [1, 1], float64."""
        value = self._numbers[name]
        if isinstance(value, Tensor):
            given: Tensor = batch[f"fire_{name}_given"]
            return given
        return torch.full((1, 1), value, dtype=torch.float64, device=batch.device)

    def _dealer(self, name: str, values: Tensor) -> Any:
        """Deals a per-system parameter to new systems."""

        def deal(batch: Batch) -> Tensor:
            given = values.to(batch.device)
            if "dataset_index" in batch:
                index = batch["dataset_index"].reshape(-1)
                if len(index) and int(index.min()) >= 0 and int(index.max()) < len(given):
                    return given[index]
            if len(given) != batch.num_graphs:
                raise ConfigError(
                    type(self).__name__,
                    f"{name} does not fit the batch",
                    found=f"{len(given)} values",
                    expected=f"{batch.num_graphs} systems",
                    mend="give one value per system of the batch, or per sample of the data set",
                )
            return given

        return deal

    def _make_tag(self) -> int:
        digest = hashlib.blake2s(digest_size=6)
        for name in sorted(self._numbers):
            value = self._numbers[name]
            digest.update(repr(value.tolist() if isinstance(value, Tensor) else value).encode())
        digest.update(bytes([self.uphill]))
        # Room below for the status; never 0, which marks a system that has not started.
        return (int.from_bytes(digest.digest(), "big") + 1) << 8


def _dots(pairs: Iterable[tuple[Tensor, Tensor]], batch: Batch) -> tuple[Tensor, ...]:
    """Scalar products over the atoms of each system, [B, 1] each, summed in float64."""
    products = torch.stack([(a * b).sum(dim=1) for a, b in pairs], dim=1).double()
    sums = segment_reduce(products, batch.atoms_ptr, "sum")
    return tuple(sums[:, k : k + 1] for k in range(sums.shape[1]))


def _zeros(dtype: torch.dtype) -> Any:
    def make(batch: Batch) -> Tensor:
        return torch.zeros((batch.num_graphs, 1), dtype=dtype, device=batch.device)

    return make


def _checked(name: str, value: Any, low: float | None, high: float | None) -> Number:
    """A finite number, or a tensor of them as [B, 1]; ``low`` is exclusive."""
    numbers = torch.as_tensor(value, dtype=torch.float64).reshape(-1, 1)
    bad = ~torch.isfinite(numbers)
    bad |= numbers <= low if low is not None else numbers < 0.0
    if high is not None:
        bad |= numbers > high
    if len(numbers) == 0 or bool(bad.any()):
        floor = f"above {low:g}" if low is not None else "at least 0"
        raise ConfigError(
            "FIRE",
            f"{name} is out of range",
            found=value if not isinstance(value, Tensor) else numbers[bad].tolist(),
            expected=floor + (f", at most {high:g}" if high is not None else ""),
        )
    if isinstance(value, Tensor) and value.numel() > 1:
        return numbers
    return float(numbers[0, 0])

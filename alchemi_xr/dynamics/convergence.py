"""When a system is finished: criteria on the fields of a batch.

Everything here stays on the device: `ConvergenceHook.mask` answers with a
tensor, and only `ConvergenceHook.evaluate` waits for it. The level of a field
is asked of the batch, never guessed from a length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import ConfigError, ConvergenceError, UnknownFieldError

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["DERIVED", "ConvergenceHook", "Criterion", "derive", "system_max"]

DERIVED = frozenset({"fmax", "energy_change"})
"""Fields that the engine makes when someone asks for them."""

_REDUCE_OPS = (None, "min", "max", "norm", "mean", "sum")


def system_max(values: torch.Tensor, batch: Batch, level: str) -> torch.Tensor:
    """Largest value of each system, [B]; -inf for a system without rows.

    Parameters
    ----------
    values : tensor, [rows]
    batch : Batch
    level : {"atom", "edge", "system"}
    """
    if level == "system":
        return values
    if not values.is_floating_point():
        values = values.to(torch.float64)
    if level == "atom":
        index = batch.batch_idx.long()
    else:
        ptr = batch.edges_ptr
        index = torch.repeat_interleave(
            torch.arange(batch.num_graphs, device=values.device),
            ptr.diff().to(values.device),
            output_size=len(values),
        )
    start = values.new_full((batch.num_graphs,), -torch.inf)
    return start.scatter_reduce(0, index, values, "amax", include_self=True)


def derive(batch: Batch, name: str) -> torch.Tensor:
    """``fmax`` from the forces, or the ``energy_change`` that the engine follows.

    Returns
    -------
    float tensor, [B, 1], eV/Å or eV

    Raises
    ------
    UnknownFieldError
        The batch has no forces, or nobody follows the energy.
    """
    if name == "fmax" and "forces" in batch:
        norms = torch.linalg.vector_norm(batch["forces"].detach(), dim=-1)
        # -inf (no atoms) becomes 0: nothing pulls at an empty system.
        return system_max(norms, batch, "atom").clamp_min(0).unsqueeze(-1)
    if name in batch:
        return batch[name]
    raise UnknownFieldError(
        "convergence",
        f"Key for convergence check not found; expected={name!r}, available={_names(batch)}",
        mend="energy_change is followed by an engine whose hooks ask for it (needs)"
        if name == "energy_change"
        else None,
    )


def _names(batch: Batch) -> list[str]:
    return sorted(name for names in batch.keys.values() for name in names)


@dataclass(frozen=True)
class Criterion:
    """One condition, ``reduced value <= threshold``.

    Parameters
    ----------
    key : str
        Field of the batch; ``fmax`` and ``energy_change`` are made on demand.
    threshold : float
        The value is signed: for forces use ``reduce_op="norm"``.
    reduce_op : {None, "min", "max", "norm", "mean", "sum"}
        Reduction inside each row.
    reduce_dims : int or list of int
        Axes it acts on.
    custom_op : callable, optional
        Raw tensor to bool [B]; all else is then left aside.
    """

    key: str
    threshold: float
    reduce_op: str | None = None
    reduce_dims: int | Sequence[int] = -1
    custom_op: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise ConfigError("Criterion", "key must be a field name", found=repr(self.key))
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float):
            raise ConfigError(
                f"Criterion {self.key!r}", "threshold must be a number", found=repr(self.threshold)
            )
        if self.reduce_op not in _REDUCE_OPS:
            raise ConfigError(
                f"Criterion {self.key!r}",
                "reduce_op is not known",
                found=repr(self.reduce_op),
                expected=", ".join(map(repr, _REDUCE_OPS)),
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Criterion:
        """A criterion from the keywords of its constructor.

        Raises
        ------
        ConfigError
            ``key`` or ``threshold`` is missing, or a keyword is not known.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        missing = sorted({"key", "threshold"} - set(options))
        if unknown or missing:
            raise ConfigError(
                "Criterion",
                f"wrong keywords (unknown {unknown}, missing {missing})",
                expected=", ".join(sorted(known)),
            )
        return cls(**options)

    def mask(self, batch: Batch) -> torch.Tensor:
        """Systems that meet it, bool [B]."""
        value = batch[self.key] if self.key in batch else derive(batch, self.key)
        value = value.detach()
        if self.custom_op is not None:
            found = self.custom_op(value)
            if found.dtype != torch.bool or found.numel() != batch.num_graphs:
                raise ConvergenceError(
                    f"custom_op of {self.key!r}",
                    "the answer has the wrong form",
                    found=f"{found.dtype} {list(found.shape)}",
                    expected=f"torch.bool [{batch.num_graphs}]",
                )
            return found.reshape(-1)
        level = batch.level_of(self.key) if self.key in batch else "system"
        value = self._reduce(value)
        if value.ndim > 1:
            value = value.flatten(1).amax(dim=1)
        return system_max(value, batch, level) <= self.threshold

    def _reduce(self, value: torch.Tensor) -> torch.Tensor:
        if self.reduce_op is None:
            return value
        wanted = [self.reduce_dims] if isinstance(self.reduce_dims, int) else self.reduce_dims
        for dim in wanted:
            if not -value.ndim <= dim < value.ndim:
                raise ConvergenceError(
                    f"criterion {self.key!r}", "no such axis", found=dim, expected=value.ndim
                )
        # Axis 0 counts rows: a 1-D field has nothing to reduce inside a row.
        dims = sorted({dim % value.ndim for dim in wanted} - {0})
        if not dims:
            return value
        if self.reduce_op == "max":
            return value.amax(dim=dims)
        if self.reduce_op == "min":
            return value.amin(dim=dims)
        if self.reduce_op == "norm":
            return torch.linalg.vector_norm(value, dim=dims)
        if self.reduce_op == "mean":
            return value.mean(dim=dims)
        return value.sum(dim=dims)


class ConvergenceHook:
    """Decides which systems are converged: all criteria are met.

    As ``convergence_hook`` of a stage it ends a system there. Registered as an
    ordinary hook with both statuses, it moves converged systems from
    ``source_status`` to ``target_status``.

    Parameters
    ----------
    criteria : dict or list of dict, optional
        Keywords of `Criterion`; by default force norm ≤ 0.05 eV/Å.
    source_status, target_status : int, optional
    frequency : int
        Steps between two checks, counted for each system in its stage.

    Examples
    --------
    >>> ConvergenceHook({"key": "fmax", "threshold": 0.01}).num_criteria
    1
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self,
        criteria: Mapping[str, Any] | Criterion | Iterable[Any] | None = None,
        source_status: int | None = None,
        target_status: int | None = None,
        frequency: int = 1,
    ) -> None:
        if criteria is None:
            criteria = {"key": "forces", "threshold": 0.05, "reduce_op": "norm"}
        if isinstance(criteria, Mapping | Criterion):
            criteria = [criteria]
        if not isinstance(criteria, list | tuple):
            raise TypeError(
                f"criteria must be None, a dict or a list of dicts, found {type(criteria).__name__}"
            )
        self.criteria: list[Criterion] = []
        for item in criteria:
            if isinstance(item, Criterion):
                self.criteria.append(item)
            elif isinstance(item, Mapping):
                self.criteria.append(Criterion.from_mapping(item))
            else:
                raise TypeError(f"Each criterion must be a dict, found {type(item).__name__}")
        if not self.criteria:
            raise ConfigError("ConvergenceHook", "the list of criteria is empty")
        if not isinstance(frequency, int) or isinstance(frequency, bool) or frequency < 1:
            raise ConfigError(
                "ConvergenceHook", "frequency must be a positive integer", found=repr(frequency)
            )
        self.source_status = source_status
        self.target_status = target_status
        self.frequency = frequency
        self.stage: Enum = DynamicsStage.AFTER_STEP

    @classmethod
    def from_fmax(
        cls,
        threshold: float = 0.05,
        source_status: int | None = None,
        target_status: int | None = None,
        frequency: int = 1,
    ) -> ConvergenceHook:
        """Largest atomic force norm ≤ ``threshold`` eV/Å."""
        criterion = {"key": "fmax", "threshold": threshold, "reduce_op": "max"}
        return cls(criterion, source_status, target_status, frequency)

    @classmethod
    def from_forces(
        cls,
        threshold: float,
        frequency: int = 1,
        source_status: int | None = None,
        target_status: int | None = None,
    ) -> ConvergenceHook:
        """Every force norm ≤ ``threshold`` eV/Å."""
        criterion = {"key": "forces", "threshold": threshold, "reduce_op": "norm"}
        return cls(criterion, source_status, target_status, frequency)

    @property
    def num_criteria(self) -> int:
        return len(self.criteria)

    @property
    def needs(self) -> frozenset[str]:
        """Derived fields that the engine has to keep for it."""
        return frozenset(c.key for c in self.criteria) & DERIVED

    def mask(self, batch: Batch) -> torch.Tensor:
        """Converged systems, bool [B], without waiting for the device.

        Raises
        ------
        UnknownFieldError
            A key is no field of the batch.
        """
        converged = self.criteria[0].mask(batch)
        for criterion in self.criteria[1:]:
            converged = converged & criterion.mask(batch)
        return converged

    def evaluate(self, batch: Batch) -> torch.Tensor | None:
        """Numbers of the converged systems, int64, or None when there is none."""
        indices = self.mask(batch).nonzero().reshape(-1)
        return indices if len(indices) else None

    def __call__(self, ctx: Any, stage: Enum) -> None:
        """Move converged systems on, when both statuses are set."""
        batch = ctx.batch
        if self.source_status is None or self.target_status is None or "status" not in batch:
            return
        status = batch["status"]
        moving = self.mask(batch) & (status.reshape(-1) == self.source_status)
        status[moving.reshape(status.shape)] = self.target_status

    def __repr__(self) -> str:
        terms = " and ".join(
            f"{c.key} custom" if c.custom_op else f"{c.reduce_op or ''}({c.key}) <= {c.threshold}"
            for c in self.criteria
        )
        return f"ConvergenceHook({terms}, frequency={self.frequency})"

"""Fields that the engine itself keeps in a batch, and values put back after an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from alchemi_xr.data.fields import FIELDS
from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["TRANSIENT_KEYS", "Guard", "InitFn", "check_count", "column", "put", "zero_output"]

InitFn: TypeAlias = Callable[["Batch"], torch.Tensor]
"""From a batch of new systems to the first values of a bookkeeping field."""

# Fields of the engine that mean nothing outside of a run.
TRANSIENT_KEYS = frozenset({"needs_prime", "energy_previous"})


class Guard:
    """Values of some fields, to be put back for some of the systems."""

    def __init__(self, batch: Batch, names: Iterable[str]) -> None:
        self.batch = batch
        self.saved = {name: batch[name].detach().clone() for name in names if name in batch}

    def restore_except(self, changed: torch.Tensor) -> None:
        """Put back the rows of systems that are not in ``changed``, bool [B]."""
        batch = self.batch
        atoms: torch.Tensor | None = None
        for name, saved in self.saved.items():
            values = batch[name]
            if values is None or values.shape != saved.shape:
                continue  # an edge field that was rebuilt: nothing to put back
            level = batch.level_of(name)
            if level == "edge":
                continue
            if level == "atom":
                if atoms is None:
                    atoms = changed[batch.batch_idx.long()]
                rows = atoms
            else:
                rows = changed
            rows = rows.reshape(-1, *(1,) * (saved.ndim - 1))
            values.copy_(torch.where(rows, values, saved))


def put(batch: Batch, name: str, values: torch.Tensor) -> None:
    """Write a system field, into the existing tensor where there is one."""
    if name in batch and batch[name].shape == values.shape:
        batch[name].copy_(values)
    else:
        batch.set(name, values, level="system")


def column(value: float, dtype: torch.dtype) -> InitFn:
    """Maker of a system field [B, 1] with one value."""

    def make(batch: Batch) -> torch.Tensor:
        return torch.full((batch.num_graphs, 1), value, dtype=dtype, device=batch.device)

    return make


def zero_output(batch: Batch, name: str) -> torch.Tensor:
    """Room for an output that is written later."""
    spec = FIELDS[name]
    rows = {"atom": batch.num_nodes, "edge": batch.num_edges, "system": batch.num_graphs}
    tail = [n for n in spec.tail if isinstance(n, int)]
    positions = batch["positions"]
    # The energy keeps the digits that the model gives it: at -1e5 eV a float32 step is 8 meV.
    dtype = torch.float64 if name == "energy" else positions.dtype
    return torch.zeros((rows[spec.level], *tail), dtype=dtype, device=positions.device)


def check_count(where: str, name: str, value: Any, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(where, f"{name} must be an integer of at least 1", found=repr(value))

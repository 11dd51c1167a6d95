"""In-flight batching: finished systems leave a batch, others take their room.

Order matters for what a crash may lose: systems are in a sink before they are
out of the batch, and no sample is drawn before that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from alchemi_xr.data.fields import FIELDS
from alchemi_xr.dynamics.bookkeeping import TRANSIENT_KEYS, put
from alchemi_xr.dynamics.convergence import derive
from alchemi_xr.errors import DynamicsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.base import BaseDynamics
    from alchemi_xr.dynamics.sinks import DataSink

__all__ = ["overflow_to_sinks", "refill"]

logger = logging.getLogger(__name__)

# Dense neighbours name batch-global atoms that no selection of systems shifts.
_DENSE = ("neighbor_matrix", "neighbor_matrix_shifts", "num_neighbors")


def refill(engine: BaseDynamics, batch: Batch, exit_status: int) -> Batch | None:
    """See `BaseDynamics.refill_check`."""
    sampler = engine.sampler
    if sampler is None:
        raise DynamicsError(
            type(engine).__name__,
            "refill_check requires a sampler",
            mend="give sampler=SizeAwareSampler(...)",
        )
    finished = batch["status"].reshape(-1) >= exit_status
    flags = finished.cpu()  # the one wait
    out = flags.nonzero().reshape(-1)
    if not len(out) and batch.num_graphs:
        return batch
    keep = (~flags).nonzero().reshape(-1)
    if len(out):
        _hand_over(engine, batch.index_select(out))
    rest = batch.index_select(keep) if len(keep) else None
    if rest is not None:
        _drop(rest, _DENSE)
        if not sampler.has_edges:
            _drop(rest, sorted(rest.keys["edge"]))
    new = _admit(engine, rest, batch)
    if rest is None or new is None:
        rest = rest if rest is not None else new
    else:
        rest.append(new)
    if rest is None:
        engine.done = sampler.exhausted
        engine.active_batch = None
    elif engine.active_batch is not None:
        engine.active_batch = rest
    return rest


def _admit(engine: BaseDynamics, rest: Batch | None, old: Batch) -> Batch | None:
    """New systems for the room beside ``rest``, with every field that it has."""
    sampler = engine.sampler
    assert sampler is not None
    used = (0, 0, 0)
    if rest is not None:
        used = (rest.num_nodes, rest.num_edges, rest.num_graphs)
    limits = (sampler.max_atoms, sampler.max_edges, sampler.max_batch_size)
    room = [
        None if limit is None else max(0, limit - n) for limit, n in zip(limits, used, strict=True)
    ]
    new = sampler.replacement_batch(atom_budget=room[0], edge_budget=room[1], max_count=room[2])
    if new is None:
        return None
    if new.device != old.device:
        new = new.to(old.device)
    new = engine.admit(new)
    for name in sorted(old.keys["node"] | old.keys["system"]):
        if name not in new and name in FIELDS and name in engine._last_outputs:
            # An output that the next model call writes: make room for it.
            like = old[name]
            rows = new.num_nodes if FIELDS[name].level == "atom" else new.num_graphs
            new.set(name, like.new_zeros((rows, *like.shape[1:])), level=FIELDS[name].level)
    for name in ("fmax", "energy_change", "energy_previous"):
        if name in old:
            put(new, name, old[name].new_full((new.num_graphs, 1), torch.inf))
    return new


def _hand_over(engine: BaseDynamics, graduated: Batch) -> None:
    """Finished systems to the sinks, with a true ``fmax`` and without engine state."""
    _drop(graduated, [*_DENSE, *TRANSIENT_KEYS])
    if engine.sampler is not None and not engine.sampler.has_edges:
        _drop(graduated, sorted(graduated.keys["edge"]))
    if "forces" in graduated:
        put(graduated, "fmax", derive(graduated, "fmax"))
    if not engine.sinks:
        logger.warning(
            "%d finished systems leave the batch and no sink keeps them (sinks=[HostMemory(n)])",
            graduated.num_graphs,
        )
        return
    overflow_to_sinks(engine.sinks, graduated)


def overflow_to_sinks(sinks: Sequence[DataSink], batch: Batch) -> None:
    """Write a batch to the sinks, the first with room first; split where it has to be.

    Raises
    ------
    DynamicsError
        All are full; nothing has been written.
    """
    room = sum(sink.capacity - len(sink) for sink in sinks)
    if room < batch.num_graphs:
        raise DynamicsError(
            "sinks",
            "All sinks are full",
            found=f"room for {room} systems",
            expected=batch.num_graphs,
            mend="give a larger capacity, or a ZarrData sink behind the others",
        )
    start = 0
    for sink in sinks:
        count = min(sink.capacity - len(sink), batch.num_graphs - start)
        if count <= 0:
            continue
        whole = count == batch.num_graphs
        sink.write(batch if whole else batch.index_select(slice(start, start + count)))
        start += count
        if start == batch.num_graphs:
            return


def _drop(batch: Batch, names: Any) -> None:
    for name in names:
        if name in batch:
            del batch[name]

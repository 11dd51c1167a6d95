"""A plan as a Dask graph.

Three kinds of tasks: ``read`` an extent, ``cut`` the rows a shard takes from
it, ``write`` the shard. The graph holds payloads (paths and offsets) and
numbers, never an array. Memory is bounded by the graph's own shape and not by
a scheduler's mood: reading extent i + window waits for the shards that end in
extent i.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from alchemi_xr.plan.plan import Plan
from alchemi_xr.plan.tasks import (
    Cut,
    PlanCore,
    Reader,
    ReadTask,
    cut,
    load,
    stats_of,
    write_shard,
)
from alchemi_xr.store.bulk import BulkWriter

__all__ = ["BulkGraph", "Graph", "Inputs", "Key", "build_graph"]

Key: TypeAlias = tuple[str, int] | tuple[str, int, int] | tuple[str, str]
Graph: TypeAlias = dict[Key, Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Results of another graph, which the reading of each extent waits for.

    Parameters
    ----------
    keys : sequence of sequence of key
        Of each extent; the reader gets ``(payload, values)``.
    graph : callable
        The graph of these keys and no more.
    """

    keys: Sequence[Sequence[Any]]
    graph: Callable[[Sequence[Any]], Mapping[Any, Any]]


@dataclass(frozen=True, slots=True)
class BulkGraph:
    """A graph and the keys of it that report: ``writes`` and ``stats`` by key."""

    graph: Graph
    writes: dict[Key, int]
    stats: dict[Key, int]

    @property
    def keys(self) -> list[Key]:
        return [*self.writes, *self.stats]


def build_graph(
    plan: Plan,
    reader: Reader,
    writer: BulkWriter,
    *,
    window: int,
    done_shards: Collection[int] = (),
    done_extents: Collection[int] = (),
    inputs: Inputs | None = None,
) -> BulkGraph:
    """The graph of what is still to do, and the keys that report it.

    Parameters
    ----------
    plan : Plan
    reader : Reader
        Picklable.
    writer : BulkWriter
    window : int
        Extents in flight at most (see ``Plan.window``).
    done_shards, done_extents : collection of int
        From the journal; they are left out.
    inputs : Inputs, optional
        Results of another graph that the reader takes beside the payloads.
    """
    # Two runs on one cluster must never share a key.
    token = uuid.uuid4().hex[:8]
    read, part, write, stats = (f"{word}-{token}" for word in ("read", "cut", "write", "stats"))
    shared = {name: (f"shared-{token}", name) for name in ("reader", "writer", "core")}
    graph: Graph = {
        shared["reader"]: reader,
        shared["writer"]: writer,
        shared["core"]: PlanCore.of(plan),
    }
    todo = [task for task in plan.shards if task.number not in done_shards]
    reporting = [i for i in range(len(plan.extents)) if i not in done_extents]
    wanted = sorted({piece.extent for task in todo for piece in task.pieces}.union(reporting))
    ends: dict[int, list[Key]] = {}
    writes: dict[Key, int] = {}
    for task in todo:
        pieces: list[Key] = []
        for piece in task.pieces:
            key: Key = (part, task.number, piece.extent)
            rows = Cut(task.names, piece.start, piece.stop)
            graph[key] = (cut, (read, piece.extent), rows)
            pieces.append(key)
        key = (write, task.number)
        graph[key] = (write_shard, shared["writer"], replace(task, pieces=()), pieces)
        writes[key] = task.number
        ends.setdefault(task.pieces[-1].extent, []).append(key)
    for place, number in enumerate(wanted):
        gate = ends.get(wanted[place - window], []) if place >= window else []
        source = ReadTask(
            number, plan.extents[number], plan.sample_base[number], plan.atom_base[number]
        )
        task_of: tuple[Any, ...] = (
            _load_after,
            gate,
            shared["reader"],
            shared["core"],
            source,
        )
        if inputs is not None:
            task_of = (*task_of, inputs.keys[number])
        graph[(read, number)] = task_of
    if inputs is not None:
        graph.update(inputs.graph([key for number in wanted for key in inputs.keys[number]]))
    for number in reporting:
        graph[(stats, number)] = (stats_of, (read, number))
    return BulkGraph(graph, writes, {(stats, number): number for number in reporting})


def _load_after(
    gate: Sequence[int],
    reader: Reader,
    core: PlanCore,
    source: ReadTask,
    values: Sequence[Any] | None = None,
) -> Any:
    """``load``, once the shards of the gate are written."""
    if values is not None:
        payload = source.extent.payload
        source = replace(source, extent=replace(source.extent, payload=(payload, values)))
    return load(reader, core, source)

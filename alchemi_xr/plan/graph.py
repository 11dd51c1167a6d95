"""A plan as a Dask graph.

Three kinds of tasks: ``read`` an extent, ``cut`` the rows a shard takes from
it, ``write`` the shard. The graph holds payloads (paths and offsets) and
numbers, never an array. Memory is bounded by the graph's own shape and not by
a scheduler's mood: reading extent i + window waits for the shards that end in
extent i.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
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

__all__ = ["BulkGraph", "Graph", "Key", "build_graph"]

Key: TypeAlias = tuple[str, int] | tuple[str, int, int] | tuple[str, str]
Graph: TypeAlias = dict[Key, Any]


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
            rows = Cut(task.names, piece.start, piece.stop, task.level == "system")
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
        graph[(read, number)] = (_load_after, gate, shared["reader"], shared["core"], source)
    for number in reporting:
        graph[(stats, number)] = (stats_of, (read, number))
    return BulkGraph(graph, writes, {(stats, number): number for number in reporting})


def _load_after(gate: Sequence[int], reader: Reader, core: PlanCore, source: ReadTask) -> Any:
    """``load``, once the shards of the gate are written."""
    return load(reader, core, source)

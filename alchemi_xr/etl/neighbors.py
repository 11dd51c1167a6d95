"""Neighbour lists in the pass of a conversion.

Where a row is written depends on how many edges come before it, so that the input
is read twice: a survey counts the edges of every sample and puts those it finds
down beside the store that is built, and the pass itself takes them from there. A
survey that was stopped is taken up; where the folder is out of a worker's reach
the edges are searched again, with the same result.
"""

from __future__ import annotations

import math
import numbers
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import BoolArray, IntArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.pairs import find_edges
from alchemi_xr.errors import ConfigError
from alchemi_xr.etl.source import Partition
from alchemi_xr.etl.transforms import Reading
from alchemi_xr.plan.client import Runner
from alchemi_xr.plan.plan import cut_by_bytes
from alchemi_xr.plan.progress import Progress
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult, trim
from alchemi_xr.store import fs
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["EdgeReading", "Part", "check_cutoff", "edge_layouts", "parts_of"]

_ATOMS_AT_ONCE = 8_192
_PART_BYTES = 16 * 2**20
_FAILED = -1  # in the place of a count
# Source, target and lattice image, each four bytes: atoms are counted within a sample.
_COLUMNS = 5
_LAYOUTS = (
    FieldLayout("neighbor_list", "edge", "int64", (2,), "core", "", False),
    FieldLayout("neighbor_list_shifts", "edge", "int32", (3,), "core", "", False),
)
_REPLACED = ("neighbor_list", "neighbor_list_shifts", "shifts")


def check_cutoff(cutoff: float | None) -> float | None:
    """The cutoff in Å, when it is one and there is a search.

    Raises
    ------
    ConfigError, OptionalDependencyError
    """
    if cutoff is None:
        return None
    if (
        isinstance(cutoff, bool)
        or not isinstance(cutoff, numbers.Real)
        or not (math.isfinite(cutoff) and cutoff > 0)
    ):
        raise ConfigError("cutoff", "is no length", found=repr(cutoff), expected="> 0, in Å")
    import_optional("vesin", extra="etl", why="neighbour lists (cutoff=)")
    return float(cutoff)


def edge_layouts(given: Sequence[FieldLayout]) -> tuple[tuple[FieldLayout, ...], list[str]]:
    """The layouts with the new edges, and notes of what of the input they replace.

    Raises
    ------
    ConfigError
        The input has values of its own edges, which would be those of others.
    """
    edges = [layout.name for layout in given if layout.level == "edge"]
    strange = [name for name in edges if name not in _REPLACED]
    if strange:
        raise ConfigError(
            "cutoff",
            f"the input has {', '.join(strange)} of its own edges, which new edges have not",
            mend="choose the fields to keep with fields=, or leave cutoff out",
        )
    notes = [f"{', '.join(edges)} of the input: replaced by new neighbour lists"] if edges else []
    return tuple(x for x in given if x.level != "edge") + _LAYOUTS, notes


@dataclass(frozen=True, slots=True)
class Part:
    """Samples ``start:stop`` of a partition: with its edges it may be too large for one task."""

    partition: Partition
    number: int
    start: int
    stop: int


def parts_of(
    partitions: Sequence[Partition], num_atoms: IntArray, num_edges: IntArray, atom_bytes: int
) -> list[tuple[Part, int, int]]:
    """What the tasks of the pass read, each with its atoms and edges.

    Parameters
    ----------
    partitions : sequence of Partition
    num_atoms, num_edges : int array, [N]
    atom_bytes : int
        Of a row of an atom.
    """
    edge_bytes = sum(layout.to_info().row_bytes for layout in _LAYOUTS)
    out = []
    base = 0
    for number, partition in enumerate(partitions):
        here = slice(base, base + partition.samples)
        atoms, edges = num_atoms[here].astype(np.int64), num_edges[here].astype(np.int64)
        sizes = atoms * atom_bytes + edges * edge_bytes
        for a, b in cut_by_bytes(sizes, _PART_BYTES):
            part = Part(partition, number, a, b)
            out.append((part, int(atoms[a:b].sum()), int(edges[a:b].sum())))
        base += partition.samples
    return out


@dataclass(frozen=True)
class EdgeReading:
    """A reading that gives every sample its neighbour list; picklable.

    Parameters
    ----------
    reading : Reading
    cutoff : float
        Å.
    folder : str, optional
        Where the survey puts what it finds; of this input and cutoff alone.
    """

    reading: Reading
    cutoff: float
    folder: str | None = None

    def survey(self, partitions: Sequence[Partition], runner: Runner, shown: Progress) -> IntArray:
        """Edges of every sample, int64 [N]."""
        if self.folder is not None:
            os.makedirs(self.folder, exist_ok=True)
        found = [self._counts(number) for number in range(len(partitions))]
        shown.start("neighbours", sum(p.samples for p in partitions), "samples")
        token = uuid.uuid4().hex[:8]
        shared: Any = (f"shared-{token}", "edges")
        graph: dict[Any, Any] = {shared: self}
        for number, partition in enumerate(partitions):
            counts = found[number]
            if counts is None:
                graph[f"edges-{token}", number] = (_survey, shared, number, partition)
            else:
                shown.advance(len(counts))
        keys = [key for key in graph if key != shared]

        def report(key: Any, counts: Any) -> None:
            found[key[1]] = counts
            shown.advance(len(counts))

        runner.run(graph, keys, report)
        counts = np.concatenate([c for c in found if c is not None])
        return np.maximum(counts, 0).astype(np.int64)

    def count(self, number: int, partition: Partition) -> NDArray:
        """Edges of every sample of a partition, ``-1`` where they cannot be found.

        Raises
        ------
        SourceError
            A record is broken, or has no neighbours that could be found, and the
            reading raises.
        """
        result = self._whole(partition)
        block, skip = result.block, ~result.kept()
        counts: NDArray = np.zeros(block.num_samples, dtype=np.int32)
        partial = None if self.folder is None else Path(self._path(number, f"{os.getpid()}.tmp"))
        file = None if partial is None else open(partial, "wb")  # noqa: SIM115
        try:
            for start, stop in _few_atoms(block):
                edges = find_edges(block.slice(start, stop), self.cutoff, skip[start:stop])
                counts[start:stop] = np.diff(edges.ptr)
                for sample, name, reason in edges.failed:
                    counts[start + sample] = _FAILED
                    if self.reading.raises:
                        failed = [(sample, name, reason)]
                        raise self._rejected(partition, start, failed)[0].error()
                if file is not None:
                    both = np.column_stack((edges.neighbor_list, edges.shifts))
                    file.write(np.ascontiguousarray(both, dtype=np.int32).data)
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        finally:
            if file is not None:
                file.close()
        if partial is not None:
            os.replace(partial, self._path(number, "edges"))
            # Last: with it the partition is done.
            fs.atomic_replace(Path(self._path(number, "counts")), counts.tobytes())
        trim()
        return counts

    def __call__(self, payload: Part) -> PartResult:
        """The samples of a part, with their edges.

        Raises
        ------
        SourceError
        """
        result = _cut(self._whole(payload.partition), payload.start, payload.stop)
        block, kept = result.block, result.kept()
        counts = self._counts(payload.number)
        again: BoolArray = kept
        rows: NDArray | None = None
        if counts is not None:
            own = counts[payload.start : payload.stop]
            # Those that failed are searched again, for the reason.
            again = kept & (own == _FAILED)
            rows = self._rows(payload, np.maximum(counts, 0))
        edges = find_edges(block, self.cutoff, ~again) if again.any() or rows is None else None
        rejects = self._rejected(payload.partition, payload.start, edges.failed if edges else ())
        if rejects and self.reading.raises:
            raise rejects[0].error()
        result.rejects += rejects
        result.rejects.sort(key=lambda r: -1 if r.sample is None else r.sample)
        if rows is not None:
            ptr = counts_to_ptr(np.maximum(own, 0).astype(np.int64))
            pairs, shifts = rows[:, :2].astype(np.int64), rows[:, 2:]
        else:
            assert edges is not None
            ptr, pairs, shifts = edges.ptr, edges.neighbor_list, edges.shifts
        without = block.select_fields([n for n in block.names if block.levels[n] != "edge"])
        result.block = replace(
            without,
            edges_ptr=ptr,
            arrays={**without.arrays, "neighbor_list": pairs, "neighbor_list_shifts": shifts},
            levels={**without.levels, "neighbor_list": "edge", "neighbor_list_shifts": "edge"},
        )
        return self.reading.filtered(result) if self._late else result

    @property
    def _late(self) -> bool:
        """Whether the condition asks for edges, and has to wait for them."""
        where = self.reading.stages.where
        return where is not None and "nedges" in where.names

    def _whole(self, partition: Partition) -> PartResult:
        result = self.reading.read(partition)
        return result if self._late else self.reading.filtered(result)

    def _rejected(
        self, partition: Partition, start: int, failed: Sequence[tuple[int, str, str]]
    ) -> list[Reject]:
        """Samples, counted from the one at ``start``, without a list."""
        found = self.reading.rejected(
            partition,
            [(start + sample, name, f"no neighbour list: {why}") for sample, name, why in failed],
        )
        return [
            replace(reject, sample=sample)
            for reject, (sample, _, _) in zip(found, failed, strict=True)
        ]

    def _path(self, number: int, what: str) -> str:
        assert self.folder is not None
        return os.path.join(self.folder, f"{number:08d}.{what}")

    def _counts(self, number: int) -> NDArray | None:
        if self.folder is None or number < 0:
            return None
        try:
            counts: NDArray = np.fromfile(self._path(number, "counts"), dtype=np.int32)
        except FileNotFoundError:
            return None
        return counts

    def _rows(self, part: Part, counts: NDArray) -> NDArray:
        ptr = counts_to_ptr(counts.astype(np.int64))
        start, stop = int(ptr[part.start]), int(ptr[part.stop])
        width = 4 * _COLUMNS
        values = np.fromfile(
            self._path(part.number, "edges"),
            dtype=np.int32,
            count=(stop - start) * _COLUMNS,
            offset=start * width,
        )
        return values.reshape(-1, _COLUMNS)


def _survey(reading: EdgeReading, number: int, partition: Partition) -> NDArray:
    return reading.count(number, partition)


def _few_atoms(block: Block) -> list[tuple[int, int]]:
    """Ranges of samples of about so many atoms as are searched at once."""
    ends = block.atoms_ptr[1:]
    lot = (ends - 1) // _ATOMS_AT_ONCE
    cuts = np.flatnonzero(np.diff(lot)) + 1
    starts = [0, *cuts.tolist()]
    return list(zip(starts, [*starts[1:], block.num_samples], strict=True))


def _cut(result: PartResult, start: int, stop: int) -> PartResult:
    """Some samples of a result; what concerns no sample goes with the first."""
    if (start, stop) == (0, result.block.num_samples):
        return result
    inside: Callable[[IntArray], IntArray] = lambda a: a[(a >= start) & (a < stop)] - start  # noqa: E731
    rejects = [
        r if r.sample is None else replace(r, sample=r.sample - start)
        for r in result.rejects
        if (start == 0 if r.sample is None else start <= r.sample < stop)
    ]
    return PartResult(
        result.block.slice(start, stop),
        rejects,
        result.notes if start == 0 else [],
        inside(result.left_out),
        inside(result.undecided),
    )

"""What every source of samples gives: first counts, then flat arrays.

``scan`` tells how many samples and atoms there are, which fields, and what is
broken, without keeping any number; ``read`` gives whole samples as one
:class:`~alchemi_xr.data.block.Block`. A source is picklable: it travels to
workers as it is, after its scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.data.block import Block
from alchemi_xr.etl.schema import Schema
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["MOST_SAMPLES", "Mapper", "Partition", "Scan", "Segment", "Source", "pack", "plain_map"]

MOST_SAMPLES = 65_536
"""Samples of a partition, whatever their size."""

Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def plain_map(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """The function of every item, here and now."""
    return [function(item) for item in items]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive good records of one file.

    Parameters
    ----------
    file : int
        Place in the source's list of paths.
    start, stop : int
        Where they lie, in the source's own measure (bytes, row ids, frames).
    first : int
        Number of the first record in its file.
    frames, atoms : int
        How many there are.
    line : int
        At which the first record begins, from 1; 0 where there are no lines.
    """

    file: int
    start: int
    stop: int
    first: int
    frames: int
    atoms: int
    line: int = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """What one task reads: some segments, one after the other."""

    segments: tuple[Segment, ...]
    edges: int = 0
    input_bytes: int = 0

    @property
    def samples(self) -> int:
        return sum(s.frames for s in self.segments)

    @property
    def atoms(self) -> int:
        return sum(s.atoms for s in self.segments)


@dataclass
class Scan:
    """What a source has to give.

    Parameters
    ----------
    partitions : list of Partition
    num_atoms, num_edges : int64 array, [N]
        Counts of every sample, in the order of the partitions.
    schema : Schema
    rejects : list of Reject
        Records that are left out altogether.
    notes : list of str
        What the user should know: assumptions, fields that are dropped.
    keys : dict of str to int
        By name in the input: samples that have it.
    records : int
        Records in the input, rejected ones included.
    units : dict of str to str
        By known field: its unit in the input, where the format or the file says
        so; converted at reading unless the user says otherwise.
    """

    partitions: list[Partition]
    num_atoms: IntArray
    num_edges: IntArray
    schema: Schema
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)
    records: int = 0
    units: dict[str, str] = field(default_factory=dict)


@runtime_checkable
class Source(Protocol):
    """One format of input.

    A class with a ``name``, registered in the entry-point group
    ``alchemi_xr.sources``. One whose input may be a folder has
    ``takes_folders = True``, and ``matches`` is asked about folders too. One of
    text may have ``places(partition, samples)``: byte and line at which each of
    these samples begins, for the report on those that are set aside once read.
    """

    name: ClassVar[str]

    def __init__(self, paths: Sequence[str], **options: Any) -> None: ...

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether a file looks like this format (by name or first bytes)."""
        ...

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Count everything; ``map_files`` may run over several workers."""
        ...

    def read(self, partition: Partition) -> Block | PartResult:
        """The samples of a partition; a broken one as any rows and a reject."""
        ...


def pack(
    segments: Iterable[tuple[Segment, int]],
    *,
    target_bytes: int,
    target_samples: int = MOST_SAMPLES,
) -> list[Partition]:
    """Segments as partitions of about a target size; small files share one."""
    partitions: list[Partition] = []
    group: list[Segment] = []
    size = samples = 0
    for segment, nbytes in segments:
        if segment.frames == 0:
            continue
        if group and (size + nbytes > target_bytes or samples + segment.frames > target_samples):
            partitions.append(Partition(tuple(group), input_bytes=size))
            group, size, samples = [], 0, 0
        group.append(segment)
        size += nbytes
        samples += segment.frames
    if group:
        partitions.append(Partition(tuple(group), input_bytes=size))
    return partitions


def no_edges(samples: int) -> IntArray:
    """Edge counts of a source without edges."""
    return np.zeros(samples, dtype=np.int64)

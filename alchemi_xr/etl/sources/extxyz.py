"""Extended XYZ and plain XYZ, also compressed with gzip, bzip2 or zstd.

The scan reads count and comment lines; what is wrong there never gets an
offset. Atom lines are parsed once, column-wise, by ``read``; a frame that is
found broken only then keeps its rows and is deleted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.columns import ColumnSpec, LineFault
from alchemi_xr.etl.file_scan import FileScan, joined
from alchemi_xr.etl.frame_index import Batch, Frame, IndexFault, iter_batches
from alchemi_xr.etl.frames import (
    FrameFault,
    FrameHead,
    column_targets_of,
    read_head,
    stress_conflict,
)
from alchemi_xr.etl.heads import Form, read_heads
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.etl.unpacking import PACKED, own_folder, unpack
from alchemi_xr.etl.xyz_part import FramesOfText, assemble
from alchemi_xr.native.text import ATOMS, COMMENT, COMMENT_STOP, LINE, OFFSET, STOP
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["ExtxyzSource"]

_SUFFIXES = (".xyz", ".extxyz", ".exyz")


class ExtxyzSource:
    """Frames of extended or plain XYZ files.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    partition_bytes : int
        Text that one task parses.
    spool : str, optional
        Folder in which compressed files are unpacked; by default a temporary one.
    """

    name: ClassVar[str] = "extxyz"
    scans_in_threads: ClassVar[bool] = True

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        partition_bytes: int = 4 * 2**20,
        spool: str | None = None,
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.partition_bytes = partition_bytes
        self._spool = spool
        self.schema: Schema | None = None

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the file name, less the suffix of a packer."""
        name = os.path.basename(path).lower()
        for packed in PACKED:
            name = name.removesuffix(packed)
        return name.endswith(_SUFFIXES)

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Count the frames of every file and see what fields they have."""
        damage: list[Reject] = []
        for number, path in enumerate(self.paths):
            if Path(path).suffix.lower() in PACKED:
                self._spool = self._spool or own_folder(self)
                os.makedirs(self._spool, exist_ok=True)
                self.files[number] = os.path.join(self._spool, f"{number:06d}.xyz")
                damage += unpack(path, self.files[number])
        jobs = [
            _Job(number, shown, file, self.names, self.partition_bytes)
            for number, (shown, file) in enumerate(zip(self.paths, self.files, strict=True))
        ]
        results: list[FileScan] = map_files(_scan_file, jobs)
        scan = joined(
            results,
            self.paths[0],
            unstored="column {name!r} is text of single atoms and is not stored ({count} frames)",
            target_bytes=self.partition_bytes,
            damage=damage,
        )
        scan.notes += [note for result in results for note in result.notes]
        self.schema = scan.schema
        return scan

    def read(self, partition: Partition) -> PartResult:
        """Parse the frames of a partition, all files of it together."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        parts = [self._frames(segment) for segment in partition.segments]
        return assemble(parts, self.schema, self.names)

    def places(self, partition: Partition, samples: Sequence[int]) -> list[tuple[int, int]]:
        """Byte and line at which samples of a partition begin in their (unpacked) files."""
        out: dict[int, tuple[int, int]] = {}
        wanted, first = sorted(samples), 0
        for segment in partition.segments:
            here = [s for s in wanted if first <= s < first + segment.frames]
            if here:
                part = self._frames(segment)
                out.update({s: part.place(s - first) for s in here})
            first += segment.frames
        return [out[sample] for sample in samples]

    def _frames(self, segment: Segment) -> FramesOfText:
        with open(self.files[segment.file], "rb") as file:
            file.seek(segment.start)
            data = file.read(segment.stop - segment.start)
        return FramesOfText(data, segment, self.paths[segment.file], self.names)


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    shown: str
    file: str
    names: NameMap
    partition_bytes: int


def _scan_file(job: _Job) -> FileScan:
    """One file: frames into segments, faults into rejects."""
    out = FileScan()
    if os.path.getsize(job.file) == 0:
        out.rejects.append(Reject(job.shown, 0, "the file is empty", 0, 1))
        return out
    single = _Singles(out, job)
    segments = _Segments(out, job)
    for item in iter_batches(job.file, single.look):
        if isinstance(item, IndexFault):
            out.records += 1
            single.reject(item)
        elif isinstance(item, Frame):
            out.records += 1
            segments.extend(item.number, [item.offset], [item.stop], [item.atoms], [item.line])
        else:
            out.records += len(item.frames)
            _take_batch(out, item, job, single, segments)
    segments.flush()
    single.observe()
    return out


def _take_batch(
    out: FileScan, batch: Batch, job: _Job, single: _Singles, segments: _Segments
) -> None:
    heads = read_heads(batch.text, batch.frames, job.names, select=_nothing)
    atoms = batch.frames[:, ATOMS]
    for found in heads.signatures(atoms):
        plan = found.plan
        sizes = found.atoms
        _observe(out, plan.spec, plan.keys, found.forms, sizes, found.count, job.names)
    faults = []
    for i in heads.odd:
        row = batch.frames[i]
        comment = batch.text[int(row[COMMENT]) : int(row[COMMENT_STOP])].decode("utf-8", "replace")
        fault = single.look(batch.frame(i), comment)
        if fault is not None:
            single.reject(fault)
            faults.append(i)
    columns = (
        batch.frames[:, OFFSET] + batch.offset,
        batch.frames[:, STOP] + batch.offset,
        atoms,
        batch.frames[:, LINE] + batch.line,
    )
    starts, stops, counts, lines = (c.tolist() for c in columns)
    edges = [-1, *faults, len(starts)]
    for before, after in pairwise(edges):
        a = before + 1
        part = slice(a, after)
        segments.extend(batch.number + a, starts[part], stops[part], counts[part], lines[part])


def _nothing(name: str) -> bool:
    """The scan asks what there is, not what it is."""
    return False


class _Singles:
    """Frames whose comment is read by itself."""

    def __init__(self, out: FileScan, job: _Job) -> None:
        self.out, self.job = out, job
        self.signatures: Counter[Any] = Counter()
        self.heads: dict[Any, FrameHead] = {}

    def look(self, frame: Frame, comment: str) -> IndexFault | None:
        """The fault of a frame's head, if it has one."""
        try:
            head = read_head(comment, self.job.names)
            column_targets_of(head.spec, self.job.names)
        except (FrameFault, LineFault) as fault:
            return IndexFault(frame.number, frame.offset, frame.line, fault.reason, fault.field)
        if stress_conflict(head):
            self.out.notes.append(
                f"{self.job.shown}, frame {frame.number}: stress and -virial/volume differ; "
                "stress is kept"
            )
        signature = _signature(head, frame.atoms)
        self.signatures[signature] += 1
        self.heads.setdefault(signature, head)
        return None

    def reject(self, item: IndexFault) -> None:
        self.out.rejects.append(
            Reject(self.job.shown, item.number, item.reason, item.offset, item.line, item.field)
        )

    def observe(self) -> None:
        for signature, count in self.signatures.items():
            head = self.heads[signature]
            _, keys, forms, sizes = signature
            _observe(self.out, head.spec, keys, forms, sizes, count, self.job.names)


def _signature(head: FrameHead, atoms: int) -> Any:
    """What matters of a head for the schema: equal ones are counted, not observed."""
    shapes = tuple(
        (name, "str", ()) if isinstance(value, str) else (name, value.dtype.char, value.shape)
        for name, value in head.system.items()
    )
    # The number of atoms matters only for arrays that may have one row an atom.
    ragged = any(shape and shape[0] == atoms and name not in FIELDS for name, _, shape in shapes)
    sizes = atoms if ragged else -1
    return head.properties, head.keys, shapes, sizes


def _observe(
    out: FileScan,
    spec: ColumnSpec,
    keys: Sequence[str],
    forms: Sequence[Form],
    sizes: int,
    count: int,
    names: NameMap,
) -> None:
    observer = out.observer
    observer.num_samples += count
    columns: list[tuple[str, Level]] = [
        (c.name, "atom") for c in spec.columns if c.kind != "S" and c.name != "species"
    ]
    observer.contest(names.contests([*columns, *((key, "system") for key in keys)]), count=count)
    targets, unstored = column_targets_of(spec, names)
    for column in spec.columns:
        source = "Z" if column.name == "species" else column.name
        if column.name != "species":
            out.keys[column.name] += count
        if source in targets:
            dtype = {"S": "int64", "R": "float64", "I": "int64", "L": "bool"}[column.kind]
            tail = () if column.width == 1 else (column.width,)
            observer.see(targets[source], "atom", dtype, tail, count=count)
    for name in unstored:
        out.unstored[name] += count
    for key in keys:
        out.keys[key] += count
    for name, dtype, shape in forms:
        observer.see(name, "system", dtype, shape, count=count, atoms=None if sizes < 0 else sizes)


class _Segments:
    """Good frames put together into ranges of the file."""

    def __init__(self, out: FileScan, job: _Job) -> None:
        self.out, self.job = out, job
        self._next = self._first = -1
        self._start = self._stop = self._atoms = self._line = 0

    def extend(
        self,
        number: int,
        starts: list[int],
        stops: list[int],
        atoms: list[int],
        lines: list[int],
    ) -> None:
        """Frames that follow each other, the first of them of this number."""
        if not starts:
            return
        self.out.atoms.extend(atoms)
        if number != self._next:
            self.flush()
            self._begin(number, starts[0], lines[0])
        limit = self.job.partition_bytes
        for start, stop, count, line in zip(starts, stops, atoms, lines, strict=True):
            if stop - self._start > limit and self._stop > self._start:
                self.flush()
                self._begin(number, start, line)
            self._stop = stop
            self._atoms += count
            number += 1
            self._next = number

    def _begin(self, number: int, start: int, line: int) -> None:
        self._first = self._next = number
        self._line = line
        self._start = self._stop = start
        self._atoms = 0

    def flush(self) -> None:
        """End the range that is open."""
        frames = self._next - self._first
        if self._stop > self._start:
            segment = Segment(
                self.job.number,
                self._start,
                self._stop,
                self._first,
                frames,
                self._atoms,
                self._line,
            )
            self.out.segments.append((segment, self._stop - self._start))
        self._start = self._stop

"""Extended XYZ and plain XYZ, also gzip and bzip2 compressed.

The scan reads count and comment lines; what is wrong there never gets an
offset. Atom lines are parsed once, column-wise, by ``read``; a frame that is
found broken only then keeps its rows and is deleted.
"""

from __future__ import annotations

import bz2
import gzip
import os
import tempfile
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._typing import BoolArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr, row_indices
from alchemi_xr.data.fields import FIELDS, fill_for
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.columns import ColumnSpec, LineFault, parse_columns
from alchemi_xr.etl.frame_index import Frame, IndexFault, iter_frames
from alchemi_xr.etl.frames import (
    FrameFault,
    FrameHead,
    column_targets,
    read_head,
    stress_conflict,
)
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import as_text
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, no_edges, pack, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["ExtxyzSource"]

_SUFFIXES = (".xyz", ".extxyz", ".exyz")
_PACKED = {".gz": gzip.open, ".bz2": bz2.open}


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
        for packed in _PACKED:
            name = name.removesuffix(packed)
        return name.endswith(_SUFFIXES)

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Count the frames of every file and see what fields they have."""
        damage: list[Reject] = []
        for number, path in enumerate(self.paths):
            opener = _PACKED.get(Path(path).suffix.lower())
            if opener is not None:
                self.files[number], fault = self._unpack(number, opener)
                damage += fault
        jobs = [
            _Job(number, shown, file, self.names, self.partition_bytes)
            for number, (shown, file) in enumerate(zip(self.paths, self.files, strict=True))
        ]
        results: list[_FileScan] = map_files(_scan_file, jobs)
        observer = FieldObserver()
        keys: Counter[str] = Counter()
        unstored: Counter[str] = Counter()
        for result in results:
            observer.merge(result.observer)
            keys.update(result.keys)
            unstored.update(result.unstored)
        self.schema = observer.schema(self.paths[0])
        notes = [
            f"column {name!r} is text of single atoms and is not stored ({count} frames)"
            for name, count in sorted(unstored.items())
        ]
        notes += [f"{name!r} is not stored: {why}" for name, why in self.schema.dropped.items()]
        notes += [note for result in results for note in result.notes]
        atoms = np.concatenate([np.frombuffer(r.atoms, dtype=np.int64) for r in results])
        return Scan(
            pack((s for r in results for s in r.segments), target_bytes=self.partition_bytes),
            atoms,
            no_edges(len(atoms)),
            self.schema,
            # The damage first: what is cut off by it is found by the scan too.
            damage + [reject for result in results for reject in result.rejects],
            notes,
            dict(keys),
            sum(r.records for r in results) + len(damage),
        )

    def read(self, partition: Partition) -> PartResult:
        """Parse the frames of a partition, all files of it together."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        texts: list[bytes] = []
        frames: list[_FrameText] = []
        for segment in partition.segments:
            with open(self.files[segment.file], "rb") as file:
                file.seek(segment.start)
                data = file.read(segment.stop - segment.start)
            shown = self.paths[segment.file]
            try:
                heads = list(_heads(data, segment, len(texts), shown, self.names))
            except FrameFault:
                # The scan took every comment of the segment.
                raise _changed(shown, segment.first) from None
            if (len(heads), sum(h.atoms for h in heads)) != (segment.frames, segment.atoms):
                raise _changed(shown, segment.first)
            frames += heads
            texts.append(data)
        return _Assembly(self, texts, frames, self.schema).result()

    def _unpack(self, number: int, opener: Any) -> tuple[str, list[Reject]]:
        if self._spool is None:
            self._spool = tempfile.mkdtemp(prefix="alchemi_xr-")
            weakref.finalize(self, _remove_tree, self._spool, os.getpid())
        os.makedirs(self._spool, exist_ok=True)
        shown = self.paths[number]
        target = os.path.join(self._spool, f"{number:06d}.xyz")
        faults: list[Reject] = []
        with open(target + ".partial", "wb") as out:
            try:
                with opener(shown, "rb") as packed:
                    # ``read`` would lose what it has when it meets the damage.
                    while block := packed.read1(2**20):
                        out.write(block)
            except (OSError, EOFError, zlib.error) as error:
                reason = f"the compressed data are damaged after byte {out.tell()}: {error}"
                faults.append(Reject(shown, -1, reason))
        os.replace(target + ".partial", target)
        return target, faults


def _remove_tree(path: str, pid: int) -> None:
    import shutil

    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    shown: str
    file: str
    names: NameMap
    partition_bytes: int


@dataclass
class _FileScan:
    observer: FieldObserver = field(default_factory=FieldObserver)
    segments: list[tuple[Segment, int]] = field(default_factory=list)
    atoms: array[int] = field(default_factory=lambda: array("q"))
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    keys: Counter[str] = field(default_factory=Counter)
    unstored: Counter[str] = field(default_factory=Counter)
    records: int = 0


def _scan_file(job: _Job) -> _FileScan:
    """One file: frames into segments, faults into rejects."""
    out = _FileScan()
    if os.path.getsize(job.file) == 0:
        out.rejects.append(Reject(job.shown, 0, "the file is empty", 0, 1))
        return out
    signatures: Counter[Any] = Counter()
    heads: dict[Any, FrameHead] = {}

    def look(frame: Frame, comment: str) -> IndexFault | None:
        try:
            head = read_head(comment, job.names)
            column_targets_of(head.spec, job.names)
        except FrameFault as fault:
            return IndexFault(frame.number, frame.offset, frame.line, fault.reason, fault.field)
        except LineFault as fault:
            return IndexFault(frame.number, frame.offset, frame.line, fault.reason, fault.field)
        if stress_conflict(head):
            out.notes.append(
                f"{job.shown}, frame {frame.number}: stress and -virial/volume differ; stress is kept"
            )
        signature = _signature(head, frame.atoms)
        signatures[signature] += 1
        heads.setdefault(signature, head)
        return None

    for item in iter_frames(job.file, look):
        out.records += 1
        if isinstance(item, IndexFault):
            out.rejects.append(
                Reject(job.shown, item.number, item.reason, item.offset, item.line, item.field)
            )
        else:
            _extend(out, item, job)
    for signature, count in signatures.items():
        _observe(out, heads[signature], signature, count, job.names)
    return out


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


def _observe(out: _FileScan, head: FrameHead, signature: Any, count: int, names: NameMap) -> None:
    _, keys, shapes, sizes = signature
    observer = out.observer
    observer.num_samples += count
    targets, unstored = column_targets_of(head.spec, names)
    for column in head.spec.columns:
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
    for name, dtype, shape in shapes:
        observer.see(name, "system", dtype, shape, count=count, atoms=None if sizes < 0 else sizes)


@lru_cache(maxsize=256)
def _cached_targets(
    spec: ColumnSpec, mapping: tuple[tuple[str, str], ...]
) -> tuple[dict[str, str], list[str]]:
    return column_targets(spec, NameMap(dict(mapping)))


def column_targets_of(spec: ColumnSpec, names: NameMap) -> tuple[dict[str, str], list[str]]:
    """``column_targets``, remembered."""
    return _cached_targets(spec, tuple(names.mapping.items()))


def _extend(out: _FileScan, frame: Frame, job: _Job) -> None:
    """Add a good frame to the last segment, or begin a new one."""
    out.atoms.append(frame.atoms)
    size = frame.stop - frame.offset
    if out.segments:
        last, nbytes = out.segments[-1]
        if frame.number == last.first + last.frames and nbytes + size <= job.partition_bytes:
            grown = Segment(
                last.file,
                last.start,
                frame.stop,
                last.first,
                last.frames + 1,
                last.atoms + frame.atoms,
            )
            out.segments[-1] = (grown, frame.stop - last.start)
            return
    segment = Segment(job.number, frame.offset, frame.stop, frame.number, 1, frame.atoms)
    out.segments.append((segment, size))


@dataclass(slots=True)
class _FrameText:
    """A frame of a partition: its head, and where its atom lines lie."""

    head: FrameHead
    text: int
    start: int
    stop: int
    atoms: int
    shown: str
    number: int
    offset: int


def _changed(shown: str, number: int) -> SourceError:
    return SourceError(
        f"{shown}, frame {number}",
        "the file is not what it was when it was scanned",
        mend="do not change the input while it is read; run it again",
    )


def _heads(
    data: bytes, segment: Segment, text: int, shown: str, names: NameMap
) -> Iterator[_FrameText]:
    ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    lines: list[int] = ends.tolist()
    at = 0
    number = segment.first
    while at < len(lines):
        begin = lines[at - 1] + 1 if at else 0
        head = data[begin : lines[at]].strip()
        if at == 0:
            head = head.removeprefix(b"\xef\xbb\xbf")
        if not head:
            at += 1
            continue
        last = at + 2 + int(head) if head.isdigit() else len(lines) + 1
        if last > len(lines):
            raise _changed(shown, number)
        comment = data[lines[at] + 1 : lines[at + 1]].decode("utf-8", "replace")
        yield _FrameText(
            read_head(comment.strip(), names),
            text,
            lines[at + 1] + 1,
            lines[last - 1] + 1,
            last - at - 2,
            shown,
            number,
            segment.start + begin,
        )
        number += 1
        at = last


class _Assembly:
    """Frames of a partition, put together field by field."""

    def __init__(
        self, source: ExtxyzSource, texts: list[bytes], frames: list[_FrameText], schema: Schema
    ) -> None:
        self.names, self.texts, self.frames, self.schema = source.names, texts, frames, schema
        self.counts = np.array([f.atoms for f in frames], dtype=np.int64)
        self.ptr = counts_to_ptr(self.counts)
        self.rejects: list[Reject] = []
        self.arrays: dict[str, NDArray] = {}
        self.levels: dict[str, Level] = {}
        self.present: dict[str, BoolArray] = {}

    def result(self) -> PartResult:
        self._atoms()
        self._system()
        block = Block(self.ptr, np.zeros_like(self.ptr), self.arrays, self.levels, self.present)
        return PartResult(block, self.rejects)

    def _atoms(self) -> None:
        groups: dict[ColumnSpec, list[int]] = {}
        for i, frame in enumerate(self.frames):
            groups.setdefault(frame.head.spec, []).append(i)
        for spec, members in groups.items():
            index = np.array(members, dtype=np.int64)
            for chosen, columns in self._parse(spec, index):
                targets, _ = column_targets_of(spec, self.names)
                whole = len(chosen) == len(self.frames)
                rows = None if whole else row_indices(self.ptr, chosen)[0]
                for source, name in targets.items():
                    if source in columns:
                        self._put_atoms(name, columns[source], rows, chosen)

    def _put_atoms(self, name: str, values: NDArray, rows: NDArray | None, chosen: NDArray) -> None:
        layout = self.schema.get(name)
        if layout is None or layout.level != "atom":
            return
        values = values.reshape(len(values), *layout.tail)
        if rows is None:
            self.arrays[name] = values.astype(layout.dtype, copy=False)
            self.levels[name] = "atom"
            return
        if name not in self.arrays:
            dtype = np.dtype(layout.dtype)
            shape = (int(self.ptr[-1]), *layout.tail)
            self.arrays[name] = np.full(shape, fill_for(dtype), dtype)
            self.levels[name] = "atom"
            self.present[name] = np.zeros(len(self.frames), dtype=bool)
        self.arrays[name][rows] = values
        self.present[name][chosen] = True

    def _parse(
        self, spec: ColumnSpec, members: NDArray
    ) -> Iterator[tuple[NDArray, dict[str, NDArray]]]:
        """Columns of some frames; a broken one is found by halving and rejected."""
        if len(members) == 0:
            return
        body = b"".join(
            self.texts[f.text][f.start : f.stop] if f.stop > f.start else b""
            for f in map(self.frames.__getitem__, members.tolist())
        )
        try:
            columns = parse_columns(body, int(self.counts[members].sum()), spec)
        except LineFault as fault:
            if len(members) == 1:
                self._reject(int(members[0]), fault)
                return
            half = len(members) // 2
            yield from self._parse(spec, members[:half])
            yield from self._parse(spec, members[half:])
            return
        yield members, columns

    def _reject(self, i: int, fault: LineFault) -> None:
        frame = self.frames[i]
        reason = fault.reason
        if fault.row is not None:
            reason = f"atom {fault.row}: {reason}"
        self.rejects.append(
            Reject(frame.shown, frame.number, reason, frame.offset, None, fault.field, i)
        )

    def _system(self) -> None:
        columns: dict[str, tuple[FieldLayout, list[int], list[Any]]] = {}
        for i, frame in enumerate(self.frames):
            for name, value in frame.head.system.items():
                found = columns.get(name)
                if found is None:
                    layout = self.schema.get(name)
                    if layout is None:
                        continue
                    found = columns[name] = (layout, [], [])
                found[1].append(i)
                found[2].append(value)
        for name, (layout, where, values) in columns.items():
            if layout.level == "atom":
                if name in self.schema.dropped:
                    continue  # columns of that name are the field
                for i, value in zip(where, values, strict=True):
                    chosen = np.array([i])
                    rows = row_indices(self.ptr, chosen)[0]
                    self._put_atoms(name, np.asarray(value), rows, chosen)
                continue
            self.arrays[name], self.levels[name] = self._column(layout, where, values), "system"
            if len(where) < len(self.frames):
                mask = np.zeros(len(self.frames), dtype=bool)
                mask[where] = True
                self.present[name] = mask

    def _column(self, layout: FieldLayout, where: list[int], values: list[Any]) -> NDArray:
        if layout.dtype == "str":
            texts = np.full(len(self.frames), "", dtype=object)
            texts[where] = [v if isinstance(v, str) else as_text(v.tolist()) for v in values]
            return texts
        dtype = np.dtype(layout.dtype)
        try:
            given = np.array(values, dtype=dtype).reshape(len(values), *layout.tail)
        except (ValueError, TypeError):
            # The schema holds every value that the scan saw.
            raise _changed(self.frames[where[0]].shown, self.frames[where[0]].number) from None
        if len(where) == len(self.frames):
            return given
        out = np.full((len(self.frames), *layout.tail), fill_for(dtype), dtype)
        out[where] = given
        return out

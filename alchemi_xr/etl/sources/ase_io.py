"""Everything else that ASE reads: trajectories by frame, other files one by one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar

from alchemi_xr.errors import SourceError
from alchemi_xr.etl.ase_records import atoms_to_record, fault_of
from alchemi_xr.etl.file_scan import FileScan, joined
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, records_to_block
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["AseSource"]

_OTHERS = ("db", "json", "extxyz", "xyz", "db/postgresql", "db/mysql")
# ASE's readers warn; filters of the warnings module belong to the whole process.
_QUIET = threading.RLock()


class AseSource:
    """Frames of any file that ``ase.io.iread`` understands.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    frames : int
        Frames of a trajectory that one task reads.
    ase_format : str, optional
        ASE's name of the format; by default it finds out.
    """

    name: ClassVar[str] = "ase"

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        frames: int = 500,
        ase_format: str | None = None,
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.frames = frames
        self.ase_format = ase_format
        self.schema: Schema | None = None
        self._formats: dict[int, str] = {}

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether ASE knows the format, by name or first bytes."""
        return (_filetype(path) or "db") not in _OTHERS

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Read every frame once, for its counts and fields."""
        results = map_files(_scan_file, [(self, i) for i in range(len(self.paths))])
        scan = joined(
            results,
            self.paths[0],
            unstored="{name!r} is not stored ({count} frames)",
            target_bytes=4 * 2**20,
            target_samples=self.frames,
        )
        scan.notes += sorted({note for result in results for note in result.notes})
        self.schema = scan.schema
        return scan

    def read(self, partition: Partition) -> PartResult:
        """The frames of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        records: list[Record] = []
        for segment in partition.segments:
            shown = self.paths[segment.file]
            with _quietly():
                for item in self._frames(segment.file, segment.start, segment.stop):
                    if isinstance(item, Exception):
                        raise SourceError(shown, f"a frame cannot be read any more: {item}")
                    records.append(self._record(item, segment.file))
        return PartResult(records_to_block(records, self.schema))

    def _record(self, atoms: Any, number: int) -> Record:
        if atoms.calc is not None and self._format(number).startswith("lammps-dump"):
            # A dump has no energy; ASE makes up a 0 for it.
            atoms.calc.results.pop("energy", None)
        record = atoms_to_record(atoms, self.names)
        record.put("source_file", "system", self.paths[number], self.names)
        return record

    def _format(self, number: int) -> str:
        """ASE's name of a file's format."""
        found = self._formats.get(number)
        if found is None:
            found = self._formats[number] = self.ase_format or _filetype(self.files[number]) or ""
        return found

    def is_trajectory(self, number: int) -> bool:
        """Whether frames can be reached by their number."""
        return self._format(number) == "traj"

    def _frames(self, number: int, start: int, stop: int | None) -> Iterator[Any]:
        """Atoms of the frames in a range; an exception in place of one that fails."""
        if self.is_trajectory(number):
            from ase.io.trajectory import TrajectoryReader

            with TrajectoryReader(self.files[number]) as frames:
                last = len(frames) if stop is None else stop
                for i in range(start, last):
                    try:
                        yield frames[i]
                    except Exception as error:
                        yield error
            return
        from ase.io import iread

        frames = iread(self.files[number], index=":", format=self.ase_format)
        yield from islice(frames, start, stop)


def _scan_file(job: tuple[AseSource, int]) -> FileScan:
    source, number = job
    shown = source.paths[number]
    out = FileScan()
    # Only a trajectory is reached by frame; of other files a task reads all.
    most = source.frames if source.is_trajectory(number) else None
    frame = -1
    try:
        with _quietly() as caught:
            for frame, item in enumerate(source._frames(number, 0, None)):
                fault: tuple[str, str] | None
                if isinstance(item, Exception):
                    record, fault = Record(0), ("", f"{type(item).__name__}: {item}")
                else:
                    record = source._record(item, number)
                    fault = fault_of(record)
                if fault is not None:
                    out.rejects.append(Reject(shown, frame, fault[1], field=fault[0]))
                    continue
                out.take(record, (k for k in record.keys if k != "source_file"))
                segment = Segment(number, frame, frame + 1, frame, 1, record.atoms)
                out.extend(segment, record.atoms * 100, most=most)
        out.notes += [f"{shown}: ASE warns: {w.message}" for w in caught]
    except Exception as error:
        # ASE gives up on the file here; the frames before it stand.
        reason = f"ASE cannot read it ({type(error).__name__}: {error})"
        out.rejects.append(Reject(shown, frame + 1, reason))
        frame += 1
    out.records = frame + 1
    return out


def _filetype(path: str) -> str | None:
    from ase.io.formats import UnknownFileTypeError, filetype

    try:
        with _quietly():
            return str(filetype(path, guess=False))
    except (UnknownFileTypeError, OSError, ValueError):
        return None


@contextmanager
def _quietly() -> Iterator[list[warnings.WarningMessage]]:
    with _QUIET, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught

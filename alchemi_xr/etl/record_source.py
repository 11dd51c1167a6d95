"""The base of a source of one's own: records one after the other, each a mapping of values."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.errors import ConfigError, SourceError, nearest
from alchemi_xr.etl.ase_records import fault_of, put_any, put_structure
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.etl.file_scan import FileScan, joined
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, records_to_block
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.plan.rejects import Reject

__all__ = ["RecordSource"]

_PARTITION_BYTES = 8 * 2**20


class RecordSource(ABC):
    """Files of records that stand one after the other.

    A subclass has a ``name``, ``suffixes``, :meth:`pieces` and :meth:`parse`; it
    gets counts, names, rejects, partitions and resuming from here. (A format of
    large arrays is faster as a class of its own: :class:`~alchemi_xr.etl.Source`.)

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
        Which names in the input are which fields.

    Attributes
    ----------
    name : str
        As in ``format=`` and ``--format``.
    suffixes : tuple of str
        Endings of file names, in small letters.
    units : dict of str to str
        By field: its unit in the format, where that is not the project's own.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    units: ClassVar[Mapping[str, str]] = {}

    def __init__(self, paths: Sequence[str], *, names: NameMap | None = None) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self.files = [os.path.abspath(path) for path in self.paths]
        self.names = names or NameMap()
        self.schema: Schema | None = None

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the suffix."""
        return bool(cls.suffixes) and path.lower().endswith(cls.suffixes)

    @abstractmethod
    def pieces(self, path: str, start: int, stop: int | None) -> Iterator[tuple[int, int, Any]]:
        """The records of a file from one place to another, not parsed yet.

        Parameters
        ----------
        path : str
        start : int
            0, or where a record begins.
        stop : int or None
            Where one ends; None for the end of the file.

        Yields
        ------
        start, stop : int
            Place of the record, in any measure that grows (bytes, row numbers).
        piece : object
            What :meth:`parse` gets.
        """

    @abstractmethod
    def parse(self, piece: Any) -> Mapping[str, Any]:
        """The values of a record by their names in the input.

        ``numbers`` [n] (0 to 118) and ``positions`` [n, 3] have to be there; ``cell`` [3, 3] and
        ``pbc`` [3] may be. All else is a field of systems, or of atoms where the field
        table says so. An error raised here is the reason why the record is rejected.
        """

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Parse every record once, for its counts and fields."""
        results = map_files(self._scan_file, range(len(self.paths)))
        scan = joined(
            results,
            self.paths[0],
            unstored="{name!r} is not stored ({count} records)",
            target_bytes=_PARTITION_BYTES,
        )
        for name, unit in self.units.items():
            if name not in FIELDS:
                known = nearest(name, FIELDS)
                raise ConfigError(f"source {self.name}", f"units: {name!r} is no field. {known}")
            if scan.schema.get(name) is not None:
                scan.units[name] = unit
        self.schema = scan.schema
        return scan

    def read(self, partition: Partition) -> Block:
        """The records of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        records: list[Record] = []
        for segment in partition.segments:
            before = len(records)
            path = self.files[segment.file]
            for start, _, piece in self.pieces(path, segment.start, segment.stop):
                try:
                    records.append(self._record(piece))
                except Exception as error:
                    raise self._changed(segment, f"at {start}: {_reason(error)}") from error
            found = records[before:]
            if (len(found), sum(r.atoms for r in found)) != (segment.frames, segment.atoms):
                raise self._changed(segment, f"{len(found)} records, expected {segment.frames}")
        return records_to_block(records, self.schema)

    def _changed(self, segment: Segment, found: str) -> SourceError:
        return SourceError(
            f"{self.paths[segment.file]}, from record {segment.first}",
            "the file is not what it was when it was scanned",
            found=found,
            mend="do not change the input while it is read; run it again",
        )

    def _scan_file(self, number: int) -> FileScan:
        out = FileScan()
        shown = self.paths[number]
        for start, stop, piece in self.pieces(self.files[number], 0, None):
            frame = out.records
            out.records += 1
            try:
                record = self._record(piece)
                field, reason = fault_of(record) or ("", "")
            except Exception as error:
                field, reason = "", _reason(error)
            if reason:
                out.rejects.append(Reject(shown, frame, reason, start, field=field))
                continue
            out.take(record, record.keys)
            segment = Segment(number, start, stop, frame, 1, record.atoms)
            out.extend(segment, stop - start + 100 * record.atoms, limit=_PARTITION_BYTES)
        return out

    def _record(self, piece: Any) -> Record:
        values = dict(self.parse(piece))
        missing = [name for name in ("numbers", "positions") if name not in values]
        if missing:
            raise KeyError(f"no {missing[0]!r}")
        numbers = _numbers(values.pop("numbers"))
        record = Record(len(numbers))
        cell, pbc = values.pop("cell", None), values.pop("pbc", None)
        periodic = _periodic(cell is not None if pbc is None else pbc)
        put_structure(
            record,
            numbers,
            _positions(values.pop("positions"), len(numbers)),
            [0.0] * 9 if cell is None else cell,
            periodic,
            self.names,
        )
        for name, value in values.items():
            if value is not None:
                put_any(record, str(name), value, self.names)
        return record


def _numbers(given: Any) -> NDArray:
    numbers = np.asarray(given)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iuf"):
        raise ValueError(f"numbers: found {given!r}, expected one atomic number an atom")
    wrong = ~((numbers >= 0) & (numbers < len(SYMBOLS)) & (numbers == np.floor(numbers)))
    if wrong.any():
        found = numbers[wrong][0]
        raise ValueError(f"numbers: found {found}, expected 0 to {len(SYMBOLS) - 1}")
    return numbers


def _positions(given: Any, atoms: int) -> NDArray:
    positions = np.asarray(given)
    if positions.size and positions.dtype.kind not in "iuf":
        raise ValueError("positions: found what is no number")
    # Of another shape, such as [3, n], the numbers would change their places.
    if positions.shape[1:] != (3,) and positions.shape != (3 * atoms,):
        raise ValueError(f"positions: found {list(positions.shape)}, expected [{atoms}, 3]")
    return positions


def _periodic(given: Any) -> NDArray:
    periodic = np.asarray(given)
    if periodic.dtype.kind not in "biuf" or periodic.shape not in ((), (3,)):
        raise ValueError(f"pbc: found {given!r}, expected three of true and false")
    return periodic


def _reason(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return f"{type(error).__name__}: {text}"

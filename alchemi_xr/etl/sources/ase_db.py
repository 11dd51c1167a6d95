"""ASE databases: JSON, SQLite and LMDB files, rows in the order of their ids.

A JSON database is read row by row from its text, never as a whole; the others
by ranges of ids. Key-value pairs and data become custom fields; the row's id and
file are kept as ``source_id`` and ``source_file``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from alchemi_xr.errors import SourceError
from alchemi_xr.etl.ase_records import fault_of, put_any, put_fixed, put_results, put_structure
from alchemi_xr.etl.ase_rows import json_rows, lmdb_metadata, lmdb_rows, sqlite_rows
from alchemi_xr.etl.file_scan import FileScan, joined
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, as_text, records_to_block
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["AseDbSource"]

_JSON_START = re.compile(rb'\s*\{\s*("\d+"\s*:\s*\{|"(ids|nextid|metadata)")')
_LMDB = (".aselmdb", ".lmdb")
_ROWS = 500
# Columns of a row that are no result of a calculator.
_RESULTS = (
    "energy",
    "free_energy",
    "forces",
    "stress",
    "dipole",
    "magmoms",
    "magmom",
    "charges",
    "energies",
    "stresses",
)


class AseDbSource:
    """Rows of ASE JSON, SQLite and LMDB databases.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    rows : int
        Rows that one task reads.
    """

    name: ClassVar[str] = "ase-db"

    def __init__(
        self, paths: Sequence[str], *, names: NameMap | None = None, rows: int = _ROWS
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.rows = rows
        self.schema: Schema | None = None

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the suffix ``.aselmdb``, or the first bytes: SQLite, a JSON object of row ids."""
        if path.lower().endswith(_LMDB):
            return True
        if not path.lower().endswith((".db", ".json")):
            return False
        try:
            with open(path, "rb") as file:
                head = file.read(256)
        except OSError:
            return False
        if head.startswith(b"SQLite format 3\x00"):
            return True
        return path.lower().endswith(".json") and _JSON_START.match(head) is not None

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Read every row once, for its counts and fields."""
        results = map_files(_scan_file, [(self, i) for i in range(len(self.paths))])
        scan = joined(
            results,
            self.paths[0],
            unstored="{name!r} is not stored ({count} rows)",
            target_bytes=16 * 2**20,
            target_samples=self.rows,
        )
        scan.notes += [note for result in results for note in result.notes]
        self.schema = scan.schema
        return scan

    def read(self, partition: Partition) -> PartResult:
        """The rows of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        records: list[Record] = []
        for segment in partition.segments:
            for _, row, _ in self._rows(segment.file, segment.start, segment.stop):
                if isinstance(row, Exception):
                    raise SourceError(self.paths[segment.file], f"a row cannot be read: {row}")
                records.append(self._record(row, segment.file))
        return PartResult(records_to_block(records, self.schema))

    def _rows(
        self, number: int, start: int, stop: int | None
    ) -> Iterator[tuple[int, Any, tuple[int, int]]]:
        """Id, row (or the exception it raised) and place of every row in a range."""
        path = self.files[number]
        if path.lower().endswith(".json"):
            yield from json_rows(path, start, stop)
        elif path.lower().endswith(_LMDB):
            yield from lmdb_rows(path, start, stop)
        else:
            yield from sqlite_rows(path, start, stop, self.rows)

    def _record(self, row: Any, number: int) -> Record:
        names = self.names
        record = Record(len(row.numbers))
        put_structure(record, row.numbers, row.positions, row.cell, row.pbc, names)
        for name in ("momenta", "masses", "tags", "initial_magmoms", "initial_charges"):
            if name in row:
                record.put(name, "atom", np.asarray(row[name]), names)
        put_fixed(record, row.constraints, names)
        put_results(record, {n: row[n] for n in _RESULTS if n in row}, names)
        for name, value in row.key_value_pairs.items():
            put_any(record, name, value, names)
        for name, value in (row.data or {}).items():
            put_any(record, str(name), value, names)
        record.put("source_id", "system", int(row.id), names)
        record.put("source_file", "system", self.paths[number], names)
        return record


def _scan_file(job: tuple[AseDbSource, int]) -> FileScan:
    source, number = job
    shown = source.paths[number]
    out = FileScan(notes=_metadata_notes(source.files[number], shown))
    for identity, row, (start, stop) in source._rows(number, 0, None):
        out.records += 1
        fault: tuple[str, str] | None
        try:
            if isinstance(row, Exception):
                raise row
            record = source._record(row, number)
            fault = fault_of(record)
        except Exception as error:
            record, fault = Record(0), ("", f"{type(error).__name__}: {error}")
        if fault is not None:
            reason = f"row id {identity}: {fault[1]}"
            out.rejects.append(Reject(shown, out.records - 1, reason, field=fault[0]))
            continue
        out.take(record, (k for k in record.keys if not k.startswith("source_")))
        segment = Segment(number, start, stop, out.records - 1, 1, record.atoms)
        out.extend(segment, record.atoms * 100, most=source.rows)
    return out


def _metadata_notes(path: str, shown: str) -> list[str]:
    """What the database says of itself (units, say): told, not applied."""
    metadata: dict[str, Any] = {}
    if path.lower().endswith(_LMDB):
        metadata = lmdb_metadata(path)
    elif not path.lower().endswith(".json"):
        from ase.db import connect

        metadata = dict(connect(path, use_lock_file=False).metadata or {})
    units = {k: v for k, v in metadata.items() if "unit" in k.lower()}
    if not units:
        return []
    return [f"{shown}: units in the database's metadata (not applied): {as_text(units)}"]

"""ASE databases: JSON, SQLite and LMDB files, rows in the order of their ids.

A JSON database is read row by row from its text, never as a whole; the others
by ranges of ids. Key-value pairs and data become custom fields; the row's id and
file are kept as ``source_id`` and ``source_file``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.ase_forms import EXTRAS, RESULTS, Form, Forms
from alchemi_xr.etl.ase_packed import PackedForm, PackedForms
from alchemi_xr.etl.ase_records import fault_of, put_any, put_fixed, put_results, put_structure
from alchemi_xr.etl.ase_rows import PackedRow, json_rows, lmdb_metadata, lmdb_rows
from alchemi_xr.etl.ase_sqlite import sqlite_rows
from alchemi_xr.etl.batch_spool import Spooled, Spooling
from alchemi_xr.etl.file_scan import FileScan, joined
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, as_text
from alchemi_xr.etl.row_batch import Group, groups_of, groups_to_block
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["AseDbSource"]

_JSON_START = re.compile(rb'\s*\{\s*("\d+"\s*:\s*\{|"(ids|nextid|metadata)")')
_LMDB = (".aselmdb", ".lmdb")
_ROWS = 500
# A batch has as many atoms at most, unless it is of one row.
_ATOMS = 200_000


class AseDbSource:
    """Rows of ASE JSON, SQLite and LMDB databases.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    rows : int
        Rows that one task reads.
    spool : str, optional
        Folder in which the scan puts down what it has decoded, for the reading;
        without it, rows are decoded twice.
    """

    name: ClassVar[str] = "ase-db"

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        rows: int = _ROWS,
        spool: str | None = None,
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.rows = rows
        self.schema: Schema | None = None
        self._spool = spool
        self._spooled: dict[int, Spooled] = {}

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
        self._spooled = {i: r.spooled for i, r in enumerate(results) if r.spooled is not None}
        return scan

    def read(self, partition: Partition) -> PartResult:
        """The rows of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        groups: list[Group] = []
        places: list[IntArray] = []
        base = 0
        for segment in partition.segments:
            found = self._groups(segment)
            groups += found
            places += [g.numbers - segment.first + base for g in found]
            base += sum(len(g.atoms) for g in found)
        return PartResult(groups_to_block(groups, places, self.schema))

    def _groups(self, segment: Segment) -> list[Group]:
        """The rows of a segment: as the scan has put them down, or decoded again."""
        if segment.file in self._spooled:
            try:
                return self._spooled[segment.file].read(
                    segment.first, segment.first + segment.frames
                )
            except OSError:
                pass  # the scan ran elsewhere, say
        path = self.paths[segment.file]
        forms = self._forms(segment.file)
        packed = PackedForms(forms)
        groups: list[Group] = []
        number = segment.first
        for batch in _batches(self._rows(segment.file, segment.start, segment.stop), self.rows):
            sorting = _Sorting(forms, packed)
            for _, row, _ in batch:
                if isinstance(row, Exception):
                    raise SourceError(path, f"a row cannot be read: {row}")
                sorting.add(number, row)
                number += 1
            groups += sorting.groups()
        return groups

    def _forms(self, number: int) -> Forms:
        return Forms(self.names, self.paths[number], lambda row: self._record(row, number))

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
        for name in EXTRAS:
            if name in row:
                record.put(name, "atom", np.asarray(row[name]), names)
        put_fixed(record, row.constraints, names)
        put_results(record, {n: row[n] for n in RESULTS if n in row}, names)
        for name, value in row.key_value_pairs.items():
            put_any(record, name, value, names)
        for name, value in (row.data or {}).items():
            put_any(record, str(name), value, names)
        record.put("source_id", "system", int(row.id), names)
        record.put("source_file", "system", self.paths[number], names)
        return record


@dataclass
class _DbScan(FileScan):
    """With what the scan has put down, if it could."""

    spooled: Spooled | None = None


class _Sorting:
    """The rows of a batch, by their form."""

    def __init__(self, forms: Forms, packed: PackedForms) -> None:
        self.forms, self.packed = forms, packed
        self.alike: dict[Form | PackedForm, list[tuple[int, Any]]] = {}
        self.others: list[tuple[int, Record]] = []

    def add(self, number: int, row: Any) -> Form | PackedForm | Record:
        """Take a row at a place in its file; what is known of it then."""
        form: Form | PackedForm | None = None
        if type(row) is PackedRow:
            form = self.packed.form_of(row)
            if form is None:
                row = row.plain()
        if form is None:
            form = self.forms.form_of(row)
        if form is None:
            record = self.forms.record_of(row)
            self.others.append((number, record))
            return record
        self.alike.setdefault(form, []).append((number, row))
        return form

    def groups(self) -> list[Group]:
        # Each kind of form makes groups of its own kind of rows.
        return [
            *(form.group(rows, self.forms.path) for form, rows in self.alike.items()),
            *groups_of(self.others),
        ]


def _scan_file(job: tuple[AseDbSource, int]) -> _DbScan:
    source, number = job
    shown = source.paths[number]
    out = _DbScan(notes=_metadata_notes(source.files[number], shown))
    forms = source._forms(number)
    packed = PackedForms(forms)
    with Spooling(source._spool, f"ase-db-{number:06d}") as spooling:
        for batch in _batches(source._rows(number, 0, None), source.rows):
            spooling.put(_take(out, batch, _Sorting(forms, packed), shown, number, source.rows))
        out.spooled = spooling.finish()
    return out


def _take(
    out: FileScan, batch: Sequence[Any], sorting: _Sorting, shown: str, number: int, most: int
) -> list[Group]:
    """Count in a batch of rows; the good ones as groups."""
    good: list[tuple[int, int, int, int]] = []
    for identity, row, (start, stop) in batch:
        place = out.records
        out.records += 1
        fault: tuple[str, str] | None = None
        try:
            if isinstance(row, Exception):
                raise row
            found = sorting.add(place, row)
            if isinstance(found, Record):
                fault = fault_of(found)
        except Exception as error:
            fault = "", f"{type(error).__name__}: {error}"
        if fault is not None:
            if sorting.others and sorting.others[-1][0] == place:
                sorting.others.pop()
            reason = f"row id {identity}: {fault[1]}"
            out.rejects.append(Reject(shown, place, reason, field=fault[0]))
            continue
        if isinstance(found, Record):
            atoms = found.atoms
            out.unstored.update(found.unstored)
            found.observe(out.observer)
            out.keys.update(k for k in found.keys if not k.startswith("source_"))
        else:
            atoms = sorting.alike[found][-1][1].atoms
            if len(sorting.alike[found]) == 1:
                # Names are told in the order in which they are met.
                out.keys.update(dict.fromkeys(found.keys, 0))
        good.append((place, start, stop, atoms))
    for form, rows in sorting.alike.items():
        for key in form.keys:
            out.keys[key] += len(rows)
    groups = sorting.groups()
    for group in groups[: len(sorting.alike)]:
        group.observe(out.observer)
    out.atoms.extend(one[3] for one in good)
    out.extend_all(number, good, 100, most)
    return groups


def _batches(rows: Iterator[Any], most: int) -> Iterator[list[Any]]:
    """Rows in lists, not too many or too large ones."""
    batch: list[Any] = []
    atoms = 0
    for item in rows:
        batch.append(item)
        atoms += getattr(item[1], "atoms", 1000)
        if len(batch) >= most or atoms > _ATOMS:
            yield batch
            batch, atoms = [], 0
    if batch:
        yield batch


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

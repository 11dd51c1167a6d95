"""Atompack files (``.atp``), through the atompack package: whole batches as flat arrays."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import BoolArray, IntArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.ase_records import fault_of
from alchemi_xr.etl.atompack_index import MAGIC, AtompackIndex, read_index
from alchemi_xr.etl.atompack_rows import (
    AtompackBatch,
    AtompackColumn,
    AtompackReader,
    columns_to_block,
)
from alchemi_xr.etl.file_scan import FileScan, joined
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, records_to_block
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["AtompackSource"]

_STEP_BYTES = 16 * 2**20
_NO_UNITS = (
    "atompack files name no units but Å for positions: what units= (--units) does not say is "
    "taken as it stands"
)
_TAIL = (
    "{}: {} bytes behind the last flush are not read (of a writer that was stopped or goes on, "
    "or the newest header is damaged)"
)
_NO_NAMES = (
    "{}: of {} molecules without a tensor that others have the package does not give the name "
    "(a name of theirs is not stored)"
)


class AtompackSource:
    """Molecules of atompack files.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    rows : int
        Molecules that one task reads at most.
    """

    name: ClassVar[str] = "atompack"

    def __init__(
        self, paths: Sequence[str], *, names: NameMap | None = None, rows: int = 4096
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.rows = rows
        self.schema: Schema | None = None
        self._found: list[AtompackIndex | None] = []

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the suffix ``.atp``, or the first bytes."""
        if path.lower().endswith(".atp"):
            return True
        try:
            with open(path, "rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Read every molecule once: which properties it has, and whether it is whole."""
        import_optional("atompack", extra="atompack", why=self.paths[0])
        found = map_files(_scan_file, [(self, i) for i in range(len(self.paths))])
        self._found = [index for _, index in found]
        scan = joined(
            [result for result, _ in found],
            self.paths[0],
            unstored="{name!r} is not stored ({count} molecules)",
            target_bytes=_STEP_BYTES,
            target_samples=self.rows,
        )
        scan.notes += [_NO_UNITS, *(note for result, _ in found for note in result.notes)]
        self.schema = scan.schema
        return scan

    def read(self, partition: Partition) -> PartResult:
        """The molecules of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        blocks = []
        for number, segments in groupby(partition.segments, key=lambda s: s.file):
            rows = np.concatenate([np.arange(s.start, s.stop) for s in segments])
            blocks.append(self._block(number, rows))
        block = blocks[0] if len(blocks) == 1 else Block.concat(blocks)
        if block.num_atoms != partition.atoms:
            raise self._changed(partition.segments[0].file)
        return PartResult(block)

    def _block(self, number: int, rows: IntArray) -> Block:
        assert self.schema is not None
        index = read_index(self.files[number], self.paths[number])
        if index != self._found[number]:
            raise self._changed(number)
        first = int(rows[0])
        atoms = index.entries(self.files[number], first, int(rows[-1]) + 1)["atoms"]
        reader = AtompackReader(self.files[number], self.paths[number], self.names)
        batch = reader.batch(rows, atoms[rows - first].astype(np.int64), known=True)
        if batch.columns is not None:
            block = columns_to_block(batch.columns, batch.atoms, self.schema, self.names)
            if block is not None:
                return block
            batch = reader.records(rows, batch.atoms)
        records = []
        for row, record in zip(rows.tolist(), batch.records or [], strict=True):
            if not isinstance(record, Record):
                raise SourceError(self.paths[number], f"molecule {row} cannot be read: {record[1]}")
            records.append(record)
        return records_to_block(records, self.schema)

    def _changed(self, number: int) -> SourceError:
        return SourceError(
            self.paths[number],
            "the file is not what it was when it was scanned",
            mend="do not change the input while it is read; run it again",
        )


def _scan_file(job: tuple[AtompackSource, int]) -> tuple[FileScan, AtompackIndex | None]:
    source, number = job
    shown, path = source.paths[number], source.files[number]
    out = FileScan()
    try:
        index = read_index(path, shown)
        _check_schema(index, path, shown)
        reader = AtompackReader(path, shown, source.names)
    except SourceError as error:
        out.rejects.append(Reject(shown, -1, _one_line(error, shown)))
        out.records = 1
        return out, None
    if index.tail_bytes:
        out.notes.append(_TAIL.format(shown, index.tail_bytes))
    out.records = index.molecules
    nameless = 0
    for start, entries in _batches(index, path, source.rows):
        good = index.possible(entries)
        for i in np.flatnonzero(~good).tolist():
            out.rejects.append(Reject(shown, start + i, _impossible(entries[i])))
        rows = np.flatnonzero(good)
        if len(rows):
            atoms = entries["atoms"][rows].astype(np.int64)
            batch = reader.batch(start + rows, atoms)
            faults = _take(out, batch, source.names)
            nameless += batch.nameless
            for i, (name, reason) in faults.items():
                out.rejects.append(Reject(shown, start + int(rows[i]), reason, field=name))
            good[rows[list(faults)]] = False
        _put_segments(out, number, start, entries, good, _cost(index, entries))
    if nameless:
        out.notes.append(_NO_NAMES.format(shown, nameless))
    out.rejects.sort(key=lambda r: r.frame)
    return out, index


def _one_line(error: SourceError, shown: str) -> str:
    return str(error).splitlines()[0].removeprefix(f"{shown}: ").rstrip(".")


def _check_schema(index: AtompackIndex, path: str, shown: str) -> None:
    """Refuse a property larger than the largest molecule: the flat read would make room for it."""
    largest = max((int(e["size"].max()) for _, e in index.pieces(path)), default=0)
    if index.largest_property > largest:
        raise SourceError(
            shown,
            f"the schema is damaged: a property of {index.largest_property} bytes, while the "
            f"largest molecule has {largest}",
            mend="restore the file",
        )


def _batches(index: AtompackIndex, path: str, rows: int) -> Iterator[tuple[int, NDArray]]:
    """Entries of the index, so many that flat arrays of them are of a bounded size."""
    for begin, entries in index.pieces(path):
        total = np.cumsum(_cost(index, entries))
        edges = {0, len(entries), *range(0, len(entries), rows)}
        steps = np.arange(_STEP_BYTES, int(total[-1]), _STEP_BYTES)
        edges.update(np.searchsorted(total, steps).tolist())
        for a, b in pairwise(sorted(edges)):
            yield begin + a, entries[a:b]


def _cost(index: AtompackIndex, entries: NDArray) -> IntArray:
    """Bytes of each molecule, as a record or in flat arrays."""
    # Positions, of single or double precision, and the element, beside what the schema has.
    atoms = entries["atoms"].astype(np.int64)
    flat = index.sample_bytes + (index.atom_bytes + 25) * atoms
    return np.where(index.possible(entries), np.maximum(entries["size"], flat), 0).astype(np.int64)


def _impossible(entry: Any) -> str:
    offset, stored, size, atoms = (int(v) for v in entry)
    return (
        f"the index is damaged: {atoms} atoms in {size} bytes ({stored} stored) at byte {offset} "
        "cannot be"
    )


def _put_segments(
    out: FileScan, number: int, start: int, entries: NDArray, good: BoolArray, size: IntArray
) -> None:
    """Runs of good molecules."""
    atoms = entries["atoms"].astype(np.int64)
    out.atoms.frombytes(atoms[good].tobytes())
    edges = np.flatnonzero(np.diff(good, prepend=False, append=False)).tolist()
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        segment = Segment(number, start + a, start + b, start + a, b - a, int(atoms[a:b].sum()))
        out.segments.append((segment, int(size[a:b].sum())))


def _take(out: FileScan, batch: AtompackBatch, names: NameMap) -> dict[int, tuple[str, str]]:
    """Count in what a batch has; by place in it: field and reason of each fault."""
    faults: dict[int, tuple[str, str]] = {}
    if batch.columns is None:
        for i, record in enumerate(batch.records or []):
            fault = _fault(record, names) if isinstance(record, Record) else record
            if fault is not None:
                faults[i] = fault
            elif isinstance(record, Record):
                record.observe(out.observer)
                out.keys.update(set(record.keys))
                out.unstored.update(record.unstored)
        return faults
    numbers = batch.columns[0].values
    atoms = np.flatnonzero((numbers < 1) | (numbers > 118))
    samples = np.searchsorted(counts_to_ptr(batch.atoms), atoms, side="right") - 1
    good = np.ones(len(batch.atoms), dtype=bool)
    for i in np.unique(samples).tolist():
        good[i] = False
        faults[i] = _odd_element(numbers[np.repeat(np.arange(len(good)) == i, batch.atoms)])
    out.observer.num_samples += int(good.sum())
    for column in batch.columns:
        _observe(out.observer, column, column.present & good, batch.atoms, names)
        out.keys[column.name] += int((column.present & good).sum())
    return faults


def _fault(record: Record, names: NameMap) -> tuple[str, str] | None:
    numbers = record.atom[names.target("atomic_numbers", "atom").name]
    if ((numbers < 1) | (numbers > 118)).any():
        return _odd_element(numbers)
    return fault_of(record)


def _odd_element(numbers: NDArray) -> tuple[str, str]:
    atom = int(np.flatnonzero((numbers < 1) | (numbers > 118))[0])
    return (
        "atomic_numbers",
        f"atom {atom} has the atomic number {numbers[atom]}, expected 1 to 118",
    )


def _observe(
    observer: FieldObserver,
    column: AtompackColumn,
    there: BoolArray,
    atoms: IntArray,
    names: NameMap,
) -> None:
    target = names.target(column.name, column.level).name
    dtype = "str" if column.values.dtype == object else column.values.dtype.name
    if column.name == "atomic_numbers":
        dtype = "int64"
    if column.level == "system" and column.tail:
        # Some arrays of a molecule may be one row an atom: their lengths tell.
        for size, count in Counter(atoms[there].tolist()).items():
            observer.see(target, "system", dtype, column.tail, count=count, atoms=size)
    elif there.any():
        observer.see(target, column.level, dtype, column.tail, count=int(there.sum()))

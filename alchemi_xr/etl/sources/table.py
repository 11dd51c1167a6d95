"""Parquet and Arrow tables, also those of Hugging Face data sets: a row is a sample.

Columns become fields by their names or the user's map. A table that our own
export wrote says level, shape and unit of each column; in any other a list with
one entry an atom in every row is a field of atoms, and the report says so.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import FIELDS, fill_for
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.etl.names import Contest, NameMap
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, pack, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["TableSource"]

_PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".feather")
_ALIASES = {
    **dict.fromkeys(("numbers", "z", "Z", "species", "elements", "symbols"), "atomic_numbers"),
    **dict.fromkeys(("pos", "coordinates", "coords"), "positions"),
    **dict.fromkeys(("lattice", "lattice_vectors"), "cell"),
}
_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}


@dataclass
class _Column:
    """Leaves of a column, and how many each row has."""

    values: NDArray
    leaves: IntArray
    outer: IntArray
    null: BoolArray
    depth: int


@dataclass
class _Seen:
    dtype: str = "bool"
    text: bool = False
    leaves: set[int] = field(default_factory=set)
    per_atom: set[int] = field(default_factory=set)
    ragged: bool = False
    count: int = 0
    depth: int = 0


class TableSource:
    """Rows of Parquet and Arrow files.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    rows : int
        Rows that one task reads at most.
    """

    name: ClassVar[str] = "table"

    def __init__(
        self, paths: Sequence[str], *, names: NameMap | None = None, rows: int = 4096
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.rows = rows
        self.schema: Schema | None = None
        self._firsts: list[list[int]] = []
        self._columns: dict[str, str] = {}

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the suffix."""
        return path.lower().endswith(_PARQUET + _ARROW)

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Look at every column once, group by group."""
        results = map_files(_scan_file, [(self, i) for i in range(len(self.paths))])
        self._firsts = [r["firsts"] for r in results]
        described: dict[str, Any] = {}
        seen: dict[str, _Seen] = {}
        for result in results:
            described |= result["described"]
            for name, theirs in result["seen"].items():
                _merge(seen.setdefault(name, _Seen()), theirs)
        total = sum(len(r["atoms"]) for r in results)
        notes: list[str] = []
        observer, units = FieldObserver(), {}
        observer.num_samples = total
        for name, found in sorted(seen.items(), key=lambda kv: self._rank(kv[0])):
            placed = self._place(name, found, described.get(name), notes)
            if placed is None:
                continue
            target, level, dtype, tail = placed
            if target in self._columns:
                both = min(found.count, seen[self._columns[target]].count)
                observer.contest([Contest(target, self._columns[target], name)], count=both)
                continue
            self._columns[target] = name
            observer.see(target, level, dtype, tail, count=found.count)
            unit = (described.get(name) or {}).get("unit")
            if unit:
                units[target] = unit
        schema = observer.schema(self.paths[0])
        self.schema = replace(schema, layouts=tuple(_with_unit(x, units) for x in schema))
        atoms = np.concatenate([r["atoms"] for r in results]).astype(np.int64)
        edges = np.concatenate([r["edges"] for r in results]).astype(np.int64)
        if self.schema.get("neighbor_list") is None:
            edges[:] = 0
        partitions = pack(
            (s for r in results for s in r["segments"]),
            target_bytes=16 * 2**20,
            target_samples=self.rows,
        )
        at, counted = 0, []
        for partition in partitions:
            stop = at + partition.samples
            counted.append(replace(partition, edges=int(edges[at:stop].sum())))
            at = stop
        return Scan(
            counted,
            atoms,
            edges,
            self.schema,
            [reject for r in results for reject in r["rejects"]],
            notes,
            {name: found.count for name, found in seen.items()},
            sum(r["records"] for r in results),
            units={
                n: u
                for n, u in units.items()
                if n in FIELDS and u != FIELDS[n].unit and self.schema.get(n)
            },
        )

    def _rank(self, name: str) -> tuple[int, bool, str]:
        order = list(self.names.mapping)
        return (order.index(name) if name in order else len(order), name not in FIELDS, name)

    def _meaning(self, name: str) -> str:
        if name in self.names.mapping:
            return self.names.mapping[name]
        return _ALIASES.get(name, name)

    def _place(
        self, name: str, found: _Seen, said: Mapping[str, Any] | None, notes: list[str]
    ) -> tuple[str, Level, str, tuple[int, ...]] | None:
        """Field, level, dtype and row shape of a column; None when it is not stored."""
        if found.count == 0:
            return None
        meant = self._meaning(name)
        level: Level
        if said is not None:
            level, tail = said["level"], tuple(int(t) for t in said["tail"])
            if level == "system" and tail == (1,) and meant not in FIELDS:
                tail = (1,)
            return self.names.target(meant, level).name, level, _kind(found), tail
        spec = FIELDS.get(self.names.target(meant, "atom").name) or FIELDS.get(
            self.names.target(meant, "system").name
        )
        if meant == "atomic_numbers":
            return meant, "atom", "int64", ()
        if spec is not None and all(isinstance(t, int) for t in spec.tail):
            size = int(np.prod([int(t) for t in spec.tail]))
            fits = found.per_atom if spec.level == "atom" else found.leaves
            if spec.level != "edge" and fits != {size}:
                notes.append(
                    f"{name!r} is not stored: rows of {sorted(fits)[:3]} numbers, {spec.name} "
                    f"has {size}"
                )
                return None
            tail = tuple(int(t) for t in spec.tail)
            return spec.name, spec.level, _kind(found), tail
        if found.text:
            if found.depth:
                notes.append(f"{name!r} is not stored: lists of text have no place in a store")
                return None
            return self.names.target(meant, "system").name, "system", "str", ()
        if found.depth and len(found.per_atom) == 1 and (len(found.leaves) > 1 or found.depth > 1):
            each = found.per_atom.pop()
            if each and not found.ragged:
                notes.append(f"{name!r}: taken as one row an atom, by the lengths of its lists")
                tail = (each,) if each > 1 else ()
                return self.names.target(meant, "atom").name, "atom", _kind(found), tail
        if len(found.leaves) == 1:
            size = found.leaves.pop()
            tail = (size,) if found.depth else ()
            return self.names.target(meant, "system").name, "system", _kind(found), tail
        notes.append(f"{name!r} is not stored: its rows have several lengths")
        return None

    def read(self, partition: Partition) -> PartResult:
        """The rows of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        blocks = []
        for segment in partition.segments:
            firsts = self._firsts[segment.file]
            unit = bisect_right(firsts, segment.start) - 1
            with _Table(self.files[segment.file], self.paths[segment.file]) as table:
                part = table.group(unit)
            at = segment.start - firsts[unit]
            blocks.append(self._block(part.slice(at, segment.stop - segment.start), segment))
        return PartResult(blocks[0] if len(blocks) == 1 else Block.concat(blocks))

    def _block(self, part: Any, segment: Segment) -> Block:
        assert self.schema is not None
        columns = {
            n: column
            for n in self._columns.values()
            if n in part.column_names and (column := _column(part.column(n))) is not None
        }
        numbers = columns[self._columns["atomic_numbers"]]
        atoms_ptr = counts_to_ptr(numbers.leaves)
        edges = columns.get(self._columns.get("neighbor_list", ""))
        edges_ptr = counts_to_ptr(
            edges.outer if edges is not None else np.zeros_like(numbers.leaves)
        )
        if int(atoms_ptr[-1]) != segment.atoms:
            raise SourceError(
                self.paths[segment.file],
                "the file is not what it was when it was scanned",
                mend="do not change the input while it is read; run it again",
            )
        arrays: dict[str, NDArray] = {}
        levels: dict[str, Level] = {}
        present: dict[str, BoolArray] = {}
        counts = {"atom": np.diff(atoms_ptr), "edge": np.diff(edges_ptr)}
        for layout in self.schema:
            column = columns.get(self._columns[layout.name])
            if column is None or column.null.all():
                continue
            dtype = np.dtype(object) if layout.dtype == "str" else np.dtype(layout.dtype)
            each = counts.get(layout.level, np.ones(len(numbers.leaves), np.int64))
            values = (
                _as_numbers(column.values) if layout.name == "atomic_numbers" else column.values
            )
            rows = values.reshape(-1, *layout.tail).astype(dtype, copy=False)
            if column.null.any():
                there = ~np.repeat(column.null, each)
                full = np.full((int(each.sum()), *layout.tail), fill_for(dtype), dtype)
                full[there] = rows[there] if len(rows) == len(full) else rows
                rows = full
                present[layout.name] = ~column.null
            arrays[layout.name], levels[layout.name] = rows, layout.level
        return Block(atoms_ptr, edges_ptr, arrays, levels, present)


class _Table:
    """A Parquet or Arrow file by groups of rows."""

    def __init__(self, path: str, shown: str) -> None:
        self._pa = pa = import_optional("pyarrow", extra="table", why=shown)
        self._shown = shown
        try:
            if path.lower().endswith(_PARQUET):
                pq = import_optional("pyarrow.parquet", extra="table", why=shown)
                self._file = pq.ParquetFile(path)
                self.sizes = [
                    self._file.metadata.row_group(i).num_rows
                    for i in range(self._file.num_row_groups)
                ]
                self.schema = self._file.schema_arrow
                self._batches: list[Any] | None = None
            else:
                self._file = pa.memory_map(path)
                try:
                    reader = pa.ipc.open_file(self._file)
                    self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
                except pa.ArrowInvalid:
                    # Hugging Face writes the stream form.
                    reader = pa.ipc.open_stream(self._file)
                    self._batches = list(reader)
                self.schema = reader.schema
                self.sizes = [b.num_rows for b in self._batches]
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                shown, f"is no whole Parquet or Arrow file ({error})", mend="restore the file"
            ) from error

    def group(self, i: int) -> Any:
        try:
            if self._batches is not None:
                return self._pa.Table.from_batches([self._batches[i]])
            return self._file.read_row_group(i)
        except (self._pa.ArrowException, OSError) as error:
            raise SourceError(
                self._shown, f"rows of group {i} cannot be read ({error})", mend="restore the file"
            ) from error

    def described(self) -> dict[str, Any]:
        """What our own export says of the columns."""
        packed = (self.schema.metadata or {}).get(b"alchemi_xr")
        return {} if packed is None else dict(json.loads(packed))

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches = None
        self._file.close()


def _scan_file(job: tuple[TableSource, int]) -> dict[str, Any]:
    source, number = job
    shown = source.paths[number]
    out: dict[str, Any] = {
        "firsts": [0],
        "described": {},
        "seen": {},
        "atoms": np.zeros(0, np.int64),
        "edges": np.zeros(0, np.int64),
        "segments": [],
        "rejects": [],
        "records": 0,
    }
    try:
        with _Table(source.files[number], shown) as table:
            out["described"] = table.described()
            out["firsts"] = np.cumsum([0, *table.sizes]).tolist()
            roles = {source._meaning(n): n for n in reversed(table.schema.names)}
            for need in ("positions", "atomic_numbers"):
                if need not in roles:
                    raise SourceError(
                        shown,
                        f"no column is known as {need} (found: {', '.join(table.schema.names)}; "
                        f"name it with --map THEIRS={need})",
                    )
            for unit in range(len(table.sizes)):
                _scan_group(out, table.group(unit), roles, number, unit, source)
    except SourceError as error:
        out["rejects"].append(Reject(shown, out["records"], error.what))
        out["records"] += 1
    return out


def _scan_group(
    out: dict[str, Any],
    part: Any,
    roles: Mapping[str, str],
    number: int,
    unit: int,
    source: TableSource,
) -> None:
    shown, first = source.paths[number], out["firsts"][unit]
    columns = {n: c for n in part.column_names if (c := _column(part.column(n))) is not None}
    numbers, places = columns[roles["atomic_numbers"]], columns[roles["positions"]]
    n = numbers.leaves
    bad: dict[int, tuple[str, str]] = {}
    values = _as_numbers(numbers.values)
    wrong = (values < 1) | (values > 118)
    for f in np.unique(np.repeat(np.arange(len(n)), n)[wrong]).tolist():
        bad[f] = ("atomic_numbers", "an atomic number is not in 1 to 118")
    for f in np.flatnonzero(places.leaves != 3 * n).tolist():
        bad[f] = ("positions", f"found {places.leaves[f]} numbers for {n[f]} atoms")
    for f in np.flatnonzero(numbers.null | places.null).tolist():
        bad[f] = ("positions", "positions or atomic numbers are null")
    for name, column in columns.items():
        spec = FIELDS.get(source._meaning(name))
        if (
            spec is None
            or spec.level == "edge"
            or name in (roles["positions"], roles["atomic_numbers"])
        ):
            continue
        size = int(np.prod([t for t in spec.tail if isinstance(t, int)]))
        want = size * (n if spec.level == "atom" else np.ones_like(n))
        if all(isinstance(t, int) for t in spec.tail):
            for f in np.flatnonzero((column.leaves != want) & ~column.null).tolist():
                why = f"found {column.leaves[f]} numbers, expected {want[f]}"
                bad.setdefault(f, (spec.name, why))
    good = np.ones(len(n), dtype=bool)
    good[list(bad)] = False
    for f, (name, why) in sorted(bad.items()):
        out["rejects"].append(Reject(shown, first + f, why, field=name))
    for name, column in columns.items():
        _look(out["seen"].setdefault(name, _Seen()), column, n, good)
    edges = columns.get(roles.get("neighbor_list", ""))
    out["atoms"] = np.concatenate((out["atoms"], n[good]))
    more = np.zeros_like(n) if edges is None else edges.outer
    out["edges"] = np.concatenate((out["edges"], more[good]))
    out["records"] += len(n)
    row = max(1, part.nbytes // max(len(n), 1))
    for a, b in _runs(good):
        for at in range(a, b, source.rows):
            stop = min(at + source.rows, b)
            atoms = int(n[at:stop].sum())
            segment = Segment(number, first + at, first + stop, first + at, stop - at, atoms)
            out["segments"].append((segment, row * (stop - at)))


def _runs(good: BoolArray) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], good, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _look(seen: _Seen, column: _Column, n: IntArray, good: BoolArray) -> None:
    here = good & ~column.null
    seen.count += int(here.sum())
    seen.depth = max(seen.depth, column.depth)
    if column.values.dtype.kind not in "biuf":
        seen.text = True
    else:
        seen.dtype = np.result_type(np.dtype(seen.dtype), column.values.dtype).name
    if len(seen.leaves) < 3:
        seen.leaves.update(np.unique(column.leaves[here])[:3].tolist())
    some = here & (n > 0)
    each, rest = np.divmod(column.leaves[some], n[some])
    seen.ragged |= bool(rest.any())
    if len(seen.per_atom) < 3:
        seen.per_atom.update(np.unique(np.where(rest == 0, each, 0))[:3].tolist())


def _merge(ours: _Seen, theirs: _Seen) -> None:
    ours.count += theirs.count
    ours.text |= theirs.text
    ours.ragged |= theirs.ragged
    ours.depth = max(ours.depth, theirs.depth)
    ours.leaves |= theirs.leaves
    ours.per_atom |= theirs.per_atom
    ours.dtype = np.result_type(np.dtype(ours.dtype), np.dtype(theirs.dtype)).name


def _kind(found: _Seen) -> str:
    return "str" if found.text else found.dtype


def _column(chunked: Any) -> _Column | None:
    """A column flattened to its leaves; None for structs and the like."""
    import pyarrow as pa

    array = chunked.combine_chunks() if isinstance(chunked, pa.ChunkedArray) else chunked
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    null = np.asarray(array.is_null())
    counts = np.ones(len(array), np.int64)
    counts[null] = 0
    outer, depth = counts, 0
    while (
        pa.types.is_list(array.type)
        or pa.types.is_large_list(array.type)
        or (pa.types.is_fixed_size_list(array.type))
    ):
        lengths = np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
        array = array.flatten()
        if depth == 0:
            counts = np.where(null, 0, lengths)
            outer = counts
        else:
            ends = np.concatenate(([0], np.cumsum(lengths)))
            rows = np.concatenate(([0], np.cumsum(counts)))
            counts = ends[rows[1:]] - ends[rows[:-1]]
        depth += 1
    if depth == 0 and null.any():
        counts = np.where(null, 0, 1)
        array = array.drop_null()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        values = np.array(array.to_pylist(), dtype=object)
    elif (
        pa.types.is_boolean(array.type)
        or pa.types.is_integer(array.type)
        or pa.types.is_floating(array.type)
    ):
        values = array.to_numpy(zero_copy_only=False)
    else:
        return None
    return _Column(values, counts, outer, null, depth)


def _as_numbers(values: NDArray) -> IntArray:
    if values.dtype.kind in "OSU":
        return np.array([_NUMBERS.get(str(v), -1) for v in values.tolist()], dtype=np.int64)
    return values.astype(np.int64, copy=False)


def _with_unit(layout: FieldLayout, units: Mapping[str, str]) -> FieldLayout:
    if layout.name in units and layout.name not in FIELDS:
        return replace(layout, unit=units[layout.name])
    return layout

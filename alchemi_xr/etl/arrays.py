"""For sources whose files hold whole arrays of frames: NPZ, HDF5, DeePMD and the like.

A file gives tables (one molecule's conformations, one set, the whole file), a
table gives arrays by name with one row a frame. Padding never becomes atoms,
rows are read by slices, and what a name means is told by the source's aliases
and the user's map; a level that only a shape tells is noted in the report.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, ClassVar, Protocol

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import FIELDS, fill_for, resolve
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.etl.names import Contest, NameMap
from alchemi_xr.etl.records import voigt_to_matrix
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, no_edges, pack, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.units import conversion_factor

__all__ = ["ALIASES", "ArraySource", "Arrays", "Opened", "Place", "Table", "TableFault"]

Arrays = Mapping[str, Any]
Place = tuple[int, str, tuple[int, ...]]
"""By name in the file: anything with ``shape``, ``dtype`` and slices along its first axis."""

COUNT, MASK = "num_atoms", "mask"
"""What an alias calls the number of atoms of a frame, and the mask of true atoms."""

ALIASES: dict[str, str] = {
    **dict.fromkeys(("R", "coords", "coordinates", "positions", "pos", "xyz"), "positions"),
    **dict.fromkeys(("Z", "z", "nuclear_charges", "atomic_numbers", "species"), "atomic_numbers"),
    **dict.fromkeys(("E", "energy", "energies"), "energy"),
    **dict.fromkeys(("F", "force", "forces"), "forces"),
    **dict.fromkeys(("N", "n_atoms", "num_atoms", "natoms"), COUNT),
    **dict.fromkeys(("node_mask", "atom_mask", "mask"), MASK),
    **dict.fromkeys(("Q", "total_charge"), "charge"),
    **dict.fromkeys(("D", "dipole", "dipoles"), "dipole"),
    **dict.fromkeys(("unit_cell", "cell", "lattice"), "cell"),
    "pbc": "pbc",
}
_STEP_BYTES = 16 * 2**20
_NO_ELEMENT = 2**31 - 1
_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}


class Opened(Protocol):
    """A file while it is read."""

    def keys(self) -> Iterator[str]: ...

    def arrays(self, key: str) -> Arrays: ...

    def units(self, key: str) -> Mapping[str, str]:
        """By name in the file, what the file itself states."""
        ...


@dataclass
class Table:
    """What a scan found of one table; ``bad`` frames are left out.

    ``places`` are offset, dtype and shape of arrays that lie in the file as they are;
    ``unstored`` the names of arrays of all frames that hold no numbers.
    """

    key: str
    frames: int
    width: int
    counts: IntArray
    shapes: dict[str, tuple[tuple[int, ...], str]]
    units: dict[str, str] = field(default_factory=dict)
    with_cell: int = 0
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    unstored: list[str] = field(default_factory=list)


class TableFault(Exception):
    """Why a table is set aside."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.reason, self.name = reason, name


class ArraySource:
    """Base of the sources of array files.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    frames : int
        Frames that one task reads at most.
    levels : dict of str to {"atom", "system"}, optional
        Level of a name where its shape does not tell.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    negated: ClassVar[frozenset[str]] = frozenset()
    """Names that hold the field's value with the other sign (gradients)."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        frames: int = 65_536,
        levels: Mapping[str, Level] | None = None,
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.frames = frames
        self.given_levels = dict(levels or {})
        self.schema: Schema | None = None
        self._tables: list[list[Table]] = []
        self._firsts: list[list[int]] = []
        self._targets: dict[str, tuple[str, Level]] = {}
        self._chosen: dict[str, str] = {}
        self._aside: dict[str, Contest] = {}

    def open(self, number: int) -> AbstractContextManager[Opened]:
        """A file of the source, to be read."""
        raise TypeError("a source of arrays has to say how a file is opened")

    def declared(self, tables: Sequence[Table]) -> dict[str, str]:
        """By name in the file: units that the format has by its definition."""
        return {}

    def meaning(self, name: str) -> str | None:
        """Field (or ``num_atoms``, ``mask``) of a name, None for a custom one."""
        if name in self.names.mapping:
            return self.names.mapping[name]
        return self.aliases.get(name)

    # -- scan

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Shapes of every array, and the numbers of atoms."""
        found = map_files(_scan_file, [(self, i) for i in range(len(self.paths))])
        self._tables = [tables for tables, _ in found]
        self._firsts = [np.cumsum([0] + [t.frames for t in ts]).tolist() for ts in self._tables]
        everything = [t for tables in self._tables for t in tables]
        rejects = [r for _, rejects in found for r in rejects]
        notes: list[str] = []
        self._targets = self._place(everything, notes)
        observer, keys = FieldObserver(), Counter[str]()
        for table in everything:
            self._observe(observer, table, keys)
        schema = observer.schema(self.paths[0] if self.paths else "input")
        notes += [f"{n!r} is not stored: {why}" for n, why in schema.dropped.items()]
        others = dict.fromkeys(n for table in everything for n in table.unstored)
        notes += [f"{n!r} is not stored: it has no numbers, one row a frame" for n in others]
        units = self._units(everything, notes)
        layouts = tuple(
            replace(layout, unit=units[layout.name])
            if layout.name in units and layout.name not in FIELDS
            else layout
            for layout in schema
        )
        self.schema = Schema(layouts, schema.dropped, schema.contests)
        counts: list[IntArray] = []
        segments = [
            segment
            for number, tables in enumerate(self._tables)
            for t, table in enumerate(tables)
            for segment in self._cut(number, self._firsts[number][t], table, counts, rejects)
        ]
        atoms = np.concatenate(counts).astype(np.int64) if counts else np.zeros(0, np.int64)
        return Scan(
            pack(segments, target_bytes=_STEP_BYTES, target_samples=self.frames),
            atoms,
            no_edges(len(atoms)),
            self.schema,
            rejects,
            notes,
            dict(keys),
            sum(t.frames for t in everything)
            + sum(1 for _, rs in found for r in rs if r.frame < 0 or r.frame == 0),
            units={n: u for n, u in units.items() if n in FIELDS and self.schema.get(n)},
        )

    def _place(self, tables: Sequence[Table], notes: list[str]) -> dict[str, tuple[str, Level]]:
        """Field and level of every name, the same in all tables."""
        per_atom: dict[str, bool] = {}
        widths: dict[str, set[int]] = {}
        for table in tables:
            for name, (tail, dtype) in table.shapes.items():
                fits = dtype != "str" and tail[:1] == (table.width,)
                per_atom[name] = per_atom.get(name, True) and fits
                widths.setdefault(name, set()).add(table.width)
        taken: dict[str, tuple[int, str]] = {}
        placed: dict[str, tuple[str, Level]] = {}
        own = [name for name, meant in self.aliases.items() if name == meant]
        order = list(dict.fromkeys([*self.names.mapping, *own, *self.aliases]))
        guessed: list[str] = []
        for name in sorted(per_atom, key=lambda n: (order.index(n) if n in order else 2**31, n)):
            meant = self.meaning(name)
            spec = FIELDS.get(meant or "")
            level: Level
            if name in self.given_levels:
                level = self.given_levels[name]
            elif spec is not None:
                level = spec.level
            elif _is_system_field(name, [t.shapes[name][0] for t in tables if name in t.shapes]):
                # Frames of three atoms: a tensor of the system looks like one row an atom.
                level = "system"
            else:
                level = "atom" if per_atom[name] else "system"
                known = FIELDS.get(resolve(name))
                if level == "atom" and len(widths[name]) == 1 and known is None:
                    guessed.append(name)
            target = self.names.target(meant if meant is not None else name, level).name
            tails = [t.shapes[name][0] for t in tables if name in t.shapes]
            if meant is None and not all(_fits(target, level, tail) for tail in tails):
                target = self.names.target(f"other_{name}", level).name
                notes.append(f"{name!r} is kept as {target!r}: its rows have another shape")
            if target in taken:
                # Another name, preferred, is this field: this one keeps its own.
                self._aside[name] = Contest(target, taken[target][1], name)
                target = name if name != target else f"{name}_2"
                if target in FIELDS:
                    target = f"other_{name}"
                target = self.names.target(target, level).name
                notes.append(f"{name!r} is kept as {target!r}")
            taken[target] = (0, name)
            placed[name] = (target, level)
        if guessed:
            notes.append(
                "taken as one row an atom, by their shape: "
                + ", ".join(repr(g) for g in guessed)
                + ' (levels={"name": "system"} in options if not)'
            )
        return placed

    def _observe(self, observer: FieldObserver, table: Table, keys: Counter[str]) -> None:
        frames = table.frames - len({f for f, _, _ in table.bad})
        observer.num_samples += frames
        if frames == 0:
            return
        for name, (tail, dtype) in table.shapes.items():
            keys[name] += frames
            if name in self._aside and self._aside[name].kept in table.shapes:
                observer.contest([self._aside[name]], count=frames)
            target, level = self._targets[name]
            count = frames
            if target == "cell":
                count = table.with_cell
            if count == 0:
                continue
            rows = tail[1:] if level == "atom" else tail
            if level == "atom" and rows == (1,) and FIELDS.get(target) is None:
                rows = ()
            kind = "int64" if target == "atomic_numbers" else dtype
            observer.see(target, level, kind, rows, count=count)

    def _units(self, tables: Sequence[Table], notes: list[str]) -> dict[str, str]:
        by_name = dict(self.declared(tables))
        said = sorted(by_name)
        for table in tables:
            for name, unit in table.units.items():
                first = by_name.setdefault(name, unit)
                if first != unit:
                    notes.append(f"{name!r} is in {first} and, in {table.key!r}, in {unit}")
        self._chosen = by_name
        if said:
            notes.append(
                "units that the format has, by its definition: "
                + ", ".join(f"{n} {by_name[n]}" for n in said if n in self._targets)
            )
        return {self._targets[n][0]: u for n, u in by_name.items() if n in self._targets}

    def _cut(
        self,
        number: int,
        first: int,
        table: Table,
        counts: list[IntArray],
        rejects: list[Reject],
    ) -> Iterator[tuple[Segment, int]]:
        """The good frames of a table as segments of a bounded size."""
        bad = {f: (name, why) for f, name, why in table.bad}
        where = f"{table.key}: " if table.key else ""
        for f, (name, why) in sorted(bad.items()):
            rejects.append(Reject(self.paths[number], first + f, f"{where}{why}", field=name))
        row = sum(
            math.prod(tail) * (8 if d == "str" else np.dtype(d).itemsize)
            for tail, d in table.shapes.values()
        )
        step = max(1, min(self.frames, _STEP_BYTES // max(row, 1)))
        edges = [-1, *sorted(bad), table.frames]
        for before, after in pairwise(edges):
            for a in range(before + 1, after, step):
                b = min(a + step, after)
                part = table.counts[a:b]
                counts.append(part)
                yield (
                    Segment(number, first + a, first + b, first + a, b - a, int(part.sum())),
                    row * (b - a),
                )

    # -- read

    def read(self, partition: Partition) -> PartResult:
        """The frames of a partition, padding left out."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        pieces: list[_Piece] = []
        for number, segments in groupby(partition.segments, key=lambda s: s.file):
            firsts = self._firsts[number]
            with self.open(number) as opened:
                for segment in segments:
                    t = bisect_right(firsts, segment.start) - 1
                    while self._tables[number][t].frames == 0:
                        t += 1
                    a, b = segment.start - firsts[t], segment.stop - firsts[t]
                    pieces.append(self._piece(number, opened, self._tables[number][t], a, b))
        return PartResult(_assemble(pieces, self.schema))

    def _piece(self, number: int, opened: Opened, table: Table, a: int, b: int) -> _Piece:
        find = getattr(opened, "direct", None)
        found = None if find is None else find(table)
        arrays: Arrays = opened.arrays(table.key) if found is None else found
        counts = table.counts[a:b]
        keep = None if (counts == table.width).all() else _kept(arrays, self.meaning, a, b)
        if keep is not None and not np.array_equal(keep.sum(axis=1), counts):
            raise _changed(self.paths[number], table.key)
        piece = _Piece(counts, {}, {})
        atoms = None if keep is None else np.flatnonzero(keep)
        for name, (tail, dtype) in table.shapes.items():
            target, level = self._targets[name]
            layout = self.schema.get(target) if self.schema else None
            if layout is None or layout.level != level:
                continue
            if name not in arrays:
                raise _changed(self.paths[number], table.key)
            if dtype == "str":
                text = _text(arrays[name])
                values = np.full(b - a, text, dtype=object)
            elif target == "atomic_numbers":
                values = _numbers(arrays[name], a, b, table.width)
            else:
                values = np.asarray(arrays[name][a:b])
            if dtype != "str" and values.shape[:2] != (b - a, *tail[:1]):
                raise _changed(self.paths[number], table.key)
            if level == "atom":
                values = values.reshape(-1, *layout.tail)
                if atoms is not None:
                    # Ten times as fast as a mask over frames and atoms.
                    values = values.take(atoms, axis=0)
            elif dtype != "str":
                if _is_voigt(target, tail):
                    values = voigt_to_matrix(values)
                values = values.reshape(b - a, *layout.tail)
            if name in self.negated and target in FIELDS:
                values = -values
            stated, chosen = table.units.get(name), self._chosen.get(name)
            if stated and chosen and stated != chosen:
                values = values * np.asarray(conversion_factor(stated, chosen), values.dtype)
            piece.arrays[target] = values
            if target == "cell":
                piece.present[target] = np.asarray(values.any(axis=(1, 2)), dtype=bool)
        return piece


def _scan_file(job: tuple[ArraySource, int]) -> tuple[list[Table], list[Reject]]:
    source, number = job
    shown = source.paths[number]
    tables: list[Table] = []
    rejects: list[Reject] = []
    try:
        with source.open(number) as opened:
            for key in opened.keys():  # noqa: SIM118 - a file, not a dict
                where = f"{key}: " if key else ""
                try:
                    table = survey(key, opened.arrays(key), source.meaning)
                    table.units = dict(opened.units(key))
                    find = getattr(opened, "places", None)
                    table.places = find(key) if find is not None else {}
                    tables.append(table)
                except TableFault as fault:
                    rejects.append(Reject(shown, 0, where + fault.reason, field=fault.name))
    except SourceError as error:
        rejects.append(Reject(shown, 0, str(error.what)))
    return tables, rejects


def survey(key: str, arrays: Arrays, meaning: Callable[[str], str | None]) -> Table:
    """Frames, atoms and shapes of one table."""
    roles: dict[str, str] = {}
    for name in arrays:
        meant = meaning(name)
        if meant is not None:
            roles.setdefault(meant, name)
    for need in ("positions", "atomic_numbers"):
        if need not in roles:
            raise TableFault(
                f"no array is known as {need} (found: {', '.join(map(repr, sorted(arrays)))}; "
                f"name it with --map THEIRS={need})",
                need,
            )
    place = arrays[roles["positions"]]
    if len(place.shape) != 3 or place.shape[2] != 3:
        raise TableFault(
            f"array {roles['positions']!r}: found {list(place.shape)}, expected [frames, atoms, 3]",
            "positions",
        )
    frames, width = int(place.shape[0]), int(place.shape[1])
    elements = arrays[roles["atomic_numbers"]]
    if tuple(elements.shape) not in ((width,), (frames, width)):
        raise TableFault(
            f"array {roles['atomic_numbers']!r}: found {list(elements.shape)}, expected [{width}] "
            f"or [{frames}, {width}] (positions are {list(place.shape)})",
            "atomic_numbers",
        )
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    unstored: list[str] = []
    for name, values in arrays.items():
        meant = meaning(name)
        if meant in (COUNT, MASK):
            continue
        if meant == "atomic_numbers":
            if name == roles[meant]:
                shapes[name] = ((width,), "int64")
            continue
        shape, dtype = tuple(int(s) for s in values.shape), values.dtype
        if dtype.kind in "OSU" and math.prod(shape) == 1:
            shapes[name] = ((), "str")
            continue
        if dtype.kind not in "biuf":
            if shape[:1] == (frames,):
                unstored.append(name)
            continue
        if shape[:1] != (frames,):
            if meant in FIELDS:
                raise TableFault(
                    f"array {name!r}: found {list(shape)}, expected {frames} rows, one a frame",
                    meant or "",
                )
            continue
        spec = FIELDS.get(meant or "")
        if spec is not None and all(isinstance(t, int) for t in spec.tail):
            want = math.prod(int(t) for t in spec.tail) * (width if spec.level == "atom" else 1)
            if math.prod(shape[1:]) != want:
                lead = [frames, width] if spec.level == "atom" else [frames]
                raise TableFault(
                    f"array {name!r}: found {list(shape)}, expected {[*lead, *spec.tail]}",
                    spec.name,
                )
        shapes[name] = (shape[1:], dtype.name)
    table = Table(key, frames, width, np.zeros(frames, np.int32), shapes, unstored=unstored)
    _count(table, arrays, roles, meaning)
    return table


def _is_system_field(name: str, tails: Sequence[tuple[int, ...]]) -> bool:
    """Whether a name is that of a system's field, and its arrays have that field's shape."""
    spec = FIELDS.get(resolve(name))
    return spec is not None and spec.level == "system" and all(t == spec.tail for t in tails)


def _fits(target: str, level: Level, tail: tuple[int, ...]) -> bool:
    """Whether rows can be those of a known field (its own shape, or six of a symmetric matrix)."""
    spec = FIELDS.get(target)
    if spec is None or spec.level != level or not all(isinstance(t, int) for t in spec.tail):
        return True
    row = tail[1:] if level == "atom" else tail
    return math.prod(row) == math.prod(int(t) for t in spec.tail) or _is_voigt(target, row)


def _is_voigt(target: str, row: tuple[int, ...]) -> bool:
    return target in ("stress", "virial") and row == (6,)


def _count(
    table: Table,
    arrays: Arrays,
    roles: Mapping[str, str],
    meaning: Callable[[str], str | None],
) -> None:
    """Atoms of every frame, in pieces; what cannot be is put among the bad."""
    elements = arrays[roles["atomic_numbers"]]
    if len(elements.shape) == 1 and not {COUNT, MASK} & roles.keys():
        # One molecule: one look serves all its frames.
        whole = _numbers(elements, 0, 1, table.width)
        if ((whole >= 1) & (whole <= 118)).all():
            table.counts[:] = table.width
            _count_cells(table, arrays, roles)
            return
    step = max(1, _STEP_BYTES // max(8 * table.width, 1))
    for a in range(0, table.frames, step):
        b = min(a + step, table.frames)
        numbers = _numbers(elements, a, b, table.width)
        if COUNT in roles:
            given = np.asarray(arrays[roles[COUNT]])
            if given.size != table.frames or given.dtype.kind not in "iuf":
                raise TableFault(
                    f"array {roles[COUNT]!r}: found {list(given.shape)}, expected [{table.frames}]"
                )
            n = given.reshape(-1)[a:b]
            for f in np.flatnonzero((n < 0) | (n > table.width) | (n != np.floor(n))).tolist():
                why = f"{roles[COUNT]} says {n[f]} atoms, there is room for {table.width}"
                table.bad.append((a + f, "", why))
        keep = _kept(arrays, meaning, a, b)
        table.counts[a:b] = keep.sum(axis=1)
        wrong = keep & ((numbers < 1) | (numbers > 118))
        known = {f for f, _, _ in table.bad}
        for f in np.flatnonzero(wrong.any(axis=1)).tolist():
            if a + f not in known:
                atom = int(np.flatnonzero(wrong[f])[0])
                found = int(numbers[f, atom])
                why = f"atom {atom} has the atomic number {found}, expected 1 to 118"
                if found == _NO_ELEMENT:
                    why = f"atom {atom} is of no element: its symbol is unknown or its number not whole"
                table.bad.append((a + f, "atomic_numbers", why))
    _count_cells(table, arrays, roles)


def _count_cells(table: Table, arrays: Arrays, roles: Mapping[str, str]) -> None:
    if "cell" in roles:
        cells = arrays[roles["cell"]]
        for a in range(0, table.frames, 65_536):
            part = np.asarray(cells[a : a + 65_536])
            table.with_cell += int(part.reshape(len(part), -1).any(axis=1).sum())
        bad = {f for f, _, _ in table.bad}
        table.with_cell -= sum(bool(np.asarray(cells[f : f + 1]).any()) for f in bad)


def _kept(arrays: Arrays, meaning: Callable[[str], str | None], a: int, b: int) -> BoolArray:
    """Which of the padded atoms are atoms, bool [b - a, width]."""
    roles = {meaning(name): name for name in reversed(list(arrays)) if meaning(name)}
    width = int(arrays[roles["positions"]].shape[1])
    if COUNT in roles:
        n = np.asarray(arrays[roles[COUNT]]).reshape(-1)[a:b]
        return np.asarray(np.arange(width)[None, :] < n[:, None])
    if MASK in roles and tuple(arrays[roles[MASK]].shape[1:]) == (width,):
        return np.asarray(arrays[roles[MASK]][a:b]).astype(bool)
    elements = arrays[roles["atomic_numbers"]]
    if len(elements.shape) == 1:
        return np.ones((b - a, width), dtype=bool)
    return np.asarray(_numbers(elements, a, b, width) > 0)


def _numbers(values: Any, a: int, b: int, width: int) -> IntArray:
    """Atomic numbers [b - a, width] of numbers or symbols, given once or by frame."""
    once = len(values.shape) == 1
    part = np.asarray(values[:] if once else values[a:b])
    if part.dtype.kind in "OSU":
        flat = [
            s.decode("utf-8", "replace") if isinstance(s, bytes) else str(s) for s in part.ravel()
        ]
        known = [_NUMBERS.get(s.strip(), _NO_ELEMENT) if s.strip() else 0 for s in flat]
        part = np.array(known, np.int64).reshape(part.shape)
    elif part.dtype.kind == "f":
        # NaN is padding; a number that is not whole must not become another element.
        part = np.where(np.isnan(part), -1, np.where(part == np.floor(part), part, _NO_ELEMENT))
    part = part.astype(np.int64, copy=False)
    return np.broadcast_to(part, (b - a, width)) if once else part


def _text(values: Any) -> str:
    value = np.asarray(values[()] if hasattr(values, "shape") else values).ravel()[0]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@dataclass
class _Piece:
    counts: IntArray
    arrays: dict[str, NDArray]
    present: dict[str, BoolArray]


def _assemble(pieces: Sequence[_Piece], schema: Schema) -> Block:
    arrays: dict[str, NDArray] = {}
    levels: dict[str, Level] = {}
    present: dict[str, BoolArray] = {}
    for layout in schema:
        name = layout.name
        if not any(name in p.arrays for p in pieces):
            continue
        text = layout.dtype == "str"
        dtype = np.dtype(object) if text else np.dtype(layout.dtype)
        parts, masks = [], []
        for p in pieces:
            n = len(p.counts)
            rows = int(p.counts.sum()) if layout.level == "atom" else n
            values = p.arrays.get(name)
            if values is None:
                parts.append(np.full((rows, *layout.tail), fill_for(dtype), dtype))
                masks.append(np.zeros(n, dtype=bool))
                continue
            values = values.astype(dtype, copy=False)
            mask = p.present.get(name, np.ones(n, dtype=bool))
            if not mask.all() and layout.level == "system":
                values = values.copy()
                values[~mask] = fill_for(dtype)
            parts.append(values)
            masks.append(mask)
        arrays[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        levels[name] = layout.level
        mask = np.concatenate(masks)
        if not mask.all():
            present[name] = mask
    ptr = counts_to_ptr(np.concatenate([p.counts for p in pieces]).astype(np.int64))
    return Block(ptr, np.zeros_like(ptr), arrays, levels, present)


def _changed(shown: str, key: str) -> SourceError:
    return SourceError(
        f"{shown}, {key}" if key else shown,
        "the file is not what it was when it was scanned",
        mend="do not change the input while it is read; run it again",
    )

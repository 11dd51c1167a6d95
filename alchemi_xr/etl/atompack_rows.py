"""Molecules of an atompack file as columns, or one by one as records.

The package's flat read fills what a molecule lacks with zeros, so where all values of a
molecule are zero the molecule itself is asked. It believes the numbers of atoms in the
index, so those are compared with the records first. What has no flat form (a tensor
that some molecules lack, two names for one field) is read molecule by molecule, and so
is a batch in which a record is broken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import FIELDS, fill_for
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.ase_records import put_any
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record
from alchemi_xr.etl.schema import Schema

__all__ = ["AtompackBatch", "AtompackColumn", "AtompackReader", "columns_to_block"]

# The format's own properties: level, and shape of a row.
_OWN: dict[str, tuple[Level, tuple[int, ...]]] = {
    "energy": ("system", ()),
    "forces": ("atom", (3,)),
    "charges": ("atom", ()),
    "velocities": ("atom", (3,)),
    "cell": ("system", (3, 3)),
    "stress": ("system", (3, 3)),
    "pbc": ("system", (3,)),
    "name": ("system", ()),
}
_SCOPES: tuple[tuple[Level, str, str], ...] = (
    ("atom", "atom", "atom_properties"),
    ("system", "molecule", "properties"),
)
# What the package says of a place counts within what it was asked for: one molecule.
_BATCH_WORDS = re.compile(r"^(?:ValueError: |Invalid data: )+| (?:in|at|for) molecule 0\b")
_LACKS = re.compile(r"schema mismatch (?:for|at) molecule (\d+)")
_NOT_FLAT = "cannot be flat-batched"


@dataclass
class AtompackColumn:
    """A property of some molecules, [rows, *tail], and which of them have it."""

    name: str
    level: Level
    tail: tuple[int, ...]
    values: NDArray
    present: BoolArray


@dataclass
class AtompackBatch:
    """Molecules of a file: as columns, or where that cannot be as records."""

    atoms: IntArray
    columns: list[AtompackColumn] | None = None
    records: list[Record | tuple[str, str]] | None = None
    nameless: int = 0


class AtompackReader:
    """A file, open in the package.

    Parameters
    ----------
    path : str
    shown : str
        As the user named it.
    names : NameMap

    Raises
    ------
    SourceError
        The package does not open the file.
    OptionalDependencyError
        There is no package.
    """

    def __init__(self, path: str, shown: str, names: NameMap) -> None:
        package = import_optional("atompack", extra="atompack", why=shown)
        try:
            self._file = _ask(package.Database.open, path)
        except ValueError as error:
            raise SourceError(shown, str(error), mend="restore the file") from error
        self._names = names

    def batch(self, rows: IntArray, atoms: IntArray, *, known: bool = False) -> AtompackBatch:
        """Some molecules, by the flat read where they have one.

        Parameters
        ----------
        rows, atoms : int64 array, [N]
            Numbers of the molecules, and of their atoms by the index.
        known : bool
            The records were seen to have as many.
        """
        molecules = _Molecules(self._file, rows)
        try:
            if known or [len(m) for m in molecules.get(range(len(rows)))] == atoms.tolist():
                columns = self._columns(rows, atoms, molecules)
                if _is_plain(columns, self._names):
                    return AtompackBatch(atoms, columns)
        except ValueError:
            pass
        return self.records(rows, atoms)

    def _columns(
        self, rows: IntArray, atoms: IntArray, molecules: _Molecules
    ) -> list[AtompackColumn]:
        flat = self._flat(rows, atoms)
        everywhere = np.ones(len(rows), dtype=bool)
        ptr = counts_to_ptr(atoms)
        columns = [
            AtompackColumn("atomic_numbers", "atom", (), flat["atomic_numbers"], everywhere),
            AtompackColumn("positions", "atom", (3,), flat["positions"], everywhere),
        ]
        given = [
            _column(name, level, flat[name], ptr, molecules, partial(_own, name), tail)
            for name, (level, tail) in _OWN.items()
            if name in flat
        ]
        given += [
            _column(name, level, values, ptr, molecules, partial(_has, name, scope))
            for level, scope, key in _SCOPES
            for name, values in flat.get(key, {}).items()
        ]
        return columns + [column for column in given if column is not None]

    def _flat(self, rows: IntArray, atoms: IntArray) -> dict[str, Any]:
        """The flat read, also where the first molecule has all properties and others have not.

        It then refuses the others. With one that lacks something in front it does not.
        """
        try:
            return dict(_ask(self._file.get_molecules_flat, rows.tolist()))
        except ValueError as error:
            lacks = _LACKS.search(str(error))
            if lacks is None or int(lacks[1]) >= len(rows):
                raise
            front = int(lacks[1])
        flat = _ask(self._file.get_molecules_flat, [int(rows[front]), *rows.tolist()])
        skipped = int(atoms[front])

        def behind(values: Any, level: Level) -> Any:
            if isinstance(values, list):
                return values[1:]
            return values[skipped if level == "atom" else len(values) // (len(rows) + 1) :]

        levels: dict[str, Level] = {"positions": "atom", "atomic_numbers": "atom"}
        levels |= {name: level for name, (level, _) in _OWN.items()}
        out = {name: behind(flat[name], level) for name, level in levels.items() if name in flat}
        for level, _, key in _SCOPES:
            out[key] = {name: behind(v, level) for name, v in flat.get(key, {}).items()}
        return out

    def records(self, rows: IntArray, atoms: IntArray) -> AtompackBatch:
        """Some molecules, each for itself; one that is broken as its field and the reason."""
        out = AtompackBatch(atoms, records=[])
        assert out.records is not None
        for row, count in zip(rows.tolist(), atoms.tolist(), strict=True):
            try:
                record, named = self._record(row, count)
            except ValueError as error:
                out.records.append(("", _BATCH_WORDS.sub("", str(error))))
                continue
            out.records.append(record)
            out.nameless += not named
        return out

    def _record(self, row: int, count: int) -> tuple[Record, bool]:
        """A molecule, and whether the package gave its name (or that it has none)."""
        molecule = _ask(self._file.get_molecules, [row])[0]
        if len(molecule) != count:
            raise ValueError(f"the record has {len(molecule)} atoms, the index says {count}")
        record, named = Record(count), True
        record.put("atomic_numbers", "atom", molecule.atomic_numbers.astype(np.int64), self._names)
        record.put("positions", "atom", molecule.positions, self._names)
        names: Sequence[str | None] = (None,)
        try:
            # It checks the record against the file's schema, and alone gives the name.
            names = _ask(self._file.get_molecules_flat, [row]).get("name", names)
        except ValueError as error:
            if _NOT_FLAT not in str(error):
                raise
            named = False
        for name, (level, _) in _OWN.items():
            value = names[0] if name == "name" else _ask(getattr, molecule, name)
            if value is not None and (name != "cell" or np.any(value)):
                record.put(name, level, value, self._names)
        for key in _ask(molecule.property_keys):
            value = _ask(molecule.get_property, key)
            if _has(key, "atom", molecule):
                record.put(key, "atom", value, self._names)
            elif value is not None and np.size(value):
                put_any(record, key, value, self._names)
        return record, named


class _Molecules:
    """Molecules of a batch, each fetched when it is first asked."""

    def __init__(self, file: Any, rows: IntArray) -> None:
        self._file, self._rows = file, rows
        self._held: dict[int, Any] = {}

    def get(self, places: Sequence[int]) -> list[Any]:
        lacking = [i for i in places if i not in self._held]
        if lacking:
            fetched = _ask(self._file.get_molecules, self._rows[lacking].tolist())
            self._held.update(zip(lacking, fetched, strict=True))
        return [self._held[i] for i in places]


def _ask(call: Callable[..., Any], *args: Any) -> Any:
    """The package's answer, its panics as errors."""
    try:
        return call(*args)
    except BaseException as error:
        # It is no Exception, so that nobody goes on by chance.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from error


def _own(name: str, molecule: Any) -> bool:
    return _ask(getattr, molecule, name) is not None


def _has(name: str, scope: str, molecule: Any) -> bool:
    return bool(_ask(partial(molecule.has_property, name, scope=scope)))


def _column(
    name: str,
    level: Level,
    values: Any,
    ptr: IntArray,
    molecules: _Molecules,
    has: Callable[[Any], bool],
    tail: tuple[int, ...] | None = None,
) -> AtompackColumn | None:
    """A property as the flat read gives it; None where no molecule has it."""
    samples = len(ptr) - 1
    if isinstance(values, list):
        present = np.array([v is not None for v in values], dtype=bool)
        text = np.empty(samples, dtype=object)
        text[:] = ["" if v is None else v for v in values]
        return AtompackColumn(name, level, (), text, present) if present.any() else None
    total = int(ptr[-1]) if level == "atom" else samples
    present = np.zeros(samples, dtype=bool)
    if values.size:
        rows = (values.reshape(total, -1) != 0).any(axis=1)
        present = (
            np.diff(counts_to_ptr(rows.astype(np.int64))[ptr]) > 0 if level == "atom" else rows
        )
    zero = np.flatnonzero(~present).tolist()
    present[zero] = [has(molecule) for molecule in molecules.get(zero)]
    if not present.any():
        return None
    if tail is None:
        # Vectors of a molecule come flattened: one that has it knows their shape.
        one = np.shape(_ask(molecules.get([int(np.argmax(present))])[0].get_property, name))
        tail = one[1:] if level == "atom" else one
    values = values.reshape(total, *tail)
    if name == "cell" and tail == (3, 3):
        present &= values.any(axis=(1, 2))
    return AtompackColumn(name, level, tail, values, present) if present.any() else None


def _is_plain(columns: Sequence[AtompackColumn], names: NameMap) -> bool:
    """Whether each column is one field, of the level and shape that the field has."""
    taken = set()
    for column in columns:
        target = names.target(column.name, column.level).name
        if target in taken:
            return False
        taken.add(target)
        spec = FIELDS.get(target)
        if spec is None:
            # Put down for the molecule, but the name of a field of atoms.
            known = FIELDS.get(names.target(column.name, "atom").name)
            if column.level == "system" and known is not None and known.level == "atom":
                return False
        elif all(isinstance(t, int) for t in spec.tail):
            size = int(np.prod([int(t) for t in spec.tail]))
            if column.values.dtype == object or int(np.prod(column.tail)) != size:
                return False
    return True


def columns_to_block(
    columns: Sequence[AtompackColumn], atoms: IntArray, schema: Schema, names: NameMap
) -> Block | None:
    """The columns in the layouts of the schema; None where one does not fit into its own."""
    ptr = counts_to_ptr(atoms)
    by_field = {names.target(c.name, c.level).name: c for c in columns}
    arrays: dict[str, NDArray] = {}
    levels: dict[str, Level] = {}
    present: dict[str, BoolArray] = {}
    for layout in schema:
        column = by_field.get(layout.name)
        if column is None:
            continue
        text = column.values.dtype == object
        if layout.level != column.level or text != (layout.dtype == "str"):
            return None
        values, rows = column.values, len(column.values)
        if not text:
            if int(np.prod(column.tail)) != int(np.prod(layout.tail)):
                return None
            values = values.reshape(rows, *layout.tail).astype(layout.dtype, copy=False)
        if not column.present.all():
            there = np.repeat(column.present, atoms) if layout.level == "atom" else column.present
            values = values.copy()
            values[~there] = fill_for(values.dtype)
            present[layout.name] = column.present
        arrays[layout.name], levels[layout.name] = values, layout.level
    return Block(ptr, np.zeros_like(ptr), arrays, levels, present)

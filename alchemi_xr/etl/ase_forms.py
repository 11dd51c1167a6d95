"""Rows of ASE databases of one form, taken together.

Most rows of a database have the same names with the same dtypes and shapes. What is to
be done with such a row (which field each value is, at which level) is worked out once,
from the record of the first row of a form; the values of all of them then go into flat
arrays. A row of any other kind is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alchemi_xr._typing import Level, NDArray
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.etl.ase_records import fault_of, place_any, place_result
from alchemi_xr.etl.ase_rows import PlainRow
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, as_text, as_value, voigt_to_matrix
from alchemi_xr.etl.row_batch import Column, Group, Kind, texts

__all__ = ["EXTRAS", "MOST_FORMS", "RESULTS", "Form", "Forms", "Item", "common"]

EXTRAS = ("momenta", "masses", "tags", "initial_magmoms", "initial_charges")
"""Columns of a row with one value an atom that are no result of a calculator."""
RESULTS = (
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
MOST_FORMS = 4096
"""Where there are more, rows are hardly alike, and it is no use to look for what is common."""
_TAKEN = (*EXTRAS, *RESULTS)
_STRESSES = ("stress", "stresses")
_PLAIN = frozenset((float, int, bool, str))
_BOOL, _FLOAT = np.dtype(bool), np.dtype(np.float64)
_DTYPES = {float: _FLOAT, int: np.dtype(np.int64), bool: _BOOL}


@dataclass(frozen=True, slots=True)
class Item:
    """A value of a row: where it stands there, and the field that it becomes."""

    place: str
    name: str
    field: str
    kind: Kind
    dtype: np.dtype[Any] | None
    tail: tuple[int, ...]
    voigt: bool

    def values(self, rows: Sequence[PlainRow]) -> Column:
        """The values of some rows."""
        found = [getattr(row, self.place)[self.name] for row in rows]
        if self.dtype is None:
            return Column("system", texts(found))
        out: NDArray
        if self.kind != "system":
            out = np.concatenate(found) if len(found) > 1 else found[0]
        elif self.tail:
            out = np.concatenate(found).reshape(len(found), *self.tail)
        else:
            out = np.array(found)
        return self.column(out)

    def column(self, out: NDArray) -> Column:
        """The values as they are stored, from those of the rows."""
        if self.place == "values" and self.name == "numbers":
            out = out.astype(np.int64, copy=False)
        if self.voigt or (self.place == "values" and self.name in _STRESSES):
            out = out.astype(np.float64, copy=False)
        return Column(self.kind, voigt_to_matrix(out) if self.voigt else out)


class Form:
    """What to do with rows of one form.

    Parameters
    ----------
    items : list of Item
    general : bool
        Whether it is the form of rows with any number of atoms.
    """

    def __init__(self, items: list[Item], general: bool) -> None:
        self.items, self.general = items, general
        self.keys = [i.name for i in items if not i.name.startswith("source_")]

    def group(self, rows: Sequence[tuple[int, PlainRow]], path: str) -> Group:
        """Rows of this form as columns.

        Parameters
        ----------
        rows : sequence of (int, PlainRow)
            With their places in the file.
        path : str
            The file, as it is shown.
        """
        found = [row for _, row in rows]
        columns: dict[str, Column] = {}
        for item in self.items:
            if item.field not in columns:
                columns[item.field] = item.values(found)
        return common(rows, path, columns)


def common(rows: Sequence[tuple[int, Any]], path: str, columns: dict[str, Column]) -> Group:
    """A group of rows with these columns, and those that every row has."""
    if "source_id" not in columns:
        ids = np.array([row.id for _, row in rows], dtype=np.int64)
        columns["source_id"] = Column("system", ids)
    if "source_file" not in columns:
        columns["source_file"] = Column("system", texts([path] * len(rows)))
    return Group(
        np.array([number for number, _ in rows], dtype=np.int64),
        np.array([row.atoms for _, row in rows], dtype=np.int64),
        columns,
    )


_UNKNOWN, _BY_ATOMS = object(), object()


class Forms:
    """The forms that rows of a file have, as far as they are known.

    Parameters
    ----------
    names : NameMap
    path : str
        The file, as it is shown.
    record_of : callable
        The record of a row, which has the last word on the first row of each form.
    """

    def __init__(self, names: NameMap, path: str, record_of: Callable[[Any], Record]) -> None:
        self.path, self.record_of = path, record_of
        self._names = names
        self._known: dict[Any, Any] = {}

    def form_of(self, row: Any) -> Form | None:
        """The form of a row; None for one that is to be looked at by itself."""
        if type(row) is not PlainRow or not row.atoms or row.constraints:
            return None
        atoms = row.atoms
        make = _make_of(row, atoms)
        if make is None:
            return None
        form = self._known.get(make, _UNKNOWN)
        if form is _UNKNOWN:
            form = self._new(row, atoms)
            if form is not None and not form.general:
                self._known[make] = _BY_ATOMS
                make = (make, atoms)
            self._known[make] = form
        elif form is _BY_ATOMS:
            make = (make, atoms)
            form = self._known.get(make, _UNKNOWN)
            if form is _UNKNOWN:
                form = self._known[make] = self._new(row, atoms)
        return form

    def _new(self, row: PlainRow, atoms: int) -> Form | None:
        """The form of a first row."""
        if len(self._known) > MOST_FORMS:
            return None
        try:
            record = self.record_of(row)
            if fault_of(record) or record.unstored or record.contests:
                return None
        except Exception:
            return None  # it is raised again, and told, for the row by itself
        items: list[Item] = []
        general = True
        held: dict[str, str] = {}
        for place, name, level, voigt in _placed(row, atoms, self._names):
            value = getattr(row, place)[name]
            field = self._names.target(name, level).name
            if held.setdefault(field, name) != name:
                return None  # which of two names is taken, the record decides
            dtype: np.dtype[Any] | None
            if type(value) is np.ndarray:
                dtype, shape = value.dtype, value.shape
            else:
                dtype, shape = _DTYPES.get(type(value)), ()
            kind: Kind = "system"
            if level == "atom":
                kind = "atom"
            elif shape[:1] == (atoms,) and field not in FIELDS:
                kind = "ragged"
            if shape[:1] == (atoms,) and name not in ("cell", "pbc"):
                # As many rows as atoms by chance? Then the next number of atoms is another form.
                general &= kind != "system" and (len(shape) > 1 or name not in _STRESSES)
            tail = shape if kind == "system" else shape[1:]
            items.append(Item(place, name, field, kind, dtype, tail, voigt))
        form = Form(items, general)
        return form if self._gives(form, row, record) else None

    def _gives(self, form: Form, row: PlainRow, record: Record) -> bool:
        """Whether a form makes of a row what its record says."""
        group = form.group([(0, row)], self.path)
        keys = [k for k in record.keys if not k.startswith("source_")]
        if keys != form.keys or record.atom.keys() & record.system.keys():
            return False
        wanted: dict[str, Any] = {**record.atom, **record.system}
        if wanted.keys() != group.columns.keys():
            return False
        for name, want in wanted.items():
            column = group.columns[name]
            got = column.values[0] if column.kind == "system" else column.values
            if isinstance(want, str) or isinstance(got, str):
                if got != want:
                    return False
            elif (
                (column.kind == "atom") != (name in record.atom)
                or np.asarray(got).dtype != want.dtype
                or np.shape(got) != want.shape
                or np.asarray(got).tobytes() != want.tobytes()
            ):
                return False
        return True


def _make_of(row: PlainRow, atoms: int) -> tuple[Any, ...] | None:
    """All that decides what becomes of a row but its values; None where that is not known."""
    values = row.values
    numbers, positions = values["numbers"], values.get("positions")
    cell, pbc = values["cell"], values["pbc"]
    if (
        numbers.dtype.kind not in "iu"
        or type(positions) is not np.ndarray
        or positions.shape != (atoms, 3)
        or positions.dtype.kind not in "biuf"
        or type(cell) is not np.ndarray
        or cell.shape != (3, 3)
        or cell.dtype != _FLOAT
        or type(pbc) is not np.ndarray
        or pbc.shape != (3,)
        or pbc.dtype != _BOOL
    ):
        return None
    # Without a cell there is no field for it; mostly its first number tells.
    out: list[Any] = [numbers.dtype, positions.dtype, cell.item(0) != 0 or bool(cell.any())]
    for name in _TAKEN:  # in one order, whatever that of the row
        if name in values and not _append(out, values, name, atoms):
            return None
    for table in (row.key_value_pairs, row.data):
        out.append(None)
        for name in table:
            if not _append(out, table, name, atoms):
                return None
    if row.key_value_pairs and not row.key_value_pairs.keys().isdisjoint(_TAKEN):
        return None  # such a pair may stand for a column
    return tuple(out)


def _append(out: list[Any], table: dict[str, Any], name: str, atoms: int) -> bool:
    """Name, dtype and shape of a value; False where it has a look of its own to get.

    Lists of numbers are put into the table as arrays, what is text in a store as text.
    """
    value = table[name]
    kind: Any = type(value)
    if kind in _PLAIN:
        out += (name, kind)
        return kind is not int or -(2**63) <= value < 2**63
    if kind is list:
        value = as_value(value)
        if type(value) is str:
            return False
        table[name] = value
    elif kind is dict or value is None:
        if name in _TAKEN:
            return False
        table[name] = as_text(value)
        out += (name, str)
        return True
    elif kind is not np.ndarray or value.dtype.kind not in "biuf":
        return False
    shape = value.shape
    if shape[:1] == (atoms,):
        out += (name, value.dtype, -1, shape[1:])
    else:
        out += (name, value.dtype, shape)
    return True


def _placed(row: PlainRow, atoms: int, names: NameMap) -> Iterator[tuple[str, str, Level, bool]]:
    """Table, name, level, and whether it is six numbers for a matrix, of each value."""
    values = row.values
    yield "values", "numbers", "atom", False
    yield "values", "positions", "atom", False
    if values["cell"].any():
        yield "values", "cell", "system", False
    yield "values", "pbc", "system", False
    for name in EXTRAS:
        if name in values:
            yield "values", name, "atom", False
    for name in RESULTS:
        if name in values:
            yield "values", name, *place_result(name, np.shape(values[name]), atoms)
    for place in ("key_value_pairs", "data"):
        for name, value in getattr(row, place).items():
            yield place, name, *place_any(name, np.shape(value), atoms, names)

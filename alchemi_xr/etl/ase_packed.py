"""Rows of JSON of one form, taken together without decoding each.

Texts of JSON with one form (:class:`~alchemi_xr.native.text.Taken`) differ in numbers and
words alone. Where each value stands is worked out once, from the first of them; then the
values of all lie at known places.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.etl.ase_forms import MOST_FORMS, Form, Forms, Item, common
from alchemi_xr.etl.ase_rows import PackedRow, PlainRow
from alchemi_xr.etl.row_batch import Column, Group, texts

__all__ = ["PackedForm", "PackedForms"]

_SCALARS = (np.dtype(np.float64), np.dtype(np.int64))
_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of a form: numbers of each row of atoms, or altogether."""

    dtype: np.dtype[Any]
    by_atom: bool
    unit: int

    def counts(self, atoms: IntArray) -> IntArray:
        return atoms * self.unit if self.by_atom else np.full_like(atoms, self.unit)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the values of a text stand: the how manieth array, number or word each is."""

    arrays: dict[_Path, int]
    scalars: dict[_Path, int]
    words: dict[_Path, int]
    literals: set[_Path]


class PackedForm:
    """What to do with rows whose texts have one form.

    Parameters
    ----------
    form : Form
        Of the rows themselves.
    arrays : list of _Array
        In the order of the text.
    sources : list of (str, object)
        Of each item of the form: kind and place.
    """

    def __init__(
        self, form: Form, arrays: Sequence[_Array], sources: Sequence[tuple[str, Any]]
    ) -> None:
        self.keys, self._arrays = form.keys, arrays
        self._items: list[tuple[Item, str, Any]] = []
        for item, (kind, source) in zip(form.items, sources, strict=True):
            if all(item.field != known.field for known, _, _ in self._items):
                self._items.append((item, kind, source))
        self._speaks = any(kind == "word" for kind, _ in sources)

    def group(self, rows: Sequence[tuple[int, PackedRow]], path: str) -> Group:
        """The rows as columns; parameters as those of :meth:`Form.group`."""
        found = [row for _, row in rows]
        atoms = np.array([row.atoms for row in found], dtype=np.int64)
        at = np.array([row.first for row in found], dtype=np.int64)
        scalars = np.array([row.scalars for row in found], dtype=np.int64) // 8
        # Rows that follow each other mostly share their cells.
        runs = []
        for _, run in groupby(range(len(found)), key=lambda i: id(found[i].cells)):
            members = list(run)
            runs.append((found[members[0]].cells, slice(members[0], members[-1] + 1)))
        starts = []
        for array in self._arrays:
            size = array.dtype.itemsize
            starts.append(at // size)
            at = at + (array.counts(atoms) * size + 7) // 8 * 8
        words = [row.words.split(b"\0") for row in found] if self._speaks else []
        columns: dict[str, Column] = {}
        for item, kind, source in self._items:
            if kind == "word":
                column = Column("system", texts([said[source].decode() for said in words]))
            elif kind == "same":
                column = _same(item, source, len(found))
            elif kind == "number":
                assert item.dtype is not None
                parts = [cells.view(item.dtype)[scalars[run] + source] for cells, run in runs]
                column = item.column(np.concatenate(parts))
            else:
                array = self._arrays[source]
                first, counts = starts[source], array.counts(atoms)
                column = _column(item, array, runs, first, first + counts, len(found))
            columns[item.field] = column
        return common(rows, path, columns)


def _column(
    item: Item,
    array: _Array,
    runs: Sequence[tuple[NDArray, slice]],
    starts: IntArray,
    stops: IntArray,
    count: int,
) -> Column:
    parts = []
    for cells, run in runs:
        view = cells.view(array.dtype)
        bounds = zip(starts[run].tolist(), stops[run].tolist(), strict=True)
        parts += [view[a:b] for a, b in bounds]
    values = np.concatenate(parts)
    if item.kind == "system":
        return item.column(values.reshape(count, *item.tail))
    return item.column(values.reshape(-1, *item.tail))


def _same(item: Item, value: Any, count: int) -> Column:
    if isinstance(value, str):
        return Column("system", texts([value] * count))
    return item.column(np.broadcast_to(np.asarray(value), (count, *item.tail)).copy())


class PackedForms:
    """The forms of texts met so far.

    Parameters
    ----------
    forms : Forms
        Of the rows.
    """

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._known: dict[Any, PackedForm | None] = {}
        self._by_atoms: set[bytes] = set()

    def form_of(self, row: PackedRow) -> PackedForm | None:
        """The form of a row; None for one that is to be decoded altogether."""
        key: Any = row.form
        if key in self._by_atoms:
            key = (key, row.atoms)
        try:
            return self._known[key]
        except KeyError:
            if len(self._known) > MOST_FORMS:
                return None
        made, general = self._new(row)
        if not general and row.form not in self._by_atoms:
            self._by_atoms.add(row.form)
            key = (row.form, row.atoms)
        self._known[key] = made
        return made

    def _new(self, row: PackedRow) -> tuple[PackedForm | None, bool]:
        try:
            plain = row.plain()
        except Exception:
            return None, True  # it is raised again, and told, for the row by itself
        form = self._forms.form_of(plain)
        if form is None or type(plain) is not PlainRow or plain.atoms != row.atoms:
            return None, True
        taken = row.reader(row.text)
        if taken is None:
            return None, True
        found = json.loads(bytes(taken.rest))
        shapes: list[tuple[list[int], str, int]] = []
        places = _Places({}, {}, {}, set())
        _walk(found, (), places, shapes)
        # Of two values of one name the last counts, and the places are others.
        at = taken.first
        arrays = []
        for shape, name, offset in shapes:
            if offset != at:
                return None, True
            by_atom = shape[:1] == [row.atoms]
            array = _Array(np.dtype(name), by_atom, prod(shape[1:] if by_atom else shape))
            at += (prod(shape) * array.dtype.itemsize + 7) // 8 * 8
            arrays.append(array)
        if (
            at != taken.scalars
            or 8 * len(places.scalars) != taken.stop - taken.scalars
            or len(places.words) != row.words.count(b"\0")
        ):
            return None, True
        sources = [_source_of(item, plain, places) for item in form.items]
        if any(kind == "" for kind, _ in sources):
            return None, form.general
        # A cell of three rows, of three atoms: that of four may be of four, which is a fault.
        general = form.general and not any(
            kind == "array" and item.kind == "system" and arrays[place].by_atom
            for item, (kind, place) in zip(form.items, sources, strict=True)
        )
        made = PackedForm(form, arrays, sources)
        whole, packed = form.group([(0, plain)], ""), made.group([(0, row)], "")
        return (made, general) if _alike(whole, packed) else (None, general)


def _walk(value: Any, path: _Path, out: _Places, shapes: list[Any]) -> None:
    """What stands where, in the order of the text."""
    if isinstance(value, dict):
        if "__ndarray__" in value:
            shapes.append(value["__ndarray__"])
            out.arrays[path] = len(shapes) - 1
            return
        for name, item in value.items():
            _walk(item, (*path, name), out, shapes)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _walk(item, (*path, str(number)), out, shapes)
    elif isinstance(value, str):
        out.words[path] = len(out.words)
    elif value is None or isinstance(value, bool):
        out.literals.add(path)
    else:
        out.scalars[path] = len(out.scalars)


def _source_of(item: Item, row: PlainRow, places: _Places) -> tuple[str, Any]:
    """Kind and place of a value; an empty kind where it cannot be told from the form."""
    path = (item.name,) if item.place == "values" else (item.place, item.name)
    value = getattr(row, item.place)[item.name]
    if path in places.arrays:
        return "array", places.arrays[path]
    if path in places.scalars and item.dtype in _SCALARS and not item.tail:
        return "number", places.scalars[path]
    if path in places.words and item.dtype is None:
        return "word", places.words[path]
    absent = path == ("pbc",)
    return ("same", value) if path in places.literals or absent else ("", None)


def _alike(first: Group, second: Group) -> bool:
    if first.columns.keys() != second.columns.keys():
        return False
    for name, one in first.columns.items():
        other = second.columns[name]
        if (one.kind, one.values.dtype, one.values.shape) != (
            other.kind,
            other.values.dtype,
            other.values.shape,
        ):
            return False
        if one.values.dtype.kind == "O":
            if one.values.tolist() != other.values.tolist():
                return False
        elif one.values.tobytes() != other.values.tobytes():
            return False
    return True

"""Records of one make as flat columns, and such groups as a block.

A source that meets its records one by one, and most of them alike, need not carry an
object for each: those of one make (names, dtypes, row shapes) go into a :class:`Group`,
which remembers the place of each record in its file. Groups of several makes give the
block that their records would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr, row_indices
from alchemi_xr.data.fields import FIELDS, fill_for
from alchemi_xr.etl.records import Record, as_text
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["Column", "Group", "Kind", "groups_of", "groups_to_block", "texts"]

Kind = Literal["atom", "ragged", "system"]
"""One row an atom; a system's array with as many rows; one value of one shape a system."""


@dataclass(frozen=True, slots=True)
class Column:
    """The values of a field in all records of a group.

    Parameters
    ----------
    kind : {"atom", "ragged", "system"}
    values : array
        [V, ...] for the first two, of all records behind each other; else [k, ...].
        Texts are of dtype object.
    """

    kind: Kind
    values: NDArray


@dataclass(frozen=True, slots=True)
class Group:
    """Records with the same fields of the same dtypes and shapes.

    Parameters
    ----------
    numbers : int64 array, [k]
        Their places in the file, which rise.
    atoms : int64 array, [k]
    columns : dict of str to Column
    """

    numbers: IntArray
    atoms: IntArray
    columns: Mapping[str, Column]

    def observe(self, observer: FieldObserver) -> None:
        """Tell an observer which fields these records have."""
        count = len(self.atoms)
        observer.num_samples += count
        counts = np.unique(self.atoms).tolist()
        for name, column in self.columns.items():
            values = column.values
            dtype, tail = values.dtype.name, values.shape[1:]
            if column.kind == "atom":
                observer.see(name, "atom", dtype, tail, count=count)
                continue
            if values.dtype.kind == "O":
                observer.see(name, "system", "str", (), count=count)
                continue
            # Of a fixed shape, the fewest and the most atoms tell all: is it one row an atom?
            seen = counts if column.kind == "ragged" else sorted({counts[0], counts[-1]})
            for atoms in seen:
                shape = (atoms, *tail) if column.kind == "ragged" else tail
                times = count - len(seen) + 1 if atoms == seen[0] else 1
                observer.see(name, "system", dtype, shape, count=times, atoms=atoms)

    def cut(self, start: int, stop: int) -> Group:
        """The records whose places are in a range, as views."""
        a, b = np.searchsorted(self.numbers, (start, stop)).tolist()
        if (a, b) == (0, len(self.numbers)):
            return self
        ptr = counts_to_ptr(self.atoms)
        first, last = int(ptr[a]), int(ptr[b])
        return Group(
            self.numbers[a:b],
            self.atoms[a:b],
            {
                name: Column(c.kind, c.values[a:b] if c.kind == "system" else c.values[first:last])
                for name, c in self.columns.items()
            },
        )


def groups_of(records: Sequence[tuple[int, Record]]) -> list[Group]:
    """Records, each with its place in the file, as groups."""
    alike: dict[Any, list[tuple[int, Record]]] = {}
    for number, record in records:
        make = (
            tuple((name, v.dtype, v.shape[1:]) for name, v in record.atom.items()),
            tuple(
                (name, str)
                if isinstance(v, str)
                else (name, v.dtype, *_kind_of(name, v, record.atoms))
                for name, v in record.system.items()
            ),
        )
        alike.setdefault(make, []).append((number, record))
    return [_group(of_one) for of_one in alike.values()]


def _kind_of(name: str, value: NDArray, atoms: int) -> tuple[Kind, tuple[int, ...]]:
    # Of a field of the table the shape is known: as many rows as atoms would be chance.
    if name not in FIELDS and value.ndim and len(value) == atoms:
        return "ragged", value.shape[1:]
    return "system", value.shape


def _group(records: Sequence[tuple[int, Record]]) -> Group:
    first = records[0][1]
    columns = {
        name: Column("atom", np.concatenate([r.atom[name] for _, r in records]))
        for name in first.atom
    }
    for name, value in first.system.items():
        values = [r.system[name] for _, r in records]
        if isinstance(value, str):
            columns[name] = Column("system", texts(values))
        elif _kind_of(name, value, first.atoms)[0] == "ragged":
            columns[name] = Column("ragged", np.concatenate(values))
        else:
            columns[name] = Column("system", np.stack(values))
    return Group(
        np.array([number for number, _ in records], dtype=np.int64),
        np.array([r.atoms for _, r in records], dtype=np.int64),
        columns,
    )


def texts(values: Sequence[str]) -> NDArray:
    """Texts as an array of objects, [k]."""
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def groups_to_block(groups: Sequence[Group], places: Sequence[IntArray], schema: Schema) -> Block:
    """Groups as the block of their records, in the layouts of a schema.

    Parameters
    ----------
    groups : sequence of Group
    places : sequence of int64 array
        Of the records of each group: which sample of the block it is.
    schema : Schema
    """
    total = sum(len(g.atoms) for g in groups)
    atoms = np.zeros(total, dtype=np.int64)
    for group, place in zip(groups, places, strict=True):
        atoms[place] = group.atoms
    ptr = counts_to_ptr(atoms)
    arrays: dict[str, NDArray] = {}
    levels: dict[str, Level] = {}
    present: dict[str, BoolArray] = {}
    for layout in schema:
        name = layout.name
        # A name of two levels is stored at one: the other's values are no part of it.
        kinds: tuple[Kind, ...] = ("ragged", "system")
        if layout.level == "atom":
            kinds = ("atom",) if name in schema.dropped else ("atom", "ragged")
        having = [
            (group.columns[name], group.atoms, place)
            for group, place in zip(groups, places, strict=True)
            if name in group.columns and group.columns[name].kind in kinds
        ]
        mask = np.zeros(total, dtype=bool)
        for _, _, place in having:
            mask[place] = True
        if not mask.any():
            continue
        if len(groups) == 1:
            arrays[name] = _conformed(layout, *having[0][:2])
        else:
            arrays[name] = _scattered(layout, having, ptr)
        levels[name] = layout.level
        if not mask.all():
            present[name] = mask
    return Block(ptr, np.zeros_like(ptr), arrays, levels, present)


def _conformed(layout: FieldLayout, column: Column, atoms: IntArray) -> NDArray:
    """The values of a column as the layout has them."""
    values = column.values
    if layout.dtype == "str":
        if values.dtype.kind == "O":
            return values
        cut = counts_to_ptr(atoms) if column.kind == "ragged" else None
        return texts(
            [
                as_text(np.asarray(values[i]) if cut is None else values[cut[i] : cut[i + 1]])
                for i in range(len(atoms))
            ]
        )
    rows = int(atoms.sum()) if layout.level == "atom" else len(atoms)
    return values.astype(layout.dtype, copy=False).reshape(rows, *layout.tail)


def _scattered(
    layout: FieldLayout, having: Sequence[tuple[Column, IntArray, IntArray]], ptr: IntArray
) -> NDArray:
    rows = int(ptr[-1]) if layout.level == "atom" else len(ptr) - 1
    if layout.dtype == "str":
        out = np.full(rows, "", dtype=object)
    else:
        dtype = np.dtype(layout.dtype)
        out = np.full((rows, *layout.tail), fill_for(dtype), dtype)
    for column, atoms, place in having:
        where = row_indices(ptr, place)[0] if layout.level == "atom" else place
        out[where] = _conformed(layout, column, atoms)
    return out

"""For sources that read record by record: records to a block, field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import fill_for
from alchemi_xr.etl.names import Contest, NameMap
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["Record", "as_text", "as_value", "records_to_block", "voigt_to_matrix"]


@dataclass(slots=True)
class Record:
    """One sample as its source gives it.

    Parameters
    ----------
    atoms : int
    atom, system : dict of str to value
        Field (the name map's) to array [atoms, ...], and to array, number or text.
    keys : list of str
        Names as they stood in the input.
    unstored : list of str
        Names whose values have no place in a store.
    contests : list of Contest
        Names put aside for others of the same field, with another value.
    """

    atoms: int
    atom: dict[str, NDArray] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    unstored: list[str] = field(default_factory=list)
    contests: list[Contest] = field(default_factory=list)
    _held: dict[str, tuple[int, str]] = field(default_factory=dict)

    def put(self, name: str, level: Level, value: Any, names: NameMap) -> None:
        """Add a value under the field that its name means.

        Of two names for one field, the preferred one stays.
        """
        self.keys.append(name)
        target = names.target(name, level)
        table: dict[str, Any] = self.atom if level == "atom" else self.system
        if level == "atom":
            taken: Any = np.asarray(value)
            if taken.dtype.kind not in "biuf":
                self.unstored.append(name)
                return
        else:
            taken = as_value(value)
        rank, held = self._held.get(target.name, (None, ""))
        preferred = rank is None or target.rank < rank
        if rank is not None and held != name and target.name in table:
            kept, other = (name, held) if preferred else (held, name)
            if not _same(table[target.name], taken):
                self.contests.append(Contest(target.name, kept, other))
        if preferred:
            self._held[target.name] = target.rank, name
            table[target.name] = taken

    def observe(self, observer: FieldObserver) -> None:
        """Tell an observer which fields this sample has."""
        observer.num_samples += 1
        observer.contest(self.contests)
        for name, values in self.atom.items():
            observer.see(name, "atom", values.dtype.name, values.shape[1:])
        for name, value in self.system.items():
            if isinstance(value, str):
                observer.see(name, "system", "str", ())
            else:
                observer.see(name, "system", value.dtype.name, value.shape, atoms=self.atoms)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return bool(np.array_equal(first, second))
    # One number and an array of one say the same.
    if first.size != second.size:
        return False
    return np.array_equal(first.reshape(-1), second.reshape(-1), equal_nan=True)


def as_value(value: Any) -> NDArray | str:
    """A number, an array of numbers, or text for everything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float, np.generic, np.ndarray, list, tuple)):
        try:
            values = np.asarray(value)
        except ValueError:  # ragged lists
            return as_text(value)
        if values.dtype.kind in "biuf":
            return values
    return as_text(value)


def as_text(value: Any) -> str:
    """Any value as text: JSON where it has a form in it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=_json_default, ensure_ascii=False)


def _json_default(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "todict"):
        return value.todict()
    return str(value)


def voigt_to_matrix(values: NDArray) -> NDArray:
    """[..., 6] in the order xx, yy, zz, yz, xz, xy as [..., 3, 3].

    Examples
    --------
    >>> voigt_to_matrix(np.arange(6.0))
    array([[0., 5., 4.],
           [5., 1., 3.],
           [4., 3., 2.]])
    """
    return values[..., [[0, 5, 4], [5, 1, 3], [4, 3, 2]]]


def records_to_block(records: Sequence[Record], schema: Schema) -> Block:
    """The samples as flat arrays, in the layouts of the schema."""
    atoms = np.array([r.atoms for r in records], dtype=np.int64)
    arrays: dict[str, NDArray] = {}
    levels: dict[str, Level] = {}
    present: dict[str, BoolArray] = {}
    for layout in schema:
        name = layout.name
        values: list[Any]
        if layout.level == "atom" and name in schema.dropped:
            values = [r.atom.get(name) for r in records]
        elif layout.level == "atom":
            values = [r.atom.get(name, r.system.get(name)) for r in records]
        else:
            values = [r.system.get(name) for r in records]
        mask = np.array([v is not None for v in values], dtype=bool)
        if not mask.any():
            continue
        arrays[name] = _column(layout, values, atoms)
        levels[name] = layout.level
        if not mask.all():
            present[name] = mask
    ptr = counts_to_ptr(atoms)
    return Block(ptr, np.zeros_like(ptr), arrays, levels, present)


def _column(layout: FieldLayout, values: Sequence[Any], atoms: NDArray) -> NDArray:
    if layout.dtype == "str":
        out = np.empty(len(values), dtype=object)
        out[:] = ["" if v is None else as_text(v) for v in values]
        return out
    dtype = np.dtype(layout.dtype)
    fill = fill_for(dtype)
    if layout.level == "atom":
        rows = [
            np.full((n, *layout.tail), fill, dtype)
            if v is None
            else np.asarray(v, dtype=dtype).reshape(n, *layout.tail)
            for v, n in zip(values, atoms.tolist(), strict=True)
        ]
        return np.concatenate(rows)
    out = np.full((len(values), *layout.tail), fill, dtype)
    for i, value in enumerate(values):
        if value is not None:
            out[i] = np.asarray(value, dtype=dtype).reshape(layout.tail)
    return out


def check_record(record: Record, table: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
    """The first field whose value cannot have the shape of the table, and why."""
    for name, tail in table.items():
        value = record.system.get(name)
        if value is None:
            continue
        size = int(np.prod(tail))
        if isinstance(value, str) or value.size != size:
            found = repr(value) if isinstance(value, str) else list(value.shape)
            return name, f"found {found}, expected {size} number(s)"
    return None

"""Rows of ASE's SQLite databases, from the columns of the table itself.

What is plain (arrays, numbers, texts) is taken as it stands in the file; a row with
anything else, a database of an old version, and one with external tables go through
ASE, which has the last word on what a row is.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.ase_rows import Odd, PlainRow, Rows, loads, plain

__all__ = ["sqlite_rows"]

# Versions whose columns mean what is written here.
_VERSIONS = range(6, 10)
_F8, _I4 = np.dtype("<f8"), np.dtype("<i4")
_COLUMNS: dict[str, tuple[np.dtype[Any], tuple[int, ...]] | None] = {
    "numbers": (_I4, (-1,)),
    "positions": (_F8, (-1, 3)),
    "cell": (_F8, (3, 3)),
    "initial_magmoms": (_F8, (-1,)),
    "initial_charges": (_F8, (-1,)),
    "masses": (_F8, (-1,)),
    "tags": (_I4, (-1,)),
    "momenta": (_F8, (-1, 3)),
    "energy": None,
    "free_energy": None,
    "forces": (_F8, (-1, 3)),
    "stress": (_F8, (-1,)),
    "dipole": (_F8, (-1,)),
    "magmoms": (_F8, (-1,)),
    "magmom": None,
    "charges": (_F8, (-1,)),
}
# Columns that are asked for before them.
_OTHERS = 6
_QUERY = (
    f"SELECT id, pbc, constraints, calculator_parameters, key_value_pairs, data, "
    f"{', '.join(_COLUMNS)} FROM systems WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
)
_PBC = [np.array([bool(code & bit) for bit in (1, 2, 4)]) for code in range(8)]


def sqlite_rows(path: str, start: int, stop: int | None, step: int) -> Rows:
    """Rows of a SQLite database whose ids are in a range.

    Raises
    ------
    SourceError
        It is no ASE database.
    """
    from ase.db import connect

    try:
        raw = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)
    except sqlite3.DatabaseError as error:
        raise _no_database(path, error) from error
    last = 2**62 if stop is None else stop
    with closing(raw):
        try:
            raw.execute("SELECT id FROM systems LIMIT 1").fetchone()
        except sqlite3.DatabaseError as error:
            raise _no_database(path, error) from error
        database = connect(path, use_lock_file=False)
        direct = _is_plain(raw, database)
        while direct:
            try:
                # Portions, not one long reading: nobody who writes to it is kept waiting.
                found = raw.execute(_QUERY, (start, last, step)).fetchall()
            except sqlite3.DatabaseError:
                break
            if not found:
                return
            for columns in found:
                identity = columns[0]
                try:
                    row: Any = _row_of(columns)
                except Exception:
                    row = _one_through_ase(database, identity)
                yield identity, row, (identity, identity + 1)
            start = found[-1][0] + 1
        try:
            query = "SELECT id FROM systems WHERE id >= ? AND id < ? ORDER BY id"
            ids = [int(row[0]) for row in raw.execute(query, (start, last))]
        except sqlite3.DatabaseError as error:
            raise _no_database(path, error) from error
        for at in range(0, len(ids), step):
            part = ids[at : at + step]
            rows = _through_ase(database, part)
            for identity in part:
                yield identity, rows[identity], (identity, identity + 1)


def _no_database(path: str, error: Exception) -> SourceError:
    return SourceError(path, f"is no ASE database ({error})")


def _is_plain(raw: sqlite3.Connection, database: Any) -> bool:
    try:
        database.metadata  # noqa: B018 - opens it, and finds out the version
        query = "SELECT COUNT(*) FROM information WHERE name = 'external_table_name'"
        return database.version in _VERSIONS and raw.execute(query).fetchone()[0] == 0
    except Exception:
        return False  # what is wrong, ASE says of each row


def _through_ase(database: Any, ids: Sequence[int]) -> dict[int, Any]:
    try:
        rows = {r.id: r for r in database.select(f"id>={ids[0]},id<={ids[-1]}")}
        if all(identity in rows for identity in ids):
            return rows
    except Exception:
        pass  # one row of the range cannot be decoded: find out which
    return {identity: _one_through_ase(database, identity) for identity in ids}


def _one_through_ase(database: Any, identity: int) -> Any:
    try:
        return database.get(id=identity)
    except Exception as error:
        return error


def _row_of(found: Sequence[Any]) -> PlainRow:
    """A row from its columns; any exception where it is not plain."""
    identity, pbc, constraints, parameters, pairs, data = found[:_OTHERS]
    if constraints is not None:
        raise Odd
    if parameters is not None:
        _check_parameters(parameters)
    values: dict[str, Any] = {}
    for place, name, dtype, shape in _there(tuple(map(type, found[_OTHERS:]))):
        value = found[place]
        if dtype is not None:
            value = np.frombuffer(value, dtype) if value else np.zeros(0, dtype)
            if shape is not None:
                value = value.reshape(shape)
        values[name] = value
    if pbc is not None:
        values["pbc"] = _PBC[pbc & 7]
    if pairs != "{}":
        values["key_value_pairs"] = _pairs(pairs)
    if data != "null":
        values["data"] = _data(data)
    return PlainRow(values, identity)


@lru_cache(maxsize=1024)
def _there(kinds: tuple[type, ...]) -> list[tuple[int, str, Any, tuple[int, ...] | None]]:
    """Of a row with columns of these types: place, name, dtype and shape of those that it has.

    Raises
    ------
    Odd
        Arrays are missing, or something else stands in their places.
    """
    out: list[tuple[int, str, Any, tuple[int, ...] | None]] = []
    for place, ((name, form), kind) in enumerate(
        zip(_COLUMNS.items(), kinds, strict=True), _OTHERS
    ):
        if kind is type(None):
            if name in ("numbers", "positions", "cell"):
                raise Odd
        elif form is None:
            out.append((place, name, None, None))
        elif kind is bytes:
            dtype, shape = form
            out.append((place, name, dtype, shape if len(shape) > 1 else None))
        else:
            raise Odd
    return out


@lru_cache(maxsize=256)
def _check_parameters(text: str) -> None:
    """ASE reads them, and what it cannot read makes the row a broken one."""
    from ase.io.jsonio import decode

    found = decode(text)
    while isinstance(found, str):
        found = decode(found)


def _loads(text: str | bytes) -> Any:
    try:
        return loads(text)
    except ValueError:
        return json.loads(text)  # knows NaN


def _pairs(text: str) -> dict[str, Any]:
    found = plain(_loads(text))
    if type(found) is not dict:
        raise Odd
    return found


def _data(packed: Any) -> dict[str, Any]:
    """What ``ase.db.core.bytes_to_object`` makes of it, or of a text ``ase.io.jsonio``."""
    if type(packed) is str:
        return _pairs(packed)
    if type(packed) is not bytes:
        raise Odd
    found = _loads(packed[int.from_bytes(packed[:8], "little", signed=True) :])
    if type(found) is not dict:
        raise Odd
    out = {}
    for name, value in found.items():
        if name[:2] == "__":
            raise Odd
        out[name] = _unpacked(value, packed)
    return out


def _unpacked(value: Any, packed: bytes) -> Any:
    if type(value) is dict:
        if "__ndarray__" in value and len(value) == 1:
            return _array(packed, *value["__ndarray__"])
        if any(name[:2] == "__" for name in value):
            raise Odd
        return {name: _unpacked(item, packed) for name, item in value.items()}
    if type(value) is list and any(type(item) in (dict, list) for item in value):
        return [_unpacked(item, packed) for item in value]
    return value


def _array(packed: bytes, shape: list[int], name: str, offset: int) -> NDArray:
    dtype = np.dtype(name).newbyteorder("<")
    count = int(np.prod(shape))
    if offset < 0 or count < 0:
        raise Odd
    if count == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(packed, dtype, count, offset).reshape(shape)

"""Rows of ASE databases, in the order of their ids: JSON and LMDB.

Each reader (that of :mod:`~alchemi_xr.etl.ase_sqlite`, too) gives, for a range, the id,
the row (or the exception that it raised) and where it lies; none of them loads a
database as a whole, and none writes to it.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from string import ascii_letters
from typing import Any, TypeAlias

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import NDArray
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.inflate import Inflate
from alchemi_xr.native.text import ArrayReader, Taken

__all__ = [
    "Odd",
    "PackedRow",
    "PlainRow",
    "Rows",
    "json_rows",
    "lmdb_metadata",
    "lmdb_rows",
    "loads",
    "plain",
    "row_of",
]

# Rows and bytes that are taken from an LMDB file at once.
_STEP, _BYTES = 500, 8 * 2**20
_NO_CELL, _NOT_PERIODIC = np.zeros((3, 3)), np.zeros(3, dtype=bool)
_NESTED = frozenset((dict, list))
_LETTERS = frozenset(ascii_letters)
_TYPES = {n: np.dtype(n) for n in ("float64", "float32", "int64", "int32", "bool")}
_ONE_AT_A_TIME = threading.Lock()
Rows: TypeAlias = Iterator[tuple[int, Any, tuple[int, int]]]


def json_rows(path: str, start: int, stop: int | None) -> Rows:
    from ase.db.row import AtomsRow
    from ase.io.jsonio import decode

    for key, text, place in _json_members(path, start, stop):
        if not key.isdigit():
            continue
        try:
            values = decode(text)
            values["id"] = int(key)
            row: Any = AtomsRow(values)
        except Exception as error:
            row = error
        yield int(key), row, place


def _json_members(
    path: str, start: int, stop: int | None, window: int = 2**20
) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Key, text and byte range (from the key on) of the members of a JSON object.

    The file is decoded as Latin-1 to walk it, so that a place in the text is a
    place in the file; only the values are UTF-8.
    """
    decoder = json.JSONDecoder()
    with open(path, "rb") as file:
        file.seek(start)
        base, text, at = start, "", 0
        ended = False

        def more() -> None:
            nonlocal text, base, at, ended
            block = file.read(max(window, len(text) - at))
            ended = not block
            text, base, at = text[at:] + block.decode("latin-1"), base + at, 0

        more()
        while True:
            while at < len(text) and text[at] in " \t\r\n,{":
                at += 1
            if stop is not None and base + at >= stop:
                return
            if at >= len(text) and not ended:
                more()
                continue
            if at >= len(text) or text[at] == "}":
                return
            try:
                key, after = decoder.raw_decode(text, at)
                while after < len(text) and text[after] in " \t\r\n:":
                    after += 1
                _, end = decoder.raw_decode(text, after)
                if end == len(text) and not ended:
                    raise ValueError  # a number may go on
            except ValueError:
                if ended:
                    shown = text[at : at + 40]
                    raise SourceError(
                        f"{path}, byte {base + at}",
                        "the JSON ends or breaks inside a row",
                        found=repr(shown),
                        mend="the file is damaged after this byte; restore it",
                    ) from None
                more()
                continue
            value = text[after:end].encode("latin-1").decode("utf-8", "replace")
            yield str(key), value, (base + at, base + end)
            at = end


def lmdb_rows(path: str, start: int, stop: int | None) -> Rows:
    """Rows of an ``.aselmdb`` file whose ids are in a range.

    Raises
    ------
    OptionalDependencyError
        The package ``lmdb`` is not installed.
    """
    # Keys are decimal texts, sorted as text: the ids must be sorted anew. (A
    # file may lack its count key "nextid"; the keys alone tell what is there.)
    ids = range(start, stop) if stop is not None else _read_lmdb(path, _ids)
    reader, inflate = ArrayReader(), Inflate()
    at = 0
    while at < len(ids):
        found, passed = _read_lmdb(path, partial(_packed, ids=ids[at : at + _STEP]))
        at += passed
        for identity, packed in found:
            if identity < start:
                continue
            try:
                row: Any = _read_row(inflate(packed), identity, reader)
            except Exception as error:
                row = error
            yield identity, row, (identity, identity + 1)


def _read_row(text: bytes | bytearray, identity: int, reader: ArrayReader) -> Any:
    taken = reader(text)
    if taken is not None and taken.form is not None:
        return PackedRow(text, identity, taken, reader)
    return row_of(text, identity, taken)


class PlainRow:
    """What ``ase.db.row.AtomsRow`` gives of a row, without making one."""

    __slots__ = ("atoms", "constraints", "data", "id", "key_value_pairs", "values")

    def __init__(self, values: dict[str, Any], identity: int) -> None:
        self.constraints: tuple[Any, ...] = ()
        self.id = identity
        self.data: dict[str, Any] = values.pop("data", None) or {}
        self.key_value_pairs: dict[str, Any] = values.pop("key_value_pairs", None) or {}
        if "cell" not in values:
            values["cell"] = _NO_CELL
        if "pbc" not in values:
            values["pbc"] = _NOT_PERIODIC
        self.values = values
        numbers = values.get("numbers")
        # 0 where there is no such thing: then the row has a look of its own to get.
        self.atoms = len(numbers) if type(numbers) is np.ndarray and numbers.ndim == 1 else 0

    def __contains__(self, name: object) -> bool:
        return name in self.values or name in self.key_value_pairs

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.key_value_pairs[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.values:
            raise AttributeError(name)
        return self.values[name]


class Odd(Exception):
    """A value that only ASE's own decoder knows."""


class PackedRow:
    """A row whose arrays are decoded, and of which the rest is known by its form alone.

    Parameters
    ----------
    text : bytes or bytearray
        JSON.
    identity : int
    taken : Taken
        With a form.
    reader : ArrayReader
    """

    __slots__ = (
        "atoms",
        "cells",
        "first",
        "form",
        "id",
        "reader",
        "scalars",
        "stop",
        "text",
        "words",
    )

    def __init__(
        self, text: bytes | bytearray, identity: int, taken: Taken, reader: ArrayReader
    ) -> None:
        self.text, self.id, self.reader = text, identity, reader
        _, self.cells, form, words, self.atoms, self.first, self.scalars, self.stop = taken
        self.form, self.words = form or b"", words or b""

    def plain(self) -> Any:
        """The row, decoded altogether."""
        return row_of(self.text, self.id, self.reader(self.text))


def row_of(text: bytes | bytearray, identity: int, taken: Taken | None = None) -> Any:
    """A row, fast where all of it is plain numbers, texts and arrays.

    Parameters
    ----------
    text : bytes or bytearray
        JSON.
    identity : int
    taken : Taken, optional
        The text, taken apart.
    """
    try:
        cells: NDArray | None = None
        if taken is None:
            values = loads(text)
        else:
            values, cells = loads(taken.rest), taken.cells
        if values.get("constraints") or not isinstance(values.get("data", {}), dict):
            raise Odd
        for name, value in values.items():
            if type(value) in _NESTED:
                values[name] = plain(value, cells)
        return PlainRow(values, identity)
    except (ValueError, TypeError, AttributeError, KeyError, Odd):
        from ase.db.row import AtomsRow
        from ase.io.jsonio import decode

        row = decode(text.decode())
        row["id"] = identity
        return AtomsRow(row)


def plain(value: Any, cells: NDArray | None = None) -> Any:
    """A value as ``ase.io.jsonio.decode`` gives it.

    Parameters
    ----------
    value : object
        As JSON has it.
    cells : uint8 array, optional
        Where the numbers of arrays lie, if not in the value
        (:class:`~alchemi_xr.native.text.ArrayReader`).
    """
    kind = type(value)
    if kind is dict:
        array = value.get("__ndarray__")
        if array is not None and len(value) == 1:
            shape, dtype, flat = array
            if cells is None:
                return np.array(flat, dtype=dtype).reshape(shape)
            count = prod(shape)
            if count == 0:
                return np.zeros(shape, dtype)
            found = np.frombuffer(cells, _TYPES[dtype], count, flat)
            return found if len(shape) == 1 else found.reshape(shape)
        for key, item in value.items():
            if key[:2] == "__" or _is_whole(key):
                raise Odd
            if type(item) in _NESTED:
                value[key] = plain(item, cells)
    elif kind is list and {dict, list} & set(map(type, value)):
        for item in value:
            _without_dicts(item)
    return value


def _without_dicts(value: Any) -> None:
    """Lists stay lists; what dicts in them are, ASE knows."""
    if isinstance(value, dict):
        raise Odd
    if isinstance(value, list):
        for item in value:
            _without_dicts(item)


def _is_whole(key: str) -> bool:
    if key[:1] in _LETTERS:
        return False
    try:
        int(key)
    except ValueError:
        return False
    return True


def _decoder() -> Callable[[Any], Any]:
    """The faster of the two JSON readers that there is."""
    try:
        from orjson import loads
    except ImportError:
        return _plain_loads
    return loads


def _plain_loads(text: str | bytes | bytearray | memoryview) -> Any:
    """As ``orjson.loads``: takes memoryviews, refuses NaN and infinities."""
    given = bytes(text) if isinstance(text, memoryview) else text
    return json.loads(given, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_decode = _decoder()


def loads(text: str | bytes | bytearray | memoryview) -> Any:
    """What JSON says, as ``json`` understands it.

    Raises
    ------
    ValueError
        It is no JSON, or has NaN or infinities.
    """
    found = _decode(text)
    if _has_huge(found):
        # A whole number of more than 64 bits, which orjson takes for a float?
        return json.loads(bytes(text) if isinstance(text, memoryview) else text)
    return found


def _has_huge(value: Any) -> bool:
    kind = type(value)
    if kind is float:
        return not -(2.0**63) < value < 2.0**63
    if kind is dict:
        return "__ndarray__" not in value and any(map(_has_huge, value.values()))
    return kind is list and any(map(_has_huge, value))


def lmdb_metadata(path: str) -> dict[str, Any]:
    """What an ``.aselmdb`` file says of itself."""
    packed = _read_lmdb(path, lambda transaction: transaction.get(b"metadata"))
    return {} if packed is None else dict(json.loads(zlib.decompress(packed)))


def _ids(transaction: Any) -> list[int]:
    return sorted(int(key) for key in transaction.cursor().iternext(values=False) if key.isdigit())


def _packed(transaction: Any, ids: Sequence[int]) -> tuple[list[tuple[int, bytes]], int]:
    """Rows, not many more bytes than enough, and how many of the ids were asked for."""
    found, size = [], 0
    for passed, identity in enumerate(ids, 1):
        packed = transaction.get(b"%d" % identity)
        if packed is not None:
            found.append((identity, packed))
            size += len(packed)
            if size > _BYTES:
                return found, passed
    return found, len(ids)


def _read_lmdb(path: str, read: Callable[[Any], Any]) -> Any:
    lmdb = import_optional("lmdb", extra="etl", why=path)
    # A process may hold an LMDB file open only once, so its threads take turns.
    with _ONE_AT_A_TIME:
        try:
            # Without a lock file: a source is never written to, not even beside it.
            environment = lmdb.open(path, subdir=False, readonly=True, lock=False, create=False)
        except lmdb.Error as error:
            raise SourceError(path, f"is no LMDB file ({error})") from error
        with environment, environment.begin() as transaction:
            return read(transaction)

"""The atom lines of many frames at once: text to arrays, without a loop over lines.

Three ways, each exact and each falling back on the next: lines of one width
with fixed-point numbers are read digit column by digit column; other numbers
go through NumPy's text reader; the rest is split into words. A line that does
not fit raises :class:`LineFault`, which says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.etl.elements import SYMBOLS

__all__ = [
    "SYMBOL_NUMBERS",
    "Column",
    "ColumnSpec",
    "LineFault",
    "check_elements",
    "odd_elements",
    "out_name",
    "parse_columns",
    "parse_properties",
]


class LineFault(Exception):
    """Some atom line does not fit its columns (found out in bulk, or exactly)."""

    def __init__(self, reason: str, row: int | None = None, field: str = "") -> None:
        super().__init__(reason)
        self.reason, self.row, self.field = reason, row, field


@dataclass(frozen=True, slots=True)
class Column:
    """Some words of each line: a name, a kind (S, R, I, L) and how many."""

    name: str
    kind: str
    width: int


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """The columns of a frame; ``loose`` allows more words than they need."""

    columns: tuple[Column, ...]
    loose: bool = False

    @property
    def words(self) -> int:
        return sum(c.width for c in self.columns)

    @property
    def species(self) -> int | None:
        """Word that holds the element symbol."""
        at = 0
        for column in self.columns:
            if column.kind == "S" and column.name == "species":
                return at
            at += column.width
        return None


PLAIN = ColumnSpec((Column("species", "S", 1), Column("pos", "R", 3)), loose=True)


@lru_cache(maxsize=1024)
def parse_properties(text: str) -> ColumnSpec:
    """The columns that a ``Properties`` value declares.

    Raises
    ------
    LineFault
        It is not a list of name:kind:width, or lacks positions or elements.
    """
    if not text:
        return PLAIN
    parts = text.split(":")
    if len(parts) % 3:
        raise LineFault(f"found {text!r}, expected triples name:kind:width", field="Properties")
    columns = []
    for name, kind, width in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        count = int(width) if width.isascii() and width.isdigit() and len(width) < 7 else 0
        if kind not in ("S", "R", "I", "L") or not 1 <= count <= _WIDEST or not name:
            raise LineFault(
                f"found {name}:{kind}:{width}, expected name:S|R|I|L:width", field="Properties"
            )
        # Numbers stand for elements as well as symbols do, and are looked at as they are.
        columns.append(Column(name, "S" if (name, kind) == ("species", "I") else kind, count))
    spec = ColumnSpec(tuple(columns))
    shapes = {c.name: (c.kind, c.width) for c in columns}
    if shapes.get("pos") != ("R", 3):
        raise LineFault(f"found no pos:R:3 in {text!r}", field="Properties")
    if len(shapes) < len(columns):
        raise LineFault(f"found a name twice in {text!r}", field="Properties")
    elements = {"species": ("S", 1), "Z": ("I", 1)}
    if not any(shapes.get(name) == form for name, form in elements.items()):
        raise LineFault(f"found neither species:S:1 nor Z:I:1 in {text!r}", field="Properties")
    if any(shapes.get(name, form) != form for name, form in elements.items()):
        raise LineFault(
            f"found another form than species:S:1 or Z:I:1 in {text!r}", field="Properties"
        )
    return spec


def _symbol_table() -> NDArray:
    """Atomic number by the first two bytes of a word, -1 where there is none."""
    table = np.full(65_536, -1, dtype=np.int64)
    for number, symbol in enumerate(SYMBOLS):
        for form in {symbol, symbol.upper(), symbol.lower(), str(number)}:
            code = form.encode()
            if len(code) <= 2 and (number or form in ("X", "x", "0")):
                table[code[0] | (code[1] if len(code) == 2 else 32) << 8] = number
    return table


#: Atomic number by the two bytes of a symbol (a blank for the second of a short one).
SYMBOL_NUMBERS = _symbol_table()
_NUMBERS = {
    **{s.encode(): n for n, s in enumerate(SYMBOLS)},
    **{str(n).encode(): n for n in range(len(SYMBOLS))},
}
_BLANK = np.zeros(256, dtype=bool)
_BLANK[[9, 10, 11, 12, 13, 32]] = True
_NUMERIC = _BLANK.copy()
_NUMERIC[list(b"0123456789+-.eEdDnNaAiIfFtTyY")] = True
# Lines at a time: their characters and digits stay in the cache.
_BLOCK = 8192
_POWERS = 10.0 ** np.arange(23)
# Words of one column: more is no column but a slip, and would fill the memory.
_WIDEST = 100_000
_INT64 = np.iinfo(np.int64)
# Columns that hold atomic numbers whatever the rest of the frame says.
_ELEMENTS = ("Z", "numbers", "atomic_numbers")
_SECOND = "Z\0"
_LOGICAL = {b"T": 1, b"F": 0, b"True": 1, b"False": 0, b"true": 1, b"false": 0, b"1": 1, b"0": 0}
_WHOLE = re.compile(rb"[-+]?\d+\Z")


def parse_columns(body: bytes, lines: int, spec: ColumnSpec) -> dict[str, NDArray]:
    """Arrays by column name; the element column comes as ``Z``, int64 [V].

    Parameters
    ----------
    body : bytes
        Atom lines and nothing else, each but perhaps the last ended by a newline.
    lines : int
        How many there are.
    spec : ColumnSpec

    Raises
    ------
    LineFault
    """
    if lines == 0:
        return {_out_name(c): _empty(c) for c in spec.columns}
    if not body.endswith(b"\n"):
        body += b"\n"
    if not _is_twice(spec):
        return check_elements(_parse(body, lines, spec), spec)
    # Elements stand there as symbols and as numbers: they must say the same.
    apart = tuple(replace(c, name=_SECOND) if c.name == "Z" else c for c in spec.columns)
    return check_elements(_parse(body, lines, replace(spec, columns=apart)), spec)


def _is_twice(spec: ColumnSpec) -> bool:
    return spec.species is not None and any(c.name == "Z" for c in spec.columns)


def out_name(spec: ColumnSpec, column: Column) -> str:
    """Name under which :func:`check_elements` expects a column."""
    if column.name == "species":
        return "Z"
    return _SECOND if column.name == "Z" and _is_twice(spec) else column.name


def check_elements(columns: dict[str, NDArray], spec: ColumnSpec) -> dict[str, NDArray]:
    """The columns, when every atomic number that was read as a number is one.

    Raises
    ------
    LineFault
        One is not, or says something else than the symbol beside it.
    """
    if _is_twice(spec):
        differ = np.flatnonzero(columns["Z"] != columns.pop(_SECOND))
        if len(differ):
            raise LineFault("species and Z name different elements", int(differ[0]), "Z")
    return _in_range(columns, spec)


def odd_elements(columns: dict[str, NDArray], spec: ColumnSpec) -> BoolArray:
    """Rows for which :func:`check_elements` would raise."""
    odd = np.zeros(len(next(iter(columns.values()))), dtype=bool)
    if _is_twice(spec):
        odd |= columns["Z"] != columns[_SECOND]
    for column in spec.columns:
        if column.name in _ELEMENTS and column.kind == "I":
            values = columns[column.name]
            wrong = (values < 0) | (values >= len(SYMBOLS))
            odd |= wrong.any(axis=tuple(range(1, wrong.ndim)))
    return odd


def _parse(body: bytes, lines: int, spec: ColumnSpec) -> dict[str, NDArray]:
    text = np.frombuffer(body, dtype=np.uint8)
    # Control characters are no blanks, whatever the fast ways take them for.
    clean = text.min() >= 9 and not bool((text - np.uint8(14) < 18).any())
    if clean and all(c.kind in "RI" or c.name == "species" for c in spec.columns):
        out = _fixed_width(text, lines, spec)
        if out is None:
            out = _free_numbers(text, lines, spec)
        if out is not None:
            return out
    return _words(body, lines, spec)


def _in_range(out: dict[str, NDArray], spec: ColumnSpec) -> dict[str, NDArray]:
    """The columns, when every atomic number that was read as a number is one."""
    for column in spec.columns:
        if column.name in _ELEMENTS and column.kind == "I":
            values = out[column.name]
            bad = np.argwhere((values < 0) | (values >= len(SYMBOLS)))
            if len(bad):
                found = values[tuple(bad[0])]
                raise LineFault(
                    f"found the atomic number {found}, expected 0 to {len(SYMBOLS) - 1}",
                    int(bad[0][0]),
                    column.name,
                )
    return out


def _out_name(column: Column) -> str:
    return "Z" if column.name == "species" else column.name


def _empty(column: Column) -> NDArray:
    dtype = {"R": np.float64, "I": np.int64, "L": np.bool_, "S": np.int64}[column.kind]
    return np.zeros((0,) if column.width == 1 else (0, column.width), dtype)


def _shaped(column: Column, values: NDArray) -> NDArray:
    """[V, width] of floats as the column's own kind and shape."""
    if column.kind == "I":
        with np.errstate(invalid="ignore"):
            whole = values.astype(np.int64)
        if not np.array_equal(whole, values):
            raise LineFault("found a number that is not whole", field=column.name)
        values = whole
    if column.width == 1:
        return np.ascontiguousarray(values[:, 0])
    return np.ascontiguousarray(values)


def _fixed_width(text: NDArray, lines: int, spec: ColumnSpec) -> dict[str, NDArray] | None:
    """Lines of one length whose words stand in the same places, or None."""
    length, rest = divmod(len(text), lines)
    if rest or length < 2 or not (text[length - 1 :: length] == 10).all():
        return None
    rows = text.reshape(lines, length)
    numbers = np.empty((lines, spec.words))
    elements = np.empty(lines, dtype=np.int64) if spec.species is not None else None
    for start in range(0, lines, _BLOCK):
        stop = min(start + _BLOCK, lines)
        chosen = None if elements is None else elements[start:stop]
        if not _fixed_block(rows[start:stop], spec, numbers[start:stop], chosen):
            return None
    out: dict[str, NDArray] = {}
    word = 0
    for column in spec.columns:
        if column.kind == "S":
            assert elements is not None
            out["Z"] = elements
        else:
            out[column.name] = _shaped(column, numbers[:, word : word + column.width])
        word += column.width
    return out


def _fixed_block(
    rows: NDArray, spec: ColumnSpec, numbers: NDArray, elements: NDArray | None
) -> bool:
    # One row a character place: what follows runs along the lines.
    places = np.ascontiguousarray(rows.T)
    filled: NDArray = np.greater(places, 32)
    used = filled.any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], used, [False]))))
    starts, stops = edges[::2].tolist(), edges[1::2].tolist()
    if len(starts) != spec.words:
        return False
    species = spec.species
    for word, (low, high) in enumerate(zip(starts, stops, strict=True)):
        if word == species:
            assert elements is not None
            if not _symbols_of(places[low:high], elements):
                return False
        elif not _fixed_point(places[low:high], filled[low:high], numbers[:, word]):
            return False
    return True


def _symbols_of(chars: NDArray, out: NDArray) -> bool:
    if len(chars) > 2 and (chars[2:] > 32).any():
        return False
    second = np.maximum(chars[1], 32) if len(chars) > 1 else np.full(chars.shape[1], 32, np.uint8)
    np.take(SYMBOL_NUMBERS, chars[0].astype(np.uint16) | second.astype(np.uint16) << 8, out=out)
    return bool(out.min() >= 0)


def _fixed_point(chars: NDArray, filled: NDArray, out: NDArray) -> bool:
    """Read words like ``  -12.345`` that share the place of their point.

    Exact: up to 15 digits are a whole number below 2**53, and its quotient by
    a power of ten up to 10**22 is rounded once.
    """
    width = len(chars)
    points = np.flatnonzero(chars[:, 0] == 46)
    if len(points) > 1 or width > 24:
        return False
    point = int(points[0]) if len(points) else width
    decimals = width - point - 1 if len(points) else 0
    if point == 0 or (len(points) and (decimals == 0 or not (chars[point] == 46).all())):
        return False
    digits = chars - 48  # uint8: all that is no digit becomes more than 9
    if decimals and digits[point + 1 :].max() > 9:
        return False
    # Before the point, from it to the left: digits, at most one sign, blanks.
    negative: NDArray | None = None
    ended: NDArray = np.zeros(0, dtype=bool)
    if digits[point - 1].max() > 9:
        return False
    for place in range(point - 2, -1, -1):
        row = digits[place]
        if row.max() <= 9 and negative is None:
            continue
        odd: NDArray = np.greater(row, 9)
        minus: NDArray = np.equal(chars[place], 45)
        blank: NDArray = np.logical_not(filled[place])
        if (odd & ~minus & ~blank & (chars[place] != 43)).any():
            return False
        # Left of anything that is no digit there are only blanks.
        if negative is not None and (ended & ~blank).any():
            return False
        ended = odd if negative is None else ended | odd
        negative = minus if negative is None else negative | minus
        digits[place] = np.where(odd, 0, row)
    mantissa = np.zeros(chars.shape[1], dtype=np.float64)
    significant = 0
    for place in (*range(point), *range(point + 1, width)):
        row = digits[place]
        if significant:
            mantissa *= 10.0
            mantissa += row
            significant += 1
        elif row.any():
            mantissa += row
            significant = 1
    if significant > 15:
        return False
    if decimals:
        mantissa /= _POWERS[decimals]
    if negative is not None:
        np.negative(mantissa, out=mantissa, where=negative)
    out[:] = mantissa
    return True


def _free_numbers(text: NDArray, lines: int, spec: ColumnSpec) -> dict[str, NDArray] | None:
    """Any spacing and notation, elements in at most one column, or None."""
    blank = _BLANK[text]
    begins = ~blank
    begins[1:] &= blank[:-1]
    words: NDArray = np.flatnonzero(begins)
    if len(words) != lines * spec.words:
        return None
    words = words.reshape(lines, spec.words)
    line_ends = np.flatnonzero(text == 10)
    if len(line_ends) != lines:
        return None
    # Every line has exactly its words when the first begins after the last
    # line's end and the last before its own.
    if (words[1:, 0] < line_ends[:-1]).any() or (words[:, -1] > line_ends).any():
        return None
    out: dict[str, NDArray] = {}
    at = spec.species
    if at is not None:
        place = words[:, at]
        first, second, third = (
            text[place],
            text[place + 1],
            text[np.minimum(place + 2, len(text) - 1)],
        )
        long = (second > 32) & (third > 32)
        if long.any():
            return None
        code = first.astype(np.int64) | np.where(second > 32, second, 32).astype(np.int64) << 8
        numbers = SYMBOL_NUMBERS[code]
        if (numbers < 0).any():
            return None
        out["Z"] = numbers
        text = text.copy()
        text[place] = 32
        text[place + 1] = 32
    if not _NUMERIC[text].all():
        return None
    raw = text.tobytes()
    if b"D" in raw or b"d" in raw:
        raw = raw.translate(bytes.maketrans(b"Dd", b"Ee"))
    count = lines * (spec.words - (at is not None))
    try:
        flat = np.fromstring(raw, dtype=np.float64, sep=" ")
    except (ValueError, DeprecationWarning):
        return None
    if flat.size != count:
        return None
    table = flat.reshape(lines, -1)
    column_at = 0
    for column in spec.columns:
        if column.kind == "S":
            continue
        values = table[:, column_at : column_at + column.width]
        if column.kind == "I" and not (np.abs(values) < 2**53).all():
            return None
        out[column.name] = _shaped(column, values)
        column_at += column.width
    return out


def _words(body: bytes, lines: int, spec: ColumnSpec) -> dict[str, NDArray]:
    """Word by word: slow, takes everything that is right, and names what is not."""
    rows = [line.split() for line in body.split(b"\n")[:lines]]
    need = spec.words
    for number, row in enumerate(rows):
        if len(row) < need or (len(row) > need and not spec.loose):
            raise LineFault(f"atom line has {len(row)} words, expected {need}", row=number)
    out: dict[str, NDArray] = {}
    at = 0
    for column in spec.columns:
        cells = [row[at : at + column.width] for row in rows]
        at += column.width
        if column.name == "species":
            out["Z"] = _elements([c[0] for c in cells])
        elif column.kind == "S":
            # Text of single atoms: the source reports it as not stored.
            continue
        else:
            values = np.array([_cell(column, cell, i) for i, cell in enumerate(cells)])
            out[column.name] = values[:, 0] if column.width == 1 else values
    return out


def _elements(words: list[bytes]) -> NDArray:
    numbers = np.empty(len(words), dtype=np.int64)
    for row, word in enumerate(words):
        number = _NUMBERS.get(word, _NUMBERS.get(word.capitalize()))
        if number is None:
            text = word.decode("utf-8", "replace")
            raise LineFault(f"found the unknown element {text!r}", row=row, field="species")
        numbers[row] = number
    return numbers


def _cell(column: Column, words: list[bytes], row: int) -> list[float] | list[int] | list[bool]:
    try:
        if column.kind == "L":
            return [bool(_LOGICAL[w]) for w in words]
        if column.kind == "I":
            return [_whole(w) for w in words]
        if any(b"_" in w for w in words):
            raise ValueError
        return [float(w.replace(b"D", b"E").replace(b"d", b"e")) for w in words]
    except (ValueError, KeyError):
        text = b" ".join(words).decode("utf-8", "replace")
        kind = {"L": "T or F", "I": "whole numbers (64 bits)", "R": "numbers"}[column.kind]
        raise LineFault(f"found {text!r}, expected {kind}", row=row, field=column.name) from None


def _whole(word: bytes) -> int:
    if len(word) < 24 and _WHOLE.match(word):
        value = int(word)
    else:
        number = float(word)
        if not number.is_integer():
            raise ValueError(word)
        value = int(number)
    if not _INT64.min <= value <= _INT64.max:
        raise ValueError(word)
    return value

"""Tables of numbers in text, many frames in one call.

Each function takes what is plainly right and says where it stopped: there the
caller looks in its own way, which knows the whole grammar. Without the extension
module frames are found the same, and nothing else is plainly right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from alchemi_xr._typing import IntArray, NDArray

try:
    from alchemi_xr.native import _text
except ImportError:  # no compiler at installation
    _text = None  # type: ignore[assignment]

__all__ = [
    "ArrayReader",
    "Pair",
    "Shape",
    "Taken",
    "available",
    "comment_shapes",
    "find_frames",
    "numbers",
    "table",
]

#: Columns of what :func:`find_frames` gives.
OFFSET, LINE, COMMENT, COMMENT_STOP, BODY, STOP, ATOMS = range(7)

_WORD = np.dtype([("at", np.uint64), ("step", np.int64), ("kind", "S1")], align=True)


def available() -> bool:
    """Whether the extension module was compiled at installation."""
    return _text is not None


def find_frames(text: bytes, start: int, *, at_end: bool) -> tuple[NDArray, int, int]:
    """Frames that stand one after the other in a text.

    Parameters
    ----------
    text : bytes
    start : int
        Where the first one's count line (or a blank line before it) begins.
    at_end : bool
        Whether the file ends with the text.

    Returns
    -------
    frames : int64 array, shape (n, 7)
        Offset, line (from 0 on), comment's start and stop without blanks,
        first atom line, end of the last, number of atoms.
    passed, lines : int
        Where the first place is that is no whole good frame, and its line.
    """
    if _text is None:
        return find_frames_slowly(text, start, at_end=at_end)
    parts: list[NDArray] = []
    lines = 0
    while True:
        out = np.empty((4096, 7), dtype=np.int64)
        found, start, more = _text.frames(text, start, at_end, out.ctypes.data, len(out))
        out[:found, LINE] += lines
        lines += more
        parts.append(out[:found])
        if found < len(out):
            return (parts[0] if len(parts) == 1 else np.concatenate(parts)), start, lines


_BLANKS = b" \t\n\r\x0b\x0c"


def find_frames_slowly(text: bytes, start: int, *, at_end: bool) -> tuple[NDArray, int, int]:
    """What :func:`find_frames` does, in Python."""
    ends = (np.flatnonzero(np.frombuffer(text, dtype=np.uint8)[start:] == 10) + start).tolist()
    if at_end and len(text) > start and not text.endswith(b"\n"):
        ends.append(len(text))
    frames: list[tuple[int, ...]] = []
    line, begin = 0, start
    while line < len(ends):
        head = text[begin : ends[line]].strip(_BLANKS)
        if not head:
            if ends[line] == len(text):
                break
            line, begin = line + 1, ends[line] + 1
            continue
        if not head.isdigit() or len(head) > 9:
            break
        last = line + 2 + int(head)
        if last > len(ends) or (last == len(ends) and not at_end):
            break
        stop = min(ends[last - 1] + 1, len(text))
        after = text[stop : ends[last]].strip(_BLANKS) if last < len(ends) else b""
        if after and not after.isdigit():
            break
        comment = text[ends[line] + 1 : ends[line + 1]]
        bare = comment.lstrip(_BLANKS)
        first = ends[line + 1] - len(bare)
        body = min(ends[line + 1] + 1, len(text))
        if stop - body < 7 * int(head):
            break
        comment_stop = first + len(bare.rstrip(_BLANKS))
        frames.append((begin, line, first, comment_stop, body, stop, int(head)))
        line, begin = last, stop
    found = np.array(frames, dtype=np.int64).reshape(-1, 7)
    return found, begin, line


@dataclass(frozen=True, slots=True)
class Pair:
    """A key, and what its value is made of: ``I`` whole numbers, ``R`` numbers, ``T`` text."""

    key: str
    kind: str
    words: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Comments with the same keys in one order, values of one make, and the same columns.

    Parameters
    ----------
    pairs : tuple of Pair
        A title without any ``=`` is one pair with an empty key.
    properties : str
        The value of ``Properties``, which all have; empty without.
    """

    pairs: tuple[Pair, ...]
    properties: str


def comment_shapes(text: bytes, frames: NDArray) -> tuple[list[Shape], IntArray, NDArray]:
    """Comments of some frames by their shape.

    Parameters
    ----------
    text : bytes
    frames : int64 array, shape (n, 7)
        As :func:`find_frames` gives them.

    Returns
    -------
    shapes : list of Shape
    which : int64 array, shape (n,)
        Place in the list; -1 where quotes, brackets or letters beyond ASCII need a
        look of their own.
    spans : int64 array, shape (n, pairs, 2)
        Where the values stand in the text, by frame and pair.
    """
    n = len(frames)
    if _text is None:
        return [], np.full(n, -1, dtype=np.int64), np.empty((n, 0, 2), dtype=np.int64)
    frames = np.ascontiguousarray(frames, dtype=np.int64)
    which = np.empty(n, dtype=np.int32)
    spans = np.empty((n, _text.MAX_PAIRS, 2), dtype=np.int64)
    found = _text.pairs(
        text, frames[:, COMMENT:].ctypes.data, 7, n, which.ctypes.data, spans.ctypes.data
    )
    shapes = []
    for first, rows in found:
        comment = text[frames[first, COMMENT] : frames[first, COMMENT_STOP]].decode("ascii")
        pairs = tuple(Pair(comment[a:b], kind, words) for a, b, _, _, kind, words in rows)
        said = [comment[c:d] for (a, b, c, d, _, _) in rows if comment[a:b].lower() == "properties"]
        shapes.append(Shape(pairs, said[-1] if said else ""))
    return shapes, which.astype(np.int64), spans


def numbers(text: bytes, spans: NDArray, words: int, *, whole: bool) -> tuple[NDArray, int]:
    """The numbers of short texts, so many words each.

    Parameters
    ----------
    text : bytes
    spans : int64 array, shape (n, 2)
    words : int
    whole : bool
        Whole numbers, as int64; else float64.

    Returns
    -------
    values : array, shape (n, words)
    read : int
        How many of the texts were read: the next is not plainly right.
    """
    spans = np.ascontiguousarray(spans, dtype=np.int64)
    out = np.empty((len(spans), words), dtype=np.int64 if whole else np.float64)
    if _text is None:
        return out, 0
    read = _text.numbers(text, spans.ctypes.data, 2, len(spans), words, whole, out.ctypes.data)
    return out, read


def table(
    text: bytes,
    ranges: NDArray,
    columns: Sequence[tuple[str, int, NDArray | None]],
    symbols: NDArray,
    *,
    loose: bool = False,
) -> int:
    """Words of lines into columns.

    Parameters
    ----------
    text : bytes
    ranges : int64 array, shape (n, 4)
        Of each frame: where its lines begin and end in the text, how many there
        are, and the row of the columns in which the first goes.
    columns : sequence of (kind, width, target)
        Kind ``E`` element symbol to int64 number, ``R`` float64, ``I`` int64,
        ``L`` bool, ``S`` passed over (no target); target [rows, width].
    symbols : int64 array, shape (65536,)
        Atomic number by the two bytes of a symbol (a blank for the second of a
        short one), -1 for none.
    loose : bool
        Lines may have more words.

    Returns
    -------
    int
        How many frames were read: the next is not plainly right, and its rows hold
        anything.

    Raises
    ------
    ValueError
        A target is not of its form or has too few rows.
    """
    ranges = np.ascontiguousarray(ranges, dtype=np.int64)
    rows = int((ranges[:, 2] + ranges[:, 3]).max(initial=0))
    if len(ranges) and int(ranges[:, 2:].min()) < 0:
        raise ValueError("a negative number of lines, or a negative row")
    words: list[tuple[int, int, bytes]] = []
    dtypes: dict[str, Any] = {"E": np.int64, "R": np.float64, "I": np.int64, "L": np.bool_}
    for kind, width, target in columns:
        if target is None:
            words += [(0, 0, b"S")] * width
            continue
        if (
            target.dtype != dtypes[kind]
            or not (target.flags.c_contiguous and target.flags.writeable)
            or target.size < rows * width
            or target.size != len(target) * width
        ):
            raise ValueError(f"a target of kind {kind} is {target.dtype} {target.shape}")
        item = target.dtype.itemsize
        first = target.ctypes.data
        words += [(first + i * item, item * width, kind.encode()) for i in range(width)]
    if symbols.shape != (65_536,) or symbols.dtype != np.int64 or not symbols.flags.c_contiguous:
        raise ValueError("symbols must be 65,536 int64")
    if _text is None:
        return 0
    places = np.array(words, dtype=_WORD)
    return int(
        _text.table(
            text,
            ranges.ctypes.data,
            len(ranges),
            places.ctypes.data,
            len(places),
            loose,
            symbols.ctypes.data,
        )
    )


class Taken(NamedTuple):
    """A text of JSON without the numbers of its arrays.

    Parameters
    ----------
    rest : memoryview
        The text, with an offset in the place of each array's numbers; good until the
        next text is read.
    cells : uint8 array
        Where the numbers lie from that byte on, in the machine's order.
    form : bytes or None
        What it has in common with all texts that differ from it in numbers, in words that
        are no keys, and in how many rows its arrays have, as far as they have as many as
        the first; and in blanks. None where that cannot be told.
    words : bytes or None
        Those words, each with a 0 behind it.
    rows : int
        Of the first array.
    first, scalars : int
        In the cells: where the first array lies, with the others behind it, each at the
        next multiple of 8; and where the numbers that stand by themselves begin, eight
        bytes each.
    stop : int
        Where they end.
    """

    rest: memoryview
    cells: NDArray
    form: bytes | None
    words: bytes | None
    rows: int
    first: int
    scalars: int
    stop: int


class ArrayReader:
    """Takes the arrays out of texts of JSON.

    An array is an object ``{"__ndarray__": [shape, "type", numbers]}``, as ASE and others
    write it, of type float64, float32, int64, int32 or bool.
    """

    _CELLS = 4 * 2**20

    def __init__(self) -> None:
        self._rest = self._new(2**16)
        self._view = memoryview(self._rest[0])  # type: ignore[arg-type]
        self._cells = self._new(self._CELLS)
        self._used = 0

    @staticmethod
    def _new(size: int) -> tuple[NDArray, int, int]:
        memory = np.empty((size + 7) // 8 * 8, dtype=np.uint8)
        return memory, memory.ctypes.data, len(memory)

    def __call__(self, text: bytes | bytearray) -> Taken | None:
        """A text, taken apart; None where something in it is not plainly right."""
        if _text is None:
            return None
        room = 4 * len(text) + 256  # a number has two bytes of text and eight in the cells
        if self._rest[2] < room:
            self._rest = self._new(2 * room)
            self._view = memoryview(self._rest[0])  # type: ignore[arg-type]
        if self._cells[2] - self._used < room:
            self._cells, self._used = self._new(max(room, self._CELLS)), 0
        cells, at, size = self._cells
        found = _text.arrays(text, at, size, self._used, self._rest[1])
        if found is None:
            return None
        length, used, form, words, rows, first, count = found
        self._used = used
        return Taken(self._view[:length], cells, form, words, rows, first, used - 8 * count, used)


def _powers_of_five() -> bytes:
    """The leading 128 bits of 5**q: truncated, and rounded up where q is negative."""
    out: list[int] = []
    for q in range(_text.LOWEST, _text.HIGHEST + 1):
        if q >= 0:
            value = 5**q
            shift = value.bit_length() - 128
            value = value >> shift if shift >= 0 else value << -shift
        else:
            power = 5**-q
            bits = power.bit_length() + 127
            value = (1 << bits) // power + 1
            if value.bit_length() > 128:
                value = (value + 1) >> 1
        out += [value >> 64, value & (2**64 - 1)]
    return np.array(out, dtype=np.uint64).tobytes()


if _text is not None:
    _text.set_powers(_powers_of_five())

"""Numbers, lines, frames and comments read in C: the same as Python, or not at all."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alchemi_xr.etl.columns import SYMBOL_NUMBERS
from alchemi_xr.etl.comment import parse_comment, parse_value
from alchemi_xr.native import text

needs_c = pytest.mark.skipif(not text.available(), reason="no compiler at installation")


def one(word: str, *, whole: bool = False, words: int = 1) -> Any:
    raw = word.encode()
    values, read = text.numbers(raw, np.array([[0, len(raw)]]), words, whole=whole)
    return values[0] if read else None


def bits(value: float) -> bytes:
    return struct.pack("d", value)


reals = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.builds("{:.{}f}".format, st.floats(-1e6, 1e6), st.integers(0, 30)),
    st.builds(
        "{:.{}e}".format, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 30)
    ),
    st.builds("{}e{}".format, st.integers(0, 10**40), st.integers(-400, 300)),
    st.from_regex(r"[-+]?[0-9]{0,25}\.?[0-9]{0,25}([eEdD][-+]?[0-9]{1,4})?", fullmatch=True),
)


@needs_c
@settings(max_examples=1500)
@given(reals)
@example("9007199254740993")  # halfway between two doubles
@example("9007199254740993.00000000000000000000001")
@example("2.2250738585072011e-308")  # a subnormal that hung other parsers
@example("179769313486231580793e289")
@example("-0.0")
@example("0e999999")
def test_a_number_is_that_of_python(word: str) -> None:
    value = one(word)
    if value is None:
        return
    assert bits(value[0]) == bits(float(word.replace("d", "e").replace("D", "e")))


@needs_c
@pytest.mark.parametrize(
    "word",
    ["12", "-1.5", "1e5", "1.0D+02", ".5", "5.", "+3.25", "0.1234567890123456789012", "1e-300"],
)
def test_plain_numbers_are_taken(word: str) -> None:
    assert one(word)[0] == float(word.replace("D", "e"))


@needs_c
@pytest.mark.parametrize(
    "word",
    ["", ".", "-", "e5", "1e", "1e+", "1.2.3", "0x10", "1_000", "nan", "inf", "1\0", "٣", "1e400"],
)
def test_what_is_not_plain_is_left(word: str) -> None:
    assert one(word) is None


@needs_c
@given(st.one_of(st.integers().map(str), st.from_regex(r"[-+]?[0-9]{0,20}x?", fullmatch=True)))
def test_a_whole_number_is_that_of_python(word: str) -> None:
    value = one(word, whole=True)
    if value is not None:
        assert int(value[0]) == int(word)
    else:
        assert len(word) > 18 or not word.lstrip("+-").isdigit()


COLUMNS = [("E", 1), ("R", 3), ("I", 1), ("L", 1), ("S", 1)]


def targets(rows: int) -> list[tuple[str, int, Any]]:
    dtypes = {"E": np.int64, "R": float, "I": np.int64, "L": bool}
    return [
        (kind, width, None if kind == "S" else np.zeros((rows, width), dtypes[kind]))
        for kind, width in COLUMNS
    ]


@needs_c
def test_lines_go_where_they_belong() -> None:
    body = b"H 0 0.5 -1 7 T word\r\n  Cl\t1e0  2 3. -8 False w\n"
    columns = targets(5)
    assert text.table(body, np.array([[0, len(body), 2, 3]]), columns, SYMBOL_NUMBERS) == 1
    (_, _, z), (_, _, pos), (_, _, whole), (_, _, flag), _ = columns
    np.testing.assert_array_equal(z[:, 0], [0, 0, 0, 1, 17])
    np.testing.assert_array_equal(pos[3:], [[0, 0.5, -1], [1, 2, 3]])
    np.testing.assert_array_equal(whole[3:, 0], [7, -8])
    np.testing.assert_array_equal(flag[3:, 0], [True, False])


@needs_c
@pytest.mark.parametrize(
    "line",
    [
        b"H 0 0 0 1 T",
        b"H 0 0 0 1 T w more",
        b"Hx 0 0 0 1 T w",
        b"H 0 0 x 1 T w",
        b"H 0 0 0 1.5 T w",
    ],
)
def test_the_first_odd_frame_is_named(line: bytes) -> None:
    good = b"He 1 2 3 4 F w\n"
    body = good + line + b"\n" + good
    cuts = [0, len(good), len(good) + len(line) + 1, len(body)]
    ranges = np.array([[cuts[i], cuts[i + 1], 1, i] for i in range(3)])
    columns = targets(3)
    assert text.table(body, ranges, columns, SYMBOL_NUMBERS) == 1
    assert columns[0][2][0, 0] == 2
    loose = text.table(body, ranges, targets(3), SYMBOL_NUMBERS, loose=True)
    assert loose == (3 if b"more" in line else 1)


@needs_c
def test_targets_and_ranges_are_checked() -> None:
    body = b"H 0 0 0 1 T w\n"
    with pytest.raises(ValueError, match="target of kind"):
        text.table(body, np.array([[0, len(body), 1, 1]]), targets(1), SYMBOL_NUMBERS)
    with pytest.raises(ValueError, match="negative"):
        text.table(body, np.array([[0, len(body), 1, -1]]), targets(1), SYMBOL_NUMBERS)
    for start, stop in ((0, len(body) + 1), (-1, 3), (5, 2)):
        assert text.table(body, np.array([[start, stop, 1, 0]]), targets(1), SYMBOL_NUMBERS) == 0
        assert text.numbers(body, np.array([[start, stop]]), 1, whole=False)[1] == 0


@settings(max_examples=400)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["2", "1", "0", " 3 ", "", "x 1", "H 0 0 0", "a=1", "\t", "2\r", "007"]
            ),
            st.text(alphabet="0123 \tab=\r", max_size=6),
        ),
        max_size=25,
    ),
    st.booleans(),
    st.booleans(),
)
def test_frames_are_found_as_in_python(lines: list[str], ended: bool, at_end: bool) -> None:
    raw = ("\n".join(lines) + ("\n" if ended else "")).encode()
    found, passed, line = text.find_frames(raw, 0, at_end=at_end)
    want, want_passed, want_line = text.find_frames_slowly(raw, 0, at_end=at_end)
    np.testing.assert_array_equal(found, want)
    assert (passed, line) == (want_passed, want_line)
    # What was passed over is whole lines, and only blank where no frame is.
    assert raw[:passed].count(b"\n") in (line, line - 1)


WORDS = st.sampled_from(
    ["1", "-2.5", "1e3", "T", "F", "abc", "a=b", "1,2", "1.5,x", "", "nan", "00"]
)
KEYS = st.sampled_from(["energy", "Lattice", "x", "pbc", "Properties", "id-2"])


@st.composite
def comments(draw: Any) -> str:
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        value = " ".join(draw(st.lists(WORDS, min_size=1, max_size=3)))
        if draw(st.integers(0, 5)) == 0:
            parts.append(draw(st.text(alphabet="ab=\"'[]{} \\é,", max_size=6)))
            continue
        equals = draw(st.sampled_from(["=", " = ", "= "]))
        parts.append(draw(KEYS) + equals + (f'"{value}"' if " " in value or not value else value))
    return " ".join(parts)


@needs_c
@settings(max_examples=600)
@given(st.lists(comments(), min_size=1, max_size=6))
def test_comments_are_split_as_in_python(given: list[str]) -> None:
    raw = "".join(f"0\n{c}\n" for c in given).encode()
    frames, _, _ = text.find_frames(raw, 0, at_end=True)
    shapes, which, spans = text.comment_shapes(raw, frames)
    assert len(which) == len(frames)
    for i in range(len(frames)):
        if which[i] < 0:
            continue
        comment = raw[frames[i, 2] : frames[i, 3]].decode()
        want, properties = parse_comment(comment)
        shape = shapes[which[i]]
        values = [raw[a:b].decode() for a, b in spans[i, : len(shape.pairs)].tolist()]
        got = [
            (p.key or "comment", v)
            for p, v in zip(shape.pairs, values, strict=True)
            if p.key != "Properties"
        ]
        assert got == want
        assert shape.properties == properties
        for pair, value in zip(shape.pairs, values, strict=True):
            known = parse_value(value)
            if pair.kind in "IR":
                assert not isinstance(known, str)
                assert known.dtype.kind == ("i" if pair.kind == "I" else "f")
                assert known.size == pair.words


@needs_c
@settings(max_examples=500)
@given(st.binary(max_size=200), st.integers(-3, 210), st.integers(-3, 210), st.integers(0, 5))
def test_any_bytes_are_survived(raw: bytes, start: int, stop: int, lines: int) -> None:
    text.table(raw, np.array([[start, stop, lines, 0]]), targets(5), SYMBOL_NUMBERS)
    text.numbers(raw, np.array([[start, stop]]), 3, whole=False)
    text.numbers(raw, np.array([[start, stop]]), 3, whole=True)
    frames, _, _ = text.find_frames(raw, max(start, 0), at_end=True)
    text.comment_shapes(raw, frames)
    odd = np.zeros((1, 7), dtype=np.int64)
    odd[0, 2:4] = start, stop
    if 0 <= start <= stop <= len(raw):
        text.comment_shapes(raw, odd)

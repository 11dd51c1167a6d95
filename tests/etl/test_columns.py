"""Atom lines: the fast ways give what Python's own float gives, and faults are named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.etl.columns import PLAIN, LineFault, parse_columns, parse_properties

SPEC = parse_properties("species:S:1:pos:R:3")
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


def _slowly(body: bytes) -> np.ndarray:
    return np.array([[float(w) for w in line.split()[1:4]] for line in body.splitlines()])


@given(
    st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=20),
    st.sampled_from(["%16.8f", "%.3f", "%23.15e", "%r", "%+.6f", "%12.0f.", "%g"]),
)
def test_numbers_are_exact(rows: list[tuple[float, ...]], form: str) -> None:
    lines = ["Si " + " ".join(form % v for v in row) for row in rows]
    body = ("\n".join(lines) + "\n").encode()
    out = parse_columns(body, len(rows), SPEC)
    assert out["pos"].dtype == np.float64
    np.testing.assert_array_equal(out["pos"], _slowly(body))
    assert (out["Z"] == 14).all()


@given(st.lists(st.integers(-(10**7), 10**7), min_size=3, max_size=30), st.integers(0, 6))
def test_fixed_point_is_exact(values: list[int], decimals: int) -> None:
    values = values[: len(values) // 3 * 3]
    numbers = [f"{v / 10**decimals:20.{decimals}f}" for v in values]
    rows = [numbers[i : i + 3] for i in range(0, len(numbers), 3)]
    body = "".join(f"C {''.join(row)}\n" for row in rows).encode()
    out = parse_columns(body, len(rows), SPEC)
    np.testing.assert_array_equal(out["pos"], _slowly(body))
    # -0.0 keeps its sign, as float() does.
    np.testing.assert_array_equal(np.signbit(out["pos"]), np.signbit(_slowly(body)))


def test_many_blocks_of_lines() -> None:
    lines = 20_000
    values = np.random.default_rng(0).normal(size=(lines, 3)) * 100
    body = "".join(f"Cu{x:16.8f}{y:16.8f}{z:16.8f}\n" for x, y, z in values).encode()
    out = parse_columns(body, lines, SPEC)
    np.testing.assert_array_equal(out["pos"], _slowly(body))
    assert (out["Z"] == 29).all()


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_line_ends(end: str) -> None:
    body = f"H 0 0 0.5\r\nHe\t1 2 3{end}".encode()
    out = parse_columns(body, 2, SPEC)
    assert out["Z"].tolist() == [1, 2]
    assert out["pos"].tolist() == [[0, 0, 0.5], [1, 2, 3]]


def test_kinds_of_columns() -> None:
    spec = parse_properties("Z:I:1:pos:R:3:tag:I:2:fixed:L:1:label:S:1")
    body = b"6 0 0 0 1 -2 T C1\n8 1.5D0 nan -inf 3 4 F O1\n"
    out = parse_columns(body, 2, spec)
    assert out["Z"].tolist() == [6, 8]
    assert out["tag"].tolist() == [[1, -2], [3, 4]]
    assert out["fixed"].tolist() == [True, False]
    assert out["pos"][1, 0] == 1.5
    assert np.isnan(out["pos"][1, 1])
    assert out["pos"][1, 2] == -np.inf
    assert "label" not in out


def test_plain_xyz_ignores_what_is_more() -> None:
    out = parse_columns(b"C 0 0 0 0.25 x\nH 1 0 0\n", 2, PLAIN)
    assert out["pos"].tolist() == [[0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("word", ["si", "SI", "14"])
def test_elements_in_other_spellings(word: str) -> None:
    assert parse_columns(f"{word} 0 0 0\n".encode(), 1, SPEC)["Z"].tolist() == [14]


@pytest.mark.parametrize(
    ("body", "row", "field", "words"),
    [
        (b"C 0 0 0\nC 0 0\n", 1, "", "3 words, expected 4"),
        (b"C 0 0 0 1\nC 0 0 0\n", 0, "", "5 words, expected 4"),
        (b"C 0 0 0 1\nC 0 0\n", 0, "", "5 words"),
        (b"C 0 0 0\nQq 0 0 0\n", 1, "species", "'Qq'"),
        (b"C 0 0 0\nC 0 x 0\n", 1, "pos", "expected numbers"),
        (b"C 0 0 1.2.3\nC 0 0 0\n", 0, "pos", "1.2.3"),
        (b"C 0 0 1_0\nC 0 0 0\n", 0, "pos", "1_0"),
    ],
)
def test_faults_are_named(body: bytes, row: int, field: str, words: str) -> None:
    with pytest.raises(LineFault, match=words) as caught:
        parse_columns(body, 2, SPEC)
    assert (caught.value.row, caught.value.field) == (row, field)


@pytest.mark.parametrize(
    "text",
    ["species:S:1", "species:S:1:pos:R:2", "pos:R:3", "species:S:1:pos:R", "species:S:1:pos:Q:3"],
)
def test_bad_properties(text: str) -> None:
    with pytest.raises(LineFault):
        parse_properties(text)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ("species:R:1:pos:R:3", "neither species:S:1 nor Z:I:1"),
        ("species:L:1:pos:R:3:Z:I:1", "another form than"),
        ("species:S:1:pos:R:3:Z:I:2", "another form than"),
        ("species:S:1:pos:R:3:Z:R:1", "another form than"),
        ("species:S:1:pos:R:3:pos:R:3", "a name twice"),
    ],
)
def test_elements_have_one_form(columns: str, match: str) -> None:
    with pytest.raises(LineFault, match=match):
        parse_properties(columns)


def test_numbers_under_species_are_looked_at() -> None:
    spec = parse_properties("species:I:1:pos:R:3")
    assert parse_columns(b"6 0 0 0\n", 1, spec)["Z"].tolist() == [6]
    with pytest.raises(LineFault, match="unknown element '-3'"):
        parse_columns(b"-3 0 0 0\n", 1, spec)

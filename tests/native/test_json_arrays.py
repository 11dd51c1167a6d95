"""Arrays taken out of JSON in C: as Python reads them, or not at all."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alchemi_xr.native import text

pytestmark = pytest.mark.skipif(not text.available(), reason="no compiler at installation")

TYPES = ("float64", "float32", "int64", "int32", "bool")


def by_python(value: Any) -> Any:
    """What a text says, arrays as arrays."""
    if isinstance(value, dict):
        if "__ndarray__" in value:
            if len(value) != 1:
                raise ValueError
            shape, dtype, flat = value["__ndarray__"]
            # Bools are numbers to NumPy, and numbers bools; a text says which it means.
            if any((type(v) is bool) != (dtype == "bool") for v in flat):
                raise ValueError
            if dtype.startswith("int") and any(type(v) is not int for v in flat):
                raise ValueError
            return np.array(flat, dtype=dtype).reshape(shape)
        return {name: by_python(item) for name, item in value.items()}
    return [by_python(item) for item in value] if isinstance(value, list) else value


def put_back(value: Any, taken: text.Taken) -> Any:
    if isinstance(value, dict):
        if "__ndarray__" in value:
            shape, dtype, offset = value["__ndarray__"]
            stop = offset + math.prod(shape) * np.dtype(dtype).itemsize
            return taken.cells[offset:stop].view(dtype).reshape(shape)
        return {name: put_back(item, taken) for name, item in value.items()}
    return [put_back(item, taken) for item in value] if isinstance(value, list) else value


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        alike = (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def strictly(said: str) -> Any:
    def no_constant(word: str) -> Any:
        raise ValueError(word)

    return json.loads(said, parse_constant=no_constant)


def check(said: str) -> text.Taken | None:
    """A text is taken as Python takes it, or left."""
    taken = text.ArrayReader()(said.encode("utf-8", "surrogatepass"))
    if taken is None:
        return None
    try:
        left = put_back(strictly(bytes(taken.rest).decode()), taken)
    except ValueError:
        with pytest.raises(ValueError):
            by_python(strictly(said))
        return taken
    with np.errstate(over="ignore"):
        assert same(left, by_python(strictly(said)))
    return taken


def array(dtype: str, shape: list[int], numbers: list[str], blank: str) -> str:
    listed = f",{blank}".join(numbers)
    return (
        f'{blank}{{"__ndarray__":{blank}[{json.dumps(shape)},{blank}"{dtype}",{blank}[{listed}]]}}'
    )


reals = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,3})?", fullmatch=True),
)
anything = st.one_of(reals, st.from_regex(r"[-+.0-9eEdN]{0,6}", fullmatch=True))


@settings(max_examples=1500)
@given(anything, st.sampled_from(TYPES))
@example("-0", "float64")
@example("01", "float64")
@example("1.", "float64")
@example("1.e5", "float64")
@example(".5", "float64")
@example("+5", "float64")
@example("1d5", "float64")
@example("-0", "int64")
@example("-01", "int64")
@example("1.0", "int64")
@example("9223372036854775808", "int64")
@example("2147483648", "int32")
@example("3.5e38", "float32")
@example("true", "float64")
@example("true", "bool")
@example("1", "bool")
def test_a_number_is_that_of_python(word: str, dtype: str) -> None:
    check('{"a": ' + array(dtype, [1], [word], " ") + "}")
    check('{"a": ' + word + ', "b": [' + word + "]}")


@given(st.lists(reals, min_size=6, max_size=6), st.sampled_from(["", " ", " \n\t"]))
def test_plain_arrays_are_taken(words: list[str], blank: str) -> None:
    said = '{"a":' + array("float64", [2, 3], words, blank) + ',"b":{"c":"d","e":[1,2.5]}}'
    taken = check(said)
    tiny = any(word != "0" and 0 <= abs(float(word)) < 1e-307 for word in words)
    huge = any(abs(float(word)) > 1e308 for word in words)
    if not (tiny or huge or "-0" in words):
        assert taken is not None
        assert taken.form is not None
        assert taken.rows == 2
        assert taken.words == b"d\0"
        assert taken.form == b'{"a":@0*,3,,"b":{"c":s,"e":[i,f]}}'
        assert taken.cells[taken.scalars : taken.stop].view("i8")[0] == 1
        assert taken.cells[taken.scalars : taken.stop].view("f8")[1] == 2.5


@pytest.mark.parametrize(
    "said",
    [
        '{"__ndarray__": [[2], "float64", [1.5]]}',
        '{"__ndarray__": [[1], "float64", [1.5, 2]]}',
        '{"__ndarray__": [[-1], "float64", [1.5]]}',
        '{"__ndarray__": [[99999999999], "float64", [1.5]]}',
        '{"__ndarray__": [[4294967296, 4294967296, 4294967296], "float64", []]}',
        '{"__ndarray__": [[1], "complex128", [1.5, 2.5]]}',
        '{"__ndarray__": [[1], "float64", [1.5]], "more": 1}',
        '{"more": 1, "__ndarray__": [[1], "float64", [1.5]]}',
        '{"\\u005f_ndarray__": [[1], "float64", [1.5]]}',
        '{"__ndarray__": [[1], "float64", [NaN]]}',
        '{"__ndarray__": [[1], "float64", [1.5',
        '{"a": NaN}',
        '{"a": "never ends',
    ],
)
def test_what_is_not_plain_is_left(said: str) -> None:
    assert text.ArrayReader()(said.encode()) is None


@pytest.mark.parametrize("word", ["é", '\\"', "\\u00e9", "\\n"])
def test_words_with_a_second_meaning_have_no_form(word: str) -> None:
    taken = check('{"a": ' + array("bool", [1], ["true"], "") + f', "b": "{word}"}}')
    assert taken is not None
    assert taken.form is None


def test_empty_and_many_arrays() -> None:
    arrays = [array("float64", [0, 3], [], ""), array("bool", [], ["true"], "")] * 40
    taken = check('{"a": [' + ",".join(arrays) + "]}")
    assert taken is not None
    assert taken.form is None  # without rows, as many rows as that mean nothing
    taken = check("[" + ",".join([array("int32", [3], ["1", "2", "3"], "")] * 300) + "]")
    assert taken is not None
    assert taken.rows == 3


def test_a_cell_of_zeros_has_another_form() -> None:
    forms = []
    for numbers in (["0.0"] * 9, ["-0.0"] * 9, ["0.0"] * 8 + ["1.0"]):
        taken = check('{"a": ' + array("float64", [3, 3], numbers, " ") + "}")
        assert taken is not None
        forms.append(taken.form)
    assert forms[0] == forms[1] != forms[2]


def test_one_reader_reads_many_texts() -> None:
    reader = text.ArrayReader()
    kept = []
    for k in range(60):
        numbers = [repr(k + i / 7) for i in range(3 * 3000)]
        taken = reader(array("float64", [3000, 3], numbers, " ").encode())
        assert taken is not None
        kept.append(taken.cells[taken.first : taken.first + 8 * len(numbers)].view("f8"))
    for k, values in enumerate(kept):
        assert values.tolist() == [k + i / 7 for i in range(3 * 3000)]


seeds = [
    '{"numbers": ' + array("int64", [2], ["1", "8"], " ") + ', "e": -1.5, "t": "a b", "n": null}',
    '[true, false, {"a": [' + array("float32", [1, 1], ["1.5"], "") + ', "x"], "b": {}}, 12]',
]


@settings(max_examples=1500)
@given(st.sampled_from(seeds), st.lists(st.tuples(st.integers(0, 110), st.text('"\\[]{},:0-.eN tf', max_size=2)), min_size=1, max_size=2))  # fmt: skip
def test_texts_with_slips(said: str, slips: list[tuple[int, str]]) -> None:
    for at, put in slips:
        said = said[:at] + put + said[at + 1 :]
    check(said)


@given(st.binary(max_size=200))
def test_any_bytes_are_survived(raw: bytes) -> None:
    reader = text.ArrayReader()
    reader(raw)
    reader(b'{"__ndarray__": [[2], "float64", [' + raw)
    reader(b'{"a": {"__ndarray__": [[2], "bool", [true,' + raw + b"]]}}")

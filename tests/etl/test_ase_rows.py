"""Rows of LMDB files decoded in our own way, beside ASE's decoder."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from ase.db.row import AtomsRow
from ase.io.jsonio import decode, encode
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.etl import ase_rows
from alchemi_xr.etl.ase_rows import row_of
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.sources.ase_db import AseDbSource
from alchemi_xr.native.text import ArrayReader


def record_of(row: Any) -> Any:
    return AseDbSource(["x.aselmdb"], names=NameMap())._record(row, 0)


def same(text: str, arrays: ArrayReader | None = None) -> Any:
    values = decode(text)
    values["id"] = 7
    want, row = (
        record_of(AtomsRow(values)),
        row_of(text.encode(), 7, arrays(text.encode()) if arrays else None),
    )
    got = record_of(row)
    assert (got.atoms, got.keys, got.unstored) == (want.atoms, want.keys, want.unstored)
    for left, right in ((got.atom, want.atom), (got.system, want.system)):
        assert list(left) == list(right)
        for name, value in left.items():
            assert type(value) is type(right[name]), name
            if isinstance(value, np.ndarray):
                assert value.dtype == right[name].dtype, name
            np.testing.assert_array_equal(value, right[name], err_msg=name)
    return row


def row_text(**more: Any) -> str:
    values = {
        "numbers": np.array([1, 8]),
        "positions": np.arange(6.0).reshape(2, 3),
        "cell": np.eye(3) * 3,
        "pbc": np.array([True, False, True]),
        "forces": np.ones((2, 3)) / 3,
        "energy": -1.5,
        **more,
    }
    return str(encode(values))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"data": {"tag": "a", "q": 3, "list": [1, 2], "nested": {"x": [1.5, 2]}}},
        {"key_value_pairs": {"energy_x": 1.0, "name": "b", "flag": True}},
        {"key_value_pairs": {"energy": 9.0}},
        {"stress": np.arange(6.0), "charges": [0.5, -0.5], "magmom": 2.0},
        {"data": {"sizes": [[1, 2], [3, 4]], "empty": [], "none": None}},
        {"momenta": np.ones((2, 3), dtype=np.float32), "tags": np.array([1, 2])},
        {"calculator": "x", "calculator_parameters": {"a": "b"}, "unique_id": "ff", "ctime": 1.0},
    ],
)
def test_plain_rows_are_read_fast_and_the_same(more: dict[str, Any]) -> None:
    assert isinstance(same(row_text(**more)), ase_rows.PlainRow)


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"dicts": [{"a": 1}]}},
        {"data": {"dicts": [[{"a": 1}]]}},
        {"data": {"by number": {"1": "a"}}},
        {"data": {"z": np.array([1 + 2j])}},
        {"data": {"ragged": [[1], [2, 3]]}},
        {"constraints": [{"name": "FixAtoms", "kwargs": {"indices": [1]}}]},
        {"energy": float("nan")},
    ],
)
def test_all_else_goes_to_ase(more: dict[str, Any]) -> None:
    same(row_text(**more))


@given(
    st.dictionaries(
        st.text("abc1_", min_size=1, max_size=4),
        st.recursive(
            st.one_of(
                st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text("aé_ ", max_size=4),
                st.booleans(), st.none(),
            ),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3), st.dictionaries(st.text("ab1", max_size=2), inner, max_size=2)
            ),
            max_leaves=5,
        ),
        max_size=4,
    )
)  # fmt: skip
def test_any_data(data: dict[str, Any]) -> None:
    same(row_text(data=data))


def test_without_orjson(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orjson", None)
    monkeypatch.setattr(ase_rows, "_decode", ase_rows._decoder())
    assert isinstance(same(row_text(data={"tag": "a"})), ase_rows.PlainRow)
    assert ase_rows.loads(memoryview(b'{"a": [1, 2.5]}')) == {"a": [1, 2.5]}
    for name in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match=name):
            ase_rows.loads(f'{{"a": {name}}}')

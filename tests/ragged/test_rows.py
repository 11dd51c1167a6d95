"""Row ranges equal the same rows listed one by one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.csr import counts_to_ptr, row_indices
from alchemi_xr.ragged.rows import RowRanges, Selection

counts = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@st.composite
def chosen(draw):
    sizes = draw(counts)
    picks = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=15))
    return np.array(sizes, dtype=np.int64), np.array(picks, dtype=np.int64)


def snapshot(sizes):
    ptr = counts_to_ptr(sizes)
    return SimpleNamespace(atoms_ptr=ptr, edges_ptr=ptr, num_samples=len(sizes))


@given(chosen(), st.data())
def test_ranges_equal_listed_rows(case, data):
    sizes, picks = case
    whole = Selection.all(snapshot(sizes))
    rows, ptr = row_indices(counts_to_ptr(sizes), picks)
    ranges = whole.take(picks).ranges("atom")
    assert len(ranges) == len(rows)
    np.testing.assert_array_equal(ranges.rows(np.arange(len(rows))), rows)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(0, len(rows)))
    starts, stops = ranges.between(start, stop)
    listed = [r for a, b in zip(starts, stops, strict=True) for r in range(a, b)]
    assert listed == rows[start:stop].tolist()
    np.testing.assert_array_equal(whole.take(picks).counts("atom"), np.diff(ptr))


@given(chosen(), st.data())
def test_selections_compose(case, data):
    sizes, picks = case
    whole = Selection.all(snapshot(sizes))
    once = whole.take(picks)
    again = data.draw(
        st.lists(st.integers(0, len(picks) - 1), max_size=8) if len(picks) else st.just([])
    )
    again = np.array(again, dtype=np.int64)
    np.testing.assert_array_equal(once.take(again).index, picks[again])


def test_contiguous_samples_stay_a_slice():
    whole = Selection.all(snapshot(np.array([2, 3, 4, 1])))
    part = whole.take(np.array([1, 2, 3]))
    assert part.samples == slice(1, 4)
    assert part.take(np.array([1, 2])).samples == slice(2, 4)


def test_ranges_are_as_long_as_the_runs_not_the_rows():
    sizes = np.full(1000, 500, dtype=np.int64)
    picks = np.delete(np.arange(1000), [10, 500])
    assert len(Selection.all(snapshot(sizes)).take(picks).ranges("atom").starts) == 3


@pytest.mark.parametrize("rows", [np.empty(0, np.int64), np.array([0])])
def test_empty_ranges(rows):
    ranges = RowRanges.of(np.array([4]), np.array([4]))
    assert len(ranges) == 0
    assert ranges.rows(rows[:0]).tolist() == []
    assert [a.tolist() for a in ranges.between(0, 0)] == [[], []]

"""The C loops and their NumPy versions do the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.native import available, rows


@given(data=st.data(), compiled=st.booleans())
def test_ranges_of_any_dtype(data, compiled) -> None:
    if compiled and not available()["rows"]:
        pytest.skip("no compiler at installation")
    dtype = data.draw(st.sampled_from([bool, np.uint8, np.float16, np.int32, np.float64, object]))
    tail = data.draw(st.sampled_from([(), (1,), (3,), (3, 3), (0,)]))
    count = data.draw(st.integers(0, 12))
    source = np.arange(count * int(np.prod(tail))).reshape(count, *tail).astype(dtype)
    bound = st.integers(0, count)
    ranges = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=6))
    starts = np.array([a for a, _ in ranges], np.int64)
    stops = np.array([b for _, b in ranges], np.int64)
    want = np.concatenate([source[:0], *(source[a:b] for a, b in ranges)])
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(rows, "_rows", None)
        got = rows.copy_ranges(source, starts, stops, np.empty_like(want))
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize(
    ("starts", "stops", "out"),
    [
        ([-1], [1], np.empty(2, int)),
        ([3], [6], np.empty(3, int)),
        ([3, 2], [5, 1], np.empty(1, int)),
        ([0], [2], np.empty(3, int)),
        ([0], [2], np.empty(2, np.float32)),
        ([0], [2], np.empty((2, 1), int)),
        ([0], [2], np.empty(4, int)[::2]),
    ],
)
def test_what_leaves_memory_is_refused(starts, stops, out) -> None:
    with pytest.raises(ValueError, match=r"ranges leave|out is|contiguous"):
        rows.copy_ranges(np.arange(5), np.array(starts), np.array(stops), out)

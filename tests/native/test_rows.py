"""The C loops and their NumPy versions do the same."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.native import available
from alchemi_xr.native import rows as rows_module


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
            patch.setattr(rows_module, "_rows", None)
        got = np.empty_like(want)
        lengths = stops - starts
        # Put down from the last to the first: the order is the caller's.
        targets = (np.cumsum(lengths) - lengths)[::-1]
        rows_module.copy_ranges(source, starts[::-1], stops[::-1], got, targets)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize(
    ("starts", "stops", "out"),
    [
        ([-1], [1], np.empty(2, int)),
        ([3], [6], np.empty(3, int)),
        ([3, 2], [5, 1], np.empty(1, int)),
        ([0], [2], np.empty(1, int)),
        ([0], [2], np.empty(2, np.float32)),
        ([0], [2], np.empty((2, 1), int)),
        ([0], [2], np.empty(4, int)[::2]),
    ],
)
def test_what_leaves_memory_is_refused(starts, stops, out) -> None:
    with pytest.raises(ValueError, match=r"ranges leave|out is|contiguous"):
        rows_module.copy_ranges(
            np.arange(5), np.array(starts), np.array(stops), out, np.zeros(len(starts), int)
        )


@given(data=st.data(), compiled=st.booleans())
def test_a_gather_of_many_fields(data, compiled) -> None:
    if compiled and not available()["rows"]:
        pytest.skip("no compiler at installation")
    counts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=9)))
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    total, n = int(ptr[-1]), len(counts)
    samples = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=12)), np.int64)
    shift = np.array([10 * (i + 1) for i in range(len(samples))], np.int64)
    rng = np.random.default_rng(0)
    fields, wanted = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        tail = data.draw(st.sampled_from([(), (1,), (2,), (3,), (3, 3), (6, 3), (5,), (0,)]))
        dtype = data.draw(st.sampled_from(["?", "u1", "i2", "i4", "i8", "f4", "f8"]))
        ragged = data.draw(st.booleans())
        shifted = ragged and dtype in ("i4", "i8") and data.draw(st.booleans())
        rows = rng.integers(0, 100, (total if ragged else n, *tail)).astype(dtype)
        fields.append(rows_module.Field(rows, ptr if ragged else None, shifted=shifted))
        parts = [rows[:0]]
        for place, sample in enumerate(samples):
            part = rows[ptr[sample] : ptr[sample + 1]] if ragged else rows[sample : sample + 1]
            parts.append(part + shift[place].astype(dtype) if shifted else part)
        wanted.append(np.concatenate(parts))
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(rows_module, "_rows", None)
        found = rows_module.Gather(fields)(samples, [len(w) for w in wanted], shift)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("rows", "ptr", "shifted"),
    [
        (np.zeros((4, 4)).T[1:], None, False),
        (np.zeros(3, object), None, False),
        (np.zeros(3), np.array([0, 3]), True),
        (np.zeros(3, "i2"), np.array([0, 3]), True),
        (np.zeros(3), np.array([0, 4]), False),
        (np.zeros(3), np.array([-1, 3]), False),
        (np.zeros(3), np.array([0, 3], np.int32), False),
    ],
)
def test_a_field_that_would_leave_memory_is_refused(rows, ptr, shifted) -> None:
    with pytest.raises(ValueError, match=r"contiguous|shifted|pointer"):
        rows_module.Field(rows, ptr, shifted=shifted)


@pytest.fixture
def files(tmp_path):
    """One array over four files, the last not full."""
    if not available()["rows"]:
        pytest.skip("no compiler at installation")
    piece = 2 * mmap.PAGESIZE
    data = np.random.default_rng(0).integers(0, 256, 3 * piece + 100).astype(np.uint8)
    paths = []
    for number in range(4):
        paths.append(str(tmp_path / f"{number} é"))
        part = data[number * piece : (number + 1) * piece]
        # Files of chunks are whole, also the last.
        np.concatenate([part, np.zeros(piece - len(part), np.uint8)]).tofile(paths[-1])
    return paths, piece, data


def test_files_are_one_array(files) -> None:
    paths, piece, data = files
    found = rows_module.map_files(paths, piece, len(data))
    np.testing.assert_array_equal(found, data)
    assert not found.flags.writeable
    part = found[10:20]
    del found
    for path in paths:
        os.unlink(path)
    np.testing.assert_array_equal(part, data[10:20])
    single = rows_module.map_files([__file__], 3, 3)
    assert single.tobytes() == b'"""'


def test_files_that_cannot_be_mapped(files) -> None:
    paths, piece, data = files
    os.truncate(paths[1], piece - 1)
    with pytest.raises(EOFError) as told:
        rows_module.map_files(paths, piece, len(data))
    assert told.value.args == (1,)
    os.unlink(paths[2])
    with pytest.raises((EOFError, FileNotFoundError)):
        rows_module.map_files(paths, piece, len(data))
    assert rows_module.map_files(paths, piece + 8, len(data)) is None
    assert rows_module.map_files([], piece, 0) is None
    with pytest.raises(ValueError, match="pieces"):
        rows_module._rows.map_files([b"a"], piece, len(data))

"""A planned gather is the same in C and in NumPy, and nothing given to it leaves memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.native import available
from alchemi_xr.native import plan as plan_module
from alchemi_xr.native.plan import Line, Plan

needs_c = pytest.mark.skipif(not available()["rows"], reason="no compiler at installation")


def pointers(data: Any, stored: int) -> list[np.ndarray[Any, Any]]:
    counts = st.lists(st.integers(0, 5), min_size=stored, max_size=stored)
    return [np.concatenate([[0], np.cumsum(data.draw(counts))]).astype(np.int64) for _ in range(2)]


@given(data=st.data(), compiled=st.booleans(), local=st.booleans())
def test_lists_of_samples_of_many_fields(data: Any, compiled: bool, local: bool) -> None:
    if compiled and not available()["rows"]:
        pytest.skip("no compiler at installation")
    stored = data.draw(st.integers(1, 9))
    ptrs = pointers(data, stored)
    active = None
    if data.draw(st.booleans()):
        active = np.array(
            data.draw(st.lists(st.integers(0, stored - 1), min_size=1, max_size=9)), np.int64
        )
    length = stored if active is None else len(active)
    lists = data.draw(
        st.lists(st.lists(st.integers(-length, length - 1), max_size=7), min_size=1, max_size=5)
    )
    bounds = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    samples = np.array([i for one in lists for i in one], np.int64)
    physical = [[i % length if active is None else int(active[i]) for i in one] for one in lists]
    rng = np.random.default_rng(0)
    lines, wanted = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        tail = data.draw(st.sampled_from([(), (1,), (2,), (3,), (3, 3), (5,), (0,)]))
        dtype = data.draw(st.sampled_from(["?", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8"]))
        level = data.draw(st.sampled_from([-1, 0, 1]))
        shifted = level >= 0 and dtype in ("i4", "i8") and data.draw(st.booleans())
        cast = {"f4": "f8", "f8": "f4"}.get(dtype) if data.draw(st.booleans()) else None
        rows_of = stored if level < 0 else int(ptrs[level][-1])
        rows = rng.integers(0, 100, (rows_of, *tail)).astype(dtype)
        lines.append(Line(rows, level, shifted=shifted, dtype=cast))
        parts = [rows[:0]]
        for one in physical:
            begin = 0
            for i in one:
                start, stop = (i, i + 1) if level < 0 else ptrs[level][i : i + 2]
                part = rows[start:stop]
                if shifted:
                    part = part + ((0 if local else begin) - ptrs[0][i]).astype(part.dtype)
                begin += ptrs[0][i + 1] - ptrs[0][i]
                parts.append(part)
        wanted.append(np.concatenate(parts).astype(cast or dtype))
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(plan_module, "_rows", None)
        plan = Plan(lines, ptrs, active)
        found = plan.measure(samples, bounds)
        assert found is not None
        scratch, rows_list = found
        outs = [np.empty(w.shape, w.dtype) for w in wanted]
        plan.fill(scratch, bounds, outs, local=local)
        assert plan.measure(np.append(samples, length), np.append(bounds, len(samples) + 1)) is None
    assert rows_list == [
        sum(int(ptr[i + 1] - ptr[i]) for i in one) for ptr in ptrs for one in physical
    ]
    assert scratch[: len(samples)].tolist() == [i for one in physical for i in one]
    for number, ptr in enumerate(ptrs):
        for place, one in enumerate(physical):
            counts = [int(ptr[i + 1] - ptr[i]) for i in one]
            got = plan.pointer(scratch, bounds, number, place)
            assert got.tolist() == [0, *np.cumsum(counts).tolist()]
    for out, want in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(out, want)


def bytes_or_numbers(data: Any) -> Any:
    return data.draw(
        st.one_of(
            st.lists(st.integers(-3, 12), max_size=9).map(lambda v: np.array(v, np.int64)),
            st.binary(max_size=40).map(bytearray),
            st.sampled_from([None, 3, "x", np.zeros(4)[::2], np.zeros(5, np.int64)]),
        )
    )


@needs_c
@given(data=st.data())
def test_no_argument_leaves_memory(data: Any) -> None:
    """The compiled plan itself, given anything: it answers or it raises."""
    compiled = plan_module._rows.Plan
    small = st.integers(-2, 20)
    line = st.tuples(
        st.sampled_from([np.zeros(24, np.uint8), b"abc", np.zeros(9), bytearray(64)[1:], None]),
        *(small,) * 4,
        st.integers(-1, 5),
    )
    try:
        plan = compiled(
            data.draw(st.lists(line, max_size=3)),
            [bytes_or_numbers(data) for _ in range(data.draw(st.integers(0, 2)))],
            data.draw(st.sampled_from([None, np.array([0, 1, 7, -4]), b"x"])),
        )
    except (ValueError, TypeError, BufferError):
        plan = compiled(
            [(np.zeros(16, np.uint8), 0, 8, 8, 8, 1), (np.zeros(4, "f4"), -1, 4, 8, 4, 2)],
            # A pointer that descends and leaves the rows: C sees it, copy by copy.
            [np.array(data.draw(st.permutations([0, 1, 2, 3, -9])), np.int64)],
            None,
        )
    refused = (ValueError, TypeError, BufferError)
    for _ in range(3):
        with suppress(*refused):
            plan.measure(*(bytes_or_numbers(data) for _ in range(3)))
        with suppress(*refused):
            outs = [bytes_or_numbers(data) for _ in range(data.draw(st.integers(0, 3)))]
            plan.fill(bytes_or_numbers(data), bytes_or_numbers(data), outs, False)


@needs_c
def test_a_target_too_small_and_rows_too_few_are_refused() -> None:
    ptr = np.array([0, 2, 4], np.int64)
    plan = Plan([Line(np.arange(4), 0)], [ptr])
    bounds = np.array([0, 2], np.int64)
    found = plan.measure(np.array([1, 0]), bounds)
    assert found is not None
    with pytest.raises(ValueError, match="leave"):
        plan.fill(found[0], bounds, [np.empty(3, np.int64)])
    with pytest.raises((ValueError, BufferError)):
        plan.fill(found[0], bounds, [np.empty(8, np.int64)[::2]])
    frozen = np.empty(4, np.int64)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        plan.fill(found[0], bounds, [frozen])
    # A pointer changed behind the plan's back is seen at the copy.
    plan.pointers[0][2] = 10**15
    with pytest.raises(ValueError, match="leave"):
        plan.fill(found[0], bounds, [np.empty(4, np.int64)])


@pytest.mark.parametrize(
    ("rows", "level", "shifted", "dtype"),
    [
        (np.zeros((4, 4)).T[1:], -1, False, None),
        (np.zeros(3, object), -1, False, None),
        (np.zeros(3), 0, True, None),
        (np.zeros(3, "i2"), 0, True, None),
        (np.zeros(3, "i8"), -1, True, None),
        (np.zeros(3, "f4"), -1, False, "f2"),
        (np.zeros(3, "i4"), -1, False, "f8"),
        (np.zeros(3, ">f4"), -1, False, "f8"),
    ],
)
def test_a_line_of_another_kind_is_refused(
    rows: Any, level: int, shifted: bool, dtype: Any
) -> None:
    with pytest.raises(ValueError, match=r"contiguous|shifted|cast|native"):
        Line(rows, level, shifted=shifted, dtype=dtype)


@pytest.mark.parametrize("ptr", [[0, 2, 1], [0, 2, 9], [-1, 0, 1], [0, 1]])
def test_a_pointer_that_does_not_fit_is_refused(ptr: list[int]) -> None:
    with pytest.raises(ValueError, match=r"pointer"):
        Plan([Line(np.zeros(4), 1)], [np.array([0, 1, 2]), np.array(ptr)])
    with pytest.raises(ValueError, match=r"pointer|leaves"):
        Plan([Line(np.zeros(1), 0)], [np.array([0, 1, 2])])

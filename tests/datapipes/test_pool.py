"""Memory is used again only when nobody holds it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.datapipes import pool as pool_module
from alchemi_xr.data.datapipes.pool import BufferPool

F8 = np.dtype("f8")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_SMALL", 64)


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back_when_its_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.empty((100, 3), F8)
    where = address(first)
    window = first[10:20]  # a slice keeps it
    del first
    assert address(pool.empty((100, 3), F8)) != where
    tensor = torch.from_numpy(window)[2:4]  # so does a tensor over it
    del window
    assert address(pool.empty((100, 3), F8)) != where
    del tensor
    assert address(pool.empty((100, 3), F8)) == where
    assert address(pool.empty((300,), np.dtype("i8"))) == where  # of any shape and dtype
    assert address(pool.empty((20,), F8)) != where  # but not much smaller


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=60), st.integers(1, 6000))
def test_what_is_held_is_never_written(steps: list[tuple[int, bool]], limit: int) -> None:
    pool, held = BufferPool(limit), []
    for number, (rows, keep) in enumerate(steps):
        array = pool.empty((rows, 3), F8)
        assert array.shape == (rows, 3)
        assert array.flags.writeable
        array[...] = number
        if keep:
            held.append((number, array[: rows // 2 + 1]))
        if len(held) > 5:
            held.pop(0)
        for value, view in held:
            assert (view == value).all()
    assert sum(b.nbytes for b in pool._buffers) <= limit


def test_threads_do_not_share() -> None:
    pool = BufferPool()

    def work(number: int) -> bool:
        right = True
        for _ in range(300):
            array = pool.empty((64, 3), F8)
            array[...] = number
            right &= bool((array == number).all())
        return right

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))

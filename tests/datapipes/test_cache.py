from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from alchemi_xr.data.datapipes import cache as cache_module
from alchemi_xr.data.datapipes.cache import DEFAULT_BYTES, PieceCache, default_bytes


def piece(size: int = 10) -> Any:
    return lambda: np.zeros(size, dtype=np.int8)


def test_the_least_recently_used_goes_first() -> None:
    cache = PieceCache(30)
    for key in "abc":
        cache.get(key, piece())
    assert cache.nbytes == 30
    cache.get("a", piece())
    cache.get("d", piece())
    assert cache.nbytes == 30

    def fail() -> Any:
        raise AssertionError("was dropped")

    for key in "acd":
        cache.get(key, fail)
    with pytest.raises(AssertionError):
        cache.get("b", fail)
    cache.get("b", piece())  # a failure is not remembered


def test_what_does_not_fit_is_given_and_not_kept() -> None:
    cache = PieceCache(5)
    assert len(cache.get("a", piece())) == 10
    assert (len(cache), cache.nbytes) == (0, 0)


def test_pieces_are_read_only() -> None:
    found = PieceCache().get("a", piece())
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_clear_forgets_what_is_still_being_loaded() -> None:
    cache = PieceCache()

    def load() -> Any:
        cache.clear()
        return np.zeros(3)

    assert len(cache.get("a", load)) == 3
    assert len(cache) == 0


def test_threads_load_a_piece_once() -> None:
    cache = PieceCache()
    started, go = threading.Event(), threading.Event()
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        started.set()
        go.wait(10)
        return np.arange(4)

    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.get("a", load))) for _ in range(5)
    ]
    threads[0].start()
    assert started.wait(10)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert loads == [1]
    assert len(found) == 5
    assert all(one is found[0] for one in found)


def test_an_error_reaches_those_who_wait() -> None:
    cache = PieceCache()
    started, go = threading.Event(), threading.Event()

    def load() -> Any:
        started.set()
        go.wait(10)
        raise OSError("gone")

    errors: list[BaseException] = []

    def get() -> None:
        try:
            cache.get("a", load)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=get) for _ in range(3)]
    threads[0].start()
    assert started.wait(10)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert [str(e) for e in errors] == ["gone"] * 3


def test_another_process_starts_empty() -> None:
    cache = PieceCache(77)
    cache.get("a", piece())
    other = pickle.loads(pickle.dumps(cache))
    assert (other.limit, len(other)) == (77, 0)


def test_the_default_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_free_bytes", lambda: 16 * 2**30)
    assert default_bytes() == 2**30
    monkeypatch.setattr(cache_module, "_free_bytes", lambda: 0)  # not told by the system
    assert default_bytes() == DEFAULT_BYTES
    monkeypatch.undo()
    assert default_bytes() >= DEFAULT_BYTES

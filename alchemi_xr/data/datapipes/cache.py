"""Decoded pieces of arrays, kept up to a number of bytes.

Batches are smaller than chunks: without this, reading a store in order decodes
each chunk many times over. Threads that want the same piece decode it once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any

from alchemi_xr._typing import NDArray

__all__ = ["DEFAULT_BYTES", "PieceCache"]

#: Enough for the chunks of all fields around one place; small beside torch itself, so that
#: memory does not visibly grow with the store.
DEFAULT_BYTES = 32 * 2**20


class PieceCache:
    """Arrays by key, the least recently used dropped first.

    Parameters
    ----------
    limit : int
        Bytes to keep; 0 keeps nothing.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, NDArray] = OrderedDict()
        self._flying: dict[Hashable, Future[NDArray]] = {}
        self._bytes = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, load: Callable[[], NDArray]) -> NDArray:
        """The array of a key, read-only; loaded when it is not here.

        An error of ``load`` reaches every thread that waits for the key, and
        the next call tries again.
        """
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            flying = self._flying.get(key)
            mine: Future[NDArray] | None = None
            if flying is None:
                mine = self._flying[key] = Future()
        if flying is not None:
            return flying.result()
        assert mine is not None
        try:
            value = load()
        except BaseException as error:
            with self._lock:
                self._flying.pop(key, None)
            mine.set_exception(error)
            raise
        value.flags.writeable = False
        with self._lock:
            # Cleared meanwhile: the piece may be of a generation that is no longer wanted.
            if self._flying.pop(key, None) is mine:
                self._keep(key, value)
        mine.set_result(value)
        return value

    def _keep(self, key: Hashable, value: NDArray) -> None:
        if value.nbytes > self.limit:
            return
        self._kept[key] = value
        self._bytes += value.nbytes
        while self._bytes > self.limit:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes

    def clear(self) -> None:
        """Forget everything; what is being loaded is not kept either."""
        with self._lock:
            self._kept.clear()
            self._flying.clear()
            self._bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process starts empty.
        return (PieceCache, (self.limit,))

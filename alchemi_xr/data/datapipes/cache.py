"""Decoded pieces of arrays, kept up to a number of bytes.

Batches are smaller than chunks: without this, reading a store in order decodes
each chunk many times over. Threads that want the same piece decode it once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.datapipes.forks import renew_in_child

__all__ = ["DEFAULT_BYTES", "PieceCache", "default_bytes"]

#: What a cache has at least: the chunks of all fields around one place.
DEFAULT_BYTES = 32 * 2**20
#: Of the memory that is free, what a reader takes by default.
_SHARE = 16


def default_bytes() -> int:
    """A sixteenth of the memory that is free now, and 32 MiB at least.

    Most data sets fit in that once decoded, and are then decoded once.
    """
    return max(DEFAULT_BYTES, _free_bytes() // _SHARE)


def _free_bytes() -> int:
    """Memory that this process may still take; 0 where the system does not say."""
    found = 0
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as lines:
        found = next(int(one.split()[1]) * 1024 for one in lines if one.startswith("MemAvailable"))
    folder = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # a container's own limit, "max" when it has none
        limit = int((folder / "memory.max").read_text())
        found = min(found, max(0, limit - int((folder / "memory.current").read_text())))
    return found


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
        self._joined = 0
        self._heads: dict[Hashable, NDArray] = {}
        self._head_bytes = 0
        self._lock = Lock()
        #: Pieces that were loaded, and of these dropped again.
        self.loads = self.drops = 0
        renew_in_child(self)

    def renew(self) -> None:
        """In a forked child: nobody holds the lock, and nobody brings what was flying."""
        self._lock = Lock()
        self._flying = {}
        # The fork may have come between a piece and its bytes.
        self._bytes = sum(piece.nbytes for piece in self._kept.values())

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, those of heads and of arrays that were joined included."""
        return self._bytes + self._joined + self._head_bytes

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
            self.loads += 1
            if self._flying.pop(key, None) is mine:
                self._keep(key, value)
        mine.set_result(value)
        return value

    def _keep(self, key: Hashable, value: NDArray) -> None:
        limit = self.limit - self._joined - self._head_bytes
        if value.nbytes > limit:
            self.drops += 1
            return
        self._kept[key] = value
        self._bytes += value.nbytes
        self._shrink(limit)

    def _shrink(self, limit: int) -> None:
        while self._bytes > limit and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
            self.drops += 1

    def head(self, key: Hashable) -> NDArray | None:
        """The first rows of a piece, where they were kept."""
        return self._heads.get(key)

    def keep_head(self, key: Hashable, rows: NDArray) -> None:
        """Keep the first rows of a piece for good, as far as a sixteenth of the bytes goes.

        They are those of a sample that begins in the piece before: with them,
        to read one piece is not to decode the next as well.
        """
        with self._lock:
            free = self.limit // _SHARE - self._head_bytes
            if key not in self._heads and rows.nbytes <= free:
                self._heads[key] = rows.copy()
                self._heads[key].flags.writeable = False
                self._head_bytes += rows.nbytes
                self._shrink(self.limit - self._joined - self._head_bytes)

    def join(self, keys: Sequence[Hashable]) -> NDArray | None:
        """The arrays of these keys as one, when all are kept; it stands in for them.

        Its bytes count for as long as this cache lives: who joins does so once.
        """
        with self._lock:
            if not all(key in self._kept for key in keys):
                return None
            parts = [self._kept.pop(key) for key in keys]
            for key in keys:
                if key in self._heads:
                    self._head_bytes -= self._heads.pop(key).nbytes
            size = sum(part.nbytes for part in parts)
            self._bytes -= size
            self._joined += size
        joined = np.concatenate(parts)
        joined.flags.writeable = False
        return joined

    def clear(self) -> None:
        """Forget everything; what is being loaded is not kept either."""
        with self._lock:
            self._kept.clear()
            self._flying.clear()
            self._heads.clear()
            self._bytes = self._joined = self._head_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process starts empty.
        return (PieceCache, (self.limit,))

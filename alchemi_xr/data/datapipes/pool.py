"""Memory for the arrays of batches, used again when nobody holds it any more.

Fresh memory of some hundred kilobytes costs more than copying the rows into it:
the system hands out each page anew. Who keeps a batch keeps its memory; that is
seen by the references to it, so nothing is ever written under a batch that is held.
"""

from __future__ import annotations

import math
import sys
from threading import Lock
from typing import Any

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.datapipes.forks import renew_in_child

__all__ = ["BufferPool"]

# What is smaller comes out of memory that the process has already.
_SMALL = 1 << 16


def _references(buffers: list[NDArray]) -> list[int]:
    """References to each buffer, those of the list and of this loop included."""
    found = []
    for buffer in buffers:
        found.append(sys.getrefcount(buffer))  # noqa: PERF401 - as it is measured below
    return found


# What the interpreter itself holds, which differs by its version: measured, not assumed.
_NOBODY = _references([np.empty(1, np.uint8)])[0]


class BufferPool:
    """Arrays over memory that may have been used before.

    Parameters
    ----------
    limit : int
        Bytes to remember; beyond them the oldest are forgotten (and freed when
        their batch is).
    """

    def __init__(self, limit: int = 32 * 2**20) -> None:
        self.limit = limit
        self._buffers: list[NDArray] = []
        self._lock = Lock()
        renew_in_child(self)

    def renew(self) -> None:
        """In a forked child: nobody holds the lock, and its memory is a copy."""
        self._lock = Lock()
        self._buffers = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray:
        """An array with anything in it."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL or size > self.limit:
            return np.empty(shape, dtype)
        with self._lock:
            for number, count in enumerate(_references(self._buffers)):
                nbytes = self._buffers[number].nbytes
                if count == _NOBODY and size <= nbytes <= 2 * size:
                    # The view is made under the lock: from here on somebody holds it.
                    return np.ndarray(shape, dtype, self._buffers[number])
            # A little more than asked for: batches differ in size.
            fresh = np.empty(size + size // 8, np.uint8)
            self._buffers.append(fresh)
            held = sum(one.nbytes for one in self._buffers)
            while held > self.limit:
                held -= self._buffers.pop(0).nbytes
            return np.ndarray(shape, dtype, fresh)

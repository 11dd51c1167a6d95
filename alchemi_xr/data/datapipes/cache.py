"""Decoded pieces of arrays, kept up to a number of bytes that a whole process shares.

Batches are smaller than chunks: without this, reading a store in order decodes
each chunk many times over. Threads that want the same piece decode it once, and so
do two readers of one generation of a store. What was not used for longest goes
first, whichever store it is of.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from alchemi_xr._typing import NDArray
from alchemi_xr.config import option
from alchemi_xr.data.datapipes.budget import CacheBudget, Kept, Listener
from alchemi_xr.store.reader import Snapshot

__all__ = [
    "DEFAULT_BYTES",
    "CacheBudget",
    "PieceCache",
    "cache_of",
    "default_bytes",
    "process_cache",
]

#: What a cache has at least: the chunks of all fields around one place.
DEFAULT_BYTES = 32 * 2**20
#: Of the memory that is free, what a process takes by default.
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
    """Arrays of one generation of a store by key, out of a budget.

    Parameters
    ----------
    limit : int
        Bytes of a budget of its own; 0 keeps nothing.
    budget : CacheBudget, optional
        Share this one instead.
    key : hashable, optional
        Caches of one budget and one key hold the same arrays.
    """

    def __init__(
        self,
        limit: int = DEFAULT_BYTES,
        *,
        budget: CacheBudget | None = None,
        key: Hashable | None = None,
    ) -> None:
        self.budget = CacheBudget(limit) if budget is None else budget
        self._own = budget is None
        self._space = self.budget.hold(key)
        self._end = weakref.finalize(self, self.budget.lost, self._space)
        self._end.atexit = False

    @property
    def limit(self) -> int:
        """Bytes that the budget keeps at most."""
        return self.budget.limit

    @property
    def is_shared(self) -> bool:
        """Whether others keep their arrays within the same bytes."""
        return not self._own

    @property
    def nbytes(self) -> int:
        """Bytes kept here, those of heads and of arrays that were joined included."""
        return self._space.nbytes

    @property
    def loads(self) -> int:
        """Pieces that were loaded."""
        return self._space.loads

    @property
    def drops(self) -> int:
        """Pieces that were dropped again, or not kept."""
        return self._space.drops

    def __len__(self) -> int:
        return self._space.pieces

    def get(self, key: Hashable, load: Callable[[], NDArray]) -> NDArray:
        """The array of a key, read-only; loaded when it is not here.

        An error of ``load`` reaches every thread that waits for the key, and
        the next call tries again.
        """
        return self.budget.get(self._space, key, load)

    def head(self, key: Hashable) -> NDArray | None:
        """The first rows of a piece, where they were kept."""
        return self._space.heads.get(key)

    def keep_head(self, key: Hashable, rows: NDArray) -> None:
        """Keep the first rows of a piece, as far as a sixteenth of the bytes goes.

        They are those of a sample that begins in the piece before: with them,
        to read one piece is not to decode the next as well.
        """
        self.budget.keep_head(self._space, key, rows)

    @property
    def wholes(self) -> int:
        """Fields of which all pieces were joined."""
        return len(self._space.wholes)

    def join(self, name: str, keys: Sequence[Hashable]) -> Kept | None:
        """The arrays of these keys as one, when all are kept or were joined before.

        It stands in for them, and is dropped as they are: ``listen`` first, to be told.
        Touch it when it is used.
        """
        return self.budget.join(self._space, name, keys)

    def listen(self, listener: Listener) -> None:
        """Have ``listener.forget(name)`` called when a joined array is dropped."""
        self._space.listeners.add(listener)

    def clear(self) -> None:
        """Forget everything; what is being loaded is not kept either."""
        self.budget.clear(self._space)

    def close(self) -> None:
        """Give up what is held; it is dropped unless another cache holds it too."""
        if self._end.detach() is not None:
            self.budget.release(self._space)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process starts empty, and shares its own budget.
        if self._own:
            return (PieceCache, (self.limit,))
        return (_of_process, (self._space.key,))


def _of_process(key: Hashable | None) -> PieceCache:
    return PieceCache(budget=process_cache(), key=key)


_process: CacheBudget | None = None
_making = Lock()


def _after_fork() -> None:
    global _making
    _making = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def process_cache() -> CacheBudget:
    """The budget that all readers of this process share.

    Its size is the option ``cache_bytes``; ``"auto"`` is ``default_bytes`` as of the
    first call.
    """
    global _process
    if _process is None:
        with _making:
            if _process is None:
                _process = CacheBudget(_Limit())
    return _process


class _Limit:
    """The option, looked up each time: it may be set for a block only."""

    def __init__(self) -> None:
        self._auto = default_bytes()

    def __call__(self) -> int:
        chosen = option("cache_bytes")
        return self._auto if chosen == "auto" else int(chosen)


def cache_of(snapshot: Snapshot, limit: int | None = None) -> PieceCache:
    """The cache of a snapshot: of its own with a limit, else within the process's budget.

    Parameters
    ----------
    snapshot : Snapshot
    limit : int, optional
        Bytes.
    """
    return _of_process(_same(snapshot)) if limit is None else PieceCache(limit)


def _same(snapshot: Snapshot) -> Hashable | None:
    """What two snapshots have in common only if their rows are the same; None if unknown."""
    schema, pinned = snapshot.schema, snapshot.pinned
    # Another tool changes rows and leaves identity and generation as they are.
    if snapshot.is_foreign or not schema.identity:
        return None
    place: Hashable
    if pinned is not None:
        # A copy of a folder has its identity, and may go its own way from there.
        about = os.stat(pinned.root)
        place = (about.st_dev, about.st_ino)
    elif snapshot.snapshot_id is not None or snapshot.place.is_remote:
        place = (snapshot.where, snapshot.place.prefix, snapshot.snapshot_id)
    else:
        return None
    return (place, schema.identity, schema.generation, schema.counts)

"""Bytes that the caches of many readers share, the least recently used dropped first.

One lock guards all of it. What is handed out stays valid when it is dropped: it is
only kept no longer.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any, Protocol, TypeAlias

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.datapipes.forks import renew_in_child

__all__ = ["CacheBudget", "Kept", "Listener", "Space"]

#: Of a budget, what the first rows of pieces may take.
HEAD_SHARE = 16

_tick = count().__next__


class Listener(Protocol):
    """What holds arrays that were joined."""

    def forget(self, name: str) -> None:
        """Let go of the array of this name: its bytes are wanted for something else."""


@dataclass(slots=True, eq=False)
class Kept:
    """An array that is kept: a piece, or all pieces of a field joined.

    ``touch`` says that it was used; ``gone`` that it is kept no longer.
    """

    space: Space
    key: Hashable
    rows: NDArray
    used: int = field(default_factory=_tick)
    gone: bool = False

    def touch(self) -> None:
        """Note that it was used just now."""
        self.used = _tick()


@dataclass(slots=True, eq=False)
class Space:
    """What is kept of one generation of one store."""

    key: Hashable | None
    holders: int = 0
    flying: dict[Hashable, Future[NDArray]] = field(default_factory=dict)
    heads: dict[Hashable, NDArray] = field(default_factory=dict)
    wholes: dict[Hashable, Kept] = field(default_factory=dict)
    listeners: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    pieces: int = 0
    nbytes: int = 0
    head_bytes: int = 0
    loads: int = 0
    drops: int = 0


_Place: TypeAlias = tuple[Space, Hashable]


class CacheBudget:
    """Bytes that many caches share.

    Parameters
    ----------
    limit : int or callable
        Bytes to keep, or what says so each time anew; 0 keeps nothing.
    """

    def __init__(self, limit: int | Callable[[], int]) -> None:
        self._limit = limit
        self._pieces: OrderedDict[_Place, Kept] = OrderedDict()
        self._spaces: set[Space] = set()
        self._named: dict[Hashable, Space] = {}
        self._released: deque[Space] = deque()
        self._bytes = self._head_bytes = 0
        self._lock = Lock()
        renew_in_child(self)

    @property
    def limit(self) -> int:
        """Bytes to keep at most."""
        return self._limit if isinstance(self._limit, int) else self._limit()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, of all stores."""
        return self._bytes

    def renew(self) -> None:
        """In a forked child: nobody holds the lock, and nobody brings what was flying."""
        self._lock = Lock()
        # The fork may have come between a piece and its bytes.
        for space in self._spaces:
            space.flying = {}
            space.pieces = 0
            space.head_bytes = sum(rows.nbytes for rows in space.heads.values())
            space.nbytes = sum(kept.rows.nbytes for kept in space.wholes.values())
            space.nbytes += space.head_bytes
        for kept in self._pieces.values():
            kept.space.pieces += 1
            kept.space.nbytes += kept.rows.nbytes
        self._bytes = sum(space.nbytes for space in self._spaces)
        self._head_bytes = sum(space.head_bytes for space in self._spaces)

    # -- who holds what ----------------------------------------------------------

    def hold(self, key: Hashable | None) -> Space:
        """The space of a generation, the same to all who name it alike; None is like none."""
        with self._lock:
            self._reap()
            space = None if key is None else self._named.get(key)
            if space is None:
                space = Space(key)
                self._spaces.add(space)
                if key is not None:
                    self._named[key] = space
            space.holders += 1
            return space

    def release(self, space: Space) -> None:
        """One holder less; what the last one leaves is dropped."""
        self._released.append(space)
        with self._lock:
            self._reap()

    def lost(self, space: Space) -> None:
        """The same for the garbage collector, which comes at any place of any thread.

        Where the lock is taken, the next call does it.
        """
        self._released.append(space)
        if self._lock.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self._lock.release()

    def _reap(self) -> None:
        while self._released:
            space = self._released.popleft()
            space.holders -= 1
            if space.holders == 0:
                self._empty(space)
                self._spaces.discard(space)
                if space.key is not None:
                    self._named.pop(space.key, None)

    def _empty(self, space: Space) -> list[Kept]:
        wholes = list(space.wholes.values())
        for kept in [one for one in self._pieces.values() if one.space is space] + wholes:
            self._drop(kept)
        self._count(space, -space.head_bytes, head=True)
        space.heads.clear()
        # What is being loaded may be of a generation that is no longer wanted.
        space.flying.clear()
        return wholes

    # -- what goes ----------------------------------------------------------------

    def _drop(self, kept: Kept) -> None:
        space = kept.space
        if space.wholes.get(kept.key) is kept:
            del space.wholes[kept.key]
        else:
            del self._pieces[space, kept.key]
            space.pieces -= 1
        self._count(space, -kept.rows.nbytes)
        kept.gone = True

    def _shrink(self) -> list[Kept]:
        """Drop what was not used for longest; the joined arrays among it."""
        gone: list[Kept] = []
        limit = self.limit
        while self._bytes > limit:
            oldest = next(iter(self._pieces.values()), None)
            for space in self._spaces:
                for whole in space.wholes.values():
                    if oldest is None or whole.used < oldest.used:
                        oldest = whole
            if oldest is None:  # heads alone: the limit was lowered
                self._drop_heads(self._head_bytes, None)
                break
            if oldest.space.wholes.get(oldest.key) is oldest:
                gone.append(oldest)
            self._drop(oldest)
            oldest.space.drops += 1
        return gone

    def _drop_heads(self, size: int, spared: Space | None) -> None:
        """Drop at least so many bytes of heads, of the spaces that have most."""
        while size > 0:
            largest = max(
                (space for space in self._spaces if space is not spared and space.heads),
                key=lambda space: space.head_bytes,
                default=None,
            )
            if largest is None:
                return
            _, rows = largest.heads.popitem()
            self._count(largest, -rows.nbytes, head=True)
            size -= rows.nbytes

    def _count(self, space: Space, size: int, *, head: bool = False) -> None:
        """So many bytes more, or less."""
        space.nbytes += size
        self._bytes += size
        if head:
            space.head_bytes += size
            self._head_bytes += size

    # -- what is kept ---------------------------------------------------------------

    def get(self, space: Space, key: Hashable, load: Callable[[], NDArray]) -> NDArray:
        """The array of a key; see ``PieceCache``."""
        with self._lock:
            self._reap()
            kept = self._pieces.get((space, key))
            if kept is not None:
                self._pieces.move_to_end((space, key))
                kept.touch()
                return kept.rows
            flying = space.flying.get(key)
            mine: Future[NDArray] | None = None
            if flying is None:
                mine = space.flying[key] = Future()
        if flying is not None:
            return flying.result()
        assert mine is not None
        try:
            value = load()
        except BaseException as error:
            with self._lock:
                space.flying.pop(key, None)
            mine.set_exception(error)
            raise
        value.flags.writeable = False
        gone: list[Kept] = []
        with self._lock:
            space.loads += 1
            # Cleared or let go meanwhile: the piece is no longer wanted.
            if space.flying.pop(key, None) is mine and space in self._spaces:
                # A thread that began before its field was joined has no use for it any more.
                joined = isinstance(key, tuple) and key[0] in space.wholes
                if value.nbytes > self.limit - self._head_bytes:
                    space.drops += 1
                elif joined:
                    pass
                else:
                    self._pieces[space, key] = Kept(space, key, value)
                    space.pieces += 1
                    self._count(space, value.nbytes)
                    gone = self._shrink()
        mine.set_result(value)
        _tell(gone)
        return value

    def keep_head(self, space: Space, key: Hashable, rows: NDArray) -> None:
        """Keep the first rows of a piece; see ``PieceCache``."""
        gone: list[Kept] = []
        with self._lock:
            self._reap()
            room = self.limit // HEAD_SHARE
            if key in space.heads or space not in self._spaces or rows.nbytes > room:
                return
            missing = self._head_bytes + rows.nbytes - room
            if missing > 0:
                # Those that are kept stay, or none would be there when it is needed again;
                # but a store that came later gets its share.
                owners = {one for one in self._spaces if one.heads} | {space}
                if space.head_bytes + rows.nbytes > room // len(owners):
                    return
                self._drop_heads(missing, space)
            held = rows.copy()
            held.flags.writeable = False
            space.heads[key] = held
            self._count(space, held.nbytes, head=True)
            gone = self._shrink()
        _tell(gone)

    def join(self, space: Space, name: str, keys: Sequence[Hashable]) -> Kept | None:
        """The arrays of some keys as one; see ``PieceCache``."""
        with self._lock:
            self._reap()
            found = space.wholes.get(name)
            if found is not None:
                found.touch()
                return found
            kept = [self._pieces.get((space, key)) for key in keys]
            parts = [one.rows for one in kept if one is not None]
            if len(parts) < len(keys) or not parts:
                return None
        # The pieces stay until it is there: whoever wants one meanwhile finds it.
        joined = np.concatenate(parts)
        joined.flags.writeable = False
        with self._lock:
            found = space.wholes.get(name)
            if found is not None or space not in self._spaces:
                return found
            for key in keys:
                piece = self._pieces.get((space, key))
                if piece is not None:
                    self._drop(piece)
                head = space.heads.pop(key, None)
                if head is not None:
                    self._count(space, -head.nbytes, head=True)
            whole = space.wholes[name] = Kept(space, name, joined)
            self._count(space, joined.nbytes)
            gone = self._shrink()
        _tell(gone)
        return None if whole.gone else whole

    def clear(self, space: Space) -> None:
        """Forget everything of a space."""
        with self._lock:
            self._reap()
            wholes = self._empty(space)
        _tell(wholes)


def _tell(gone: Sequence[Kept]) -> None:
    """Those who hold joined arrays let go of them; without the lock, as they have their own."""
    for kept in gone:
        for listener in list(kept.space.listeners):
            listener.forget(kept.key)

"""Where a store lives: a folder on this machine, or any other Zarr store.

Readers of a folder hold it by its file descriptor, not by its name: after a
rewrite has put a new folder under the name they go on reading the old one.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.storage import LocalStore, MemoryStore, StorePath

from alchemi_xr.errors import ConfigError, MissingChunkError, StaleSnapshotError
from alchemi_xr.store import fs
from alchemi_xr.store._compat import Buffer

__all__ = ["DurableStore", "Place", "PinnedStore", "locate"]

_PROC_FD = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Place:
    """A store's address.

    Parameters
    ----------
    where : str
        For messages.
    path : Path, optional
        The folder, when the store is one.
    store : zarr store, optional
        Any other store.
    prefix : str
        Path inside that store.
    """

    where: str
    path: Path | None = None
    store: Store | None = None
    prefix: str = ""

    @property
    def is_local(self) -> bool:
        return self.path is not None

    @property
    def in_memory(self) -> bool:
        return isinstance(self.store, MemoryStore)

    def key(self, name: str) -> str:
        """Key of a document in the store behind this place."""
        return f"{self.prefix}/{name}" if self.prefix else name


def locate(store: Any) -> Place:
    """The address meant by a path, URL, dict, zarr store or StorePath.

    Raises
    ------
    ConfigError
        It is none of these.
    """
    if isinstance(store, Place):
        return store
    if isinstance(store, str) and "://" in store:
        scheme, _, rest = store.partition("://")
        if scheme != "file":
            return Place(store, store=zarr.storage.FsspecStore.from_url(store))
        store = rest
    if isinstance(store, (str, os.PathLike)):
        path = Path(os.path.abspath(os.fspath(store)))
        return Place(str(store), path=path)
    if isinstance(store, dict):
        memory = MemoryStore(store_dict=store)
        return Place(f"store in memory ({len(store)} keys)", store=memory)
    if isinstance(store, zarr.Group):
        store = store.store_path
    if isinstance(store, StorePath):
        if isinstance(store.store, LocalStore):
            path = Path(os.path.abspath(store.store.root)) / store.path
            return Place(str(path), path=path)
        return Place(str(store), store=store.store, prefix=store.path)
    if isinstance(store, LocalStore):
        path = Path(os.path.abspath(store.root))
        return Place(str(path), path=path)
    if isinstance(store, Store):
        return Place(str(store), store=store)
    raise ConfigError(
        "store",
        "this is no place for a store",
        found=type(store).__name__,
        expected="a path, a dict, a Zarr store or a StorePath",
    )


class DurableStore(LocalStore):
    """A folder for a writer: it knows which files still have to reach the medium.

    Each object is replaced by a rename, and :meth:`flush` makes all that were
    written since the last one durable.
    """

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self.dirty: set[Path] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return (DurableStore, (self.root,))

    def _write(self, key: str, value: Buffer, *, exclusive: bool = False) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        data = value.as_buffer_like()
        if exclusive:
            fs.link_new(path, data)
        else:
            fs.write_file(path, data)
        self.dirty.add(path)

    async def set(self, key: str, value: Buffer, *args: Any) -> None:
        self._check_writable()
        await asyncio.to_thread(self._write, key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        self._check_writable()
        try:
            await asyncio.to_thread(self._write, key, value, exclusive=True)
        except FileExistsError:
            return

    def set_sync(self, key: str, value: Buffer) -> None:
        self._check_writable()
        self._write(key, value)

    async def delete(self, key: str) -> None:
        self._remove(self.root / key)

    async def delete_dir(self, prefix: str) -> None:
        self._remove(self.root / prefix)

    def delete_sync(self, key: str) -> None:
        self._remove(self.root / key)

    def _remove(self, path: Path) -> None:
        if path.is_dir():
            fs.remove_tree(path)
        else:
            fs.remove_file(path)

    def flush(self) -> None:
        """Force everything written since the last flush to the medium."""
        dirty, self.dirty = self.dirty, set()
        if dirty:
            fs.fsync_paths(dirty, below=self.root)


class PinnedStore(LocalStore):
    """A folder for a reader, held through a rename.

    With ``strict`` a chunk that is not there is an error: in our stores every
    chunk of committed rows is written, so a missing one was lost.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self.path = path
        self.strict = strict
        root = path
        if _PROC_FD.is_dir():
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
            weakref.finalize(self, os.close, fd)
            root = _PROC_FD / str(fd)
        super().__init__(root, read_only=True)
        self._identity = os.stat(root).st_ino

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (str(self.path), self.strict, self._identity))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinnedStore) and self._identity == other._identity

    __hash__ = None  # type: ignore[assignment]

    def with_read_only(self, read_only: bool = False) -> PinnedStore:
        if not read_only:
            raise PermissionError("the arrays of a snapshot are read-only")
        return self

    def __str__(self) -> str:
        return f"file://{self.path.as_posix()}"

    def is_whole(self) -> bool:
        """Whether the folder first opened is still the one that is read, and not removed."""
        try:
            same = os.stat(self.root).st_ino == self._identity
            os.stat(f"{self.root}/zarr.json")
        except OSError:
            return False
        return same

    def missing(self, key: str) -> MissingChunkError | StaleSnapshotError:
        """The error for an object that should be there."""
        if not self.is_whole():
            return StaleSnapshotError(
                str(self.path),
                "the generation that this reader holds is no longer on disk",
                mend="call refresh(), or open the store again",
            )
        array, _, chunk = key.partition("/c/")
        return MissingChunkError(
            str(self.path),
            f"chunk {chunk!r} of array {array!r} is missing, so its committed rows cannot be read",
            mend="restore the file from a copy; `alchemi-xr verify` lists all that are missing",
        )

    async def get(
        self,
        key: str,
        prototype: Any = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        value = await super().get(key, prototype, byte_range)
        if value is None and self.strict and "/c/" in key:
            raise self.missing(key)
        return value

    def get_sync(
        self,
        key: str,
        *,
        prototype: Any = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        value = super().get_sync(key, prototype=prototype, byte_range=byte_range)
        if value is None and self.strict and "/c/" in key:
            raise self.missing(key)
        return value

    def first_missing(self, keys: Iterable[str]) -> str | None:
        """The first of these objects that is not there."""
        for key in keys:
            if not os.path.exists(f"{self.root}/{key}"):
                return key
        return None


def _reopen(path: str, strict: bool, identity: int) -> PinnedStore:
    # The folder may have been swapped since: then it stands aside.
    for candidate in (Path(path), fs.sibling(Path(path), "previous")):
        try:
            if os.stat(candidate).st_ino == identity:
                store = PinnedStore(candidate, strict=strict)
                store.path = Path(path)
                return store
        except OSError:
            continue
    raise StaleSnapshotError(
        path,
        "the generation that this reader held is no longer on disk",
        mend="open the store again",
    )

"""Where a store lives: a folder on this machine, an object store, an Icechunk
repository, or any other Zarr store.

Readers of a folder hold it by its file descriptor, not by its name: after a
rewrite has put a new folder under the name they go on reading the old one.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, StorePath

from alchemi_xr.errors import ConfigError, MissingChunkError, StaleSnapshotError, StoreError
from alchemi_xr.store import fs
from alchemi_xr.store._compat import Buffer
from alchemi_xr.store.remote import RemoteStore, open_url, scheme_of

if TYPE_CHECKING:
    from alchemi_xr.store.icechunk import Repository

__all__ = ["DurableStore", "Place", "PinnedStore", "local_path", "locate"]

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
    repository : Repository, optional
        The Icechunk repository, when it is kept in one; ``store`` is None then.
    single_writer : bool
        The caller answers for it that nobody else writes.
    """

    where: str
    path: Path | None = None
    store: Store | None = None
    prefix: str = ""
    repository: Repository | None = None
    single_writer: bool = False

    @property
    def is_local(self) -> bool:
        return self.path is not None

    @property
    def in_memory(self) -> bool:
        return isinstance(self.store, MemoryStore)

    @property
    def is_remote(self) -> bool:
        """Whether objects are put one by one, and a rewrite cannot be swapped in."""
        return isinstance(self.store, RemoteStore)

    def key(self, name: str) -> str:
        """Key of a document in the store behind this place."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def current(self) -> Store:
        """The store to read and write, of a place that is no folder."""
        if self.repository is not None:
            return self.repository.current()
        assert self.store is not None
        return self.store

    def for_reading(self) -> Store:
        """The store as one reader holds it, of a place that is no folder."""
        if self.repository is not None:
            return self.repository.reading(self.key("zarr.json"))
        if isinstance(self.store, RemoteStore):
            return self.store.for_reading(self.key("zarr.json"))
        assert self.store is not None
        return self.store

    def for_other_processes(self, held: Store | None = None) -> Place:
        """This place as it may be pickled.

        Parameters
        ----------
        held : zarr store, optional
            What a reader holds; of a repository only that snapshot is meant.

        Raises
        ------
        TypeError
            It is in the memory of this process.
        """
        if self.path is not None:
            return self
        if self.repository is not None and not self.repository.in_memory:
            snapshot = getattr(held, "snapshot_id", None)
            repository = self.repository.at(snapshot) if snapshot else self.repository
            return replace(self, repository=repository)
        if isinstance(self.store, RemoteStore) and not self.store.is_process_memory:
            return self
        raise TypeError(
            f"{self.where}: a store in the memory of this process cannot be sent to another one; "
            "write it to a path or a URL first"
        )


def locate(
    store: Any,
    *,
    storage_options: dict[str, Any] | None = None,
    branch: str | None = None,
    tag: str | None = None,
    snapshot: str | None = None,
    single_writer: bool = False,
) -> Place:
    """The address meant by a path, URL, dict, store, repository or StorePath.

    Parameters
    ----------
    store : str, Path, dict, zarr store, StorePath, obstore store, Icechunk Repository or Session
    storage_options : dict, optional
        For a URL, as fsspec takes them; for ``icechunk:``, as Icechunk does.
    branch, tag, snapshot : str, optional
        Which state of an Icechunk repository; by default branch ``main``.
    single_writer : bool
        The caller answers for it that nobody else writes meanwhile, where the
        place itself cannot keep two writers apart.

    Raises
    ------
    ConfigError
        It is none of these, or an option does not go with it.
    """
    refs = {"branch": branch, "tag": tag, "snapshot": snapshot}
    place = _locate(store, storage_options, refs)
    if place.repository is None and any(ref is not None for ref in refs.values()):
        name = next(name for name, ref in refs.items() if ref is not None)
        raise ConfigError(
            place.where,
            f"{name}= chooses a state of an Icechunk repository, and this is none",
            mend="give icechunk:<location>, or generation= for an older generation",
        )
    return replace(place, single_writer=True) if single_writer else place


def _behind_link(path: Path) -> Path:
    """The folder that a link stands for: a rewrite replaces it, never the link.

    A pinned folder's path under ``/proc`` is a link by nature and stays.
    """
    if path.is_symlink() and not path.is_relative_to(_PROC_FD):
        return Path(os.path.realpath(path))
    return path


def _locate(store: Any, options: dict[str, Any] | None, refs: dict[str, str | None]) -> Place:
    if isinstance(store, Place):
        return store
    if isinstance(store, (str, os.PathLike)):
        return _locate_text(store, options, refs)
    if options:
        raise ConfigError(
            str(store),
            "storage_options go with a URL",
            found=type(store).__name__,
            mend="give the URL, or make the store with these options",
        )
    if isinstance(store, dict):
        memory = MemoryStore(store_dict=store)
        return Place(f"store in memory ({len(store)} keys)", store=memory)
    if isinstance(store, zarr.Group):
        store = store.store_path
    prefix = ""
    if isinstance(store, StorePath):
        store, prefix = store.store, store.path
    home = type(store).__module__.partition(".")[0]
    if home == "icechunk":
        from alchemi_xr.store.icechunk import locate_icechunk

        return replace(locate_icechunk(store, refs), prefix=prefix)
    if home == "obstore":
        store = ObjectStore(store)
    if isinstance(store, LocalStore):
        path = _behind_link(Path(os.path.abspath(store.root)) / prefix)
        return Place(str(path), path=path)
    if isinstance(store, RemoteStore):
        return Place(store.where, store=store.for_reading("zarr.json"), prefix=prefix)
    if isinstance(store, (FsspecStore, ObjectStore)):
        root = _folder_of(store)
        if root is not None:
            return Place(str(root / prefix), path=root / prefix)
        where = _name_of(store) + (f"/{prefix}" if prefix else "")
        return Place(where, store=RemoteStore(store, where=where), prefix=prefix)
    if isinstance(store, Store):
        return Place(f"{store}/{prefix}" if prefix else str(store), store=store, prefix=prefix)
    raise ConfigError(
        "store",
        "this is no place for a store",
        found=type(store).__name__,
        expected="a path, a URL, a dict, a Zarr store, an Icechunk repository or a StorePath",
    )


def _locate_text(
    store: str | os.PathLike[str], options: dict[str, Any] | None, refs: dict[str, str | None]
) -> Place:
    text = os.fspath(store)
    if text.startswith("icechunk:"):
        from alchemi_xr.store.icechunk import locate_location

        return locate_location(text, options, refs)
    scheme = scheme_of(text)
    if scheme is not None and "://" not in text:
        raise _no_path(text, scheme)
    if scheme in ("file", "local"):
        text, options = text.partition("://")[2], None
    elif scheme is not None:
        return Place(text, store=open_url(text.rstrip("/"), options))
    if options:
        raise ConfigError(text, "storage_options go with a URL, and this is a local path")
    return Place(str(store), path=_behind_link(Path(os.path.abspath(text))))


def _no_path(text: str, scheme: str) -> ConfigError:
    # Path("memory://1") is the relative path "memory:/1": a folder "memory:" would come of it.
    return ConfigError(
        text,
        "this is a URL that was made a Path, or its text was cut",
        expected=f"{scheme}://...",
        mend="give the URL as text, or the store itself; a folder whose name ends with a "
        "colon is reached by its absolute path",
    )


def local_path(value: str | os.PathLike[str], what: str) -> Path:
    """A path of this machine; for callers that need a folder.

    Raises
    ------
    ConfigError
        It is a URL, or was one: no folder ``s3:`` is made of it.
    """
    text = os.fspath(value)
    scheme = scheme_of(text)
    if scheme is not None and "://" not in text:
        raise _no_path(text, scheme)
    if scheme is not None or text.startswith("icechunk:"):
        raise ConfigError(
            what,
            f"{text!r} is no path of this machine, and a folder is needed here",
            mend="give a path; alchemi_xr.store.copy_store brings a store from and to a URL",
        )
    return Path(text)


def _folder_of(store: FsspecStore | ObjectStore[Any]) -> Path | None:
    """The folder behind a store of fsspec or obstore, when it is one."""
    if isinstance(store, FsspecStore):
        protocol = store.fs.protocol
        names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        return _behind_link(Path(os.path.abspath(store.path))) if "file" in names else None
    if type(store.store).__name__ == "LocalStore":
        prefix = getattr(store.store, "prefix", None)
        if prefix is None:
            raise StoreError(
                str(store), "this obstore LocalStore has no prefix", mend="give the path itself"
            )
        return _behind_link(Path(os.path.abspath(prefix)))
    return None


def _name_of(store: FsspecStore | ObjectStore[Any]) -> str:
    """A readable name of a store, without credentials."""
    if isinstance(store, FsspecStore):
        protocol = store.fs.protocol
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        return f"{scheme}://{store.path.lstrip('/')}"
    inner = store.store
    config = getattr(inner, "config", None) or {}
    bucket = config.get("bucket") or config.get("container_name")
    prefix = getattr(inner, "prefix", None)
    kind = type(inner).__name__.removesuffix("Store")
    if bucket:
        scheme = {"S3": "s3", "GCS": "gs", "Azure": "az"}.get(kind, kind)
        return f"{scheme}://{bucket}/{prefix or ''}".rstrip("/")
    return f"obstore {kind} {prefix or hex(id(inner))}"


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

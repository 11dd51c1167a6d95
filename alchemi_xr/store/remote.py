"""Stores that are no folder of this machine: object stores, and whatever fsspec opens.

An object is put whole or not at all, and readers trust committed counts alone.
So the last, partly filled chunk may be put anew by an append: its committed
rows stay as they are, whichever of the two objects a reader gets. The root
document is put last. What an object store cannot do is to swap two stores;
therefore nothing committed is ever rewritten in place here.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

from zarr.abc.store import Store
from zarr.storage import FsspecStore, ObjectStore, WrapperStore

from alchemi_xr._optional import import_optional
from alchemi_xr.errors import (
    AlchemiError,
    ConfigError,
    MissingChunkError,
    OptionalDependencyError,
    StaleSnapshotError,
    StoreError,
)
from alchemi_xr.store._compat import Buffer, buffer_prototype, wait

__all__ = [
    "CheckedStore",
    "Objects",
    "RemoteStore",
    "absent",
    "open_url",
    "scheme_of",
]

T = TypeVar("T")

# Two letters at least: one is a drive.
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+):/")
_OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure", "adl", "http", "https")
_ASKED_AT_ONCE = 32


def scheme_of(text: str) -> str | None:
    """Scheme of a URL, or of one that a ``Path`` has taken a slash from; else None.

    Examples
    --------
    >>> scheme_of("s3://bucket/a.zarr"), scheme_of("memory:/1"), scheme_of("data/a.zarr")
    ('s3', 'memory', None)
    """
    found = _SCHEME.match(text)
    return found[1].lower() if found else None


class CheckedStore(WrapperStore[Store]):
    """A store for readers, in which a missing chunk can be told from one of fill.

    With ``strict`` a chunk that is not there is an error: in our stores every
    chunk of committed rows is written, so a missing one was lost.
    """

    path = None

    def __init__(self, store: Store, *, where: str = "", root: str = "zarr.json") -> None:
        super().__init__(store)
        self.where = where
        self.root = root
        self.strict = False
        self.identity = ""

    def _with_store(self, store: Store) -> CheckedStore:
        made = type(self)(store, where=self.where, root=self.root)
        made.strict, made.identity = self.strict, self.identity
        return made

    def __str__(self) -> str:
        return self.where or str(self._store)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rewrap, (type(self), self._store, self.where, self.root))

    @property
    def snapshot_id(self) -> str | None:
        """Identity of the Icechunk snapshot that is read."""
        session = getattr(self._store, "session", None)
        return None if session is None else str(session.snapshot_id)

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Buffer | None:
        value = await self._attempt(
            key, "read", lambda: super(CheckedStore, self).get(key, prototype, byte_range)
        )
        if value is None and self.strict and "/c/" in key:
            raise await self._lost(key)
        return value

    async def exists(self, key: str) -> bool:
        if hasattr(self._store, "session") and key.rpartition("/")[2].startswith(".z"):
            return False  # Icechunk knows format 3 only, and refuses to be asked
        return await self._attempt(key, "looked for", lambda: super(CheckedStore, self).exists(key))

    async def _attempt(self, key: str, done: str, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a request; whatever a client library raises becomes one error."""
        try:
            return await call()
        except AlchemiError:
            raise
        except Exception as error:
            if done == "read" and isinstance(error, FileNotFoundError):
                return None  # type: ignore[return-value]
            raise StoreError(
                self.where,
                f"the object {key!r} cannot be {done} ({type(error).__name__}: {error})",
                mend="check the network, the endpoint and the credentials (storage_options=)",
            ) from error

    async def _lost(self, key: str) -> MissingChunkError | StaleSnapshotError:
        """Why an object that should be there is not."""
        root = await self.get(self.root, buffer_prototype())
        identity = None
        if root is not None:
            document = json.loads(root.to_bytes())
            identity = (document.get("attributes", {}).get("alchemi_xr") or {}).get("identity")
        if root is None or (self.identity and identity != self.identity):
            return StaleSnapshotError(
                self.where,
                "the store that this reader holds was removed or replaced",
                mend="open the store again",
            )
        array, _, chunk = key.partition("/c/")
        return MissingChunkError(
            self.where,
            f"chunk {chunk!r} of array {array!r} is missing, so its committed rows cannot be read",
            mend="restore the object from a copy; `alchemi-xr verify` lists all that are missing",
        )

    # What readers ask of a pinned folder.

    def is_whole(self) -> bool:
        """True: what is committed here is not rewritten in place."""
        return True

    def first_missing(self, keys: Iterable[str]) -> str | None:
        """None: no codec reads past this store, so its own check is enough."""
        return None

    def missing(self, key: str) -> MissingChunkError | StaleSnapshotError:
        """The error for an object that should be there."""

        async def boxed() -> list[MissingChunkError | StaleSnapshotError]:
            return [await self._lost(key)]  # zarr raises an error that is given back bare

        return wait(boxed())[0]


def _rewrap(cls: type[CheckedStore], store: Store, where: str, root: str) -> CheckedStore:
    return cls(store, where=where, root=root)


class RemoteStore(CheckedStore):
    """An object store, or files behind fsspec.

    Attributes
    ----------
    guard : callable, optional
        Asked before every write; raises when the writer lost its lease.
    """

    def __init__(self, store: Store, *, where: str = "", root: str = "zarr.json") -> None:
        super().__init__(store, where=where, root=root)
        self.guard: Callable[[], None] | None = None

    def for_reading(self, root: str) -> RemoteStore:
        """The same objects for one reader."""
        return RemoteStore(self._store, where=self.where, root=root)

    @property
    def is_process_memory(self) -> bool:
        """Whether it lives in the memory of this process (``memory://``)."""
        protocol = getattr(getattr(self._store, "fs", None), "protocol", ())
        if "memory" in ((protocol,) if isinstance(protocol, str) else protocol):
            return True
        return type(getattr(self._store, "store", None)).__name__ == "MemoryStore"

    @property
    def objects(self) -> Objects | None:
        """Conditional writes, where they are known to hold; else None."""
        if isinstance(self._store, ObjectStore):
            return _ObstoreObjects(self._store.store)
        if isinstance(self._store, FsspecStore):
            fs = self._store.fs
            if type(fs).__module__.partition(".")[0] == "s3fs":
                return _S3fsObjects(fs, self._store.path)
        return None

    async def set(self, key: str, value: Buffer) -> None:
        self._check()
        await self._attempt(key, "written", lambda: super(RemoteStore, self).set(key, value))

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        self._check()
        await super().set_if_not_exists(key, value)

    async def delete(self, key: str) -> None:
        self._check()
        await super().delete(key)

    async def delete_dir(self, prefix: str) -> None:
        self._check()
        await super().delete_dir(prefix)

    def _check(self) -> None:
        if self.guard is not None:
            self.guard()


# -- conditional writes ------------------------------------------------------


class Objects(Protocol):
    """The few requests of an object store on which a lease is built."""

    def create(self, key: str, data: bytes) -> str | None:
        """Put an object that must not be there; its version, or None when it is."""
        ...

    def read(self, key: str) -> tuple[bytes, str, float] | None:
        """Bytes, version and time of the last change by the server's clock."""
        ...

    def replace(self, key: str, data: bytes, version: str) -> str | None:
        """Put an object that must still be of this version; None when it is not."""
        ...

    def remove(self, key: str) -> None:
        """Remove an object that may be gone."""
        ...


def server_time(objects: Objects, key: str) -> float | None:
    """Now, by the clock of the server (clocks of two hosts may differ by minutes)."""
    probe = f"{key}.{uuid.uuid4().hex}"
    if objects.create(probe, b"{}") is None:
        return None
    try:
        found = objects.read(probe)
    finally:
        objects.remove(probe)
    return None if found is None else found[2]


class _ObstoreObjects:
    """Through obstore: S3, Google, Azure and others."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._obs: Any = import_optional("obstore", extra="cloud", why="this store")

    def _put(self, key: str, data: bytes, mode: Any) -> str | None:
        refused = self._obs.exceptions
        try:
            result = self._obs.put(self._store, key, data, mode=mode)
        except (refused.AlreadyExistsError, refused.PreconditionError, FileNotFoundError):
            return None
        return str(result["e_tag"])

    def create(self, key: str, data: bytes) -> str | None:
        return self._put(key, data, "create")

    def replace(self, key: str, data: bytes, version: str) -> str | None:
        return self._put(key, data, {"e_tag": version})

    def read(self, key: str) -> tuple[bytes, str, float] | None:
        try:
            found = self._obs.get(self._store, key)
        except FileNotFoundError:
            return None
        meta = found.meta
        return bytes(found.bytes()), str(meta["e_tag"]), meta["last_modified"].timestamp()

    def remove(self, key: str) -> None:
        self._obs.delete(self._store, key)


class _S3fsObjects:
    """Through s3fs, by S3's own requests."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path

    def _call(self, method: str, key: str, **arguments: Any) -> Any:
        bucket, name, _ = self._fs.split_path(f"{self._path}/{key}")
        return wait(self._fs._call_s3(method, Bucket=bucket, Key=name, **arguments))

    def _put(self, key: str, data: bytes, **condition: str) -> str | None:
        try:
            return str(self._call("put_object", key, Body=data, **condition)["ETag"])
        except Exception as error:
            if _is_refusal(error):
                return None
            raise

    def create(self, key: str, data: bytes) -> str | None:
        return self._put(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, version: str) -> str | None:
        return self._put(key, data, IfMatch=version)

    def read(self, key: str) -> tuple[bytes, str, float] | None:
        async def whole() -> tuple[bytes, str, float]:
            bucket, name, _ = self._fs.split_path(f"{self._path}/{key}")
            found = await self._fs._call_s3("get_object", Bucket=bucket, Key=name)
            data = await found["Body"].read()
            return bytes(data), str(found["ETag"]), found["LastModified"].timestamp()

        try:
            return wait(whole())
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> None:
        self._call("delete_object", key)


_REFUSALS = {"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "409", "412", "404"}


def _is_refusal(error: BaseException | None) -> bool:
    """Whether S3 said that the condition of a request does not hold."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code")) in _REFUSALS
        error = error.__cause__
    return False


# -- opening -----------------------------------------------------------------


def open_url(url: str, storage_options: dict[str, Any] | None = None) -> RemoteStore:
    """The store at a URL, through fsspec.

    Where fsspec lacks the package for a scheme and obstore has it, obstore is
    used, and ``storage_options`` are then its own.

    Raises
    ------
    ConfigError
        The scheme is not known, or an option is not.
    OptionalDependencyError
        The package for it is not installed.
    """
    scheme = url.partition("://")[0]
    try:
        # Listings must not be answered from a cache: others write here too.
        options = {"use_listings_cache": False, **(storage_options or {})}
        return RemoteStore(FsspecStore.from_url(url, storage_options=options), where=url)
    except ImportError as error:
        if scheme in _OBSTORE_SCHEMES:
            try:
                obstore: Any = import_optional("obstore.store", extra="cloud", why=url)
                return RemoteStore(
                    ObjectStore(obstore.from_url(url, **(storage_options or {}))), where=url
                )
            except OptionalDependencyError:
                pass
        raise OptionalDependencyError(
            url,
            f"the package for {scheme}:// is not installed ({error})",
            mend="pip install 'alchemi_xr[cloud]'",
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            url,
            f"this is no place for a store ({error})",
            expected="a path, or a URL that fsspec knows, with its storage_options",
        ) from error


def absent(store: Store, keys: Iterable[str]) -> list[str]:
    """Those of the objects that are not there; asked for in parallel."""
    wanted = list(keys)

    async def ask() -> list[bool]:
        gate = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def one(key: str) -> bool:
            async with gate:
                return await store.exists(key)

        return await asyncio.gather(*(one(key) for key in wanted))

    there = wait(ask())
    return [key for key, found in zip(wanted, there, strict=True) if not found]

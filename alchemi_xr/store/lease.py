"""One writer at a time: a lease that names its owner.

The lease is a small file beside the store. It is read and changed only under
the lock of the operating system on that file, so that of two writers that find
a dead owner's lease one takes it over and the other is refused. On an object
store it is an object that is made and changed by conditional puts, of which the
server grants one. In an Icechunk repository the lease is a transaction.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from alchemi_xr.errors import AlchemiError, StoreError, StoreLockedError
from alchemi_xr.store import fs
from alchemi_xr.store.locate import Place
from alchemi_xr.store.remote import Objects, RemoteStore, server_time

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["HEARTBEAT_SECONDS", "STALE_SECONDS", "Lease"]

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""Without a heartbeat for so long, an owner on another host counts as dead."""

LEASE_OBJECT = ".alchemi_xr.lease"
"""Name of the lease in an object store; it stands in the store, as only that is ours."""

_RETRY_SECONDS = 0.01
_REMOTE_RETRY_SECONDS = 0.2
_OBJECT_TRIES = 3
# A writer that could not renew its lease for so long stops before others may take it.
_RENEWED_WITHIN = STALE_SECONDS / 2

# Stores that are not folders are written by one writer of this process.
_in_process: dict[str, dict[str, Any]] = {}
_in_process_lock = threading.Lock()


class Lease:
    """The right to write to a store, held for the length of a ``with`` block.

    Parameters
    ----------
    place : Place
    timeout : float
        Seconds to wait for another writer.

    Attributes
    ----------
    took_over : bool
        A dead owner held the lease before; what it left has to be cleared.

    Raises
    ------
    StoreLockedError
        Another writer holds it; the message names owner, host and pid.
    """

    def __init__(self, place: Place, *, timeout: float = 0.0) -> None:
        self.place = place
        self.timeout = timeout
        self.took_over = False
        self._token = uuid.uuid4().hex
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._version: str | None = None
        self._renewed = 0.0
        self._objects: Objects | None = None
        if isinstance(place.store, RemoteStore) and not place.single_writer:
            self._objects = _objects(place.where, place.store)

    @property
    def path(self) -> Path:
        """The lease file of a store that is a folder."""
        assert self.place.path is not None
        return fs.sibling(self.place.path, "lease")

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.place.repository is not None:
            self.place.repository.end(keep=kind is None)
            return
        self.release()

    def acquire(self) -> None:
        """Take the lease, waiting up to ``timeout`` seconds."""
        if self.place.repository is not None:
            self.place.repository.begin()
            return
        deadline = time.monotonic() + self.timeout
        while True:
            owner = self._try()
            if owner is None:
                break
            if time.monotonic() >= deadline:
                raise StoreLockedError(
                    self.place.where,
                    f"is being written by {_describe(owner)}",
                    mend="wait for it (lock_timeout=seconds), write elsewhere and merge, or use "
                    "an Icechunk store for concurrent writers",
                )
            time.sleep(_RETRY_SECONDS if self._objects is None else _REMOTE_RETRY_SECONDS)
        if isinstance(self.place.store, RemoteStore) and self._objects is not None:
            self.place.store.guard = self.check
        if self.place.is_local or self._objects is not None:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._beat, args=(self._stop,), name="alchemi-lease", daemon=True
            )
            self._thread.start()

    def release(self) -> None:
        """Give the lease back; nothing happens when it is no longer ours."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        if self._objects is not None:
            self._release_object(self._objects)
            return
        if not self.place.is_local:
            with _in_process_lock:
                held = _in_process.get(self._key)
                if held is not None and held["token"] == self._token:
                    del _in_process[self._key]
            return
        with contextlib.suppress(OSError), _locked(self.path) as fd:
            owner = _read(fd)
            # An empty file is one that opening it just made.
            if owner is None or owner.get("token") == self._token:
                fs.remove_file(self.path)

    @property
    def _key(self) -> str:
        store = self.place.store
        return f"{store}/{self.place.prefix}"

    def _try(self) -> dict[str, Any] | None:
        """None when the lease is ours now, else its owner."""
        if self._objects is not None:
            return self._try_object(self._objects)
        if not self.place.is_local:
            with _in_process_lock:
                held = _in_process.get(self._key)
                if held is None:
                    _in_process[self._key] = self._entry()
                return held
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path) as fd:
                owner = _read(fd)
                if owner and not _is_dead(owner, os.fstat(fd).st_mtime):
                    return owner
                # An empty file is one just made by us; anything else was left behind.
                self.took_over = owner is not None
                data = json.dumps(self._entry()).encode()
                os.ftruncate(fd, 0)
                os.pwrite(fd, data, 0)
        except OSError as error:
            raise StoreError(
                self.place.where,
                f"cannot be written: no lease can be taken at {self.path.name!r} ({error})",
                mend="check the permissions of the folder that holds the store, and that the "
                "medium is not read-only or full",
            ) from error
        return None

    def _entry(self) -> dict[str, Any]:
        return {**_identity(), "token": self._token, "since": time.time()}

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_SECONDS):
            if self._objects is None:
                with contextlib.suppress(OSError):
                    os.utime(self.path)
            else:
                self._renew(self._objects)

    # -- on an object store ------------------------------------------------

    @property
    def _object_key(self) -> str:
        return self.place.key(LEASE_OBJECT)

    def _try_object(self, objects: Objects) -> dict[str, Any] | None:
        data = json.dumps(self._entry()).encode()
        owner: dict[str, Any] = {}
        version = None
        try:
            for _ in range(_OBJECT_TRIES):
                version = objects.create(self._object_key, data)
                if version is not None:
                    break
                found = objects.read(self._object_key)
                if found is None:  # given back just now
                    continue
                owner = _parse(found[0])
                if not self._is_dead_object(objects, owner, found[2]):
                    return owner
                # Of two that take it over, the server lets one replace this version.
                version = objects.replace(self._object_key, data, found[1])
                self.took_over = version is not None
                break
        except AlchemiError:
            raise
        except Exception as error:
            raise StoreError(
                self.place.where,
                f"cannot be written: no lease can be taken ({type(error).__name__}: {error})",
                mend="check the network, the endpoint, and that the credentials may write",
            ) from error
        if version is None:
            return owner
        self._version, self._renewed = version, time.time()
        return None

    def _is_dead_object(self, objects: Objects, owner: dict[str, Any], changed: float) -> bool:
        if owner.get("namespace") == _namespace() or not owner:
            return _is_dead(owner, time.time())
        # Both times by the server's clock.
        now = server_time(objects, self._object_key)
        return now is not None and _is_dead(owner, time.time() - (now - changed))

    def _renew(self, objects: Objects) -> None:
        version = self._version
        if version is None:
            return
        # The beat makes the bytes, and so the version, new each time.
        entry = {**self._entry(), "beat": time.time()}
        # Without a network the guard stops the writer in time.
        with contextlib.suppress(Exception):
            self._version = objects.replace(self._object_key, json.dumps(entry).encode(), version)
            self._renewed = time.time() if self._version is not None else 0.0

    def check(self) -> None:
        """Refuse to write when the lease may be another's by now.

        Raises
        ------
        StoreLockedError
        """
        if self._version is None or time.time() - self._renewed > _RENEWED_WITHIN:
            raise StoreLockedError(
                self.place.where,
                "this writer lost its lease: it was stopped, or without network, for too long",
                mend="write again; what was not committed is cleared by the next writer",
            )

    def _release_object(self, objects: Objects) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(self.place.store, RemoteStore):
            self.place.store.guard = None
        mine = self._version is not None and time.time() - self._renewed <= _RENEWED_WITHIN
        self._version = None
        if mine:
            # What is left behind by a lost network is taken over when it is stale.
            with contextlib.suppress(Exception):
                objects.remove(self._object_key)


def _objects(where: str, store: RemoteStore) -> Objects | None:
    """How a lease is kept in a store; None when it is in the memory of this process."""
    objects = store.objects
    if objects is None and not store.is_process_memory:
        raise StoreError(
            where,
            "this kind of place cannot keep two writers apart: no conditional put is known for it",
            mend="give it through obstore, use an Icechunk repository, or answer for it that "
            "nobody else writes with StoreWriter(..., single_writer=True)",
        )
    return objects


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The lease file, opened and locked against other processes and threads."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                # A file system without locks leaves us with the rename below.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX)
            # The owner may have removed the file while we waited for its lock.
            try:
                same = os.stat(path).st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                same = False
            if same:
                yield fd
                return
        finally:
            os.close(fd)


def _read(fd: int) -> dict[str, Any] | None:
    """What a lease file says: None when empty, ``{}`` when its writer was killed in it."""
    data = os.pread(fd, 1 << 16, 0)
    if not data:
        return None
    return _parse(data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(data)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


@cache
def _host() -> str:
    return socket.gethostname()


def _namespace() -> str:
    """Tells machines and containers apart within which a pid means one process."""
    parts = [_host()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "|".join(parts)


def _started(pid: int) -> str | None:
    """When a process started, so that a reused pid is not taken for its owner."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _identity() -> dict[str, Any]:
    try:
        owner = getpass.getuser()
    except (OSError, KeyError, ImportError):
        owner = f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    pid = os.getpid()
    return {
        "owner": owner,
        "host": _host(),
        "namespace": _namespace(),
        "pid": pid,
        "started": _started(pid),
    }


def _is_dead(owner: dict[str, Any], heartbeat: float) -> bool:
    pid = owner.get("pid")
    if not isinstance(pid, int):
        return True
    if owner.get("namespace") != _namespace():
        same_host = owner.get("host") == _host()
        # The host was started again, or the owner is in a container or on another host.
        return time.time() - heartbeat > STALE_SECONDS or (
            same_host and _rebooted(owner.get("namespace"))
        )
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    started = _started(pid)
    if _is_zombie(pid):
        return True
    return started is not None and owner.get("started") not in (None, started)


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "Z"


def _rebooted(namespace: object) -> bool:
    """Whether a lease of this host comes from before its last start."""
    theirs, ours = str(namespace).split("|"), _namespace().split("|")
    return len(theirs) > 1 and len(ours) > 1 and theirs[1] != ours[1]


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "another writer"
    seconds = max(0.0, time.time() - float(owner.get("since", time.time())))
    return (
        f"{owner.get('owner')}@{owner.get('host')} (pid {owner.get('pid')}, since {seconds:.0f} s)"
    )

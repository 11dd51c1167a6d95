"""One writer at a time: a lease that names its owner.

The lease is a small file beside the store. It is read and changed only under
the lock of the operating system on that file, so that of two writers that find
a dead owner's lease one takes it over and the other is refused.
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

from alchemi_xr.errors import StoreError, StoreLockedError
from alchemi_xr.store import fs
from alchemi_xr.store.locate import Place

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["HEARTBEAT_SECONDS", "STALE_SECONDS", "Lease"]

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""Without a heartbeat for so long, an owner on another host counts as dead."""

_RETRY_SECONDS = 0.01

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

    @property
    def path(self) -> Path:
        """The lease file of a store that is a folder."""
        assert self.place.path is not None
        return fs.sibling(self.place.path, "lease")

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lease, waiting up to ``timeout`` seconds."""
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
            time.sleep(_RETRY_SECONDS)
        if self.place.is_local:
            self._stop = threading.Event()
            beat = threading.Thread(
                target=self._beat, args=(self._stop,), name="alchemi-lease", daemon=True
            )
            beat.start()

    def release(self) -> None:
        """Give the lease back; nothing happens when it is no longer ours."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
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
            with contextlib.suppress(OSError):
                os.utime(self.path)


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
    seconds = max(0.0, time.time() - float(owner.get("since", time.time())))
    return (
        f"{owner.get('owner')}@{owner.get('host')} (pid {owner.get('pid')}, since {seconds:.0f} s)"
    )

"""Stops a store's writer at any one of its calls to the operating system.

``stop_at(k)`` numbers the calls that change the disk and fails at number k.
With ``dead`` nothing that comes after has any effect either, as if the process
had been killed there: what cleans up in an ``except`` or ``finally`` does not
help then.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alchemi_xr.store import fs

__all__ = ["Calls", "bury_lease", "stop_at"]

_CHANGING = (
    *("replace", "rename", "link", "unlink", "fsync", "fdatasync"),
    *("pwrite", "ftruncate"),
)


@dataclass
class Calls:
    """The calls so far.

    Parameters
    ----------
    stop : int, optional
        Number of the call that fails, from 0; None counts only.
    dead : bool
        Whether all later calls do nothing.
    code : int
        ``errno`` of the failure.
    """

    stop: int | None = None
    dead: bool = False
    code: int = errno.EIO
    count: int = 0
    stopped: bool = False
    names: list[str] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def run(
        self, name: str, call: Callable[[], Any], half: Callable[[], None] | None = None
    ) -> Any:
        """Do one call, or fail, having done ``half`` of it."""
        with self._lock:
            if self.stopped and self.dead:
                raise OSError(self.code, f"{os.strerror(self.code)} (after the stop)")
            number, self.count = self.count, self.count + 1
            self.names.append(name)
            self.stopped = self.stopped or number == self.stop
        if number == self.stop:
            if half is not None:
                half()
            raise OSError(self.code, f"{os.strerror(self.code)} (injected at call {number})")
        return call()


class _Os:
    """The ``os`` module with its changing calls numbered."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _CHANGING:
            return real
        if name == "pwrite":
            return self._pwrite
        return lambda *a, **k: self._calls.run(name, lambda: real(*a, **k))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        def half() -> None:
            # A disk that is full, or a killed process, stops in the middle of the bytes.
            os.pwrite(fd, memoryview(data)[: len(data) // 2], offset)

        written: int = self._calls.run("pwrite", lambda: os.pwrite(fd, data, offset), half)
        return written


class _Shutil:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def rmtree(self, path: Path) -> None:
        # Two calls, so that a stop can fall in the middle of a removal.
        if not os.path.isdir(path):
            raise FileNotFoundError(path)
        files = sorted(p for p in Path(path).rglob("*") if p.is_file())

        def half() -> None:
            for file in files[: len(files) // 2]:
                file.unlink()

        self._calls.run("rmtree (half)", half)
        self._calls.run("rmtree", lambda: shutil.rmtree(path))


@contextlib.contextmanager
def stop_at(stop: int | None, *, dead: bool = True, code: int = errno.EIO) -> Iterator[Calls]:
    """Number the changing calls of ``alchemi_xr.store.fs`` and fail at one of them.

    Parameters
    ----------
    stop : int or None
        None only counts.
    dead : bool
    code : int
        ``errno`` value, such as ``errno.ENOSPC``.
    """
    calls = Calls(stop, dead, code)
    exchange = fs.exchange

    def numbered_open(file: Any, mode: str = "r", *a: Any, **k: Any) -> Any:
        def call() -> Any:
            return builtins.open(file, mode, *a, **k)

        return calls.run("open", call) if set(mode) & set("wax+") else call()

    saved = {name: getattr(fs, name, None) for name in ("os", "shutil", "exchange")}
    namespace: Any = fs
    namespace.os, namespace.shutil = _Os(calls), _Shutil(calls)
    namespace.exchange = lambda a, b: calls.run("exchange", lambda: exchange(a, b))
    namespace.open = numbered_open
    try:
        yield calls
    finally:
        del namespace.open
        for name, value in saved.items():
            setattr(namespace, name, value)


def bury_lease(path: Path) -> None:
    """Make a lease that this process left behind that of a process that has ended."""
    lease = fs.sibling(Path(path), "lease")
    try:
        owner = json.loads(lease.read_text())
    except (OSError, ValueError):
        return
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    owner["pid"] = gone.pid
    lease.write_text(json.dumps(owner))

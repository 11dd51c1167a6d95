"""The folder in which a conversion is built, beside its destination.

It is hidden, holds the unfinished store, the journal and unpacked inputs, and
goes away when the store is published. One process at a time may work in it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO

from alchemi_xr.errors import (
    AlchemiError,
    ConfigError,
    NotAStoreError,
    StoreExistsError,
    StoreLockedError,
)
from alchemi_xr.store import fs

__all__ = ["Job", "check_destination"]


def check_destination(dst: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The destination as a path, when it may be written.

    Raises
    ------
    StoreExistsError, NotAStoreError
        It is there and may not be replaced; nothing was touched.
    """
    text = os.fspath(dst)
    if "://" in text:
        raise ConfigError(
            text, "a conversion writes to a local path", mend="convert locally, then copy the store"
        )
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if os.path.lexists(path):
        if not fs.looks_like_store(path):
            raise NotAStoreError(
                text,
                "exists and is no store, so it is not replaced, not even with overwrite",
                mend="give another path, or move what is there away yourself",
            )
        if not overwrite:
            raise StoreExistsError(
                text,
                "already exists",
                mend="give another path, overwrite=True (--overwrite) to replace the store, "
                "or alchemi_xr.etl.append to add to it",
            )
    if not path.parent.is_dir():
        raise ConfigError(
            text,
            f"the folder {path.parent} does not exist",
            mend="make it first, or correct the path",
        )
    return path


class Job:
    """The building folder of one destination, held by one process.

    Parameters
    ----------
    destination : Path
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = fs.sibling(destination, "building")
        self.store = self.folder / "store"
        self.journal = self.folder / "journal.jsonl"
        self.spool = self.folder / "spool"
        self.rejects = destination.with_name(destination.name + ".rejects.jsonl")
        self._lock: IO[str] | None = None

    def __enter__(self) -> Job:
        self.folder.mkdir(exist_ok=True)
        lock = open(self.folder / "lock", "a+", encoding="utf-8")
        try:
            # Held by the kernel: it is free again the moment its holder dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise StoreLockedError(
                str(self.destination),
                f"is being converted by {owner}",
                mend="wait for it, or give another destination",
            ) from error
        lock.seek(0)
        lock.truncate()
        lock.write(f"pid {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        self._lock = lock
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error of ours nothing can be taken up again as it is; after
        # an interruption (Ctrl-C, a lost cluster) the finished shards count.
        if kind is None or issubclass(kind, AlchemiError):
            self.discard()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def clear(self) -> None:
        """Forget an earlier run, but keep the lock."""
        fs.remove_file(self.journal)
        fs.remove_tree(self.store)

    def discard(self) -> None:
        """Remove the folder with all that is in it."""
        fs.remove_tree(self.folder)

"""The folder in which a store is built, beside its destination, and what is built there.

It is hidden, holds the unfinished store, the journal and unpacked inputs, and
goes away when the store is published. One process at a time may work in it.
A job that was stopped is taken up where it was, and leaves the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from alchemi_xr._typing import BoolArray, IntArray
from alchemi_xr.errors import (
    AlchemiError,
    ConfigError,
    NotAStoreError,
    StoreError,
    StoreExistsError,
    StoreLockedError,
)
from alchemi_xr.plan.client import Runner
from alchemi_xr.plan.graph import Inputs
from alchemi_xr.plan.journal import Journal
from alchemi_xr.plan.plan import Plan
from alchemi_xr.plan.progress import Progress
from alchemi_xr.plan.run import run_plan
from alchemi_xr.plan.tasks import Reader
from alchemi_xr.store import fs
from alchemi_xr.store.bulk import BulkWriter
from alchemi_xr.store.codecs import ZarrWriteConfig
from alchemi_xr.store.lease import Lease
from alchemi_xr.store.locate import locate
from alchemi_xr.store.reader import open_store

__all__ = ["Job", "Recipe", "build", "check_destination", "settle"]

_HISTORY = 64


def settle(path: Path) -> None:
    """Make the second step of a swap whose process was killed after the first.

    Until then the store is the folder that the job has built: one that begins there
    anew would take it for its own remains.
    """
    if os.path.lexists(fs.journal_path(path)):
        with Lease(locate(path)):
            fs.finish_swap(path)


def check_destination(dst: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The destination as a path, when it may be written.

    Raises
    ------
    StoreExistsError, NotAStoreError
        It is there and may not be replaced; nothing was touched.
    ConfigError
        No store can be made there.
    """
    if not isinstance(dst, (str, os.PathLike)):
        raise ConfigError(
            "destination", "is no path", found=type(dst).__name__, expected="the path of a store"
        )
    text = os.fspath(dst)
    if not text or "\0" in text:
        raise ConfigError("destination", "is no path", found=repr(text), mend="give a path")
    if "://" in text:
        raise ConfigError(
            text, "a bulk job writes to a local path", mend="write locally, then copy the store"
        )
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if path.is_symlink():
        # The store that it leads to is replaced, not the link.
        path = Path(os.path.realpath(path))
    if path.parent.is_dir():
        settle(path)
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
    for parent in Path(os.path.realpath(path.parent), "x").parents:
        if fs.looks_like_store(parent):
            raise ConfigError(
                text,
                f"lies inside the store {parent}",
                mend="give a path beside it; a store holds nothing but its own arrays",
            )
    return path


class Job:
    """The building folder of one destination, held by one process.

    Parameters
    ----------
    destination : Path
    what : str
        Word in the folder's name; jobs of different kinds do not meet.
    """

    def __init__(self, destination: Path, what: str = "building") -> None:
        self.destination = destination
        self.folder = fs.sibling(destination, what)
        self.store: Any = self.folder / "store"
        self.journal = self.folder / "journal.jsonl"
        self.spool = self.folder / "spool"
        self.rejects = destination.with_name(destination.name + ".rejects.jsonl")
        self._lock: IO[str] | None = None

    def __enter__(self) -> Job:
        lock = self._open_lock()
        while not self._take(lock):
            # Its last holder removed the folder between our opening and locking it.
            lock.close()
            lock = self._open_lock()
        lock.seek(0)
        lock.truncate()
        lock.write(f"pid {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        self._lock = lock
        try:
            settle(self.destination)
        except BaseException:
            self._lock = None
            lock.close()
            raise
        return self

    def _open_lock(self) -> IO[str]:
        reason: OSError | None = None
        for _ in range(100):
            try:
                self.folder.mkdir(exist_ok=True)
                return open(self.folder / "lock", "a+", encoding="utf-8")
            except (FileNotFoundError, FileExistsError) as error:
                # Removed by its last holder in this very moment (mkdir saw it, its
                # look at what is there did not), or no place for folders.
                reason = error
            except OSError as error:
                reason = error
                break
        raise ConfigError(
            str(self.destination),
            f"no store can be built there ({reason.strerror if reason else ''})",
            mend="give a path in a folder where you may write",
        ) from reason

    def _take(self, lock: IO[str]) -> bool:
        """Lock the open file; False when it is no longer that of the folder."""
        try:
            # Held by the kernel: it is free again the moment its holder dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise StoreLockedError(
                str(self.destination),
                f"is being built by {owner}",
                mend="wait for it, or give another destination",
            ) from error
        try:
            return os.path.samestat(os.fstat(lock.fileno()), os.stat(self.folder / "lock"))
        except FileNotFoundError:
            return False

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
        if isinstance(error, OSError) and not isinstance(error, AlchemiError):
            raise StoreError(
                str(self.destination),
                f"could not be built ({error.strerror or error})",
                found=error.filename,
                mend="remove the cause (a full disk?) and run it again: it goes on where it was",
            ) from error

    def token(self) -> str:
        """A name of this run and of those that take it up, and of no other."""
        path = self.folder / "token"
        if not path.exists():
            fs.atomic_replace(path, uuid.uuid4().hex.encode())
        return path.read_text()

    def clear(self) -> None:
        """Forget an earlier run, but keep the lock."""
        fs.remove_file(self.folder / "token")
        fs.remove_file(self.journal)
        fs.remove_tree(self.store)

    def is_done(self, recipe: Recipe) -> bool:
        """Whether the store was finished by an earlier run and only not published."""
        if not fs.looks_like_store(self.store):
            return False
        try:
            with open_store(self.store) as snapshot:
                return snapshot.schema.identity == recipe.identity
        except AlchemiError:
            return False

    def prepare(self, recipe: Recipe, *, resume: bool = True) -> tuple[BulkWriter, Journal]:
        """The store under construction and its open journal, taken up or new."""
        journal = Journal(self.journal, recipe.fingerprint)
        if resume and self.journal.exists() and fs.looks_like_store(self.store):
            journal.open()
            if journal.resumed and not self._is_committed():
                self.sweep()
                return BulkWriter.open(self.store), journal
            journal.close()
        self.clear()
        writer = recipe.create(self.store)
        return writer, Journal(self.journal, recipe.fingerprint).open()

    def _is_committed(self) -> bool:
        try:
            BulkWriter.open(self.store)
        except AlchemiError:
            return True
        return False

    def sweep(self) -> None:
        """Remove what a killed writer had half put down: it is not part of the result."""
        for partial in fs.partial_files(self.store):
            fs.remove_file(partial)

    def publish(self, *, overwrite: bool = False, keep: bool = False) -> None:
        """Move the finished store to its destination in one step.

        A store that is replaced has no writer meanwhile; with ``keep`` it stays
        readable for those who hold it.
        """
        if not os.path.lexists(self.destination):
            # Its commit has forced all of it.
            fs.publish(self.store, self.destination, forced=True)
            return
        with Lease(locate(self.destination)):
            if not (keep and overwrite and fs.looks_like_store(self.destination)):
                fs.publish(self.store, self.destination, overwrite=overwrite, forced=True)
                return
            fs.swap(self.store, self.destination, fs.previous_path(self.destination))

    def built_bytes(self) -> int:
        """Bytes of all files of the store that was built."""
        return fs.tree_bytes(self.store)

    def discard(self) -> None:
        """Remove the folder with all that is in it."""
        try:
            fs.remove_tree(self.folder)
        except OSError as error:
            # Another job put its lock there meanwhile: the folder is its own now.
            if error.errno != errno.ENOTEMPTY:
                raise


@dataclass(frozen=True)
class Recipe:
    """A plan, and what the store that it makes remembers of itself.

    Parameters
    ----------
    plan : Plan
    num_atoms, num_edges : int64 array, [N]
    config : ZarrWriteConfig
    fingerprint : str
        Of everything that decides the bytes; its beginning is the store's identity.
    provenance : dict
    generation : int
    operation : str
        For the history.
    samples_mask : bool array, [N], optional
        False for samples that stay deleted.
    others : dict
        Root attributes of other tools, kept.
    history : sequence of dict
        Commits of the generations before.
    """

    plan: Plan
    num_atoms: IntArray
    num_edges: IntArray
    config: ZarrWriteConfig
    fingerprint: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 1
    operation: str = "write"
    samples_mask: BoolArray | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()

    @property
    def identity(self) -> str:
        """Identity of the store: equal jobs leave equal bytes."""
        return self.fingerprint[:32]

    def create(self, place: Any) -> BulkWriter:
        """The store under construction, with all arrays at their full length."""
        return BulkWriter.create(
            place,
            self.plan.layouts,
            self.num_atoms,
            self.num_edges,
            config=self.config,
            provenance=dict(self.provenance),
            generation=self.generation,
            operation=self.operation,
            identity=self.identity,
        )

    def commit(self, writer: BulkWriter) -> None:
        """Make what the tasks wrote a store."""
        history = [*map(dict, self.history), *writer.schema.history][-_HISTORY:]
        writer.schema = writer.schema.evolve(others=dict(self.others), history=history)
        mask = self.samples_mask
        writer.commit(None if mask is None or mask.all() else mask)


def build(
    recipe: Recipe,
    reader: Reader,
    job: Job,
    runner: Runner,
    shown: Progress,
    *,
    title: str,
    resume: bool = True,
    inputs: Inputs | None = None,
) -> bool:
    """Build and commit the store of a job, not published yet; whether it was taken up."""
    if resume and job.is_done(recipe):
        return True
    writer, journal = job.prepare(recipe, resume=resume)
    resumed = journal.resumed
    with journal:
        run_plan(recipe.plan, reader, writer, journal, runner, shown, title=title, inputs=inputs)
    # A worker that was killed in this run leaves half-written files too.
    job.sweep()
    recipe.commit(writer)
    return resumed

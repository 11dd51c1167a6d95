"""A bulk job whose store is built in its place: an object store, a repository, memory.

Nothing can be renamed there. So the tasks put their objects where they belong,
and the root document, put last, makes them a store; until then readers see
nothing. What has to survive an interruption, the journal above all, lies in a
folder of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from alchemi_xr.errors import AlchemiError, ConfigError
from alchemi_xr.plan.client import Runner
from alchemi_xr.plan.job import Job, Recipe, check_destination
from alchemi_xr.plan.journal import Journal
from alchemi_xr.store._compat import wait
from alchemi_xr.store.bulk import BulkWriter
from alchemi_xr.store.copying import check_free
from alchemi_xr.store.lease import Lease
from alchemi_xr.store.locate import Place, locate
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.rewrite import clear

__all__ = [
    "Destination",
    "ElsewhereJob",
    "check_place",
    "check_reach",
    "destination_of",
    "open_job",
    "scratch_path",
]

Destination = Path | Place
"""A path of this machine, or a place that is none."""


def destination_of(dst: Any, *, storage_options: dict[str, Any] | None = None) -> Destination:
    """What a user gave as the place of a new store.

    Raises
    ------
    ConfigError
        It is nothing that a store could be at.
    """
    if isinstance(dst, os.PathLike) or (isinstance(dst, str) and not _names_elsewhere(dst)):
        return Path(os.path.abspath(os.path.expanduser(os.fspath(dst))))
    if dst is None or isinstance(dst, (bool, int, float, bytes)):
        raise ConfigError(
            "destination", "is no path", found=type(dst).__name__, expected="the path of a store"
        )
    place = locate(dst, storage_options=storage_options)
    return place if place.path is None else place.path


def _names_elsewhere(text: str) -> bool:
    return text.startswith("icechunk:") or "://" in text


def check_place(dst: Destination, *, overwrite: bool) -> Destination:
    """The destination itself, when a new store may appear there.

    Raises
    ------
    StoreExistsError, NotAStoreError, ConfigError
    """
    if isinstance(dst, Path):
        return check_destination(dst, overwrite=overwrite)
    if overwrite and not dst.in_memory:
        raise ConfigError(
            dst.where,
            "overwrite=True replaces a store at a path; elsewhere it cannot be replaced in one step",
            mend="write to a place where nothing is",
        )
    if dst.repository is not None:
        dst.repository.create()
    check_free(dst, overwrite=overwrite)
    return dst


def check_reach(dst: Destination, runner: Runner) -> None:
    """Refuse a cluster for a place that is in the memory of this process.

    Raises
    ------
    ConfigError
    """
    if runner.client is None or isinstance(dst, Path) or dst.is_remote:
        return
    raise ConfigError(
        dst.where,
        "a store in memory, or a transaction of Icechunk, cannot be written by other processes",
        mend="leave client= out: threads of this process write it; or write to a path and copy",
    )


def open_job(dst: Destination, what: str = "building") -> Job:
    """The job that builds at a destination."""
    return Job(dst, what) if isinstance(dst, Path) else ElsewhereJob(dst, what)


def scratch_path(place: Place, base: Path | None = None) -> Path:
    """A path of this machine that belongs to a place elsewhere, the same every time.

    Parameters
    ----------
    place : Place
    base : Path, optional
        Where; by default a folder of this user below ``TMPDIR``.
    """
    if base is None:
        base = Path(tempfile.gettempdir()) / f"alchemi_xr-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256(place.where.encode()).hexdigest()[:16]
    return base / f"{digest}-{_name(place)}"


def _name(place: Place) -> str:
    """The last part of an address, as part of a file name."""
    return re.sub(r"[^\w.+=-]+", "_", place.where.rstrip("/").rpartition("/")[2]) or "store"


class ElsewhereJob(Job):
    """A job at a place that is no folder.

    Its own folder is one of the machine that drives it, below ``TMPDIR``, and is
    found again by the address of the destination.

    Parameters
    ----------
    place : Place
    what : str
    """

    def __init__(self, place: Place, what: str = "building") -> None:
        self._own: tempfile.TemporaryDirectory[str] | None = None
        if not place.is_remote:
            # Memory and transactions end with the process: nothing to be found again.
            self._own = tempfile.TemporaryDirectory(prefix="alchemi_xr-")
        base = None if self._own is None else Path(self._own.name)
        super().__init__(scratch_path(place, base), what)
        self.place = place
        self.store = place
        self.rejects = Path(os.path.abspath(f"{_name(place)}.rejects.jsonl"))
        self._stack = ExitStack()

    def __enter__(self) -> ElsewhereJob:
        super().__enter__()
        try:
            if self.place.repository is not None:
                self.place.repository.create()
            self._stack.enter_context(Lease(self.place))
        except BaseException as error:
            super().__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is not None and (issubclass(kind, AlchemiError) or self._own is not None):
                # What was put there is no store and would only be in the way.
                with contextlib.suppress(Exception):
                    if not self._is_store():
                        clear(self.place)
            self._stack.close()
        finally:
            super().__exit__(kind, error, trace)
            if self._own is not None:
                self._own.cleanup()

    def _is_store(self) -> bool:
        try:
            open_store(self.place).close()
        except AlchemiError:
            return False
        return True

    def is_done(self, recipe: Recipe) -> bool:
        """Whether an earlier run was stopped right after its store was finished."""
        try:
            with open_store(self.place) as snapshot:
                return snapshot.schema.identity == recipe.identity
        except AlchemiError:
            return False

    def prepare(self, recipe: Recipe, *, resume: bool = True) -> tuple[BulkWriter, Journal]:
        """The store under construction and its open journal, taken up or new."""
        journal = Journal(self.journal, recipe.fingerprint)
        if resume and self.journal.exists():
            journal.open()
            if journal.resumed:
                with contextlib.suppress(AlchemiError):
                    writer = BulkWriter.open(self.place)
                    if writer.schema.identity == recipe.identity:
                        return writer, journal
            journal.close()
        self.clear()
        return recipe.create(self.place), Journal(self.journal, recipe.fingerprint).open()

    def clear(self) -> None:
        """Forget an earlier run."""
        self.journal.unlink(missing_ok=True)
        check_free(self.place, overwrite=self.place.in_memory)
        clear(self.place)

    def sweep(self) -> None:
        """Nothing: an object is there whole or not at all."""

    def publish(self, *, overwrite: bool = False, keep: bool = False) -> None:
        """Nothing: the root document was put last."""

    def built_bytes(self) -> int:
        """Bytes of the objects of the store."""
        try:
            return int(wait(self.place.for_reading().getsize_prefix(self.place.prefix)))
        except (NotImplementedError, TypeError, ValueError):
            return 0

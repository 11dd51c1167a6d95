"""Stores in Icechunk repositories: transactions, branches, time travel.

There is no lease. Each write works on the newest snapshot of its branch and is
committed whole at its end; when another writer was faster, Icechunk refuses the
commit, and the write is done anew on what that one left (an append lands behind
the other's samples). Readers hold the snapshot that they opened, for ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from zarr.abc.store import Store

from alchemi_xr._optional import import_optional
from alchemi_xr.errors import (
    AlchemiError,
    ConfigError,
    StaleSnapshotError,
    StoreConflictError,
    StoreError,
    StoreLockedError,
    StoreNotFoundError,
)
from alchemi_xr.store import fs
from alchemi_xr.store._compat import read_json
from alchemi_xr.store.locate import Place
from alchemi_xr.store.remote import CheckedStore, scheme_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "Repository",
    "locate_icechunk",
    "locate_location",
    "open_repository",
    "retried",
]

P = ParamSpec("P")
R = TypeVar("R")

MAIN = "main"
_IN_MEMORY = re.compile(r"InMemory|type: in-memory")
_TRIES = 200
_LONGEST_WAIT = 1.0


def _icechunk() -> Any:
    return import_optional("icechunk", extra="icechunk", why="Icechunk repositories")


class Repository:
    """An Icechunk repository as the home of one store, seen at a branch, tag or snapshot.

    Parameters
    ----------
    where : str
    storage : callable, optional
        Makes its ``icechunk.Storage``; not needed with ``repository``.
    repository : icechunk.Repository, optional
    branch, tag, snapshot : str, optional
        At most one; by default branch ``main``.
    folder : Path, optional
        Where it lives, when that is a folder of this machine.
    """

    def __init__(
        self,
        where: str,
        storage: _StorageMaker | None = None,
        *,
        repository: Any = None,
        branch: str | None = None,
        tag: str | None = None,
        snapshot: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.where = where
        self.branch = branch
        self.tag = tag
        self.snapshot = snapshot
        self._storage = storage
        self._repository = repository
        self._folder = folder
        self._session: Any = None
        self._working: CheckedStore | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        repository = None if self._storage is not None else self._repository
        refs = (self.branch, self.tag, self.snapshot)
        return (_remade, (self.where, self._storage, repository, refs, self._folder))

    @property
    def in_memory(self) -> bool:
        """Whether other processes cannot reach it."""
        return self._storage is None and bool(_IN_MEMORY.search(str(self.open().storage)))

    def at(self, snapshot: str) -> Repository:
        """The same repository at one snapshot."""
        return Repository(
            self.where,
            self._storage,
            repository=self._repository,
            snapshot=snapshot,
            folder=self._folder,
        )

    # -- opening -----------------------------------------------------------

    def open(self, *, create: bool = False) -> Any:
        """The ``icechunk.Repository``.

        Raises
        ------
        StoreNotFoundError
            There is none, and ``create`` is off.
        StoreError
            It cannot be reached.
        """
        if self._repository is not None:
            return self._repository
        assert self._storage is not None
        icechunk = _icechunk()
        if self._folder is not None and not create and not self._folder.is_dir():
            # Opening would make the folder.
            raise self._not_found()
        try:
            storage = self._storage()
            if create:
                with _alone(self._folder):
                    self._repository = icechunk.Repository.open_or_create(storage)
            elif icechunk.Repository.exists(storage):
                self._repository = icechunk.Repository.open(storage)
        except AlchemiError:
            raise
        except Exception as error:
            raise StoreError(
                self.where,
                f"the Icechunk repository cannot be opened ({_first_line(error)})",
                mend="check the location, the network and the credentials (storage_options=)",
            ) from error
        if self._repository is None:
            raise self._not_found()
        return self._repository

    def _not_found(self) -> StoreNotFoundError:
        return StoreNotFoundError(
            self.where, "no Icechunk repository is here", mend="write a store there first"
        )

    def create(self) -> None:
        """Make the repository if it is not there."""
        self.open(create=True)

    def _read_only(self, **ref: str) -> Any:
        try:
            return self.open().readonly_session(**ref)
        except AlchemiError:
            raise
        except Exception as error:
            kind, name = next(iter(ref.items()))
            raise StoreNotFoundError(
                self.where,
                f"there is no {kind.removesuffix('_id')} {name!r} in this repository "
                f"({_first_line(error)})",
                mend="alchemi_xr.store.open_repository(...) lists what there is",
            ) from error

    # -- what the store's room asks for --------------------------------------

    def reading(self, root: str) -> Store:
        """A store for one reader; in a transaction what was written so far, else one snapshot."""
        if self._session is not None:
            return CheckedStore(self._session.store, where=self.where, root=root)
        if self.snapshot is not None:
            session = self._read_only(snapshot_id=self.snapshot)
        elif self.tag is not None:
            session = self._read_only(tag=self.tag)
        else:
            session = self._read_only(branch=self.branch or MAIN)
        return CheckedStore(session.store, where=self.where, root=root)

    def current(self) -> Store:
        """The store of the running transaction; without one, of the newest snapshot."""
        if self._session is None:
            return self.reading("zarr.json")
        assert self._working is not None
        return self._working

    def base(self) -> Store:
        """The snapshot on which the running transaction began."""
        session = self._read_only(snapshot_id=self._session.snapshot_id)
        return CheckedStore(session.store, where=self.where)

    def begin(self) -> None:
        """Begin a transaction on the newest snapshot of the branch.

        Raises
        ------
        StoreError
            A tag or a snapshot is never written to.
        StoreLockedError
            This writer has a transaction already.
        """
        if self.tag is not None or self.snapshot is not None:
            raise StoreError(
                self.where,
                "a tag or snapshot cannot be written to",
                mend="write to a branch; open_repository(...).create_branch makes one from it",
            )
        if self._session is not None:
            raise StoreLockedError(
                self.where,
                "this writer is in a transaction already",
                mend="give each thread its own StoreWriter",
            )
        repository, branch = self.open(), self.branch or MAIN
        try:
            session = repository.writable_session(branch)
        except Exception as error:
            raise StoreNotFoundError(
                self.where,
                f"branch {branch!r} cannot be written ({_first_line(error)})",
                mend="open_repository(...).create_branch makes a branch",
            ) from error
        # One wrapper for all transactions: arrays that are held open go on through it.
        if self._working is None:
            self._working = CheckedStore(session.store, where=self.where)
        self._working._store = session.store
        self._session = session

    def end(self, *, keep: bool) -> None:
        """Commit the running transaction, or forget it.

        Raises
        ------
        StoreConflictError
            Another writer committed meanwhile; nothing of ours was.
        """
        session, self._session = self._session, None
        if session is None or not keep or not session.has_uncommitted_changes:
            return
        icechunk = _icechunk()
        try:
            with _alone(self._folder):
                session.commit(_message(session.store))
        except icechunk.ConflictError as error:
            raise StoreConflictError(
                self.where,
                "another writer committed in between, so nothing of this was written",
                mend="do it again on the newest snapshot",
            ) from error
        except Exception as error:
            raise StoreError(
                self.where,
                f"the commit failed ({_first_line(error)})",
                mend="check the network and the credentials, then see in the repository's history "
                "whether it landed",
            ) from error


def _remade(
    where: str, storage: Any, repository: Any, refs: tuple[Any, ...], folder: Path | None
) -> Repository:
    branch, tag, snapshot = refs
    return Repository(
        where,
        storage,
        repository=repository,
        branch=branch,
        tag=tag,
        snapshot=snapshot,
        folder=folder,
    )


def _message(store: Store) -> str:
    """What the history of the repository says of a commit of ours."""
    try:
        ours = (read_json(store, "zarr.json") or {})["attributes"]["alchemi_xr"]
        last = ours["history"][-1]
        return f"{last['operation']}: {last['samples']} samples, generation {last['generation']}"
    except (KeyError, IndexError, TypeError):
        return "alchemi_xr"


def _first_line(error: BaseException) -> str:
    lines = [line.strip(" x|-") for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


@contextlib.contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Commits to a folder one after the other: a file system has no conditional put."""
    if folder is None or fcntl is None:
        yield
        return
    lock = fs.sibling(folder, "commit")
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# -- locations ---------------------------------------------------------------


class _StorageMaker:
    """Makes an ``icechunk.Storage`` from its location; picklable."""

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        self.location = location
        self.options = options

    def __call__(self) -> Any:
        icechunk = _icechunk()
        scheme = scheme_of(self.location)
        rest = self.location.partition("://")[2]
        bucket, _, prefix = rest.partition("/")
        try:
            if scheme is None:
                return icechunk.local_filesystem_storage(self.location, **self.options)
            if scheme in ("s3", "s3a"):
                options = _s3_options(self.options)
                return icechunk.s3_storage(bucket=bucket, prefix=prefix or None, **options)
            if scheme in ("gs", "gcs"):
                return icechunk.gcs_storage(bucket=bucket, prefix=prefix or None, **self.options)
            if scheme in ("az", "azure", "abfs"):
                return icechunk.azure_storage(container=bucket, prefix=prefix, **self.options)
        except TypeError as error:
            raise ConfigError(
                f"icechunk:{self.location}", f"storage_options are not Icechunk's ({error})"
            ) from error
        raise ConfigError(
            f"icechunk:{self.location}",
            f"no Icechunk storage is known for {scheme}://",
            expected="a path, s3://, gs:// or az://",
            mend="open the repository with icechunk and give that",
        )


def _s3_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of Icechunk, from its own names or those of s3fs."""
    names = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
    made = {names.get(name, name): value for name, value in options.items()}
    if "access_key_id" not in made and not made.get("anonymous"):
        made.setdefault("from_env", True)
    endpoint = made.get("endpoint_url")
    if endpoint:
        made.setdefault("allow_http", str(endpoint).startswith("http://"))
        made.setdefault("force_path_style", True)
    return made


def _location(text: str, options: dict[str, Any] | None) -> tuple[_StorageMaker, Path | None]:
    rest = text.removeprefix("icechunk:").rstrip("/")
    if rest.startswith(("file://", "local://")):
        rest = rest.partition("://")[2]
    scheme = scheme_of(rest)
    if not rest or (scheme is not None and "://" not in rest):
        raise ConfigError(
            text, "this is no location of an Icechunk repository", expected="icechunk:<path or URL>"
        )
    folder = None
    if scheme is None:
        folder = Path(os.path.abspath(rest))
        rest = str(folder)
    return _StorageMaker(rest, dict(options or {})), folder


def _at(repository: Repository, refs: dict[str, str | None]) -> Repository:
    """A repository at the state that ``branch``, ``tag`` or ``snapshot`` names."""
    given = {name: ref for name, ref in refs.items() if ref is not None}
    if len(given) > 1:
        raise ConfigError(
            repository.where, "give one of branch=, tag= and snapshot=", found=sorted(given)
        )
    for name, ref in given.items():
        setattr(repository, name, ref)
    return repository


def locate_location(
    text: str, options: dict[str, Any] | None, refs: dict[str, str | None]
) -> Place:
    """The place meant by ``icechunk:<path or URL>``."""
    maker, folder = _location(text, options)
    return Place(text, repository=_at(Repository(text, maker, folder=folder), refs))


def locate_icechunk(given: Any, refs: dict[str, str | None]) -> Place:
    """The place meant by an Icechunk Repository, Session or store.

    A session is its owner's transaction: what is written to it is committed by
    its owner.
    """
    icechunk = _icechunk()
    if isinstance(given, icechunk.Repository):
        where = f"Icechunk repository ({_storage_name(given)})"
        return Place(where, repository=_at(Repository(where, repository=given), refs))
    session = getattr(given, "session", given)
    if not isinstance(session, icechunk.Session):
        raise ConfigError(
            "store",
            "this is no place for a store",
            found=type(given).__name__,
            expected="an Icechunk Repository, Session or store",
        )
    if any(ref is not None for ref in refs.values()):
        raise ConfigError(
            "store", "a session has its branch already", mend="give the Repository instead"
        )
    name = "read-only" if session.read_only else f"on branch {session.branch!r}"
    where = f"Icechunk session {name}"
    return Place(where, store=CheckedStore(session.store, where=where))


def _storage_name(repository: Any) -> str:
    text = " ".join(str(repository.storage).split())
    return text if len(text) < 120 else text[:117] + "..."


def open_repository(
    location: Any, *, storage_options: dict[str, Any] | None = None, create: bool = False
) -> Any:
    """The Icechunk repository at a location, for its branches, tags and history.

    Parameters
    ----------
    location : str
        ``icechunk:<path or URL>``; the scheme may be left out.
    storage_options : dict, optional
        As Icechunk's storage takes them (``endpoint_url``, ``region``, ...); the
        names of s3fs for the credentials are understood too.
    create : bool
        Make the repository if there is none.

    Returns
    -------
    icechunk.Repository

    Raises
    ------
    StoreNotFoundError, StoreError, ConfigError, OptionalDependencyError
    """
    text = os.fspath(location)
    if not text.startswith("icechunk:"):
        text = f"icechunk:{text}"
    maker, folder = _location(text, storage_options)
    return Repository(text, maker, folder=folder).open(create=create)


# -- conflicts ---------------------------------------------------------------


class _Writer(Protocol):
    place: Place
    _opened: Any


W = TypeVar("W", bound=_Writer)


def retried(
    *, positions: bool = False
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Do a write of an Icechunk store anew when another writer committed in between.

    With ``positions`` the write means samples by their physical positions, which
    hold as long as the other did not rewrite the store.
    """

    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(method)
        def call(self: W, *args: P.args, **kwargs: P.kwargs) -> R:
            tried = 0
            while True:
                try:
                    return method(self, *args, **kwargs)
                except StoreConflictError:
                    tried += 1
                    if tried >= _TRIES:
                        raise
                    known, self._opened = self._opened, None
                    # At random, or two writers would meet again and again.
                    time.sleep(random.uniform(0, min(_LONGEST_WAIT, 0.01 * 2 ** min(tried, 8))))
                    if positions and known is not None:
                        _check_identity(self.place, known.schema.identity)

        return cast("Callable[Concatenate[W, P], R]", call)

    return decorate


def _check_identity(place: Place, identity: str) -> None:
    from alchemi_xr.store.reader import open_store

    with open_store(place) as newest:
        if newest.schema.identity != identity:
            raise StaleSnapshotError(
                place.where,
                "another writer rewrote the store meanwhile, so these positions mean other samples",
                mend="open the store again and find the samples anew",
            )

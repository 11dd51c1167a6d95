"""The only place where the store talks to the operating system's files.

Every write that matters for durability goes through a function here, so that
a test can number the calls and stop the process at any one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from alchemi_xr.errors import NotAStoreError, StoreExistsError

BytesLike: TypeAlias = bytes | bytearray | memoryview

__all__ = [
    "atomic_replace",
    "create",
    "exchange",
    "fsync_dir",
    "fsync_file",
    "fsync_names",
    "fsync_paths",
    "finish_swap",
    "fsync_tree",
    "hold",
    "journal_path",
    "link_new",
    "looks_like_store",
    "make_folder",
    "make_map",
    "open_existing",
    "open_partial",
    "partial_files",
    "previous_path",
    "publish",
    "release",
    "remove_file",
    "remove_tree",
    "rename",
    "set_size",
    "sibling",
    "size_of",
    "start_writeback",
    "swap",
    "swapped_in",
    "sync_data",
    "sync_open",
    "tree_bytes",
    "unfinished_path",
    "unfinished_prefix",
    "write_at",
    "write_file",
]

PARTIAL = ".partial"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# Journalled file systems join fsyncs that are in flight together into one
# commit, so waiting for them in parallel costs little more than one.
_FSYNC_THREADS = 8
_WRITE_BYTES = 1 << 30
_SYNC_FILE_RANGE_WRITE = 2
_numbers = itertools.count()
_HAS_FDATASYNC = hasattr(os, "fdatasync")


def _find_sync_file_range() -> Any:
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _find_sync_file_range()


def sibling(path: Path, what: str) -> Path:
    """The hidden companion of a store: ``.name.what`` beside it."""
    return path.parent / f".{path.name}.{what}"


def _partial_name(path: Path) -> Path:
    # Random once a process: to ask for it each time gives the interpreter away.
    return path.parent / f".{path.name}.{_process_name(os.getpid())}-{next(_numbers)}{PARTIAL}"


@cache
def _process_name(pid: int) -> str:
    return uuid.uuid4().hex


def write_file(path: Path, data: BytesLike, *, durable: bool = False) -> None:
    """Put bytes under a name by a temporary file and a rename.

    A reader sees the old bytes or the new ones, never a part. With ``durable``
    the bytes and the name are on the medium when this returns.
    """
    partial = _partial_name(path)
    try:
        with open(partial, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    if durable:
        fsync_dir(path.parent)


def open_partial(path: Path) -> tuple[Path, FileIO]:
    """A new temporary file beside ``path``, and its name; a rename puts it there."""
    partial = _partial_name(path)
    return partial, open(partial, "xb", buffering=0)


def create(name: str, parts: Iterable[BytesLike], size: int | None = None) -> None:
    """A file that is not there yet, of ``size`` bytes when the parts are fewer.

    For folders that nobody else looks into: the file has its name from the start.

    Raises
    ------
    FileExistsError, FileNotFoundError
    """
    with open(name, "xb", buffering=0) as file:
        offset = 0
        for part in parts:
            write_at(file, part, offset)
            offset += memoryview(part).nbytes
        if size is not None and size > offset:
            set_size(file, size)
        start_writeback(file)


def make_folder(name: str) -> None:
    """A folder, with those above it; it may be there."""
    os.makedirs(name, exist_ok=True)


def open_existing(path: Path) -> FileIO:
    """A file that is there, for writing into it.

    Raises
    ------
    FileNotFoundError
    """
    return open(path, "r+b", buffering=0)


def write_at(file: FileIO, data: BytesLike, offset: int) -> None:
    """Write bytes at an offset, all of them or an error."""
    fd, view = file.fileno(), memoryview(data).cast("B")
    while view.nbytes:
        done = os.pwrite(fd, view[:_WRITE_BYTES], offset)
        view, offset = view[done:], offset + done


def set_size(file: FileIO, size: int) -> None:
    """Make a file so long; what is added reads as zeros and takes no room."""
    os.ftruncate(file.fileno(), size)


def make_map(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """An NPY file of zeros, mapped, whose room on the medium is taken.

    A map of what has no room yet would end the process when a disk is full, without a word.

    Raises
    ------
    OSError
        There is no room.
    """
    rows: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b", buffering=0) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size_of(file))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
    return rows


def size_of(file: FileIO) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def start_writeback(file: FileIO) -> None:
    """Let the system begin to write, so that many files share one commit of its journal.

    A hint: nothing is promised before :func:`sync_open`.
    """
    if _sync_file_range is not None:
        _sync_file_range(file.fileno(), 0, 0, _SYNC_FILE_RANGE_WRITE)


def sync_open(file: FileIO) -> None:
    """Force the bytes of an open file to the medium."""
    os.fsync(file.fileno())


def sync_data(file: FileIO) -> None:
    """The same for a file whose length has not changed."""
    if _HAS_FDATASYNC:
        os.fdatasync(file.fileno())
    else:
        os.fsync(file.fileno())


def link_new(path: Path, data: BytesLike) -> None:
    """Put bytes under a name that must not exist yet.

    Raises
    ------
    FileExistsError
    """
    partial = _partial_name(path)
    try:
        with open(partial, "wb") as file:
            file.write(data)
        os.link(partial, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def atomic_replace(path: Path, data: bytes) -> None:
    """Replace a file so that after a crash it holds the old bytes or the new."""
    write_file(path, data, durable=True)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; the target, if it is a file, is replaced."""
    os.replace(source, target)


def hold(path: Path) -> int | None:
    """Keep the file of a name alive, whatever happens to the name; None when there is none."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def release(held: Iterable[int]) -> None:
    """Let go of files that were held."""
    for fd in held:
        with contextlib.suppress(OSError):
            os.close(fd)


def remove_file(path: Path) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and all below it; nothing happens when it is not there.

    A root document goes first: by its absence a reader that still holds the
    folder tells that it reads ruins. Of a link only the link goes.
    """
    if os.path.islink(path):
        remove_file(path)
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path / "zarr.json")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def fsync_file(path: Path) -> None:
    """Force the bytes of a file to the medium."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    """Force the names in a folder to the medium (no-op where folders cannot be opened)."""
    if os.name == "nt":
        return
    fsync_file(path)


def fsync_paths(files: Iterable[Path], *, below: Path) -> None:
    """Force files, and the folders on their way up to ``below``, to the medium.

    Files that were removed meanwhile are passed over.
    """
    files = sorted(set(files))
    folders: set[Path] = set()
    for file in files:
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            if folder == below or folder == folder.parent:
                break
            folder = folder.parent

    def sync(path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            fsync_file(path)

    def sync_folder(path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            fsync_dir(path)

    if len(files) <= 2:
        for file in files:
            sync(file)
        for folder in folders:
            sync_folder(folder)
        return
    with ThreadPoolExecutor(_FSYNC_THREADS, thread_name_prefix="alchemi-fsync") as pool:
        list(pool.map(sync, files))
        list(pool.map(sync_folder, folders))


def fsync_tree(path: Path) -> None:
    """Force a folder and all below it to the medium."""
    files = [Path(root) / name for root, _, names in os.walk(path) for name in names]
    fsync_paths(files, below=path)
    fsync_dir(path)


def fsync_names(files: Sequence[str], folders: Sequence[str]) -> None:
    """Force files, then folders, to the medium; several at once."""

    def some(names: Sequence[str]) -> None:
        for name in names:
            fd = os.open(name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    with ThreadPoolExecutor(_FSYNC_THREADS, thread_name_prefix="alchemi-fsync") as pool:
        for names in (files, folders):
            list(pool.map(some, (names[i::_FSYNC_THREADS] for i in range(_FSYNC_THREADS))))


def exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step of the kernel; False where it cannot do that."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        renameat2 = libc.renameat2
    except (OSError, AttributeError):
        return False
    renameat2.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    done = renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def tree_bytes(path: Path) -> int:
    """Bytes that all files below a folder take."""
    return sum(
        _stored_bytes(os.path.join(root, name))
        for root, _, names in os.walk(path)
        for name in names
    )


def _stored_bytes(path: str) -> int:
    """Bytes that a file takes: the end of a raw chunk may be a hole in it."""
    status = os.stat(path)
    blocks = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else min(status.st_size, blocks * 512)


def looks_like_store(path: Path) -> bool:
    """Whether a folder holds the root document of a store (finished or being built)."""
    try:
        document = json.loads((path / "zarr.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(document, dict) or document.get("node_type") != "group":
        return False
    attributes = document.get("attributes") or {}
    return "num_samples" in attributes or "alchemi_xr" in attributes


def partial_files(path: Path) -> list[Path]:
    """Temporary files that a killed writer left below a folder."""
    return [
        Path(root) / name
        for root, _, names in os.walk(path)
        for name in names
        if name.endswith(PARTIAL)
    ]


def publish(built: Path, dest: Path, *, overwrite: bool = False, forced: bool = False) -> None:
    """Move a finished store to its place in one step.

    Parameters
    ----------
    built : path
        The finished store, on the same file system as ``dest``.
    dest : path
    overwrite : bool
        Replace a store that is there; it goes away only after the swap.
    forced : bool
        All of ``built`` is on the medium already.

    Raises
    ------
    StoreExistsError
        ``dest`` is there and ``overwrite`` is off.
    NotAStoreError
        ``dest`` is there and is no store: it is never replaced.
    """
    if not forced:
        fsync_tree(built)
    if dest.is_symlink():
        # The store that the link leads to is replaced; the link stays.
        dest = Path(os.path.realpath(dest))
    if not os.path.lexists(dest):
        # rename(2) of a folder replaces only an empty folder, so a destination
        # that somebody made in this very moment is not lost.
        os.rename(built, dest)
        fsync_dir(dest.parent)
        return
    if not overwrite:
        raise StoreExistsError(
            str(dest), "already exists", mend="give another path, or overwrite=True for a store"
        )
    if not looks_like_store(dest):
        raise NotAStoreError(
            str(dest),
            "is there and is no store, so it is not replaced, not even with overwrite",
            mend="give another path, or move what is there away yourself",
        )
    aside = unfinished_path(dest)
    swap(built, dest, aside)
    remove_tree(aside)


# -- the swap ----------------------------------------------------------------


def previous_path(path: Path) -> Path:
    """Where the generation before the last rewrite is kept."""
    return sibling(path, "previous")


def unfinished_prefix(path: Path) -> str:
    """Beginning of the names of folders beside a store that are not, or no longer, it."""
    return f".{path.name}.rewrite-"


def unfinished_path(path: Path) -> Path:
    """A fresh name of that kind."""
    return path.parent / f"{unfinished_prefix(path)}{uuid.uuid4().hex[:8]}"


def journal_path(path: Path) -> Path:
    """The note that a swap by two renames has begun."""
    return sibling(path, "swap")


def swap(built: Path, path: Path, aside: Path) -> None:
    """Put a finished folder in the place of another, which then stands aside.

    In one step where the kernel can exchange two names. Elsewhere in two, with
    a note first: between them readers find the new folder by the note, and the
    next writer makes the second step.
    """
    if exchange(built, path):
        fsync_dir(path.parent)
        _put_aside(built, path, aside)
        return
    journal = journal_path(path)
    # Relative, for a folder that is built inside another one beside the store.
    note = {"built": os.path.relpath(built, path.parent)}
    atomic_replace(journal, json.dumps(note).encode())
    _put_aside(path, path, aside)
    rename(built, path)
    fsync_dir(path.parent)
    remove_file(journal)


def _put_aside(old: Path, path: Path, aside: Path) -> None:
    doomed = None
    if aside.exists():
        # Renamed first: a folder half removed must not be taken for a generation.
        doomed = unfinished_path(path)
        rename(aside, doomed)
    rename(old, aside)
    fsync_dir(path.parent)
    if doomed is not None:
        remove_tree(doomed)


def swapped_in(path: Path) -> Path | None:
    """The new folder while a swap stands between its two renames."""
    try:
        built = path.parent / str(json.loads(journal_path(path).read_bytes())["built"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return built if built.is_dir() else None


def finish_swap(path: Path) -> None:
    """Make the second step of a swap whose first was made; call it off before that."""
    journal = journal_path(path)
    if not journal.exists():
        return
    built = swapped_in(path)
    if built is not None and not path.exists():
        rename(built, path)
        fsync_dir(path.parent)
    remove_file(journal)
    fsync_dir(path.parent)

"""Files that take their places together, in an order.

Whole files are written under temporary names, forced to the medium, and only
then renamed, phase after phase; so a name never stands for bytes that a loss of
power could take away. Bytes behind what is committed are written in place.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from alchemi_xr.store import fs

__all__ = ["Stage", "submit"]

# Files kept open between writing and forcing them; more are forced early.
_MOST_OPEN = 128
_THREADS = 12
_AT_ONCE = 6
_FEW = 4

T = TypeVar("T")
R = TypeVar("R")


_pool: tuple[int, ThreadPoolExecutor] | None = None


def submit(call: Callable[..., R], *arguments: Any) -> Future[R]:
    """Let a thread of this module do something that waits for the disk or for a codec."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        # Threads do not outlive a fork.
        _pool = os.getpid(), ThreadPoolExecutor(_THREADS, thread_name_prefix="alchemi-store")
    return _pool[1].submit(call, *arguments)


def _all(call: Callable[[T], None], items: Sequence[T]) -> None:
    """Call for each item; several at once, since a journal commits together what waits together."""
    if len(items) < _FEW:
        for item in items:
            call(item)
        return

    def some(first: int) -> None:
        for item in items[first::_AT_ONCE]:
            call(item)

    running = [submit(some, first) for first in range(min(_AT_ONCE, len(items)))]
    wait(running)
    for future in running:
        future.result()


class _Entry:
    """One file on its way."""

    __slots__ = ("busy", "failed", "file", "partial", "phase")

    def __init__(self, partial: Path | None, file: FileIO, phase: int) -> None:
        self.partial = partial
        self.file: FileIO | None = file
        self.phase = phase
        # Held while it is forced, and how that failed.
        self.busy = threading.Lock()
        self.failed: BaseException | None = None

    def __del__(self) -> None:
        # What an error left behind: its stage is gone, and the file belongs to nobody.
        if self.file is not None:
            self.file.close()

    def take(self) -> FileIO | None:
        """The open file, which is the caller's to force and close."""
        file, self.file = self.file, None
        return file

    def force(self) -> None:
        """Bytes to the medium; the file is closed.

        Where another thread does that already, it is done when this returns.
        """
        with self.busy:
            if self.failed is not None:
                raise self.failed
            file = self.take()
            if file is None:
                return
            try:
                if self.partial is None:
                    fs.sync_data(file)
                else:
                    fs.sync_open(file)
            except BaseException as error:
                self.failed = error
                raise
            finally:
                file.close()


class Stage:
    """The files that one commit replaces.

    Parameters
    ----------
    root : Path
        Folder below which all of them are.
    at_once : bool
        Rename every file as soon as it is written and leave forcing it to
        others: for a folder that is no store yet.
    private : bool
        As ``at_once``, in a folder of which nobody else knows: files have their
        names from the start, and :meth:`force` forces what this stage wrote.
    most_open : int
        Files that wait for :meth:`land`; more are forced by who writes them.
    """

    def __init__(
        self,
        root: Path,
        *,
        at_once: bool = False,
        private: bool = False,
        most_open: int = _MOST_OPEN,
    ) -> None:
        self.root = root
        self.at_once = at_once or private
        self.private = private
        self.most_open = most_open
        self.phase = 0
        self._entries: dict[Path, _Entry] = {}
        self._folders: set[Path] = set()
        self._made: set[Path] = set()
        self._names: list[str] = []
        self._folder_names: set[str] = {str(root)}
        self._lock = threading.Lock()
        self._landing = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def place_of(self, path: Path) -> Path:
        """Where the newest bytes of a file are now."""
        entry = self._entries.get(path)
        return path if entry is None or entry.partial is None else entry.partial

    def put(self, path: Path, parts: Sequence[fs.BytesLike], *, size: int | None = None) -> None:
        """A whole file, of ``size`` bytes when the parts are fewer."""
        if self.private and not os.path.lexists(path):
            self.create(str(path), parts, size=size)
            return
        self._make_folder(path.parent)
        partial, file = fs.open_partial(path)
        try:
            offset = 0
            for part in parts:
                fs.write_at(file, part, offset)
                offset += memoryview(part).nbytes
            if size is not None and size > offset:
                fs.set_size(file, size)
            fs.start_writeback(file)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                fs.remove_file(partial)
            raise
        if self.at_once:
            file.close()
            fs.rename(partial, path)
            return
        with self._lock:
            before = self._entries.pop(path, None)
            self._entries[path] = _Entry(partial, file, self.phase)
        if before is not None:
            self._discard({path: before})
        self._bound()

    def create(self, name: str, parts: Sequence[fs.BytesLike], *, size: int | None = None) -> None:
        """As `put`, in a private folder, for a file that is not there yet."""
        folder = name.rpartition("/")[0]
        if folder not in self._folder_names:
            fs.make_folder(folder)
            with self._lock:
                while folder not in self._folder_names:
                    self._folder_names.add(folder)
                    folder = folder.rpartition("/")[0]
        fs.create(name, parts, size)
        self._names.append(name)

    def force(self) -> None:
        """Force all that was created to the medium."""
        fs.fsync_names(self._names, sorted(self._folder_names))

    def patch(self, path: Path, offset: int, data: fs.BytesLike, *, size: int) -> None:
        """Bytes in place, in a file of ``size`` bytes; they must be nobody's yet.

        Raises
        ------
        FileNotFoundError
        EOFError
            The file has another size.
        """
        entry = self._entries.get(path)
        if entry is not None and entry.file is not None:
            fs.write_at(entry.file, data, offset)
            return
        target = path if entry is None or entry.partial is None else entry.partial
        file = fs.open_existing(target)
        try:
            if fs.size_of(file) != size:
                raise EOFError(f"{fs.size_of(file)} bytes, {size} expected")
            fs.write_at(file, data, offset)
            fs.start_writeback(file)
        except BaseException:
            file.close()
            raise
        if self.at_once:
            file.close()
            return
        with self._lock:
            if entry is not None:
                entry.file = file
            else:
                self._entries[path] = _Entry(None, file, self.phase)
        self._bound()

    def barrier(self) -> None:
        """What is staged from now on takes its place after all that was before."""
        self.phase += 1

    def land(self) -> None:
        """Force everything to the medium, and rename phase by phase.

        With several threads, what one of them staged has landed when its own call
        returns, whoever of them landed it.
        """
        with self._landing:
            self._land()

    def _land(self) -> None:
        with self._lock:
            entries, self._entries = self._entries, {}
        replaced: list[int | None] = []
        try:
            _all(_Entry.force, list(entries.values()))
            by_phase: dict[int, list[tuple[Path, Path]]] = {}
            for path, entry in entries.items():
                if entry.partial is not None:
                    by_phase.setdefault(entry.phase, []).append((entry.partial, path))
            for phase in sorted(by_phase):
                for partial, path in by_phase[phase]:
                    replaced.append(fs.hold(path))
                    fs.rename(partial, path)
                _all(fs.fsync_dir, sorted(self._to_force(path for _, path in by_phase[phase])))
        except BaseException:
            self._discard(entries)
            raise
        finally:
            # To give back the blocks of a replaced file takes longer than all else
            # here, and nobody has to wait for it.
            submit(fs.release, [fd for fd in replaced if fd is not None])
        self.phase = 0

    def _to_force(self, paths: Iterable[Path]) -> set[Path]:
        """Folders of these files, and those above the ones that were just made."""
        folders: set[Path] = set()
        for path in paths:
            folder = path.parent
            folders.add(folder)
            while folder in self._made and folder != self.root:
                self._made.discard(folder)
                folder = folder.parent
                folders.add(folder)
        return folders

    def drop(self) -> None:
        """Forget everything that has not landed."""
        entries, self._entries = self._entries, {}
        self.phase = 0
        self._discard(entries)

    @staticmethod
    def _discard(entries: dict[Path, _Entry]) -> None:
        for entry in entries.values():
            if entry.file is not None:
                entry.file.close()
            if entry.partial is not None:
                with contextlib.suppress(OSError):
                    fs.remove_file(entry.partial)

    def _bound(self) -> None:
        with self._lock:
            opened = [e for e in self._entries.values() if e.file is not None]
            excess = opened[: max(0, len(opened) - self.most_open)]
        for entry in excess:
            entry.force()

    def _make_folder(self, folder: Path) -> None:
        if folder in self._folders:
            return
        missing = folder
        made = []
        while not missing.is_dir():
            made.append(missing)
            missing = missing.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._made.update(made)
        self._folders.add(folder)

    def forget_folder(self, folder: Path) -> None:
        """A folder was removed: it has to be made again."""
        self._folders = {f for f in self._folders if folder not in (f, *f.parents)}
        with self._lock:
            gone = [p for p in self._entries if folder in p.parents]
            self._discard({p: self._entries.pop(p) for p in gone})
            whole, below = str(folder), f"{folder}/"
            self._names = [n for n in self._names if not n.startswith(below)]
            self._folder_names = {
                n for n in self._folder_names if n != whole and not n.startswith(below)
            }

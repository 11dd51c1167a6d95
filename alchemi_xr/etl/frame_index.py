"""Where the frames of an XYZ file begin, and which are broken.

One pass over the bytes in windows of bounded size; only count lines and
comment lines are looked at, atom lines are skipped by counting newlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

__all__ = ["Frame", "IndexFault", "iter_frames"]

WINDOW = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Frame:
    """Byte range and counts of a frame; ``offset`` is where its count line begins."""

    number: int
    offset: int
    stop: int
    line: int
    atoms: int


@dataclass(frozen=True, slots=True)
class IndexFault:
    """A place where no whole frame stands."""

    number: int
    offset: int
    line: int
    reason: str
    field: str = ""


class _Window:
    """Some bytes of the file and where their lines lie."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.base = 0
        self.first_line = 1
        self.data = b""
        self.at_end = False
        self._lay(b"")

    def _lay(self, data: bytes) -> None:
        self.data = data
        ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)
        self.ends: list[int] = ends.tolist()
        if self.at_end and (not self.ends or self.ends[-1] != len(data) - 1) and data:
            self.ends.append(len(data))
        self.lines = len(self.ends)

    def more(self, keep_from_line: int) -> None:
        """Drop the lines before one and read on (twice as much for a long frame)."""
        start = self.start(keep_from_line)
        kept = self.data[start:]
        block = self._file.read(max(self._size, len(kept)))
        self.at_end = not block
        self.base += start
        self.first_line += keep_from_line
        self._lay(kept + block)

    def start(self, line: int) -> int:
        return 0 if line == 0 else min(self.ends[line - 1] + 1, len(self.data))

    def text(self, line: int) -> bytes:
        return self.data[self.start(line) : self.ends[line]].strip()


def iter_frames(
    path: str | Path,
    comment: Callable[[Frame, str], IndexFault | None],
    *,
    window: int = WINDOW,
) -> Iterator[Frame | IndexFault]:
    """Every whole frame and every fault of a file, in order.

    Parameters
    ----------
    path : str or Path
    comment : callable
        Looks at each frame's comment line; a fault it gives rejects the frame.
    window : int
        Bytes read at a time.
    """
    with open(path, "rb", buffering=0) as file:
        total = Path(path).stat().st_size
        yield from _walk(_Window(file, window), total, comment)


def _walk(
    view: _Window, total: int, comment: Callable[[Frame, str], IndexFault | None]
) -> Iterator[Frame | IndexFault]:
    line = number = 0
    searching = False  # the frame here is rejected already; the next good one is sought
    view.more(0)
    if view.data.startswith(b"\xef\xbb\xbf"):
        view.data = b"   " + view.data[3:]
    while True:
        if line >= view.lines:
            if view.at_end:
                return
            view.more(line)
            line = 0
            continue
        head = view.text(line)
        if not head:
            line += 1
            continue
        place = (view.base + view.start(line), view.first_line + line)
        if not head.isdigit() or len(head) > 18:
            if not searching:
                found = head[:40].decode("utf-8", "replace")
                yield IndexFault(number, *place, f"found {found!r}, expected an atom count")
                searching, number = True, number + 1
            line += 1
            continue
        atoms = int(head)
        last = line + 2 + atoms
        # An atom line is never shorter than "H 0 0 0"; a count beyond that cannot be met.
        impossible = atoms * 7 > total - place[0]
        if not impossible and last >= view.lines and not view.at_end:
            view.more(line)
            line = 0
            continue
        if impossible or last > view.lines:
            if searching:
                line += 1
                continue
            yield IndexFault(number, *place, f"file ends inside frame {number} ({atoms} atoms)")
            searching, number = True, number + 1
            line += 1
            continue
        if last < view.lines:
            after = view.text(last)
            if after and not after.isdigit():
                if not searching:
                    found = after[:40].decode("utf-8", "replace")
                    yield IndexFault(
                        number,
                        *place,
                        f"says {atoms} atoms, but line {view.first_line + last} holds {found!r}, "
                        "expected the next atom count",
                    )
                    searching, number = True, number + 1
                line += 1
                continue
        searching = False
        stop = view.base + view.start(last)
        frame = Frame(number, place[0], stop, place[1], atoms)
        fault = comment(frame, view.text(line + 1).decode("utf-8", "replace"))
        yield frame if fault is None else fault
        number += 1
        line = last

"""Where the frames of an XYZ file begin, and which are broken.

One pass over the bytes in windows of bounded size; only count lines and
comment lines are looked at, atom lines are skipped by counting newlines. Good
frames come in batches; at anything else the file is walked line by line until the
next good frame.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.native.text import ATOMS, LINE, OFFSET, STOP, find_frames

__all__ = ["Batch", "Frame", "IndexFault", "index_text", "iter_batches"]

WINDOW = 2 * 2**20
#: Bytes that are first looked at where no good frame begins.
_STEP = 64 * 2**10


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


@dataclass(frozen=True, slots=True)
class Batch:
    """Good frames that stand one after the other.

    Parameters
    ----------
    text : bytes
    frames : int64 array, shape (n, 7)
        Of :func:`~alchemi_xr.native.text.find_frames`, in the text.
    number : int
        Of the first frame.
    offset, line : int
        Where the text begins in the file; its first line's number.
    """

    text: bytes
    frames: NDArray
    number: int
    offset: int
    line: int

    def frame(self, i: int) -> Frame:
        """One of them, in terms of the file."""
        row = self.frames[i]
        return Frame(
            self.number + i,
            self.offset + int(row[OFFSET]),
            self.offset + int(row[STOP]),
            self.line + int(row[LINE]),
            int(row[ATOMS]),
        )


class _Window:
    """Some bytes of the file and where their lines lie."""

    def __init__(self, file: IO[bytes], size: int, base: int = 0, first_line: int = 1) -> None:
        self._file, self._size = file, size
        self.base = base
        self.first_line = first_line
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


def iter_batches(
    path: str | Path,
    comment: Callable[[Frame, str], IndexFault | None],
    *,
    window: int = WINDOW,
) -> Iterator[Batch | Frame | IndexFault]:
    """Every frame and every fault of a file, in order.

    Parameters
    ----------
    path : str or Path
    comment : callable
        Looks at the comment line of each frame that is not in a batch; a fault it
        gives rejects the frame.
    window : int
        Bytes read at a time.
    """
    total = Path(path).stat().st_size
    with open(path, "rb", buffering=0) as file:
        text = b""
        # Of the text: where it begins in the file, and how far it is done.
        base, at = 0, 0
        number, line = 0, 1
        ended = False
        while True:
            if len(text) - at < window and not ended:
                block = file.read(window)
                ended = not block
                text, base, at = text[at:] + block, base + at, 0
            if base == 0 and text.startswith(_BOM):
                text = b"   " + text[3:]
            frames, passed, lines = find_frames(text, at, at_end=ended)
            if len(frames):
                yield Batch(text, frames, number, base, line)
            at, line, number = passed, line + lines, number + len(frames)
            if ended and _REST.match(text, at):
                return
            if len(text) - at < window and not ended:
                continue
            # No whole good frame begins here: one that is longer than this, or a fault.
            file.seek(base + at)
            good = None
            view = _Window(file, min(window, _STEP), base + at, line)
            for item in _walk(view, total, comment, number):
                yield item
                if isinstance(item, Frame):
                    good = item
                    break
            if good is None:
                return
            # What is read already stays: a file may have a fault in every other frame.
            at = good.stop - base
            if at > len(text):
                text, base, at, ended = b"", good.stop, 0, False
            number, line = good.number + 1, good.line + 2 + good.atoms
            file.seek(base + len(text))


_REST = re.compile(rb"\s*\Z")
_BOM = b"\xef\xbb\xbf"


def index_text(text: bytes) -> NDArray | None:
    """The frames of a text that holds whole good frames, as a scan found them, and nothing else.

    Returns
    -------
    int64 array, shape (n, 7), or None
        As :func:`~alchemi_xr.native.text.find_frames` gives them; None when the text
        holds something else.
    """
    frames, passed, _ = find_frames(text, 0, at_end=True)
    if not text[passed:].strip():
        return frames
    rows = []
    # Whether there was room for so many atoms, the scan has seen in the whole file.
    for item in _walk(_Window(BytesIO(text), len(text) + 1), sys.maxsize, lambda *_: None):
        if isinstance(item, IndexFault):
            return None
        begin = text.index(b"\n", item.offset) + 1
        stop = text.find(b"\n", begin)
        stop = len(text) if stop < 0 else stop
        comment = text[begin:stop]
        left = begin + len(comment) - len(comment.lstrip())
        right = max(left, begin + len(comment.rstrip()))
        body = min(stop + 1, len(text))
        rows.append((item.offset, item.line - 1, left, right, body, item.stop, item.atoms))
    return np.array(rows, dtype=np.int64).reshape(-1, 7)


def _walk(
    view: _Window,
    total: int,
    comment: Callable[[Frame, str], IndexFault | None],
    number: int = 0,
) -> Iterator[Frame | IndexFault]:
    line = 0
    searching = False  # the frame here is rejected already; the next good one is sought
    view.more(0)
    if view.base == 0 and view.data.startswith(_BOM):
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
            if after and not after.isdigit() and not _is_whole(view, line, last):
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


def _is_whole(view: _Window, line: int, last: int) -> bool:
    """Whether a frame is right and what follows it is wrong: a line that is no count.

    Where the count is too small, that line is one more atom; where it is too large,
    the frame's own last line is no atom, or the line after it is one.
    """
    following = len(view.text(last).split())
    if last == line + 2:
        return following < 4
    first = len(view.text(line + 2).split())
    return len(view.text(last - 1).split()) == first != following and first >= 4

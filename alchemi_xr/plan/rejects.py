"""Records that could not be taken, each with its place and its reason."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from alchemi_xr.errors import SourceError

__all__ = ["Quarantine", "Reject"]


@dataclass(frozen=True, slots=True)
class Reject:
    """One record of an input that was set aside.

    Parameters
    ----------
    file : str
        As the user named it.
    frame : int
        Number of the record in its file, from 0 (a row id for a database); -1
        for the file as a whole.
    reason : str
    offset : int, optional
        Byte at which the record starts.
    line : int, optional
        Line at which it starts, from 1.
    field : str
        The field concerned, empty when it is the record as a whole.
    sample : int, optional
        Its place in the store, where it stands as a deleted sample; None when
        it was found before the offsets were fixed and has no rows at all.
    """

    file: str
    frame: int
    reason: str
    offset: int | None = None
    line: int | None = None
    field: str = ""
    sample: int | None = None

    def error(self) -> SourceError:
        """The same thing as an exception, for ``on_error="raise"``."""
        place = self.file if self.frame < 0 else f"{self.file}, frame {self.frame}"
        details = []
        if self.line is not None:
            details.append(f"line {self.line}")
        if self.offset is not None:
            details.append(f"byte {self.offset}")
        if details:
            place += f" ({', '.join(details)})"
        what = f"field {self.field!r}: {self.reason}" if self.field else self.reason
        return SourceError(
            place,
            what,
            mend='correct the frame, or on_error="quarantine" (--on-error quarantine) to set it '
            "aside in rejects.jsonl and go on",
        )

    def to_json(self) -> str:
        """One line of ``rejects.jsonl``."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, sort_keys=True)

    @staticmethod
    def from_json(line: str) -> Reject:
        """The reject of one line."""
        return Reject(**json.loads(line))


class Quarantine:
    """The file ``rejects.jsonl``: written whole, in the order of the input.

    Parameters
    ----------
    path : str or Path
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, rejects: Iterable[Reject]) -> int:
        """Replace the file by these rejects; without any, no file is left."""
        lines = [reject.to_json() for reject in rejects]
        if not lines:
            self.path.unlink(missing_ok=True)
            return 0
        partial = self.path.with_name(self.path.name + ".partial")
        text = "\n".join(lines) + "\n"
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, self.path)
        return len(lines)

    def read(self) -> list[Reject]:
        """All rejects of the file, none when it is not there."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [Reject.from_json(line) for line in text.split("\n") if line]

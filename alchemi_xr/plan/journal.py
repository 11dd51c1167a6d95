"""Which parts of a bulk job are done, so that it can be taken up again.

One line a finished shard or extent, appended by the driver after the worker
reported; a line cut off by a crash is ignored, its task is done again and
writes the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import IO, Any

from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartStats

__all__ = ["Journal"]


class Journal:
    """The journal of one job.

    Parameters
    ----------
    path : str or Path
    fingerprint : str
        Of the plan; a journal of another plan is not read but replaced.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str) -> None:
        self.path = Path(path)
        self.fingerprint = fingerprint
        self.shards: set[int] = set()
        self.extents: dict[int, PartStats] = {}
        self._file: IO[str] | None = None

    def open(self) -> Journal:
        """Read what is there, drop a torn last line, and be ready to append."""
        whole = self._read()
        mode = "a" if whole else "w"
        self._file = self.path.open(mode, encoding="utf-8")
        if not whole:
            self._append({"plan": self.fingerprint})
        return self

    def __enter__(self) -> Journal:
        return self if self._file is not None else self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def resumed(self) -> bool:
        """Whether anything was done before."""
        return bool(self.shards or self.extents)

    def shard_done(self, number: int) -> None:
        """Record a written shard."""
        self.shards.add(number)
        self._append({"shard": number})

    def extent_done(self, number: int, stats: PartStats) -> None:
        """Record what a read extent had to say."""
        self.extents[number] = stats
        self._append({"extent": number, **dataclasses.asdict(stats)})

    def close(self) -> None:
        """Close the file; what was recorded stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "the journal is not open"
        # ASCII: names of files may have bytes that are no text, and have to come back as they were.
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _read(self) -> bool:
        """Take in the records of an earlier run; False when there is none to use."""
        if not self.path.exists():
            return False
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        # Not splitlines: reasons quote files, which may hold any separator.
        lines = whole.decode("utf-8").split("\n")[:-1]
        if not lines or json.loads(lines[0]) != {"plan": self.fingerprint}:
            return False
        for line in lines[1:]:
            record = json.loads(line)
            if "shard" in record:
                self.shards.add(record["shard"])
            else:
                self.extents[record["extent"]] = PartStats(
                    [Reject(**r) for r in record["rejects"]],
                    record["notes"],
                    record["fields"],
                    record["nonfinite_samples"],
                    record.get("left_out", []),
                    record.get("undecided", []),
                )
        if len(whole) < len(text):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return True

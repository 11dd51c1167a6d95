"""Live progress: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol, TextIO

from alchemi_xr.config import option

__all__ = ["LogProgress", "NoProgress", "Progress", "RichProgress", "open_progress"]


class Progress(Protocol):
    """What a long job calls as it goes."""

    def start(self, title: str, total: int | None, unit: str) -> None: ...

    def advance(self, count: int = 1, note: str = "") -> None: ...

    def __enter__(self) -> Progress: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class NoProgress:
    """Says nothing."""

    def start(self, title: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, count: int = 1, note: str = "") -> None:
        pass

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class LogProgress:
    """A line every few seconds and one at the end of each phase.

    Parameters
    ----------
    stream : text file
    every : float
        Seconds between lines.
    """

    def __init__(self, stream: TextIO | None = None, *, every: float = 5.0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._every = every
        self._title, self._unit, self._note = "", "", ""
        self._total: int | None = None
        self._done = 0
        self._begun = self._said = time.monotonic()

    def start(self, title: str, total: int | None, unit: str) -> None:
        self._end()
        self._title, self._total, self._unit, self._done = title, total, unit, 0
        self._begun = self._said = time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        self._note = note or self._note
        if time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            self._say()

    def __enter__(self) -> LogProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._title:
            self._say()
        self._title = ""

    def _say(self) -> None:
        passed = max(time.monotonic() - self._begun, 1e-9)
        rate = self._done / passed
        text = f"{self._title}: {self._done:,}"
        if self._total:
            text += f"/{self._total:,}"
        text += f" {self._unit}, {passed:.1f} s, {rate:,.0f} {self._unit}/s"
        if self._total and self._done and self._done < self._total:
            text += f", {(self._total - self._done) / rate:.0f} s left"
        if self._note:
            text += f", {self._note}"
        print(text, file=self._stream, flush=True)


class RichProgress:
    """A bar with rate and time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._task: Any = None
        self._begun = 0.0
        self._done = 0
        self._unit = ""

    def start(self, title: str, total: int | None, unit: str) -> None:
        self._begun, self._done, self._unit = time.monotonic(), 0, unit
        self._task = self._bars.add_task(title, total=total, unit=unit, rate="", note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        rate = self._done / max(time.monotonic() - self._begun, 1e-9)
        fields = {"rate": f"{rate:,.0f} {self._unit}/s"}
        if note:
            fields["note"] = note
        self._bars.update(self._task, advance=count, **fields)  # type: ignore[arg-type]

    def __enter__(self) -> RichProgress:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()


def open_progress(progress: bool | Progress = True) -> Progress:
    """A progress display: the one given, none, or what the options and the terminal ask for."""
    if not isinstance(progress, bool):
        return progress
    mode = option("progress") if progress else "off"
    if mode == "off":
        return NoProgress()
    if mode == "bar" or (mode == "auto" and sys.stderr.isatty()):
        return RichProgress()
    return LogProgress()

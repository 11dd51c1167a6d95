"""What a campaign does next: events in, instructions out, nothing else touched.

No file, clock, process or network is seen here, so every course of a campaign
(a worker that dies, a unit that kills each worker it meets, too many failures)
is a plain assertion in the tests. ``driver`` turns instructions into tasks and
their ends into events.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.errors import CampaignError, ConfigError

__all__ = [
    "Abort",
    "CampaignState",
    "Event",
    "Fatal",
    "Finish",
    "Instruction",
    "LimitHit",
    "Reject",
    "SlotsChanged",
    "Submit",
    "Unit",
    "UnitDone",
    "UnitFailed",
    "UnitState",
    "as_ranges",
    "failure_limit",
    "plan_units",
]


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples that are computed and committed together.

    Parameters
    ----------
    key : str
        Name of the unit, unique in its campaign; also the name of its folder.
    ranges : tuple of (int, int)
        Half-open ranges of sample numbers, ascending and disjoint.
    """

    key: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(stop - start for start, stop in self.ranges)

    def samples(self) -> IntArray:
        """Sample numbers, int64 [n], ascending."""
        if not self.ranges:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in self.ranges])

    def split(self) -> tuple[Unit, Unit]:
        """Two units of half the samples each.

        Examples
        --------
        >>> Unit("0", ((0, 2), (5, 6))).split()
        (Unit(key='0.a', ranges=((0, 1),)), Unit(key='0.b', ranges=((1, 2), (5, 6))))
        """
        if self.size < 2:
            raise CampaignError(f"unit {self.key}", "one sample cannot be split")
        samples = self.samples()
        half = len(samples) // 2
        return (
            Unit(f"{self.key}.a", as_ranges(samples[:half])),
            Unit(f"{self.key}.b", as_ranges(samples[half:])),
        )


def as_ranges(samples: IntArray) -> tuple[tuple[int, int], ...]:
    """Ascending sample numbers as half-open ranges.

    Examples
    --------
    >>> as_ranges(np.array([0, 1, 2, 7]))
    ((0, 3), (7, 8))
    """
    if len(samples) == 0:
        return ()
    breaks = np.flatnonzero(np.diff(samples) != 1)
    firsts = samples[np.concatenate(([0], breaks + 1))]
    lasts = samples[np.concatenate((breaks, [len(samples) - 1]))]
    return tuple((int(a), int(b) + 1) for a, b in zip(firsts, lasts, strict=True))


def plan_units(missing: IntArray, unit_size: int, *, run: int = 0) -> list[Unit]:
    """Units over the samples that are still missing, in order.

    Parameters
    ----------
    missing : int64 array, [M]
        Ascending sample numbers.
    unit_size : int
        Most samples of a unit.
    run : int
        Which start of the campaign this is; part of the keys, so that a unit
        planned now never has the name of one planned before a stop.
    """
    if unit_size < 1:
        raise ConfigError("unit_size", "a unit needs a sample", found=unit_size, expected=">= 1")
    cuts = range(0, len(missing), unit_size)
    return [
        Unit(f"{run:03d}-{number:06d}", as_ranges(missing[cut : cut + unit_size]))
        for number, cut in enumerate(cuts)
    ]


def failure_limit(max_failures: float | int | None, total: int) -> int | None:
    """Most samples that may fail; None is no limit.

    A float is a part of all samples (rounded up, so that a small campaign may
    have one failure), an int a number of samples.

    Examples
    --------
    >>> failure_limit(0.1, 200), failure_limit(0.1, 3), failure_limit(5, 200)
    (20, 1, 5)
    """
    if max_failures is None:
        return None
    number = isinstance(max_failures, (int, float)) and not isinstance(max_failures, bool)
    if not number or not max_failures >= 0:
        raise ConfigError(
            "max_failures", "wrong value", found=max_failures, expected="0.0 to 1.0, or a count"
        )
    if isinstance(max_failures, int):
        return max_failures
    if max_failures > 1.0:
        raise ConfigError(
            "max_failures",
            "a part of all samples is at most 1.0",
            found=max_failures,
            mend="give a whole number to mean a count of samples",
        )
    return None if max_failures == 1.0 else math.ceil(max_failures * total)


class UnitState(StrEnum):
    """Where a unit is. ``SPLIT`` lives on in two others."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    SPLIT = "split"
    REJECTED = "rejected"


# Events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitDone:
    """A unit is committed."""

    key: str
    finished: int
    rejected: int


@dataclass(frozen=True, slots=True)
class UnitFailed:
    """A unit came to nothing: its worker died, or something broke around it.

    ``begun`` is False for a task that only waited on a worker that died; it is
    not that task's fault and counts no attempt. ``broken`` says that the worker
    lives and failed outside of any system (a full disk, a source that is gone):
    no sample is ever blamed for that.
    """

    key: str
    reason: str
    traceback: str = ""
    begun: bool = True
    broken: bool = False


@dataclass(frozen=True, slots=True)
class LimitHit:
    """A worker stopped inside a unit because its failures passed the limit."""

    key: str
    rejected: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fatal:
    """Something that no retry mends: the stages cannot be built, no worker is left."""

    reason: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class SlotsChanged:
    """So many units can run at once from now on."""

    slots: int


Event: TypeAlias = UnitDone | UnitFailed | LimitHit | Fatal | SlotsChanged

# Instructions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this unit.

    ``scale`` shrinks the batch (1, 1/2, 1/4 ...): a worker that died may have
    run out of memory. ``budget`` is how many more samples may fail (None: any).
    """

    unit: Unit
    attempt: int
    scale: float
    budget: int | None


@dataclass(frozen=True, slots=True)
class Reject:
    """Commit this unit with every sample rejected."""

    unit: Unit
    reason: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop now; nothing that runs matters any more."""

    reason: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """Every sample is finished or rejected."""


Instruction: TypeAlias = Submit | Reject | Abort | Finish


class CampaignState:
    """State of all units.

    Parameters
    ----------
    units : iterable of Unit
        What is to be computed now.
    total : int
        Samples of the whole campaign, those of earlier starts included.
    slots : int
        Units that may run at once.
    finished, rejected : int
        Samples settled by earlier starts.
    limit : int, optional
        Most samples that may fail.
    max_attempts : int
        How often a unit may lose its worker before it is split, and a sample
        alone before it is rejected.
    """

    #: A task lost before it began costs no attempt, but not for ever: a worker
    #: that cannot even start would make an endless loop.
    MAX_UNBEGUN = 10

    def __init__(
        self,
        units: Iterable[Unit],
        *,
        total: int,
        slots: int = 1,
        finished: int = 0,
        rejected: int = 0,
        limit: int | None = None,
        max_attempts: int = 2,
    ) -> None:
        if max_attempts < 1:
            raise ConfigError("max_attempts", "too small", found=max_attempts, expected=">= 1")
        self.total = total
        self.slots = slots
        self.finished = finished
        self.rejected = rejected
        self.limit = limit
        self.max_attempts = max_attempts
        self.states: dict[str, UnitState] = {}
        self.running: dict[str, Unit] = {}
        self.attempts: dict[str, int] = {}
        self.stopped = False
        self.lost = 0
        self._unbegun: dict[str, int] = {}
        self._waiting: deque[Unit] = deque()
        for unit in units:
            self._wait(unit)

    @property
    def waiting(self) -> int:
        """Units not given out yet."""
        return len(self._waiting)

    @property
    def budget(self) -> int | None:
        """Samples that may still fail; None is any number."""
        return None if self.limit is None else self.limit - self.rejected

    def start(self) -> list[Instruction]:
        """The first instructions."""
        return self._next()

    def handle(self, event: Event) -> list[Instruction]:
        """Instructions that follow from an event.

        After an ``Abort`` nothing is given out and late events are ignored.
        """
        if self.stopped:
            return []
        match event:
            case UnitDone():
                instructions = list(self._done(event))
            case UnitFailed():
                instructions = list(self._failed(event))
            case LimitHit():
                self.rejected += event.rejected
                instructions = [self._over_limit(event.reason)]
            case Fatal():
                instructions = [Abort(event.reason, event.traceback)]
            case SlotsChanged():
                self.slots = event.slots
                instructions = []
        if any(isinstance(i, Abort) for i in instructions):
            self.stopped = True
            return instructions
        return instructions + self._next()

    def _wait(self, unit: Unit, *, first: bool = False) -> None:
        self.states[unit.key] = UnitState.WAITING
        if first:
            self._waiting.appendleft(unit)
        else:
            self._waiting.append(unit)

    def _leave(self, key: str) -> Unit | None:
        # Dask may tell the end of a task twice (a lost worker that was only
        # slow); the second time the unit no longer runs.
        return self.running.pop(key, None)

    def _done(self, event: UnitDone) -> Iterator[Instruction]:
        if self._leave(event.key) is None:
            return
        self.states[event.key] = UnitState.DONE
        self.finished += event.finished
        self.rejected += event.rejected
        if self.limit is not None and self.rejected > self.limit:
            yield self._over_limit("")

    def _failed(self, event: UnitFailed) -> Iterator[Instruction]:
        unit = self._leave(event.key)
        if unit is None:
            return
        self.lost += 1
        if not event.begun:
            self._unbegun[unit.key] = self._unbegun.get(unit.key, 0) + 1
            if self._unbegun[unit.key] < self.MAX_UNBEGUN:
                self._wait(unit, first=True)
                return
            yield Abort(
                f"no worker lives long enough to begin unit {unit.key} ({event.reason})",
                event.traceback,
            )
            return
        self.attempts[unit.key] = self.attempts.get(unit.key, 0) + 1
        if self.attempts[unit.key] < self.max_attempts:
            self._wait(unit, first=True)
        elif event.broken:
            yield Abort(f"unit {unit.key} cannot be run: {event.reason}", event.traceback)
        elif unit.size > 1:
            self.states[unit.key] = UnitState.SPLIT
            for half in reversed(unit.split()):
                # A half of a unit that was tried often enough is split at its
                # next loss: log2(size) more workers lost, not times attempts.
                # One sample alone has all its attempts, for it is rejected next.
                self.attempts[half.key] = self.max_attempts - 1 if half.size > 1 else 0
                self._wait(half, first=True)
        else:
            self.states[unit.key] = UnitState.REJECTED
            self.rejected += 1
            yield Reject(unit, event.reason, event.traceback)
            if self.limit is not None and self.rejected > self.limit:
                yield self._over_limit(event.reason)

    def _over_limit(self, reason: str) -> Abort:
        text = f"{self.rejected} of {self.total} samples failed, more than max_failures allows"
        text += f" ({self.limit})"
        return Abort(f"{text}; the last: {reason}" if reason else text)

    def _next(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._waiting and len(self.running) < self.slots:
            unit = self._waiting.popleft()
            self.states[unit.key] = UnitState.RUNNING
            self.running[unit.key] = unit
            attempt = self.attempts.get(unit.key, 0)
            instructions.append(Submit(unit, attempt, 0.5**attempt, self.budget))
        if not self._waiting and not self.running:
            self.stopped = True
            instructions.append(Finish())
        return instructions

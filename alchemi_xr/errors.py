"""The one family of errors that users see.

Each error says where it happened, what it concerns, what was found, what was
expected, and how to mend it; each is also the builtin exception that a reader
would catch, and survives pickling (it may be raised on a Dask worker).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "AlchemiError",
    "ArgumentTypeError",
    "CampaignError",
    "ConfigError",
    "ConvergenceError",
    "CorruptStoreError",
    "DynamicsError",
    "FieldError",
    "IndexRangeError",
    "LevelError",
    "MissingChunkError",
    "ModelError",
    "NotAStoreError",
    "OptionalDependencyError",
    "PlanError",
    "SourceError",
    "SourceNotFoundError",
    "StaleSnapshotError",
    "StoreClosedError",
    "StoreConflictError",
    "StoreError",
    "StoreExistsError",
    "StoreLockedError",
    "StoreNotFoundError",
    "StoreVersionError",
    "TransformError",
    "UnknownFieldError",
    "WorkerError",
    "nearest",
]


class AlchemiError(Exception):
    """An error with its place, its cause and its mend.

    Parameters
    ----------
    where : str
        File, store, object or call that the error concerns.
    what : str
        What is wrong, naming the field, sample or record.
    found, expected : object, optional
        What was there and what should have been.
    mend : str, optional
        What the user can do.
    message : str, optional
        The whole text, instead of ``what``: torch's loader makes an error of a worker
        process again with it, for classes that have a ``message``.
    """

    def __init__(
        self,
        where: str = "",
        what: str = "",
        *,
        found: object | None = None,
        expected: object | None = None,
        mend: str | None = None,
        message: str | None = None,
    ) -> None:
        if message is not None:
            what = message
        self.where = str(where)
        self.what = what
        self.found = found
        self.expected = expected
        self.mend = mend
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The whole text: one line of facts, one line of mend."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        facts = []
        if self.found is not None:
            facts.append(f"found {self.found}")
        if self.expected is not None:
            facts.append(f"expected {self.expected}")
        if facts:
            text += ": " + ", ".join(facts)
        if not text.endswith((".", "?", "!")):
            text += "."
        if self.mend:
            text += f"\n  Mend: {self.mend}"
        return text

    def __str__(self) -> str:
        # KeyError (a base of some children) would print the repr.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        state = {
            "where": self.where,
            "what": self.what,
            "found": None if self.found is None else str(self.found),
            "expected": None if self.expected is None else str(self.expected),
            "mend": self.mend,
        }
        return (_rebuild, (type(self), state))


def _rebuild(cls: type[AlchemiError], state: dict[str, Any]) -> AlchemiError:
    return cls(
        state["where"],
        state["what"],
        found=state["found"],
        expected=state["expected"],
        mend=state["mend"],
    )


class FieldError(AlchemiError, ValueError):
    """A field has the wrong shape, dtype, length or value."""


class LevelError(AlchemiError, ValueError):
    """A level is none of atom, edge, system (or their accepted spellings)."""


class UnknownFieldError(AlchemiError, KeyError, AttributeError):
    """A field is not there; the message names the nearest that are."""


class IndexRangeError(AlchemiError, IndexError):
    """A sample index is outside the range, or of the wrong kind."""


class ConfigError(AlchemiError, ValueError):
    """An option has a name or value that is not understood."""


class ArgumentTypeError(AlchemiError, TypeError):
    """An argument is of the wrong kind (no reader, no sequence, not callable)."""


class TransformError(AlchemiError, RuntimeError):
    """A transform failed, or gave nothing usable back."""


class WorkerError(AlchemiError, RuntimeError):
    """A worker process of a loader died, or raised what cannot be sent."""


class OptionalDependencyError(AlchemiError, ImportError):
    """A package of an optional extra is missing; the message names the extra."""


class StoreError(AlchemiError, RuntimeError):
    """Something about a store on disk."""


class StoreNotFoundError(AlchemiError, FileNotFoundError):
    """No store at this path."""


class NotAStoreError(AlchemiError, ValueError):
    """The path exists but is no alchemi_xr store."""


class StoreExistsError(AlchemiError, FileExistsError):
    """The destination exists already."""


class StoreLockedError(StoreError):
    """Another writer holds the lease; the message names it."""


class StoreConflictError(StoreError):
    """Another writer committed to an Icechunk repository in between."""


class StoreClosedError(StoreError):
    """The reader or writer was closed."""


class StoreVersionError(StoreError):
    """The store was written by a newer format version."""


class StaleSnapshotError(StoreError):
    """A reader's generation is no longer on disk."""


class CorruptStoreError(StoreError):
    """The arrays of a store contradict one another."""


class MissingChunkError(CorruptStoreError):
    """Committed rows lie in a chunk that is not there."""


class SourceError(AlchemiError, ValueError):
    """An input file or one of its records cannot be read."""


class SourceNotFoundError(AlchemiError, FileNotFoundError):
    """An input path does not exist."""


class PlanError(AlchemiError, ValueError):
    """A bulk job cannot be done as asked (memory, alignment, sizes)."""


class ModelError(AlchemiError, RuntimeError):
    """A model lacks an input or output, or its calculator failed."""


class DynamicsError(AlchemiError, RuntimeError):
    """A simulation cannot be set up or go on."""


class ConvergenceError(DynamicsError):
    """A convergence criterion cannot be evaluated."""


class CampaignError(AlchemiError, RuntimeError):
    """A campaign cannot start, or stopped at its failure limit."""


def nearest(name: str, names: Iterable[str], *, n: int = 3) -> str:
    """Text that offers the names nearest to a wrong one, or all when few.

    Examples
    --------
    >>> nearest("force", ["forces", "energy"])
    "Nearest: 'forces'"
    """
    known = sorted(set(names))
    close = difflib.get_close_matches(name, known, n=n, cutoff=0.6)
    if close:
        return "Nearest: " + ", ".join(repr(c) for c in close)
    if known:
        return "There are: " + ", ".join(repr(k) for k in known[:20])
    return "There are none"

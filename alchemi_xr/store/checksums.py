"""Decodes every chunk of a store, several at once, and names those that are damaged."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from alchemi_xr.errors import AlchemiError
from alchemi_xr.store.commit import Session
from alchemi_xr.store.direct import DirectArray
from alchemi_xr.store.reader import Snapshot
from alchemi_xr.store.recover import committed_lengths
from alchemi_xr.store.report import Report

__all__ = ["check_chunks"]

_THREADS = max(1, min(8, os.cpu_count() or 1))
# Chunks handed out and not yet looked at: the memory of the check.
_IN_FLIGHT = 2 * _THREADS


def check_chunks(snapshot: Snapshot, session: Session, report: Report) -> None:
    """Add a problem for each chunk of committed rows that cannot be decoded.

    A chunk that is missing is the business of another check.
    """
    unguarded: set[str] = set()
    running: deque[Future[str | None]] = deque()

    def settle(most: int) -> None:
        while len(running) > most:
            found = running.popleft().result()
            if found is not None:
                report.problems.append(found)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="alchemi-verify") as pool:
        for path, rows in committed_lengths(snapshot.schema).items():
            if not session.exists(path):
                continue
            direct = session.direct(path)
            if direct is not None and not direct.codec.has_checksum:
                unguarded.add(path)
            for number, start, stop in _objects(session, path, rows):
                running.append(pool.submit(_check, session, direct, path, number, start, stop))
                settle(_IN_FLIGHT)
        settle(0)
    if unguarded:
        report.notices.append(
            f"{len(unguarded)} arrays carry no checksums, so bytes changed within their chunks are "
            "not found; every profile but raw has them"
        )


def _objects(session: Session, path: str, rows: int) -> Iterator[tuple[int, int, int]]:
    unit = session.unit(path)
    for number in range(-(-rows // unit)):
        yield number, number * unit, min((number + 1) * unit, rows)


def _check(
    session: Session, direct: DirectArray | None, path: str, number: int, start: int, stop: int
) -> str | None:
    """What is wrong with one storage object, or None."""
    where = f"chunk {number} of array {path!r}"
    try:
        if direct is not None:
            direct.check(number)
        else:
            array: Any = session.array(path)
            array[start:stop]
    except FileNotFoundError:
        return None
    except (AlchemiError, OSError, ValueError, RuntimeError, TypeError) as error:
        return f"{where} is damaged ({type(error).__name__}: {error})"
    except Exception as error:
        # Codecs raise whatever their libraries do.
        return f"{where} cannot be decoded ({type(error).__name__}: {error})"
    return None

"""Where the records of a JSON file lie: one pass over its bytes, nothing kept.

A record is the object that holds a structure, at whatever depth: an element of a
list (mlearn, MatPES), a value in a dict of dicts (MPtrj), a line of its own, or
the whole file. Which depth that is, the beginning of the file shows; the rest is
found by counting brackets outside of strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

import numpy as np

from alchemi_xr._typing import NDArray

__all__ = ["iter_records", "record_depth"]

_WINDOW = 4 * 2**20
_LOOK = 64 * 2**20


def record_depth(file: IO[bytes]) -> int | None:
    """How many brackets are open in a record of a file; None when no record is found.

    Looks for the first object with a member ``structure``, or ``sites`` beside
    ``lattice`` or ``@class``.
    """
    file.seek(0)
    open_members: list[set[str] | None] = []
    pending = ""
    text = ""
    decoder = json.JSONDecoder()
    read = 0
    while read < _LOOK:
        block = file.read(2**20)
        if not block:
            break
        read += len(block)
        text += block.decode("utf-8", "replace")
        at, size = 0, len(text)
        while at < size:
            char = text[at]
            if char in "{[":
                open_members.append(set() if char == "{" else None)
            elif char in "}]":
                if not open_members:
                    return None
                open_members.pop()
            elif char == '"':
                try:
                    pending, after = decoder.raw_decode(text, at)
                except ValueError:
                    break  # the string goes on in the next block
                rest = text[after : after + 64].lstrip()
                if not rest and len(block) == 2**20:
                    break
                members = open_members[-1] if open_members else None
                if rest[:1] == ":" and members is not None:
                    members.add(pending)
                    if "structure" in members or {"sites", "lattice"} <= members:
                        return len(open_members)
                    if "sites" in members and "@class" in members:
                        return len(open_members)
                at = after
                continue
            at += 1
        text = text[at:]
    return None


def iter_records(
    file: IO[bytes], depth: int, *, window: int = _WINDOW
) -> Iterator[tuple[int, int]]:
    """Beginning and end of every object at a depth.

    Raises
    ------
    ValueError
        The file ends inside of one; the message says where it began.
    """
    file.seek(0)
    base = level = 0
    in_string = False
    escaped = False
    begin = -1
    while block := file.read(window):
        text = np.frombuffer(block, dtype=np.uint8)
        outside, in_string, escaped = _outside_strings(text, in_string, escaped)
        marks = np.flatnonzero(
            outside & ((text == 123) | (text == 91) | (text == 125) | (text == 93))
        )
        if len(marks):
            kinds = text[marks]
            opens = (kinds == 123) | (kinds == 91)
            levels = level + np.cumsum(np.where(opens, 1, -1))
            # An object of the depth begins where it is reached, and ends where it is left.
            starts = marks[opens & (levels == depth) & (kinds == 123)]
            stops = marks[~opens & (levels == depth - 1) & (kinds == 125)]
            level = int(levels[-1])
            events = [(int(m), True) for m in starts] + [(int(m), False) for m in stops]
            for place, opening in sorted(events):
                if opening:
                    begin = base + place
                elif begin >= 0:
                    yield begin, base + place + 1
                    begin = -1
        base += len(block)
    if begin >= 0:
        raise ValueError(f"the file ends inside the record that begins at byte {begin}")


def _outside_strings(text: NDArray, in_string: bool, escaped: bool) -> tuple[NDArray, bool, bool]:
    """Which bytes stand outside of strings; whether the next ones are inside, or escaped."""
    quotes = np.flatnonzero(text == 34)
    slashes = text == 92
    if slashes.any() or escaped:
        # A quote counts when an even number of backslashes stands before it.
        runs = np.zeros(len(text) + 1, dtype=np.int64)
        places = np.flatnonzero(~slashes)
        last = np.full(len(text), -1, dtype=np.int64)
        last[places] = places
        last = np.maximum.accumulate(last)
        runs[1:] = np.where(slashes, np.arange(len(text)) - last, 0)
        before = runs[quotes]
        if escaped:
            # One backslash ended the block before: it belongs to the first run here.
            first = int(places[0]) if len(places) else len(text)
            before = before + (quotes == first)
        quotes = quotes[before % 2 == 0]
        ending = int(runs[-1])
        if escaped and ending == len(text):
            ending += 1
        escaped = ending % 2 == 1
    toggles = np.zeros(len(text), dtype=np.int64)
    toggles[quotes] = 1
    state = (np.cumsum(toggles) + int(in_string)) % 2
    inside = state.astype(bool)
    return ~inside & (text != 34), bool(inside[-1]) if len(inside) else in_string, escaped

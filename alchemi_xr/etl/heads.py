"""Comment lines of many frames at once.

Frames of one file mostly differ in the numbers of their comments only. What a
key means and what form its value takes is worked out once for each such shape
of comment, by the same code that reads a single one; the numbers are then read
as columns. A comment that is not plainly right is left to ``read_head``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.etl.columns import ColumnSpec, LineFault, parse_properties
from alchemi_xr.etl.comment import Value
from alchemi_xr.etl.frames import (
    FrameFault,
    column_targets,
    known_value,
    pbc_without,
    value_of,
)
from alchemi_xr.etl.names import NameMap
from alchemi_xr.native import text as native
from alchemi_xr.native.text import Pair, Shape

__all__ = ["Heads", "Plan", "Repeated", "Signature", "read_heads"]

# Letters of texts that are compared at once.
_SHORT = 64

#: Name, dtype character (or "str") and shape of a system value.
Form: TypeAlias = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class _Part:
    """Where a field's value comes from.

    Parameters
    ----------
    name, key : str
        Of the field, and in the file.
    pair : int
        Place among the comment's pairs.
    words : int
        Numbers of the value; 0 for one that is read as text, frame by frame.
    order : tuple of int
        Which number stands at each place of the value.
    shape : tuple of int
    whole : bool
    """

    name: str
    key: str
    pair: int
    words: int = 0
    order: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    whole: bool = False

    @property
    def form(self) -> Form:
        return self.name, "l" if self.whole else "d", self.shape


@dataclass(frozen=True)
class Plan:
    """How the comments of one shape are read.

    Parameters
    ----------
    spec : ColumnSpec
    properties : str
        As written.
    keys : tuple of str
        By name in the file, without ``Properties``.
    parts : tuple of _Part
        In the order in which fields are first named.
    constants : tuple of (str, value)
        Fields that a comment has by what it does not say.
    """

    spec: ColumnSpec
    properties: str
    keys: tuple[str, ...]
    parts: tuple[_Part, ...]
    constants: tuple[tuple[str, NDArray], ...]


@lru_cache(maxsize=1024)
def _plan(
    pairs: tuple[Pair, ...], properties: str, mapping: tuple[tuple[str, str], ...]
) -> Plan | None:
    """None where every comment has to be looked at by itself."""
    names = NameMap(dict(mapping))
    try:
        spec = parse_properties(properties)
        column_targets(spec, names)
    except (LineFault, FrameFault):
        return None
    parts: dict[str, _Part] = {}
    ranks: dict[str, int] = {}
    keys: list[str] = []
    for at, pair in enumerate(pairs):
        key = pair.key or "comment"
        if key in ("Properties", "properties"):
            continue
        keys.append(key)
        target = names.target(key, "system")
        # As in read_head: of a key given twice the last value stands.
        if ranks.get(target.name, target.rank) < target.rank:
            continue
        ranks[target.name] = target.rank
        part = _part(target.name, key, at, pair)
        if part is None:
            return None
        parts[target.name] = part
    if "virial" in parts:
        # Stress follows from it, or contradicts it.
        return None
    constants = () if "pbc" in parts else (("pbc", pbc_without("cell" in parts)),)
    return Plan(spec, properties, tuple(keys), tuple(parts.values()), constants)


def _part(name: str, key: str, at: int, pair: Pair) -> _Part | None:
    if pair.kind == "T" or name == "pbc":
        return _Part(name, key, at)
    if name not in FIELDS:
        shape = () if pair.words == 1 else (pair.words,)
        return _Part(
            name, key, at, pair.words, tuple(range(pair.words)), shape, whole=pair.kind == "I"
        )
    try:
        # Every form of a known field is its numbers in some order.
        numbers: Value = np.arange(pair.words, dtype=np.float64)
        order = known_value(key, name, numbers if pair.words > 1 else np.array(0.0))
    except FrameFault:
        return None
    flat = tuple(int(i) for i in order.reshape(-1))
    return _Part(name, key, at, pair.words, flat, order.shape)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Values of which most are one of a few: comments repeat their texts.

    Parameters
    ----------
    values : list of value
        Each is used.
    codes : int64 array, shape (n,)
        Which of them each frame has.
    """

    values: list[Value]
    codes: IntArray

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[Value]:
        return (self.values[code] for code in self.codes.tolist())

    def __getitem__(self, chosen: NDArray) -> Repeated:
        used, codes = np.unique(self.codes[chosen], return_inverse=True)
        return Repeated([self.values[code] for code in used.tolist()], codes.astype(np.int64))


@dataclass
class Signature:
    """What of some frames' heads matters for the schema."""

    plan: Plan
    forms: tuple[Form, ...]
    atoms: int
    count: int


@dataclass
class Heads:
    """The comments of some frames of one text, those that are plainly right.

    Parameters
    ----------
    plans : list of (Plan, int64 array)
        With the frames of each.
    columns : dict of str to list of (int64 array, values)
        By field: frames, and their values; an array [n, *shape] or :class:`Repeated`.
    odd : list of int
        Frames that are to be read one by one.
    """

    plans: list[tuple[Plan, IntArray]] = field(default_factory=list)
    columns: dict[str, list[tuple[IntArray, Any]]] = field(default_factory=dict)
    odd: list[int] = field(default_factory=list)

    def signatures(self, atoms: IntArray) -> Iterator[Signature]:
        """What the frames have, counted; ``atoms`` are those of all frames."""
        for plan, frames in self.plans:
            fixed = [part.form for part in plan.parts if part.words]
            fixed += [_form(name, value) for name, value in plan.constants]
            varying = [self._forms(part.name, frames) for part in plan.parts if not part.words]
            known = set(fixed).union(*(forms for forms, _ in varying))
            if not any(shape and name not in FIELDS for name, _, shape in known):
                for found, count in _counted(varying, len(frames)):
                    yield Signature(plan, (*fixed, *found), -1, count)
                continue
            # Arrays with one row an atom are told from others by the number of atoms.
            listed = [[forms[code] for code in codes.tolist()] for forms, codes in varying]
            rows: Any = zip(*listed, strict=True) if listed else [()] * len(frames)
            seen: Counter[tuple[tuple[Form, ...], int]] = Counter()
            for found, n in zip(rows, atoms[frames].tolist(), strict=True):
                every = (*fixed, *found)
                ragged = any(s and s[0] == n and name not in FIELDS for name, _, s in every)
                seen[every, n if ragged else -1] += 1
            for (every, n), count in seen.items():
                yield Signature(plan, every, n, count)

    def _forms(self, name: str, frames: IntArray) -> tuple[list[Form], IntArray]:
        """The forms that a field's values have, and which of them each frame's has."""
        repeated: Repeated = next(v for f, v in self.columns[name] if f is frames)
        each = [_form(name, value) for value in repeated.values]
        numbers = {form: number for number, form in enumerate(dict.fromkeys(each))}
        return list(numbers), np.array([numbers[form] for form in each])[repeated.codes]


def _counted(
    varying: list[tuple[list[Form], IntArray]], frames: int
) -> Iterator[tuple[tuple[Form, ...], int]]:
    """Which forms occur together, and in how many frames; in the order of the first."""
    together = np.zeros(frames, dtype=np.int64)
    for forms, codes in varying:
        together = together * len(forms) + codes
    _, first, counts = np.unique(together, return_index=True, return_counts=True)
    for at in np.argsort(first).tolist():
        i = int(first[at])
        yield tuple(forms[int(codes[i])] for forms, codes in varying), int(counts[at])


def _form(name: str, value: Value) -> Form:
    if isinstance(value, str):
        return name, "str", ()
    return name, value.dtype.char, value.shape


def read_heads(text: bytes, frames: NDArray, names: NameMap, *, select: Any = None) -> Heads:
    """The comments of frames.

    Parameters
    ----------
    text : bytes
    frames : int64 array, shape (n, 7)
        Of :func:`~alchemi_xr.native.text.find_frames`.
    names : NameMap
    select : callable, optional
        Of a field's name: whether its numbers are wanted.
    """
    out = Heads()
    shapes, which, spans = native.comment_shapes(text, frames)
    out.odd = np.flatnonzero(which < 0).tolist()
    mapping = tuple(names.mapping.items())
    for number, shape in enumerate(shapes):
        index = np.flatnonzero(which == number)
        _read_shape(out, text, shape, index, spans, mapping, select)
    out.odd.sort()
    return out


def _read_shape(
    out: Heads,
    text: bytes,
    shape: Shape,
    index: IntArray,
    spans: NDArray,
    mapping: tuple[tuple[str, str], ...],
    select: Any,
) -> None:
    plan = _plan(shape.pairs, shape.properties, mapping)
    if plan is None:
        out.odd += index.tolist()
        return
    good = np.ones(len(index), dtype=bool)
    found: list[tuple[_Part, Any]] = []
    for part in plan.parts:
        places = spans[index, part.pair]
        if part.words:
            if select is not None and not select(part.name):
                continue
            found.append((part, _numbers(text, places, part, good)))
        else:
            found.append((part, _texts(text, places, part, good)))
    if not good.all():
        out.odd += index[~good].tolist()
        index = index[good]
        found = [(part, values[good]) for part, values in found]
    if len(index) == 0:
        return
    out.plans.append((plan, index))
    for part, values in found:
        out.columns.setdefault(part.name, []).append((index, values))
    for name, value in plan.constants:
        same = np.broadcast_to(value, (len(index), *value.shape))
        out.columns.setdefault(name, []).append((index, same))


def _numbers(text: bytes, places: NDArray, part: _Part, good: NDArray) -> NDArray:
    values, at = native.numbers(text, places, part.words, whole=part.whole)
    while at < len(places):
        # Here stands a number with more digits than are read in bulk.
        good[at] = False
        more, read = native.numbers(text, places[at + 1 :], part.words, whole=part.whole)
        values[at + 1 :] = more
        at += 1 + read
    if part.order != tuple(range(part.words)):
        values = values[:, part.order]
    return values.reshape(len(places), *part.shape)


def _texts(text: bytes, places: NDArray, part: _Part, good: NDArray) -> Repeated:
    words, codes = _words(text, places)
    values: list[Value] = []
    for code, word in enumerate(words):
        try:
            values.append(value_of(part.key, part.name, word.decode("ascii")))
        except FrameFault:
            values.append("")
            good &= codes != code
    return Repeated(values, codes)


def _words(text: bytes, places: NDArray) -> tuple[list[bytes], IntArray]:
    """Different texts, and which of them stands at each place."""
    first = text[int(places[0, 0]) : int(places[0, 1])]
    if len(first) <= _SHORT and (places[:, 1] - places[:, 0] == len(first)).all():
        # Mostly all are one.
        letters = np.frombuffer(text, dtype=np.uint8)[places[:, :1] + np.arange(len(first))]
        if (letters == letters[0]).all():
            return [first], np.zeros(len(places), dtype=np.int64)
    known: dict[bytes, int] = {}
    codes = [known.setdefault(text[a:b], len(known)) for a, b in places.tolist()]
    return list(known), np.array(codes, dtype=np.int64)

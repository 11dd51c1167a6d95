"""Which fields an input has, found by looking at every record once.

The observer takes in names, dtypes and row shapes as they come; the schema it
gives is the one layout that holds them all, and every reader follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import FIELDS, field_order
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.names import Contest
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["MAX_FIELDS", "FieldObserver", "Schema"]

MAX_FIELDS = 1000
"""More fields than this mean that values were taken for names."""


@dataclass(frozen=True)
class Schema:
    """The fields of an input.

    Parameters
    ----------
    layouts : tuple of FieldLayout
        In the project's order.
    dropped : dict of str to str
        Names that cannot be stored, with the reason.
    contests : dict of Contest to int
        Names that other names for the same field put aside, with the number of samples.
    """

    layouts: tuple[FieldLayout, ...]
    dropped: dict[str, str] = field(default_factory=dict)
    contests: Mapping[Contest, int] = field(default_factory=dict)
    _by_name: dict[str, FieldLayout] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._by_name.update({layout.name: layout for layout in self.layouts})

    def get(self, name: str) -> FieldLayout | None:
        """Layout of a field, None when it is not stored."""
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[FieldLayout]:
        return iter(self.layouts)


@dataclass(slots=True)
class _Seen:
    dtypes: set[str] = field(default_factory=set)
    tails: set[tuple[int, ...]] = field(default_factory=set)
    count: int = 0
    per_atom: bool = True
    sizes: set[int] = field(default_factory=set)


class FieldObserver:
    """Collects what fields the records of an input have."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Level], _Seen] = {}
        self._contests: Counter[Contest] = Counter()
        self.num_samples = 0

    def see(
        self,
        name: str,
        level: Level,
        dtype: str,
        tail: tuple[int, ...],
        *,
        count: int = 1,
        atoms: int | None = None,
    ) -> None:
        """Take in ``count`` samples that have a field.

        Parameters
        ----------
        name : str
            As :class:`~alchemi_xr.etl.names.NameMap` gives it.
        level : {"atom", "edge", "system"}
        dtype : str
            NumPy's name of it, or ``"str"``.
        tail : tuple of int
            Shape of a row (of a system field: of the value).
        atoms : int, optional
            Atoms of the sample; lets an array with one row an atom be told
            from one of fixed size.
        """
        seen = self._seen.setdefault((name, level), _Seen())
        seen.dtypes.add(dtype)
        seen.count += count
        seen.tails.add(tail)
        if level == "system":
            seen.per_atom &= atoms is not None and len(tail) > 0 and tail[0] == atoms
            if atoms is not None and len(seen.sizes) < 2:
                seen.sizes.add(atoms)

    def contest(self, contests: Iterable[Contest], *, count: int = 1) -> None:
        """Take in ``count`` samples with two names for one field."""
        for contest in contests:
            self._contests[contest] += count

    def merge(self, other: FieldObserver) -> None:
        """Take in all that another observer saw."""
        self.num_samples += other.num_samples
        self._contests.update(other._contests)
        for key, theirs in other._seen.items():
            ours = self._seen.setdefault(key, _Seen())
            ours.dtypes |= theirs.dtypes
            ours.tails |= theirs.tails
            ours.count += theirs.count
            ours.per_atom &= theirs.per_atom
            ours.sizes |= theirs.sizes

    def counts(self) -> dict[str, int]:
        """Samples that have each field."""
        out: dict[str, int] = {}
        for (name, _), seen in self._seen.items():
            out[name] = max(out.get(name, 0), seen.count)
        return {name: out[name] for name in field_order(out)}

    def schema(self, where: str = "input") -> Schema:
        """The one layout that holds everything seen.

        Raises
        ------
        SourceError
            There are so many names that they must be values.
        """
        if len(self._seen) > MAX_FIELDS:
            some = ", ".join(repr(name) for name, _ in list(self._seen)[-3:])
            raise SourceError(
                where,
                "the records have more different keys than a store can have fields",
                found=f"{len(self._seen)} (such as {some})",
                expected=f"at most {MAX_FIELDS}",
                mend="name those to keep with fields=[...]; free text in comment lines belongs "
                'in quotes: title="..."',
            )
        layouts: dict[str, FieldLayout] = {}
        dropped: dict[str, str] = {}
        # Atom level first: where one name stands at two levels, it keeps it.
        for (name, level), seen in sorted(self._seen.items(), key=lambda kv: (kv[0][1], kv[0][0])):
            if name in layouts:
                dropped[name] = f"it is a field of the {layouts[name].level} level already"
                continue
            layout = self._layout(name, level, seen)
            if isinstance(layout, str):
                dropped[name] = layout
            else:
                layouts[name] = layout
        ordered = tuple(layouts[name] for name in field_order(layouts))
        return Schema(ordered, dropped, dict(self._contests))

    def _layout(self, name: str, level: Level, seen: _Seen) -> FieldLayout | str:
        holes = seen.count < self.num_samples
        spec = FIELDS.get(name)
        if spec is not None:
            tails = seen.tails
            tail = tuple(t for t in spec.tail if isinstance(t, int))
            if len(tail) != len(spec.tail):
                if len(tails) > 1:
                    return "its rows have several shapes"
                tail = next(iter(tails))
            dtype = _known_dtype(spec.kind, seen.dtypes)
            return FieldLayout(name, level, dtype, tail, "core", spec.unit, holes)
        if level == "system" and seen.per_atom and len(seen.sizes) > 1 and "str" not in seen.dtypes:
            rows = {tail[1:] for tail in seen.tails}
            if len(rows) == 1:
                dtype = _promoted(seen.dtypes)
                return FieldLayout(name, "atom", dtype, rows.pop(), "custom", "", holes)
        if level == "system" and _outgrows(seen.dtypes):
            # As text they stay what they are: a float would round them.
            return FieldLayout(name, level, "str", (), "text", "", holes)
        if "str" in seen.dtypes or (level == "system" and len(seen.tails) > 1):
            if level != "system":
                return "text of single atoms has no place in a store"
            return FieldLayout(name, level, "str", (), "text", "", holes)
        if len(seen.tails) > 1:
            return "its rows have several shapes"
        return FieldLayout(
            name, level, _promoted(seen.dtypes), next(iter(seen.tails)), "custom", "", holes
        )


def _outgrows(dtypes: set[str]) -> bool:
    """Whether whole numbers are too long for every type of whole numbers."""
    return "uint64" in dtypes and any(np.dtype(d).kind == "i" for d in dtypes if d != "str")


def _promoted(dtypes: set[str]) -> str:
    found: np.dtype[Any] = np.result_type(*[np.dtype(d) for d in sorted(dtypes)])
    # Longer floats are of this machine alone: no store holds them.
    return "float64" if found.kind == "f" and found.itemsize > 8 else found.name


def _known_dtype(kind: str, dtypes: set[str]) -> str:
    fitting = {d for d in dtypes if d != "str" and np.dtype(d).kind in kind}
    if "f" in kind:
        # Whole numbers where floats belong (charge=1) become float64.
        if len(fitting) < len(dtypes):
            fitting.add("float64")
        return _promoted(fitting)
    if kind == "b":
        return "bool"
    return _promoted(fitting or {"int64"})

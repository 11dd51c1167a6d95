"""The comment of one extended XYZ frame, in terms of the field table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.etl.columns import ColumnSpec, LineFault, parse_properties
from alchemi_xr.etl.comment import Value, parse_comment, parse_value
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import voigt_to_matrix

__all__ = [
    "FrameFault",
    "FrameHead",
    "column_targets",
    "column_targets_of",
    "known_value",
    "pbc_without",
    "read_head",
    "stress_conflict",
    "value_of",
]

# Written in Fortran order by ASE and read so by it; for symmetric tensors it is the same.
_FORTRAN = ("stress", "virial")
_SCALARS = frozenset(n for n, s in FIELDS.items() if s.level == "system" and s.tail == (1,))


class FrameFault(Exception):
    """A frame that cannot be taken, with the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(slots=True)
class FrameHead:
    """What a comment line says.

    Parameters
    ----------
    spec : ColumnSpec
    properties : str
        As written.
    system : dict of str to value
        By field name.
    keys : tuple of str
        By name in the file.
    """

    spec: ColumnSpec
    properties: str
    system: dict[str, Value] = field(default_factory=dict)
    keys: tuple[str, ...] = ()


def read_head(comment: str, names: NameMap) -> FrameHead:
    """The head of a frame.

    Raises
    ------
    FrameFault
        A value of a known field has the wrong form, or the columns are ill declared.
    """
    raw, properties = parse_comment(comment)
    try:
        spec = parse_properties(properties)
    except LineFault as fault:
        raise FrameFault(fault.field, fault.reason) from None
    system: dict[str, Value] = {}
    ranks: dict[str, int] = {}
    for key, text in raw:
        target = names.target(key, "system")
        name = target.name
        # Of a key given twice the last value stands, as in a Python dict.
        if ranks.get(name, target.rank) < target.rank:
            continue
        ranks[name] = target.rank
        system[name] = value_of(key, name, text)
    if "pbc" not in system:
        system["pbc"] = pbc_without("cell" in system)
    if "stress" not in system and "virial" in system and "cell" in system:
        volume = _volume(system["cell"])
        if volume > 0:
            system["stress"] = -np.asarray(system["virial"]) / volume
    return FrameHead(spec, properties, system, tuple([key for key, _ in raw]))


_PERIODIC, _OPEN = np.ones(3, dtype=bool), np.zeros(3, dtype=bool)


def pbc_without(cell: bool) -> NDArray:
    """What a frame without ``pbc`` has: a lattice is periodic, as ASE and the format's authors
    have it."""
    return _PERIODIC if cell else _OPEN


@lru_cache(maxsize=8192)
def value_of(key: str, name: str, text: str) -> Value:
    """A value in the form of its field; files repeat most of theirs.

    Raises
    ------
    FrameFault
    """
    if name in _SCALARS:
        try:
            # A fast way for what differs in every frame: energies.
            if "_" not in text:
                return np.array([float(text)])
        except ValueError:
            pass
    value = parse_value(text)
    return known_value(key, name, value) if name in FIELDS else value


def _volume(cell: Any) -> float:
    a, b, c = cell.tolist()
    return abs(
        a[0] * (b[1] * c[2] - b[2] * c[1])
        - a[1] * (b[0] * c[2] - b[2] * c[0])
        + a[2] * (b[0] * c[1] - b[1] * c[0])
    )


def known_value(key: str, name: str, value: Value) -> NDArray:
    """A value of the field table in its own shape.

    Raises
    ------
    FrameFault
    """
    if name == "cell":
        return _numbers(key, value, (9,)).reshape(3, 3)
    if name == "pbc":
        return _pbc(key, value)
    if name in _FORTRAN:
        numbers = _numbers(key, value, (6, 9))
        if numbers.size == 6:
            return voigt_to_matrix(numbers)
        return numbers.reshape(3, 3) if numbers.ndim == 2 else numbers.reshape(3, 3, order="F")
    tail = FIELDS[name].tail
    if any(isinstance(t, str) for t in tail):
        return _numbers(key, value, ()).reshape(-1)
    shape = tuple(int(t) for t in tail)
    return _numbers(key, value, (int(np.prod(shape)),)).reshape(shape)


def _numbers(key: str, value: Value, sizes: Iterable[int]) -> NDArray:
    allowed = tuple(sizes)
    expected = " or ".join(str(s) for s in allowed) or "some"
    if isinstance(value, str) or value.dtype.kind == "b":
        shown = value if isinstance(value, str) else value.tolist()
        words = len(value.split()) if isinstance(value, str) else value.size
        raise FrameFault(
            key, f"found {words} word(s) {str(shown)[:80]!r}, expected {expected} numbers"
        )
    if allowed and value.size not in allowed:
        raise FrameFault(key, f"found {value.size} numbers, expected {expected} numbers")
    return value.astype(np.float64)


def _pbc(key: str, value: Value) -> NDArray:
    if isinstance(value, str):
        letters = value.replace(" ", "").upper()
        if len(letters) == 3 and set(letters) <= {"T", "F"}:
            return np.array([c == "T" for c in letters])
    elif value.size in (1, 3) and np.isin(value, (0, 1)).all():
        return np.broadcast_to(value.astype(bool).reshape(-1), 3).copy()
    shown = value if isinstance(value, str) else value.tolist()
    raise FrameFault(key, f"found {shown!r}, expected three of T or F")


def stress_conflict(head: FrameHead) -> bool:
    """Whether stress and virial are both given and say different things."""
    system: dict[str, Any] = head.system
    if not {"stress", "virial", "cell"} <= system.keys():
        return False
    volume = _volume(system["cell"])
    if volume == 0:
        return False
    return not np.allclose(
        system["stress"], -system["virial"] / volume, rtol=1e-4, atol=1e-8, equal_nan=True
    )


def column_targets(spec: ColumnSpec, names: NameMap) -> tuple[dict[str, str], list[str]]:
    """Field of each column (``Z`` and ``species`` are the atomic numbers), and those not stored.

    Raises
    ------
    FrameFault
        A column of a known field has the wrong number of words.
    """
    targets: dict[str, str] = {}
    ranks: dict[str, int] = {}
    unstored = []
    for column in spec.columns:
        if column.name == "species":
            # Symbols go before a column of numbers that says the same.
            targets["Z"], ranks["atomic_numbers"] = "atomic_numbers", -1
            continue
        if column.kind == "S":
            unstored.append(column.name)
            continue
        target = names.target(column.name, "atom")
        known = FIELDS.get(target.name)
        if target.name == "atomic_numbers" and column.kind != "I":
            found = f"{column.name}:{column.kind}:{column.width}"
            raise FrameFault(column.name, f"found {found}, expected whole numbers (I)")
        if known is not None and not any(isinstance(t, str) for t in known.tail):
            width = int(np.prod([int(t) for t in known.tail]))
            if column.width != width:
                raise FrameFault(column.name, f"found {column.width} column(s), expected {width}")
        if ranks.get(target.name, target.rank + 1) <= target.rank:
            continue
        ranks[target.name] = target.rank
        targets = {c: t for c, t in targets.items() if t != target.name}
        targets[column.name] = target.name
    return targets, unstored


@lru_cache(maxsize=256)
def _cached_targets(
    spec: ColumnSpec, mapping: tuple[tuple[str, str], ...]
) -> tuple[dict[str, str], list[str]]:
    return column_targets(spec, NameMap(dict(mapping)))


def column_targets_of(spec: ColumnSpec, names: NameMap) -> tuple[dict[str, str], list[str]]:
    """``column_targets``, remembered."""
    return _cached_targets(spec, tuple(names.mapping.items()))

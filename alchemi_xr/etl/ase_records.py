"""ASE's objects as records: atoms, calculator results, info and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, check_record, voigt_to_matrix

__all__ = [
    "atoms_to_record",
    "fault_of",
    "place_any",
    "place_result",
    "put_any",
    "put_fixed",
    "put_results",
    "put_structure",
]

_STRESSES = ("stress", "stresses")
# Calculator results with one row an atom; all others are the system's.
_PER_ATOM = ("forces", "energies", "stresses", "charges", "magmoms")
_CHECKED = {
    name: tuple(int(t) for t in spec.tail)
    for name, spec in FIELDS.items()
    if spec.level == "system" and all(isinstance(t, int) for t in spec.tail)
}


def atoms_to_record(atoms: Any, names: NameMap) -> Record:
    """One ``ase.Atoms`` with all that hangs on it."""
    record = Record(len(atoms))
    put_structure(record, atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, names)
    for name, values in atoms.arrays.items():
        if name not in ("numbers", "positions"):
            record.put(name, "atom", values, names)
    put_fixed(record, atoms.constraints, names)
    if atoms.calc is not None:
        put_results(record, getattr(atoms.calc, "results", {}), names)
    for name, value in atoms.info.items():
        put_any(record, str(name), value, names)
    return record


def put_structure(
    record: Record, numbers: Any, positions: Any, cell: Any, pbc: Any, names: NameMap
) -> None:
    """Elements, positions and, where there is one, the cell."""
    record.put("numbers", "atom", np.asarray(numbers, dtype=np.int64), names)
    record.put("positions", "atom", np.asarray(positions).reshape(-1, 3), names)
    lattice = np.asarray(cell, dtype=np.float64)
    if lattice.any():
        record.put("cell", "system", lattice.reshape(3, 3), names)
    record.put("pbc", "system", np.broadcast_to(np.asarray(pbc, dtype=bool), 3).copy(), names)


def put_results(record: Record, results: Mapping[str, Any], names: NameMap) -> None:
    """Results of a calculator, stress as [3, 3]."""
    for name, value in results.items():
        if value is None:
            continue
        if name in _STRESSES:
            value = np.asarray(value, dtype=np.float64)
        shape = np.shape(value) if name in _STRESSES or name in _PER_ATOM else ()
        level, voigt = place_result(name, shape, record.atoms)
        record.put(name, level, voigt_to_matrix(value) if voigt else value, names)


def place_result(name: str, shape: tuple[int, ...], atoms: int) -> tuple[Level, bool]:
    """Level of a calculator's result, and whether it is six numbers for a matrix."""
    voigt = name in _STRESSES and shape[-1] == 6
    if voigt:
        shape = (*shape[:-1], 3, 3)
    if name in _PER_ATOM and (shape[:1] == (atoms,) or _is_rows(name, shape)):
        return "atom", voigt
    return "system", voigt


def _is_rows(name: str, shape: tuple[int, ...]) -> bool:
    """Whether rows of three numbers are one an atom, be they too few (which is a fault) or not."""
    spec = FIELDS.get(name)
    return spec is not None and spec.level == "atom" and spec.tail == shape[1:] != ()


def put_any(record: Record, name: str, value: Any, names: NameMap) -> None:
    """A value whose level nobody recorded: that of the field table, else the system's."""
    level, voigt = place_any(name, _shape(value), record.atoms, names)
    if voigt:
        value = voigt_to_matrix(np.asarray(value, dtype=np.float64))
    record.put(name, level, value, names)


def place_any(name: str, shape: tuple[int, ...], atoms: int, names: NameMap) -> tuple[Level, bool]:
    """Level of such a value, and whether it is six numbers for a matrix."""
    target = names.target(name, "atom").name
    known = FIELDS.get(target)
    if (known is not None and known.level == "atom") and (
        shape[:1] == (atoms,) or _is_rows(target, shape)
    ):
        return "atom", False
    return "system", names.target(name, "system").name in ("stress", "virial") and shape == (6,)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (np.ndarray, list, tuple)):
        return ()
    try:
        return np.shape(value)
    except ValueError:  # lists of several lengths: they are kept as text
        return ()


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def put_fixed(record: Record, constraints: Any, names: NameMap) -> None:
    """Atoms that ASE holds still, as the custom atom field ``fixed``."""
    fixed = np.zeros(record.atoms, dtype=bool)
    for constraint in constraints:
        if type(constraint).__name__ == "FixAtoms":
            fixed[constraint.index] = True
    if fixed.any():
        record.put("fixed", "atom", fixed, names)


def fault_of(record: Record) -> tuple[str, str] | None:
    """Field and reason when a value cannot be stored: its shape, or no text in its characters."""
    for name in (*record.atom, *record.system):
        if not _is_text(name):
            return ascii(name), "its name has characters that are none (lone surrogates)"
    for name, value in record.system.items():
        if isinstance(value, str) and not _is_text(value):
            return name, "its text has characters that are none (lone surrogates)"
    for name, values in record.atom.items():
        spec = FIELDS.get(name)
        if len(values) != record.atoms:
            return name, f"found {len(values)} rows, expected {record.atoms} (one an atom)"
        if spec is not None and all(isinstance(t, int) for t in spec.tail):
            size = int(np.prod([int(t) for t in spec.tail]))
            if values.size != record.atoms * size:
                return name, f"found {list(values.shape)}, expected [{record.atoms}, {size}]"
    return check_record(record, _CHECKED)

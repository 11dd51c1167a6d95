"""A structure in pymatgen's JSON form, with what was computed for it, as a record.

pymatgen itself is not needed. Cartesian positions (``xyz``) go before fractional
ones (``abc``); the stress is kept as it stands unless its unit and sign are given,
since no such file says them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.errors import ConfigError
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, voigt_to_matrix
from alchemi_xr.units import conversion_factor

__all__ = ["RecordFault", "StressForm", "to_record"]

#: Names of energies, the one that belongs to the forces first.
_ENERGIES = ("energy", "total_energy", "uncorrected_total_energy", "corrected_total_energy")
_ALIASES = {"force": "forces", "magmom": "magmoms", "magmoms": "magmoms", "energies": "energy"}
_STRESSES = ("stress", "virial_stress", "stresses")
_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}


class RecordFault(Exception):
    """A record that cannot be taken, with the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


class StressForm:
    """Unit and sign of the stresses of a file.

    Parameters
    ----------
    text : str
        A unit, with a minus where a positive number is a pressure: ``"-kbar"`` for
        what VASP prints, ``"eV/Å³"`` for ASE's.

    Raises
    ------
    ConfigError
    """

    def __init__(self, text: str) -> None:
        self.text = text
        unit = text.removeprefix("-").strip()
        try:
            self.factor = conversion_factor(unit, FIELDS["stress"].unit)
        except Exception as error:
            raise ConfigError(
                "stress", f"{text!r} is no unit of a stress", expected='"-kbar", "GPa", "eV/Å³"'
            ) from error
        if text.startswith("-"):
            self.factor = -self.factor

    def __repr__(self) -> str:
        return f"StressForm({self.text!r})"


def to_record(
    entry: Mapping[str, Any], names: NameMap, stress: StressForm | None, order: tuple[int, ...]
) -> Record:
    """A record of an entry: ``{"structure": …, "energy": …}``, or a structure alone.

    Parameters
    ----------
    entry : dict
    names : NameMap
    stress : StressForm, optional
    order : tuple of int
        Places of xx, yy, zz, yz, xz, xy among six numbers of a stress.

    Raises
    ------
    RecordFault
    """
    structure = entry.get("structure", entry)
    if not isinstance(structure, Mapping) or not isinstance(structure.get("sites"), list):
        raise RecordFault("structure", "found no structure with sites")
    record = _structure(structure, names)
    rest: dict[str, Any] = {}
    if structure is not entry:
        for key, value in entry.items():
            # mlearn has what was computed one level down.
            if key == "outputs" and isinstance(value, Mapping):
                rest.update(value)
            elif key != "structure":
                rest[key] = value
    given = [n for n in _ENERGIES if _is_number(rest.get(n))]
    if "energy" in names.mapping.values():
        given = []
    for key, value in rest.items():
        if value is None:
            continue
        if key in given and key != given[0] and key not in names.mapping:
            record.put(key, "system", float(value), names)
            continue
        name = "energy" if key in given and key not in names.mapping else _ALIASES.get(key, key)
        _put(record, key, name, value, names, stress, order)
    # Last: what was computed goes before what the structure was given.
    _site_properties(record, structure["sites"], names)
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _structure(structure: Mapping[str, Any], names: NameMap) -> Record:
    sites = structure["sites"]
    count = len(sites)
    if count == 0:
        raise RecordFault("sites", "the structure has no sites")
    lattice = structure.get("lattice")
    cell: NDArray | None = None
    pbc = np.zeros(3, dtype=bool)
    if isinstance(lattice, Mapping):
        cell = _floats(lattice.get("matrix"), (3, 3), "lattice")
        pbc = np.array(lattice.get("pbc", (True, True, True)), dtype=bool)
        if pbc.shape != (3,):
            raise RecordFault("lattice", f"found pbc {lattice.get('pbc')!r}, expected three flags")
    numbers = np.fromiter((_number(site, i) for i, site in enumerate(sites)), np.int64, count)
    record = Record(count)
    record.atom["atomic_numbers"] = numbers
    record.atom["positions"] = _positions(sites, cell)
    record.keys += ["sites", "lattice"] if cell is not None else ["sites"]
    if cell is not None:
        record.system["cell"] = cell
    record.system["pbc"] = pbc
    charge = structure.get("charge")
    if isinstance(charge, (int, float)) and charge != 0:
        record.put("charge", "system", float(charge), names)
    return record


def _number(site: Any, i: int) -> int:
    species = site.get("species") if isinstance(site, Mapping) else None
    if not isinstance(species, list) or not species:
        name = site.get("name") if isinstance(site, Mapping) else None
        species = [{"element": name, "occu": 1}]
    if len(species) != 1 or species[0].get("occu", 1) != 1:
        shown = ", ".join(f"{s.get('element')} {s.get('occu')}" for s in species)
        raise RecordFault(
            "sites", f"site {i} is not occupied by one element alone ({shown}); no positions of "
            "atoms can be given for it"
        )  # fmt: skip
    element = species[0].get("element")
    number = _NUMBERS.get(element) if isinstance(element, str) else None
    if number is None:
        raise RecordFault("sites", f"site {i}: found the unknown element {element!r}")
    return number


def _positions(sites: list[Any], cell: NDArray | None) -> NDArray:
    if all(isinstance(s, Mapping) and "xyz" in s for s in sites):
        return _floats([s["xyz"] for s in sites], (len(sites), 3), "xyz")
    if cell is None or not all(isinstance(s, Mapping) and "abc" in s for s in sites):
        raise RecordFault("sites", "found sites without xyz, and without abc and a lattice")
    return _floats([s["abc"] for s in sites], (len(sites), 3), "abc") @ cell


def _site_properties(record: Record, sites: list[Any], names: NameMap) -> None:
    given = [s.get("properties") or {} for s in sites]
    for key in dict.fromkeys(k for p in given for k in p):
        values = [p.get(key) for p in given]
        if all(v is None for v in values):
            continue
        try:
            array = np.asarray([np.nan if v is None else v for v in values])
        except ValueError:
            array = np.asarray(values, dtype=object)
        if array.dtype.kind not in "biuf":
            record.unstored.append(f"site property {key}")
            continue
        record.put(_ALIASES.get(key, key), "atom", array, names)


def _put(
    record: Record,
    key: str,
    name: str,
    value: Any,
    names: NameMap,
    stress: StressForm | None,
    order: tuple[int, ...],
) -> None:
    if key in _STRESSES and key not in names.mapping:
        numbers = _floats(value, None, key)
        if numbers.shape not in ((6,), (3, 3)):
            raise RecordFault(key, f"found {list(numbers.shape)}, expected 6 or 3 x 3 numbers")
        if stress is None:
            kept = key if resolve(key) not in FIELDS else f"{key}_as_given"
            record.keys.append(key)
            record.system[kept] = numbers
            return
        matrix = numbers if numbers.ndim == 2 else voigt_to_matrix(numbers[list(order)])
        record.keys.append(key)
        record.system["stress"] = matrix * stress.factor
        return
    target = names.target(name, "system").name if name not in _ALIASES.values() else name
    spec = FIELDS.get(names.mapping.get(key, target))
    if (spec is not None and spec.level == "atom") or name in ("forces", "magmoms"):
        values = _floats(value, None, key)
        if values.shape[:1] != (record.atoms,):
            raise RecordFault(
                key, f"found {list(values.shape)}, expected {record.atoms} rows, one an atom"
            )
        record.put(key if key in names.mapping else name, "atom", values, names)
        record.keys[-1] = key
    elif spec is not None:
        record.put(key if key in names.mapping else name, "system", value, names)
        record.keys[-1] = key
    else:
        record.put(key, "system", value, names)


def _floats(value: Any, shape: tuple[int, ...] | None, name: str) -> NDArray:
    try:
        out = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise RecordFault(name, f"found {str(value)[:60]!r}, expected numbers") from None
    if shape is not None and out.shape != shape:
        raise RecordFault(name, f"found {list(out.shape)}, expected {list(shape)} numbers")
    return out

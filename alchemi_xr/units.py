"""Units of the project: eV, Å, amu, K, e; public times in fs.

Velocities are kept in the internal unit Å·√(eV/(amu·Å²)), in which a kinetic
energy ½mv² is in eV without a factor: one internal time unit is
``FS_PER_INTERNAL_TIME`` fs.
"""

from __future__ import annotations

import functools

from alchemi_xr.errors import ConfigError

__all__ = [
    "EV_PER_A3_IN_GPA",
    "FS_PER_INTERNAL_TIME",
    "KB",
    "conversion_factor",
    "from_internal_time",
    "to_internal_time",
]

KB = 8.617333262e-5
"""Boltzmann constant, eV/K (CODATA 2018)."""

FS_PER_INTERNAL_TIME = 10.180505710759414
"""fs in one internal time unit Å·√(amu/eV)."""

EV_PER_A3_IN_GPA = 160.21766208
"""GPa in one eV/Å³."""


def to_internal_time(time_fs: float) -> float:
    """A time given in fs, in internal units."""
    return time_fs / FS_PER_INTERNAL_TIME


def from_internal_time(time: float) -> float:
    """A time given in internal units, in fs."""
    return time * FS_PER_INTERNAL_TIME


# Value of one such unit in the project's own (eV, Å, amu, K, e, fs).
_ATOMS: dict[str, tuple[str, float]] = {
    "eV": ("energy", 1.0),
    "meV": ("energy", 1e-3),
    "Hartree": ("energy", 27.211386245988),
    "Ha": ("energy", 27.211386245988),
    "Eh": ("energy", 27.211386245988),
    "Rydberg": ("energy", 13.605693122994),
    "Ry": ("energy", 13.605693122994),
    "hartree": ("energy", 27.211386245988),
    "ev": ("energy", 1.0),
    "kcal/mol": ("energy", 0.0433641042),
    "kJ/mol": ("energy", 0.010364269656),
    "Å": ("length", 1.0),
    "A": ("length", 1.0),
    "Ang": ("length", 1.0),
    "Angstrom": ("length", 1.0),
    "angstrom": ("length", 1.0),
    "nm": ("length", 10.0),
    "Bohr": ("length", 0.529177210903),
    "bohr": ("length", 0.529177210903),
    "a0": ("length", 0.529177210903),
    "fs": ("time", 1.0),
    "ps": ("time", 1000.0),
    "amu": ("mass", 1.0),
    "u": ("mass", 1.0),
    "e": ("charge", 1.0),
    "elementary_charge": ("charge", 1.0),
    "K": ("temperature", 1.0),
    "GPa": ("pressure", 1.0 / EV_PER_A3_IN_GPA),
    "kbar": ("pressure", 0.1 / EV_PER_A3_IN_GPA),
    "bar": ("pressure", 1e-4 / EV_PER_A3_IN_GPA),
    "Debye": ("dipole", 0.20819433442462576),
    "D": ("dipole", 0.20819433442462576),
}


@functools.lru_cache(maxsize=256)
def conversion_factor(unit: str, target: str) -> float:
    """The number that takes a value in ``unit`` to one in ``target``.

    Products and quotients of known units are understood
    (``"kcal/mol/Å"``, ``"eV/Å^3"``, ``"e*Å"``).

    Raises
    ------
    ConfigError
        A unit is not known, or the two measure different things.

    Examples
    --------
    >>> round(conversion_factor("Hartree/Bohr", "eV/Å"), 4)
    51.4221
    """
    value, dims = _parse(unit)
    value_target, dims_target = _parse(target)
    if dims != dims_target:
        raise ConfigError(
            "units", f"{unit!r} cannot become {target!r}", found=dims, expected=dims_target
        )
    return value / value_target


def _parse(unit: str) -> tuple[float, tuple[tuple[str, int], ...]]:
    text = unit.strip()
    # The two energies per mole hold a slash of their own.
    for mole in ("kcal/mol", "kJ/mol"):
        text = text.replace(mole, mole.replace("/", "|"))
    value, dims = (
        1.0,
        dict.fromkeys(("energy", "length", "time", "mass", "charge", "temperature"), 0),
    )
    sign = 1
    for token in _tokens(text):
        if token in "*/":
            sign = -1 if token == "/" else 1
            continue
        name, _, power = (
            token.replace("³", "^3").replace("²", "^2").replace("**", "^").partition("^")
        )
        name = name.replace("|", "/")
        if name in ("1", ""):
            continue
        if name not in _ATOMS:
            raise ConfigError(
                "units",
                f"the unit {name!r} in {unit!r} is not known",
                mend="use one of " + ", ".join(sorted(_ATOMS)) + " and their products",
            )
        kind, factor = _ATOMS[name]
        exponent = sign * (int(power) if power else 1)
        value *= factor**exponent
        if kind == "pressure":
            dims["energy"] += exponent
            dims["length"] -= 3 * exponent
        elif kind == "dipole":
            dims["charge"] += exponent
            dims["length"] += exponent
        else:
            dims[kind] += exponent
    return value, tuple((k, v) for k, v in sorted(dims.items()) if v)


def _tokens(text: str) -> list[str]:
    text = text.replace("**", "^").replace("·", "*").replace(" ", "*")
    out, word = [], ""
    for char in text:
        if char in "*/":
            out += [word, char]
            word = ""
        else:
            word += char
    return [t for t in [*out, word] if t]

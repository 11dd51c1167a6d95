"""What the names of an input give rise to: choices among them, and fields that seem missing.

Nothing is guessed. Where two names of a record mean one field the report says which
was taken; where nothing was known as energy or forces it says which name looks like
one, and the option that would take it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from alchemi_xr.errors import ConfigError
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.schema import Schema
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["lookalikes", "name_notes", "refuse_ambiguous"]

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_METHOD = frozenset(
    [
        "tot",
        "total",
        "dft",
        "ref",
        "reference",
        "scf",
        "pot",
        "qm",
        "ccsd",
        "ccsdt",
        "mp2",
        "hf",
        "pbe",
        "xtb",
        "target",
        "label",
    ]
)
_ALONE = {
    "energy": frozenset(("e", "etot", "toten", "edft", "escf", "epot", "eref", "u0")),
    "forces": frozenset(("f", "ftot", "fdft", "frc")),
}
_WORDS = {
    "energy": frozenset(("energy", "energies", "etot", "toten", "nrg")),
    "forces": frozenset(("force", "forces", "frc")),
}
# With one of these words the name is that of another quantity.
_OTHER = frozenset(
    [
        "kinetic",
        "kin",
        "weight",
        "weights",
        "unit",
        "units",
        "gap",
        "hull",
        "formation",
        "form",
        "atomization",
        "above",
        "band",
        "fermi",
        "homo",
        "lumo",
        "correction",
        "corrected",
        "shift",
        "offset",
        "error",
        "std",
        "uncertainty",
        "var",
        "variance",
        "loss",
        "mask",
        "baseline",
        "per",
        "atomic",
        "interaction",
        "binding",
        "reaction",
        "adsorption",
        "zero",
        "zpe",
        "dispersion",
        "change",
        "max",
        "rms",
        "mean",
        "norm",
    ]
)
_SHAPES: Mapping[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "energy": ("system", ((), (1,))),
    "forces": ("atom", ((3,),)),
}


def looks_like(field: str, name: str) -> bool:
    """Whether a name would do for the energy, or the forces, of a system.

    Examples
    --------
    >>> names = ("dft_energy", "E_tot", "kinetic_energy", "energy_weight")
    >>> [looks_like("energy", name) for name in names]
    [True, True, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or _OTHER & set(words):
        return False
    if "".join(words) in _ALONE[field] or _WORDS[field] & set(words):
        return True
    letter = field[0]
    return letter in words and set(words) - {letter} <= _METHOD


def lookalikes(field: str, keys: Mapping[str, int], schema: Schema, names: NameMap) -> list[str]:
    """Names of the input that look like a field which it does not have, commonest first.

    Parameters
    ----------
    field : {"energy", "forces"}
    keys : dict of str to int
        By name in the input: samples that have it.
    schema : Schema
    names : NameMap
    """
    if schema.get(field) is not None:
        return []
    level, tails = _SHAPES[field]
    found = []
    for name, count in keys.items():
        if looks_like(field, name):
            layout = _stored(name, schema, names)
            if layout is not None and layout.level == level and layout.tail in tails:
                found.append((-count, name))
    return [name for _, name in sorted(found)]


def _stored(name: str, schema: Schema, names: NameMap) -> FieldLayout | None:
    """The field that a name became, when it holds numbers."""
    for level in ("system", "atom"):
        layout = schema.get(names.target(name, level).name)
        if layout is not None and layout.dtype != "str":
            return layout
    return None


def name_notes(keys: Mapping[str, int], schema: Schema, names: NameMap) -> list[str]:
    """Lines for the report: which name was taken of several, and which look like a field."""
    notes = [
        f"{field} is taken from {kept!r}, not from {other!r} ({count:,} samples have both)"
        for (field, kept, other), count in sorted(schema.contests.items())
    ]
    for field, option in (("energy", "energy-key"), ("forces", "forces-key")):
        found = lookalikes(field, keys, schema, names)
        if found:
            also = f" (also: {', '.join(map(repr, found[1:6]))})" if found[1:] else ""
            python = option.replace("-", "_")
            notes.append(
                f"no {field} known by name, but {found[0]!r} looks like it{also}: "
                f"--{option} {found[0]} ({python}={found[0]!r}) takes it"
            )
    return notes


def refuse_ambiguous(schema: Schema, names: NameMap) -> None:
    """Stop where the user mapped two names to one field and a record has both.

    Raises
    ------
    ConfigError
    """
    for contest, count in schema.contests.items():
        if names.is_ambiguous(contest):
            field, kept, other = contest
            ranked = {"energy": "energy_key", "forces": "forces_key"}.get(field)
            mend = f"leave one of them out of key_map (--map) for {field}"
            if ranked:
                option = ranked.replace("_", "-")
                mend = (
                    f"say which is preferred: {ranked}=[{kept!r}, {other!r}] "
                    f"(--{option} {kept} --{option} {other}), or leave one of them out"
                )
            raise ConfigError(
                "key_map",
                f"{kept!r} and {other!r} are both mapped to {field}, and {count:,} samples have both",
                mend=mend,
            )

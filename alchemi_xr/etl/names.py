"""From the names that files use to the names of the field table.

Only names that mean the same thing everywhere are taken as a known field
(``force``, ``energies``, a ``charge`` column). Any other name stays a custom
field unless the user maps it: a guess would put one method's energies among
another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import ALIASES, FIELDS, resolve
from alchemi_xr.errors import ConfigError, nearest

__all__ = ["Contest", "NameMap", "Target"]

_ATOM_ALIASES = {
    "Z": "atomic_numbers",
    "numbers": "atomic_numbers",
    "pos": "positions",
    "charge": "charges",
    "mass": "atomic_masses",
    "masses": "atomic_masses",
}
_SYSTEM_ALIASES = {"Lattice": "cell", "cell": "cell", "pbc": "pbc"}
# Names of the extended XYZ format itself: beside them a key ``cell`` is somebody's note.
_OF_THE_FORMAT = ("Lattice", "pos", "Z")
_ALIAS_ORDER = {name: at for at, name in enumerate([*_ATOM_ALIASES, *ALIASES])}
_UNSAFE = dict.fromkeys(map(ord, "/\\\0"), "_")
# Bytes of a field's name: file systems stop at 255, and masks add to it.
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Target:
    """Where a name goes; of several names for one field, the lowest rank wins."""

    name: str
    rank: int


class Contest(NamedTuple):
    """Two names of one record for one field, of which the preferred one is taken."""

    field: str
    kept: str
    other: str


@dataclass(frozen=True)
class NameMap:
    """Which names of the input are which fields.

    Of several names of a record for one field, the first of this order is taken:
    those that the user maps, as they are listed; the one that the format has of its
    own (``Lattice``, ``pos``); the field's own name; its other spellings.

    Parameters
    ----------
    mapping : dict of str to str
        Name in the input to field, in order of preference.
    ordered : frozenset of str
        Names of the mapping whose order the user chose: a record with two others for
        one field is ambiguous.

    Examples
    --------
    >>> NameMap.make(energy_key="REF_energy").target("REF_energy", "system").name
    'energy'
    """

    mapping: Mapping[str, str] = field(default_factory=dict)
    ordered: frozenset[str] = frozenset()
    _cache: dict[tuple[str, Level], Target] = field(
        default_factory=dict, repr=False, compare=False, hash=False
    )

    @staticmethod
    def make(
        energy_key: str | Sequence[str] | None = None,
        forces_key: str | Sequence[str] | None = None,
        key_map: Mapping[str, str] | None = None,
    ) -> NameMap:
        """The map of the options of ``convert``.

        Raises
        ------
        ConfigError
            A name is mapped to something that is no field.
        """
        mapping: dict[str, str] = {}
        ordered: set[str] = set()
        if not isinstance(key_map or {}, Mapping):
            raise ConfigError(
                "key_map", "no mapping", found=type(key_map).__name__, expected='{"name": "field"}'
            )
        for keys, target in ((energy_key, "energy"), (forces_key, "forces")):
            listed = [keys] if isinstance(keys, str) else [] if keys is None else keys
            if not isinstance(listed, (list, tuple)) or not all(isinstance(k, str) for k in listed):
                raise ConfigError(
                    f"{target}_key", "no name or list of names", found=repr(keys), expected='"name"'
                )
            for key in listed:
                mapping[key] = target
                ordered.add(key)
        for key, target in (key_map or {}).items():
            if not isinstance(key, str) or not isinstance(target, str):
                raise ConfigError(
                    "key_map", "names are text", found=repr({key: target}), expected='{"a": "b"}'
                )
            known = resolve(target)
            if known not in FIELDS and not known.isidentifier():
                raise ConfigError(
                    "key_map", f"{target!r} cannot name a field. {nearest(target, FIELDS)}"
                )
            if mapping.get(key, known) != known:
                raise ConfigError(
                    "key_map",
                    f"{key!r} cannot be both {mapping[key]} and {known}",
                    mend="name it once",
                )
            mapping[key] = known
        return NameMap(mapping, frozenset(ordered))

    def target(self, name: str, level: Level) -> Target:
        """The field that a name at a level belongs to."""
        found = self._cache.get((name, level))
        if found is None:
            found = self._cache[name, level] = self._find(name, level)
        return found

    def contests(self, given: Iterable[tuple[str, Level]]) -> list[Contest]:
        """Of the names of one record: those that another name for their field puts aside.

        Examples
        --------
        >>> NameMap().contests([("energies", "system"), ("energy", "system")])
        [Contest(field='energy', kept='energy', other='energies')]
        """
        held: dict[str, list[tuple[int, str]]] = {}
        for name, level in given:
            target = self.target(name, level)
            held.setdefault(target.name, []).append((target.rank, name))
        out = []
        for known, names in held.items():
            if len(names) > 1:
                kept = min(names)[1]
                out += [Contest(known, kept, n) for _, n in sorted(names) if n != kept]
        return out

    def is_ambiguous(self, contest: Contest) -> bool:
        """Whether the user mapped both names, without saying which is preferred."""
        names = {contest.kept, contest.other}
        return names <= self.mapping.keys() and not names <= self.ordered

    def _find(self, name: str, level: Level) -> Target:
        if name in self.mapping:
            rank = list(self.mapping).index(name)
            return Target(_on_level(self.mapping[name], level), rank)
        last = len(self.mapping)
        aliases = _ATOM_ALIASES if level == "atom" else _SYSTEM_ALIASES
        found = _on_level(aliases.get(name, name), level)
        if name in _OF_THE_FORMAT:
            return Target(found, last)
        if name == found:
            return Target(found, last + 1)
        return Target(found, last + 2 + _ALIAS_ORDER.get(name, len(_ALIAS_ORDER)))


def _on_level(name: str, level: Level) -> str:
    known = resolve(name)
    spec = FIELDS.get(known)
    if spec is not None:
        if spec.level == level:
            return known
        # The name of a field of another level: per-atom "energies" are not the
        # energy of the system.
        prefix = "atomic" if level == "atom" else level
        return f"{prefix}_{name}"
    # The name becomes that of a folder in the store.
    safe = name.translate(_UNSAFE)
    if len(safe.encode("utf-8", "replace")) > _LONGEST:
        digest = hashlib.sha256(safe.encode("utf-8", "replace")).hexdigest()[:8]
        kept = safe.encode("utf-8", "replace")[: _LONGEST - 9].decode("utf-8", "ignore")
        safe = f"{kept}_{digest}"
    return safe if safe not in ("", ".", "..", "zarr.json") else f"field_{safe}"

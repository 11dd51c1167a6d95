"""The table of fields that every other part reads.

A field has a level, the shape of one row behind its level axis, a kind of
dtype, a unit and a fill. Unknown names are legal (custom fields); their level
is recorded where they are made and never guessed from a length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from alchemi_xr._typing import Level, NDArray
from alchemi_xr.errors import FieldError, LevelError

__all__ = [
    "ALIASES",
    "FIELDS",
    "LEVELS",
    "FieldSpec",
    "canonical_level",
    "check_tail",
    "field_order",
    "fill_for",
    "level_of",
    "resolve",
]

LEVELS: tuple[Level, ...] = ("atom", "edge", "system")

_LEVEL_WORDS: dict[str, Level] = {
    "atom": "atom",
    "atoms": "atom",
    "node": "atom",
    "nodes": "atom",
    "edge": "edge",
    "edges": "edge",
    "system": "system",
    "systems": "system",
    "graph": "system",
    "sample": "system",
}


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One row of the table.

    Parameters
    ----------
    name : str
    level : {"atom", "edge", "system"}
    tail : tuple of int or str
        Shape of one row; a letter stands for any length.
    kind : str
        NumPy dtype kinds that are right for it (``"f"``, ``"iu"``, ``"b"``).
    unit : str
        Empty when it has none.
    dims : tuple of str
        Names of the axes behind the level axis, for xarray.
    aliases : tuple of str
        Other spellings that mean the same field.
    description : str
    """

    name: str
    level: Level
    tail: tuple[int | str, ...]
    kind: str
    unit: str
    description: str
    dims: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def _table(*specs: FieldSpec) -> dict[str, FieldSpec]:
    return {spec.name: spec for spec in specs}


_V3 = ("xyz",)
_M3 = ("row", "xyz")

FIELDS: dict[str, FieldSpec] = _table(
    FieldSpec("atomic_numbers", "atom", (), "iu", "", "atomic numbers", aliases=("numbers",)),
    FieldSpec("positions", "atom", (3,), "f", "Å", "Cartesian positions", _V3),
    FieldSpec("atomic_masses", "atom", (), "f", "amu", "atomic masses", aliases=("masses",)),
    FieldSpec("atom_categories", "atom", (), "iu", "", "category of each atom (AtomCategory)"),
    FieldSpec("velocities", "atom", (3,), "f", "Å·(eV/(amu·Å²))^½", "velocities", _V3),
    FieldSpec("forces", "atom", (3,), "f", "eV/Å", "forces, -dE/dR", _V3, ("force",)),
    FieldSpec("momenta", "atom", (3,), "f", "Å·(eV·amu/Å²)^½", "momenta", _V3),
    FieldSpec("charges", "atom", (), "f", "e", "partial charges"),
    FieldSpec("kinetic_energies", "atom", (1,), "f", "eV", "kinetic energy of each atom", ("one",)),
    FieldSpec("node_alpha_spins", "atom", (1,), "f", "", "alpha spin populations", ("one",)),
    FieldSpec("node_beta_spins", "atom", (1,), "f", "", "beta spin populations", ("one",)),
    FieldSpec("node_attrs", "atom", ("H",), "f", "", "node attributes", ("node_attr",)),
    FieldSpec("node_embeddings", "atom", ("H",), "f", "", "node embeddings", ("node_embedding",)),
    FieldSpec("neighbor_matrix", "atom", ("K",), "iu", "", "dense neighbours", ("neighbor",)),
    FieldSpec(
        "neighbor_matrix_shifts", "atom", ("K", 3), "iuf", "", "their images", ("neighbor", "xyz")
    ),
    FieldSpec("num_neighbors", "atom", (), "iu", "", "neighbours of each atom"),
    FieldSpec("neighbor_list", "edge", (2,), "iu", "", "source and target atom", ("pair",)),
    FieldSpec("shifts", "edge", (3,), "f", "Å", "Cartesian image shift of each edge", _V3),
    FieldSpec("neighbor_list_shifts", "edge", (3,), "iuf", "", "lattice images", _V3),
    FieldSpec("edge_embeddings", "edge", ("H",), "f", "", "edge embeddings", ("edge_embedding",)),
    FieldSpec("energy", "system", (1,), "f", "eV", "potential energy", ("one",), ("energies",)),
    FieldSpec("cell", "system", (3, 3), "f", "Å", "lattice vectors as rows", _M3, ("cells",)),
    FieldSpec("pbc", "system", (3,), "b", "", "periodic along each lattice vector", _V3),
    FieldSpec(
        "stress", "system", (3, 3), "f", "eV/Å³", "stress, positive in tension", _M3, ("stresses",)
    ),
    FieldSpec("virial", "system", (3, 3), "f", "eV", "virial, -dE/dstrain", _M3, ("virials",)),
    FieldSpec("dipole", "system", (3,), "f", "e·Å", "electric dipole", _V3, ("dipoles",)),
    FieldSpec("charge", "system", (1,), "f", "e", "total charge", ("one",)),
    FieldSpec("spin", "system", (1,), "f", "", "spin multiplicity", ("one",)),
    FieldSpec(
        "graph_embeddings", "system", ("H",), "f", "", "system embeddings", ("graph_embedding",)
    ),
    FieldSpec("graph_alpha_spins", "system", (1,), "f", "", "alpha spins of a system", ("one",)),
    FieldSpec("status", "system", (1,), "iu", "", "stage that a system is in", ("one",)),
    FieldSpec("system_id", "system", (1,), "iu", "", "number in the order drawn", ("one",)),
    FieldSpec("dataset_index", "system", (1,), "iu", "", "sample of the source", ("one",)),
    FieldSpec("fmax", "system", (1,), "f", "eV/Å", "largest atomic force norm", ("one",)),
    FieldSpec("energy_change", "system", (1,), "f", "eV", "|E - E of the last step|", ("one",)),
)

ALIASES: dict[str, str] = {alias: spec.name for spec in FIELDS.values() for alias in spec.aliases}


def resolve(name: str) -> str:
    """The canonical name of a field: an alias becomes its field, all else stays.

    Examples
    --------
    >>> resolve("energies"), resolve("my_feature")
    ('energy', 'my_feature')
    """
    return ALIASES.get(name, name)


def canonical_level(word: str, *, where: str = "level") -> Level:
    """``"atom"``, ``"edge"`` or ``"system"`` for any accepted spelling.

    Raises
    ------
    LevelError
        The word is not a level.
    """
    level = _LEVEL_WORDS.get(word) if isinstance(word, str) else None
    if level is None:
        raise LevelError(
            where,
            f"Invalid level {word!r}",
            expected="'atom' (or 'node'), 'edge' or 'system'",
        )
    return level


def level_of(name: str, levels: Mapping[str, str] | None = None) -> Level | None:
    """Level of a field: from the caller's record, else from the table, else None."""
    if levels and name in levels:
        return canonical_level(levels[name], where=f"field {name!r}")
    spec = FIELDS.get(resolve(name))
    return spec.level if spec else None


def fill_for(dtype: np.dtype[Any]) -> Any:
    """Value that stands in rows without data: NaN, 0, False or the empty text."""
    if dtype.kind in "fc":
        return dtype.type(np.nan)
    if dtype.kind in "USTO":
        return ""
    return dtype.type(0)


def check_tail(name: str, shape: tuple[int, ...], *, where: str) -> None:
    """Raise when an array of this field has the wrong shape behind its level axis.

    Unknown fields have no fixed tail and always pass.

    Raises
    ------
    FieldError
        The tail differs from the table.
    """
    spec = FIELDS.get(name)
    if spec is None:
        return
    tail = shape[1:]
    if len(tail) == len(spec.tail) and all(
        isinstance(want, str) or want == got for want, got in zip(spec.tail, tail, strict=True)
    ):
        return
    letter = {"atom": "V", "edge": "E", "system": "B"}[spec.level]
    expected = "[" + ", ".join([letter, *map(str, spec.tail)]) + "]"
    raise FieldError(
        where,
        f"field {name!r} has the wrong shape",
        found=list(shape),
        expected=expected,
        mend=f"reshape {name} so that its rows are {list(spec.tail) or 'scalars'}",
    )


def field_order(names: Iterable[str]) -> list[str]:
    """The names in the one order used everywhere: the table's, then by alphabet.

    Equal content then gives equal bytes, whatever order it came in.
    """
    return list(_ordered(tuple(names)))


@lru_cache(maxsize=512)
def _ordered(names: tuple[str, ...]) -> tuple[str, ...]:
    # Asked for every batch, with the same names: worth remembering.
    rank = {name: i for i, name in enumerate(FIELDS)}
    return tuple(sorted(set(names), key=lambda n: (rank.get(n, len(rank)), n)))


def as_rows(name: str, values: NDArray) -> NDArray:
    """A system-level array with the field's own tail: ``energy`` [N] becomes [N, 1].

    On disk and in peers a trailing axis of length one comes and goes; inside
    the project the table decides.
    """
    spec = FIELDS.get(name)
    if spec is None or len(spec.tail) == values.ndim - 1:
        return values
    if spec.tail == (1,) and values.ndim == 1:
        return values[:, None]
    if len(spec.tail) == 2 and values.ndim == 2 and values.shape[1] == 9:
        return values.reshape(len(values), 3, 3)
    if values.ndim > 2 and values.shape[1] == 1:
        return as_rows(name, values[:, 0])
    return values

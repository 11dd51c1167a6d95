"""One sample in torch: named tensors, each at a recorded level.

``AtomicData`` checks shapes and dtypes once, when a field is set, against the
field table; masses, categories and velocities are made when asked for. Many
samples are a ``Batch``; conversions to other packages are in ``atoms``.
"""

from __future__ import annotations

import enum
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from alchemi_xr._typing import Level
from alchemi_xr.data.coerce import (
    CLASS_OF,
    SPECS,
    as_tensor,
    check_finite,
    coerce_field,
    tail_fits,
)
from alchemi_xr.data.fields import ALIASES, canonical_level, check_tail, field_order
from alchemi_xr.data.level import DEFAULT_FIELDS, default_rows, own_storage
from alchemi_xr.errors import ArgumentTypeError, FieldError, UnknownFieldError, nearest

__all__ = ["AtomCategory", "AtomicData"]


class AtomCategory(enum.IntEnum):
    """What an atom is in its system; hooks and models may treat each kind on its own."""

    GAS = 0
    LIQUID = 1
    GL_INTERFACE = 2
    SURFACE = 3
    GS_INTERFACE = 4
    BULK = 5
    SB_INTERFACE = 6
    FRAGMENT = 7
    CLUSTER = 8
    TERMINAL = 9
    CENTRAL = 10
    SPECIAL = -1


_COUNTED = {"atom": ("atoms", "atomic_numbers"), "edge": ("edges", "neighbor_list")}


class AtomicData:
    """One molecule, crystal or frame as named tensors.

    Parameters
    ----------
    atomic_numbers : integer tensor, [V]
    positions : float tensor, [V, 3], Å
        Its dtype rules the other floating fields, except ``energy``, which
        keeps its own.
    info : dict, optional
        Anything else; never batched, never stored.
    validate : bool
        False skips every check and cast: shapes must then be right.
    **fields
        Fields of the table or their aliases (tensors, arrays, lists or
        numbers). Other names become plain attributes; give them a level with
        ``add_node_property``, ``add_edge_property`` or
        ``add_system_property`` for a Batch to carry them.

    Raises
    ------
    FieldError
        A field has the wrong shape, dtype or device, or positions are not finite.

    Examples
    --------
    >>> water = AtomicData(
    ...     atomic_numbers=torch.tensor([8, 1, 1]), positions=torch.zeros(3, 3), energy=-76.4
    ... )
    >>> water.num_nodes, tuple(water.energy.shape)
    (3, (1, 1))
    """

    __slots__ = ("__dict__", "__weakref__", "_levels", "_units", "_values", "info")

    _values: dict[str, Tensor]
    _levels: dict[str, Level]
    _units: dict[str, str]
    info: dict[str, Any]

    precision_preserving_keys: frozenset[str] = frozenset({"energy"})
    """Floating fields that keep their dtype whatever that of the positions."""

    def __init__(
        self, *, info: dict[str, Any] | None = None, validate: bool = True, **fields: Any
    ) -> None:
        init = object.__setattr__
        values: dict[str, Tensor] = {}
        init(self, "_values", values)
        init(self, "_levels", {})
        init(self, "_units", {})
        init(self, "info", {} if info is None else info)
        given: dict[str, Any] = {}
        for name, value in fields.items():
            key = ALIASES.get(name, name)
            if value is None:
                continue
            if key in given:
                raise FieldError("AtomicData", f"field {key!r} is given twice (as {name!r} too)")
            given[key] = value
        for name in ("atomic_numbers", "positions"):
            if name not in given:
                raise FieldError("AtomicData", f"the required field {name!r} is missing")
        if not validate:
            for name, value in given.items():
                if name in SPECS:
                    values[name] = value if isinstance(value, Tensor) else coerce_field(name, value)
                else:
                    self.__dict__[name] = value
            return
        positions = given.pop("positions")
        if not isinstance(positions, Tensor):
            positions = as_tensor("positions", positions, kind="f", dtype=torch.get_default_dtype())
        self._set_checked("atomic_numbers", given.pop("atomic_numbers"), positions)
        self._set_checked("positions", positions, positions)
        if "neighbor_list" in given:
            self._set_checked("neighbor_list", given.pop("neighbor_list"), positions)
        for name, value in given.items():
            if name in SPECS:
                self._set_checked(name, value, positions)
            else:
                self.__dict__[name] = value

    @classmethod
    def _trusted(
        cls,
        values: dict[str, Tensor],
        levels: dict[str, Level] | None = None,
        units: dict[str, str] | None = None,
    ) -> AtomicData:
        """Build from tensors that are known to fit (parts of a Batch)."""
        self = object.__new__(cls)
        init = object.__setattr__
        init(self, "_values", values)
        init(self, "_levels", levels or {})
        init(self, "_units", units or {})
        init(self, "info", {})
        return self

    # -- checking ---------------------------------------------------------------------------

    def _set_checked(self, name: str, value: Any, positions: Tensor) -> None:
        spec = SPECS.get(name)
        if spec is None:
            level, tail, rank, kind = self._levels[name], None, 0, ""
        else:
            level, tail, rank, kind = spec
        if not isinstance(value, Tensor):
            value = coerce_field(name, value, dtype=positions.dtype)
        shape = value.shape
        fits = len(shape) == rank and shape[1:] == tail
        if spec is not None and not fits:
            if not (len(shape) == rank and tail_fits(shape[1:], tail or ())):
                value = coerce_field(name, value)
                shape = value.shape
            check_tail(name, shape, where="AtomicData")
        self._check_rows(name, level, shape)
        if kind and CLASS_OF.get(value.dtype, "iu") not in kind:
            value = self._mend_dtype(name, kind, value, positions)
        if (
            kind == "f"
            and value.dtype != positions.dtype
            and name not in self.precision_preserving_keys
        ):
            warnings.warn(
                f"AtomicData: field {name!r} is cast from {value.dtype} to {positions.dtype}, "
                "the dtype of the positions",
                UserWarning,
                stacklevel=3,
            )
            value = value.to(positions.dtype)
        if value.device != positions.device:
            raise FieldError(
                "AtomicData",
                f"field {name!r} is on another device than the positions",
                found=value.device,
                expected=positions.device,
            )
        if name == "positions":
            check_finite(value)
        elif name == "neighbor_list":
            self._check_edges(value)
        self._values[name] = value

    def _check_rows(self, name: str, level: Level, shape: Sequence[int]) -> None:
        values = self._values
        if level == "system":
            expected = 1
        elif level == "atom":
            numbers = values.get("atomic_numbers")
            if numbers is None or name == "atomic_numbers":
                return
            expected = len(numbers)
        elif name == "neighbor_list":
            return
        else:
            edges = values.get("neighbor_list")
            if edges is None:
                return
            expected = len(edges)
        found = shape[0] if len(shape) else None
        if found == expected:
            return
        if level == "system":
            raise FieldError(
                "AtomicData",
                f"the system field {name!r} needs a leading axis of 1",
                found=list(shape),
                expected="[1, ...]",
            )
        word, ruler = _COUNTED[level]
        raise FieldError(
            "AtomicData",
            f"Inconsistent number of {word} in {name}: expected {expected}, got {found}",
            mend=f"give {name} one row for each of the {expected} rows of {ruler}",
        )

    @staticmethod
    def _mend_dtype(name: str, kind: str, value: Tensor, positions: Tensor) -> Tensor:
        found = CLASS_OF.get(value.dtype, "iu")
        if kind == "f" and found == "iu" and name != "positions":
            return value.to(positions.dtype)
        if kind == "iu" and value.numel() == 0:
            return value.long()
        if kind == "b":
            mended = coerce_field(name, value)
            if mended.dtype == torch.bool:
                return mended
        words = {"f": "a float dtype", "iu": "an integer dtype", "b": "bool"}
        raise FieldError(
            "AtomicData",
            f"field {name!r} has the wrong dtype",
            found=value.dtype,
            expected=words.get(kind, f"dtype kind {kind}"),
        )

    def _check_edges(self, pairs: Tensor) -> None:
        if pairs.numel() == 0 or pairs.device.type == "meta":
            return
        low, high = torch.aminmax(pairs)
        atoms = len(self._values["atomic_numbers"])
        if int(low) < 0 or int(high) >= atoms:
            raise FieldError(
                "AtomicData",
                "neighbor_list names an atom that is not there",
                found=int(low) if int(low) < 0 else int(high),
                expected=f"0 to {atoms - 1}",
            )

    # -- fields -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        key = ALIASES.get(name, name)
        found = self._values.get(key)
        if found is not None:
            return found
        if key in DEFAULT_FIELDS:
            values = self._values
            made = default_rows(key, values["atomic_numbers"], values["positions"])
            values[key] = made
            return made
        if key in SPECS:
            return None
        raise UnknownFieldError(
            "AtomicData", f"no field {name!r}. {nearest(name, [*self._values, *SPECS])}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        key = ALIASES.get(name, name)
        if key in SPECS or key in self._levels:
            self._assign(key, value)
        elif name in AtomicData.__slots__ or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            self.__dict__[name] = value

    def _assign(self, key: str, value: Any) -> None:
        if value is None:
            if key in ("atomic_numbers", "positions"):
                raise FieldError("AtomicData", f"the required field {key!r} cannot be None")
            self._values.pop(key, None)
            return
        positions = value if key == "positions" else self._values["positions"]
        if not isinstance(positions, Tensor):
            positions = as_tensor(key, value, kind="f", dtype=self.dtype)
            value = positions
        if key == "atomic_numbers" and len(value) != self.num_nodes:
            raise FieldError(
                "AtomicData",
                f"Inconsistent number of atoms in {key}: expected {self.num_nodes}, got {len(value)}",
                mend="make a new AtomicData for another number of atoms",
            )
        if key == "neighbor_list" and value is not None:
            self._check_edge_change(len(value))
        self._set_checked(key, value, positions)

    def _check_edge_change(self, rows: int) -> None:
        """Refuse a list of another length while other edge fields would no longer fit."""
        for name, values in self._values.items():
            if name != "neighbor_list" and self._level(name) == "edge" and len(values) != rows:
                raise FieldError(
                    "AtomicData",
                    f"Inconsistent number of edges in {name}: expected {rows}, got {len(values)}",
                    mend=f"set {name} to None first",
                )

    def __delattr__(self, name: str) -> None:
        key = ALIASES.get(name, name)
        if key in self._values:
            self._assign(key, None)
        else:
            object.__delattr__(self, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        key = ALIASES.get(name, name)
        return key in self._values or key in DEFAULT_FIELDS or name in self.__dict__

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(list(self._values.items()))

    def _level(self, name: str) -> Level:
        spec = SPECS.get(name)
        return spec[0] if spec else self._levels[name]

    def level_of(self, name: str) -> Level:
        """Level of a field of this sample.

        Raises
        ------
        UnknownFieldError
        """
        key = ALIASES.get(name, name)
        if key in SPECS or key in self._levels:
            return self._level(key)
        raise UnknownFieldError("AtomicData", f"no field {name!r}. {nearest(name, self._values)}")

    def _add(self, key: str, value: Any, level: Level) -> None:
        name = ALIASES.get(key, key)
        spec = SPECS.get(name)
        if spec is not None and spec[0] != level:
            raise FieldError(
                "AtomicData", f"field {name!r} has a fixed level", found=level, expected=spec[0]
            )
        if spec is None:
            if isinstance(getattr(type(self), name, None), property) or name in type(self).__dict__:
                raise FieldError(
                    "AtomicData", f"{name!r} is a member of AtomicData", mend="rename it"
                )
            before = self._levels.get(name)
            self._levels[name] = canonical_level(level)
        try:
            self._set_checked(name, value, self._values["positions"])
        except FieldError:
            if spec is None:  # a refused field leaves no trace
                self._levels.pop(name)
                if before is not None:
                    self._levels[name] = before
            raise
        self.__dict__.pop(name, None)

    def add_node_property(self, key: str, value: Any, node_dim: int = 0) -> None:
        """Register a field of the atoms; its axis of atoms is ``node_dim``."""
        value = coerce_field(key, value)
        self._add(key, value.movedim(node_dim, 0) if node_dim else value, "atom")

    def add_edge_property(self, key: str, value: Any) -> None:
        """Register a field of the edges, [E, ...]."""
        self._add(key, coerce_field(key, value), "edge")

    def add_system_property(self, key: str, value: Any) -> None:
        """Register a field of the system, [1, ...] (a number becomes [1])."""
        value = coerce_field(key, value)
        self._add(key, value.reshape(1) if value.ndim == 0 else value, "system")

    # -- what it is -------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Number of atoms."""
        return len(self._values["atomic_numbers"])

    @property
    def num_atoms(self) -> int:
        """Number of atoms."""
        return len(self._values["atomic_numbers"])

    @property
    def num_edges(self) -> int:
        """Number of edges; 0 without an edge field."""
        values = self._values
        if "neighbor_list" in values:
            return len(values["neighbor_list"])
        return next((len(v) for k, v in values.items() if self._level(k) == "edge"), 0)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._values["positions"].device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the positions."""
        return self._values["positions"].dtype

    def _at(self, level: Level) -> dict[str, Tensor]:
        return {k: self._values[k] for k in field_order(self._values) if self._level(k) == level}

    @property
    def node_properties(self) -> dict[str, Tensor]:
        """Atom fields that are set."""
        return self._at("atom")

    @property
    def edge_properties(self) -> dict[str, Tensor]:
        """Edge fields that are set."""
        return self._at("edge")

    @property
    def system_properties(self) -> dict[str, Tensor]:
        """System fields that are set."""
        return self._at("system")

    @property
    def chemical_hash(self) -> str:
        """blake2s of elements (sorted), their positions, pbc and cell."""
        numbers = self._values["atomic_numbers"].detach().cpu().long()
        order = torch.argsort(numbers, stable=True)
        digest = hashlib.blake2s(numbers[order].numpy().tobytes())
        digest.update(_bytes(self._values["positions"].detach().cpu()[order]))
        for name in ("pbc", "cell"):
            if name in self._values:
                digest.update(name.encode() + _bytes(self._values[name].detach().cpu()))
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AtomicData):
            return NotImplemented
        return self.chemical_hash == other.chemical_hash

    def __hash__(self) -> int:
        return hash(self.chemical_hash)

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={list(self._values[k].shape)}" for k in field_order(self._values))
        return f"AtomicData({fields})"

    # -- copies -----------------------------------------------------------------------------

    def _map(self, function: Any) -> AtomicData:
        new = AtomicData._trusted(
            {k: function(k, v) for k, v in self._values.items()},
            dict(self._levels),
            dict(self._units),
        )
        object.__setattr__(new, "info", dict(self.info))
        new.__dict__.update(
            {k: function(k, v) if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}
        )
        return new

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> AtomicData:
        """A copy on a device, its floating fields in a dtype if one is given."""

        def move(_: str, value: Tensor) -> Tensor:
            kind = dtype if dtype is not None and value.is_floating_point() else None
            return value.to(device=device, dtype=kind, non_blocking=non_blocking, copy=True)

        return self._map(move)

    def clone(self) -> AtomicData:
        """A copy that shares no memory."""
        return self._map(lambda _, value: value.clone())

    def cpu(self) -> AtomicData:
        """A copy in host memory."""
        return self.to("cpu")

    def cuda(self, device: int | str | None = None) -> AtomicData:
        """A copy on a CUDA device."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def pin_memory(self) -> AtomicData:
        """A copy in page-locked host memory, where there is a CUDA device; else a plain copy."""
        if not torch.cuda.is_available():
            return self.clone()
        return self._map(lambda _, value: value.pin_memory())

    def to_dict(self) -> dict[str, Tensor]:
        """Its fields by name, not copied."""
        return {k: self._values[k] for k in field_order(self._values)}

    model_dump = to_dict

    def __getstate__(self) -> dict[str, Any]:
        return {
            "values": {k: own_storage(v) for k, v in self._values.items()},
            "levels": dict(self._levels),
            "units": dict(self._units),
            "info": self.info,
            "extra": dict(self.__dict__),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        init = object.__setattr__
        for slot in ("values", "levels", "units"):
            init(self, f"_{slot}", state[slot])
        init(self, "info", state["info"])
        self.__dict__.update(state["extra"])

    # -- other packages ---------------------------------------------------------------------

    @classmethod
    def from_atoms(
        cls,
        atoms: Any,
        energy_key: str = "energy",
        forces_key: str = "forces",
        stress_key: str = "stress",
        virials_key: str = "virials",
        dipole_key: str = "dipole",
        charges_key: str = "charges",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        z_table: Any = None,
    ) -> AtomicData:
        """A sample of an ``ase.Atoms``; see ``data.atoms.fields_of_atoms``."""
        from alchemi_xr.data.atoms import fields_of_atoms

        if not (hasattr(atoms, "numbers") and hasattr(atoms, "positions")):
            raise ArgumentTypeError(
                "AtomicData.from_atoms",
                "an argument of the wrong kind",
                found=type(atoms).__name__,
                expected="ase.Atoms",
                mend="pymatgen structures go to from_structure",
            )
        fields, levels, info = fields_of_atoms(
            atoms,
            keys={
                "energy": energy_key,
                "forces": forces_key,
                "stress": stress_key,
                "virial": virials_key,
                "dipole": dipole_key,
                "charges": charges_key,
            },
            dtype=dtype,
            z_table=z_table,
        )
        known: dict[str, Any] = {k: v for k, v in fields.items() if k not in levels}
        data = cls(info=info, **known)
        for name, level in levels.items():
            data._add(name, fields[name], level)
        return data if torch.device(device).type == "cpu" else data.to(device)

    @classmethod
    def from_structure(cls, structure: Any, *args: Any, **options: Any) -> AtomicData:
        """A sample of a pymatgen ``Structure`` or ``Molecule``; options as ``from_atoms``."""
        from alchemi_xr.data.atoms import atoms_of_structure

        return cls.from_atoms(atoms_of_structure(structure), *args, **options)

    def to_atoms(self) -> Any:
        """An ``ase.Atoms``: results in a calculator, other fields in arrays and info."""
        from alchemi_xr.data.atoms import atoms_of_fields

        return atoms_of_fields(
            self._values, {name: self._level(name) for name in self._values}, self.info
        )


def _bytes(values: Tensor) -> bytes:
    data: bytes = values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return data

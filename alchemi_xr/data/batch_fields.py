"""The tensors of a Batch: where they are, how long, at which level.

``FlatFields`` holds flat tensors at three levels with their pointers, answers
what is there and takes what is set. Making, choosing and moving systems is in
``batch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import Level
from alchemi_xr.data.coerce import coerce_field
from alchemi_xr.data.collate import Flat
from alchemi_xr.data.fields import ALIASES, FIELDS, canonical_level, check_tail, field_order
from alchemi_xr.data.level import DEFAULT_FIELDS, LevelRows, default_rows, from_numpy
from alchemi_xr.errors import FieldError, UnknownFieldError, nearest

__all__ = ["FlatFields"]

_WORD = {"atom": "node", "edge": "edge", "system": "system"}


class _NoFieldError(UnknownFieldError):
    """The same error, its text made when read.

    ``getattr(batch, name, None)`` and ``hasattr`` throw it away, in every step
    of a simulation; looking for the nearest names costs 50 µs.
    """

    def __init__(self, name: str, names: Iterable[str]) -> None:
        Exception.__init__(self)
        self.where = "Batch"
        self.found = self.expected = self.mend = None
        self._asked = name
        self._names = names

    @property
    def what(self) -> str:  # type: ignore[override]
        return f"no field {self._asked!r}. {nearest(self._asked, self._names)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (UnknownFieldError, (self.where, self.what))


class FlatFields:
    """Flat tensors on one device at the levels atom, edge and system.

    Each field has a recorded level and the row count of that level. ``Batch``
    is its only child.
    """

    _fields: dict[str, Tensor]
    _levels: dict[str, Level]
    _present: dict[str, Tensor]
    _units: dict[str, str]
    _atoms: LevelRows
    _edges: LevelRows
    _num: int
    _capacity: int
    _device: torch.device
    _copied: Tensor | None

    def _adopt(self, flat: Flat, capacity: int | None = None) -> Self:
        state = self.__dict__
        state["_fields"] = flat.fields
        state["_levels"] = flat.levels
        state["_present"] = flat.present
        state["_units"] = flat.units
        state["_atoms"] = flat.atoms
        state["_edges"] = flat.edges
        state["_num"] = flat.num_systems
        state["_capacity"] = flat.num_systems if capacity is None else capacity
        state["_device"] = flat.device
        state["_copied"] = None
        return self

    @classmethod
    def _of(cls, flat: Flat, capacity: int | None = None) -> Self:
        return object.__new__(cls)._adopt(flat, capacity)

    # -- what it is -------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._num

    @property
    def num_graphs(self) -> int:
        """Number of systems."""
        return self._num

    batch_size = num_graphs
    num_systems = num_graphs

    @property
    def system_capacity(self) -> int:
        """Systems that fit; more than ``num_graphs`` in a buffer."""
        return self._capacity

    @property
    def num_nodes(self) -> int:
        """Rows of the atom tensors (in a buffer, its capacity)."""
        return self._atoms.capacity

    num_atoms = num_nodes

    @property
    def num_edges(self) -> int:
        """Rows of the edge tensors (in a buffer, its capacity)."""
        return self._edges.capacity

    @property
    def max_num_nodes(self) -> int:
        """Atoms of the largest system."""
        return int(self._atoms.counts.max(initial=0))

    @property
    def num_nodes_list(self) -> list[int]:
        """Atoms of each system."""
        return [int(n) for n in self._atoms.counts]

    @property
    def num_edges_list(self) -> list[int]:
        """Edges of each system; empty without edge fields."""
        if "edge" not in self._levels.values():
            return []
        return [int(n) for n in self._edges.counts]

    @property
    def num_nodes_per_graph(self) -> Tensor:
        """Atoms of each system, int64 [B]."""
        return self._atoms.counts_device

    @property
    def num_edges_per_graph(self) -> Tensor:
        """Edges of each system, int64 [B]."""
        return self._edges.counts_device

    @property
    def atoms_ptr(self) -> Tensor:
        """First atom of each system and the end, int64 [B + 1]."""
        return self._atoms.ptr

    @property
    def edges_ptr(self) -> Tensor:
        """First edge of each system and the end, int64 [B + 1]."""
        return self._edges.ptr

    @property
    def batch_ptr(self) -> Tensor:
        """``atoms_ptr`` as int32."""
        return self._atoms.ptr32

    @property
    def batch_idx(self) -> Tensor:
        """System of every atom in use, int32 [V]."""
        return self._atoms.index32

    atom_system = batch_idx

    @property
    def edge_system(self) -> Tensor:
        """System of every edge in use, int32 [E]."""
        return self._edges.index32

    @property
    def edge_ptr(self) -> Tensor:
        """CSR over atoms by the source of each edge, int32 [V + 1]."""
        ptr = torch.zeros(self._atoms.used + 1, dtype=torch.int32, device=self._device)
        if "neighbor_list" in self._fields:
            source = self._used("neighbor_list")[:, 0].long()
            counts = torch.bincount(source, minlength=self._atoms.used)
            torch.cumsum(counts, 0, out=ptr[1:])
        return ptr

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._device

    @property
    def keys(self) -> dict[str, set[str]]:
        """Names of its fields by level (node, edge, system), as they are now."""
        keys: dict[str, set[str]] = {"node": set(), "edge": set(), "system": set()}
        for name, level in self._levels.items():
            keys[_WORD[level]].add(name)
        return keys

    @property
    def units(self) -> dict[str, str]:
        """Units that differ from the field table."""
        return self._units

    @property
    def present(self) -> dict[str, Tensor]:
        """For each field with holes, which systems have it, bool [B]."""
        return {name: mask[: self._num] for name, mask in self._present.items()}

    def has(self, name: str) -> Tensor:
        """Which systems carry a field, bool [B]."""
        key = ALIASES.get(name, name)
        mask = self._present.get(key)
        if mask is not None:
            return mask[: self._num]
        there = key in self
        return torch.full((self._num,), there, dtype=torch.bool, device=self._device)

    def level_of(self, name: str) -> Level:
        """Recorded level of a field.

        Raises
        ------
        UnknownFieldError
        """
        key = ALIASES.get(name, name)
        level = self._levels.get(key)
        if level is None and key in DEFAULT_FIELDS:
            return "atom"
        if level is None:
            raise self._unknown(name)
        return level

    def rows(self, level: Level) -> LevelRows | None:
        """Pointer and capacity of the atom or edge level (None for systems)."""
        return {"atom": self._atoms, "edge": self._edges}.get(level)

    def _rows_in_use(self, level: Level) -> int:
        if level == "system":
            return self._num
        return (self._atoms if level == "atom" else self._edges).used

    def _capacity_of(self, level: Level) -> int:
        if level == "system":
            return self._capacity
        return (self._atoms if level == "atom" else self._edges).capacity

    def _used(self, name: str) -> Tensor:
        values = self._fields[name]
        used = self._rows_in_use(self._levels[name])
        return values if used == len(values) else values[:used]

    # -- fields -----------------------------------------------------------------------------

    def _unknown(self, name: str) -> UnknownFieldError:
        return _NoFieldError(name, self._fields)

    def _get(self, name: str) -> Tensor:
        key = ALIASES.get(name, name)
        values = self._fields.get(key)
        if values is not None:
            return values
        if key in DEFAULT_FIELDS and "positions" in self._fields:
            made = default_rows(key, self._fields["atomic_numbers"], self._fields["positions"])
            self._fields[key], self._levels[key] = made, "atom"
            return made
        raise self._unknown(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._get(name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        key = ALIASES.get(name, name)
        return key in self._fields or (key in DEFAULT_FIELDS and "positions" in self._fields)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter([(name, self._fields[name]) for name in field_order(self._fields)])

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif isinstance(value, Tensor):
            self.set(name, value)
        else:
            key = ALIASES.get(name, name)
            if key in FIELDS or key in self._levels:
                self.set(name, value)
            else:
                self.__dict__[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value)

    def __delitem__(self, name: str) -> None:
        key = ALIASES.get(name, name)
        if key not in self._fields:
            raise self._unknown(name)
        for table in (self._fields, self._levels, self._present, self._units):
            table.pop(key, None)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            del self[name]

    def set(
        self,
        name: str,
        values: Any,
        *,
        level: str | None = None,
        present: Tensor | None = None,
    ) -> None:
        """Set a field for all systems.

        Parameters
        ----------
        name : str
        values : tensor (or array-like), [V, ...], [E, ...] or [B, ...]
            Moved to the batch's device; not copied when it is there.
        level : str, optional
            By default that of the field table, else the recorded one, else the
            first of system, atom, edge whose length fits.
        present : bool tensor, [B], optional
            Which systems have a value; by default all.

        Raises
        ------
        FieldError
            The length or the row shape does not fit the level.
        """
        key = ALIASES.get(name, name)
        if key.startswith("_") or hasattr(type(self), key):
            raise FieldError("Batch", f"{key!r} is a member of Batch", mend="choose another name")
        if not isinstance(values, Tensor):
            values = from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
        values = values.to(self._device)
        spec = FIELDS.get(key)
        if spec is not None and spec.tail == (1,) and values.ndim == 1:
            values = values[:, None]
        target = canonical_level(level) if level is not None else self._route(key, values)
        if key == "neighbor_list" and len(values) != self._edges.capacity and values.ndim == 2:
            others = [n for n, v in self._levels.items() if v == "edge" and n != key]
            if not others:
                self.set_edges(values)
                return
        rows = self._capacity_of(target)
        if values.ndim == 0 or len(values) != rows:
            found = len(values) if values.ndim else "a number"
            raise FieldError(
                "Batch",
                f"field {key!r} ({target}): Length mismatch: {found} vs {rows}",
                mend="use set_edges to replace all edges" if target == "edge" else None,
            )
        if spec is not None and spec.level == target:
            check_tail(key, tuple(values.shape), where="Batch")
        self._fields[key], self._levels[key] = values, target
        self._present.pop(key, None)
        if present is not None:
            self._present[key] = torch.as_tensor(present, dtype=torch.bool, device=self._device)

    def _route(self, key: str, values: Tensor) -> Level:
        spec = FIELDS.get(key)
        if spec is not None:
            return spec.level
        if key in self._levels:
            return self._levels[key]
        rows = len(values) if values.ndim else -1
        levels: tuple[Level, ...] = ("system", "atom", "edge")
        for level in levels:
            if rows == self._capacity_of(level):
                return level
        raise FieldError(
            "Batch",
            f"Length mismatch: field {key!r} has {rows} rows and fits no level",
            found=list(values.shape),
            expected=f"{self._capacity} systems, {self._atoms.capacity} atoms or "
            f"{self._edges.capacity} edges",
            mend="batch.set(name, values, level=...)",
        )

    def set_edges(self, neighbor_list: Tensor, *, edges_ptr: Any = None, **fields: Tensor) -> None:
        """Replace all edges: the old list and every old edge field go.

        Parameters
        ----------
        neighbor_list : integer tensor, [E, 2]
            Batch-global, the edges of each system together, in order of systems.
        edges_ptr : int64 tensor or array, [B + 1], optional
            Spares counting where the caller knows it.
        **fields : tensor, [E, ...]
            Other edge fields (``neighbor_list_shifts``, ``shifts``, ...).
        """
        check_tail("neighbor_list", tuple(neighbor_list.shape), where="Batch.set_edges")
        if edges_ptr is None:
            system = torch.bucketize(
                neighbor_list[:, 0].to(torch.int64).contiguous(), self._atoms.ptr[1:], right=True
            )
            if len(system) and bool((system.diff() < 0).any()):
                raise FieldError(
                    "Batch.set_edges",
                    "the edges of each system must stand together, in order of systems",
                    mend="sort them by the system of their source atom",
                )
            edges_ptr = torch.zeros(self._num + 1, dtype=torch.int64, device=self._device)
            torch.cumsum(torch.bincount(system, minlength=self._num), 0, out=edges_ptr[1:])
        for name in [n for n, level in self._levels.items() if level == "edge"]:
            del self[name]
        self.__dict__["_edges"] = LevelRows(edges_ptr, len(neighbor_list), self._device)
        for name, values in {"neighbor_list": neighbor_list, **fields}.items():
            self.set(name, values, level="edge")

    def add_key(
        self,
        key: str,
        values: Sequence[Any],
        level: str = "node",
        overwrite: bool = False,
    ) -> None:
        """Add a field from one tensor for each system.

        Raises
        ------
        FieldError
            It is there already, the count is wrong, or there is no edge.
        """
        name, target = ALIASES.get(key, key), canonical_level(level)
        if name in self._fields and not overwrite:
            raise FieldError(
                "Batch.add_key", f"field {name!r} already exists", mend="overwrite=True"
            )
        if len(values) != self._num:
            raise FieldError(
                "Batch.add_key",
                f"field {name!r} needs one tensor for each system",
                found=len(values),
                expected=self._num,
            )
        if target == "edge" and "edge" not in self._levels.values():
            raise FieldError(
                "Batch.add_key", "Group 'edges' not found: the batch has no edge field"
            )
        parts = [coerce_field(name, value) for value in values]
        if target == "system":
            parts = [p.reshape(1) if p.ndim == 0 else p for p in parts]
            parts = [p if len(p) == 1 else p.unsqueeze(0) for p in parts]
        else:
            counts = (self._atoms if target == "atom" else self._edges).counts
            for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
                if part.ndim == 0 or len(part) != count:
                    raise FieldError(
                        "Batch.add_key",
                        f"field {name!r} of system {i} has the wrong number of rows",
                        found=list(part.shape),
                        expected=f"{count} rows",
                    )
        self.set(name, torch.cat(parts), level=target)

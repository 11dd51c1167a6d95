"""Many samples in torch: flat tensors at three levels, and their pointers.

``Batch`` is to torch what ``Block`` is to NumPy. Every field has a recorded
level; where a sample lacks a field its rows are fill and ``present`` says so;
``neighbor_list`` holds batch-global atoms and every operation keeps it right.
Joining is in ``collate``, buffers in ``buffers``, messages in ``comm``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import IntArray, Level
from alchemi_xr.data import buffers, comm
from alchemi_xr.data.atomic_data import AtomicData, coerce_field
from alchemi_xr.data.block import Block
from alchemi_xr.data.collate import Flat, as_levels, collate, offset_edges
from alchemi_xr.data.csr import as_index, row_indices
from alchemi_xr.data.fields import ALIASES, FIELDS, canonical_level, check_tail, field_order
from alchemi_xr.data.kernels.gather import row_positions
from alchemi_xr.data.level import (
    DEFAULT_FIELDS,
    LevelRows,
    default_rows,
    from_numpy,
    own_storage,
    to_numpy,
)
from alchemi_xr.errors import FieldError, IndexRangeError, UnknownFieldError, nearest

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Batch"]

_WORD = {"atom": "node", "edge": "edge", "system": "system"}


class Batch:
    """Flat tensors of many samples on one device.

    Make one with ``from_data_list``, ``from_block``, ``from_raw_dicts`` or
    ``empty``; the constructor gives a batch of no system, or one over flat
    tensors that are known to fit.

    Parameters
    ----------
    device : torch.device or str
    fields : dict of str to tensor, optional
        [V, ...], [E, ...] or [B, ...]; ``neighbor_list`` batch-global.
    levels : dict of str to level, optional
        For names outside the field table.
    atoms_ptr, edges_ptr : int64 array, [B + 1], optional

    Examples
    --------
    >>> one = AtomicData(atomic_numbers=torch.tensor([18]), positions=torch.zeros(1, 3))
    >>> batch = Batch.from_data_list([one, one])
    >>> batch.num_graphs, batch.batch_ptr.tolist()
    (2, [0, 1, 2])
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

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        fields: Mapping[str, Tensor] | None = None,
        levels: Mapping[str, Any] | None = None,
        atoms_ptr: Any = None,
        edges_ptr: Any = None,
    ) -> None:
        home = torch.device(device)
        atoms = np.zeros(1, np.int64) if atoms_ptr is None else _host_ptr(atoms_ptr)
        edges = np.zeros(len(atoms), np.int64) if edges_ptr is None else _host_ptr(edges_ptr)
        self._adopt(
            Flat(
                {},
                {},
                {},
                LevelRows(atoms, int(atoms[-1]), home),
                LevelRows(edges, int(edges[-1]), home),
                len(atoms) - 1,
                home,
            )
        )
        given = as_levels(levels)
        for name, values in (fields or {}).items():
            self.set(name, values, level=given.get(ALIASES.get(name, name)))

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
    def _of(cls, flat: Flat, capacity: int | None = None) -> Batch:
        return object.__new__(cls)._adopt(flat, capacity)

    # -- making -----------------------------------------------------------------------------

    @classmethod
    def from_data_list(
        cls,
        data_list: Iterable[AtomicData],
        device: torch.device | str | None = None,
        skip_validation: bool = False,
        attr_map: Mapping[str, Any] | None = None,
        exclude_keys: Iterable[str] | None = None,
        field_levels: Mapping[str, Any] | None = None,
    ) -> Batch:
        """A batch of samples, over the union of their fields.

        Parameters
        ----------
        data_list : iterable of AtomicData
            Each was checked when it was made; nothing is checked again.
        device : optional
            By default that of the first sample.
        skip_validation : bool
            Accepted for older callers; there is nothing left to skip.
        attr_map, field_levels : mapping, optional
            Level of plain attributes of the samples (name to level), which are
            otherwise left out.
        exclude_keys : iterable of str, optional
            Fields to leave out.

        Raises
        ------
        FieldError
            The list is empty, or a field has two row shapes or two levels.
        """
        samples = list(data_list)
        if not samples:
            raise FieldError("Batch.from_data_list", "Cannot create batch from empty data list")
        extra = as_levels(attr_map, field_levels)
        levels: dict[str, Level] = dict(extra)
        units: dict[str, str] = {}
        values: list[dict[str, Tensor]] = []
        for data in samples:
            if data._levels:
                _merge_levels(levels, data._levels)
            if data._units:
                units.update(data._units)
            tensors = data._values
            if extra and data.__dict__:
                added = {k: data.__dict__[k] for k in extra if k in data.__dict__}
                tensors = {**tensors, **{k: coerce_field(k, v) for k, v in added.items()}}
            values.append(tensors)
        flat = collate(
            values,
            levels,
            exclude=exclude_keys or (),
            device=device,
            units=units,
            where="Batch.from_data_list",
        )
        return cls._of(flat)

    @classmethod
    def from_raw_dicts(
        cls,
        data_list: Iterable[Mapping[str, Any]],
        device: torch.device | str | None = None,
        attr_map: Mapping[str, Any] | None = None,
        exclude_keys: Iterable[str] | None = None,
        field_levels: Mapping[str, Any] | None = None,
    ) -> Batch:
        """A batch of plain mappings of tensors: nothing checked, nothing cast.

        Names outside the table take their level from ``field_levels``, else
        they are system fields. Text and None are left out.
        """
        levels = as_levels(attr_map, field_levels)
        samples: list[dict[str, Tensor]] = []
        for raw in data_list:
            sample: dict[str, Tensor] = {}
            for key, value in raw.items():
                if value is None or isinstance(value, (str, bytes, dict)):
                    continue
                name = ALIASES.get(key, key)
                tensor = coerce_field(name, value)
                if name not in FIELDS and levels.setdefault(name, "system") == "system":
                    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
                    tensor = tensor if len(tensor) == 1 else tensor.unsqueeze(0)
                sample[name] = tensor
            samples.append(sample)
        if not samples:
            raise FieldError("Batch.from_raw_dicts", "Cannot create batch from empty data list")
        for i, sample in enumerate(samples):
            for required in ("positions", "atomic_numbers"):
                if required not in sample:
                    raise FieldError("Batch.from_raw_dicts", f"sample {i} has no {required!r}")
        flat = collate(
            samples,
            levels,
            exclude=exclude_keys or (),
            device=device,
            where="Batch.from_raw_dicts",
        )
        return cls._of(flat)

    @classmethod
    def from_block(cls, block: Block, device: torch.device | str = "cpu") -> Batch:
        """A batch over the arrays of a block (the same memory on CPU); text is left out."""
        home = torch.device(device)
        atoms = LevelRows(block.atoms_ptr, block.num_atoms, home)
        edges = LevelRows(block.edges_ptr, block.num_edges, home)
        fields: dict[str, Tensor] = {}
        for name in block.names:
            array = block.arrays[name]
            if array.dtype.kind in "biufc":
                fields[name] = from_numpy(array).to(home)
        if "neighbor_list" in fields:
            fields["neighbor_list"] = offset_edges(fields["neighbor_list"], atoms, edges)
        present = {
            name: torch.tensor(mask, device=home)
            for name, mask in block.present.items()
            if name in fields and not mask.all()
        }
        levels = {name: block.levels[name] for name in fields}
        units = {name: unit for name, unit in block.units.items() if name in fields}
        batch = cls._of(Flat(fields, levels, present, atoms, edges, block.num_samples, home, units))
        for name in DEFAULT_FIELDS:
            if name in present:
                batch._fill_default(name)
        return batch

    def _fill_default(self, name: str) -> None:
        """Write the default into the rows of samples without it: no holes in these fields."""
        rows = torch.repeat_interleave(self._present.pop(name), self._atoms.counts_device)
        made = default_rows(name, self._fields["atomic_numbers"], self._fields["positions"])
        values = self._fields[name]
        mask = rows.reshape(-1, *[1] * (values.ndim - 1))
        self._fields[name] = torch.where(mask, values, made.to(values.dtype))

    def to_block(self) -> Block:
        """The block over the same memory (on CPU); only rows in use."""
        arrays, levels = {}, {}
        for name in field_order(self._fields):
            values = self._used(name)
            if name == "neighbor_list":
                values = offset_edges(values, self._atoms, self._edges, sign=-1)
            arrays[name], levels[name] = to_numpy(values), self._levels[name]
        present = {}
        for name in self._present:
            mask = self.has(name).cpu().numpy()
            if not mask.all():
                present[name] = mask
        return Block(self._atoms.host, self._edges.host, arrays, levels, present, dict(self._units))

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
        return UnknownFieldError("Batch", f"no field {name!r}. {nearest(name, self._fields)}")

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

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._get(key)
        if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
            return self.get_data(int(key))
        return self.index_select(key)

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
        for level in ("system", "atom", "edge"):
            if rows == self._capacity_of(level):  # type: ignore[arg-type]
                return level  # type: ignore[return-value]
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
                neighbor_list[:, 0].to(torch.int64), self._atoms.ptr[1:], right=True
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

    # -- choosing ---------------------------------------------------------------------------

    def _row_choice(self, level: Level, samples: IntArray) -> tuple[Tensor, LevelRows]:
        """Row positions of the chosen samples at a level, and their new rows."""
        old = self._atoms if level == "atom" else self._edges
        if self._device.type == "cpu":
            rows, ptr = row_indices(old.host, samples)
            return torch.from_numpy(rows), LevelRows(ptr, int(ptr[-1]), self._device)
        new = LevelRows.from_counts(old.counts[samples], self._device)
        chosen = torch.tensor(samples, device=self._device)
        return row_positions(old.ptr, chosen, new.used)[0], new

    def _take(self, samples: IntArray) -> Batch:
        atom_rows, atoms = self._row_choice("atom", samples)
        edge_rows, edges = self._row_choice("edge", samples)
        chosen = torch.tensor(samples, device=self._device)
        rows = {"atom": atom_rows, "edge": edge_rows, "system": chosen}
        fields = {
            name: values.index_select(0, rows[self._levels[name]])
            for name, values in self._fields.items()
        }
        if "neighbor_list" in fields:
            fields["neighbor_list"] = _shift_edges(
                fields["neighbor_list"],
                atoms.host[:-1] - self._atoms.host[:-1][samples],
                edges,
            )
        present = {name: mask.index_select(0, chosen) for name, mask in self._present.items()}
        return self._of(
            Flat(
                fields,
                dict(self._levels),
                present,
                atoms,
                edges,
                len(samples),
                self._device,
                dict(self._units),
            )
        )

    def index_select(self, idx: Any) -> Batch:
        """A new batch of the chosen systems, in the order asked for.

        Parameters
        ----------
        idx : int, slice, sequence, array or tensor of int or bool
            Negatives and repeats are allowed; bools are a mask over systems.

        Raises
        ------
        IndexRangeError
            Nothing is chosen, out of range, or no index.
        """
        samples = as_index(idx, self._num, where="Batch.index_select")
        if not len(samples):
            raise IndexRangeError("Batch.index_select", "Index is empty: no system is chosen")
        return self._take(samples)

    def get_data(self, idx: int) -> AtomicData:
        """One system as a copy, its edges local again; an absent field is None."""
        if not -self._num <= idx < self._num:
            raise IndexRangeError(
                "Batch",
                f"index {idx} is out of range",
                expected=f"-{self._num} to {self._num - 1}" if self._num else "no system",
            )
        i = idx % self._num
        a0, a1 = (int(n) for n in self._atoms.host[i : i + 2])
        e0, e1 = (int(n) for n in self._edges.host[i : i + 2])
        bounds = {"atom": (a0, a1), "edge": (e0, e1), "system": (i, i + 1)}
        values: dict[str, Tensor] = {}
        for name, tensor in self._fields.items():
            if name in self._present and not bool(self._present[name][i]):
                continue
            start, stop = bounds[self._levels[name]]
            part = tensor[start:stop]
            values[name] = part - a0 if name == "neighbor_list" else part.clone()
        return AtomicData._trusted(values, self._custom_levels(), dict(self._units))

    def _custom_levels(self) -> dict[str, Level]:
        return {name: level for name, level in self._levels.items() if name not in FIELDS}

    def to_data_list(self) -> list[AtomicData]:
        """All systems, as ``get_data`` gives them."""
        counts = {
            "atom": self._atoms.counts.tolist(),
            "edge": self._edges.counts.tolist(),
            "system": [1] * self._num,
        }
        samples: list[dict[str, Tensor]] = [{} for _ in range(self._num)]
        for name in self._fields:
            values = self._used(name)
            if name == "neighbor_list":
                values = offset_edges(values, self._atoms, self._edges, sign=-1)
            else:
                values = values.clone()
            mask = self.has(name).tolist() if name in self._present else None
            parts = torch.split(values, counts[self._levels[name]])
            for i, part in enumerate(parts[: self._num]):
                if mask is None or mask[i]:
                    samples[i][name] = part
        custom, units = self._custom_levels(), self._units
        return [AtomicData._trusted(sample, dict(custom), dict(units)) for sample in samples]

    def to_atoms_list(self) -> list[Any]:
        """All systems as ``ase.Atoms``."""
        return [data.to_atoms() for data in self.cpu().to_data_list()]

    # -- growing and buffers ----------------------------------------------------------------

    def append(
        self,
        other: Batch,
        *,
        missing_fields: str = "fill",
        field_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the systems of another batch, in place; see ``buffers.append``."""
        buffers.append(self, other, missing_fields=missing_fields, defaults=field_defaults or {})

    def append_data(
        self, data_list: Iterable[AtomicData], exclude_keys: Iterable[str] | None = None
    ) -> None:
        """Add samples, in place.

        Raises
        ------
        FieldError
            The list is empty.
        """
        samples = list(data_list)
        if not samples:
            raise FieldError("Batch.append_data", "No data provided")
        self.append(Batch.from_data_list(samples, device=self._device, exclude_keys=exclude_keys))

    @classmethod
    def empty(
        cls,
        *,
        num_systems: int,
        num_nodes: int,
        num_edges: int,
        template: AtomicData | Batch | None = None,
        device: torch.device | str = "cpu",
        attr_map: Mapping[str, Any] | None = None,
    ) -> Batch:
        """A buffer of no system that has room; see ``buffers.empty``."""
        flat = buffers.empty(num_systems, num_nodes, num_edges, template, device, attr_map)
        return cls._of(flat, capacity=num_systems)

    @classmethod
    def empty_like(cls, batch: Batch, *, device: torch.device | str | None = None) -> Batch:
        """A batch of no system with the fields of another."""
        home = batch.device if device is None else torch.device(device)
        return cls._of(buffers.empty(0, 0, 0, batch, home, None))

    def put(
        self,
        src: Batch,
        mask: Any,
        *,
        copied_mask: Tensor | None = None,
        dest_mask: Any = None,
    ) -> Tensor:
        """Copy chosen systems of another batch into this buffer; see ``buffers.put``."""
        return buffers.put(self, src, mask, copied_mask=copied_mask, dest_mask=dest_mask)

    def defrag(self, copied_mask: Any = None) -> Batch:
        """Drop the systems that were copied away, keeping the memory; returns itself.

        Raises
        ------
        FieldError
            No mask is given and nothing was put before.
        """
        buffers.defrag(self, copied_mask)
        return self

    def trim(self, copied_mask: Any = None) -> Batch | None:
        """The systems that were not copied away as a new tight batch; None if none is left."""
        keep = buffers.kept(self, copied_mask, where="trim")
        return self._take(keep) if len(keep) else None

    def zero(self) -> Batch:
        """Forget all systems, keep the memory; returns itself."""
        buffers.zero(self)
        return self

    # -- copies -----------------------------------------------------------------------------

    def _map(self, function: Any, device: torch.device | None = None) -> Batch:
        fields = {name: function(values) for name, values in self._fields.items()}
        home = device or self._device
        if fields:
            home = next(iter(fields.values())).device
        new = self._of(
            Flat(
                fields,
                dict(self._levels),
                {name: mask.to(home, copy=True) for name, mask in self._present.items()},
                self._atoms.moved(home),
                self._edges.moved(home),
                self._num,
                home,
                dict(self._units),
            ),
            capacity=self._capacity,
        )
        for name, value in self.__dict__.items():
            if not name.startswith("_"):
                new.__dict__[name] = value
        if self._copied is not None:
            new.__dict__["_copied"] = self._copied.to(home, copy=True)
        return new

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Batch:
        """A copy on a device, its floating fields in a dtype if one is given."""
        home = self._device if device is None else torch.device(device)

        def move(values: Tensor) -> Tensor:
            kind = dtype if dtype is not None and values.is_floating_point() else values.dtype
            return values.to(home, kind, non_blocking=non_blocking, copy=True)

        return self._map(move, home)

    def clone(self) -> Batch:
        """A copy that shares no memory."""
        return self._map(torch.clone)

    def cpu(self) -> Batch:
        """A copy in host memory."""
        return self.to("cpu")

    def cuda(self, device: int | str | None = None) -> Batch:
        """A copy on a CUDA device."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def contiguous(self) -> Batch:
        """Make every tensor contiguous, in place; returns itself."""
        for name, values in self._fields.items():
            self._fields[name] = values.contiguous()
        return self

    def pin_memory(self) -> Batch:
        """Move to page-locked memory, in place, where there is a CUDA device; returns itself."""
        if torch.cuda.is_available() and self._device.type == "cpu":
            for table in (self._fields, self._present):
                for name, values in table.items():
                    table[name] = values.pin_memory()
        return self

    def to_dict(self) -> dict[str, Tensor]:
        """Its fields by name, not copied."""
        return dict(iter(self))

    model_dump = to_dict

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for table in ("_fields", "_present"):
            state[table] = {name: own_storage(v) for name, v in state[table].items()}
        state["_levels"], state["_units"] = dict(self._levels), dict(self._units)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={list(values.shape)}" for name, values in self)
        room = f" of {self._capacity}" if self._capacity != self._num else ""
        return f"Batch({self._num}{room} systems, {fields}, device={self._device})"

    # -- messages ---------------------------------------------------------------------------

    def isend(self, dst: int, *, tag: int = 0, group: Any = None) -> comm.SendHandle:
        """Start sending to a rank; see ``comm.isend``."""
        return comm.isend(self, dst, tag=tag, group=group)

    def send(self, dst: int, *, tag: int = 0, group: Any = None) -> None:
        """Send to a rank and wait."""
        self.isend(dst, tag=tag, group=group).wait()

    @classmethod
    def irecv(
        cls,
        src: int,
        device: torch.device | str = "cpu",
        *,
        template: Batch | None = None,
        tag: int = 0,
        group: Any = None,
    ) -> comm.ReceiveHandle:
        """Start receiving from a rank; ``wait()`` gives the batch. See ``comm.irecv``."""
        return comm.irecv(src, torch.device(device), template=template, tag=tag, group=group)

    @classmethod
    def recv(
        cls,
        src: int,
        device: torch.device | str = "cpu",
        *,
        template: Batch | None = None,
        tag: int = 0,
        group: Any = None,
    ) -> Batch:
        """Receive from a rank and wait."""
        return cls.irecv(src, device, template=template, tag=tag, group=group).wait()


def _host_ptr(ptr: Any) -> IntArray:
    array = ptr.cpu().numpy() if isinstance(ptr, Tensor) else np.asarray(ptr)
    return array.astype(np.int64, copy=False)


def _merge_levels(levels: dict[str, Level], more: Mapping[str, Level]) -> None:
    for name, level in more.items():
        if levels.setdefault(name, level) != level:
            raise FieldError(
                "Batch.from_data_list",
                f"field {name!r} has two levels",
                found=level,
                expected=levels[name],
            )


def _shift_edges(pairs: Tensor, shift: IntArray, edges: LevelRows) -> Tensor:
    """Edges with a whole number per system added, [B] on the host."""
    if not shift.any():
        return pairs
    per_system = torch.tensor(shift, device=pairs.device).to(pairs.dtype)
    per_edge = torch.repeat_interleave(per_system, edges.counts_device, output_size=len(pairs))
    return pairs + per_edge[:, None]

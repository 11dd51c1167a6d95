"""Many samples in torch: flat tensors at three levels, and their pointers.

``Batch`` is to torch what ``Block`` is to NumPy. Every field has a recorded
level; where a sample lacks a field its rows are fill and ``present`` says so;
``neighbor_list`` holds batch-global atoms and every operation keeps it right.
Joining is in ``collate``, buffers in ``buffers``, messages in ``comm``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import IntArray, Level
from alchemi_xr.data import buffers, comm
from alchemi_xr.data.atomic_data import AtomicData
from alchemi_xr.data.batch_fields import FlatFields
from alchemi_xr.data.block import Block
from alchemi_xr.data.block_bridge import block_of, flat_of_block
from alchemi_xr.data.coerce import coerce_field
from alchemi_xr.data.collate import Flat, as_levels, collate, offset_edges, raw_samples
from alchemi_xr.data.csr import as_index, row_indices
from alchemi_xr.data.fields import ALIASES, FIELDS
from alchemi_xr.data.kernels.gather import row_positions
from alchemi_xr.data.level import (
    LevelRows,
    own_storage,
)
from alchemi_xr.errors import ArgumentTypeError, FieldError, IndexRangeError

if TYPE_CHECKING:
    pass

__all__ = ["Batch"]


class Batch(FlatFields):
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
        samples = _samples("Batch.from_data_list", data_list)
        if not samples:
            raise FieldError("Batch.from_data_list", "Cannot create batch from empty data list")
        extra = as_levels(attr_map, field_levels)
        levels: dict[str, Level] = dict(extra)
        units: dict[str, str] = {}
        values: list[dict[str, Tensor]] = []
        loose: set[str] = set()
        for data in samples:
            if data._levels:
                _merge_levels(levels, data._levels)
            if data._units:
                units.update(data._units)
            tensors = data._values
            if data.__dict__:
                added = {k: data.__dict__[k] for k in extra if k in data.__dict__}
                tensors = {**tensors, **{k: coerce_field(k, v) for k, v in added.items()}}
                loose.update(k for k, v in data.__dict__.items() if isinstance(v, Tensor))
            values.append(tensors)
        loose -= {*extra, *(exclude_keys or ())}
        if loose:
            warnings.warn(
                f"Batch.from_data_list: {sorted(loose)} have no level and are left out; register "
                "them with add_node_property, add_edge_property or add_system_property, or give "
                "field_levels",
                UserWarning,
                stacklevel=2,
            )
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
        samples = raw_samples(data_list, levels, where="Batch.from_raw_dicts")
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
        if not isinstance(block, Block):
            raise _wrong_kind("Batch.from_block", block, "a Block", "samples go to from_data_list")
        return cls._of(flat_of_block(block, torch.device(device)))

    def to_block(self) -> Block:
        """The block over the same memory (on CPU); only rows in use."""
        return block_of(self)

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

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._get(key)
        if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
            return self.get_data(int(key))
        return self.index_select(key)

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
        if isinstance(idx, bool) or not hasattr(idx, "__index__"):
            raise _wrong_kind(
                "Batch.get_data", idx, "a whole number", "choose many with batch[...]"
            )
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
        if not isinstance(other, Batch):
            raise _wrong_kind("Batch.append", other, "a Batch", "append_data([...]) takes samples")
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
        samples = _samples("Batch.append_data", data_list)
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

    def to_pyg(self) -> Any:
        """As a ``torch_geometric.data.Batch``; see ``alchemi_xr.data.pyg.to_pyg``."""
        from alchemi_xr.data.pyg import to_pyg

        return to_pyg(self)

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


def _wrong_kind(where: str, found: object, expected: str, mend: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        where,
        "an argument of the wrong kind",
        found=type(found).__name__,
        expected=expected,
        mend=mend,
    )


def _samples(where: str, data_list: Any) -> list[AtomicData]:
    """The samples as a list; whatever is none is named by its place."""
    # A single sample iterates over its fields, so it would pass for a list.
    if isinstance(data_list, AtomicData) or not hasattr(data_list, "__iter__"):
        raise _wrong_kind(where, data_list, "a list of AtomicData", "put it into a list")
    samples = list(data_list)
    for i, sample in enumerate(samples):
        if not isinstance(sample, AtomicData):
            raise _wrong_kind(
                f"{where}, sample {i}", sample, "AtomicData", "dicts go to Batch.from_raw_dicts"
            )
    return samples

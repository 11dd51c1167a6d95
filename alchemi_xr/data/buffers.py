"""Batches that grow, and batches of fixed capacity.

A buffer is a Batch whose tensors are longer than its systems need. Systems are
put behind those that are there, gaps are closed by moving rows forward, and
rows behind the last system are 0. Every dtype and every field is carried:
where one side lacks a field, the rows are fill and the presence mask says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import IntArray, Level
from alchemi_xr.data.collate import Flat, as_levels
from alchemi_xr.data.csr import as_index, counts_to_ptr
from alchemi_xr.data.fields import ALIASES, FIELDS
from alchemi_xr.data.kernels.compact import compact_rows, fitting, put_rows
from alchemi_xr.data.level import DEFAULT_FIELDS, LevelRows, fill_rows, fill_value
from alchemi_xr.errors import ConfigError, FieldError

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["append", "defrag", "empty", "kept", "put", "zero"]


# -- append ---------------------------------------------------------------------------------


def append(
    batch: Batch, other: Batch, *, missing_fields: str = "fill", defaults: Mapping[str, Any]
) -> None:
    """Add the systems of ``other`` behind those of ``batch``, in place.

    The result has the union of both field sets. Rows of the side that lacks a
    field hold its ``defaults`` entry, else fill (NaN, 0, False) with False in
    the presence mask. The dtypes of ``batch`` win; ``other`` stays as it was.

    Parameters
    ----------
    missing_fields : {"fill", "raise"}
    defaults : mapping of str to number
        Value for rows without the field, by name; such rows count as present.

    Raises
    ------
    FieldError
        The two share memory, have different row shapes or levels of a field,
        or ``missing_fields="raise"`` and the field sets differ.
    """
    if missing_fields not in ("fill", "raise"):
        raise ConfigError(
            "Batch.append", f"missing_fields={missing_fields!r}", expected="'fill' or 'raise'"
        )
    _refuse_shared(batch, other)
    given = {ALIASES.get(name, name): value for name, value in defaults.items()}
    names = list(dict.fromkeys([*batch._fields, *other._fields]))
    _make_defaults(batch, names)
    other = _with_defaults(other, names)
    if missing_fields == "raise":
        for name in names:
            for side, word in ((batch, "the batch"), (other, "the appended batch")):
                if name not in side._fields and name not in given:
                    raise FieldError("Batch.append", f"{word} has no field {name!r}")
    fields: dict[str, Tensor] = {}
    levels: dict[str, Level] = {}
    present: dict[str, Tensor] = {}
    for name in names:
        level = _common_level(batch, other, name)
        parts, masks = [], []
        model = batch._fields.get(name, other._fields.get(name))
        assert model is not None
        for side in (batch, other):
            if name in side._fields:
                parts.append(side._used(name).to(device=model.device, dtype=model.dtype))
                masks.append(side.has(name).to(model.device))
                continue
            rows = side._rows_in_use(level)
            fill = given.get(name, fill_value(model.dtype))
            parts.append(model.new_full((rows, *model.shape[1:]), fill))
            masks.append(
                torch.full((side._num,), name in given, dtype=torch.bool, device=model.device)
            )
        if parts[0].shape[1:] != parts[1].shape[1:]:
            raise FieldError(
                "Batch.append",
                f"rows of field {name!r} have two shapes",
                found=list(parts[1].shape[1:]),
                expected=list(parts[0].shape[1:]),
            )
        if name == "neighbor_list":
            parts[1] = parts[1] + batch._atoms.used
        fields[name], levels[name] = torch.cat(parts), level
        # Holes are only where a side lacks the field or had holes: known without the device.
        holes = [name not in s._fields and name not in given and s._num > 0 for s in (batch, other)]
        if any(holes) or name in batch._present or name in other._present:
            present[name] = torch.cat(masks)
    state = batch.__dict__
    state["_fields"], state["_levels"], state["_present"] = fields, levels, present
    state["_atoms"] = _joined(batch._atoms, other._atoms)
    state["_edges"] = _joined(batch._edges, other._edges)
    state["_num"] = state["_capacity"] = batch._num + other._num
    state["_copied"] = None
    batch._units.update({k: v for k, v in other._units.items() if k not in batch._units})


def _joined(first: LevelRows, second: LevelRows) -> LevelRows:
    ptr = np.concatenate([first.host, second.host[1:] + first.host[-1]])
    return LevelRows(ptr, int(ptr[-1]), first.device)


def _refuse_shared(batch: Batch, other: Batch) -> None:
    mine = {v.untyped_storage().data_ptr() for v in batch._fields.values() if v.numel()}
    for name, values in other._fields.items():
        if values.numel() and values.untyped_storage().data_ptr() in mine:
            raise FieldError(
                "Batch.append",
                f"the other batch shares storage with this one (field {name!r})",
                mend="append other.clone()",
            )


def _lacking(batch: Batch, names: list[str]) -> list[str]:
    """Masses, categories and velocities of ``names`` that a batch has not made yet."""
    if "positions" not in batch._fields:
        return []
    return [name for name in DEFAULT_FIELDS if name in names and name not in batch._fields]


def _make_defaults(batch: Batch, names: list[str]) -> None:
    """Make the fields with defaults that the other side has."""
    for name in _lacking(batch, names):
        batch._get(name)


def _with_defaults(batch: Batch, names: list[str]) -> Batch:
    """As `_make_defaults`, for a batch that has to stay as it is."""
    lacking = _lacking(batch, names)
    if not lacking:
        return batch
    other = type(batch)._of(
        Flat(
            dict(batch._fields),
            dict(batch._levels),
            dict(batch._present),
            batch._atoms,
            batch._edges,
            batch._num,
            batch._device,
            dict(batch._units),
        ),
        capacity=batch._capacity,
    )
    for name in lacking:
        other._get(name)
    return other


def _common_level(batch: Batch, other: Batch, name: str) -> Level:
    mine, theirs = batch._levels.get(name), other._levels.get(name)
    if mine is not None and theirs is not None and mine != theirs:
        raise FieldError("Batch", f"field {name!r} has two levels", found=theirs, expected=mine)
    level = mine or theirs
    assert level is not None
    return level


# -- buffers --------------------------------------------------------------------------------


def empty(
    num_systems: int,
    num_nodes: int,
    num_edges: int,
    template: Any,
    device: torch.device | str,
    attr_map: Mapping[str, Any] | None,
) -> Flat:
    """Zeroed tensors of a capacity, with the fields of a template.

    Parameters
    ----------
    num_systems, num_nodes, num_edges : int
        Capacity of each level.
    template : AtomicData or Batch, optional
        Gives fields, row shapes and dtypes; by default positions (float32),
        atomic_numbers (int64) and energy (float32).
    attr_map : mapping, optional
        Levels of names outside the field table.

    Raises
    ------
    FieldError
        A capacity is negative.
    """
    for word, number in (
        ("num_systems", num_systems),
        ("num_nodes", num_nodes),
        ("num_edges", num_edges),
    ):
        if number < 0:
            raise FieldError("Batch.empty", f"{word} is negative", found=number, expected=">= 0")
    home = torch.device(device)
    rows = {"system": num_systems, "atom": num_nodes, "edge": num_edges}
    schema: dict[str, tuple[Level, tuple[int, ...], torch.dtype]] = {
        "atomic_numbers": ("atom", (), torch.int64),
        "positions": ("atom", (3,), torch.float32),
        "energy": ("system", (1,), torch.float32),
    }
    units: dict[str, str] = {}
    if template is not None:
        extra = as_levels(attr_map)
        schema = {}
        for name, values in template:
            level = FIELDS[name].level if name in FIELDS else extra.get(name)
            schema[name] = (
                level or template.level_of(name),
                tuple(values.shape[1:]),
                values.dtype,
            )
        units = dict(template._units)
    fields = {
        name: torch.zeros((rows[level], *tail), dtype=dtype, device=home)
        for name, (level, tail, dtype) in schema.items()
    }
    if fields:
        home = next(iter(fields.values())).device
    return Flat(
        fields,
        {name: level for name, (level, _, _) in schema.items()},
        {},
        LevelRows(np.zeros(1, np.int64), num_nodes, home),
        LevelRows(np.zeros(1, np.int64), num_edges, home),
        0,
        home,
        units,
    )


def _host_mask(mask: Any, length: int, word: str, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    array = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if array.shape != (length,):
        found = array.shape[0] if array.ndim == 1 else list(array.shape)
        raise FieldError(
            where, f"mask shape {found} != {word} {length}", mend="one bool for each of them"
        )
    return array.astype(bool)


def put(
    buffer: Batch, src: Batch, mask: Any, *, copied_mask: Tensor | None, dest_mask: Any
) -> Tensor:
    """Copy the systems of ``src`` in ``mask`` into the buffer, as many as fit.

    Systems are taken in order; one that does not fit at some level is passed
    over. What was copied is returned, remembered on ``src`` for ``defrag`` and
    ``trim``, and written to ``copied_mask``.

    Parameters
    ----------
    mask : bool, [B of src]
    copied_mask : bool tensor, [B of src], optional
        Written in place.
    dest_mask : bool, [slots], optional
        True = occupied. Systems of the buffer in slots that are False are
        dropped first; occupied slots without a system only count against the
        room.

    Returns
    -------
    bool tensor, [B of src]

    Raises
    ------
    FieldError
        A mask has the wrong length, or a field has other row shapes.
    """
    wanted = np.flatnonzero(_host_mask(mask, src._num, "num_graphs", "Batch.put"))
    reserved = 0
    if dest_mask is not None:
        occupied = _host_mask(dest_mask, buffer._capacity, "system_capacity", "Batch.put")
        reserved = int(occupied[buffer._num :].sum())
        keep = np.flatnonzero(occupied[: buffer._num])
        if len(keep) != buffer._num:
            _keep_only(buffer, keep)
    atoms, edges = src._atoms.counts[wanted], src._edges.counts[wanted]
    room = [
        buffer._capacity - buffer._num - reserved,
        buffer._atoms.capacity - buffer._atoms.used,
        buffer._edges.capacity - buffer._edges.used,
    ]
    samples = wanted[fitting([np.ones(len(wanted), np.int64), atoms, edges], room)]
    if len(samples):
        _write(buffer, src, samples)
    copied = np.zeros(src._num, dtype=bool)
    copied[samples] = True
    done = torch.tensor(copied, device=src._device)
    if copied_mask is not None:
        copied_mask.copy_(done)
    src.__dict__["_copied"] = done
    return done


def _write(buffer: Batch, src: Batch, samples: IntArray) -> None:
    names = list(dict.fromkeys([*buffer._fields, *src._fields]))
    _make_defaults(buffer, names)
    src = _with_defaults(src, names)
    chosen = torch.tensor(samples, device=buffer._device)
    moved = {"atom": src._atoms.moved(buffer._device), "edge": src._edges.moved(buffer._device)}
    systems = torch.arange(src._num + 1, device=buffer._device)
    first, last = buffer._num, buffer._num + len(samples)
    for name in names:
        level = _common_level(buffer, src, name)
        rows = moved.get(level)
        at = buffer._rows_in_use(level)
        count = int(rows.counts[samples].sum()) if rows is not None else len(samples)
        there = name in src._fields
        if name not in buffer._fields:
            _add_field(buffer, name, level, src._fields[name])
        values = buffer._fields[name]
        if there:
            put_rows(
                values,
                src._fields[name].to(buffer._device),
                rows.ptr if rows is not None else systems,
                chosen,
                at=at,
                total=count,
            )
        else:
            values[at : at + count] = fill_value(values.dtype)
        if not there or name in src._present or name in buffer._present:
            mask = buffer._present.setdefault(
                name, torch.ones(buffer._capacity, dtype=torch.bool, device=buffer._device)
            )
            mask[first:last] = src.has(name).to(buffer._device)[chosen] if there else False
    if "neighbor_list" in src._fields:
        counts = src._edges.counts[samples]
        starts = buffer._atoms.used + counts_to_ptr(src._atoms.counts[samples])[:-1]
        shift = np.repeat(starts - src._atoms.host[:-1][samples], counts)
        pairs = buffer._fields["neighbor_list"]
        at = buffer._edges.used
        delta = torch.tensor(shift, device=pairs.device, dtype=pairs.dtype)
        pairs[at : at + len(delta)] += delta[:, None]
    state = buffer.__dict__
    for key, rows in moved.items():
        old: LevelRows = state[f"_{key}s"]
        ptr = np.concatenate([old.host, old.host[-1] + np.cumsum(rows.counts[samples])])
        state[f"_{key}s"] = LevelRows(ptr, old.capacity, buffer._device)
    state["_num"], state["_copied"] = last, None


def _add_field(buffer: Batch, name: str, level: Level, model: Tensor) -> None:
    """A field that the buffer lacked: absent for the systems that are there."""
    rows = buffer._capacity_of(level)
    values = torch.zeros((rows, *model.shape[1:]), dtype=model.dtype, device=buffer._device)
    used = buffer._rows_in_use(level)
    values[:used] = fill_rows(used, tuple(model.shape[1:]), model.dtype, buffer._device)
    buffer._fields[name], buffer._levels[name] = values, level
    if buffer._num:
        mask = torch.ones(buffer._capacity, dtype=torch.bool, device=buffer._device)
        mask[: buffer._num] = False
        buffer._present[name] = mask


def kept(batch: Batch, copied_mask: Any, *, where: str) -> IntArray:
    """Positions of the systems that stay: those not copied."""
    mask = batch._copied if copied_mask is None else copied_mask
    if mask is None:
        raise FieldError(
            f"Batch.{where}",
            f"{where} requires copied_mask or a prior put",
            mend=f"{where}(copied_mask=...)",
        )
    copied = _host_mask(mask, batch._num, "num_graphs", f"Batch.{where}")
    return np.flatnonzero(~copied).astype(np.int64)


def defrag(batch: Batch, copied_mask: Any) -> None:
    """Drop the copied systems in place; tensors keep their length."""
    _keep_only(batch, kept(batch, copied_mask, where="defrag"))


def _keep_only(batch: Batch, samples: IntArray) -> None:
    samples = as_index(samples, batch._num) if len(samples) else samples
    if len(samples) == batch._num:
        batch.__dict__["_copied"] = None
        return
    chosen = torch.tensor(samples, dtype=torch.int64, device=batch._device)
    systems = torch.arange(batch._num + 1, device=batch._device)
    old = {"atom": batch._atoms, "edge": batch._edges}
    new = {
        key: LevelRows(counts_to_ptr(rows.counts[samples]), rows.capacity, batch._device)
        for key, rows in old.items()
    }
    for name, values in batch._fields.items():
        rows = old.get(batch._levels[name])
        compact_rows(
            values,
            rows.ptr if rows is not None else systems,
            chosen,
            total=new[batch._levels[name]].used if rows is not None else len(samples),
        )
    if "neighbor_list" in batch._fields and new["edge"].used:
        shift = new["atom"].host[:-1] - old["atom"].host[:-1][samples]
        pairs = batch._fields["neighbor_list"]
        delta = torch.tensor(
            np.repeat(shift, new["edge"].counts), device=pairs.device, dtype=pairs.dtype
        )
        pairs[: len(delta)] += delta[:, None]
    for mask in batch._present.values():
        mask[: len(samples)] = mask[chosen]
        mask[len(samples) :] = True
    state = batch.__dict__
    state["_atoms"], state["_edges"] = new["atom"], new["edge"]
    state["_num"], state["_copied"] = len(samples), None


def zero(batch: Batch) -> None:
    """Zero every tensor and forget all systems; the memory stays."""
    with torch.no_grad():
        for values in batch._fields.values():
            values.zero_()
    state = batch.__dict__
    for key in ("_atoms", "_edges"):
        state[key] = LevelRows(np.zeros(1, np.int64), state[key].capacity, batch._device)
    state["_present"], state["_num"], state["_copied"] = {}, 0, None

"""``Block`` to ``Batch`` and back, over the same memory where that is possible.

Edges are local in a Block and batch-global in a Batch; text stays behind; the
fields that have defaults have no holes in a Batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alchemi_xr.data.block import Block
from alchemi_xr.data.collate import Flat, offset_edges
from alchemi_xr.data.fields import field_order
from alchemi_xr.data.level import DEFAULT_FIELDS, LevelRows, default_rows, from_numpy, to_numpy

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["block_of", "flat_of_block"]


def flat_of_block(block: Block, device: torch.device) -> Flat:
    """The tensors of a block; on CPU over its arrays, unless these are read-only."""
    atoms = LevelRows(block.atoms_ptr, block.num_atoms, device)
    edges = LevelRows(block.edges_ptr, block.num_edges, device)
    fields: dict[str, Tensor] = {}
    for name in block.names:
        array = block.arrays[name]
        if array.dtype.kind in "biufc":
            fields[name] = from_numpy(array).to(device)
    if "neighbor_list" in fields:
        fields["neighbor_list"] = offset_edges(fields["neighbor_list"], atoms, edges)
    present = {
        name: torch.tensor(mask, device=device)
        for name, mask in block.present.items()
        if name in fields and not mask.all()
    }
    flat = Flat(
        fields,
        {name: block.levels[name] for name in fields},
        present,
        atoms,
        edges,
        block.num_samples,
        device,
        {name: unit for name, unit in block.units.items() if name in fields},
    )
    for name in DEFAULT_FIELDS:
        if name in present:
            _fill_default(flat, name)
    return flat


def _fill_default(flat: Flat, name: str) -> None:
    """Write the default into the rows of samples without it."""
    there = torch.repeat_interleave(flat.present.pop(name), flat.atoms.counts_device)
    made = default_rows(name, flat.fields["atomic_numbers"], flat.fields["positions"])
    values = flat.fields[name]
    mask = there.reshape(-1, *[1] * (values.ndim - 1))
    flat.fields[name] = torch.where(mask, values, made.to(values.dtype))


def block_of(batch: Batch) -> Block:
    """The rows in use as a block; on CPU over the same memory, but for the edges."""
    arrays, levels = {}, {}
    for name in field_order(batch._fields):
        values = batch._used(name)
        if name == "neighbor_list":
            values = offset_edges(values, batch._atoms, batch._edges, sign=-1)
        arrays[name], levels[name] = to_numpy(values), batch._levels[name]
    present = {}
    for name in batch._present:
        mask = batch.has(name).cpu().numpy()
        if not mask.all():
            present[name] = mask
    return Block(batch._atoms.host, batch._edges.host, arrays, levels, present, dict(batch._units))

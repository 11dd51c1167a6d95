"""Batches of whole samples for torch, out of any ragged Dataset.

For training from a store as it is, ``alchemi_xr.data.DataLoader`` is faster;
this serves what was selected, computed or joined here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged.conventions import Structure, structure
from alchemi_xr.ragged.mapping import as_block
from alchemi_xr.ragged.select import take

__all__ = ["iter_batches", "to_batch"]

READ_AHEAD = 16
"""Batches read at a time: neighbours in a store come with one read."""


def to_batch(ds: xr.Dataset, device: Any) -> Any:
    """All samples as one Batch; see ``RaggedAccessor.to_batch``."""
    # The position among the deleted is no property of a sample.
    ds = ds.drop_vars("samples_mask", errors="ignore")
    return _batch_class().from_block(as_block(ds.compute()), device=device)


def _batch_class() -> Any:
    # By name, and not before it is needed: nothing that imports this room imports torch.
    return importlib.import_module("alchemi_xr.data.batch").Batch


def iter_batches(
    ds: xr.Dataset,
    batch_size: int | None,
    *,
    max_atoms: int | None,
    shuffle: bool,
    seed: int | None,
    drop_last: bool,
    device: Any,
) -> Iterator[Any]:
    """Batches in turn; see ``RaggedAccessor.iter_batches``."""
    for option, value in (("batch_size", batch_size), ("max_atoms", max_atoms)):
        if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
            raise ConfigError(
                "ds.ragged.iter_batches", f"{option} is no count", found=value, expected=">= 1"
            )
    struct = structure(ds)
    order = np.arange(struct.num_samples, dtype=np.int64)
    if shuffle:
        order = np.random.default_rng(seed).permutation(order)
    # Checked above and cut here, so that a wrong option fails at the call, not at the first batch.
    return _batches(
        ds, struct, order, _cut(struct, order, batch_size, max_atoms, drop_last), device
    )


def _cut(
    struct: Structure,
    order: IntArray,
    batch_size: int | None,
    max_atoms: int | None,
    drop_last: bool,
) -> list[tuple[int, int]]:
    """Start and stop of each batch in the order."""
    load = counts_to_ptr(np.diff(struct.atoms_ptr)[order])
    cuts: list[tuple[int, int]] = []
    start = 0
    while start < len(order):
        stop = len(order)
        if max_atoms is not None:
            stop = int(np.searchsorted(load, load[start] + max_atoms, side="right")) - 1
            if stop == start:
                raise ConfigError(
                    "ds.ragged.iter_batches",
                    f"sample {int(order[start])} alone has more atoms than a batch may hold",
                    found=int(load[start + 1] - load[start]),
                    expected=f"at most max_atoms={max_atoms}",
                )
        if batch_size is not None:
            stop = min(stop, start + batch_size)
        cuts.append((start, stop))
        start = stop
    if drop_last and batch_size is not None and cuts and cuts[-1][1] - cuts[-1][0] < batch_size:
        cuts.pop()
    return cuts


def _batches(
    ds: xr.Dataset, struct: Structure, order: IntArray, cuts: list[tuple[int, int]], device: Any
) -> Iterator[Any]:
    made = _batch_class()
    ds = ds.drop_vars("samples_mask", errors="ignore")
    for first in range(0, len(cuts), READ_AHEAD):
        group = cuts[first : first + READ_AHEAD]
        begin, end = group[0][0], group[-1][1]
        block = as_block(take(ds, struct, order[begin:end]).compute())
        for start, stop in group:
            yield made.from_block(
                block.take(np.arange(start - begin, stop - begin, dtype=np.int64)), device=device
            )

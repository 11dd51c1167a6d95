"""Samples deleted, and brought back, by what they are and not by where they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.data.csr import as_index
from alchemi_xr.errors import FieldError, IndexRangeError
from alchemi_xr.plan.plan import extent_bytes
from alchemi_xr.store.reader import Snapshot
from alchemi_xr.store.writer import StoreWriter

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["delete", "lazy_dataset", "undelete"]


def delete(store: Any, where: Any, *, lock_timeout: float = 0.0) -> int:
    """Mark samples as deleted; ``undelete`` brings them back.

    Parameters
    ----------
    store : path, dict, zarr store
    where : callable, bool DataArray, mask or positions
        A function gets the lazy Dataset of all samples, deleted ones included,
        and gives a condition over ``sample``; it is computed block by block,
        while the writer's lease is held. A bool DataArray (or mask) has one
        entry for each sample, or for each that is not deleted. Whole numbers
        are physical positions.
    lock_timeout : float
        Seconds to wait for another writer.

    Returns
    -------
    int
        Samples that are deleted now and were not before.

    Raises
    ------
    FieldError
        The condition is no mask over samples.
    IndexRangeError
        It is of another length.
    StoreNotFoundError, NotAStoreError, StoreLockedError

    Examples
    --------
    >>> delete("runs.zarr", lambda ds: ds.energy > 0.0)  # doctest: +SKIP
    """
    writer, found = StoreWriter(store, lock_timeout=lock_timeout), _Found(where, alive=False)
    writer.delete(found)
    return found.changed


def undelete(store: Any, where: Any, *, lock_timeout: float = 0.0) -> int:
    """Take deletions back; arguments as for :func:`delete`.

    Returns
    -------
    int
        Samples that were deleted and are not any more.
    """
    writer, found = StoreWriter(store, lock_timeout=lock_timeout), _Found(where, alive=True)
    writer.undelete(found)
    return found.changed


def lazy_dataset(snapshot: Snapshot) -> xr.Dataset:
    """All samples of a snapshot as a Dataset of small blocks, deleted ones included."""
    from alchemi_xr.ragged.backend import open_dataset

    return open_dataset(snapshot, chunks=f"{extent_bytes()}B", drop_deleted=False)


class _Found:
    """Positions that a condition names, once the store is held."""

    def __init__(self, where: Any, *, alive: bool) -> None:
        self._where, self._alive = where, alive
        self.changed = 0

    def __call__(self, snapshot: Snapshot) -> IntArray:
        index = _positions(self._where, snapshot)
        before = snapshot.samples_mask[np.unique(index)]
        self.changed = int((before != self._alive).sum())
        return index


def _positions(where: Any, snapshot: Snapshot) -> IntArray:
    if isinstance(where, Callable) and not hasattr(where, "dims"):  # type: ignore[arg-type]
        where = where(lazy_dataset(snapshot))
    dims = getattr(where, "dims", None)
    if dims is not None and dims != ("sample",):
        raise FieldError(
            snapshot.where,
            "the condition is not one over samples",
            found=f"dims {dims}",
            expected="('sample',)",
            mend="one value a sample comes from ds.ragged.reduce(..., 'any'), 'max' …",
        )
    values = np.asarray(where)
    if dims is not None and values.dtype.kind != "b":
        raise FieldError(
            snapshot.where, "the condition is no mask", found=str(values.dtype), expected="bool"
        )
    total, active = snapshot.num_samples, snapshot.active
    if values.dtype.kind == "b" and values.ndim == 1 and len(values) != total:
        if len(values) != len(active):
            raise IndexRangeError(
                snapshot.where,
                "the mask is of another length than the store",
                found=len(values),
                expected=f"{total} samples, or {len(active)} that are not deleted",
            )
        return active[values]
    return as_index(where if dims is None else values, total, where=snapshot.where)

"""One field of a store as a lazy array that reads only the rows asked for.

The array knows its snapshot and its selection of samples; verbs of the
accessor find it again behind xarray's and Dask's wrappers (``origin``) and
push a further selection down into it instead of indexing what it returns.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from alchemi_xr._typing import IntArray, Level, NDArray
from alchemi_xr.data.fields import as_rows
from alchemi_xr.errors import CorruptStoreError
from alchemi_xr.ragged.rows import Selection

__all__ = ["RowNumbers", "StoreArray", "is_dask", "is_lazy", "origin", "wrap"]


class StoreArray(BackendArray):
    """A field, or the presence mask of one, over chosen samples.

    Parameters
    ----------
    selection : Selection
    name : str
        Field of the store.
    part : {"values", "present"}
        ``"present"`` shows the mask of the samples that carry the field.
    """

    def __init__(
        self, selection: Selection, name: str, part: Literal["values", "present"] = "values"
    ) -> None:
        snapshot = selection.snapshot
        self.selection = selection
        self.name = name
        self.part = part
        self.level: Level = "system" if part == "present" else snapshot.level(name)
        rows = len(selection.ranges(self.level))
        self.shape: tuple[int, ...] = (rows,)
        self.dtype: np.dtype[Any] = np.dtype(bool)
        if part == "present":
            return
        text = snapshot.group(name) == "text"
        self.dtype = np.dtype(object) if text else np.dtype(snapshot.dtype(name))
        tail = () if text else tuple(snapshot.tail(name))
        if self.level == "system" and not text:
            tail = as_rows(name, np.empty((1, *tail), dtype=self.dtype)).shape[1:]
        # A table tail of (1,) is an axis for tensors only; here it is noise.
        self.shape = (rows,) if tail == (1,) else (rows, *tail)

    def take(self, selection: Selection) -> StoreArray:
        """The same field over another selection of the same snapshot."""
        return StoreArray(selection, self.name, self.part)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._read
        )

    def _read(self, key: tuple[Any, ...]) -> NDArray:
        first, *tail = key
        values, drop, step = self._read_rows(first)
        for axis in range(len(tail), 0, -1):
            k = tail[axis - 1]
            index = (slice(None),) * axis + (k,)
            if not (isinstance(k, slice) and k == slice(None)):
                values = values[index]
        if drop:
            return np.asarray(values[0]) if values.ndim == 1 else values[0]
        return values if step == 1 else values[::step]

    def _read_rows(self, key: Any) -> tuple[NDArray, bool, int]:
        rows = self.shape[0]
        if isinstance(key, slice):
            start, stop, step = key.indices(rows)
            picked = range(start, stop, step)
            if len(picked) == 0:
                return self._range(0, 0), False, 1
            if step == 1:
                return self._range(picked[0], picked[-1] + 1), False, 1
            if step == -1:
                return self._range(picked[-1], picked[0] + 1), False, -1
            return self._take(np.arange(start, stop, step, dtype=np.int64)), False, 1
        if isinstance(key, (int, np.integer)):
            at = int(key) + (rows if key < 0 else 0)
            return self._range(at, at + 1), True, 1
        index = np.asarray(key, dtype=np.int64)
        return self._take(np.where(index < 0, index + rows, index)), False, 1

    def _range(self, start: int, stop: int) -> NDArray:
        starts, stops = self.selection.ranges(self.level).between(start, stop)
        if len(starts) > 1:
            # take_rows coalesces for itself; only the rows of this one read are listed.
            counts = stops - starts
            ends = np.cumsum(counts)
            rows = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
            return self._physical(rows)
        first, last = (int(starts[0]), int(stops[0])) if len(starts) else (0, 0)
        return self._physical(slice(first, last))

    def _take(self, index: IntArray) -> NDArray:
        return self._physical(self.selection.ranges(self.level).rows(index))

    def _physical(self, rows: slice | IntArray) -> NDArray:
        """Values of physical rows, shaped and numbered as the Dataset shows them."""
        snapshot = self.selection.snapshot
        if self.part == "present":
            mask = snapshot.present(self.name)
            if mask is None:
                count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
                return np.ones(count, dtype=bool)
            return mask[rows]
        if isinstance(rows, slice):
            values = snapshot.read_rows(self.name, rows.start, rows.stop)
        else:
            values = snapshot.take_rows(self.name, rows)
        if self.name == "neighbor_list":
            values = values - self._base(rows)[:, None].astype(values.dtype)
        if self.level == "system":
            values = as_rows(self.name, values)
        if values.dtype != self.dtype:
            values = values.astype(self.dtype)
        return values.reshape(len(values), *self.shape[1:])

    def _base(self, rows: slice | IntArray) -> IntArray:
        """First atom of the sample that owns each physical edge row."""
        ptr = self.selection.snapshot.edges_ptr
        if isinstance(rows, slice):
            if rows.stop <= rows.start:
                return np.empty(0, dtype=np.int64)
            first = int(np.searchsorted(ptr, rows.start, side="right")) - 1
            last = int(np.searchsorted(ptr, rows.stop, side="left"))
            inside: IntArray = np.clip(ptr[first : last + 1], rows.start, rows.stop)
            return np.repeat(self._sample_bases(np.arange(first, last)), np.diff(inside))
        return self._sample_bases(np.searchsorted(ptr, rows, side="right") - 1)

    def _sample_bases(self, samples: IntArray) -> IntArray:
        snapshot = self.selection.snapshot
        if not snapshot.schema.foreign_samples:
            return snapshot.atoms_ptr[samples]
        found = snapshot.edge_bases()
        unsure = samples[np.isin(samples, found.unknown)]
        if unsure.size:
            raise CorruptStoreError(
                snapshot.where,
                f"edges of sample {int(unsure[0])} do not say to which atoms they belong: another "
                "tool appended or defragmented",
                mend="open_dataset(fields=...) without neighbor_list, or build the edges anew "
                "from the positions",
            )
        return found.bases[samples]

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        from dask.base import tokenize

        snapshot = self.selection.snapshot
        schema = snapshot.schema
        # A store that another tool wrote last has no identity of its own: no two openings of it
        # are taken for the same.
        known = schema.identity if schema.identity and not snapshot.is_foreign else id(snapshot)
        picked = self.selection.samples
        chosen = (picked.start, picked.stop) if isinstance(picked, slice) else tokenize(picked)
        return (
            "alchemi_xr.StoreArray",
            str(snapshot.where),
            known,
            snapshot.generation,
            self.name,
            self.part,
            chosen,
        )

    def __repr__(self) -> str:
        return f"StoreArray({self.selection.snapshot.where}, {self.name!r}, {list(self.shape)})"


class RowNumbers(BackendArray):
    """0, 1, 2, … without holding them: the ``sample_row`` coordinate."""

    def __init__(self, length: int) -> None:
        self.shape = (length,)
        self.dtype = np.dtype(np.int64)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._read
        )

    def _read(self, key: tuple[Any, ...]) -> NDArray:
        (k,) = key
        if isinstance(k, slice):
            return np.arange(*k.indices(self.shape[0]), dtype=np.int64)
        index = np.asarray(k, dtype=np.int64)
        return np.where(index < 0, index + self.shape[0], index)

    def __dask_tokenize__(self) -> tuple[str, int]:
        return ("alchemi_xr.RowNumbers", self.shape[0])


def wrap(array: BackendArray, *, cache: bool = False) -> Any:
    """What xarray's own ``open_dataset`` makes of a backend array."""
    wrappers: Any = indexing
    lazy = wrappers.CopyOnWriteArray(wrappers.LazilyIndexedArray(array))
    return wrappers.MemoryCachedArray(lazy) if cache else lazy


def is_dask(var: xr.Variable | xr.DataArray) -> bool:
    """Whether the values are a Dask array."""
    return hasattr(_data(var), "dask")


def is_lazy(var: xr.Variable | xr.DataArray) -> bool:
    """Whether the values are still in the store, without Dask."""
    data = _data(var)
    if not isinstance(data, indexing.ExplicitlyIndexed):
        return False
    while hasattr(data, "array"):
        data = data.array
    return isinstance(data, BackendArray)


def origin(var: xr.Variable | xr.DataArray) -> Any:
    """The backend array that a variable shows whole and unchanged, else None.

    Looks behind xarray's wrappers and behind a Dask array made straight from
    one; anything computed, sliced, transposed or loaded has no origin.
    """
    data = _data(var)
    if hasattr(data, "dask"):
        data = _dask_source(data)
    # NumPy-backed wrappers end in an array without .array.
    while data is not None and not isinstance(data, BackendArray):
        if isinstance(data, indexing.LazilyIndexedArray) and not _trivial(data):
            return None
        data = getattr(data, "array", None)
    found: Any = data
    return found if found is not None and tuple(found.shape) == tuple(var.shape) else None


def _data(var: xr.Variable | xr.DataArray) -> Any:
    return var.variable._data if isinstance(var, xr.DataArray) else var._data


def _dask_source(array: Any) -> Any:
    key = f"original-{array.name}"
    layer = getattr(array.dask, "layers", {}).get(key)
    if layer is None:
        return None
    node = layer[key]
    return getattr(node, "value", node)


def _trivial(lazy: indexing.LazilyIndexedArray) -> bool:
    return all(
        isinstance(k, slice) and range(*k.indices(n)) == range(n)
        for k, n in zip(lazy.key.tuple, lazy.array.shape, strict=True)
    )

"""Writing rows, and the one step that makes them true.

A session writes arrays and remembers which files have to reach the medium;
:meth:`Session.commit` forces them there and then replaces the root document.
Until that replacement nothing that was written exists for a reader.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store

from alchemi_xr._typing import BoolArray, IntArray, NDArray, Ptr
from alchemi_xr.store import fs, layout
from alchemi_xr.store._compat import object_rows_of, text_array, wait, write_json
from alchemi_xr.store.locate import DurableStore, Place
from alchemi_xr.store.schema import FieldInfo, StoreSchema

__all__ = ["Session", "row_mask"]

# Rows of fill written in one go.
_FILL_ROWS = 1 << 18


class Session:
    """An open store for one writer, who holds its lease.

    Parameters
    ----------
    place : Place
    read_only : bool
        For a look that must not touch anything.
    """

    def __init__(self, place: Place, *, read_only: bool = False) -> None:
        self.place = place
        self.read_only = read_only
        self.store: Store
        if place.path is not None:
            self.store = DurableStore(place.path, read_only=read_only)
        else:
            self.store = place.current()
        self._arrays: dict[str, zarr.Array[Any]] = {}

    def key(self, path: str) -> str:
        return self.place.key(path)

    @property
    def prefix(self) -> str:
        return f"{self.place.prefix}/" if self.place.prefix else ""

    def array(self, path: str) -> zarr.Array[Any]:
        """An array, open for writing."""
        array = self._arrays.get(path)
        if array is None:
            array = self._arrays[path] = layout.open_array(
                self.store, self.key(path), write=not self.read_only
            )
        return array

    def put(self, path: str, array: zarr.Array[Any]) -> None:
        """Remember an array that was just made."""
        self._arrays[path] = array

    def exists(self, path: str) -> bool:
        return bool(wait(self.store.exists(self.key(f"{path}/zarr.json"))))

    def resize(self, path: str, rows: int) -> None:
        """Give an array so many rows."""
        array = self.array(path)
        if array.shape[0] != rows:
            array.resize((rows, *array.shape[1:]))

    def write(self, path: str, start: int, values: NDArray) -> None:
        """Write rows from ``start``; the array must be long enough."""
        array = self.array(path)
        if len(values) == 0 or 0 in array.shape[1:]:
            return
        if array.dtype.kind in "TOU":
            values = text_array(values)
        else:
            values = np.ascontiguousarray(values, dtype=array.dtype)
            values = values.reshape(len(values), *array.shape[1:])
        array[start : start + len(values)] = values

    def extend(self, path: str, start: int, values: NDArray) -> None:
        """Write rows from ``start``, which become the array's last."""
        self.resize(path, start + len(values))
        self.write(path, start, values)

    def extend_filled(self, path: str, start: int, stop: int, fill: Any) -> None:
        """Write rows ``start:stop`` of one value, which become the array's last."""
        self.resize(path, stop)
        array = self.array(path)
        dtype = np.dtype(object) if array.dtype.kind in "TOU" else array.dtype
        step = max(1, _FILL_ROWS // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
        unit = object_rows_of(array)
        step = max(unit, step // unit * unit)
        while start < stop:
            end = min((start // step + 1) * step, stop)
            self.write(path, start, np.full((end - start, *array.shape[1:]), fill, dtype))
            start = end

    def remove(self, path: str) -> None:
        """Remove an array and all its chunks."""
        self._arrays.pop(path, None)
        wait(self.store.delete_dir(self.key(path)))

    def write_row_mask(
        self, path: str, samples_mask: BoolArray, ptr: Ptr, touched: NDArray
    ) -> None:
        """Write the mask over rows wherever one of the touched samples has rows.

        Whole storage objects are made anew from the sample mask, so that each is
        replaced in one step.
        """
        array, total = self.array(path), int(ptr[-1])
        unit = object_rows_of(array)
        starts, stops = ptr[touched], ptr[touched + 1]
        full = stops > starts
        first, last = starts[full] // unit, (stops[full] - 1) // unit
        objects = _union(first, last)
        for number in objects.tolist():
            start, stop = number * unit, min((number + 1) * unit, total)
            self.write(path, start, row_mask(samples_mask, ptr, start, stop))

    def flush(self) -> None:
        """Force everything written so far to the medium."""
        if isinstance(self.store, DurableStore):
            self.store.flush()

    def commit(self, schema: StoreSchema) -> dict[str, Any]:
        """Make what was written true; returns the root attributes."""
        self.flush()
        return self.write_root(schema.to_attributes())

    def write_root(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Replace the root document in one step."""
        document = {"attributes": attributes, "zarr_format": 3, "node_type": "group"}
        if self.place.path is not None:
            data = json.dumps(document, indent=2, ensure_ascii=False).encode()
            fs.atomic_replace(self.place.path / "zarr.json", data)
        else:
            write_json(self.store, self.key("zarr.json"), document)
        return attributes

    def write_group(self, path: str) -> None:
        """Make a group, so that other readers find it even when it is empty."""
        write_json(
            self.store,
            self.key(f"{path}/zarr.json"),
            {"attributes": {}, "zarr_format": 3, "node_type": "group"},
        )

    def new_field(self, info: FieldInfo, rows: int, config: Any) -> None:
        """Make the array of a field; its rows have to be written."""
        array = layout.create_field(self.store, info, rows, config, prefix=self.prefix)
        self.put(info.path, array)

    def new_present(self, info: FieldInfo, rows: int, config: Any) -> None:
        """Make the presence mask of a field; its entries have to be written."""
        array = layout.create_present(self.store, info, rows, config, prefix=self.prefix)
        self.put(info.present_path, array)

    def new_meta(self, path: str, rows: int, config: Any) -> None:
        """Make a ptr or mask; its entries have to be written."""
        self.put(path, layout.create_meta(self.store, path, rows, config, prefix=self.prefix))


def _union(first: NDArray, last: NDArray) -> NDArray:
    """All whole numbers in the closed ranges, each once, ascending."""
    if len(first) == 0:
        return np.empty(0, np.int64)
    counts = last - first + 1
    ends = np.cumsum(counts)
    numbers = np.repeat(first - (ends - counts), counts) + np.arange(ends[-1])
    return np.unique(numbers)


def row_mask(samples_mask: BoolArray, ptr: Ptr, start: int, stop: int) -> BoolArray:
    """The sample mask, repeated over rows ``start:stop`` only."""
    first = int(np.searchsorted(ptr, start, side="right")) - 1
    last = int(np.searchsorted(ptr, stop, side="left"))
    bounds = np.clip(ptr[first : last + 1], start, stop).astype(np.int64)
    counts: IntArray = bounds[1:] - bounds[:-1]
    return np.repeat(samples_mask[first:last], counts)

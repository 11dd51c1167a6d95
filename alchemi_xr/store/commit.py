"""Writing rows, and the one step that makes them true.

A session writes arrays and remembers which files have to reach the medium;
:meth:`Session.commit` forces them there and then replaces the root document.
Until that replacement nothing that was written exists for a reader.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store

from alchemi_xr._typing import BoolArray, IntArray, NDArray, Ptr
from alchemi_xr.store import fs, layout
from alchemi_xr.store._compat import object_keys, object_rows_of, text_array, wait, write_json
from alchemi_xr.store.direct import DirectArray, parse, read_document
from alchemi_xr.store.locate import DurableStore, Place
from alchemi_xr.store.schema import FieldInfo, StoreSchema
from alchemi_xr.store.stage import Stage, submit

__all__ = ["Session", "row_mask"]

# Rows of fill written in one go.
_FILL_ROWS = 1 << 18
_WORTH_A_THREAD = 1 << 17


class Session:
    """An open store for one writer, who holds its lease.

    Arrays of a folder are written directly where that is possible, and by zarr
    elsewhere; who calls sees no difference.

    Parameters
    ----------
    place : Place
    read_only : bool
        For a look that must not touch anything.
    at_once : bool
        Put files in their places as they are written: for a store being built.
    private : bool
        The same, in a folder that no other process and no reader knows of.
    shared : bool
        For a store being built by many threads and processes: files take their
        places in :meth:`flush`, forced to the medium.
    """

    def __init__(
        self,
        place: Place,
        *,
        read_only: bool = False,
        at_once: bool = False,
        private: bool = False,
        shared: bool = False,
    ) -> None:
        self.place = place
        self.read_only = read_only
        # Each of many threads encodes its own chunks: no more threads for that.
        self._encodes_here = at_once or private or shared
        self.store: Store
        self.stage: Stage | None = None
        if place.path is not None:
            self.store = DurableStore(place.path, read_only=read_only)
            # Of a bulk write nobody knows how many files wait, nor how many are open elsewhere.
            most = {"most_open": 24} if shared else {}
            self.stage = Stage(place.path, at_once=at_once, private=private, **most)
        else:
            self.store = place.current()
        self.root: bytes | None = None
        """The root document as last written or seen, for a store that is a folder."""
        self.absent_is_fill = False
        self._arrays: dict[str, zarr.Array[Any]] = {}
        self._direct: dict[str, DirectArray | None] = {}
        # Chunks that threads are encoding, by array.
        self._running: dict[str, Future[None]] = {}

    def key(self, path: str) -> str:
        return self.place.key(path)

    @property
    def prefix(self) -> str:
        return f"{self.place.prefix}/" if self.place.prefix else ""

    def array(self, path: str) -> zarr.Array[Any]:
        """An array as zarr sees it; what was staged lands first."""
        self._settle()
        if self.stage:
            self.flush()
        array = self._arrays.get(path)
        if array is None:
            array = self._arrays[path] = layout.open_array(
                self.store, self.key(path), write=not self.read_only
            )
        return array

    def _of(self, path: str) -> tuple[DirectArray, Stage] | None:
        """An array that is written directly, or None for one of zarr's."""
        if self.place.path is None or self.stage is None:
            return None
        if path not in self._direct:
            folder = self.place.path / path
            self._direct[path] = parse(folder, read_document(folder), where=self.place.where)
        found = self._direct[path]
        if found is None:
            return None
        if path in self._running:
            self._running.pop(path).result()
        found.absent_is_fill = self.absent_is_fill
        return found, self.stage

    def direct(self, path: str) -> DirectArray | None:
        """The files of an array, when it is one that needs no zarr."""
        found = self._of(path)
        return None if found is None else found[0]

    def exists(self, path: str) -> bool:
        if self.place.path is not None:
            return path in self._direct or (self.place.path / path / "zarr.json").exists()
        return bool(wait(self.store.exists(self.key(f"{path}/zarr.json"))))

    def length(self, path: str) -> int:
        """Rows that an array says it has."""
        found = self._of(path)
        return self.array(path).shape[0] if found is None else found[0].rows

    def unit(self, path: str) -> int:
        """Rows of one storage object of an array."""
        found = self._of(path)
        return object_rows_of(self.array(path)) if found is None else found[0].unit

    def object_keys(self, path: str, rows: int) -> list[str]:
        """Keys, relative to an array, of the objects that hold its first rows."""
        found = self._of(path)
        return object_keys(self.array(path), 0, rows) if found is None else found[0].keys(rows)

    def resize(self, path: str, rows: int) -> None:
        """Give an array so many rows."""
        found = self._of(path)
        if found is not None:
            self._arrays.pop(path, None)
            found[0].resize(found[1], rows)
            return
        array = self._zarr(path)
        if array.shape[0] != rows:
            array.resize((rows, *array.shape[1:]))

    def _zarr(self, path: str) -> zarr.Array[Any]:
        """An array that zarr writes; the order of what was staged before is kept."""
        if self.stage is not None and self.stage.phase:
            self.flush()
        return self.array(path)

    def write(self, path: str, start: int, values: NDArray) -> None:
        """Write rows from ``start``; the array must be long enough."""
        self._write(path, start, values, behind=False)

    def _write(self, path: str, start: int, values: NDArray, *, behind: bool) -> None:
        if len(values) == 0:
            return
        found = self._of(path)
        if found is not None:
            array, stage = found
            if array.codec.is_text:
                rows = text_array(values).astype(object)
            else:
                rows = np.asarray(values, dtype=array.dtype)
            rows = rows.reshape(len(values), *array.tail)
            if self._encodes_here or array.codec.is_raw or array.chunk_bytes < _WORTH_A_THREAD:
                array.write(stage, start, rows, behind=behind)
            else:
                # The compressors of several arrays run side by side.
                self._running[path] = submit(
                    partial(array.write, stage, start, rows, behind=behind)
                )
            return
        by_zarr = self._zarr(path)
        if 0 in by_zarr.shape[1:]:
            return
        if by_zarr.dtype.kind in "TOU":
            values = text_array(values)
        else:
            values = np.ascontiguousarray(values, dtype=by_zarr.dtype)
            values = values.reshape(len(values), *by_zarr.shape[1:])
        by_zarr[start : start + len(values)] = values

    def write_parts(self, path: str, start: int, parts: Sequence[NDArray]) -> None:
        """Write whole objects from ``start``, or up to the end; rows are given in parts.

        What is raw goes to the files from where the parts are, without being joined first.
        """
        found = self._of(path)
        if len(parts) > 1 and found is not None and found[0].codec.is_raw:
            array, stage = found
            if 0 not in array.tail:
                array.put_parts(stage, start, parts)
            return
        self.write(path, start, parts[0] if len(parts) == 1 else np.concatenate(parts))

    def extend(self, path: str, start: int, values: NDArray) -> None:
        """Write rows from ``start``, which become the array's last."""
        self.resize(path, start + len(values))
        self._write(path, start, values, behind=True)

    def extend_filled(self, path: str, start: int, stop: int, fill: Any) -> None:
        """Write rows ``start:stop`` of one value, which become the array's last."""
        self.resize(path, stop)
        if start == stop:
            return
        found = self._of(path)
        if found is not None:
            tail, dtype = found[0].tail, found[0].dtype
        else:
            array = self.array(path)
            tail = array.shape[1:]
            dtype = np.dtype(object) if array.dtype.kind in "TOU" else array.dtype
        step = max(1, _FILL_ROWS // max(1, int(np.prod(tail, dtype=np.int64))))
        unit = self.unit(path)
        step = max(unit, step // unit * unit)
        while start < stop:
            end = min((start // step + 1) * step, stop)
            self._write(path, start, np.full((end - start, *tail), fill, dtype), behind=True)
            start = end

    def remove(self, path: str) -> None:
        """Remove an array and all its chunks."""
        self._settle()
        for held in (self._arrays, self._direct):
            for name in [n for n in held if n == path or n.startswith(f"{path}/")]:
                del held[name]
        if self.stage is not None and self.place.path is not None:
            self.stage.forget_folder(self.place.path / path)
        wait(self.store.delete_dir(self.key(path)))

    def write_row_mask(
        self, path: str, samples_mask: BoolArray, ptr: Ptr, touched: NDArray
    ) -> None:
        """Write the mask over rows wherever one of the touched samples has rows.

        Whole storage objects are made anew from the sample mask, so that each is
        replaced in one step.
        """
        total, unit = int(ptr[-1]), self.unit(path)
        starts, stops = ptr[touched], ptr[touched + 1]
        full = stops > starts
        first, last = starts[full] // unit, (stops[full] - 1) // unit
        objects = _union(first, last)
        for number in objects.tolist():
            start, stop = number * unit, min((number + 1) * unit, total)
            self.write(path, start, row_mask(samples_mask, ptr, start, stop))

    def _settle(self) -> None:
        """Wait for the threads that encode; the first error of one is raised."""
        running, self._running = self._running, {}
        wait_for(running.values())
        for future in running.values():
            future.result()

    def barrier(self) -> None:
        """What is written from now on becomes visible after all that was before."""
        self._settle()
        if isinstance(self.store, DurableStore) and self.store.dirty:
            self.flush()
        if self.stage is not None:
            self.stage.barrier()

    def flush(self) -> None:
        """Force everything written so far to the medium, and in its place."""
        self._settle()
        if isinstance(self.store, DurableStore):
            self.store.flush()
        if self.stage is not None:
            self.stage.land()

    def drop(self) -> None:
        """Forget what was staged and has not landed; the session is of no use after it."""
        wait_for(self._running.values())
        self._running.clear()
        if self.stage is not None:
            self.stage.drop()
        self._direct.clear()
        self._arrays.clear()

    def commit(self, schema: StoreSchema) -> dict[str, Any]:
        """Make what was written true; returns the root attributes."""
        return self.write_root(schema.to_attributes())

    def write_root(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Replace the root document in one step, after all that was written before."""
        self._settle()
        document = {"attributes": attributes, "zarr_format": 3, "node_type": "group"}
        if self.place.path is not None and self.stage is not None:
            # Without indents: that encoder takes longer than an append's own work.
            # Names of input files may have bytes that are no text.
            data = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
            if isinstance(self.store, DurableStore):
                self.store.flush()
            if self.stage.private:
                fs.write_file(self.place.path / "zarr.json", data)
            elif self.stage.at_once:
                fs.atomic_replace(self.place.path / "zarr.json", data)
            else:
                self.stage.barrier()
                self.stage.put(self.place.path / "zarr.json", [data])
                self.stage.land()
            self.root = data
        else:
            write_json(self.store, self.key("zarr.json"), document)
        return attributes

    def write_group(self, path: str) -> None:
        """Make a group, so that other readers find it even when it is empty."""
        document = {"attributes": {}, "zarr_format": 3, "node_type": "group"}
        if self.place.path is not None and self.stage is not None:
            data = json.dumps(document).encode()
            self.stage.put(self.place.path / path / "zarr.json", [data])
        else:
            write_json(self.store, self.key(f"{path}/zarr.json"), document)

    def new_field(self, info: FieldInfo, rows: int, config: Any) -> None:
        """Make the array of a field; its rows have to be written."""
        self._new(layout.field_spec(info, rows, config))

    def new_present(self, info: FieldInfo, rows: int, config: Any) -> None:
        """Make the presence mask of a field; its entries have to be written."""
        self._new(layout.present_spec(info, rows, config))

    def new_meta(self, path: str, rows: int, config: Any) -> None:
        """Make a ptr or mask; its entries have to be written."""
        self._new(layout.meta_spec(path, rows, config))

    def _new(self, spec: dict[str, Any]) -> None:
        path = spec["path"]
        if self.place.path is not None and self.stage is not None:
            folder = self.place.path / path
            made = parse(folder, layout.document(spec), where=self.place.where)
            if made is not None:
                if folder.exists():
                    self.remove(path)
                if not (folder.parent / "zarr.json").exists():
                    self.write_group(path.rpartition("/")[0])
                made.save(self.stage)
                self._direct[path] = made
                return
            self._direct[path] = None
        self._arrays[path] = layout.create(self.store, spec, prefix=self.prefix)


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

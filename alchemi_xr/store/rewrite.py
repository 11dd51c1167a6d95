"""Rewrites build a sibling store and swap it in; the old one is kept aside.

Memory is bounded by the size of a block and one shard of each field, whatever
the size of the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from zarr.storage import MemoryStore

from alchemi_xr._typing import BoolArray, IntArray, NDArray
from alchemi_xr.errors import StoreError
from alchemi_xr.store import fs
from alchemi_xr.store._compat import replace_contents, wait
from alchemi_xr.store.bulk import BulkWriter
from alchemi_xr.store.codecs import ZarrWriteConfig
from alchemi_xr.store.incoming import globalised
from alchemi_xr.store.locate import Place
from alchemi_xr.store.reader import Snapshot, open_store
from alchemi_xr.store.schema import FieldInfo

__all__ = ["check_rewritable", "clear", "clear_unfinished", "copy_samples", "rewrite"]

_BLOCK_BYTES = 32 * 2**20


def rewrite(
    place: Place,
    config: ZarrWriteConfig,
    *,
    operation: str = "defragment",
    keep_deleted: bool = False,
    choose: Callable[[Snapshot], tuple[IntArray, BoolArray | None]] | None = None,
) -> None:
    """Rewrite a store without its deleted samples; the caller holds its lease.

    With ``keep_deleted`` they are copied too, and stay deleted. ``choose``
    gives other samples, in their order, and which of them are not deleted.
    """

    def copy(snapshot: Snapshot, target: Place) -> None:
        samples, mask = snapshot.active, None
        if keep_deleted:
            samples, mask = np.arange(snapshot.num_samples), snapshot.samples_mask
        if choose is not None:
            samples, mask = choose(snapshot)
        copy_samples(snapshot, samples, target, config, operation=operation, samples_mask=mask)

    if place.path is not None:
        clear_unfinished(place.path)
        built = fs.unfinished_path(place.path)
        try:
            with open_store(place) as snapshot:
                copy(snapshot, Place(place.where, path=built))
            fs.fsync_dir(place.path.parent)
            fs.swap(built, place.path, fs.previous_path(place.path))
        except Exception:
            fs.remove_tree(built)
            raise
        return
    check_rewritable(place)
    if place.repository is not None:
        # Read from the snapshot on which the transaction began, write into the transaction.
        base = Place(place.where, store=place.repository.base(), prefix=place.prefix)
        with open_store(base) as snapshot:
            clear(place)
            copy(snapshot, place)
        return
    memory = MemoryStore()
    with open_store(place) as snapshot:
        copy(snapshot, Place(place.where, store=memory))
    assert place.store is not None
    replace_contents(place.store, memory)


def check_rewritable(place: Place) -> None:
    """Refuse a place where readers would see two stores mixed while one is rewritten.

    Raises
    ------
    StoreError
    """
    if place.is_local or place.repository is not None or (place.in_memory and not place.prefix):
        return
    raise StoreError(
        place.where,
        "a store here cannot be rewritten in place: it could not be replaced in one step",
        mend="write the result elsewhere with defragment(dest=...), or keep the store in an "
        "Icechunk repository",
    )


def clear(place: Place) -> None:
    """Remove a store from a place that is no folder, root document first."""
    store = place.current()
    wait(store.delete(place.key("zarr.json")))
    for part in ("meta", "core", "custom"):
        wait(store.delete_dir(place.key(part)))


def copy_samples(
    snapshot: Snapshot,
    samples: IntArray,
    place: Place,
    config: ZarrWriteConfig,
    *,
    operation: str = "defragment",
    samples_mask: BoolArray | None = None,
) -> BulkWriter:
    """A new store of the chosen samples, in their order, in bounded memory.

    ``samples_mask`` says which of them stay deleted; by default none is.
    """
    infos = [_fresh(info, snapshot.generation + 1) for info in snapshot.schema.fields.values()]
    writer = BulkWriter.create(
        place,
        infos,
        np.diff(snapshot.atoms_ptr)[samples],
        np.diff(snapshot.edges_ptr)[samples],
        config=config,
        provenance=snapshot.schema.provenance,
        generation=snapshot.generation + 1,
        operation=operation,
    )
    streams = {
        info.name: _Stream(writer, info.path, writer.write_rows, info.name) for info in infos
    }
    masks = {
        info.name: _Stream(writer, info.present_path, writer.write_present, info.name)
        for info in infos
        if info.holes
    }
    atoms = 0
    for block in snapshot.iter_blocks(samples=samples, max_bytes=_BLOCK_BYTES):
        for name, values in block.arrays.items():
            if name == "neighbor_list":
                values = globalised(values, block, atoms, where=place.where)
            streams[name].push(values)
        for name, mask in masks.items():
            mask.push(block.has(name))
        atoms += block.num_atoms
    for stream in (*streams.values(), *masks.values()):
        stream.finish()
    writer.schema = writer.schema.evolve(others=snapshot.schema.others)
    writer.commit(samples_mask)
    return writer


def _fresh(info: FieldInfo, generation: int) -> FieldInfo:
    return replace(info, since=generation, rows=None)


class _Stream:
    """Collects rows of one array and writes them by whole storage objects."""

    def __init__(
        self,
        writer: BulkWriter,
        path: str,
        write: Callable[[str, int, NDArray], None],
        name: str,
    ) -> None:
        self._unit = writer.session.unit(path)
        self._write, self._name = write, name
        self._parts: list[NDArray] = []
        self._held = 0
        self._start = 0

    def push(self, values: NDArray) -> None:
        """Add rows; full objects are written."""
        self._parts.append(values)
        self._held += len(values)
        if self._held < self._unit:
            return
        rows = self._take()
        full = len(rows) // self._unit * self._unit
        self._write(self._name, self._start, rows[:full])
        self._start += full
        if full < len(rows):
            # A copy, or the view would keep the whole block alive.
            self._parts, self._held = [rows[full:].copy()], len(rows) - full

    def finish(self) -> None:
        """Write what is left."""
        if self._held:
            self._write(self._name, self._start, self._take())

    def _take(self) -> NDArray:
        parts, self._parts, self._held = self._parts, [], 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def clear_unfinished(path: Path) -> None:
    """Remove what killed rewrites left beside a store; the caller holds its lease."""
    prefix = fs.unfinished_prefix(path)
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(prefix)]
    for name in names:
        fs.remove_tree(path.parent / name)

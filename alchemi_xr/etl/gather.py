"""Chosen samples of stores, in a chosen order, as what a plan reads.

The order lies in a file beside the store that is built, so that a task is two
numbers, whatever the order is; a worker keeps a few stores open.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.store.reader import Snapshot
from alchemi_xr.store.schema import FieldInfo

__all__ = ["Counted", "Gather", "count", "digest", "opened", "release"]


@dataclass(frozen=True)
class Counted:
    """A store of which the samples to take are known.

    Parameters
    ----------
    where : str
    source : bytes or Snapshot
        One committed generation; as a pickle it holds no file open.
    infos : dict of str to FieldInfo
    holes : frozenset of str
        Fields that some of the samples lack.
    order : int64 array, [M]
        Physical positions of the samples, in the order they are taken.
    num_atoms, num_edges : int array, [M]
    """

    where: str
    source: bytes | Snapshot
    infos: dict[str, FieldInfo]
    holes: frozenset[str]
    order: IntArray
    num_atoms: IntArray
    num_edges: IntArray
    token: tuple[Any, ...] = field(default=())


def count(snapshot: Snapshot, order: IntArray) -> Counted:
    """Samples of a store with their counts; the snapshot may be closed afterwards if local."""
    holes = set()
    for name in snapshot.fields:
        mask = snapshot.present(name)
        if mask is not None and not mask[order].all():
            holes.add(name)
    schema = snapshot.schema
    return Counted(
        snapshot.where,
        pickle.dumps(snapshot) if snapshot.place.is_local else snapshot,
        dict(schema.fields),
        frozenset(holes),
        order,
        _counts(snapshot.atoms_ptr, order),
        _counts(snapshot.edges_ptr, order),
        (schema.identity, schema.generation, schema.counts),
    )


def _counts(ptr: Ptr, order: IntArray) -> IntArray:
    """Rows of the chosen samples, in half the memory where no sample is huge."""
    counts = ptr[order + 1]
    counts -= ptr[order]
    if len(counts) and counts.max() > np.iinfo(np.int32).max:
        return counts
    return counts.astype(np.int32)


def digest(*arrays: NDArray) -> str:
    """Hex digest of index arrays."""
    state = hashlib.blake2s()
    for array in arrays:
        dtype = np.uint8 if array.dtype == bool else np.int64
        state.update(np.ascontiguousarray(array, dtype=dtype).data)
    return state.hexdigest()


class Gather:
    """Reads ranges of the chosen samples; picklable for stores that are folders.

    Parameters
    ----------
    stores : sequence of Counted
    names : sequence of str
        Fields to read.
    folder : Path
        Where the order is put down.
    """

    def __init__(self, stores: Sequence[Counted], names: Sequence[str], folder: Path) -> None:
        self._sources = [store.source for store in stores]
        self._names = [[n for n in names if n in store.infos] for store in stores]
        self._ptr: Ptr = counts_to_ptr(np.array([len(store.order) for store in stores], np.int64))
        self._path = str(folder / "order.npy")
        with open(self._path, "wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<i8", "fortran_order": False, "shape": (int(self._ptr[-1]),)}
            )
            for store in stores:
                file.write(np.ascontiguousarray(store.order, dtype="<i8").data)

    def __call__(self, payload: tuple[int, int]) -> PartResult:
        start, stop = payload
        order = np.load(self._path, mmap_mode="r")
        first = int(np.searchsorted(self._ptr, start, side="right")) - 1
        last = int(np.searchsorted(self._ptr, stop, side="left"))
        blocks = []
        for number in range(first, last):
            begin = max(start, int(self._ptr[number]))
            end = min(stop, int(self._ptr[number + 1]))
            if end > begin:
                samples = np.array(order[begin:end], dtype=np.int64)
                snapshot = opened(self._sources[number])
                blocks.append(snapshot.read_block(samples, self._names[number]))
        return PartResult(Block.concat(blocks, where="merge"))


def release() -> None:
    """Let go of the stores that this process keeps open for its tasks."""
    _unpickled.cache_clear()
    _held.clear()


def hold(counted: Counted, snapshot: Snapshot) -> None:
    """Let tasks in this process read a snapshot that stays open, not another copy of it."""
    if isinstance(counted.source, bytes):
        _held[counted.source] = snapshot


def opened(source: bytes | Snapshot) -> Snapshot:
    """The snapshot behind a source, one of the few that a process keeps."""
    if not isinstance(source, bytes):
        return source
    held = _held.get(source)
    return _unpickled(source) if held is None else held


_held: dict[bytes, Snapshot] = {}


@lru_cache(maxsize=8)
def _unpickled(source: bytes) -> Snapshot:
    snapshot: Snapshot = pickle.loads(source)
    return snapshot

"""Compressed chunks of a local store, decoded without a call of zarr for each.

The beaten track only: whole chunks of the codecs that the profiles use. Whatever
is not as it should be is left to the snapshot, which reads more slowly and says
what is wrong.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.store.direct import DirectArray, parse, read_document
from alchemi_xr.store.locate import PinnedStore
from alchemi_xr.store.reader import Snapshot

__all__ = ["ChunkReader", "chunk_reader", "committed_array"]


class ChunkReader:
    """Reads committed rows of one field; see ``chunk_reader``.

    Parameters
    ----------
    array : DirectArray
    pinned : PinnedStore
    tail : tuple of int
        Shape of a row as the field has it.
    """

    def __init__(self, array: DirectArray, pinned: PinnedStore, tail: tuple[int, ...]) -> None:
        self._array, self._pinned, self._tail = array, pinned, tail

    def read(self, start: int, stop: int) -> NDArray | None:
        """Rows of whole chunks, as on disk, writable; None when they cannot be had so.

        Parameters
        ----------
        start, stop : int
            ``start`` is the first row of a chunk.
        """
        array, unit = self._array, self._array.unit
        if start % unit:
            return None
        out: NDArray = np.empty((stop - start, *self._tail), array.dtype)
        flat = out.reshape(stop - start, *array.tail)
        try:
            for number in range(start // unit, -(-stop // unit)):
                part = flat[number * unit - start : (number + 1) * unit - start]
                array.codec.decode_into(array.path_of(number).read_bytes(), array.chunk, part)
        except Exception:
            return None  # told by who reads with care
        # A folder that was exchanged meanwhile has other rows.
        return out if self._pinned.is_whole() else None


def chunk_reader(snapshot: Snapshot, name: str) -> ChunkReader | None:
    """A reader of the chunks of a field, or None where only zarr can read them.

    Parameters
    ----------
    snapshot : Snapshot
    name : str
    """
    array, pinned = committed_array(snapshot, name), snapshot.pinned
    if array is None or pinned is None or array.codec.is_text:
        return None
    if array.chunk_bytes == 0 or array.chunk[1:] != array.tail:
        return None
    return ChunkReader(array, pinned, snapshot.tail(name))


def committed_array(snapshot: Snapshot, name: str) -> DirectArray | None:
    """The array that holds the committed rows of a field, or None where it is not plain.

    Plain is an array of a folder of this machine, as :func:`~alchemi_xr.store.direct.parse` takes it, that is
    what the schema says, with all of its rows; who reads it another way says what is wrong.
    """
    info, pinned = snapshot.info(name), snapshot.pinned
    rows = snapshot.schema.rows(info.name)
    if pinned is None or info.is_text or info.rows is not None or rows == 0:
        return None
    folder = Path(f"{pinned.root}/{info.path}")
    try:
        array = parse(folder, read_document(folder), where=snapshot.where)
    except (OSError, ValueError):
        return None
    if array is None or array.dtype != info.dtype or array.rows < rows:
        return None
    return array if math.prod(array.tail) == math.prod(info.tail) else None

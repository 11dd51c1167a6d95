"""Uncompressed arrays of a local store as what they are: rows in the page cache.

Nothing is read and nothing decoded: chunk files are mapped one behind the other,
and a row is an address. Committed rows of such a file never change, and a store
that is replaced leaves its files to those who map them.
"""

from __future__ import annotations

import os
import threading
import weakref

from alchemi_xr._typing import NDArray
from alchemi_xr.errors import CorruptStoreError
from alchemi_xr.native.rows import map_files
from alchemi_xr.store.chunks import committed_array
from alchemi_xr.store.reader import Snapshot

__all__ = ["map_rows", "mapped_files"]

# Linux lets a process have 65,530 maps, and not all may be ours.
_MOST_FILES = 32_768
_lock = threading.Lock()
_held = 0


def _after_fork() -> None:
    # The thread that held it in the parent is not here to give it back.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def mapped_files() -> int:
    """Chunk files that this process has mapped."""
    return _held


def _release(count: int) -> None:
    global _held
    with _lock:
        _held -= count


def _reserve(count: int) -> bool:
    global _held
    with _lock:
        if _held + count > _MOST_FILES:
            return False
        _held += count
        return True


def map_rows(snapshot: Snapshot, name: str) -> NDArray | None:
    """The committed rows of a field, read-only, or None where they cannot be mapped.

    They can when the store is a folder of this machine and the field's chunks are
    neither compressed nor in shards. ``neighbor_list`` is store-global, as on disk.

    Parameters
    ----------
    snapshot : Snapshot
    name : str

    Raises
    ------
    CorruptStoreError
        A chunk file is shorter than its rows.
    MissingChunkError, StaleSnapshotError
        A chunk file, or the whole generation, is gone.
    """
    info, pinned = snapshot.info(name), snapshot.pinned
    array = committed_array(snapshot, name)
    if array is None or pinned is None or not array.codec.is_raw:
        return None
    width = array.chunk_bytes // array.unit
    if width == 0:
        return None
    rows, folder = snapshot.schema.rows(info.name), array.folder
    keys = array.keys(rows)
    if not _reserve(len(keys)):
        return None
    try:
        flat = map_files([f"{folder}/{key}" for key in keys], array.chunk_bytes, rows * width)
    except EOFError as error:
        _release(len(keys))
        raise CorruptStoreError(
            snapshot.where,
            f"the file of chunk {keys[error.args[0]]!r} of array {info.path!r} was cut short",
            found=f"{os.path.getsize(folder / keys[error.args[0]])} bytes",
            expected=f"{array.chunk_bytes} bytes",
            mend="restore the file from a copy; `alchemi-xr verify --checksums` lists the damaged",
        ) from None
    except FileNotFoundError as error:
        _release(len(keys))
        if not pinned.strict and pinned.is_whole():
            return None  # of another tool: a chunk that is not there holds the fill
        raise pinned.missing(str(error.filename).removeprefix(f"{pinned.root}/")) from None
    except OSError:
        _release(len(keys))
        return None
    if flat is None:
        _release(len(keys))
        return None
    weakref.finalize(flat, _release, len(keys))
    out: NDArray = flat.view(info.dtype).reshape(rows, *info.tail)
    return out

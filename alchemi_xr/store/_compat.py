"""The few places where zarr 3.1 and 3.4 differ, or where a public door is missing.

Nothing outside this module imports from inside zarr.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import google_crc32c
import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync as _zarr_sync
from zarr.storage import MemoryStore

__all__ = [
    "Buffer",
    "buffer_prototype",
    "chunk_rows_of",
    "crc32c",
    "object_keys",
    "object_rows_of",
    "quiet",
    "stored_bytes",
    "read_json",
    "replace_contents",
    "text_array",
    "to_buffer",
    "uses_own_file_access",
    "wait",
    "write_json",
]

T = TypeVar("T")


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of zarr, awaited on zarr's own loop."""
    return _zarr_sync(coroutine)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence zarr's notices about codecs and dtypes that are not in the core specification."""
    with warnings.catch_warnings():
        for text in (
            ".*not in the Zarr version 3 specification.*",
            ".*does not have a Zarr V3 specification.*",
            ".*Zarr format 3 specification.*",
        ):
            warnings.filterwarnings("ignore", message=text)
        warnings.filterwarnings("ignore", message=".*[Nn]umcodecs codecs.*")
        yield


def buffer_prototype() -> Any:
    """What zarr wants to be told when bytes are read."""
    return default_buffer_prototype()


def to_buffer(data: bytes) -> Buffer:
    """Bytes as zarr wants them."""
    return default_buffer_prototype().buffer.from_bytes(data)


def read_json(store: Store, key: str) -> dict[str, Any] | None:
    """A JSON document of a store, or None when there is none."""
    buffer = wait(store.get(key, default_buffer_prototype()))
    if buffer is None:
        return None
    document: dict[str, Any] = json.loads(buffer.to_bytes())
    return document


def write_json(store: Store, key: str, document: dict[str, Any]) -> None:
    """Replace one JSON document of a store, by one ``set``."""
    wait(store.set(key, to_buffer(json.dumps(document, indent=2).encode())))


def chunk_rows_of(array: zarr.Array[Any]) -> int:
    """Rows of the smallest piece that can be decoded alone."""
    try:
        return int(array.chunks[0])
    except NotImplementedError:  # a rectilinear grid of zarr >= 3.2
        sizes: Any = getattr(array, "read_chunk_sizes", ((1,),))
        return int(max(sizes[0], default=1))


def object_rows_of(array: zarr.Array[Any]) -> int:
    """Rows of one storage object: the shard, or the chunk when there is no shard."""
    try:
        return int(array.shards[0] if array.shards is not None else array.chunks[0])
    except NotImplementedError:
        sizes: Any = getattr(array, "write_chunk_sizes", ((1,),))
        return int(max(sizes[0], default=1))


def object_keys(array: zarr.Array[Any], start: int, stop: int) -> list[str]:
    """Keys, relative to the array, of the storage objects that hold rows ``start:stop``."""
    if stop <= start or 0 in array.shape[1:]:
        return []
    try:
        grid = array.shards if array.shards is not None else array.chunks
    except NotImplementedError:
        return []
    first, last = start // grid[0], -(-stop // grid[0])
    tail = [range(-(-n // c)) for n, c in zip(array.shape[1:], grid[1:], strict=True)]
    return [
        array.metadata.encode_chunk_key(coords)
        for coords in itertools.product(range(first, last), *tail)
    ]


def uses_own_file_access() -> bool:
    """Whether the codec pipeline of this process reads files past our stores (zarrs does)."""
    return not str(zarr.config.get("codec_pipeline.path")).startswith("zarr.")


def replace_contents(target: Store, source: Store) -> None:
    """Make a store in memory hold what another one holds.

    Raises
    ------
    TypeError
        The target does not live in memory.
    """
    if not isinstance(target, MemoryStore) or not isinstance(source, MemoryStore):
        raise TypeError("only stores in memory can be replaced in place")
    held = target._store_dict
    fresh = dict(source._store_dict)
    for key in [key for key in held if key not in fresh]:
        del held[key]
    held.update(fresh)


def crc32c(data: bytes | bytearray | memoryview) -> bytes:
    """Checksum as the crc32c codec puts it behind a chunk."""
    # It takes no memoryview.
    value: int = google_crc32c.value(np.frombuffer(data, np.uint8))
    return value.to_bytes(4, "little")


def stored_bytes(store: Any, prefix: str) -> int | None:
    """Bytes below a prefix of a store; None where it cannot tell."""
    try:
        return int(wait(store.getsize_prefix(prefix)))
    except (AttributeError, NotImplementedError, OSError):
        return None


def text_array(values: Any) -> np.ndarray[Any, Any]:
    """Text of any NumPy kind as the variable-length strings that zarr stores."""
    flat = ["" if v is None else str(v) for v in np.asarray(values, dtype=object).reshape(-1)]
    return np.array(flat, dtype=np.dtypes.StringDType())

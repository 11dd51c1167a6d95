"""Arrays of a local store, written without a call of zarr for each piece.

zarr costs 1 to 3 ms a call whatever the bytes. Here the chunks of the codecs
that the profiles use are encoded by the same compressors and put in place as
files, and the array's document is kept as it is but for its shape; what comes
out is what zarr itself would have written. Arrays with other codecs, shards or
cut tails are left to zarr: :func:`parse` gives None for them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.errors import CorruptStoreError, MissingChunkError
from alchemi_xr.store import fs
from alchemi_xr.store._compat import crc32c
from alchemi_xr.store.stage import Stage, submit

__all__ = ["ChunkCodec", "DirectArray", "codec_of", "parse", "read_document"]

# From here on a second thread pays for its start.
_PARALLEL_BYTES = 8 << 20
_THREADS = max(1, min(8, os.cpu_count() or 1))
_DTYPES = frozenset(
    (
        *("bool", "float16", "float32", "float64", "complex64", "complex128"),
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    )
)
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}

_Step = tuple[Callable[[Any], Any], Callable[..., Any]]


class ChunkCodec:
    """Encodes and decodes whole chunks as one chain of zarr's codecs does.

    Parameters
    ----------
    steps : list of (encode, decode)
        From bytes to bytes; none for raw chunks.
    is_text : bool
        Chunks are variable-length strings.
    """

    def __init__(self, steps: list[_Step], *, is_text: bool = False) -> None:
        self.steps = steps
        self.is_text = is_text

    @property
    def has_checksum(self) -> bool:
        """Whether changed bytes of a chunk are found."""
        return any(decode is _check_crc for _, decode in self.steps)

    @property
    def is_raw(self) -> bool:
        """Whether bytes on disk are bytes in memory."""
        return not self.steps and not self.is_text

    def encode(self, chunk: NDArray) -> fs.BytesLike:
        """Bytes of a whole chunk."""
        data: Any
        if self.is_text:
            from numcodecs.vlen import VLenUTF8

            data = VLenUTF8().encode(chunk.astype(object))
        else:
            data = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
        for encode, _ in self.steps:
            data = encode(data)
        return memoryview(data).cast("B")

    def decode(self, data: fs.BytesLike, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray:
        """A whole chunk, that may be written to.

        Raises
        ------
        ValueError
            The bytes are damaged.
        """
        held: Any = memoryview(data)
        for _, decode in reversed(self.steps):
            held = decode(held)
        if self.is_text:
            from numcodecs.vlen import VLenUTF8

            text: NDArray = VLenUTF8().decode(held).astype(object).reshape(shape)
            return text
        return np.frombuffer(held, dtype=dtype).reshape(shape).copy()

    def decode_into(self, data: fs.BytesLike, shape: tuple[int, ...], out: NDArray) -> None:
        """The first rows of a chunk of numbers, written to ``out`` (contiguous).

        Raises
        ------
        ValueError, RuntimeError
            The bytes are damaged, or do not give that many rows.
        """
        held: Any = memoryview(data)
        for _, decode in reversed(self.steps[1:]):
            held = decode(held)
        size = math.prod(shape) * out.dtype.itemsize
        if self.steps:
            first = self.steps[0][1]
            if first is not _check_crc and out.nbytes == size:
                # Decoded where it belongs; the codec says so when it does not fit.
                given = first(held, out)
                if given is not out and memoryview(given).nbytes != size:
                    raise ValueError("a chunk of another size")
                return
            held = first(held)
        whole = np.frombuffer(held, dtype=out.dtype)
        if whole.nbytes != size:
            raise ValueError(f"{whole.nbytes} bytes, {size} expected")
        out[...] = whole.reshape(shape)[: len(out)]


def _check_crc(data: Any) -> memoryview:
    view = memoryview(data).cast("B")
    if len(view) < 4 or crc32c(view[:-4]) != bytes(view[-4:]):
        raise ValueError("the checksum of the chunk is not that of its bytes")
    return view[:-4]


def _add_crc(data: Any) -> bytes:
    view = memoryview(data).cast("B")
    return b"".join((view, crc32c(view)))


def _step(name: str, settings: Mapping[str, Any]) -> _Step | None:
    codec: Any
    if name == "crc32c":
        return _add_crc, _check_crc
    if name == "blosc" and settings.get("shuffle") in _SHUFFLES:
        from numcodecs.blosc import Blosc

        codec = Blosc(
            cname=settings["cname"],
            clevel=settings["clevel"],
            shuffle=_SHUFFLES[settings["shuffle"]],
            blocksize=settings.get("blocksize", 0),
            typesize=settings["typesize"],
        )
    elif name == "zstd":
        from numcodecs.zstd import Zstd

        codec = Zstd(level=settings["level"], checksum=bool(settings.get("checksum", False)))
    else:
        return None
    return codec.encode, codec.decode


def codec_of(document: Mapping[str, Any]) -> ChunkCodec | None:
    """The codec of an array's document, or None when it is one that zarr has to run."""
    codecs = [
        (c, {}) if isinstance(c, str) else (c["name"], c.get("configuration") or {})
        for c in document["codecs"]
    ]
    name, settings = codecs[0]
    is_text = name == "vlen-utf8"
    if not is_text and (name != "bytes" or settings.get("endian", "little") != sys.byteorder):
        return None
    steps = []
    for name, settings in codecs[1:]:
        step = _step(name, settings)
        if step is None:
            return None
        steps.append(step)
    return ChunkCodec(steps, is_text=is_text)


def read_document(folder: Path) -> dict[str, Any]:
    """The document of an array.

    Raises
    ------
    FileNotFoundError, ValueError
    """
    document = json.loads((folder / "zarr.json").read_bytes())
    if not isinstance(document, dict) or document.get("node_type") != "array":
        raise ValueError(f"{folder.name} is no Zarr array")
    return document


def parse(folder: Path, document: dict[str, Any], *, where: str = "") -> DirectArray | None:
    """The array of a document, or None when zarr has to write it."""
    try:
        return _parse(folder, document, where)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _parse(folder: Path, document: dict[str, Any], where: str) -> DirectArray | None:
    grid, keys = document["chunk_grid"], document["chunk_key_encoding"]
    if grid["name"] != "regular" or keys["name"] != "default":
        return None
    if (keys.get("configuration") or {}).get("separator", "/") != "/":
        return None
    if document.get("storage_transformers"):
        return None
    shape = tuple(int(n) for n in document["shape"])
    chunk = tuple(int(n) for n in grid["configuration"]["chunk_shape"])
    if not shape or any(c < max(1, n) for c, n in zip(chunk[1:], shape[1:], strict=True)):
        return None
    codec = codec_of(document)
    kind = document["data_type"]
    if codec is None or (kind != "string" if codec.is_text else kind not in _DTYPES):
        return None
    if chunk[1:] != tuple(max(1, n) for n in shape[1:]):
        return None
    dtype = np.dtype(object) if codec.is_text else np.dtype(kind)
    fill = document["fill_value"]
    if not codec.is_text:
        fill = dtype.type(complex(*map(float, fill)) if dtype.kind == "c" else fill)
    return DirectArray(folder, document, dtype, chunk, fill, codec, where)


class DirectArray:
    """One array of a local store, for its writer.

    Parameters
    ----------
    folder : Path
    document : dict
        Its ``zarr.json``.
    dtype : dtype
    chunk : tuple of int
        Shape of a chunk; only the first axis is cut.
    fill : scalar
    codec : ChunkCodec
    where : str
        The store, for messages.

    Attributes
    ----------
    absent_is_fill : bool
        A chunk that is not there holds the fill, as in stores of other tools.
    """

    def __init__(
        self,
        folder: Path,
        document: dict[str, Any],
        dtype: np.dtype[Any],
        chunk: tuple[int, ...],
        fill: Any,
        codec: ChunkCodec,
        where: str,
    ) -> None:
        self.folder = folder
        self.document = document
        self.dtype = dtype
        self.chunk = chunk
        self.fill = fill
        self.codec = codec
        self.where = where
        self.absent_is_fill = False
        self._last_path: tuple[int, Path] | None = None
        self._suffix = "/0" * (len(chunk) - 1)
        self._is_zero = dtype.kind != "O" and not np.asarray(fill, dtype).tobytes().strip(b"\0")
        # The partly filled chunk at the end, decoded: the next append needs it.
        self._tail: tuple[int, NDArray] | None = None

    @property
    def rows(self) -> int:
        return int(self.document["shape"][0])

    @cached_property
    def tail(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(int(n) for n in self.document["shape"][1:])

    @property
    def unit(self) -> int:
        """Rows of one file."""
        return self.chunk[0]

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in memory."""
        return math.prod(self.chunk) * self.dtype.itemsize

    def path_of(self, number: int) -> Path:
        """The file of a chunk."""
        last = self._last_path
        if last is None or last[0] != number:
            # Appends ask for the same one again and again.
            last = self._last_path = number, Path(f"{self.folder}/c/{number}{self._suffix}")
        return last[1]

    def keys(self, rows: int) -> list[str]:
        """Names of the files that hold the first rows, relative to the array."""
        if 0 in self.tail:
            return []
        return [f"c/{number}{self._suffix}" for number in range(-(-rows // self.unit))]

    def resize(self, stage: Stage, rows: int) -> None:
        """Give the array so many rows; files behind them are removed."""
        before = self.rows
        if rows == before:
            return
        self.document = {**self.document, "shape": [rows, *self.document["shape"][1:]]}
        self.save(stage)
        if rows < before:
            self._tail = None
            for number in range(-(-rows // self.unit), -(-before // self.unit)):
                fs.remove_file(self.path_of(number))

    def save(self, stage: Stage) -> None:
        """Write the document."""
        stage.put(self._document_path, [self._head() + self._rest])

    @cached_property
    def _document_path(self) -> Path:
        return self.folder / "zarr.json"

    def _head(self) -> bytes:
        # Only this changes. No indents: that encoder costs more than writing the file.
        return (json.dumps({"shape": self.document["shape"]})[:-1] + ", ").encode()

    @cached_property
    def _rest(self) -> bytes:
        rest = {k: v for k, v in self.document.items() if k != "shape"}
        return json.dumps(rest).encode()[1:]

    # -- rows ----------------------------------------------------------------

    def write(self, stage: Stage, start: int, values: NDArray, *, behind: bool) -> None:
        """Write rows from ``start``; the array must be long enough.

        Parameters
        ----------
        stage : Stage
        start : int
        values : array
            Rows of the array's own shape and dtype.
        behind : bool
            Nothing from ``start`` on is committed, so bytes may go in place.
        """
        stop, unit = start + len(values), self.unit
        if start == stop or 0 in self.tail:
            return
        numbers = range(start // unit, -(-stop // unit))
        if stage.private and self.codec.is_raw and start == 0 and stop >= self.rows:
            self._create(stage, values)
            return

        def one(number: int) -> None:
            low, high = max(start, number * unit), min(stop, (number + 1) * unit)
            self._write_chunk(
                stage, number, low - number * unit, values[low - start : high - start], behind, stop
            )

        if len(numbers) > 1 and values.nbytes > _PARALLEL_BYTES and _THREADS > 1:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="alchemi-write") as pool:
                list(pool.map(one, numbers))
            return
        for number in numbers:
            one(number)

    def _create(self, stage: Stage, values: NDArray) -> None:
        """All rows of a raw array that has no chunk yet, straight from the caller's memory."""
        data = _bytes_of(values)
        step, stem, suffix = self.chunk_bytes, f"{self.folder}/c/", self._suffix
        last = len(values) // self.unit

        def some(first: int) -> None:
            for number in range(first, last, threads):
                stage.create(f"{stem}{number}{suffix}", [data[number * step : (number + 1) * step]])

        threads = _THREADS if data.nbytes > _PARALLEL_BYTES else 1
        others = [submit(some, first) for first in range(1, threads)]
        try:
            some(0)
        finally:
            wait(others)
        for other in others:
            other.result()
        if len(values) % self.unit:
            self._put_raw(stage, self.path_of(last), values[last * self.unit :])

    def _write_chunk(
        self, stage: Stage, number: int, first: int, values: NDArray, behind: bool, stop: int
    ) -> None:
        """Write rows of one chunk, from its row ``first`` on."""
        path = self.path_of(number)
        # Rows from here on hold nothing that anybody reads.
        whole = first == 0 and (len(values) == self.unit or behind or stop >= self.rows)
        if self.codec.is_raw:
            if whole:
                self._put_raw(stage, path, values)
                return
            if behind:
                self._patch(stage, path, first, values)
                return
        elif whole and len(values) == self.unit:
            self._put(stage, number, values)
            return
        held = self._empty() if whole else self._current(stage, number)
        held[first : first + len(values)] = values
        self._put(stage, number, held)
        if stop < (number + 1) * self.unit and stop >= self.rows:
            self._tail = (number, held)

    def _put(self, stage: Stage, number: int, chunk: NDArray) -> None:
        stage.put(self.path_of(number), [self.codec.encode(chunk)])

    def put_parts(self, stage: Stage, start: int, parts: Sequence[NDArray]) -> None:
        """Whole raw chunks (but for the array's last) from the first one's row on."""
        number, rows, held = start // self.unit, 0, list[NDArray]()
        for part in parts:
            values = np.asarray(part, dtype=self.dtype).reshape(len(part), *self.tail)
            while len(values):
                taken = values[: self.unit - rows]
                held.append(taken)
                rows, values = rows + len(taken), values[len(taken) :]
                if rows == self.unit:
                    self._put_raw(stage, self.path_of(number), *held)
                    number, rows, held = number + 1, 0, []
        if held:
            self._put_raw(stage, self.path_of(number), *held)

    def _put_raw(self, stage: Stage, path: Path, *parts: NDArray) -> None:
        data, rows = [_bytes_of(part) for part in parts], sum(len(part) for part in parts)
        if rows < self.unit and not self._is_zero:
            rest = np.full((self.unit - rows, *self.chunk[1:]), self.fill, self.dtype)
            data.append(_bytes_of(rest))
        stage.put(path, data, size=self.chunk_bytes)

    def _patch(self, stage: Stage, path: Path, first: int, values: NDArray) -> None:
        offset = first * (self.chunk_bytes // self.unit)
        try:
            stage.patch(path, offset, _bytes_of(values), size=self.chunk_bytes)
        except FileNotFoundError:
            if not self.absent_is_fill:
                raise self._missing(path) from None
            held = self._empty()
            held[first : first + len(values)] = values
            self._put_raw(stage, path, held)
        except EOFError as error:
            raise self._damaged(path, error) from None

    def check(self, number: int) -> None:
        """Decode a chunk and let go of it.

        Raises
        ------
        FileNotFoundError
        ValueError, RuntimeError
            It is damaged.
        """
        path = self.path_of(number)
        if 0 in self.tail:
            return
        if self.codec.is_raw:
            size = path.stat().st_size
            if size != self.chunk_bytes:
                raise ValueError(f"{size} bytes, {self.chunk_bytes} expected")
            return
        self.codec.decode(path.read_bytes(), self.chunk, self.dtype)

    def _empty(self) -> NDArray:
        return np.full(self.chunk, self.fill, self.dtype)

    def _current(self, stage: Stage, number: int) -> NDArray:
        """A chunk as it is, to be changed."""
        if self._tail is not None and self._tail[0] == number:
            return self._tail[1]
        path = self.path_of(number)
        try:
            data = stage.place_of(path).read_bytes()
        except FileNotFoundError:
            if self.absent_is_fill:
                return self._empty()
            raise self._missing(path) from None
        try:
            return self.codec.decode(data, self.chunk, self.dtype)
        except (ValueError, RuntimeError, TypeError) as error:
            raise self._damaged(path, error) from error

    def _name(self, path: Path) -> str:
        name = f"{self.folder.parent.name}/{self.folder.name}"
        return f"chunk {path.relative_to(self.folder / 'c').as_posix()!r} of array {name!r}"

    def _missing(self, path: Path) -> MissingChunkError:
        return MissingChunkError(
            self.where,
            f"{self._name(path)} is missing, so nothing can be added behind its committed rows",
            mend="restore the file from a copy; `alchemi-xr verify` lists all that are missing",
        )

    def _damaged(self, path: Path, error: Exception) -> CorruptStoreError:
        return CorruptStoreError(
            self.where,
            f"{self._name(path)} cannot be decoded ({error})",
            mend="restore the file from a copy; `alchemi-xr verify --checksums` lists the damaged",
        )


def _bytes_of(values: NDArray) -> memoryview:
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memoryview(flat)

"""Groups of records put down on disk by the scan, for the reading that follows.

What a scan has decoded need not be decoded again. Arrays lie uncompressed behind each
other, a table before them says which; a range of records is found by its place in the
source's file. It is only a help: without room on the disk there is none, and the
input is read twice.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.etl.row_batch import Column, Group, texts

__all__ = ["Spooled", "Spooling"]

# The store that is built beside it needs room, too.
_ROOM = 4


@dataclass(frozen=True, slots=True)
class Spooled:
    """Where the batches of one file lie.

    Parameters
    ----------
    path : str
    firsts, offsets : list of int
        Of each batch: the place of its first record, and where it begins.
    """

    path: str
    firsts: list[int]
    offsets: list[int]

    def read(self, start: int, stop: int) -> list[Group]:
        """The groups of a range of records.

        Raises
        ------
        OSError
            The file is not there, or not whole.
        """
        found = []
        with open(self.path, "rb") as file:
            for k in range(max(0, bisect_right(self.firsts, start) - 1), len(self.firsts)):
                if self.firsts[k] >= stop:
                    break
                file.seek(self.offsets[k])
                found += [g.cut(start, stop) for g in _read(file)]
        return [g for g in found if len(g.atoms)]


class Spooling:
    """Writes batches; gives up, and removes its file, where the disk has no room.

    Parameters
    ----------
    folder : str or None
        None: nothing is written.
    name : str
        Beginning of the file's name there.
    """

    def __init__(self, folder: str | None, name: str) -> None:
        self._path = ""
        self._file: IO[bytes] | None = None
        self._firsts: list[int] = []
        self._offsets: list[int] = []
        if folder is not None:
            try:
                os.makedirs(folder, exist_ok=True)
                for old in glob.glob(os.path.join(glob.escape(folder), f"{name}-*")):
                    os.unlink(old)  # of a conversion that was stopped
                # Under a name of its own: where folders are not shared, there may be another.
                self._path = os.path.join(folder, f"{name}-{uuid.uuid4().hex}")
                self._file = open(self._path, "wb")  # noqa: SIM115
            except OSError:
                pass  # then the input is read twice

    def __enter__(self) -> Spooling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._give_up()

    def put(self, groups: Sequence[Group]) -> None:
        """A batch, behind those before it in the file."""
        if self._file is None or not groups:
            return
        try:
            self._offsets.append(self._file.tell())
            self._firsts.append(min(int(g.numbers[0]) for g in groups))
            _write(self._file, groups)
            if shutil.disk_usage(os.path.dirname(self._path)).free < _ROOM * self._file.tell():
                self._give_up()
        except OSError:
            self._give_up()

    def finish(self) -> Spooled | None:
        """What was written, if anything."""
        if self._file is None:
            return None
        try:
            self._file.close()
        except OSError:
            self._give_up()
            return None
        return Spooled(self._path, self._firsts, self._offsets)

    def _give_up(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what cannot be written is not wanted
                self._file.close()
            self._file = None
            os.unlink(self._path)


def _write(file: IO[bytes], groups: Sequence[Group]) -> None:
    table: list[Any] = []
    arrays: list[NDArray] = []
    for group in groups:
        named: list[tuple[str, str, NDArray]] = [
            ("numbers", "", group.numbers),
            ("atoms", "", group.atoms),
        ]
        named += [(name, column.kind, column.values) for name, column in group.columns.items()]
        entries = []
        for name, kind, values in named:
            if values.dtype.kind == "O":
                words = [word.encode("utf-8", "surrogatepass") for word in values.tolist()]
                ends = counts_to_ptr(np.array([len(w) for w in words], np.int64))
                entries.append((name, kind, "text", ends.shape))
                arrays += [ends, np.frombuffer(b"".join(words), dtype=np.uint8)]
            else:
                entries.append((name, kind, values.dtype.str, values.shape))
                arrays.append(values)
        table.append(entries)
    head = json.dumps(table).encode()
    file.write(len(head).to_bytes(8, "little"))
    file.write(head)
    for array in arrays:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _read(file: IO[bytes]) -> list[Group]:
    table = json.loads(_exactly(file, int.from_bytes(_exactly(file, 8), "little")))
    out = []
    for entries in table:
        found: dict[str, Column] = {}
        (_, _, code, shape), (_, _, other, same), *rest = entries
        numbers, atoms = _array(file, code, shape), _array(file, other, same)
        for name, kind, code, shape in rest:
            if code == "text":
                ends = _array(file, "<i8", shape)
                data = _exactly(file, int(ends[-1]))
                values = texts(
                    [
                        data[a:b].decode("utf-8", "surrogatepass")
                        for a, b in itertools.pairwise(ends.tolist())
                    ]
                )
            else:
                values = _array(file, code, shape)
            found[name] = Column(kind, values)
        out.append(Group(numbers, atoms, found))
    return out


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise OSError("what the scan put down is cut off")
    return data


def _array(file: IO[bytes], code: str, shape: Sequence[int]) -> NDArray:
    values: NDArray = np.empty(shape, dtype=code)
    if values.nbytes:
        got = file.readinto(values.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
        if got != values.nbytes:
            raise OSError("what the scan put down is cut off")
    return values

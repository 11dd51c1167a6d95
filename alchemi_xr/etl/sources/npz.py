"""NPZ packs and folders of NPY: MD17, rMD17, sGDML, QM9 and PhysNet forms.

No member is loaded whole: plain ones are mapped where they lie in the archive,
deflated ones are streamed once into a spool and mapped there. Pickled objects
are refused and never unpickled.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, ClassVar

import numpy as np

from alchemi_xr._typing import Level
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.arrays import Arrays, ArraySource, Opened, Table
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.unpacking import own_folder

__all__ = ["NpzSource"]

_LOCAL_HEADER = 30
_REFUSED = "member {name!r} holds pickled Python objects (dtype object), which are never unpickled"


class NpzSource(ArraySource):
    """Frames of NPZ archives and of folders of NPY files.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    frames : int
    levels : dict of str to {"atom", "system"}, optional
    spool : str, optional
        Folder in which deflated members are unpacked; by default a temporary one.
    """

    name: ClassVar[str] = "npz"
    takes_folders: ClassVar[bool] = True

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        frames: int = 65_536,
        levels: Mapping[str, Level] | None = None,
        spool: str | None = None,
    ) -> None:
        super().__init__(paths, names=names, frames=frames, levels=levels)
        self._spool = spool

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the suffix ``.npz``; a folder with NPY files of positions and elements."""
        if os.path.isdir(path):
            names = {n[:-4] for n in os.listdir(path) if n.endswith(".npy")}
            meant = {cls.aliases.get(n) for n in names}
            return {"positions", "atomic_numbers"} <= meant
        return path.lower().endswith(".npz")

    def scan(self, map_files: Any = None) -> Any:
        """Shapes of every member, and the numbers of atoms."""
        if self._spool is None:
            self._spool = own_folder(self)
        return super().scan() if map_files is None else super().scan(map_files)

    def declared(self, tables: Sequence[Table]) -> dict[str, str]:
        """rMD17 packs are in kcal/mol and Å, by their definition."""
        if tables and all({"old_energies", "nuclear_charges"} <= set(t.shapes) for t in tables):
            names = ("energies", "old_energies")
            return {
                **dict.fromkeys(names, "kcal/mol"),
                **dict.fromkeys(("forces", "old_forces"), "kcal/mol/Å"),
                "coords": "Å",
            }
        return {}

    @contextmanager
    def open(self, number: int) -> Iterator[Opened]:
        """The members as mapped arrays."""
        path = self.files[number]
        try:
            if os.path.isdir(path):
                yield _Pack(_folder(path))
                return
            spool = os.path.join(self._spool or tempfile.gettempdir(), f"npz-{number:06d}")
            yield _Pack(_archive(path, spool))
        except (zipfile.BadZipFile, zlib.error, EOFError, struct.error) as error:
            raise SourceError(
                self.paths[number],
                f"the archive is damaged ({error})",
                mend="restore the file; a copy that was cut off has lost its last bytes",
            ) from error


class _Pack:
    def __init__(self, members: dict[str, Any]) -> None:
        self._members = members

    def keys(self) -> Iterator[str]:
        yield ""

    def arrays(self, key: str) -> Arrays:
        return self._members

    def units(self, key: str) -> Mapping[str, str]:
        """What an sGDML pack says of itself (``r_unit``, ``e_unit``)."""
        length, energy = (self._word(n) for n in ("r_unit", "e_unit"))
        out: dict[str, str] = {}
        for name in self._members:
            meant = ArraySource.aliases.get(name)
            if meant == "positions" and length:
                out[name] = length
            elif meant == "energy" and energy:
                out[name] = energy
            elif meant == "forces" and energy and length:
                out[name] = f"{energy}/{length}"
        return out

    def _word(self, name: str) -> str:
        values = self._members.get(name)
        if values is None or values.dtype.kind not in "US" or values.size != 1:
            return ""
        value = values.ravel()[0]
        return value.decode() if isinstance(value, bytes) else str(value)


def _folder(path: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".npy"):
            out[name[:-4]] = _mapped(os.path.join(path, name), name)
    return out


def _archive(path: str, spool: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if os.path.getsize(path) == 0:
        raise SourceError(path, "the file is empty")
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                continue
            name = info.filename[:-4]
            if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                file.seek(info.header_offset)
                head = file.read(_LOCAL_HEADER)
                if head[:4] != b"PK\x03\x04":
                    raise zipfile.BadZipFile(f"no member where {info.filename!r} should be")
                n, extra = struct.unpack("<HH", head[26:30])
                start = info.header_offset + _LOCAL_HEADER + n + extra
                out[name] = _mapped(path, name, file, start, start + info.file_size)
            else:
                out[name] = _mapped(_unpacked(archive, info, spool), name)
    return out


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, spool: str) -> str:
    """A deflated member as a file of its own; made once."""
    os.makedirs(spool, exist_ok=True)
    target = os.path.join(spool, f"{info.CRC:08x}-{os.path.basename(info.filename)}")
    if not (os.path.isfile(target) and os.path.getsize(target) == info.file_size):
        handle, partial = tempfile.mkstemp(dir=spool)
        with os.fdopen(handle, "wb") as out, archive.open(info) as packed:
            shutil.copyfileobj(packed, out, 2**20)
        os.replace(partial, target)
    return target


def _mapped(
    path: str, name: str, file: BinaryIO | None = None, start: int = 0, stop: int | None = None
) -> Any:
    """An array of NPY form at a place of a file, mapped."""
    if file is None:
        with open(path, "rb") as opened:
            return _mapped(path, name, opened, 0, os.path.getsize(path))
    file.seek(start)
    try:
        version = np.lib.format.read_magic(file)
        reader = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = reader(file)
    except ValueError as error:
        raise SourceError(path, f"member {name!r} is no NPY array ({error})") from error
    if dtype.hasobject:
        raise SourceError(
            path, _REFUSED.format(name=name), mend="save it again as plain arrays (padded, with N)"
        )
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    at = file.tell()
    if stop is not None and at + size > stop:
        raise SourceError(
            path,
            f"member {name!r} is cut off",
            found=f"{stop - at} bytes",
            expected=f"{size} bytes",
        )
    order: Any = "F" if fortran else "C"
    if size == 0 or shape == ():
        file.seek(at)
        return np.frombuffer(file.read(size), dtype).reshape(shape, order=order)
    return np.memmap(path, dtype, "r", at, shape, order)

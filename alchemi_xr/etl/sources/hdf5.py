"""HDF5 files: ANI-1, ANI-1x, ANI-2x, SPICE and MACE-preprocessed forms.

A group with positions and atomic numbers is a table of frames, at any depth; so
is the root with padded arrays. Groups of single configurations, as MACE writes
them, are tables of one frame.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from io import FileIO
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import NDArray
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.arrays import ALIASES, Arrays, ArraySource, Opened, Place, Table
from alchemi_xr.etl.source import Mapper, Scan, plain_map

__all__ = ["Hdf5Source"]

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SPICE = {
    "conformations": "positions",
    "dft_total_energy": "energy",
    "dft_total_gradient": "forces",
    "scf_dipole": "dipole",
    "mbis_charges": "charges",
}
_ANI1X = {
    "wb97x_dz.energy": "energy",
    "wb97x_dz.forces": "forces",
    "wb97x_dz.dipole": "dipole",
    "wb97x_dz.hirshfeld_charges": "charges",
}
_MACE = {"virials": "virial", "charges": "charges", "stress": "stress", "REF_energy": "energy"}


class Hdf5Source(ArraySource):
    """Frames of HDF5 files; parameters as in :class:`~alchemi_xr.etl.arrays.ArraySource`."""

    name: ClassVar[str] = "hdf5"
    aliases: ClassVar[Mapping[str, str]] = {**ALIASES, **_SPICE, **_ANI1X, **_MACE}
    negated: ClassVar[frozenset[str]] = frozenset({"dft_total_gradient"})

    def __init__(self, paths: Sequence[str], **options: Any) -> None:
        super().__init__(paths, **options)
        self.stamps: dict[int, tuple[int, int]] = {}

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Look at every group once; where its numbers are is kept for the reading."""
        for number, file in enumerate(self.files):
            if os.path.exists(file):
                stat = os.stat(file)
                self.stamps[number] = stat.st_size, stat.st_mtime_ns
        return super().scan(map_files)

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the suffix and the signature (not H5MD trajectories)."""
        if not path.lower().endswith((".h5", ".hdf5", ".hdf")):
            return False
        try:
            with open(path, "rb") as file:
                return file.read(8) == _SIGNATURE
        except OSError:
            return False

    def declared(self, tables: Sequence[Table]) -> dict[str, str]:
        """The ANI sets are in Hartree and Å, by their definition."""
        names = {name for table in tables for name in table.shapes}
        ani1x = any(name.startswith("wb97x_") for name in names)
        ani2x = {"coordinates", "species", "energies"} <= names and "energy" not in names
        if not (ani1x or ani2x):
            return {}
        units: dict[str, str] = {}
        for name in names:
            if name in ("coordinates",):
                units[name] = "Å"
            elif name in ("energies",) or name.endswith("energy"):
                units[name] = "Hartree"
            elif name.rpartition(".")[2] in ("forces",):
                units[name] = "Hartree/Å"
            elif name.endswith("charges"):
                units[name] = "e"
            elif name.endswith(".dipole"):
                units[name] = "e*Å"
        return units

    @contextmanager
    def open(self, number: int) -> Iterator[Opened]:
        """The file, read-only."""
        h5py = import_optional("h5py", extra="hdf5", why=self.paths[number])
        try:
            file = h5py.File(self.files[number], "r")
        except OSError as error:
            raise SourceError(
                self.paths[number],
                f"is no whole HDF5 file ({error})",
                mend="restore the file; a copy that was cut off cannot be read",
            ) from error
        with file, closing(_File(file, h5py, self, number)) as opened:
            try:
                yield opened
            except (OSError, RuntimeError, KeyError) as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(self.paths[number], f"cannot be read ({error})") from error


class _File:
    def __init__(self, file: Any, h5py: Any, source: Hdf5Source, number: int) -> None:
        self._file, self._h5py, self._source, self._number = file, h5py, source, number
        # What is looked at last is asked for again: its keys, its arrays, its units.
        self._last: tuple[str, dict[str, Any]] | None = None
        self._bytes: FileIO | None = None

    def _children(self, path: str) -> tuple[dict[str, Any], list[str]]:
        """Datasets of a group, and the names of what else is in it; links are followed."""
        # One call of the library each: h5py's own look-ups take three times as long.
        h5py = self._h5py
        group = h5py.h5g.open(self._file.id, (path or "/").encode())
        datasets: dict[str, Any] = {}
        others: list[str] = []
        for raw in group:
            name = raw.decode("utf-8", "surrogateescape")
            try:
                found = h5py.h5o.open(group, raw)
            except (KeyError, OSError, RuntimeError):
                found = None
            if isinstance(found, h5py.h5d.DatasetID):
                datasets[name] = _Stored(h5py.Dataset(found))
            else:
                others.append(name)
        return datasets, others

    def _datasets(self, key: str) -> dict[str, Any]:
        if self._last is None or self._last[0] != key:
            self._last = key, self._children(key)[0]
        return self._last[1]

    def keys(self) -> Iterator[str]:
        stack = ["/"]
        while stack:
            path = stack.pop()
            here, groups = self._children(path)
            meant = {self._source.meaning(n) for n in here}
            if "positions" in meant or (path != "/" and here and "atomic_numbers" in meant):
                self._last = path.strip("/"), here
                yield path.strip("/")
                continue
            stack += [f"{path.rstrip('/')}/{n}" for n in sorted(groups, key=_natural, reverse=True)]
            if not groups and path == "/":
                yield ""

    def arrays(self, key: str) -> Arrays:
        out = self._datasets(key)
        if self._is_one_frame(out):
            return _one_frame(self._file[key] if key else self._file, out, self._h5py)
        return out

    def _is_one_frame(self, datasets: Mapping[str, Any]) -> bool:
        place = next((n for n in datasets if self._source.meaning(n) == "positions"), None)
        return place is not None and len(datasets[place].shape) == 2

    def units(self, key: str) -> Mapping[str, str]:
        out: dict[str, str] = {}
        for name, dataset in self._datasets(key).items():
            if not self._h5py.h5a.get_num_attrs(dataset.id):
                continue
            attrs = dataset.values.attrs
            unit = attrs.get("units", attrs.get("unit"))
            if unit is not None:
                out[name] = unit.decode() if isinstance(unit, bytes) else str(unit)
        return out

    def places(self, key: str) -> dict[str, Place]:
        """Where in the file the numbers of a table are, for those that lie there as they are."""
        datasets = self._datasets(key)
        if self._is_one_frame(datasets) or self._file.userblock_size:
            return {}
        h5t, name_of = self._h5py.h5t, self._h5py.h5f.get_name
        here = name_of(self._file.id)
        out: dict[str, Place] = {}
        for name, dataset in datasets.items():
            dtype, shape, handle = dataset.dtype, dataset.shape, dataset.id
            offset = handle.get_offset()
            size = dtype.itemsize * math.prod(shape)
            if (
                offset is not None
                # Not of another file, to which a link led.
                and name_of(handle) == here
                and dtype.kind in "iuf"
                and dtype.isnative
                and handle.get_storage_size() == size
                and handle.get_type() == h5t.py_create(dtype)
            ):
                out[name] = offset, dtype.str, tuple(shape)
        return out

    def direct(self, table: Table) -> Arrays | None:
        """The arrays of a table read past the library, where all its numbers allow that."""
        places = table.places
        if any(n not in places for n, (_, dtype) in table.shapes.items() if dtype != "str"):
            return None
        if self._bytes is None:
            self._bytes = open(self._source.files[self._number], "rb", buffering=0)  # noqa: SIM115
            stat = os.fstat(self._bytes.fileno())
            if (stat.st_size, stat.st_mtime_ns) != self._source.stamps.get(self._number):
                # What h5py reads is checked by its shape; offsets are not to be trusted.
                self._source.stamps.pop(self._number, None)
        if self._number not in self._source.stamps:
            return None
        return _Direct(self, table, self._bytes)

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes.close()


class _Stored:
    """A dataset of which h5py is asked only once what it is."""

    def __init__(self, dataset: Any) -> None:
        self.values, self.id = dataset, dataset.id
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: np.dtype[Any] = dataset.dtype

    def __getitem__(self, rows: Any) -> Any:
        return self.values[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return np.asarray(self.values[()], dtype)


class _Direct(Mapping[str, Any]):
    """The arrays of a table: numbers from where they lie in the file, all else from h5py."""

    def __init__(self, file: _File, table: Table, data: FileIO) -> None:
        self._file, self._table, self._data = file, table, data

    def __getitem__(self, name: str) -> Any:
        place = self._table.places.get(name)
        if place is None:
            return self._file.arrays(self._table.key)[name]
        return _Rows(self._data, *place)

    def __contains__(self, name: object) -> bool:
        return name in self._table.places or name in self._file.arrays(self._table.key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.arrays(self._table.key))

    def __len__(self) -> int:
        return len(self._file.arrays(self._table.key))


class _Rows:
    """An array of which rows are read when they are asked for.

    Read, not mapped: a file that is cut off meanwhile must not end the process.
    """

    def __init__(self, file: FileIO, offset: int, dtype: str, shape: tuple[int, ...]) -> None:
        self._file, self._offset = file, offset
        self.dtype, self.shape = np.dtype(dtype), shape

    def __getitem__(self, rows: slice) -> NDArray:
        start, stop, _ = rows.indices(self.shape[0])
        out: NDArray = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        flat: Any = out.reshape(-1).view(np.uint8)
        view = memoryview(flat)
        at = self._offset + start * (self.dtype.itemsize * math.prod(self.shape[1:]))
        while view.nbytes:
            done = os.preadv(self._file.fileno(), [view], at)
            if done == 0:
                raise OSError("the file ends before its numbers")
            view, at = view[done:], at + done
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return np.asarray(self[:], dtype)


def _one_frame(node: Any, arrays: dict[str, Any], h5py: Any) -> dict[str, Any]:
    """One configuration as a table of one frame; ``"None"`` is how MACE writes no value."""
    out: dict[str, Any] = dict(arrays)
    if isinstance(node.get("properties"), h5py.Group):
        out |= {n: v for n, v in node["properties"].items() if isinstance(v, h5py.Dataset)}
    rows: dict[str, Any] = {}
    for name, values in out.items():
        value = np.asarray(values[()])
        if value.dtype.kind in "OSU":
            text = value.ravel()[0] if value.size == 1 else None
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
            if text is None or text == "None":
                continue
            rows[name] = np.array([str(text)])
            continue
        meant = ALIASES.get(name)
        if meant in ("pbc",) and value.shape == ():
            value = np.broadcast_to(value, (3,))
        if name in ("stress", "virials", "virial") and value.shape == (6,):
            value = value[[[0, 5, 4], [5, 1, 3], [4, 3, 2]]]
        rows[name] = value[None]
    return rows


def _natural(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    # MACE numbers its configurations: config_10 comes after config_9.
    return (head, int(digits), name) if head.endswith("_") and digits else (name, -1, name)

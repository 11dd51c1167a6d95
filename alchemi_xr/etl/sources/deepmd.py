"""DeePMD-kit systems: ``type.raw``, ``type_map.raw`` and ``set.*/*.npy``.

A folder is one input, each of its sets a table of frames, mapped and read by
slices. Types are places in ``type_map.raw``; a set with ``real_atom_types.npy``
(the mixed form) has its own types by frame.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.arrays import Arrays, ArraySource, Opened, Table
from alchemi_xr.etl.elements import SYMBOLS

__all__ = ["DeepmdSource"]

_NAMES = {
    "coord": "positions",
    "type": "atomic_numbers",
    "energy": "energy",
    "force": "forces",
    "virial": "virial",
    "box": "cell",
    "pbc": "pbc",
    "dipole": "dipole",
}


class DeepmdSource(ArraySource):
    """Frames of DeePMD-kit systems, in eV and Å by the format's definition.

    Parameters are those of :class:`~alchemi_xr.etl.arrays.ArraySource`; an input
    is the folder that holds ``type.raw``.
    """

    name: ClassVar[str] = "deepmd"
    takes_folders: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = _NAMES

    @classmethod
    def matches(cls, path: str) -> bool:
        """A folder with ``type.raw``."""
        return os.path.isdir(path) and os.path.isfile(os.path.join(path, "type.raw"))

    def declared(self, tables: Sequence[Table]) -> dict[str, str]:
        """The format's own units."""
        return {"coord": "Å", "box": "Å", "energy": "eV", "force": "eV/Å", "virial": "eV"}

    @contextmanager
    def open(self, number: int) -> Iterator[Opened]:
        """The sets of a system, mapped."""
        yield _System(self.files[number], self.paths[number])


class _System:
    def __init__(self, path: str, shown: str) -> None:
        self._path, self._shown = path, shown
        self._types = self._read_types()

    def _read_types(self) -> tuple[IntArray, IntArray]:
        """Types of the atoms, and atomic numbers of the types."""
        types = os.path.join(self._path, "type.raw")
        try:
            with open(types, encoding="utf-8") as file:
                given = np.array([int(word) for word in file.read().split()], dtype=np.int64)
            with open(os.path.join(self._path, "type_map.raw"), encoding="utf-8") as file:
                symbols = file.read().split()
        except FileNotFoundError as error:
            raise SourceError(
                self._shown,
                f"{os.path.basename(str(error.filename))} is missing: it tells the elements",
                mend="write the symbols of the types, one a line, into type_map.raw",
            ) from error
        except ValueError as error:
            raise SourceError(self._shown, f"type.raw: {error}") from error
        known = {symbol: number for number, symbol in enumerate(SYMBOLS)}
        strange = [s for s in symbols if s not in known]
        if strange:
            raise SourceError(self._shown, f"type_map.raw: {strange[0]!r} is no element")
        if given.size and (given.min() < 0 or given.max() >= len(symbols)):
            raise SourceError(
                self._shown,
                "type.raw names a type that type_map.raw does not have",
                found=int(given.max()),
                expected=f"0 to {len(symbols) - 1}",
            )
        return given, np.array([known[s] for s in symbols], dtype=np.int64)

    def keys(self) -> Iterator[str]:
        sets = sorted(n for n in os.listdir(self._path) if n.startswith("set."))
        if not sets:
            raise SourceError(self._shown, "the system has no set.* folder")
        yield from sets

    def units(self, key: str) -> Mapping[str, str]:
        return {}

    def arrays(self, key: str) -> Arrays:
        folder = os.path.join(self._path, key)
        types, numbers = self._types
        out: dict[str, Any] = {}
        for file in sorted(os.listdir(folder)):
            if not file.endswith(".npy"):
                continue
            path = os.path.join(folder, file)
            try:
                out[file[:-4]] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                raise SourceError(
                    self._shown,
                    f"{key}/{file} cannot be read ({error})",
                    mend="pickled objects are never unpickled; a file that was cut off is lost",
                ) from error
        out["type"] = numbers[types]
        if "real_atom_types" in out:
            real = np.asarray(out.pop("real_atom_types"))
            out["type"] = np.where(real >= 0, numbers[np.clip(real, 0, len(numbers) - 1)], 0)
        atoms = int(out["type"].shape[-1])
        coord = out.get("coord")
        if coord is None:
            return out
        frames = len(coord)
        for name, values in list(out.items()):
            per_atom = name in ("coord", "force") or name.startswith("atom_")
            if name == "type" or not per_atom or values.ndim == 0:
                continue
            each = values.size // max(len(values) * atoms, 1)
            if each * len(values) * atoms == values.size:
                out[name] = values.reshape(len(values), atoms, each)
        periodic = not os.path.isfile(os.path.join(self._path, "nopbc"))
        if not periodic:
            out.pop("box", None)
        out["pbc"] = np.broadcast_to(np.array([periodic] * 3), (frames, 3))
        return out

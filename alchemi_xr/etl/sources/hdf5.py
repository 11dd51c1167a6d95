"""HDF5 files: ANI-1, ANI-1x, ANI-2x, SPICE and MACE-preprocessed forms.

A group with positions and atomic numbers is a table of frames, at any depth; so
is the root with padded arrays. Groups of single configurations, as MACE writes
them, are tables of one frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.arrays import ALIASES, Arrays, ArraySource, Opened, Table

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
        with file:
            try:
                yield _File(file, h5py, self)
            except (OSError, RuntimeError, KeyError) as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(self.paths[number], f"cannot be read ({error})") from error


class _File:
    def __init__(self, file: Any, h5py: Any, source: ArraySource) -> None:
        self._file, self._h5py, self._source = file, h5py, source

    def keys(self) -> Iterator[str]:
        stack = ["/"]
        while stack:
            path = stack.pop()
            node = self._file[path]
            names = list(node)
            here = [n for n in names if node.get(n, getclass=True) is self._h5py.Dataset]
            meant = {self._source.meaning(n) for n in here}
            if "positions" in meant or (path != "/" and here and "atomic_numbers" in meant):
                yield path.strip("/")
                continue
            groups = [n for n in names if n not in here]
            stack += [f"{path.rstrip('/')}/{n}" for n in sorted(groups, key=_natural, reverse=True)]
            if not groups and path == "/":
                yield ""

    def arrays(self, key: str) -> Arrays:
        node = self._file[key] if key else self._file
        out: dict[str, Any] = {
            n: node[n] for n in node if node.get(n, getclass=True) is self._h5py.Dataset
        }
        place = next((n for n in out if self._source.meaning(n) == "positions"), None)
        if place is not None and len(out[place].shape) == 2:
            return _one_frame(node, out, self._h5py)
        return out

    def units(self, key: str) -> Mapping[str, str]:
        node = self._file[key] if key else self._file
        out: dict[str, str] = {}
        for name in node:
            if node.get(name, getclass=True) is not self._h5py.Dataset:
                continue
            attrs = node[name].attrs
            unit = attrs.get("units", attrs.get("unit"))
            if unit is not None:
                out[name] = unit.decode() if isinstance(unit, bytes) else str(unit)
        return out


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

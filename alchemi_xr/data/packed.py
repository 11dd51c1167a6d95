"""The packed memmap format: flat arrays over all atoms, mapped where they lie.

Who reads the format checks it here, so that loader, reader and conversion say
the same of a folder that is not whole. The files name no units; a folder that
we wrote has a ``units.json`` beside them, which other tools pass over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray, PathLike
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.errors import ConfigError, SourceError, SourceNotFoundError, nearest
from alchemi_xr.units import conversion_factor

__all__ = [
    "RAW",
    "UNITS_FILE",
    "PackedFiles",
    "factors_of",
    "is_packed",
    "open_packed",
    "read_counts",
    "read_units",
]

RAW: dict[str, tuple[str, str, str, tuple[int, ...]]] = {
    "Z": ("Z_pack.int32", "<i4", "atomic_numbers", ()),
    "R": ("R_pack.f32", "<f4", "positions", (3,)),
    "F": ("F_pack.f32", "<f4", "forces", (3,)),
    "E": ("E.f64", "<f8", "energy", (1,)),
    "Qtot": ("Qtot.f64", "<f8", "charge", (1,)),
}
"""By short name: file, dtype, field, and shape of a row."""

UNITS_FILE = "units.json"
_OPTIONAL = ("Qtot",)
_NEEDED = ["offsets.npy", "n_atoms.npy", *(v[0] for k, v in RAW.items() if k not in _OPTIONAL)]


@dataclass(frozen=True)
class PackedFiles:
    """A folder of packed molecules, its files checked and mapped.

    Parameters
    ----------
    path : Path
    offsets : int64 array, [N + 1]
    n_atoms : int32 array, [N]
    arrays : dict of str to array
        ``Z`` [A], ``R`` and ``F`` [A, 3], ``E`` [N], and ``Qtot`` [N] where its file is.
    units : dict of str to str
        By field, what ``units.json`` says; empty without one.
    """

    path: Path
    offsets: IntArray
    n_atoms: NDArray
    arrays: dict[str, NDArray]
    units: dict[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled map would carry the whole data: another process maps for itself.
        return (open_packed, (self.path,))

    def fields(self) -> dict[str, NDArray]:
        """The arrays by field, rows in the project's shape."""
        rows = {name: len(values) for name, values in self.arrays.items()}
        return {
            RAW[name][2]: np.asarray(values).reshape(rows[name], *RAW[name][3])
            for name, values in self.arrays.items()
        }


def is_packed(path: PathLike) -> bool:
    """Whether a folder looks like one of packed molecules."""
    return all(os.path.isfile(os.path.join(path, n)) for n in ("offsets.npy", "Z_pack.int32"))


def open_packed(path: PathLike) -> PackedFiles:
    """Check a folder of packed molecules and map its files.

    Raises
    ------
    SourceNotFoundError
        The folder or one of its files is not there.
    SourceError
        A file has not the size that the offsets ask for, or offsets and counts
        contradict each other.
    """
    folder = Path(path)
    offsets, n_atoms = read_counts(folder)
    lengths = {"E": len(n_atoms), "Qtot": len(n_atoms)}
    arrays = {}
    for name, (file, dtype, _, tail) in RAW.items():
        if name in _OPTIONAL and not (folder / file).exists():
            continue
        shape = (lengths[name],) if name in lengths else (int(offsets[-1]), *tail)
        arrays[name] = _mapped(folder / file, dtype, shape)
    return PackedFiles(folder, offsets, n_atoms, arrays, read_units(folder))


def read_counts(folder: Path) -> tuple[IntArray, NDArray]:
    """Offsets and numbers of atoms, checked against each other.

    Raises
    ------
    SourceNotFoundError, SourceError
    """
    offsets, n_atoms = (_array(folder / f"{name}.npy") for name in ("offsets", "n_atoms"))
    for name, values in (("offsets", offsets), ("n_atoms", n_atoms)):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise SourceError(
                str(folder / f"{name}.npy"),
                "holds no whole numbers along one axis",
                found=f"{values.dtype} {list(values.shape)}",
            )
    if len(offsets) != len(n_atoms) + 1:
        raise SourceError(
            str(folder / "offsets.npy"),
            "has not one number more than n_atoms.npy",
            found=len(offsets),
            expected=len(n_atoms) + 1,
        )
    offsets = np.ascontiguousarray(offsets, np.int64)
    if offsets[0] != 0:
        raise SourceError(
            str(folder / "offsets.npy"), "does not begin at 0", found=int(offsets[0]), expected=0
        )
    wrong = np.flatnonzero((np.diff(offsets) != n_atoms) | (n_atoms < 0))
    if len(wrong):
        first = int(wrong[0])
        raise SourceError(
            f"{folder}, molecule {first}",
            "offsets.npy and n_atoms.npy contradict each other",
            found=f"offsets {offsets[first]} to {offsets[first + 1]}",
            expected=f"{int(n_atoms[first])} atoms",
            mend="write the folder anew",
        )
    return offsets, np.ascontiguousarray(n_atoms, np.int32)


def read_units(folder: Path) -> dict[str, str]:
    """What ``units.json`` says, by field; empty where there is none.

    Raises
    ------
    SourceError
        It is there and is no mapping of fields to units.
    """
    path = folder / UNITS_FILE
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise SourceError(str(path), f"cannot be read ({error})") from error
    fields = [spec[2] for spec in RAW.values()]
    fine = isinstance(given, dict) and all(
        name in fields and isinstance(unit, str) for name, unit in given.items()
    )
    if not fine:
        raise SourceError(
            str(path),
            "is no mapping of fields to units",
            found=repr(given)[:80],
            expected='such as {"energy": "kcal/mol", "positions": "Å", "forces": "kcal/mol/Å"}',
        )
    return given


def factors_of(units: Mapping[str, str], *, where: str) -> dict[str, float]:
    """By field: what takes values in these units to those of the project; ones are left out.

    Raises
    ------
    ConfigError
        A field is not in the format or has no unit, or the unit is not understood.
    """
    have = [spec[2] for spec in RAW.values()]
    factors = {}
    for given, unit in units.items():
        name = resolve(given)
        if name not in have or not FIELDS[name].unit:
            raise ConfigError(where, f"no unit of {given!r} to give. {nearest(given, have)}")
        factor = conversion_factor(unit, FIELDS[name].unit)
        if factor != 1.0:
            factors[name] = factor
    return factors


def _array(path: Path) -> NDArray:
    try:
        values: NDArray = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise _missing(path) from None
    except (ValueError, EOFError, OSError) as error:
        raise SourceError(str(path), f"is no array of NumPy ({error})") from error
    return values


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray:
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        raise _missing(path) from None
    if size != expected:
        raise SourceError(
            str(path),
            f"{path.stem} size mismatch: expected {expected} bytes, got {size} bytes",
            mend="copy the file again, or write the folder anew",
        )
    if size == 0:
        return np.empty(shape, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _missing(path: Path) -> SourceNotFoundError:
    if not path.parent.is_dir():
        return SourceNotFoundError(str(path.parent), "no such folder of packed molecules")
    return SourceNotFoundError(str(path.parent), f"{path.name} is missing", expected=_NEEDED)

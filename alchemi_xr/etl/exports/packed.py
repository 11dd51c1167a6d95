"""A packed memmap folder: flat float32 arrays for loaders that want padded batches."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from alchemi_xr._typing import NDArray, PathLike
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.data.packed import RAW, UNITS_FILE, factors_of
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.store.reader import Snapshot
from alchemi_xr.units import conversion_factor

__all__ = ["PackedExport", "write_packed"]

_COUNTS = ("offsets.npy", "n_atoms.npy")
_BY_FIELD = {field: name for name, (_, _, field, _) in RAW.items()}
_WHY = {
    "atom": "the packed format holds elements, positions and forces of atoms, and no more",
    "edge": "the packed format has no edges",
    "system": "the packed format holds energy and total charge of a molecule, and no more",
}


class PackedExport:
    """The files of the format, written one after the other while blocks come.

    Parameters
    ----------
    units : dict of str to str, optional
        By field, what the files are to hold, such as ``{"energy": "kcal/mol"}``; by
        default the store's own. Recorded in ``units.json``, as nothing else says it.
    missing : float
        What stands for an energy, a force or a charge that a sample has not: NaN, which no
        training passes over. Tools that take 0 for it get it here.
    """

    name: ClassVar[str] = "packed"
    suffixes: ClassVar[tuple[str, ...]] = (".packed",)

    def __init__(
        self, *, units: Mapping[str, str] | None = None, missing: float = math.nan
    ) -> None:
        if isinstance(missing, bool) or not isinstance(missing, (int, float)):
            raise ConfigError("missing", "is no number", found=repr(missing)[:60])
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self.units = {resolve(name): unit for name, unit in (units or {}).items()}
        factors_of(self.units, where="packed")  # says what is wrong before anything is read
        self.missing = float(missing)
        self._files: dict[str, BinaryIO] = {}
        self._factors: dict[str, float] = {}

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder with files of the format and no other."""
        known = {*_COUNTS, UNITS_FILE, *(file for file, *_ in RAW.values())}
        return set(os.listdir(path)) <= known

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Counts and offsets are known beforehand; all else comes with the blocks."""
        target.mkdir()
        counts = np.diff(snapshot.atoms_ptr)[samples]
        np.save(target / "n_atoms.npy", counts.astype(np.int32))
        np.save(target / "offsets.npy", counts_to_ptr(counts))
        units: dict[str, str] = {}
        for name in fields:
            if name not in _BY_FIELD:
                self.lost[name] = _WHY[snapshot.level(name)]
                continue
            have = snapshot.unit(name) or FIELDS[name].unit
            if have:
                units[name] = self.units.get(name, have)
                self._factors[name] = conversion_factor(have, units[name])
            dtype = np.dtype(RAW[_BY_FIELD[name]][1])
            if not np.can_cast(snapshot.dtype(name), dtype) and dtype.kind == "f":
                self.notes.append(f"{name}: {snapshot.dtype(name)} rounded to {dtype.name}")
            present = snapshot.present(name)
            if present is not None and not present[samples].all():
                self._tell_missing(f"{int((~present[samples]).sum())} samples without {name}")
        for name in ("energy", "forces"):
            if name not in fields:
                self._tell_missing(f"no sample has {name}: all")
        for short, (file, _, field, _) in RAW.items():
            if short != "Qtot" or field in fields:
                self._files[short] = (target / file).open("wb")
        (target / UNITS_FILE).write_text(json.dumps(units, ensure_ascii=False) + "\n", "utf-8")

    def _tell_missing(self, who: str) -> None:
        self.notes.append(f"{who} hold {self.missing:g} there (the format has no holes)")

    def write(self, block: Block) -> None:
        """The rows of a block, behind those before."""
        for short, file in self._files.items():
            _, dtype, field, tail = RAW[short]
            rows = block.num_atoms if FIELDS[field].level == "atom" else block.num_samples
            values = block.arrays.get(field)
            if values is None:
                out = np.full((rows, *tail), self.missing, dtype)
            else:
                out = self._cast(block, field, values, np.dtype(dtype))
            # A view of bytes: nothing is copied on the way to the file.
            file.write(np.ascontiguousarray(out).data.cast("B") if out.size else b"")

    def _cast(self, block: Block, field: str, values: NDArray, dtype: np.dtype[Any]) -> NDArray:
        mask = block.present.get(field)
        if mask is not None and not mask.all():
            per_row = mask
            if FIELDS[field].level == "atom":
                per_row = np.repeat(mask, np.diff(block.atoms_ptr))
            if not math.isnan(self.missing):
                values = values.copy()
                values[~per_row] = self.missing
        factor = self._factors.get(field, 1.0)
        with np.errstate(over="ignore"):
            if factor != 1.0:
                values = np.asarray(values, np.float64) * factor
            out = values.astype(dtype, copy=False)
        if out is not values and not np.can_cast(values.dtype, dtype):
            lost = np.isfinite(values) & ~np.isfinite(out) if dtype.kind == "f" else out != values
            if lost.any():
                at = tuple(np.argwhere(lost)[0].tolist())
                raise FieldError(
                    "packed",
                    f"{field} holds a number too large for {dtype.name}",
                    found=values[at],
                    mend="leave the sample out (samples=)",
                )
        return out

    def finish(self) -> None:
        """Close the files: they are whole."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def abort(self) -> None:
        """Let go of the files."""
        self.finish()


def write_packed(
    store: Any,
    dest: PathLike,
    *,
    fields: Iterable[str] | None = None,
    samples: Any = None,
    units: Mapping[str, str] | None = None,
    missing: float = math.nan,
    overwrite: bool = False,
    progress: bool = False,
) -> Any:
    """Write a store as a packed memmap folder, in one step, with bounded memory.

    Parameters
    ----------
    store : path, URL or Snapshot
    dest : path
        The folder that is made.
    fields : names, optional
        What is written beside positions and atomic numbers.
    samples : int, slice, ints or mask, optional
    units : dict of str to str, optional
        What the files are to hold; by default the store's own units.
    missing : float
        What stands for a value that a sample has not.
    overwrite : bool
        Replace a folder of this format.
    progress : bool

    Returns
    -------
    ExportReport
        Naming the fields that the format cannot hold.

    Raises
    ------
    StoreExistsError, StoreNotFoundError, FieldError, ConfigError
        Nothing is left at ``dest`` that was not there before.
    """
    from alchemi_xr.etl.exporting import export

    return export(
        store,
        dest,
        format="packed",
        fields=fields,
        samples=samples,
        overwrite=overwrite,
        progress=progress,
        options={"units": units, "missing": missing},
    )

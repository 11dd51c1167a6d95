"""NPZ in the padded PhysNet form: R, Z, N, E, F, Q, D, and other fields by their names."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import FIELDS, fill_for
from alchemi_xr.store import fs
from alchemi_xr.store.reader import Snapshot

__all__ = ["NpzExport"]

_NAMES = {
    "atomic_numbers": "Z",
    "positions": "R",
    "energy": "E",
    "forces": "F",
    "charge": "Q",
    "dipole": "D",
}
_SCALARS = ("energy", "charge", "spin")


class NpzExport:
    """One uncompressed archive, its members written in place and never held whole.

    Parameters
    ----------
    pad_to : int, optional
        Atoms a frame has room for; by default the largest sample's.
    """

    name: ClassVar[str] = "npz"
    suffixes: ClassVar[tuple[str, ...]] = (".npz",)

    def __init__(self, *, pad_to: int | None = None) -> None:
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self.pad_to = pad_to
        self._members: dict[str, Any] = {}
        self._width = self._at = 0

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder never is."""
        return False

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Members of their full size, as sparse files beside the archive."""
        from alchemi_xr.errors import ConfigError

        self._target = target
        self._work = target.with_name(target.name + ".members")
        self._work.mkdir()
        counts = np.diff(snapshot.atoms_ptr)[samples]
        largest = int(counts.max()) if len(counts) else 0
        self._width = largest if self.pad_to is None else self.pad_to
        if self._width < largest:
            raise ConfigError(
                "pad_to",
                "a sample has more atoms",
                found=largest,
                expected=f"at most {self.pad_to}",
            )
        n = len(samples)
        if n and counts.sum() < 0.5 * n * self._width:
            share = 1 - counts.sum() / (n * self._width)
            self.notes.append(f"{share:.0%} of the rows are padding: the samples differ in size")
        self._create("N", (n,), np.dtype(np.int32))
        alike = []
        for name in fields:
            level, dtype, tail = snapshot.level(name), snapshot.dtype(name), snapshot.tail(name)
            if level == "edge":
                self.lost[name] = "the form has no edges"
                continue
            if dtype.kind not in "biuf":
                self.lost[name] = "text has no place in the form"
                continue
            if name in _SCALARS:
                tail = ()
            if level == "system" and tail[:1] == (self._width,) and name not in FIELDS:
                alike.append(name)
            lead = (n, self._width) if level == "atom" else (n,)
            self._create(_NAMES.get(name, name), (*lead, *tail), dtype)
            present = snapshot.present(name)
            if present is not None and not present[samples].all() and name != "cell":
                fill = fill_for(dtype)
                self.notes.append(f"samples without {name} hold {fill} (the form has no holes)")

        if alike:
            self.notes.append(
                "by their shape these look like fields of atoms (another pad_to= tells them "
                "apart): " + ", ".join(alike)
            )

    def write(self, block: Block) -> None:
        """The rows of a block, at their places."""
        a, b = self._at, self._at + block.num_samples
        self._at = b
        counts = np.diff(block.atoms_ptr)
        keep = np.arange(self._width)[None, :] < counts[:, None]
        self._members["N"][a:b] = counts
        for name, values in block.arrays.items():
            member = self._members.get(_NAMES.get(name, name))
            if name in self.lost or member is None:
                continue
            if block.levels[name] == "atom":
                padded = np.zeros((b - a, self._width, *values.shape[1:]), values.dtype)
                padded[keep] = values
                member[a:b] = padded
                continue
            rows: NDArray = values.reshape(b - a, *member.shape[1:])
            here = block.has(name)
            if not here.all():
                rows = rows.copy()
                # No cell is a cell of zeros in this form.
                rows[~here] = 0 if name == "cell" else fill_for(rows.dtype)
            member[a:b] = rows

    def finish(self) -> None:
        """Put the members into one archive, streamed."""
        for member in self._members.values():
            if isinstance(member, np.memmap):
                member.flush()
        names = list(self._members)
        self._members.clear()
        with zipfile.ZipFile(self._target, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name in names:
                archive.write(self._work / f"{name}.npy", f"{name}.npy")
                fs.remove_file(self._work / f"{name}.npy")
        fs.remove_tree(self._work)

    def abort(self) -> None:
        """Let go of the maps."""
        self._members.clear()

    def _create(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if "/" in name or name in self._members:
            self.lost[name] = "its name is taken, or cannot name a member"
            return
        path = self._work / f"{name}.npy"
        if 0 in shape:
            np.save(path, np.zeros(shape, dtype))
            self._members[name] = np.zeros(shape, dtype)
            return
        self._members[name] = fs.make_map(path, dtype, shape)

"""DeePMD-kit npy systems: one folder for each order of elements.

Samples with the same sequence of elements (and the same periodicity and labels)
share a system; their order inside it is the store's, across systems it is lost.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.store import fs
from alchemi_xr.store.reader import Snapshot

__all__ = ["DeepmdExport"]

_FILES = {
    "positions": "coord",
    "energy": "energy",
    "forces": "force",
    "virial": "virial",
    "cell": "box",
    "dipole": "dipole",
}
_STRUCTURE = ("atomic_numbers", "pbc")


class DeepmdExport:
    """A folder of systems, each with one set.

    Parameters
    ----------
    max_systems : int
        More different systems than this are refused.
    """

    name: ClassVar[str] = "deepmd"
    suffixes: ClassVar[tuple[str, ...]] = (".deepmd",)

    def __init__(self, *, max_systems: int = 20_000) -> None:
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self.max_systems = max_systems
        self._sizes: Counter[bytes] = Counter()
        self._filled: Counter[bytes] = Counter()
        self._folders: dict[bytes, Path] = {}

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder whose every subfolder is a system, and with no other file."""
        inside = [os.path.join(path, n) for n in os.listdir(path)]
        return all(os.path.isfile(os.path.join(p, "type.raw")) for p in inside)

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Count the samples of every system, from elements and masks alone."""
        self._target = target
        target.mkdir()
        self._names = [n for n in fields if n in _FILES]
        for name in fields:
            if name not in _FILES and name not in _STRUCTURE:
                self.lost[name] = "a DeePMD system has no such array"
        self._dtypes = {n: snapshot.dtype(n) for n in self._names}
        wanted = ["atomic_numbers", *[n for n in ("pbc", "cell") if n in fields]]
        masks = {n: snapshot.present(n) for n in self._names}
        for block in snapshot.iter_blocks(fields=wanted, samples=samples, max_bytes=2**24):
            at = sum(self._sizes.values())
            chosen = samples[at : at + block.num_samples]
            has = {
                n: np.ones(len(chosen), bool) if m is None else m[chosen] for n, m in masks.items()
            }
            self._sizes.update(self._keys(block, has))
            self._check(len(self._sizes))
        if len(self._sizes) > 1:
            self.notes.append(
                f"{len(self._sizes)} systems: the order of samples across systems is not kept"
            )

    def write(self, block: Block) -> None:
        """The rows of a block, each system's at their places."""
        has = {n: block.has(n) for n in self._names}
        keys = self._keys(block, has)
        members: dict[bytes, list[int]] = {}
        for i, key in enumerate(keys):
            members.setdefault(key, []).append(i)
        for key, chosen in members.items():
            part = block.take(np.array(chosen, dtype=np.int64))
            a = self._filled[key]
            b = a + len(chosen)
            self._filled[key] = b
            folder = self._folders.get(key) or self._make(key, part)
            for file in sorted(folder.glob("set.000/*.npy")):
                name = next(n for n, f in _FILES.items() if f == file.stem)
                rows = np.lib.format.open_memmap(file, mode="r+")
                rows[a:b] = part.arrays[name].reshape(b - a, *rows.shape[1:])
                rows.flush()

    def finish(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is open."""

    def _check(self, systems: int) -> None:
        from alchemi_xr.errors import ConfigError

        if systems > self.max_systems:
            raise ConfigError(
                "deepmd",
                "the samples make too many systems (one for each sequence of elements)",
                found=f"more than {self.max_systems}",
                mend="export to another format, or raise max_systems in the options",
            )

    def _keys(self, block: Block, has: dict[str, NDArray]) -> list[bytes]:
        """What tells the systems apart: elements, periodicity, labels that are there."""
        ptr = block.atoms_ptr.tolist()
        numbers = np.ascontiguousarray(block["atomic_numbers"].astype(np.uint8))
        data = numbers.tobytes()
        pbc = block["pbc"] if "pbc" in block else np.zeros((block.num_samples, 3), bool)
        flags: IntArray = np.zeros(block.num_samples, np.int64)
        for bit, name in enumerate(sorted(has)):
            flags |= has[name].astype(np.int64) << bit
        flags = flags * 8 + (pbc.astype(np.int64) * (1, 2, 4)).sum(axis=1)
        if not hasattr(self, "_partly") and ((flags & 7 != 0) & (flags & 7 != 7)).any():
            self._partly = True
            self.notes.append("DeePMD knows periodic in all directions or in none: 2D becomes 3D")
        return [
            int(flag).to_bytes(4, "little") + data[ptr[i] : ptr[i + 1]]
            for i, flag in enumerate(flags.tolist())
        ]

    def _make(self, key: bytes, part: Block) -> Path:
        numbers = part["atomic_numbers"][: int(part.atoms_ptr[1])]
        kinds = np.unique(numbers)
        counted = "".join(f"{SYMBOLS[k]}{int((numbers == k).sum())}" for k in kinds.tolist())
        digest = hashlib.sha256(key).hexdigest()[:8]
        folder = self._target / f"{counted[:80] or 'empty'}-{digest}"
        (folder / "set.000").mkdir(parents=True)
        types = np.searchsorted(kinds, numbers)
        (folder / "type.raw").write_text("\n".join(map(str, types.tolist())) + "\n")
        (folder / "type_map.raw").write_text("".join(f"{SYMBOLS[k]}\n" for k in kinds.tolist()))
        periodic = "pbc" in part and bool(part["pbc"][0].any())
        if not periodic:
            (folder / "nopbc").touch()
        frames, atoms = self._sizes[key], len(numbers)
        for name in self._names:
            if name not in part or not part.has(name)[0] or (name == "cell" and not periodic):
                continue
            row = part.arrays[name].shape[1:]
            width = int(np.prod(row, dtype=np.int64))
            shape: tuple[int, ...] = (
                frames,
                width * atoms if name in ("positions", "forces") else width,
            )
            if name == "energy":
                shape = (frames,)
            fs.make_map(folder / "set.000" / f"{_FILES[name]}.npy", self._dtypes[name], shape)
        self._folders[key] = folder
        return folder

"""Packed memmap folders: their files are mapped, and a task gets windows of them.

The format names no units. Those of a ``units.json`` beside the files are
converted, what the user says wins, and the report says what was taken as it stands.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from alchemi_xr._typing import IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.data.packed import RAW, is_packed, open_packed
from alchemi_xr.errors import ConfigError, SourceError, SourceNotFoundError
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, no_edges, pack, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["PackedSource"]

_STEP_BYTES = 16 * 2**20
_NO_UNITS = (
    "packed memmap files name no units and {} has no units.json: what units= (--units) does not "
    "say is taken as it stands (files made by mmml's NPZ converter may be in kcal/mol)"
)


@dataclass(frozen=True)
class _Folder:
    """What a scan keeps of a folder; the counts themselves go into the scan."""

    frames: int
    atoms: int
    names: tuple[str, ...]
    units: dict[str, str]


class PackedSource:
    """Molecules of packed memmap folders.

    Parameters
    ----------
    paths : sequence of str
        Folders with ``offsets.npy``, ``n_atoms.npy``, ``Z_pack.int32``, ``R_pack.f32``,
        ``F_pack.f32``, ``E.f64`` and, where there are charges, ``Qtot.f64``.
    names : NameMap, optional
        Of ``Z``, ``R``, ``F``, ``E`` and ``Qtot``.
    frames : int
        Molecules that one task reads at most.
    """

    name: ClassVar[str] = "packed"
    takes_folders: ClassVar[bool] = True

    def __init__(
        self, paths: Sequence[str], *, names: NameMap | None = None, frames: int = 65_536
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self._folders = [Path(os.path.abspath(p)) for p in self.paths]
        self.frames = frames
        mapping = (names or NameMap()).mapping
        self._targets: dict[str, tuple[str, Level]] = {}
        for short, (_, _, field, _) in RAW.items():
            level = FIELDS[field].level
            wanted = mapping.get(short, field)
            self._targets[short] = (NameMap({short: wanted}).target(short, level).name, level)
        twice = [n for n, k in Counter(t for t, _ in self._targets.values()).items() if k > 1]
        if twice:
            raise ConfigError(
                "key_map", "two arrays of the packed format for one field", found=twice[0]
            )
        self._found: list[_Folder | None] = []
        self.schema: Schema | None = None

    @classmethod
    def matches(cls, path: str) -> bool:
        """A folder with ``offsets.npy`` and ``Z_pack.int32``."""
        return os.path.isdir(path) and is_packed(path)

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Check sizes and offsets of every folder; no row is read."""
        results = map_files(_look, self._folders)
        rejects: list[Reject] = []
        notes: list[str] = []
        keys: Counter[str] = Counter()
        observer = FieldObserver()
        partitions: list[Partition] = []
        counts: list[IntArray] = []
        units: dict[str, str] = {}
        self._found = []
        for number, (folder, offsets) in enumerate(results):
            if not isinstance(folder, _Folder):
                rejects.append(Reject(self.paths[number], 0, folder))
                self._found.append(None)
                continue
            self._found.append(folder)
            observer.num_samples += folder.frames
            for short in folder.names:
                keys[short] += folder.frames
                target, level = self._targets[short]
                _, dtype, _, tail = RAW[short]
                if folder.frames:
                    tail = tail if target in FIELDS or level == "atom" else ()
                    observer.see(target, level, np.dtype(dtype).name, tail, count=folder.frames)
            self._agree(number, folder, units)
            # A task has one folder: its rows are then a window of the files.
            partitions += pack(
                self._cut(number, folder, offsets),
                target_bytes=_STEP_BYTES,
                target_samples=self.frames,
            )
            counts.append(np.diff(offsets))
        bare = [p for p, f in zip(self.paths, self._found, strict=True) if f and not f.units]
        if bare:
            notes.append(_NO_UNITS.format(bare[0] if len(bare) == 1 else f"{len(bare)} folders"))
        self.schema = observer.schema(self.paths[0] if self.paths else "input")
        atoms = np.concatenate(counts) if counts else np.zeros(0, np.int64)
        return Scan(
            partitions,
            atoms,
            no_edges(len(atoms)),
            self.schema,
            rejects,
            notes,
            dict(keys),
            len(atoms) + len(rejects),
            units={n: u for n, u in units.items() if self.schema.get(n) is not None},
        )

    def _agree(self, number: int, folder: _Folder, units: dict[str, str]) -> None:
        """Take in the units of a folder: all have to be in the same."""
        said = {
            target: folder.units[RAW[short][2]]
            for short, (target, _) in self._targets.items()
            if RAW[short][2] in folder.units and target in FIELDS
        }
        first = next((f for f in self._found if f is not None), folder)
        if folder is not first and said != units:
            raise ConfigError(
                self.paths[number],
                "its units are not those of the folders before it",
                found=said or "no units.json",
                expected=units or "no units.json",
                mend="convert it alone, then append or merge",
            )
        units.update(said)

    def _cut(
        self, number: int, folder: _Folder, offsets: IntArray
    ) -> Iterator[tuple[Segment, int]]:
        """Windows of about the target size."""
        per_atom, per_frame = _row_bytes(folder.names)
        total = offsets * per_atom
        total += np.arange(len(offsets)) * per_frame
        at = np.searchsorted(total, np.arange(0, int(total[-1]), _STEP_BYTES), side="right") - 1
        edges = np.unique(
            np.concatenate([at, np.arange(0, folder.frames, self.frames), [folder.frames]])
        )
        for a, b in pairwise(edges.tolist()):
            atoms = int(offsets[b] - offsets[a])
            yield Segment(number, a, b, a, b - a, atoms), int(total[b] - total[a])

    def read(self, partition: Partition) -> PartResult:
        """Windows of the mapped files; molecules with impossible elements as rejects."""
        pieces = [self._window(segment) for segment in partition.segments]
        block = pieces[0] if len(pieces) == 1 else Block.concat(pieces)
        target = self._targets["Z"][0]
        numbers = block.arrays[target]
        rejects: list[Reject] = []
        # Two passes without memory; the mask is made where something is wrong.
        if numbers.size and not (numbers.min() >= 1 and numbers.max() <= 118):
            atoms = np.flatnonzero((numbers < 1) | (numbers > 118))
            samples = np.searchsorted(block.atoms_ptr, atoms, side="right") - 1
            for sample, first in zip(*np.unique(samples, return_index=True), strict=True):
                atom = int(atoms[first])
                rejects.append(self._reject(partition, int(sample), atom, block))
        return PartResult(block, rejects)

    def _reject(self, partition: Partition, sample: int, atom: int, block: Block) -> Reject:
        name = self._targets["Z"][0]
        within = atom - int(block.atoms_ptr[sample])
        reason = (
            f"atom {within} has the atomic number {block.arrays[name][atom]}, expected 1 to 118"
        )
        before = 0
        for segment in partition.segments:
            if sample - before < segment.frames:
                frame = segment.first + sample - before
                return Reject(
                    self.paths[segment.file], frame, reason, field="atomic_numbers", sample=sample
                )
            before += segment.frames
        raise IndexError(sample)

    def _window(self, segment: Segment) -> Block:
        folder, path = self._found[segment.file], self._folders[segment.file]
        if folder is None or self.schema is None:
            raise SourceError(self.paths[segment.file], "read before scan", mend="call scan()")
        a, b = segment.start, segment.stop
        try:
            offsets = np.load(path / "offsets.npy", mmap_mode="r", allow_pickle=False)
            ptr = np.array(offsets[a : b + 1], np.int64)
        except (ValueError, OSError) as error:
            raise self._changed(segment) from error
        if len(offsets) != folder.frames + 1 or len(ptr) != b - a + 1:
            raise self._changed(segment)
        first, last = int(ptr[0]), int(ptr[-1])
        if last - first != segment.atoms or (np.diff(ptr) < 0).any() or last > folder.atoms:
            raise self._changed(segment)
        arrays: dict[str, NDArray] = {}
        levels: dict[str, Level] = {}
        for short in folder.names:
            name, level = self._targets[short]
            layout = self.schema.get(name)
            if layout is None:
                continue
            file, dtype, _, tail = RAW[short]
            rows = folder.atoms if level == "atom" else folder.frames
            low, high = (first, last) if level == "atom" else (a, b)
            window = self._map(segment, path / file, dtype, tail if level == "atom" else (), rows)
            arrays[name] = window[low:high].reshape(high - low, *layout.tail)
            levels[name] = level
        ptr -= first
        return Block(ptr, np.zeros_like(ptr), arrays, levels)

    def _map(
        self, segment: Segment, path: Path, dtype: str, tail: tuple[int, ...], rows: int
    ) -> NDArray:
        shape = (rows, *tail)
        size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        # A shorter file would end the process where it is touched.
        if not path.is_file() or path.stat().st_size != size:
            raise self._changed(segment)
        if size == 0:
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=shape))

    def _changed(self, segment: Segment) -> SourceError:
        return SourceError(
            self.paths[segment.file],
            "the folder is not what it was when it was scanned",
            mend="do not change the input while it is read; run it again",
        )


def _look(path: Path) -> tuple[_Folder | str, IntArray]:
    """A folder's shape and offsets, or what is wrong with it."""
    try:
        files = open_packed(path)
    except (SourceError, SourceNotFoundError) as error:
        # Without the path, which a reject names itself.
        return str(error).removeprefix(str(path)).lstrip(":, "), np.zeros(0, np.int64)
    names = tuple(name for name in RAW if name in files.arrays)
    folder = _Folder(len(files.n_atoms), int(files.offsets[-1]), names, files.units)
    return folder, files.offsets


def _row_bytes(names: Sequence[str]) -> tuple[int, int]:
    """Bytes of an atom and of a molecule."""
    sizes = {"atom": 0, "system": 0}
    for name in names:
        _, dtype, field, tail = RAW[name]
        width = int(np.prod(tail, dtype=np.int64)) * np.dtype(dtype).itemsize
        sizes[FIELDS[field].level] += width
    return sizes["atom"], sizes["system"]

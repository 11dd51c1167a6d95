"""Blocks on disk while a campaign runs: raw files a field, written by appending,
read by memory map. A unit's results and its frames are kept so until the merge;
nothing here is a store, and nothing is read as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray, PathLike
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr, row_indices
from alchemi_xr.errors import CampaignError, FieldError

__all__ = ["BlockFolder", "BlockFolderWriter"]

_INDEX = "index.json"
_COUNTS = "counts.bin"  # int64 [N, 2]: atoms and edges of each sample
_BUFFER = 1 << 20


class BlockFolderWriter:
    """Appends blocks to a new folder; ``close`` makes it readable.

    The first block fixes the fields; every later one must have the same.

    Parameters
    ----------
    path : path
        Made here; its parent exists.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.path.mkdir()
        self.num_samples = 0
        self._files: dict[str, IO[bytes]] = {}
        self._fields: dict[str, dict[str, Any]] = {}
        self._open(_COUNTS)

    def _open(self, name: str) -> IO[bytes]:
        self._files[name] = (self.path / name).open("wb", buffering=_BUFFER)
        return self._files[name]

    def _start(self, block: Block) -> None:
        for number, name in enumerate(block.names):
            values = block[name]
            if values.dtype.kind not in "biufc":
                raise FieldError(
                    str(self.path), f"field {name!r} is not numeric", found=values.dtype
                )
            self._fields[name] = {
                "file": f"{number:03d}.bin",  # a field may have any name, a file may not
                "level": block.levels[name],
                "dtype": values.dtype.str,
                "tail": list(values.shape[1:]),
                "unit": block.units.get(name, ""),
            }
            self._open(self._fields[name]["file"])

    def append(self, block: Block) -> None:
        """Write the samples of a block behind those already there.

        Raises
        ------
        FieldError
            Its fields differ from those of the first block.
        """
        if not self._fields:
            self._start(block)
        if set(block.arrays) != set(self._fields):
            raise FieldError(
                str(self.path),
                "the fields of a later block differ",
                found=block.names,
                expected=list(self._fields),
            )
        for name, spec in self._fields.items():
            values = np.ascontiguousarray(block[name], dtype=np.dtype(spec["dtype"]))
            if list(values.shape[1:]) != spec["tail"]:
                raise FieldError(
                    str(self.path),
                    f"rows of field {name!r} have another shape",
                    found=list(values.shape[1:]),
                    expected=spec["tail"],
                )
            self._files[spec["file"]].write(values.tobytes())
            if name in block.present or "present" in spec:
                self._write_present(name, spec, block.has(name))
        counts = np.stack([np.diff(block.atoms_ptr), np.diff(block.edges_ptr)], axis=1)
        self._files[_COUNTS].write(counts.astype(np.int64).tobytes())
        self.num_samples += block.num_samples

    def _write_present(self, name: str, spec: dict[str, Any], mask: BoolArray) -> None:
        if "present" not in spec:
            # The first hole of this field: all samples before had it.
            spec["present"] = spec["file"].replace(".bin", ".present.bin")
            self._open(spec["present"]).write(b"\x01" * self.num_samples)
        self._files[spec["present"]].write(mask.astype(np.bool_).tobytes())

    def close(self) -> None:
        """Flush, sync and write the index, last."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._files = {}
        index = {"num_samples": self.num_samples, "fields": self._fields}
        with (self.path / _INDEX).open("w", encoding="utf-8") as text:
            json.dump(index, text)
            text.flush()
            os.fsync(text.fileno())

    def abandon(self) -> None:
        """Close the files and leave the folder unreadable."""
        for file in self._files.values():
            file.close()
        self._files = {}


class BlockFolder:
    """A closed folder of blocks, read by memory map.

    Parameters
    ----------
    path : path

    Raises
    ------
    CampaignError
        It has no index, so its writer did not finish.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        try:
            index = json.loads((self.path / _INDEX).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CampaignError(str(path), "a unit's data is unfinished or gone") from error
        self.num_samples: int = index["num_samples"]
        self._fields: dict[str, dict[str, Any]] = index["fields"]
        counts = self._map(_COUNTS, np.dtype(np.int64), (2,), self.num_samples)
        self.atoms_ptr = counts_to_ptr(counts[:, 0])
        self.edges_ptr = counts_to_ptr(counts[:, 1])

    @property
    def fields(self) -> list[str]:
        """Field names in the project's order."""
        return list(self._fields)

    @property
    def row_bytes(self) -> dict[Level, int]:
        """Bytes of one row of all fields of a level together."""
        sizes: dict[Level, int] = {"atom": 0, "edge": 0, "system": 0}
        for spec in self._fields.values():
            row = int(np.prod(spec["tail"], dtype=np.int64))
            sizes[spec["level"]] += row * np.dtype(spec["dtype"]).itemsize
        return sizes

    def sample_bytes(self) -> IntArray:
        """Bytes of each sample, int64 [N]."""
        size = self.row_bytes
        sizes: IntArray = (
            np.diff(self.atoms_ptr) * size["atom"]
            + np.diff(self.edges_ptr) * size["edge"]
            + size["system"]
        )
        return sizes

    def _map(self, name: str, dtype: np.dtype[Any], tail: tuple[int, ...], rows: int) -> NDArray:
        shape = (rows, *tail)
        if rows == 0 or 0 in tail:
            return np.empty(shape, dtype)  # an empty file cannot be mapped
        return np.memmap(self.path / name, dtype, "r", shape=shape)

    def array(self, name: str) -> NDArray:
        """One whole field as a memory map; slice it before use."""
        spec = self._fields[name]
        rows = {
            "atom": int(self.atoms_ptr[-1]),
            "edge": int(self.edges_ptr[-1]),
            "system": self.num_samples,
        }[spec["level"]]
        return self._map(spec["file"], np.dtype(spec["dtype"]), tuple(spec["tail"]), rows)

    def take(self, samples: IntArray, fields: Iterable[str] | None = None) -> Block:
        """The chosen samples (positions in this folder, any order) as a block."""
        atom_rows, atoms_ptr = row_indices(self.atoms_ptr, samples)
        edge_rows, edges_ptr = row_indices(self.edges_ptr, samples)
        rows = {"atom": atom_rows, "edge": edge_rows, "system": samples}
        names = list(self._fields) if fields is None else list(fields)
        specs = {name: self._fields[name] for name in names}
        present = {
            name: self._map(s["present"], np.dtype(np.bool_), (), self.num_samples)[samples]
            for name, s in specs.items()
            if "present" in s
        }
        return Block(
            atoms_ptr,
            edges_ptr,
            {name: np.asarray(self.array(name)[rows[s["level"]]]) for name, s in specs.items()},
            {name: s["level"] for name, s in specs.items()},
            {name: np.asarray(mask) for name, mask in present.items() if not mask.all()},
            {name: s["unit"] for name, s in specs.items() if s["unit"]},
        )

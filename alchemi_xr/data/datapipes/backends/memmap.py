"""Reads the packed memmap format as samples: for ``Dataset`` and ``DataLoader``.

Its padded batches, as JAX models want them, are ``PackedMemmapLoader``'s; here
the same files give flat batches in the project's units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from alchemi_xr._typing import IntArray, Level, NDArray, PathLike
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index, counts_to_ptr
from alchemi_xr.data.datapipes.backends.base import Reader, Tensors
from alchemi_xr.data.datapipes.pool import BufferPool
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.data.level import from_numpy
from alchemi_xr.data.packed import PackedFiles, factors_of, open_packed
from alchemi_xr.errors import FieldError, StoreClosedError, UnknownFieldError, nearest
from alchemi_xr.native.rows import Field, Gather

__all__ = ["PackedMemmapReader"]

_PIECE_BYTES = 2**20


class PackedMemmapReader(Reader):
    """Molecules of a packed memmap folder, copied out of the mapped files.

    Parameters
    ----------
    path : path
        As for :class:`~alchemi_xr.data.packed_memmap_loader.PackedMemmapLoader`.
    units : dict of str to str, optional
        By field, what the files hold, such as ``{"energy": "kcal/mol"}``; the
        samples are in the project's own. By default what the folder's
        ``units.json`` says; without one, and for fields it does not name, values
        are given as they stand.
    fields : sequence of str, optional
        Read only these.
    pin_memory : bool
        Give tensors in page-locked memory (no effect without CUDA).
    include_index_in_metadata : bool

    Raises
    ------
    SourceNotFoundError, SourceError
        The folder is not whole.
    ConfigError
        A unit is not understood.
    UnknownFieldError
        One of ``fields`` is not in the files.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        units: Mapping[str, str] | None = None,
        fields: Sequence[str] | None = None,
        pin_memory: bool = False,
        include_index_in_metadata: bool = True,
    ) -> None:
        super().__init__(pin_memory=pin_memory, include_index_in_metadata=include_index_in_metadata)
        self.path = path
        self._given = None if units is None else dict(units)
        self._chosen: list[str] | None = None
        self._files: PackedFiles | None = None
        self.reopen()
        if fields is not None:
            self._chosen = self._known(fields)

    def reopen(self) -> None:
        """Open the folder again after ``close``; an open reader stays as it is."""
        if self._files is not None:
            return
        files = open_packed(self.path)
        asked = {resolve(name): unit for name, unit in (self._given or {}).items()}
        self.units = {**files.units, **asked}
        factors = factors_of(self.units, where=type(self).__name__)
        rows = files.fields()
        self._factors = {n: f for n, f in factors.items() if n in rows}
        self._rows = {
            name: Field(values, files.offsets if FIELDS[name].level == "atom" else None)
            for name, values in rows.items()
        }
        self._gathers: dict[tuple[str, ...], Gather] = {}
        self._pool = BufferPool()
        self._files = files

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps the files for itself.
        left = {"_rows", "_gathers", "_pool", "_factors"}
        state = {k: v for k, v in self.__dict__.items() if k not in left}
        return {**state, "_files": None, "_was_open": self._files is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        was_open = state.pop("_was_open")
        self.__dict__.update(state)
        if was_open:
            self.reopen()

    # -- what it holds ---------------------------------------------------------

    def _open(self) -> PackedFiles:
        if self._files is None:
            raise StoreClosedError("PackedMemmapReader", "Cannot read from a closed reader.")
        return self._files

    def __len__(self) -> int:
        return len(self._open().n_atoms)

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def field_levels(self) -> Mapping[str, str]:
        return {name: FIELDS[name].level for name in self._get_field_names()}

    def _get_field_names(self) -> list[str]:
        self._open()
        return list(self._rows) if self._chosen is None else list(self._chosen)

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Numbers of atoms and edges of a sample; there are no edges."""
        at = int(as_index([index], len(self), where=self.where)[0])
        return int(self._open().n_atoms[at]), 0

    def sample_sizes(self) -> tuple[IntArray, IntArray]:
        """Numbers of atoms and edges of all samples, int64 [N] each."""
        counts = self._open().n_atoms.astype(np.int64)
        return counts, np.zeros_like(counts)

    def block_starts(self) -> IntArray:
        """First sample of each megabyte of positions, int64, ascending from 0."""
        offsets = self._open().offsets
        rows = np.arange(0, max(1, int(offsets[-1])), _PIECE_BYTES // 12)
        starts = np.unique(np.searchsorted(offsets[:-1], rows))
        return np.unique(np.concatenate([[0], starts[starts < len(self)]])).astype(np.int64)

    def _get_sample_metadata(self, index: int) -> dict[str, Any]:
        return {"source_file": self.where}

    # -- reading ---------------------------------------------------------------

    def read_block(self, indices: Any, fields: Sequence[str] | None = None) -> Block:
        """Several samples as flat arrays of their own.

        Raises
        ------
        IndexRangeError
        UnknownFieldError
        """
        files = self._open()
        names = tuple(self._get_field_names() if fields is None else self._known(fields))
        samples = as_index(indices, len(self), where=self.where)
        ptr = counts_to_ptr(files.n_atoms[samples].astype(np.int64))
        levels: dict[str, Level] = {name: FIELDS[name].level for name in names}
        rows = [int(ptr[-1]) if levels[n] == "atom" else len(samples) for n in names]
        gather = self._gathers.get(names)
        if gather is None:
            gather = self._gathers[names] = Gather([self._rows[n] for n in names])
        arrays: dict[str, NDArray] = dict(
            zip(names, gather(samples, rows, empty=self._pool.empty), strict=True)
        )
        for name in names:
            if name in self._factors:
                arrays[name] *= np.asarray(self._factors[name], arrays[name].dtype)
        return Block(ptr, np.zeros_like(ptr), arrays, levels)

    def read_batch(self, indices: Sequence[int], fields: Sequence[str] | None = None) -> Batch:
        return self.read_batches([indices], fields)[0]

    def read_batches(
        self, lists: Sequence[Sequence[int]], fields: Sequence[str] | None = None
    ) -> list[Batch]:
        batches = []
        for indices in lists:
            block = self.read_block(indices, fields)
            if block.num_samples == 0:
                raise FieldError(
                    self.where,
                    "no sample to read",
                    found="an empty list of indices",
                    expected="some",
                )
            batch = Batch.from_block(block)
            batches.append(batch.pin_memory() if self._pins() else batch)
        return batches

    def _load_many_samples(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        block = self.read_block(indices)
        flat = {name: from_numpy(block.arrays[name]) for name in block.names}
        atoms, single = np.diff(block.atoms_ptr).tolist(), [1] * block.num_samples
        parts = {
            name: values.split(atoms if block.levels[name] == "atom" else single)
            for name, values in flat.items()
        }
        return [
            Tensors({name: pieces[i] for name, pieces in parts.items()})
            for i in range(block.num_samples)
        ]

    # -- life ------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._files is None

    def close(self) -> None:
        if self._files is not None:
            self._files = None
            self._rows, self._gathers = {}, {}

    # -- inside ----------------------------------------------------------------

    def _known(self, fields: Sequence[str]) -> list[str]:
        names = [resolve(name) for name in fields]
        for given, name in zip(fields, names, strict=True):
            if name not in self._rows:
                raise UnknownFieldError(
                    self.where, f"no field {given!r} to read. {nearest(given, self._rows)}"
                )
        return names

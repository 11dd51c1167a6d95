"""Whole samples as flat NumPy arrays with pointers: what crosses every door
below torch. ``Block`` is to NumPy what ``Batch`` is to torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray, Ptr
from alchemi_xr.data.csr import counts_to_ptr, expand_mask, row_indices, validate_ptr
from alchemi_xr.data.fields import check_tail, field_order, fill_for
from alchemi_xr.errors import FieldError, UnknownFieldError, nearest

__all__ = ["Block"]


@dataclass(slots=True)
class Block:
    """Flat arrays of whole samples.

    Parameters
    ----------
    atoms_ptr, edges_ptr : int64 array, [N + 1]
    arrays : dict of str to array
        Canonical field name to [V, ...], [E, ...] or [N, ...]. ``neighbor_list``
        [E, 2] holds atom numbers local to their sample. Text is a system field
        of NumPy kind ``U`` or object.
    levels : dict of str to {"atom", "edge", "system"}
        One entry for every array.
    present : dict of str to bool array, [N]
        Only for fields with holes: False where a sample has no value, whose
        rows then hold the fill.
    units : dict of str to str
        Only where known and different from the field table.
    """

    atoms_ptr: Ptr
    edges_ptr: Ptr
    arrays: dict[str, NDArray]
    levels: dict[str, Level]
    present: dict[str, BoolArray] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return len(self.atoms_ptr) - 1

    @property
    def num_atoms(self) -> int:
        return int(self.atoms_ptr[-1])

    @property
    def num_edges(self) -> int:
        return int(self.edges_ptr[-1])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

    @property
    def names(self) -> list[str]:
        """Field names in the project's one order."""
        return field_order(self.arrays)

    def rows(self, level: Level) -> int:
        """Number of rows at a level."""
        return {"atom": self.num_atoms, "edge": self.num_edges, "system": self.num_samples}[level]

    def ptr(self, level: Level) -> Ptr:
        """Pointer of a level; for systems, 0 to N."""
        if level == "atom":
            return self.atoms_ptr
        if level == "edge":
            return self.edges_ptr
        return np.arange(self.num_samples + 1, dtype=np.int64)

    def __getitem__(self, name: str) -> NDArray:
        try:
            return self.arrays[name]
        except KeyError:
            raise UnknownFieldError(
                "Block", f"no field {name!r}. {nearest(name, self.arrays)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def has(self, name: str) -> BoolArray:
        """Mask of the samples that carry a field, bool [N]."""
        if name not in self.arrays:
            return np.zeros(self.num_samples, dtype=bool)
        return self.present.get(name, np.ones(self.num_samples, dtype=bool))

    def validate(self, where: str = "Block") -> Block:
        """Check pointers, lengths, tails and edges; returns itself.

        Raises
        ------
        FieldError
        """
        validate_ptr(self.atoms_ptr, where=f"{where}, atoms_ptr")
        validate_ptr(self.edges_ptr, where=f"{where}, edges_ptr")
        if len(self.edges_ptr) != len(self.atoms_ptr):
            raise FieldError(
                where,
                "edges_ptr and atoms_ptr disagree on the number of samples",
                found=len(self.edges_ptr) - 1,
                expected=self.num_samples,
            )
        for name, values in self.arrays.items():
            if name not in self.levels:
                raise FieldError(where, f"field {name!r} has no level")
            rows = self.rows(self.levels[name])
            if values.ndim == 0 or len(values) != rows:
                raise FieldError(
                    where,
                    f"field {name!r} ({self.levels[name]}) has the wrong number of rows",
                    found=list(values.shape),
                    expected=f"{rows} rows",
                )
            check_tail(name, values.shape, where=where)
        for name, mask in self.present.items():
            if name not in self.arrays or mask.shape != (self.num_samples,):
                raise FieldError(
                    where,
                    f"presence of {name!r} does not fit",
                    found=list(mask.shape),
                    expected=[self.num_samples],
                )
        if "neighbor_list" in self.arrays and self.num_edges:
            pairs = self.arrays["neighbor_list"]
            limit = np.repeat(np.diff(self.atoms_ptr), np.diff(self.edges_ptr))
            bad = ((pairs < 0) | (pairs >= limit[:, None])).any(axis=1)
            if bad.any():
                row = int(np.flatnonzero(bad)[0])
                sample = int(np.searchsorted(self.edges_ptr, row, side="right") - 1)
                raise FieldError(
                    where,
                    f"neighbor_list of sample {sample} names an atom it does not have",
                    found=pairs[row].tolist(),
                    expected=f"0 to {int(limit[row]) - 1}",
                )
        return self

    def take(self, samples: IntArray) -> Block:
        """The chosen samples as a new block (positions in range, any order)."""
        samples = np.asarray(samples, dtype=np.int64)
        atom_rows, atoms_ptr = row_indices(self.atoms_ptr, samples)
        edge_rows, edges_ptr = row_indices(self.edges_ptr, samples)
        rows = {"atom": atom_rows, "edge": edge_rows, "system": samples}
        return Block(
            atoms_ptr,
            edges_ptr,
            {name: a[rows[self.levels[name]]] for name, a in self.arrays.items()},
            dict(self.levels),
            {name: mask[samples] for name, mask in self.present.items()},
            dict(self.units),
        )

    def slice(self, start: int, stop: int) -> Block:
        """Samples ``start:stop`` as views."""
        a0, a1 = int(self.atoms_ptr[start]), int(self.atoms_ptr[stop])
        e0, e1 = int(self.edges_ptr[start]), int(self.edges_ptr[stop])
        cut = {"atom": np.s_[a0:a1], "edge": np.s_[e0:e1], "system": np.s_[start:stop]}
        return Block(
            self.atoms_ptr[start : stop + 1] - a0,
            self.edges_ptr[start : stop + 1] - e0,
            {name: a[cut[self.levels[name]]] for name, a in self.arrays.items()},
            dict(self.levels),
            {name: mask[start:stop] for name, mask in self.present.items()},
            dict(self.units),
        )

    def select_fields(self, names: Iterable[str]) -> Block:
        """Only these fields, as views.

        Raises
        ------
        UnknownFieldError
        """
        names = list(names)
        return Block(
            self.atoms_ptr,
            self.edges_ptr,
            {name: self[name] for name in names},
            {name: self.levels[name] for name in names},
            {name: self.present[name] for name in names if name in self.present},
            {name: self.units[name] for name in names if name in self.units},
        )

    def with_field(
        self, name: str, values: NDArray, level: Level, present: BoolArray | None = None
    ) -> Block:
        """This block with one field more (or replaced); the others are shared."""
        arrays, levels = {**self.arrays, name: values}, {**self.levels, name: level}
        masks = {k: v for k, v in self.present.items() if k != name}
        if present is not None and not present.all():
            masks[name] = present
        return Block(
            self.atoms_ptr, self.edges_ptr, arrays, levels, masks, dict(self.units)
        ).validate()

    @staticmethod
    def concat(blocks: Sequence[Block], *, where: str = "Block.concat") -> Block:
        """Blocks one after the other, over the union of their fields.

        A block without a field contributes fill rows and False in its presence
        mask. dtypes are promoted by NumPy's rules.

        Raises
        ------
        FieldError
            No block; or a field has two levels or two row shapes.
        """
        if not blocks:
            raise FieldError(where, "no block to concatenate")
        if len(blocks) == 1:
            return blocks[0]
        levels: dict[str, Level] = {}
        tails: dict[str, tuple[int, ...]] = {}
        units: dict[str, str] = {}
        for block in blocks:
            for name, values in block.arrays.items():
                level, tail = block.levels[name], values.shape[1:]
                if levels.setdefault(name, level) != level:
                    raise FieldError(
                        where, f"field {name!r} has two levels", found=level, expected=levels[name]
                    )
                if tails.setdefault(name, tail) != tail:
                    raise FieldError(
                        where,
                        f"rows of field {name!r} have two shapes",
                        found=list(tail),
                        expected=list(tails[name]),
                    )
            units.update(block.units)
        arrays: dict[str, NDArray] = {}
        present: dict[str, BoolArray] = {}
        for name in field_order(levels):
            parts = [b.arrays.get(name) for b in blocks]
            dtype = np.result_type(*[p.dtype for p in parts if p is not None])
            rows = [
                p
                if p is not None
                else np.full((b.rows(levels[name]), *tails[name]), fill_for(dtype), dtype)
                for p, b in zip(parts, blocks, strict=True)
            ]
            arrays[name] = np.concatenate(rows)
            masks = np.concatenate([b.has(name) for b in blocks])
            if not masks.all():
                present[name] = masks
        return Block(
            counts_to_ptr(np.concatenate([np.diff(b.atoms_ptr) for b in blocks])),
            counts_to_ptr(np.concatenate([np.diff(b.edges_ptr) for b in blocks])),
            arrays,
            levels,
            present,
            units,
        )

    @staticmethod
    def from_samples(
        samples: Sequence[Mapping[str, NDArray]], levels: Mapping[str, Level]
    ) -> Block:
        """A block from one mapping a sample (system fields without leading axis).

        For sources that read sample by sample; bulk paths build flat arrays.
        """
        blocks = []
        for sample in samples:
            atoms = len(sample["atomic_numbers"])
            edges = len(sample["neighbor_list"]) if "neighbor_list" in sample else 0
            blocks.append(
                Block(
                    counts_to_ptr(np.array([atoms])),
                    counts_to_ptr(np.array([edges])),
                    {
                        name: np.asarray(v)[None] if levels[name] == "system" else np.asarray(v)
                        for name, v in sample.items()
                    },
                    {name: levels[name] for name in sample},
                )
            )
        return Block.concat(blocks).validate()

    def fill_missing(self) -> None:
        """Write the documented fill into the rows of absent samples, in place."""
        for name, mask in self.present.items():
            level = self.levels[name]
            rows = ~mask if level == "system" else ~expand_mask(mask, self.ptr(level))
            values = self.arrays[name]
            values[rows] = fill_for(values.dtype)

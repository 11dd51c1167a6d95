"""Blocks as ASE's objects, and as the rows of its databases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.store.reader import Snapshot

__all__ = ["AseSample", "ase_limits", "iter_samples"]

_RESULTS = ("energy", "forces", "stress", "dipole", "charges")
_ARRAYS = {"momenta": "momenta", "atomic_masses": "masses", "tags": "tags"}


@dataclass
class AseSample:
    """One sample: atoms without calculator, results, and all the rest by name."""

    numbers: Any
    positions: Any
    cell: Any
    pbc: Any
    results: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def to_atoms(self) -> Any:
        """As ``ase.Atoms`` with a single-point calculator; atom fields as arrays."""
        from ase import Atoms
        from ase.calculators.singlepoint import SinglePointCalculator

        atoms = Atoms(numbers=self.numbers, positions=self.positions, cell=self.cell, pbc=self.pbc)
        for name, values in self.arrays.items():
            atoms.set_array(_ARRAYS.get(name, name), values)
        atoms.info.update(self.info)
        if self.results:
            atoms.calc = SinglePointCalculator(atoms, **self.results)
        return atoms


def ase_limits(snapshot: Snapshot, fields: list[str]) -> tuple[dict[str, str], list[str]]:
    """What ASE's objects cannot hold, and what changes on the way."""
    lost = {n: "ASE has no edges" for n in fields if snapshot.level(n) == "edge"}
    wide = [
        f"{n} {snapshot.dtype(n).name}"
        for n in ("positions", "cell", "energy", "momenta", "atomic_masses")
        if n in fields and snapshot.dtype(n) != np.dtype("float64")
    ]
    notes = ["ASE holds these as float64 (values are kept): " + ", ".join(wide)] if wide else []
    return lost, notes


def iter_samples(block: Block, lost: dict[str, str]) -> Iterator[AseSample]:
    """The samples of a block, one by one (ASE knows no other way)."""
    atoms_ptr = block.atoms_ptr.tolist()
    names = [n for n in block.names if n not in lost]
    has = {n: block.has(n).tolist() for n in names}
    for i in range(block.num_samples):
        rows = slice(atoms_ptr[i], atoms_ptr[i + 1])
        sample = AseSample(
            block.arrays["atomic_numbers"][rows],
            block.arrays["positions"][rows].astype(np.float64),
            np.zeros((3, 3)),
            np.zeros(3, dtype=bool),
        )
        for name in names:
            if name in ("atomic_numbers", "positions") or not has[name][i]:
                continue
            values = block.arrays[name]
            if name == "cell":
                sample.cell = values[i].astype(np.float64)
            elif name == "pbc":
                sample.pbc = values[i]
            elif name in _RESULTS:
                sample.results[name] = _result(
                    name, values[rows] if _atom(block, name) else values[i]
                )
            elif _atom(block, name):
                sample.arrays[name] = values[rows]
            else:
                sample.info[name] = _plain(name, values[i])
        yield sample


def _atom(block: Block, name: str) -> bool:
    return block.levels[name] == "atom"


def _result(name: str, value: Any) -> Any:
    if name == "energy":
        return float(value.reshape(()))
    if name == "stress":
        return np.asarray(value)[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]].astype(np.float64)
    return np.asarray(value)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    value = np.asarray(value)
    if value.dtype.kind in "OUST":
        return str(value)
    spec = FIELDS.get(name)
    if value.ndim == 0 or (spec is not None and spec.tail == (1,)):
        return value.reshape(()).item()
    return value

"""Single samples out of a ragged Dataset: small Datasets and ``ase.Atoms``.

Convenience for people and exports; batch work stays with the verbs that take
all samples at once. Samples are read many at a time, whatever one at a time
is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import Level
from alchemi_xr.data.csr import as_index
from alchemi_xr.errors import FieldError
from alchemi_xr.ragged.chunks import by_bytes, widest_rows
from alchemi_xr.ragged.conventions import DIMS, POINTER_NAMES, level_of, structure
from alchemi_xr.ragged.select import take

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["iter_samples", "to_atoms"]

READ_BYTES = 16 * 2**20

_CALCULATED = ("energy", "forces", "stress", "dipole", "charges")
_TAKEN = (
    "atomic_numbers",
    "positions",
    "cell",
    "pbc",
    "velocities",
    "momenta",
    "atomic_masses",
    *_CALCULATED,
)


def iter_samples(ds: xr.Dataset, *, max_bytes: int = READ_BYTES) -> Iterator[xr.Dataset]:
    """Each sample in turn, loaded; see ``RaggedAccessor.iter_samples``."""
    struct = structure(ds)
    loads = [struct.ptr(level) * size for level, size in widest_rows(ds).items() if size]
    start = 0
    for size in by_bytes(loads, max_bytes) if struct.num_samples else ():
        block = take(ds, struct, np.arange(start, start + size, dtype=np.int64)).load()
        yield from _split(block)
        start += size


def _split(block: xr.Dataset) -> Iterator[xr.Dataset]:
    struct = structure(block)
    levels: dict[Any, Level | None] = {n: level_of(v.dims) for n, v in block.variables.items()}
    names = [n for n in block.variables if n not in ("atoms_ptr", "edges_ptr", "sample_row")]
    coords = [n for n in names if n in block.coords]
    masks = {n: f"{n}_present" for n in names if f"{n}_present" in block.variables}
    for i in range(struct.num_samples):
        out: dict[Any, xr.Variable] = {}
        for name in names:
            if name in masks and not block.variables[masks[name]].values[i]:
                continue
            var, level = block.variables[name], levels[name]
            if level is None:
                out[name] = var
            elif level == "system":
                out[name] = var[{DIMS["system"]: i}]
            else:
                ptr = struct.ptr(level)
                out[name] = var[{DIMS[level]: slice(int(ptr[i]), int(ptr[i + 1]))}]
        for mask in masks.values():
            out.pop(mask, None)
        for name in ("num_atoms", "num_edges"):
            if name in out:
                attrs = {k: v for k, v in out[name].attrs.items() if k != "sample_dimension"}
                out[name] = xr.Variable((), out[name].values, attrs)
        yield xr.Dataset(
            {n: v for n, v in out.items() if n not in coords},
            {n: v for n, v in out.items() if n in coords},
            block.attrs,
        )


def to_atoms(ds: xr.Dataset, i: int) -> Atoms:
    """Sample ``i`` as ``ase.Atoms``; see ``RaggedAccessor.to_atoms``."""
    ase: Any = import_optional("ase", extra="ase", why="ds.ragged.to_atoms")
    struct = structure(ds)
    position = as_index([i], struct.num_samples, where="ds.ragged.to_atoms")
    for name in ("atomic_numbers", "positions"):
        if name not in ds.variables:
            raise FieldError("ds.ragged.to_atoms", f"there is no {name!r} in the Dataset")
    # Edges have no place in Atoms and are not read.
    edges = [n for n, v in ds.variables.items() if level_of(v.dims) == "edge"]
    one = take(ds.drop_vars(edges), struct, position).load()
    (sample,) = _split(one)
    values = {str(n): v.values for n, v in sample.variables.items() if n not in POINTER_NAMES}
    atoms: Any = ase.Atoms(
        numbers=values["atomic_numbers"],
        positions=values["positions"],
        cell=values.get("cell"),
        pbc=values.get("pbc", False),
    )
    if "atomic_masses" in values:
        atoms.set_masses(values["atomic_masses"])
    if "momenta" in values:
        atoms.set_momenta(values["momenta"])
    elif "velocities" in values:
        # Both sides count time in Å·√(amu/eV).
        atoms.set_velocities(values["velocities"])
    results = {n: values[n] for n in _CALCULATED if n in values}
    if results:
        atoms.calc = _single_point(atoms, results)
    for name, value in values.items():
        if name in _TAKEN:
            continue
        level = level_of(ds.variables[name].dims)
        if level == "atom":
            atoms.new_array(name, value)
        elif level == "system":
            atoms.info[name] = value if value.ndim else value.item()
    done: Atoms = atoms
    return done


def _single_point(atoms: Any, results: dict[str, Any]) -> Any:
    from ase import stress
    from ase.calculators import singlepoint

    voigt: Any = stress.full_3x3_to_voigt_6_stress
    calculator: Any = singlepoint.SinglePointCalculator
    if "energy" in results:
        results["energy"] = float(results["energy"])
    if "stress" in results:
        results["stress"] = voigt(results["stress"])
    return calculator(atoms, **results)

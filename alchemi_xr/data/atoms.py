"""Samples from and to ``ase.Atoms`` and pymatgen structures.

Only named tensors are made and read here; ``AtomicData`` is built above. ASE
is imported when atoms are written; pymatgen never is: its objects are read as
they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import Level, NDArray
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.data.level import from_numpy, to_numpy
from alchemi_xr.errors import FieldError

__all__ = ["atoms_of_fields", "atoms_of_structure", "fields_of_atoms", "full_tensor"]

_WHERE = "AtomicData.from_atoms"
# ASE property that holds each of our fields, in a calculator that has results.
_RESULTS = {
    "energy": "energy",
    "forces": "forces",
    "stress": "stress",
    "dipole": "dipole",
    "charges": "charges",
}
_PER_ATOM = ("forces", "charges")
_WHOLE = 0.01  # how far a sum of partial charges may be from a whole number, e


def full_tensor(values: Any, *, name: str, where: str = _WHERE) -> NDArray:
    """A symmetric tensor as [3, 3], from Voigt order (xx, yy, zz, yz, xz, xy), [9] or [3, 3].

    Raises
    ------
    FieldError

    Examples
    --------
    >>> full_tensor([1, 2, 3, 4, 5, 6], name="stress").astype(int).tolist()
    [[1, 6, 5], [6, 2, 4], [5, 4, 3]]
    """
    array = np.asarray(values, dtype=np.float64)
    if array.shape == (6,):
        return array[[0, 5, 4, 5, 1, 3, 4, 3, 2]].reshape(3, 3)
    if array.shape in ((9,), (3, 3), (1, 3, 3)):
        return array.reshape(3, 3)
    raise FieldError(
        where,
        f"field {name!r} is no 3 x 3 tensor",
        found=list(array.shape),
        expected="[6] (xx, yy, zz, yz, xz, xy), [9] or [3, 3]",
    )


def fields_of_atoms(
    atoms: Any,
    *,
    keys: Mapping[str, str],
    dtype: torch.dtype = torch.float32,
    z_table: Any = None,
) -> tuple[dict[str, Tensor], dict[str, Level], dict[str, Any]]:
    """Fields, levels of those outside the table, and the rest of ``atoms.info``.

    Parameters
    ----------
    atoms : ase.Atoms
    keys : dict of str to str
        Under which name ``info`` or ``arrays`` holds energy, forces, stress,
        virial, dipole and charges. What is not there is taken from the results
        of the calculator, if it has any for these very positions.
    dtype : torch.dtype
        Of all floating fields but the energy, which stays float64: a float32
        step at -1e5 eV is 8 meV.
    z_table : sequence of int, optional
        Atomic numbers in order (or an object with such ``zs``); gives one-hot
        ``node_attrs``.

    Raises
    ------
    FieldError
        A cell that spans no volume or is left-handed, a tensor that is none,
        or a total charge that is not whole.
    """
    numbers = np.asarray(atoms.numbers, dtype=np.int32)
    fields: dict[str, Any] = {
        "atomic_numbers": torch.tensor(numbers),
        "positions": torch.tensor(np.asarray(atoms.positions, dtype=np.float64)).to(dtype),
    }
    if np.any(atoms.pbc):
        fields["cell"] = torch.tensor(_checked_cell(atoms)).to(dtype)[None]
        fields["pbc"] = torch.tensor(np.asarray(atoms.pbc, dtype=bool))[None]
    if atoms.has("masses"):
        fields["atomic_masses"] = torch.tensor(np.asarray(atoms.get_masses())).to(dtype)
    if atoms.has("momenta"):
        # ASE keeps velocities in the same internal unit.
        fields["velocities"] = torch.tensor(np.asarray(atoms.get_velocities())).to(dtype)
    for name, key in keys.items():
        value = _lookup(atoms, name, key)
        if value is None:
            continue
        if name in ("stress", "virial"):
            value = full_tensor(value, name=name)[None]
        tensor = torch.tensor(np.asarray(value, dtype=np.float64))
        if name == "energy":
            fields[name] = tensor.reshape(1, 1)
        else:
            fields[name] = (tensor.reshape(1, 3) if name == "dipole" else tensor).to(dtype)
    charge = _total_charge(atoms, fields.get("charges"))
    if charge is not None:
        fields["charge"] = torch.tensor([[charge]], dtype=dtype)
    if "spin" in atoms.info and np.ndim(atoms.info["spin"]) == 0:
        fields["spin"] = torch.tensor([[float(atoms.info["spin"])]], dtype=dtype)
    if z_table is not None:
        fields["node_attrs"] = _one_hot(numbers, z_table).to(dtype)
    taken = {*keys.values(), "charge", "spin"}
    levels: dict[str, Level] = {}
    for name, array in atoms.arrays.items():
        if name in taken or name in ("numbers", "positions", "momenta", "masses"):
            continue
        target = resolve(name)
        if array.dtype.kind not in "biuf" or target in fields:
            continue
        spec = FIELDS.get(target)
        if spec is not None and spec.level != "atom":
            continue
        tensor = from_numpy(array.copy())
        fields[target] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if spec is None:
            levels[target] = "atom"
    info = {
        name: number
        for name, value in atoms.info.items()
        if name not in taken and (number := _info_tensor(value)) is not None
    }
    return fields, levels, info


def _checked_cell(atoms: Any) -> NDArray:
    cell = np.asarray(atoms.cell, dtype=np.float64)
    if np.linalg.matrix_rank(cell) < 3:
        lacking = (~cell.any(axis=1)) & np.asarray(atoms.pbc)
        if not lacking.any():
            # Only open directions have no vector: any vector will do there.
            cell = np.asarray(atoms.cell.complete(), dtype=np.float64)
    determinant = float(np.linalg.det(cell))
    if determinant <= 0.0:
        raise FieldError(
            _WHERE,
            "field 'cell' has a determinant that is not positive",
            found=f"{determinant:.6g} Å³ with pbc {list(map(bool, atoms.pbc))}",
            expected="a right-handed cell with a volume",
            mend="correct the lattice vectors, or set pbc=False",
        )
    return cell


def _lookup(atoms: Any, name: str, key: str) -> Any:
    home = atoms.arrays if name in _PER_ATOM else atoms.info
    if key in home:
        return home[key]
    if name in _RESULTS and atoms.calc is not None:
        results = getattr(atoms.calc, "results", {})
        # A calculator whose atoms have moved since holds the results of other positions.
        if results.get(_RESULTS[name]) is not None and not atoms.calc.check_state(atoms):
            return results[_RESULTS[name]]
    return None


def _total_charge(atoms: Any, charges: Tensor | None) -> float | None:
    if "charge" in atoms.info:
        charge = float(np.asarray(atoms.info["charge"]).reshape(()))
        if not charge.is_integer():
            raise FieldError(
                _WHERE, "info['charge'] is not whole", found=charge, expected="an integer, in e"
            )
        return charge
    if charges is None:
        return None
    total = float(charges.double().sum())
    if abs(total - round(total)) >= _WHOLE:
        raise FieldError(
            _WHERE,
            "the partial charges do not add up to a whole number",
            found=f"{total:.4f} e",
            expected=f"within {_WHOLE} of an integer",
            mend="set atoms.info['charge']",
        )
    return float(round(total))


def _one_hot(numbers: NDArray, z_table: Any) -> Tensor:
    known = np.asarray(list(getattr(z_table, "zs", z_table)))
    hit = numbers[:, None] == known[None, :]
    if not hit.any(axis=1).all():
        missing = sorted(set(numbers[~hit.any(axis=1)].tolist()))
        raise FieldError(
            _WHERE, "z_table lacks elements", found=missing, expected=f"among {known.tolist()}"
        )
    return torch.tensor(hit)


def _info_tensor(value: Any) -> Tensor | None:
    """A number or array of numbers as a tensor; text and bools have no place."""
    if isinstance(value, (str, bytes, bool, np.bool_, dict)) or value is None:
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # ragged nested lists
        return None
    return from_numpy(array.copy()) if array.dtype.kind in "iuf" else None


def atoms_of_fields(
    values: Mapping[str, Tensor], levels: Mapping[str, Level], info: Mapping[str, Any]
) -> Any:
    """An ``ase.Atoms`` of one sample's fields.

    Energy, forces, stress, dipole and charges become results of a
    ``SinglePointCalculator``; other atom fields go to ``arrays``, other system
    fields to ``info``; ASE has no place for edges.
    """
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator

    arrays = {name: to_numpy(value) for name, value in values.items()}
    atoms = Atoms(
        numbers=arrays.pop("atomic_numbers").astype(int),
        positions=arrays.pop("positions").astype(float),
        cell=arrays.pop("cell")[0].astype(float) if "cell" in arrays else None,
        pbc=arrays.pop("pbc")[0] if "pbc" in arrays else None,
        info={name: _plain(value) for name, value in info.items()},
    )
    if "atomic_masses" in arrays:
        atoms.set_masses(arrays.pop("atomic_masses").astype(float))
    if "velocities" in arrays:
        atoms.set_velocities(arrays.pop("velocities").astype(float))
    results: dict[str, Any] = {}
    for name, array in arrays.items():
        level = levels[name]
        if name == "energy":
            results[name] = float(array[0, 0])
        elif name in ("forces", "charges"):
            results[name] = array.astype(float)
        elif name == "dipole":
            results[name] = array[0].astype(float)
        elif name == "stress":
            results[name] = array[0].reshape(9)[[0, 4, 8, 5, 2, 1]].astype(float)
        elif level == "atom":
            atoms.set_array(name, array)
        elif level == "system":
            row = array[0]
            atoms.info[name] = row.item() if row.size == 1 else row
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        array = to_numpy(value)
        return array.item() if array.ndim == 0 else array
    return value


def atoms_of_structure(structure: Any) -> Any:
    """An ``ase.Atoms`` of a pymatgen ``Structure`` or ``Molecule``.

    Site properties become arrays, ``properties`` and the charge become info.

    Raises
    ------
    FieldError
        A site is disordered.
    """
    from ase import Atoms

    if not getattr(structure, "is_ordered", True):
        raise FieldError(
            "AtomicData.from_structure",
            "the structure has disordered sites",
            mend="order it first (pymatgen's OrderDisorderedStructureTransformation)",
        )
    lattice = getattr(structure, "lattice", None)
    atoms = Atoms(
        numbers=[site.specie.Z for site in structure],
        positions=np.asarray(structure.cart_coords, dtype=float),
        cell=None if lattice is None else np.asarray(lattice.matrix, dtype=float),
        pbc=False if lattice is None else getattr(lattice, "pbc", True),
    )
    for name, values in structure.site_properties.items():
        if any(value is None for value in values):
            continue
        array = np.asarray(values)
        if array.dtype.kind in "biuf":
            atoms.set_array(name, array)
    atoms.info.update(getattr(structure, "properties", None) or {})
    charge = getattr(structure, "_charge", None)
    if charge is not None:
        atoms.info.setdefault("charge", charge)
    return atoms

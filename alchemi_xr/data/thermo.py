"""Kinetic energy, temperature, pressure, virial and stress: one formula, one place.

Units are the project's: eV, Å, amu, K; velocities in Å·√(eV/(amu·Å²)), so that
½mv² is in eV. Stress is positive in tension, virial is -dE/dstrain, pressure is
positive under compression. NumPy arrays give NumPy arrays, tensors tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemi_xr.data.csr import validate_ptr
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.errors import FieldError
from alchemi_xr.units import KB

__all__ = [
    "kinetic_energy",
    "pressure",
    "stress_from_virial",
    "temperature",
    "virial_from_stress",
    "volume",
]


def _is_tensor(values: Any) -> bool:
    return hasattr(values, "detach")


def _segment_sum(values: Any, ptr: Any) -> Any:
    if _is_tensor(values):
        from alchemi_xr.data.kernels.segment import segment_reduce as reduce_tensor

        return reduce_tensor(values, ptr, "sum")
    return segment_reduce(values, ptr, "sum")


def kinetic_energy(velocities: Any, masses: Any, atoms_ptr: Any) -> Any:
    r"""Kinetic energy of every sample.

    .. math:: K_i = \frac{1}{2} \sum_{a \in i} m_a |v_a|^2

    Parameters
    ----------
    velocities : float array or tensor, [V, 3], Å·√(eV/(amu·Å²))
    masses : float array or tensor, [V], amu
    atoms_ptr : int64 array or tensor, [N + 1]

    Returns
    -------
    float array or tensor, [N], eV

    Raises
    ------
    FieldError
        ``atoms_ptr`` does not end at ``V``.

    Examples
    --------
    >>> kinetic_energy(np.array([[1.0, 0.0, 0.0]]), np.array([2.0]), np.array([0, 1, 1]))
    array([1., 0.])
    """
    if not _is_tensor(velocities):
        velocities, masses = np.asarray(velocities), np.asarray(masses)
        validate_ptr(np.asarray(atoms_ptr), rows=len(masses), where="kinetic_energy")
    if velocities.shape != (len(masses), 3):
        raise FieldError(
            "kinetic_energy",
            "velocities do not fit the masses",
            found=list(velocities.shape),
            expected=f"[{len(masses)}, 3]",
        )
    return _segment_sum(0.5 * masses * (velocities**2).sum(1), atoms_ptr)


def temperature(velocities: Any, masses: Any, atoms_ptr: Any, *, dof: Any = None) -> Any:
    r"""Kinetic temperature of every sample.

    .. math:: T_i = \frac{2 K_i}{f_i k_B}

    Parameters
    ----------
    velocities : float array or tensor, [V, 3], Å·√(eV/(amu·Å²))
    masses : float array or tensor, [V], amu
    atoms_ptr : int64 array or tensor, [N + 1]
    dof : int array or tensor, [N], optional
        Degrees of freedom ``f``; by default 3 per atom (nothing constrained).

    Returns
    -------
    float array or tensor, [N], K
        NaN for a sample with no degree of freedom.

    References
    ----------
    .. [1] M. P. Allen and D. J. Tildesley, *Computer Simulation of Liquids*, 2nd ed. (2017), sec. 2.4.

    Examples
    --------
    >>> v, m = np.array([[0.0254513, 0.0, 0.0]]), np.array([39.948])
    >>> temperature(v, m, np.array([0, 1, 1])).round(1)
    array([100.1,   nan])
    """
    twice = 2.0 * kinetic_energy(velocities, masses, atoms_ptr)
    freedom = 3 * (atoms_ptr[1:] - atoms_ptr[:-1]) if dof is None else dof
    if _is_tensor(twice):
        bottom = freedom.to(twice.dtype) if _is_tensor(freedom) else freedom
        return twice / (bottom * KB)
    with np.errstate(invalid="ignore", divide="ignore"):
        return twice / (np.asarray(freedom) * KB)


def volume(cell: Any) -> Any:
    """Volume of every cell, [N], Å³ (the size of the determinant).

    Parameters
    ----------
    cell : float array or tensor, [N, 3, 3], Å
        Lattice vectors as rows.
    """
    if _is_tensor(cell):
        return cell.det().abs()
    return np.abs(np.linalg.det(cell))


def pressure(stress: Any, *, kinetic: Any = None, cell: Any = None) -> Any:
    r"""Pressure of every sample, positive under compression.

    .. math:: p = -\frac{1}{3} \mathrm{tr}\,\sigma + \frac{2 K}{3 V}

    Parameters
    ----------
    stress : float array or tensor, [N, 3, 3], eV/Å³
        Positive in tension, without the kinetic part.
    kinetic : float array or tensor, [N], eV, optional
        Kinetic energy; by default the pressure of the forces alone.
    cell : float array or tensor, [N, 3, 3], Å
        Needed with ``kinetic``.

    Returns
    -------
    float array or tensor, [N], eV/Å³

    Raises
    ------
    FieldError
        ``kinetic`` without ``cell``.

    Examples
    --------
    >>> pressure(-0.25 * np.eye(3)[None])
    array([0.25])
    """
    static = -(stress[:, 0, 0] + stress[:, 1, 1] + stress[:, 2, 2]) / 3.0
    if kinetic is None:
        return static
    if cell is None:
        raise FieldError("pressure", "the kinetic part needs the cell", mend="pressure(..., cell=)")
    return static + 2.0 * kinetic / (3.0 * volume(cell))


def stress_from_virial(virial: Any, cell: Any) -> Any:
    """Stress of every sample from its virial: -W/V, positive in tension.

    Parameters
    ----------
    virial : float array or tensor, [N, 3, 3], eV
        -dE/dstrain.
    cell : float array or tensor, [N, 3, 3], Å

    Returns
    -------
    float array or tensor, [N, 3, 3], eV/Å³

    Examples
    --------
    >>> stress_from_virial(-8.0 * np.eye(3)[None], 2.0 * np.eye(3)[None])[0, 0]
    array([1., 0., 0.])
    """
    return 0.0 - virial / volume(cell)[:, None, None]


def virial_from_stress(stress: Any, cell: Any) -> Any:
    """Virial of every sample from its stress: -V times the stress.

    Parameters
    ----------
    stress : float array or tensor, [N, 3, 3], eV/Å³
    cell : float array or tensor, [N, 3, 3], Å

    Returns
    -------
    float array or tensor, [N, 3, 3], eV
    """
    return 0.0 - stress * volume(cell)[:, None, None]

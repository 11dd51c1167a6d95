"""Lennard-Jones sums over a neighbour matrix, one thread an atom.

Written once for float32 and float64; a dtype is compiled when it is first
used. No atom writes to another's row (but for half lists), so a sum does not
depend on how threads are scheduled.
"""

# mypy: ignore-errors
# Warp's annotations are values made at run time, which no type checker follows.

from __future__ import annotations

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from alchemi_xr.data.kernels._warp import start_warp, stream_of

__all__ = ["lennard_jones"]

_SCALARS = {torch.float32: wp.float32, torch.float64: wp.float64}


@functools.cache
def _kernel(dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    start_warp()
    scalar = _SCALARS[dtype]
    vec3 = wp.types.vector(length=3, dtype=scalar)
    mat33 = wp.types.matrix(shape=(3, 3), dtype=scalar)

    @wp.kernel(enable_backward=False, module="unique")
    def lj_pairs(
        positions: wp.array(dtype=vec3),
        cell: wp.array(dtype=mat33),
        system: wp.array(dtype=wp.int32),
        neighbors: wp.array(dtype=wp.int32, ndim=2),
        shifts: wp.array(dtype=wp.vec3i, ndim=2),
        counts: wp.array(dtype=wp.int32),
        epsilon: scalar,
        sigma: scalar,
        cutoff: scalar,
        width: scalar,
        offset: scalar,
        half: wp.int32,
        wants_strain: wp.int32,
        energy: wp.array(dtype=scalar),
        forces: wp.array(dtype=vec3),
        strain: wp.array(dtype=mat33),
    ):
        i = wp.tid()
        xi = positions[i]
        lattice = cell[system[i]]
        energy_i = scalar(0.0)
        force_i = vec3(scalar(0.0), scalar(0.0), scalar(0.0))
        strain_i = mat33(
            scalar(0.0), scalar(0.0), scalar(0.0),
            scalar(0.0), scalar(0.0), scalar(0.0),
            scalar(0.0), scalar(0.0), scalar(0.0),
        )  # fmt: skip
        # In a full list every pair is met from both ends: each end owns half of it.
        share = scalar(0.5)
        if half != 0:
            share = scalar(1.0)
        for slot in range(counts[i]):
            j = neighbors[i, slot]
            s = shifts[i, slot]
            rij = positions[j] - xi
            # An open system's cell may be NaN: it is not touched unless an image is.
            if s[0] != 0 or s[1] != 0 or s[2] != 0:
                image = vec3(scalar(s[0]), scalar(s[1]), scalar(s[2]))
                rij = rij + wp.transpose(lattice) * image
            r = wp.length(rij)
            # A NaN position is not beyond the cutoff: its system's energy becomes NaN.
            if not (r >= cutoff):
                ratio = sigma / r
                s2 = ratio * ratio
                s6 = s2 * s2 * s2
                u = scalar(4.0) * epsilon * (s6 * s6 - s6) - offset
                du = -scalar(24.0) * epsilon * (scalar(2.0) * s6 * s6 - s6) / r
                if r > cutoff - width:
                    x = (r - cutoff + width) / width
                    x2 = x * x
                    smooth = scalar(1.0) + x2 * x * (
                        scalar(-10.0) + scalar(15.0) * x - scalar(6.0) * x2
                    )
                    slope = scalar(-30.0) * x2 * (scalar(1.0) - scalar(2.0) * x + x2) / width
                    du = du * smooth + u * slope
                    u = u * smooth
                energy_i += share * u
                pull = rij * (du / r)
                force_i += pull
                if half != 0:
                    wp.atomic_sub(forces, j, pull)
                if wants_strain != 0:
                    strain_i += wp.outer(rij, pull) * share
        energy[i] = energy_i
        if half != 0:
            wp.atomic_add(forces, i, force_i)
        else:
            forces[i] = force_i
        if wants_strain != 0:
            strain[i] = strain_i

    return lj_pairs, scalar, vec3, mat33


def lennard_jones(
    positions: Tensor,
    cell: Tensor,
    system: Tensor,
    neighbors: Tensor,
    shifts: Tensor,
    counts: Tensor,
    *,
    epsilon: float,
    sigma: float,
    cutoff: float,
    width: float,
    offset: float,
    half: bool,
    wants_strain: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Energy, force and strain derivative of every atom.

    .. math:: u(r) = \left(4\epsilon\left[(\sigma/r)^{12} - (\sigma/r)^6\right]
        - u_0\right) S(r)

    Parameters
    ----------
    positions : float32 or float64 tensor, [V, 3]
    cell : float tensor, [B, 3, 3]
        Of the same dtype; used only where a pair crosses to another image.
    system : int32 tensor, [V]
    neighbors, shifts, counts
        See `alchemi_xr.data.neighbors.NeighborMatrix`.
    offset : float
        :math:`u_0`, eV.

    Returns
    -------
    energy : [V], eV
    forces : [V, 3], eV/Å
    strain : [V, 3, 3], eV, or None
        :math:`\partial E / \partial \varepsilon`, each atom's share.
    """
    kernel, scalar, vec3, mat33 = _kernel(positions.dtype)
    atoms = len(positions)
    energy = positions.new_zeros(atoms)
    forces = positions.new_zeros((atoms, 3))
    strain = positions.new_zeros((atoms if wants_strain else 1, 3, 3))
    if atoms == 0:
        return energy, forces, strain[:0] if wants_strain else None

    def view(tensor: Tensor, dtype: Any) -> Any:
        return wp.from_torch(tensor.contiguous(), dtype=dtype, requires_grad=False)

    wp.launch(
        kernel,
        dim=atoms,
        inputs=[
            view(positions, vec3),
            view(cell, mat33),
            view(system, wp.int32),
            view(neighbors, wp.int32),
            view(shifts, wp.vec3i),
            view(counts, wp.int32),
            *(scalar(v) for v in (epsilon, sigma, cutoff, width, offset)),
            int(half),
            int(wants_strain),
        ],
        outputs=[view(energy, scalar), view(forces, vec3), view(strain, mat33)],
        device=wp.device_from_torch(positions.device),
        # The launch must wait for torch's work, and torch for it.
        stream=stream_of(positions.device),
    )
    return energy, forces, strain if wants_strain else None

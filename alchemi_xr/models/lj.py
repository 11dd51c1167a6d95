"""The Lennard-Jones potential, in Warp kernels on CPU and CUDA."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from alchemi_xr.data.neighbors import NeighborMatrix, VerletList
from alchemi_xr.errors import ConfigError
from alchemi_xr.models.base import BaseModelMixin, ModelConfig, NeighborConfig, NeighborListFormat

__all__ = ["LennardJonesModel", "LennardJonesModelWrapper"]


class LennardJonesModel(nn.Module, BaseModelMixin):
    r"""Lennard-Jones pairs, every system with its own periodicity.

    .. math:: u(r) = \left(4\epsilon\left[(\sigma/r)^{12} - (\sigma/r)^6\right]
        - u_0\right) S(r), \qquad r < r_c

    where :math:`S` falls smoothly from 1 to 0 over the last ``switch_width`` Å,

    .. math:: S = 1 - 10x^3 + 15x^4 - 6x^5, \qquad x = (r - r_c + w) / w

    (two derivatives continuous), or is 1 everywhere for ``switch_width=0``.

    Parameters
    ----------
    epsilon : float
        Depth of the well, eV.
    sigma : float
        Where the pair energy is zero, Å.
    cutoff : float
        :math:`r_c`, Å.
    switch_width : float
        :math:`w`, Å, at most the cutoff.
    half_list : bool
        Work on a list that holds each pair once. The result is the same; on
        CUDA the order of its sums is then not reproducible.
    skin : float
        Å beyond the cutoff out to which neighbours are listed, so that the list
        serves until an atom has moved half of it.
    shift : bool
        Lower the pair energy by its value at the cutoff (:math:`u_0`), so that
        it has no jump there; forces are unchanged (without a switch).

    Raises
    ------
    ConfigError
        A parameter is not a length or energy of the right sign.

    Notes
    -----
    Neighbours are found here, on demand; a `NeighborListHook` in the simulation
    shares its list where that covers the atoms as they stand. The outputs are
    ``energy`` and ``forces``, and ``stress`` after
    ``set_config("active_outputs", {"energy", "forces", "stress"})``; the stress
    of a system without any periodic axis is NaN.

    References
    ----------
    .. [1] M. P. Allen and D. J. Tildesley, *Computer Simulation of Liquids*, 2nd ed. (2017), sec. 1.3.
    """

    def __init__(
        self,
        epsilon: float,
        sigma: float,
        cutoff: float,
        switch_width: float = 0.0,
        half_list: bool = False,
        *,
        skin: float = 0.0,
        shift: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("epsilon", epsilon), ("sigma", sigma), ("cutoff", cutoff)):
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError("LennardJonesModel", f"{name} must be positive", found=value)
        if not 0.0 <= switch_width <= cutoff:
            raise ConfigError(
                "LennardJonesModel",
                "switch_width is outside the cutoff",
                found=switch_width,
                expected=f"0 to {cutoff} Å",
            )
        self.epsilon = float(epsilon)
        self.sigma = float(sigma)
        self.cutoff = float(cutoff)
        self.switch_width = float(switch_width)
        self.half_list = bool(half_list)
        s6 = (self.sigma / self.cutoff) ** 6
        self._offset = 4.0 * self.epsilon * (s6 * s6 - s6) if shift else 0.0
        self.model_config = ModelConfig(
            outputs={"energy", "forces", "stress"},
            optional_inputs={"cell", "pbc"},
            supports_pbc=True,
            neighbor_config=NeighborConfig(
                cutoff, NeighborListFormat.MATRIX, half_list=half_list, skin=skin
            ),
            active_outputs={"energy", "forces"},
        )
        self._neighbors = VerletList(self.cutoff, skin=skin, half=self.half_list)

    def forward(self, data: Any, **kwargs: Any) -> OrderedDict[str, Tensor]:
        """Energy [B, 1] eV, forces [V, 3] eV/Å and, when active, stress [B, 3, 3] eV/Å³.

        They have the dtype of the positions (float32 for half precision).
        """
        from alchemi_xr.models._lj_kernels import lennard_jones

        data = as_batch(data)
        self.adapt_input(data)
        active = self.output_data()
        positions = data.positions.detach()
        if positions.dtype not in (torch.float32, torch.float64):
            positions = positions.float()
        matrix = self._neighbor_matrix(data)
        cell = data["cell"].detach().to(positions.dtype) if "cell" in data else None
        energy, forces, strain = lennard_jones(
            positions,
            positions.new_zeros((data.num_graphs, 3, 3)) if cell is None else cell,
            data.batch_idx.to(torch.int32),
            matrix.neighbors,
            matrix.shifts,
            matrix.counts,
            epsilon=self.epsilon,
            sigma=self.sigma,
            cutoff=self.cutoff,
            width=self.switch_width,
            offset=self._offset,
            half=matrix.half,
            wants_strain="stress" in active,
        )
        output = {"energy": _per_system(energy, data), "forces": forces}
        if strain is not None:
            output["stress"] = _stress(_per_system(strain, data), cell, data)
        return self.adapt_output(output, data)

    def _neighbor_matrix(self, data: Any) -> NeighborMatrix:
        shared = getattr(data, "neighbor_table", None)
        if isinstance(shared, VerletList) and shared.half == self.half_list:
            found = shared.at_hand(data, self.cutoff)
            if found is not None:
                return found
        return self._neighbors.matrix(data)


def as_batch(data: Any) -> Any:
    """A batch as it is; one sample as a batch of one."""
    if hasattr(data, "batch_idx"):
        return data
    from alchemi_xr.data.batch import Batch

    return Batch.from_data_list([data])


def _per_system(values: Tensor, data: Any) -> Tensor:
    """Sums over the atoms of each system, in float64 on the way."""
    from alchemi_xr.data.kernels.segment import segment_reduce

    return segment_reduce(values.double(), data.atoms_ptr, "sum").to(values.dtype)


def _stress(strain: Tensor, cell: Tensor | None, data: Any) -> Tensor:
    """Stress dE/dε / V, positive in tension; NaN where there is no periodic axis."""
    nothing = torch.full_like(strain, torch.nan)
    if cell is None or "pbc" not in data:
        return nothing
    volume = torch.linalg.det(cell.double()).abs().to(strain.dtype)
    periodic = data["pbc"].any(dim=1) & (volume > 0.0)
    return torch.where(periodic[:, None, None], strain / volume[:, None, None], nothing)


LennardJonesModelWrapper = LennardJonesModel

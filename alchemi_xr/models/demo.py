"""A small model with untrained weights, for trying things out and for tests.

It is smooth, has exact forces, costs next to nothing and binds every system to
its own centre, so that a relaxation ends. It says nothing about chemistry.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from alchemi_xr.errors import ConfigError, ModelError
from alchemi_xr.models.base import BaseModelMixin, ModelConfig

__all__ = ["DemoModel", "DemoModelWrapper"]

_NUM_RADIAL = 8
_TETHER = 0.05  # eV/Å²; keeps atoms from drifting away where the network is flat


class DemoModel(nn.Module):
    r"""Energy of each system from its atoms' kinds and distances to their centre.

    .. math:: E = \sum_a f_\theta(z_a, g(d_a^2)) + \tfrac{1}{2} k \, d_a^2,
        \qquad d_a = |x_a - \bar x|

    with Gaussians :math:`g` of :math:`d^2`: invariant to moving, turning and
    renumbering, and smooth also at :math:`d = 0`.

    Parameters
    ----------
    num_atom_types : int
        One above the largest atomic number.
    hidden_dim : int
        Width of the network and of its embeddings.
    seed : int, optional
        Of the weights; by default they come from torch's global generator.

    Raises
    ------
    ConfigError
        A size is below 1.
    """

    def __init__(
        self, num_atom_types: int = 100, hidden_dim: int = 64, *, seed: int | None = None
    ) -> None:
        super().__init__()
        if num_atom_types < 1 or hidden_dim < 1:
            raise ConfigError(
                "DemoModel",
                "sizes start at 1",
                found=f"num_atom_types={num_atom_types}, hidden_dim={hidden_dim}",
            )
        self.num_atom_types = num_atom_types
        self.hidden_dim = hidden_dim
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            self.embedding = nn.Embedding(num_atom_types, hidden_dim)
            self.radial = nn.Linear(_NUM_RADIAL, hidden_dim)
            self.hidden = nn.Linear(hidden_dim, hidden_dim)
            self.readout = nn.Linear(hidden_dim, 1)
        self.register_buffer("widths", torch.linspace(1.0, 6.0, _NUM_RADIAL))

    def node_embeddings(self, atomic_numbers: Tensor, square_distance: Tensor) -> Tensor:
        """Features of every atom, float [V, hidden_dim]."""
        widths: Tensor = self.get_buffer("widths").to(square_distance.dtype)
        gaussians = torch.exp(-square_distance[:, None] / (2.0 * widths**2))
        try:
            kind = self.embedding(atomic_numbers.long())
        except IndexError:  # CPU only; a device says so itself, and looking there would wait for it
            raise ModelError(
                "DemoModel",
                "the batch has an element that the model does not know",
                found=int(atomic_numbers.max()),
                expected=f"0 to {self.num_atom_types - 1}",
                mend="DemoModel(num_atom_types=...)",
            ) from None
        return torch.nn.functional.silu(self.hidden(torch.tanh(kind * self.radial(gaussians))))

    def forward(
        self,
        atomic_numbers: Tensor,
        positions: Tensor,
        system: Tensor,
        num_systems: int,
    ) -> dict[str, Tensor]:
        """Energy [B, 1] and the embeddings it was made from."""
        square = square_distance_to_centre(positions, system, num_systems)
        nodes = self.node_embeddings(atomic_numbers, square)
        per_atom = self.readout(nodes)[:, 0] + 0.5 * _TETHER * square
        energy = per_atom.new_zeros(num_systems).index_add(0, system, per_atom)
        return {"energy": energy[:, None], "node_embeddings": nodes}


def square_distance_to_centre(positions: Tensor, system: Tensor, num_systems: int) -> Tensor:
    """Square distance of each atom to the mean position of its system, [V]."""
    ones = torch.ones(len(positions), dtype=positions.dtype, device=positions.device)
    count = ones.new_zeros(num_systems).index_add(0, system, ones).clamp(min=1.0)
    total = positions.new_zeros((num_systems, 3)).index_add(0, system, positions)
    centre = total / count[:, None]
    return (positions - centre[system]).square().sum(dim=1)


class DemoModelWrapper(nn.Module, BaseModelMixin):
    """`DemoModel` as a model of the project: energy, and forces by autograd.

    Parameters
    ----------
    model : DemoModel, optional
        By default one whose weights are the same in every process, so that
        workers agree with one another.

    Notes
    -----
    It computes in the dtype of its weights and gives its outputs in it. It
    starts in evaluation mode, where outputs carry no graph; after ``train()``
    they can be differentiated with respect to the weights, forces too.
    """

    def __init__(self, model: DemoModel | None = None) -> None:
        super().__init__()
        self.model = DemoModel(seed=0) if model is None else model
        self.model_config = ModelConfig(
            outputs={"energy", "forces"},
            autograd_outputs={"forces"},
            autograd_inputs={"positions"},
            active_outputs={"energy", "forces"},
        )
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Both embeddings are ``hidden_dim`` wide."""
        width = (self.model.hidden_dim,)
        return {"node_embeddings": width, "graph_embeddings": width}

    def adapt_input(self, data: Any, **kwargs: Any) -> dict[str, Any]:
        """Positions in the dtype of the weights, and the system of each atom."""
        inputs = super().adapt_input(data, **kwargs)
        system, count = systems_of(data)
        return {
            "atomic_numbers": inputs["atomic_numbers"],
            "positions": inputs["positions"].to(self.dtype),
            "system": system,
            "num_systems": count,
        }

    def forward(self, data: Any, **kwargs: Any) -> OrderedDict[str, Tensor]:
        """Energy [B, 1] in eV and, unless switched off, forces [V, 3] in eV/Å."""
        inputs = self.adapt_input(data, **kwargs)
        wants_forces = "forces" in self.output_data()
        # A training loop may ask for gradients of the forces; a simulation never does.
        training = self.training and torch.is_grad_enabled()
        with torch.enable_grad():
            if wants_forces and not inputs["positions"].requires_grad:
                inputs["positions"] = inputs["positions"].detach().requires_grad_(True)
            output = self.model(**inputs)
            if wants_forces:
                (gradient,) = torch.autograd.grad(
                    output["energy"].sum(),
                    inputs["positions"],
                    create_graph=training,
                    retain_graph=training,
                )
                output["forces"] = -gradient
        if not training:
            output = {name: value.detach() for name, value in output.items()}
        return self.adapt_output(output, data)

    def compute_embeddings(self, data: Any, **kwargs: Any) -> Any:
        """The data with ``node_embeddings`` and ``graph_embeddings`` (their sums)."""
        inputs = self.adapt_input(data, **kwargs)
        nodes = self.model(**inputs)["node_embeddings"].detach()
        graphs = nodes.new_zeros((inputs["num_systems"], nodes.shape[1]))
        data["node_embeddings"] = nodes
        data["graph_embeddings"] = graphs.index_add(0, inputs["system"], nodes)
        return data


def systems_of(data: Any) -> tuple[Tensor, int]:
    """System of each atom, int64 [V], and how many systems there are."""
    if hasattr(data, "batch_idx"):
        return data.batch_idx.long(), int(data.num_graphs)
    zeros = torch.zeros(len(data.positions), dtype=torch.int64, device=data.positions.device)
    return zeros, 1

"""Small models and datasets that the tests of this room share, as fixtures."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.models.base import BaseModelMixin, ModelConfig


class SpringModel(nn.Module, BaseModelMixin):
    """Each atom on a spring of its own: exact, and blind to its neighbours in a batch."""

    def __init__(self, k: float = 1.0, outputs=("energy", "forces")) -> None:
        super().__init__()
        self.k = k
        self.calls = 0
        self.model_config = ModelConfig(outputs=set(outputs), active_outputs=set(outputs))

    def forward(self, batch):
        self.calls += 1
        x = batch["positions"]
        per_atom = 0.5 * self.k * x.square().sum(dim=1)
        energy = x.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx.long(), per_atom)
        every = OrderedDict(energy=energy[:, None], forces=-self.k * x)
        return OrderedDict((k, v) for k, v in every.items() if k in self.model_config.outputs)


class ListDataset:
    """The least that a sampler needs: no batch read."""

    def __init__(self, samples) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index], {"index": index}

    def get_metadata(self, index):
        return self.samples[index].num_nodes, self.samples[index].num_edges


class Recorder:
    """A hook that notes when it fires."""

    read_only = True

    def __init__(self, stage, log, name="", frequency=1, act=None) -> None:
        self.stage, self.log, self.name, self.frequency, self.act = stage, log, name, frequency, act

    def __call__(self, ctx, stage) -> None:
        self.log.append((ctx.step_count, self.name, stage.name))
        if self.act is not None:
            self.act(ctx)


def atoms(n: int, seed: int, scale: float = 1.0, dtype=torch.float64, **fields) -> AtomicData:
    generator = torch.Generator().manual_seed(seed)
    return AtomicData(
        atomic_numbers=torch.full((n,), 18),
        positions=scale * torch.randn(n, 3, dtype=dtype, generator=generator),
        **fields,
    )


def systems(sizes, scale: float = 1.0) -> Batch:
    return Batch.from_data_list([atoms(n, i, scale) for i, n in enumerate(sizes)])


@pytest.fixture
def kit() -> SimpleNamespace:
    """Makers: SpringModel, ListDataset, Recorder, atoms, systems."""
    return SimpleNamespace(
        SpringModel=SpringModel,
        ListDataset=ListDataset,
        Recorder=Recorder,
        atoms=atoms,
        systems=systems,
    )

"""Shared by the tests of models: compiled kernels, systems of every kind."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _warm_warp() -> None:
    """Compile the kernels once, outside of any test's time."""
    from alchemi_xr.data import AtomicData, Batch
    from alchemi_xr.models.lj import LennardJonesModel

    for dtype in (torch.float32, torch.float64):
        pair = torch.tensor([[0.0, 0.0, 0.0], [3.8, 0.0, 0.0]], dtype=dtype)
        data = AtomicData(atomic_numbers=torch.full((2,), 18), positions=pair)
        LennardJonesModel(0.01, 3.4, 8.0)(Batch.from_data_list([data]))

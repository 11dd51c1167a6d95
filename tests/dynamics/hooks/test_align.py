"""Cells in standard form: against ASE's, and what must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ase.cell import Cell
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.dynamics import DemoDynamics, DynamicsContext, DynamicsStage
from alchemi_xr.dynamics.hooks import AlignCellHook
from alchemi_xr.dynamics.optimizers import FIRE
from alchemi_xr.errors import FieldError
from alchemi_xr.models.demo import DemoModel, DemoModelWrapper
from alchemi_xr.models.lj import LennardJonesModel


def random_cell(rng: np.random.Generator, handed: int = 1) -> np.ndarray:
    cell = 5.0 * np.eye(3) + rng.uniform(-1.5, 1.5, (3, 3))
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    cell = cell @ turn
    return cell if np.linalg.det(cell) * handed > 0 else cell[[1, 0, 2]]


def sample(
    cell: Any = None, pbc: Any = True, seed: int = 0, dtype: torch.dtype = torch.float64
) -> AtomicData:
    rng = np.random.default_rng(seed)
    fields: dict[str, Any] = {}
    if cell is not None:
        fields = {"cell": torch.tensor(np.asarray(cell), dtype=dtype)[None], "pbc": pbc}
    return AtomicData(
        atomic_numbers=torch.full((4,), 18),
        positions=torch.tensor(rng.uniform(0, 8, (4, 3)), dtype=dtype),
        velocities=torch.tensor(rng.normal(scale=0.01, size=(4, 3)), dtype=dtype),
        **fields,
    )


def align(batch: Batch, **options: Any) -> Batch:
    AlignCellHook()(DynamicsContext(batch=batch, **options), DynamicsStage.BEFORE_STEP)
    return batch


def argon() -> LennardJonesModel:
    model = LennardJonesModel(0.0104, 3.4, 6.0)
    model.set_config("active_outputs", {"energy", "forces", "stress"})
    return model


@given(seed=st.integers(0, 10_000), count=st.integers(1, 4))
def test_cells_are_those_of_ase(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    cells = [random_cell(rng) for _ in range(count)]
    batch = align(Batch.from_data_list([sample(c, seed=k) for k, c in enumerate(cells)]))
    for k, cell in enumerate(cells):
        expected, turn = Cell(cell).standard_form("lower")
        np.testing.assert_allclose(batch.cell[k], expected.array, atol=1e-12)
        rows = slice(4 * k, 4 * k + 4)
        start = sample(cell, seed=k)
        for name in ("positions", "velocities"):
            np.testing.assert_allclose(
                batch[name][rows], start[name].numpy() @ turn.T, rtol=0, atol=1e-12
            )
    assert torch.equal(batch.cell, batch.cell.tril())


@pytest.mark.parametrize("handed", [1, -1])
def test_physics_turns_along(handed: int) -> None:
    """What the model says of the turned system is what was turned with it."""
    cell = random_cell(np.random.default_rng(3), handed)
    batch = Batch.from_data_list([sample(cell), sample(), sample(cell, [True, True, False])])
    outputs = argon()(batch)
    for name, value in outputs.items():
        batch[name] = value.clone()
    fractional = batch.positions[:4] @ torch.linalg.inv(batch.cell[0])
    align(batch)
    again = argon()(batch)
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(batch[name], again[name], rtol=1e-9, atol=1e-9, equal_nan=True)
    torch.testing.assert_close(
        batch.positions[:4] @ torch.linalg.inv(batch.cell[0]), fractional, rtol=1e-10, atol=1e-10
    )
    assert float(torch.linalg.det(batch.cell[0])) * handed > 0
    assert float(batch.cell[0, 2, 2]) * handed > 0


def test_edges_dipoles_and_virials_turn_along() -> None:
    rng = np.random.default_rng(5)
    data = sample(random_cell(rng))
    images = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    data.neighbor_list = torch.tensor([[0, 1]])
    data.neighbor_list_shifts = images
    data.shifts = images @ data.cell[0]
    data.dipole = data.positions[:1]
    data.virial = data.positions[:1, :, None] * data.positions[:1, None, :]
    batch = align(Batch.from_data_list([sample(), data]))
    torch.testing.assert_close(batch.shifts, images @ batch.cell[1])
    torch.testing.assert_close(batch.dipole[1], batch.positions[4])
    torch.testing.assert_close(
        batch.virial[1], batch.positions[4, :, None] * batch.positions[4, None, :]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "pbc", [True, [True, True, False], [False, True, True], [True, False, True]]
)
@pytest.mark.parametrize("zero", [False, True])
def test_a_second_time_changes_no_bit(dtype: torch.dtype, pbc: Any, zero: bool) -> None:
    """Also where an open axis has no vector, or one that is not at right angles."""
    cell = random_cell(np.random.default_rng(8))
    if zero and pbc is not True:
        cell[pbc.index(False)] = 0.0
    once = align(Batch.from_data_list([sample(cell, pbc, dtype=dtype)]))
    assert once.positions.dtype == once.cell.dtype == dtype
    assert not torch.equal(once.positions, sample(cell, pbc, dtype=dtype).positions)
    twice = align(once.clone())
    assert torch.equal(once.positions, twice.positions)
    assert torch.equal(once.cell, twice.cell)
    lengths = torch.linalg.vector_norm(once.cell[0].double(), dim=1)
    np.testing.assert_allclose(lengths, np.linalg.norm(cell, axis=1), rtol=1e-6)


def test_open_systems_and_other_stages_stay() -> None:
    cell = random_cell(np.random.default_rng(9))
    batch = Batch.from_data_list([sample(cell), sample(cell, False), sample(), sample(cell)])
    start = batch.clone()
    align(batch, status_mask=torch.tensor([True, True, True, False]))
    assert not torch.equal(batch.positions[:4], start.positions[:4])
    assert torch.equal(batch.positions[4:], start.positions[4:])
    assert torch.equal(batch.cell[[1, 3]], start.cell[[1, 3]])
    open_ = Batch.from_data_list([sample(), sample()])
    assert torch.equal(align(open_.clone()).positions, open_.positions)


def test_other_dtypes_and_flat_cells_are_refused() -> None:
    half = Batch.from_data_list([sample(np.eye(3))]).to(dtype=torch.float16)
    with pytest.raises(TypeError, match=r"float16.*float32 or torch.float64"):
        align(half)
    with pytest.raises(FieldError, match=r"system 0.*no volume"):
        align(Batch.from_data_list([sample(np.diag([1.0, 1.0, 0.0]))]))


@pytest.mark.parametrize("engine", [FIRE, DemoDynamics])
def test_a_run_goes_the_same_way_turned(engine: Any) -> None:
    cell = random_cell(np.random.default_rng(4))
    batch = Batch.from_data_list([sample(cell), sample()])
    turned = align(batch.clone())
    model = DemoModelWrapper(DemoModel(seed=1).double())
    engine(model, n_steps=5, hooks=[AlignCellHook()]).run(batch)
    engine(model, n_steps=5).run(turned)
    torch.testing.assert_close(batch.positions, turned.positions, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(batch.energy, turned.energy)

"""Criteria: reductions, levels, derived fields, what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.dynamics import ConvergenceHook, DemoDynamics, DynamicsContext, DynamicsStage
from alchemi_xr.errors import ConfigError


def batch_of(sizes, forces=None):
    batch = Batch.from_data_list(
        [
            AtomicData(atomic_numbers=torch.full((n,), 18), positions=torch.zeros(n, 3).double())
            for n in sizes
        ]
    )
    if forces is not None:
        batch["forces"] = torch.as_tensor(forces, dtype=torch.float64)
    return batch


def slow_fmax(forces, sizes):
    ends = np.cumsum(sizes)
    return [
        max((np.linalg.norm(row) for row in forces[e - n : e]), default=0.0)
        for n, e in zip(sizes, ends, strict=True)
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2**31))
def test_fmax_equals_a_slow_loop(sizes, seed):
    forces = np.random.default_rng(seed).normal(size=(sum(sizes), 3))
    batch = batch_of(sizes, forces)
    slow = slow_fmax(forces, sizes)
    threshold = float(np.median(slow))
    expected = [i for i, f in enumerate(slow) if f <= threshold + 1e-12]
    for hook in (
        ConvergenceHook.from_fmax(threshold + 1e-12),
        ConvergenceHook.from_forces(threshold + 1e-12),
    ):
        assert hook.evaluate(batch).tolist() == expected


def test_none_when_none_converged():
    batch = batch_of([2], np.ones((2, 3)))
    assert ConvergenceHook.from_fmax(0.1).evaluate(batch) is None
    assert ConvergenceHook().evaluate(batch) is None


def test_single_atom_systems_use_the_recorded_level():
    """V == B: the level of forces must not be guessed."""
    batch = batch_of([1, 1, 1], [[3.0, 0, 0], [0, 0.01, 0], [0, 0, 0]])
    assert ConvergenceHook.from_fmax(0.05).evaluate(batch).tolist() == [1, 2]
    unreduced = ConvergenceHook({"key": "forces", "threshold": 0.05})
    assert unreduced.evaluate(batch).tolist() == [1, 2]


def test_the_value_is_signed():
    batch = batch_of([1], [[-50.0, -50.0, -50.0]])
    largest = ConvergenceHook({"key": "forces", "threshold": 0.05, "reduce_op": "max"})
    assert largest.evaluate(batch).tolist() == [0]
    assert ConvergenceHook().evaluate(batch) is None


@pytest.mark.parametrize(
    ("op", "expected"),
    [("max", 2.0), ("min", -4.0), ("sum", -1.0), ("mean", -1 / 3), ("norm", 21**0.5)],
)
def test_reductions(op, expected):
    batch = batch_of([1], [[1.0, 2.0, -4.0]])
    for shift, hit in ((1e-9, True), (-1e-9, False)):
        hook = ConvergenceHook({"key": "forces", "threshold": expected + shift, "reduce_op": op})
        assert (hook.evaluate(batch) is not None) is hit


def test_reduction_over_several_axes():
    batch = batch_of([1, 1])
    batch["stress"] = torch.eye(3).double().repeat(2, 1, 1) * torch.tensor([1.0, 9.0]).reshape(
        2, 1, 1
    )
    hook = ConvergenceHook(
        {"key": "stress", "threshold": 2.0, "reduce_op": "norm", "reduce_dims": [-2, -1]}
    )
    assert hook.evaluate(batch).tolist() == [0]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_fmax_set_by_hand_in_both_shapes(shape):
    batch = batch_of([2, 1])
    batch.set("fmax_mine", torch.tensor([0.01, 3.0]).reshape(shape), level="system")
    hook = ConvergenceHook({"key": "fmax_mine", "threshold": 0.05, "reduce_op": "max"})
    assert hook.evaluate(batch).tolist() == [0]


def test_custom_op_wins_and_is_checked():
    batch = batch_of([2, 1], np.ones((3, 3)))
    hook = ConvergenceHook(
        {"key": "positions", "threshold": -1, "custom_op": lambda x: torch.tensor([False, True])}
    )
    assert hook.evaluate(batch).tolist() == [1]
    wrong = ConvergenceHook({"key": "positions", "threshold": 0, "custom_op": lambda x: x})
    with pytest.raises(RuntimeError, match="custom_op"):
        wrong.evaluate(batch)


def test_criteria_are_anded():
    batch = batch_of([1, 1, 1], [[0.0, 0, 0], [0, 0, 0], [9.0, 0, 0]])
    batch["energy"] = torch.tensor([[1.0], [5.0], [1.0]])
    hook = ConvergenceHook([{"key": "fmax", "threshold": 0.1}, {"key": "energy", "threshold": 2.0}])
    assert hook.num_criteria == 2
    assert hook.evaluate(batch).tolist() == [0]


def test_nan_never_converges():
    batch = batch_of([1, 2], [[0.0, 0, 0], [float("nan"), 0, 0], [0, 0, 0]])
    assert ConvergenceHook.from_fmax(0.1).evaluate(batch).tolist() == [0]
    assert ConvergenceHook().evaluate(batch).tolist() == [0]


def test_missing_key():
    with pytest.raises(KeyError, match="Key for convergence check not found"):
        ConvergenceHook({"key": "nothing", "threshold": 1.0}).evaluate(batch_of([1]))
    with pytest.raises(KeyError, match="energy_change"):
        ConvergenceHook({"key": "energy_change", "threshold": 1.0}).evaluate(batch_of([1]))


@pytest.mark.parametrize("criteria", [3, "fmax", {"a"}])
def test_criteria_of_a_wrong_type(criteria):
    with pytest.raises(TypeError, match="criteria must be"):
        ConvergenceHook(criteria)


@pytest.mark.parametrize(
    "criterion",
    [
        {"key": "fmax"},
        {"threshold": 1.0},
        {"key": "fmax", "threshold": "1"},
        {"key": "fmax", "threshold": 1.0, "reduce_op": "median"},
        {"key": "fmax", "threshold": 1.0, "tolerance": 2},
        {"key": 4, "threshold": 1.0},
    ],
)
def test_bad_criterion(criterion):
    with pytest.raises(ConfigError):
        ConvergenceHook([criterion])


def test_bad_items_and_frequency():
    with pytest.raises(TypeError, match="Each criterion must be"):
        ConvergenceHook(["fmax"])
    with pytest.raises(ConfigError, match="empty"):
        ConvergenceHook([])
    with pytest.raises(ConfigError, match="frequency"):
        ConvergenceHook(frequency=0)


def test_as_hook_moves_the_status():
    batch = batch_of([1, 1, 1], [[0.0, 0, 0], [0, 0, 0], [9.0, 0, 0]])
    batch["status"] = torch.tensor([[0], [4], [0]])
    hook = ConvergenceHook.from_fmax(0.1, source_status=0, target_status=7)
    assert hook.stage is DynamicsStage.AFTER_STEP
    hook(DynamicsContext(batch=batch), hook.stage)
    assert batch["status"].reshape(-1).tolist() == [7, 4, 0]
    del batch["status"]
    hook(DynamicsContext(batch=batch), hook.stage)  # nothing to move: no error


def test_energy_change_is_followed(kit):
    """inf in the first step of a system, then |E - E before|."""
    seen: list = []
    energies: list = []

    def act(ctx):
        seen.append(float(ctx.derived("energy_change")))
        energies.append(float(ctx.batch["energy"]))

    hook = kit.Recorder(DynamicsStage.AFTER_STEP, [], act=act)
    hook.needs = {"energy_change"}
    DemoDynamics(kit.SpringModel(), n_steps=4, dt=2.0, hooks=[hook]).run(kit.systems([3]))
    assert seen[0] == float("inf")
    expected = [abs(b - a) for a, b in itertools.pairwise(energies)]
    assert seen[1:] == pytest.approx(expected, abs=1e-15)
    assert min(expected) > 0


def test_nobody_asks_nobody_pays(kit):
    batch = DemoDynamics(kit.SpringModel(), n_steps=2).run(kit.systems([3]))
    assert "fmax" not in batch
    assert "energy_change" not in batch

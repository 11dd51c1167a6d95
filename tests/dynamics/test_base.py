"""One stage: constructor, priming, freezing, outputs, early stop."""

from __future__ import annotations

import pytest
import torch

from alchemi_xr.dynamics import BaseDynamics, BufferConfig, ConvergenceHook, DemoDynamics
from alchemi_xr.dynamics import base as engine


class Drift(BaseDynamics):
    """Moves all atoms by one, whoever they are: knows nothing of masks."""

    def pre_update(self, batch):
        batch["positions"] += 1.0

    def post_update(self, batch):
        batch["velocities"] = batch["velocities"] + 1.0  # a new tensor, not in place


def test_old_module_gives_all_names():
    for name in ("FusedStage", "DemoDynamics", "SizeAwareSampler", "HostMemory", "ConvergenceHook"):
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        engine.Nothing


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"comm_mode": "later"}, ValueError, "comm_mode"),
        ({"prior_rank": 0}, ValueError, "buffer_config is required"),
        ({"next_rank": 1}, ValueError, "buffer_config is required"),
        ({"n_steps": 0}, ValueError, "n_steps"),
        ({"refill_frequency": 0}, ValueError, "refill_frequency"),
        ({"max_batch_size": -1}, ValueError, "max_batch_size"),
        ({"buffer_config": {"num_systems": -1, "num_nodes": 1, "num_edges": 1}}, ValueError, "≥ 0"),
        ({"convergence_hook": {"criteria": 3}}, TypeError, "criteria must be"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
    ],
)
def test_bad_options(kit, options, error, match):
    with pytest.raises(error, match=match):
        BaseDynamics(kit.SpringModel(), **options)


def test_model_must_be_a_model():
    with pytest.raises(TypeError, match="BaseModelMixin"):
        DemoDynamics(torch.nn.Linear(1, 1), n_steps=1)
    with pytest.raises(TypeError):
        DemoDynamics()


def test_good_options(kit):
    config = {"num_systems": 4, "num_nodes": 40, "num_edges": 0}
    stage = DemoDynamics(
        kit.SpringModel(),
        n_steps=1,
        prior_rank=None,
        next_rank=1,
        buffer_config=config,
        comm_mode="fully_async",
        max_batch_size=7,
        convergence_hook={"criteria": {"key": "fmax", "threshold": 0.1}, "frequency": 2},
    )
    assert stage.buffer_config == BufferConfig(4, 40, 0)
    assert stage.is_first_stage
    assert not stage.is_final_stage
    assert stage.convergence_hook.frequency == 2
    assert not stage.inflight_mode
    assert (stage.active_batch_size, stage.room_in_active_batch) == (0, 7)
    assert stage.model_config is stage.model.model_config
    assert not stage.model_is_conservative
    assert stage.device.type in ("cpu", "cuda")
    assert (stage.global_rank, stage.local_rank) == (0, 0)


def test_run_needs_steps_and_a_batch(kit):
    stage = BaseDynamics(kit.SpringModel())
    with pytest.raises(ValueError, match="No step count provided"):
        stage.run(kit.systems([1]))
    with pytest.raises(ValueError, match="No batch provided and no sampler configured"):
        stage.run(n_steps=3)
    with pytest.raises(ValueError, match="at least 1"):
        stage.run(kit.systems([1]), n_steps=0)


def test_calls_are_steps_plus_one_and_the_count_goes_on(kit):
    model = kit.SpringModel()
    stage = DemoDynamics(model, n_steps=2)
    batch = kit.systems([2, 3])
    assert stage.run(batch) is batch
    assert (model.calls, stage.step_count) == (3, 2)
    assert stage.run(batch, n_steps=5) is batch
    assert (model.calls, stage.step_count) == (9, 7)


def test_outputs_are_made_or_keep_their_dtype(kit):
    batch = kit.systems([2, 3])
    batch["energy"] = torch.zeros(2, 1, dtype=torch.float32)
    energy = batch["energy"]
    DemoDynamics(kit.SpringModel(), n_steps=1).run(batch)
    assert batch["energy"] is energy
    assert energy.dtype == torch.float32
    assert float(energy.min()) > 0
    assert batch["forces"].dtype == torch.float64
    assert batch["forces"].shape == (5, 3)
    assert not batch["positions"].requires_grad


def test_energy_known_to_some_is_present_in_all_afterwards(kit):
    from alchemi_xr.data import Batch

    batch = Batch.from_data_list([kit.atoms(2, 0, energy=1.0), kit.atoms(2, 1)])
    assert batch.has("energy").tolist() == [True, False]
    DemoDynamics(kit.SpringModel(), n_steps=1).run(batch)
    assert batch.has("energy").tolist() == [True, True]
    assert torch.isfinite(batch["energy"]).all()


def test_missing_output_is_named(kit):
    stage = DemoDynamics(kit.SpringModel(outputs=("energy",)), n_steps=1)
    with pytest.raises(RuntimeError, match="gives no forces"):
        stage.run(kit.systems([2]))


def test_finished_systems_are_left_alone_by_an_update_that_knows_no_mask(kit):
    batch = kit.systems([2, 3])
    batch["status"] = torch.tensor([[1], [0]])
    before = batch.clone()
    Drift(kit.SpringModel(), n_steps=3).run(batch)
    torch.testing.assert_close(batch["positions"][:2], before["positions"][:2])
    torch.testing.assert_close(batch["positions"][2:], before["positions"][2:] + 3)
    assert batch["velocities"][:2].abs().max() == 0
    assert (batch["velocities"][2:] == 3).all()


def test_status_above_the_exit_also_ends(kit):
    model = kit.SpringModel()
    batch = kit.systems([2])
    batch["status"] = torch.tensor([[9]])
    Drift(model, n_steps=3, exit_status=2).run(batch)
    assert model.calls == 0


def test_hooks_do_not_move_finished_systems(kit):
    from alchemi_xr.dynamics import DynamicsStage

    class Push:
        stage, frequency = DynamicsStage.AFTER_POST_UPDATE, 1

        def __call__(self, ctx, stage):
            ctx.batch["positions"].add_(5.0)

    batch = kit.systems([2, 3])
    batch["status"] = torch.tensor([[1], [0]])
    before = batch.clone()
    Drift(kit.SpringModel(), n_steps=1, hooks=[Push()]).run(batch)
    torch.testing.assert_close(batch["positions"][:2], before["positions"][:2])
    torch.testing.assert_close(batch["positions"][2:], before["positions"][2:] + 6)


def test_masked_update(kit):
    batch = kit.systems([2, 3, 1])
    before = batch.clone()
    Drift(kit.SpringModel()).masked_update(batch, torch.tensor([False, True, False]))
    moved = (batch["positions"] - before["positions"]).sum(dim=1).tolist()
    assert moved == [0, 0, 3, 3, 3, 0]


def test_a_converged_system_stops_where_it_would_alone(kit):
    """So that a relaxation in a batch equals one alone; and the run stops early."""

    class Relax(BaseDynamics):
        def pre_update(self, batch):
            batch["positions"] *= 0.5

    def make(model):
        return Relax(model, n_steps=50, convergence_hook=ConvergenceHook.from_fmax(0.01))

    alone = []
    for i in range(3):
        one = kit.systems([2, 3, 4]).index_select([i])
        stage = make(kit.SpringModel())
        stage.run(one)
        alone.append((stage.step_count, one["positions"]))
    together, model = kit.systems([2, 3, 4]), kit.SpringModel()
    stage = make(model)
    stage.run(together)
    torch.testing.assert_close(
        together["positions"], torch.cat([x for _, x in alone]), rtol=0, atol=0
    )
    assert stage.step_count == max(steps for steps, _ in alone)
    assert len({steps for steps, _ in alone}) > 1
    assert "status" not in together  # a second run with another stage is free to move them


def test_a_run_ends_when_the_rest_had_finished_before(kit):
    model = kit.SpringModel()
    batch = kit.systems([2, 3])
    batch["status"] = torch.tensor([[1], [0]])
    hook = ConvergenceHook.from_fmax(1e9)
    DemoDynamics(model, n_steps=50, convergence_hook=hook).run(batch)
    assert model.calls == 2  # priming and one step


def test_an_output_of_the_wrong_shape_is_named(kit):
    class Short(kit.SpringModel):
        def forward(self, batch):
            return {"energy": batch["positions"].sum().reshape(1), "forces": batch["positions"]}

    batch = kit.systems([2, 3])
    batch["energy"] = torch.zeros(2, 1)
    with pytest.raises(RuntimeError, match=r"'energy' has the wrong shape.*\[1\].*\[2, 1\]"):
        DemoDynamics(Short(), n_steps=1).run(batch)


def test_the_engine_makes_room_for_a_double_energy(kit):
    """FIRE that compares energies: float32 positions must not cost their digits."""
    from alchemi_xr.dynamics import FIRE

    class Deep(kit.SpringModel):
        def forward(self, batch):
            out = super().forward(batch)
            return {**out, "energy": out["energy"].double() - 1e5}

    batch = kit.systems([2]).to(dtype=torch.float32)
    FIRE(Deep(), n_steps=1, uphill=True).run(batch)
    assert batch["energy"].dtype == torch.float64
    assert float(batch["energy"] + 1e5) % 0.0078125 != 0.0


@pytest.mark.parametrize("frequency", [1, 3, 4])
def test_convergence_frequency(kit, frequency):
    calls: list = []

    def op(values):
        calls.append(1)
        return torch.zeros(len(values), dtype=torch.bool)

    hook = ConvergenceHook({"key": "energy", "threshold": 0, "custom_op": op}, frequency=frequency)
    DemoDynamics(kit.SpringModel(), n_steps=9, convergence_hook=hook).run(kit.systems([2]))
    assert len(calls) == len(range(0, 9, frequency))


def test_step_alone(kit):
    batch = kit.systems([2, 3])
    batch["positions"][:2] = 0
    stage = DemoDynamics(
        kit.SpringModel(), n_steps=1, convergence_hook=ConvergenceHook.from_fmax(1e-9)
    )
    out, converged = stage.step(batch)
    assert out is batch
    assert converged.tolist() == [0]
    assert stage.step_count == 1
    _, converged = DemoDynamics(kit.SpringModel(), n_steps=1).step(batch)
    assert converged is None


def test_bookkeeping_belongs_to_the_instance(kit):
    one, two = (
        DemoDynamics(kit.SpringModel(), n_steps=1),
        DemoDynamics(kit.SpringModel(), n_steps=1),
    )
    one.register_bookkeeping_key("mine", lambda b: torch.full((b.num_graphs, 1), 3))
    one.register_bookkeeping_key("per_atom", lambda b: torch.ones(b.num_nodes), level="atom")
    batch, other = kit.systems([1, 1]), kit.systems([1, 1])
    one.run(batch)
    two.run(other)
    assert batch["mine"].reshape(-1).tolist() == [3, 3]
    assert batch.level_of("per_atom") == "atom"
    assert "mine" not in other
    assert type(one)(kit.SpringModel(), n_steps=1)._bookkeeping == {}


def test_context_manager_runs(kit):
    stage = DemoDynamics(kit.SpringModel(), n_steps=1)
    with stage as entered:
        assert entered is stage
        stage.run(kit.systems([2]))
    assert stage.step_count == 1


def test_refill_needs_a_sampler(kit):
    batch = kit.systems([1])
    batch["status"] = torch.tensor([[1]])
    with pytest.raises(RuntimeError, match="requires a sampler"):
        DemoDynamics(kit.SpringModel(), n_steps=1).refill_check(batch, 1)

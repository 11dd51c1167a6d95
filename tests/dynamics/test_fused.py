"""Stages on one batch: status, budgets, migration, composition."""

from __future__ import annotations

import pytest
import torch

from alchemi_xr.dynamics import (
    BaseDynamics,
    ConvergenceHook,
    DemoDynamics,
    DynamicsStage,
    FusedStage,
    HostMemory,
    SizeAwareSampler,
)


class Shrink(BaseDynamics):
    """Halves all positions: converges in a number of steps that is known."""

    def pre_update(self, batch):
        batch["positions"] *= 0.5


class Shift(BaseDynamics):
    def post_update(self, batch):
        batch["positions"] += 1.0


def shrink(model, threshold=None, **options):
    hook = None if threshold is None else ConvergenceHook.from_fmax(threshold)
    return Shrink(model, convergence_hook=hook, **options)


@pytest.mark.parametrize(("first", "second"), [(2, 3), (1, 1), (4, 1)])
def test_budgets_add_up(kit, first, second):
    """2 + 3 steps are 5, 1 + 1 are 2, and one model call more."""
    model = kit.SpringModel()
    fused = DemoDynamics(model, n_steps=first) + DemoDynamics(model, n_steps=second)
    batch = kit.systems([2, 3])
    assert fused.run(batch) is batch
    assert fused.step_count == first + second
    assert model.calls == first + second + 1
    assert batch["status"].reshape(-1).tolist() == [2, 2]
    assert batch["steps"].reshape(-1).tolist() == [first + second] * 2
    assert batch["n_steps_counter_0"].reshape(-1).tolist() == [0, 0]
    assert "needs_prime" not in batch


def test_each_stage_moves_only_its_own(kit):
    model = kit.SpringModel()
    fused = Shrink(model, n_steps=1) + Shift(model, n_steps=1)
    batch = kit.systems([2, 3])
    batch["status"] = torch.tensor([[0], [1]])
    before = batch.clone()
    fused.step(batch)
    torch.testing.assert_close(batch["positions"][:2], before["positions"][:2] * 0.5)
    torch.testing.assert_close(batch["positions"][2:], before["positions"][2:] + 1)
    assert batch["status"].reshape(-1).tolist() == [1, 2]
    _, graduated = fused.step(batch)
    assert graduated.tolist() == [0]
    assert fused.step(batch)[1] is None


def test_criterion_migrates_and_graduates(kit):
    model = kit.SpringModel()
    fused = shrink(model, 0.3) + shrink(model, 0.01)
    batch = kit.systems([1, 4, 2])
    out = fused.run(batch)
    assert out is batch
    assert (batch["status"] == 2).all()
    assert (batch["fmax"] <= 0.01).all()
    assert (batch["fmax"] > 0.0025).all()  # stopped in the first step below


def test_without_hook_only_steps_migrate(kit):
    """No hidden threshold: forces are zero and it still makes its steps."""
    model = kit.SpringModel()
    batch = kit.systems([2])
    batch["positions"] = torch.zeros(2, 3).double()
    fused = DemoDynamics(model, n_steps=4) + DemoDynamics(model, n_steps=2)
    fused.run(batch)
    assert fused.step_count == 6
    assert fused.migration_hooks == [None, None]


def test_a_stage_that_cannot_end_is_refused(kit):
    model = kit.SpringModel()
    fused = FusedStage([(0, Shrink(model)), (1, shrink(model, 0.1))])
    with pytest.raises(ValueError, match="No step count provided: the stage of status 0"):
        fused.run(kit.systems([1]))
    # A hook that only looks on ends nothing either.
    fused.register_hook(kit.Recorder(DynamicsStage.AFTER_STEP, []))
    with pytest.raises(ValueError, match="No step count provided"):
        fused.run(kit.systems([1]))
    fused.run(kit.systems([1]), n_steps=2)
    assert fused.step_count == 2


def test_n_steps_is_a_maximum(kit):
    model = kit.SpringModel()
    a, b = DemoDynamics(model, n_steps=100), DemoDynamics(model, n_steps=100)
    batch = kit.systems([2])
    fused = FusedStage([(0, a), (1, b)], n_steps=3)
    fused.run(batch)
    assert fused.step_count == 3
    fused.run(batch, n_steps=4)
    assert fused.step_count == 7
    assert batch["n_steps_counter_0"].reshape(-1).tolist() == [7]


def test_status_above_exit_ends(kit):
    model = kit.SpringModel()
    batch = kit.systems([2, 2])
    batch["status"] = torch.tensor([[2], [17]])
    (DemoDynamics(model, n_steps=1) + DemoDynamics(model, n_steps=1)).run(batch)
    assert batch["status"].reshape(-1).tolist() == [2, 17]
    assert model.calls == 0


def test_codes_need_not_be_contiguous(kit):
    model = kit.SpringModel()
    fused = FusedStage(
        [(3, DemoDynamics(model, n_steps=2)), (8, DemoDynamics(model, n_steps=1))], entry_status=3
    )
    assert fused.exit_status == 9
    batch = kit.systems([1])
    fused.run(batch)
    assert batch["status"].item() == 9
    assert fused.step_count == 3
    with pytest.raises(ValueError, match="entry_status"):
        FusedStage([(3, DemoDynamics(model, n_steps=2))]).run(kit.systems([1]))


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda a: FusedStage([]), ValueError, "no sub-stage"),
        (lambda a: FusedStage([(0, 3)]), TypeError, "BaseDynamics"),
        (lambda a: FusedStage([(0, a), (0, a)]), ValueError, "same status"),
        (lambda a: FusedStage([(-1, a)]), ValueError, "status code"),
        (lambda a: FusedStage([(0, a), (1, a)], exit_status=1), ValueError, "exit_status"),
        (lambda a: FusedStage([(0, a)], reprime_on_entry=[5]), ValueError, "reprime_on_entry"),
        (lambda a: FusedStage([(0, a)], reprime_on_entry=True), TypeError, "list of status codes"),
        (lambda a: FusedStage([(0, a + a)]), TypeError, "compose with"),
        (lambda a: a + 3, TypeError, "Both operands of \\+ must be BaseDynamics"),
        (lambda a: (a + a) + 3, TypeError, "other must be a BaseDynamics instance"),
    ],
)
def test_refused(kit, build, error, match):
    with pytest.raises(error, match=match):
        build(DemoDynamics(kit.SpringModel(), n_steps=1))


def test_mixed_devices_are_refused(kit):
    a = DemoDynamics(kit.SpringModel(), n_steps=1, device_type="cpu")
    b = DemoDynamics(kit.SpringModel(), n_steps=1, device_type="cuda")
    with pytest.raises(ValueError, match="same device_type"):
        a + b


def test_composition_takes_sampler_sinks_and_init_from_the_first_that_has_them(kit):
    model, sink = kit.SpringModel(), HostMemory(9)
    sampler = SizeAwareSampler(kit.ListDataset([kit.atoms(2, 0)]), max_batch_size=1)

    def init(batch):
        return None

    a = DemoDynamics(model, n_steps=1, sampler=sampler, refill_frequency=4)
    b = DemoDynamics(model, n_steps=1, sinks=[sink], init_fn=init)
    fused = a + b
    assert fused.sampler is sampler
    assert fused.refill_frequency == 4
    assert fused.sinks == [sink]
    assert fused.init_fn is init
    assert fused.inflight_mode


def test_adding_to_a_fused_stage_keeps_everything(kit):
    model, sink, log = kit.SpringModel(), HostMemory(9), []
    sampler = SizeAwareSampler(kit.ListDataset([kit.atoms(2, 0)]), max_batch_size=1)
    a, b, c = (DemoDynamics(model, n_steps=1) for _ in range(3))
    hook = kit.Recorder(DynamicsStage.AFTER_STEP, log)
    fused = FusedStage(
        [(0, a), (1, b)],
        exit_status=10,
        sampler=sampler,
        refill_frequency=3,
        sinks=[sink],
        init_fn=lambda batch: None,
        n_steps=77,
        hooks=[hook],
        reprime_on_entry=[1],
        compile_kwargs={"mode": "default"},
        comm_mode="sync",
        max_batch_size=5,
    )
    more = fused + c
    assert [code for code, _ in more.sub_stages] == [0, 1, 2]
    assert [stage for _, stage in more.sub_stages] == [a, b, c]
    assert more is not fused
    assert len(fused.sub_stages) == 2
    for name in [
        "sampler",
        "refill_frequency",
        "sinks",
        "init_fn",
        "n_steps",
        "hooks",
        "exit_status",
        "reprime_codes",
        "compile_kwargs",
        "comm_mode",
        "max_batch_size",
        "entry_status",
    ]:
        assert getattr(more, name) == getattr(fused, name), name
    assert (a + b + c).exit_status == 3


def test_all_ways_of_adding(kit):
    model = kit.SpringModel()
    a, b, c, d = (DemoDynamics(model, n_steps=i + 1) for i in range(4))
    for fused in ((a + b) + (c + d), a + (b + c + d), a + b + c + d):
        assert fused.sub_stages == [(0, a), (1, b), (2, c), (3, d)]
        assert fused.exit_status == 4


def test_a_fused_right_operand_keeps_its_bookkeeping(kit):
    model = kit.SpringModel()
    a, b, c = (DemoDynamics(model, n_steps=1) for _ in range(3))
    right = b + c
    right.register_bookkeeping_key("mine", lambda batch: torch.full((batch.num_graphs, 1), 3))
    batch = kit.systems([1, 2])
    (a + right).run(batch)
    assert batch["mine"].reshape(-1).tolist() == [3, 3]


def test_a_freeze_that_stages_share_holds_in_each(kit):
    from alchemi_xr.dynamics.hooks import FreezeAtomsHook

    hook = FreezeAtomsHook(mask_key="held")
    a, b = (Shift(kit.SpringModel(), n_steps=1, hooks=[hook]) for _ in range(2))
    batch = kit.systems([2, 2])
    batch["status"] = torch.tensor([[0], [1]])
    batch.set("held", torch.tensor([True, False, True, False]), level="atom")
    start = batch["positions"].clone()
    (a + b).step(batch)
    moved = (batch["positions"] - start).sum(dim=1)
    torch.testing.assert_close(moved, torch.tensor([0.0, 3.0, 0.0, 3.0]).double())


def test_a_run_of_the_whole_leaves_the_parts_as_they_were(kit):
    model = kit.SpringModel()
    a, b = shrink(model, 0.1, n_steps=3), DemoDynamics(model, n_steps=2)
    hook = a.convergence_hook
    (a + b).run(kit.systems([2]))
    assert (a.step_count, b.step_count) == (0, 0)
    assert a.hooks == []
    assert (hook.source_status, hook.target_status) == (None, None)


@pytest.mark.parametrize("spelling", ["fused", "stage"])
def test_reprime_on_entry(kit, spelling):
    """An entering system sits out one update, and that counts no step."""
    model = kit.SpringModel()
    a = Shrink(model, n_steps=1)
    b = Shift(model, n_steps=2, reprime_on_entry=spelling == "stage")
    fused = FusedStage([(0, a), (1, b)], reprime_on_entry=[1] if spelling == "fused" else None)
    batch = kit.systems([1, 1])
    batch["status"] = torch.tensor([[0], [1]])
    start = batch["positions"].clone()
    positions = []
    for _ in range(4):
        fused.step(batch)
        positions.append(batch["positions"].clone())
    torch.testing.assert_close(positions[0][0], start[0] * 0.5)  # a moves it, it enters b
    torch.testing.assert_close(positions[1][0], start[0] * 0.5)  # primed, not moved
    torch.testing.assert_close(positions[3][0], start[0] * 0.5 + 2)  # two steps of its own
    torch.testing.assert_close(positions[1][1], start[1] + 2)  # was inside: not touched
    assert batch["status"].reshape(-1).tolist() == [2, 2]
    assert batch["steps"].reshape(-1).tolist() == [3, 2]


def test_reprime_also_when_a_hook_moved_the_system(kit):
    model = kit.SpringModel()
    move = ConvergenceHook({"key": "energy", "threshold": 1e9}, source_status=0, target_status=1)
    a, b = Shrink(model, n_steps=9, hooks=[move]), Shift(model, n_steps=2)
    fused = FusedStage([(0, a), (1, b)], reprime_on_entry=[1])
    batch = kit.systems([1])
    start = batch["positions"].clone()
    fused.step(batch)
    assert batch["status"].tolist() == [[1]]
    fused.step(batch)
    torch.testing.assert_close(batch["positions"], start * 0.5)
    fused.step(batch)
    torch.testing.assert_close(batch["positions"], start * 0.5 + 1)


def test_convergence_frequency_is_counted_for_each_system(kit):
    """Checked before step 0, 3, 6 … of the system in its stage, not of the run."""
    model, calls = kit.SpringModel(), []

    def op(values):
        calls.append(1)
        return torch.ones(len(values), dtype=torch.bool)

    criterion = {"key": "energy", "threshold": 0, "custom_op": op}
    never = {"key": "energy", "threshold": -1.0}
    a = DemoDynamics(model, n_steps=2, convergence_hook=ConvergenceHook(never, frequency=3))
    b = DemoDynamics(model, n_steps=9, convergence_hook=ConvergenceHook(criterion, frequency=3))
    batch = kit.systems([1, 1])
    fused = a + b
    fused.run(batch)
    assert batch["steps"].reshape(-1).tolist() == [3, 3]  # 2 in a, then b's first check
    assert len(calls) == 1


def test_few_waits_for_the_host(kit, monkeypatch):
    """With step budgets alone the host looks only when one can have run out."""
    looks: list = []
    look = FusedStage._look

    def counted(self, batch):
        looks.append(self.step_count)
        return look(self, batch)

    monkeypatch.setattr(FusedStage, "_look", counted)
    model = kit.SpringModel()
    (DemoDynamics(model, n_steps=40) + DemoDynamics(model, n_steps=60)).run(kit.systems([1, 2]))
    assert looks == [0, 40, 100]


def test_on_converge_of_the_stage_and_of_the_whole(kit):
    model, log = kit.SpringModel(), []
    stage = DynamicsStage.ON_CONVERGE

    def note(name):
        return lambda ctx: log.append((name, ctx.converged_mask.tolist()))

    a = shrink(model, 0.2, n_steps=50)
    a.register_hook(kit.Recorder(stage, [], act=note("a")))
    b = DemoDynamics(model, n_steps=1)
    b.register_hook(kit.Recorder(stage, [], act=note("b")))
    fused = a + b
    fused.register_fused_hook(kit.Recorder(stage, [], act=note("whole")))
    fused.run(kit.systems([1, 5]))
    assert {name for name, _ in log} == {"a", "whole"}  # b ends by steps: nothing converged
    counts = [sum(mask[i] for name, mask in log if name == "a") for i in range(2)]
    assert counts == [1, 1]

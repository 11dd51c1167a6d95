"""When hooks fire, in which order, and what is refused."""

from __future__ import annotations

from enum import Enum

import pytest
import torch

from alchemi_xr.dynamics import ConvergenceHook, DemoDynamics, DynamicsStage, FusedStage, Hook

NINE = [stage.name for stage in DynamicsStage]


def test_stages_are_nine_in_order():
    assert [stage.value for stage in DynamicsStage] == list(range(9))
    assert NINE[0] == "BEFORE_STEP"
    assert NINE[-1] == "ON_CONVERGE"


def test_nine_points_fire_in_order(kit):
    log: list = []
    dynamics = DemoDynamics(
        kit.SpringModel(),
        n_steps=2,
        hooks=[kit.Recorder(stage, log) for stage in reversed(DynamicsStage)],
        convergence_hook=ConvergenceHook({"key": "energy", "threshold": -1.0}),
    )
    dynamics.run(kit.systems([3, 2]))
    prime = [(0, "", "BEFORE_COMPUTE"), (0, "", "AFTER_COMPUTE")]
    steps = [(step, "", name) for step in range(2) for name in NINE[:-1]]
    assert log == prime + steps


def test_on_converge_comes_last_and_brings_the_mask(kit):
    log: list = []
    masks: list = []
    hook = kit.Recorder(
        DynamicsStage.ON_CONVERGE, log, act=lambda ctx: masks.append(ctx.converged_mask.tolist())
    )
    after = kit.Recorder(DynamicsStage.AFTER_STEP, log)
    batch = kit.systems([3, 2])
    batch["positions"][:3] = 0.0
    dynamics = DemoDynamics(
        kit.SpringModel(),
        n_steps=3,
        hooks=[hook, after],
        convergence_hook=ConvergenceHook.from_fmax(1e-6),
    )
    dynamics.run(batch)
    assert masks == [[True, False]]
    assert [name for _, _, name in log] == ["AFTER_STEP", "ON_CONVERGE", "AFTER_STEP", "AFTER_STEP"]


@pytest.mark.parametrize("frequency", [1, 2, 3, 7])
def test_frequency(kit, frequency):
    log: list = []
    hook = kit.Recorder(DynamicsStage.AFTER_STEP, log, frequency=frequency)
    dynamics = DemoDynamics(kit.SpringModel(), n_steps=7, hooks=[hook])
    dynamics.run(kit.systems([2]))
    assert [step for step, _, _ in log] == list(range(0, 7, frequency))


def test_hook_on_several_stages(kit):
    log: list = []

    class Both:
        frequency = 1
        stage = None

        def _runs_on_stage(self, stage):
            return stage in (DynamicsStage.BEFORE_STEP, DynamicsStage.AFTER_STEP)

        def __call__(self, ctx, stage):
            log.append(stage.name)

    assert isinstance(Both(), Hook)
    DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[Both()]).run(kit.systems([2]))
    assert log == ["BEFORE_STEP", "AFTER_STEP"]


def test_stage_given_at_registration(kit):
    log: list = []
    hook = kit.Recorder(None, log)
    dynamics = DemoDynamics(kit.SpringModel(), n_steps=1)
    dynamics.register_hook(hook, stage=DynamicsStage.AFTER_STEP)
    dynamics.run(kit.systems([2]))
    assert log == [(0, "", "AFTER_STEP")]
    assert dynamics.hooks == [hook]


def test_one_hook_at_several_stages_by_registration(kit):
    log: list = []
    hook = kit.Recorder(DynamicsStage.AFTER_STEP, log)
    dynamics = DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[hook])
    dynamics.register_hook(hook, DynamicsStage.BEFORE_STEP)
    dynamics.register_hook(hook, DynamicsStage.BEFORE_STEP)
    dynamics.run(kit.systems([2]))
    assert [name for _, _, name in log] == ["BEFORE_STEP", "AFTER_STEP"]
    assert dynamics.hooks == [hook]
    log.clear()
    fused = FusedStage([(0, DemoDynamics(kit.SpringModel(), n_steps=1))])
    fused.register_fused_hook(hook)
    fused.register_fused_hook(hook, DynamicsStage.BEFORE_STEP)
    more = fused + DemoDynamics(kit.SpringModel(), n_steps=1)
    more.run(kit.systems([2]))
    assert [name for _, _, name in log] == ["BEFORE_STEP", "AFTER_STEP"] * 2


@pytest.mark.parametrize("frequency", [0, -1, 1.5, True, None, "2"])
def test_bad_frequency(kit, frequency):
    hook = kit.Recorder(DynamicsStage.AFTER_STEP, [], frequency=frequency)
    with pytest.raises(ValueError, match="frequency must be a positive integer"):
        DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[hook])


def test_bad_stage(kit):
    class Other(Enum):
        X = 0

    with pytest.raises(TypeError, match="no stage"):
        DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[kit.Recorder(None, [])])
    with pytest.raises(TypeError, match="DynamicsStage"):
        DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[kit.Recorder(Other.X, [])])
    with pytest.raises(TypeError, match="callable"):
        DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[object()])


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_open_and_close_once_even_when_a_run_fails(kit, fails):
    calls: list = []

    class Opens(kit.Recorder):
        def __enter__(self):
            calls.append("enter")
            return self

        def __exit__(self, *exc):
            calls.append("exit")

    class Closes(kit.Recorder):
        def close(self):
            calls.append("close")

    def act(ctx):
        if fails:
            raise RuntimeError("stop here")

    stage = DynamicsStage.AFTER_STEP
    dynamics = DemoDynamics(
        kit.SpringModel(), n_steps=2, hooks=[Opens(stage, [], act=act), Closes(stage, [])]
    )
    if fails:
        with pytest.raises(RuntimeError, match="stop here"):
            dynamics.run(kit.systems([2]))
    else:
        dynamics.run(kit.systems([2]))
    assert calls == ["enter", "exit", "close"]


def test_a_hook_that_stages_share_opens_once_and_all_close(kit):
    calls: list = []

    class Opens(kit.Recorder):
        def __enter__(self):
            calls.append(f"enter {self.name}")

        def __exit__(self, *exc):
            calls.append(f"exit {self.name}")
            if self.name == "whole":
                raise OSError("disk full")

    stage = DynamicsStage.AFTER_STEP
    log = Opens(stage, [], "log")
    a, b = (DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[log]) for _ in range(2))
    fused = FusedStage([(0, a), (1, b)], hooks=[Opens(stage, [], "whole")])
    with pytest.raises(OSError, match="disk full"):
        fused.run(kit.systems([2]))
    assert calls == ["enter whole", "enter log", "exit whole", "exit log"]


def test_fused_hooks_order(kit):
    """Before a BEFORE point the hooks of the whole come first, at the others last."""
    log: list = []
    a = DemoDynamics(
        kit.SpringModel(), n_steps=1, hooks=[kit.Recorder(s, log, "a") for s in DynamicsStage]
    )
    b = DemoDynamics(
        kit.SpringModel(), n_steps=1, hooks=[kit.Recorder(s, log, "b") for s in DynamicsStage]
    )
    fused = FusedStage([(0, a), (1, b)])
    for stage in DynamicsStage:
        fused.register_fused_hook(kit.Recorder(stage, log, "f"))
    fused.run(kit.systems([2, 3]))
    expected = []
    for step, names in [(0, ("BEFORE_COMPUTE", "AFTER_COMPUTE")), (0, NINE[:-1]), (1, NINE[:-1])]:
        for name in names:
            order = "fab" if name.startswith("BEFORE") else "abf"
            expected += [(step, who, name) for who in order]
    assert log == expected


def test_hook_of_a_stage_changes_only_its_systems(kit):
    class Boost:
        stage, frequency = DynamicsStage.AFTER_COMPUTE, 1

        def __call__(self, ctx, stage):
            ctx.batch["forces"].add_(100.0)
            ctx.batch["energy"].add_(7.0)

    batch = kit.systems([2, 3])
    batch["status"] = torch.tensor([[0], [1]])
    model = kit.SpringModel()
    a = DemoDynamics(model, n_steps=5, dt=1e-6)
    b = DemoDynamics(model, n_steps=5, dt=1e-6, hooks=[Boost()])
    (a + b).run(batch, n_steps=1)
    plain = model(batch)
    boosted = batch["forces"] - plain["forces"]
    torch.testing.assert_close(boosted[:2], torch.zeros_like(boosted[:2]))
    torch.testing.assert_close(boosted[2:], torch.full_like(boosted[2:], 100.0))
    torch.testing.assert_close(
        (batch["energy"] - plain["energy"]).reshape(-1), torch.tensor([0.0, 7.0]).double()
    )

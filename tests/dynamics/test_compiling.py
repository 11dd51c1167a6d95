"""torch.compile changes how fast a run is, not what it gives."""

from __future__ import annotations

import shutil

import pytest
import torch

from alchemi_xr.dynamics import DemoDynamics
from alchemi_xr.models.demo import DemoModelWrapper

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def stages(model):
    return DemoDynamics(model, n_steps=2, dt=1.0) + DemoDynamics(model, n_steps=1, dt=0.5)


def test_compile_merges_its_options_and_returns_itself(kit):
    fused = stages(kit.SpringModel())
    fused.compile_kwargs = {"fullgraph": True, "mode": "default"}
    assert not fused.compile_step
    assert fused.compile(mode="reduce-overhead") is fused
    assert fused.compile_step
    assert fused.compile_kwargs == {"fullgraph": True, "mode": "reduce-overhead"}
    longer = fused + DemoDynamics(kit.SpringModel(), n_steps=1)
    assert longer.compile_step
    assert longer._compiled is None  # waits for .compile(), with or run


def test_a_model_that_cannot_be_compiled_runs_all_the_same(kit):
    class Opaque(kit.SpringModel):
        def forward(self, batch):
            torch._dynamo.graph_break()
            return super().forward(batch)

    plain, compiled = kit.systems([2, 3]), kit.systems([2, 3])
    stages(kit.SpringModel()).run(plain)
    fused = stages(Opaque()).compile(fullgraph=True, backend="eager")
    with pytest.warns(RuntimeWarning, match="cannot take Opaque and it runs uncompiled"):
        fused.run(compiled)
    torch.testing.assert_close(compiled["positions"], plain["positions"], rtol=0, atol=0)


def test_an_error_of_the_model_is_not_taken_for_one_of_the_compiler(kit):
    class Fails(kit.SpringModel):
        def forward(self, batch):
            raise ValueError("no such atom")

    with pytest.raises(ValueError, match="no such atom"):
        stages(Fails()).compile(backend="eager").run(kit.systems([2]))


@pytest.mark.slow
@needs_compiler
def test_forces_are_compiled_for_every_size():
    """The whole graph, gradient included; other sizes do not compile again."""
    from alchemi_xr.data import AtomicData, Batch

    def batch(count):
        generator = torch.Generator().manual_seed(count)
        return Batch.from_data_list(
            [
                AtomicData(
                    atomic_numbers=torch.tensor([6, 8, 1]),
                    positions=torch.randn(3, 3, generator=generator),
                )
                for _ in range(count)
            ]
        )

    fused = stages(DemoModelWrapper()).compile(fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for count in (2, 5, 9):
        plain, compiled = batch(count), batch(count)
        stages(DemoModelWrapper()).run(plain)
        fused.run(compiled)
        torch.testing.assert_close(compiled["positions"], plain["positions"])
        torch.testing.assert_close(compiled["forces"], plain["forces"], atol=1e-6, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2

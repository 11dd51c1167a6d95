"""Traces are real files that say what a run did."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity

from alchemi_xr.dynamics import DemoDynamics
from alchemi_xr.dynamics.hooks import TorchProfilerHook
from alchemi_xr.errors import ConfigError


def events(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


def test_a_run_is_one_trace(kit, tmp_path: Path) -> None:
    hook = TorchProfilerHook(tmp_path / "new", activities=["cpu"])
    model = kit.SpringModel()
    DemoDynamics(model, n_steps=3, hooks=[hook]).run(kit.systems([2, 3]))
    assert hook.traces == [tmp_path / "new" / "rank_0" / "torch_0.json"]
    assert events(hook.traces[0]).count("aten::index_add") >= model.calls == 4


def test_a_schedule_and_names(kit, tmp_path: Path) -> None:
    copies = tmp_path / "board"
    hook = TorchProfilerHook(
        tmp_path,
        schedule={"wait": 1, "warmup": 1, "active": 2, "repeat": 2},
        on_trace_ready_path=copies,
        name="md",
        rank_subdirs=False,
        record_shapes=False,
        profile_memory=False,
        with_flops=False,
    )
    DemoDynamics(kit.SpringModel(), n_steps=12, hooks=[hook]).run(kit.systems([2]))
    assert [path.name for path in hook.traces] == ["md_0.json", "md_1.json"]
    steps = [{n for n in events(p) if n.startswith("ProfilerStep#")} for p in hook.traces]
    assert steps == [{"ProfilerStep#2", "ProfilerStep#3"}, {"ProfilerStep#6", "ProfilerStep#7"}]
    assert sorted(p.name for p in copies.iterdir()) == ["md_0.pt.trace.json", "md_1.pt.trace.json"]


def test_old_traces_are_kept_and_a_failed_run_leaves_one(kit, tmp_path: Path) -> None:
    class Fails(kit.SpringModel):
        def forward(self, batch: Any) -> Any:
            if self.calls == 2:
                raise RuntimeError("stop here")
            return super().forward(batch)

    hook = TorchProfilerHook(tmp_path, rank_subdirs=False)
    DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[hook]).run(kit.systems([2]))
    first = hook.traces[0].read_bytes()
    again = TorchProfilerHook(tmp_path, rank_subdirs=False)
    with pytest.raises(RuntimeError, match="stop here"):
        DemoDynamics(Fails(), n_steps=5, hooks=[again]).run(kit.systems([2]))
    assert [path.name for path in again.traces] == ["torch_1.json"]
    assert hook.traces[0].read_bytes() == first
    assert "aten::index_add" in events(again.traces[0])


def test_a_trace_that_cannot_be_written_ends_the_run_and_not_the_process(
    kit, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    hook = TorchProfilerHook(tmp_path / "file", schedule={"wait": 0, "warmup": 1, "active": 1})
    with pytest.raises(OSError):
        DemoDynamics(kit.SpringModel(), n_steps=5, hooks=[hook]).run(kit.systems([2]))
    assert hook.traces == []


def test_bare_steps_and_pickling(kit, tmp_path: Path) -> None:
    hook = TorchProfilerHook(tmp_path, rank_subdirs=False)
    stage = DemoDynamics(kit.SpringModel(), n_steps=1, hooks=[hook])
    batch = kit.systems([2])
    stage.step(batch)
    stage.step(batch)
    assert pickle.loads(pickle.dumps(hook)).output_dir == tmp_path
    assert hook.traces == []
    hook.close()
    hook.close()
    assert len(hook.traces) == 1


def test_options_are_checked(tmp_path: Path) -> None:
    assert TorchProfilerHook(tmp_path, activities=[ProfilerActivity.CPU]).activities == [
        ProfilerActivity.CPU
    ]
    for options, match in (
        ({"activities": ["tpu"]}, "'tpu' is not known"),
        ({"schedule": {"waits": 1}}, "no schedule.*wait, warmup, active"),
        ({"schedule": {"wait": -1, "warmup": 0, "active": 1}}, "no schedule"),
    ):
        with pytest.raises(ConfigError, match=match):
            TorchProfilerHook(tmp_path, **options)  # type: ignore[arg-type]

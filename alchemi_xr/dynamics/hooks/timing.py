"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["StageTimingHook"]

# ON_CONVERGE fires in some steps only: as the end of an interval it would mislead.
_STEADY = tuple(s for s in DynamicsStage if s is not DynamicsStage.ON_CONVERGE)


class StageTimingHook:
    """Measures the time from each stage to the next.

    Parameters
    ----------
    profiled_stages : "all" or list of DynamicsStage
        Points between which time is taken.
    frequency : int
    synchronize : bool
        On CUDA, wait for the device at each point, so that the time of a kernel
        is counted where it was started. It slows the run down a little.

    Attributes
    ----------
    seconds : dict of str to float
        Total by interval, ``"BEFORE_COMPUTE → AFTER_COMPUTE"`` and so on.
    counts : dict of str to int
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self,
        profiled_stages: Iterable[DynamicsStage] | Literal["all"] = "all",
        *,
        frequency: int = 1,
        synchronize: bool = True,
    ) -> None:
        if isinstance(profiled_stages, str):
            if profiled_stages != "all":
                raise ConfigError(
                    "StageTimingHook",
                    f"profiled_stages={profiled_stages!r}",
                    expected="'all' or a list of DynamicsStage",
                )
            profiled_stages = _STEADY
        self.profiled_stages = frozenset(profiled_stages)
        self.frequency = frequency
        self.synchronize = synchronize
        self.stage: Enum | None = None
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._last: tuple[Enum, int, float] | None = None

    def _runs_on_stage(self, stage: Enum) -> bool:
        return stage in self.profiled_stages

    def __enter__(self) -> StageTimingHook:
        self._last = None
        return self

    def __exit__(self, *exc: object) -> None:
        self._last = None

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        if self.synchronize and ctx.batch.device.type == "cuda":
            torch.cuda.synchronize(ctx.batch.device)
        now = time.perf_counter()
        last, self._last = self._last, (stage, ctx.step_count, now)
        # With a frequency above 1, the steps left out are not part of an interval.
        if last is None or ctx.step_count - last[1] > 1:
            return
        name = f"{last[0].name} → {stage.name}"
        self.seconds[name] = self.seconds.get(name, 0.0) + now - last[2]
        self.counts[name] = self.counts.get(name, 0) + 1

    def summary(self) -> str:
        """A table: interval, calls, milliseconds a call, share of the whole."""
        total = sum(self.seconds.values()) or 1.0
        width = max((len(name) for name in self.seconds), default=8)
        lines = [f"{'interval':{width}}  {'calls':>6}  {'ms/call':>9}  {'share':>6}"]
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            count = self.counts[name]
            lines.append(
                f"{name:{width}}  {count:6d}  {1e3 * seconds / count:9.3f}  {seconds / total:6.1%}"
            )
        return "\n".join(lines)

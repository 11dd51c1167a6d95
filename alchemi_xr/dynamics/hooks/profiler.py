"""Traces of torch's profiler, for chrome://tracing, Perfetto or TensorBoard."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.profiler import ProfilerActivity

from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.dynamics.options import global_rank
from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    from alchemi_xr._typing import PathLike
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["TorchProfilerHook"]


class TorchProfilerHook:
    """Records what a run does with ``torch.profiler``, one trace file a cycle.

    It records from the start of the run to its end, or as its ``schedule``
    says; register it with the whole, not with a stage of it
    (``register_fused_hook``), or steps count more than once.

    Parameters
    ----------
    output_dir : path
        Made when it is not there. A file that is there is kept and the new one
        gets the next number.
    activities : list of ProfilerActivity or str, optional
        ``"cpu"``, ``"cuda"``; by default both where there is a CUDA device.
    schedule : callable or dict, optional
        Of ``torch.profiler``, or keywords of ``torch.profiler.schedule``
        (``wait``, ``warmup``, ``active``, ...), counted in firings.
    record_shapes, profile_memory, with_flops, with_stack : bool
        See ``torch.profiler.profile``.
    on_trace_ready_path : path, optional
        Folder that gets a copy of each trace under a name that TensorBoard finds.
    frequency : int
        Steps to one step of the schedule.
    name : str
        First part of the file names.
    rank_subdirs : bool
        Each process writes into ``rank_<global_rank>`` of its own.

    Attributes
    ----------
    traces : list of Path
        The files written so far.

    Raises
    ------
    ConfigError
        An activity or a keyword of the schedule is not known.
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self,
        output_dir: PathLike,
        *,
        activities: Iterable[ProfilerActivity | str] | None = None,
        schedule: Callable[[int], Any] | Mapping[str, int] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = True,
        with_flops: bool = True,
        with_stack: bool = False,
        on_trace_ready_path: PathLike | None = None,
        frequency: int = 1,
        name: str = "torch",
        rank_subdirs: bool = True,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.activities = _activities(activities)
        self.schedule = _schedule(schedule)
        self.record_shapes = record_shapes
        self.profile_memory = profile_memory
        self.with_flops = with_flops
        self.with_stack = with_stack
        self.on_trace_ready_path = (
            None if on_trace_ready_path is None else Path(on_trace_ready_path)
        )
        self.frequency = frequency
        self.name = name
        self.rank_subdirs = rank_subdirs
        self.stage: Enum | None = None
        self.traces: list[Path] = []
        self._profiler: Any = None

    def _runs_on_stage(self, stage: Enum) -> bool:
        return stage in (DynamicsStage.BEFORE_STEP, DynamicsStage.AFTER_STEP)

    def __enter__(self) -> TorchProfilerHook:
        if self._profiler is None:
            self._profiler = torch.profiler.profile(
                activities=self.activities,
                schedule=self.schedule,
                on_trace_ready=self._write,
                record_shapes=self.record_shapes,
                profile_memory=self.profile_memory,
                with_flops=self.with_flops,
                with_stack=self.with_stack,
            )
            self._profiler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        self.__enter__()  # for a bare step(), which opens no hooks
        if stage is not DynamicsStage.AFTER_STEP:
            return
        # Held by nobody while it steps: torch crashes when a profiler whose step failed (a full
        # disk, a warning made an error) is stopped afterwards.
        profiler, self._profiler = self._profiler, None
        with warnings.catch_warnings():
            # Events are cleared after each cycle; each has been written by then.
            warnings.filterwarnings("ignore", message=".*clears events", category=UserWarning)
            profiler.step()
        self._profiler = profiler

    def close(self) -> None:
        """Stop recording and write what is not written yet."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write(self, profiler: Any) -> None:
        path = _next_free(self._own(self.output_dir), f"{self.name}_{{}}.json")
        profiler.export_chrome_trace(str(path))
        self.traces.append(path)
        if self.on_trace_ready_path is not None:
            # A trace can be exported once only.
            folder = self._own(self.on_trace_ready_path)
            shutil.copyfile(path, _next_free(folder, f"{self.name}_{{}}.pt.trace.json"))

    def _own(self, folder: Path) -> Path:
        if self.rank_subdirs:
            folder = folder / f"rank_{global_rank()}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_profiler": None}  # it belongs to its process


def _next_free(folder: Path, pattern: str) -> Path:
    number = 0
    while (folder / pattern.format(number)).exists():
        number += 1
    return folder / pattern.format(number)


def _activities(wanted: Iterable[ProfilerActivity | str] | None) -> list[ProfilerActivity]:
    if wanted is None:
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        return [ProfilerActivity.CPU, *cuda]
    known = {name.lower(): value for name, value in ProfilerActivity.__members__.items()}
    found = []
    for item in [wanted] if isinstance(wanted, str) else wanted:
        activity = known.get(item.lower()) if isinstance(item, str) else item
        if not isinstance(activity, ProfilerActivity):
            raise ConfigError(
                "TorchProfilerHook", f"activity {item!r} is not known", expected=sorted(known)
            )
        found.append(activity)
    return found


def _schedule(wanted: Callable[[int], Any] | Mapping[str, int] | None) -> Any:
    if wanted is None or callable(wanted):
        return wanted
    try:
        return torch.profiler.schedule(**wanted)
    except (TypeError, AssertionError) as error:
        raise ConfigError(
            "TorchProfilerHook",
            f"this is no schedule ({error})",
            found=wanted,
            expected="keywords of torch.profiler.schedule: wait, warmup, active, repeat, skip_first",
        ) from None

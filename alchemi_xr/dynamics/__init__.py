"""Simulation: stages, hooks, convergence, in-flight batching, sinks.

Names are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "BaseDynamics": "base",
    "BufferConfig": "base",
    "ConvergenceHook": "convergence",
    "DataSink": "sinks",
    "DemoDynamics": "integrators.demo",
    "DynamicsContext": "hook",
    "DynamicsStage": "hook",
    "FIRE": "optimizers.fire",
    "FusedStage": "fused",
    "GPUBuffer": "sinks",
    "Hook": "hook",
    "HookContext": "hook",
    "HookRegistryMixin": "hook",
    "HostMemory": "sinks",
    "SizeAwareSampler": "sampler",
    "ZarrData": "sinks",
}
_PACKAGES = ("hooks", "integrators", "optimizers")

__all__ = [*_WHERE, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

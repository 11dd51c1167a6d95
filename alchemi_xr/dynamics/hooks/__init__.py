"""Hooks that come with the project; a hook of one's own needs none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.dynamics.hooks.align import AlignCellHook as AlignCellHook
    from alchemi_xr.dynamics.hooks.bias import BiasedPotentialHook as BiasedPotentialHook
    from alchemi_xr.dynamics.hooks.drift import EnergyDriftMonitorHook as EnergyDriftMonitorHook
    from alchemi_xr.dynamics.hooks.freeze import FreezeAtomsHook as FreezeAtomsHook
    from alchemi_xr.dynamics.hooks.logging import LoggingHook as LoggingHook
    from alchemi_xr.dynamics.hooks.neighbor_list import NeighborListHook as NeighborListHook
    from alchemi_xr.dynamics.hooks.periodic import WrapPeriodicHook as WrapPeriodicHook
    from alchemi_xr.dynamics.hooks.profiler import TorchProfilerHook as TorchProfilerHook
    from alchemi_xr.dynamics.hooks.safety import MaxForceClampHook as MaxForceClampHook
    from alchemi_xr.dynamics.hooks.safety import NaNDetectorHook as NaNDetectorHook
    from alchemi_xr.dynamics.hooks.snapshot import ConvergedSnapshotHook as ConvergedSnapshotHook
    from alchemi_xr.dynamics.hooks.snapshot import SnapshotHook as SnapshotHook
    from alchemi_xr.dynamics.hooks.timing import StageTimingHook as StageTimingHook

_HOME = {
    "AlignCellHook": "align",
    "BiasedPotentialHook": "bias",
    "ConvergedSnapshotHook": "snapshot",
    "EnergyDriftMonitorHook": "drift",
    "FreezeAtomsHook": "freeze",
    "LoggingHook": "logging",
    "MaxForceClampHook": "safety",
    "NaNDetectorHook": "safety",
    "NeighborListHook": "neighbor_list",
    "NonFiniteError": "safety",
    "SnapshotHook": "snapshot",
    "StageTimingHook": "timing",
    "TorchProfilerHook": "profiler",
    "WrapPeriodicHook": "periodic",
}

__all__ = [
    "AlignCellHook",
    "BiasedPotentialHook",
    "ConvergedSnapshotHook",
    "EnergyDriftMonitorHook",
    "FreezeAtomsHook",
    "LoggingHook",
    "MaxForceClampHook",
    "NaNDetectorHook",
    "NeighborListHook",
    "NonFiniteError",
    "SnapshotHook",
    "StageTimingHook",
    "TorchProfilerHook",
    "WrapPeriodicHook",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

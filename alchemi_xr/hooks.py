"""Hooks that are not bound to one kind of engine, under their short address."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.dynamics.hook import DynamicsContext as DynamicsContext
    from alchemi_xr.dynamics.hook import Hook as Hook
    from alchemi_xr.dynamics.hook import HookContext as HookContext
    from alchemi_xr.dynamics.hook import HookRegistryMixin as HookRegistryMixin
    from alchemi_xr.dynamics.hooks.bias import BiasedPotentialHook as BiasedPotentialHook
    from alchemi_xr.dynamics.hooks.neighbor_list import NeighborListHook as NeighborListHook
    from alchemi_xr.dynamics.hooks.periodic import WrapPeriodicHook as WrapPeriodicHook
    from alchemi_xr.dynamics.hooks.timing import StageTimingHook as StageTimingHook

_HOME = {
    "BiasedPotentialHook": "hooks.bias",
    "DynamicsContext": "hook",
    "Hook": "hook",
    "HookContext": "hook",
    "HookRegistryMixin": "hook",
    "NeighborListHook": "hooks.neighbor_list",
    "StageTimingHook": "hooks.timing",
    "WrapPeriodicHook": "hooks.periodic",
}

__all__ = [
    "BiasedPotentialHook",
    "DynamicsContext",
    "Hook",
    "HookContext",
    "HookRegistryMixin",
    "NeighborListHook",
    "StageTimingHook",
    "WrapPeriodicHook",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module = importlib.import_module(f"alchemi_xr.dynamics.{_HOME[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

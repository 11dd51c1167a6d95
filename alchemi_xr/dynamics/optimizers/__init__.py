"""Optimizers: stages that walk each system down to a minimum of its energy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.dynamics.optimizers.fire import FIRE as FIRE

_HOME = {"FIRE": "fire"}

__all__ = ["FIRE"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

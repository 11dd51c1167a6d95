"""Integrators, one a file, each with its equations."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {"DemoDynamics": "demo"}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

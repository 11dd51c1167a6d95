"""Stores as lazy, ragged xarray Datasets: the engine, and the verbs of ``ds.ragged``."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "AlchemiBackend": "alchemi_xr.ragged.backend",
    "RaggedAccessor": "alchemi_xr.ragged.accessor",
    "RaggedGroupBy": "alchemi_xr.ragged.groupby",
    "concat": "alchemi_xr.ragged.combine",
    "from_padded": "alchemi_xr.ragged.pad",
    "open_dataset": "alchemi_xr.ragged.backend",
    "open_mfdataset": "alchemi_xr.ragged.combine",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})

"""Atomistic data that does not fit in memory.

The front door is lazy: a name is imported when it is asked for, so that
``import alchemi_xr`` loads neither torch, warp, dask nor zarr.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from alchemi_xr._version import __version__

if TYPE_CHECKING:
    from alchemi_xr.campaign import Campaign
    from alchemi_xr.config import get_options, set_options
    from alchemi_xr.data import AtomicData, Batch
    from alchemi_xr.etl import append, convert, export
    from alchemi_xr.ragged import open_dataset
    from alchemi_xr.store import open_store

__all__ = [
    "AtomicData",
    "Batch",
    "Campaign",
    "__version__",
    "append",
    "convert",
    "export",
    "get_options",
    "open_dataset",
    "open_store",
    "set_options",
]

_HOME = {
    "AtomicData": "alchemi_xr.data",
    "Batch": "alchemi_xr.data",
    "Campaign": "alchemi_xr.campaign",
    "append": "alchemi_xr.etl",
    "convert": "alchemi_xr.etl",
    "export": "alchemi_xr.etl",
    "get_options": "alchemi_xr.config",
    "open_dataset": "alchemi_xr.ragged",
    "open_store": "alchemi_xr.store",
    "set_options": "alchemi_xr.config",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'alchemi_xr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

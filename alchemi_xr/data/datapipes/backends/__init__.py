"""Readers and writers of storage formats: one file a format."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.data.datapipes.backends.base import Reader
    from alchemi_xr.data.datapipes.backends.memmap import PackedMemmapReader
    from alchemi_xr.data.datapipes.backends.zarr import AtomicDataZarrReader, AtomicDataZarrWriter

__all__ = ["AtomicDataZarrReader", "AtomicDataZarrWriter", "PackedMemmapReader", "Reader"]

_HOME = {
    "AtomicDataZarrReader": "alchemi_xr.data.datapipes.backends.zarr",
    "AtomicDataZarrWriter": "alchemi_xr.data.datapipes.backends.zarr",
    "PackedMemmapReader": "alchemi_xr.data.datapipes.backends.memmap",
    "Reader": "alchemi_xr.data.datapipes.backends.base",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

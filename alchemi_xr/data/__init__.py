"""What a sample is: fields, levels, pointers, and samples in NumPy and torch.

The room is lazy: a name is imported when it is asked for, so that reading a
store needs neither torch nor warp. The names of the datapipes are answered
here too, by a table of strings, so that no import points upward.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.data.atomic_data import AtomCategory, AtomicData
    from alchemi_xr.data.batch import Batch
    from alchemi_xr.data.block import Block
    from alchemi_xr.data.packed_memmap_loader import PackedMemmapLoader, split_loader
    from alchemi_xr.data.transforms import Compose

__all__ = [
    "AtomCategory",
    "AtomicData",
    "AtomicDataZarrReader",
    "AtomicDataZarrWriter",
    "Batch",
    "BatchDatasetProtocol",
    "Block",
    "Compose",
    "DataLoader",
    "Dataset",
    "InMemoryDataset",
    "PackedMemmapLoader",
    "Reader",
    "split_loader",
    "transforms",
]

_HOME = {
    "AtomCategory": "alchemi_xr.data.atomic_data",
    "AtomicData": "alchemi_xr.data.atomic_data",
    "Batch": "alchemi_xr.data.batch",
    "Block": "alchemi_xr.data.block",
    "Compose": "alchemi_xr.data.transforms",
    "PackedMemmapLoader": "alchemi_xr.data.packed_memmap_loader",
    "split_loader": "alchemi_xr.data.packed_memmap_loader",
    "AtomicDataZarrReader": "alchemi_xr.data.datapipes",
    "AtomicDataZarrWriter": "alchemi_xr.data.datapipes",
    "BatchDatasetProtocol": "alchemi_xr.data.datapipes",
    "DataLoader": "alchemi_xr.data.datapipes",
    "Dataset": "alchemi_xr.data.datapipes",
    "InMemoryDataset": "alchemi_xr.data.datapipes",
    "Reader": "alchemi_xr.data.datapipes",
}


def __getattr__(name: str) -> Any:
    if name == "transforms":
        return importlib.import_module("alchemi_xr.data.transforms")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'alchemi_xr.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""From storage to device: readers, datasets, loaders and samplers.

Names only; each is imported when it is asked for, so that choosing a codec
profile does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.data.datapipes.backends.base import Reader
    from alchemi_xr.data.datapipes.backends.memmap import PackedMemmapReader
    from alchemi_xr.data.datapipes.backends.zarr import AtomicDataZarrReader, AtomicDataZarrWriter
    from alchemi_xr.data.datapipes.dataloader import DataLoader
    from alchemi_xr.data.datapipes.dataset import Dataset
    from alchemi_xr.data.datapipes.in_memory import InMemoryDataset
    from alchemi_xr.data.datapipes.multi import MultiDataset
    from alchemi_xr.data.datapipes.protocols import (
        BatchDatasetProtocol,
        DistributedSamplerProtocol,
    )
    from alchemi_xr.data.datapipes.samplers import MultiDatasetBatchSampler, MultiDatasetSampler
    from alchemi_xr.store.codecs import ZarrArrayConfig, ZarrWriteConfig

__all__ = [
    "AtomicDataZarrReader",
    "AtomicDataZarrWriter",
    "BatchDatasetProtocol",
    "DataLoader",
    "Dataset",
    "DistributedSamplerProtocol",
    "InMemoryDataset",
    "MultiDataset",
    "MultiDatasetBatchSampler",
    "MultiDatasetSampler",
    "PackedMemmapReader",
    "Reader",
    "ZarrArrayConfig",
    "ZarrWriteConfig",
]

_HERE = "alchemi_xr.data.datapipes"
_HOME = {
    "AtomicDataZarrReader": f"{_HERE}.backends.zarr",
    "AtomicDataZarrWriter": f"{_HERE}.backends.zarr",
    "BatchDatasetProtocol": f"{_HERE}.protocols",
    "DataLoader": f"{_HERE}.dataloader",
    "Dataset": f"{_HERE}.dataset",
    "DistributedSamplerProtocol": f"{_HERE}.protocols",
    "InMemoryDataset": f"{_HERE}.in_memory",
    "MultiDataset": f"{_HERE}.multi",
    "MultiDatasetBatchSampler": f"{_HERE}.samplers",
    "MultiDatasetSampler": f"{_HERE}.samplers",
    "PackedMemmapReader": f"{_HERE}.backends.memmap",
    "Reader": f"{_HERE}.backends.base",
    "ZarrArrayConfig": "alchemi_xr.store.codecs",
    "ZarrWriteConfig": "alchemi_xr.store.codecs",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

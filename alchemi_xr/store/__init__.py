"""What is on disk, and when it is true.

Needs NumPy and zarr only. Names are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "BulkWriter": "bulk",
    "FieldLayout": "bulk",
    "Lease": "lease",
    "Report": "verify",
    "Snapshot": "reader",
    "StoreSchema": "schema",
    "StoreWriter": "writer",
    "ZarrArrayConfig": "codecs",
    "ZarrWriteConfig": "codecs",
    "copy_store": "copying",
    "open_repository": "icechunk",
    "open_store": "reader",
    "repair": "verify",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])

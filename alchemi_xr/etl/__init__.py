"""Files in: every format becomes flat arrays of whole samples, in bulk.

A source says what is there (``scan``) and reads it (``read``); ``convert``
plans, runs and publishes. Nothing here needs torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Checks": "transforms",
    "Export": "exporting",
    "ExportReport": "exporting",
    "export": "exporting",
    "SetStats": "set_stats",
    "stats": "set_stats",
    "Predicate": "predicate",
    "ArraySource": "arrays",
    "ConvertReport": "report",
    "FieldObserver": "schema",
    "MaintainReport": "report",
    "NameMap": "names",
    "Partition": "source",
    "RecordSource": "record_source",
    "Scan": "source",
    "Schema": "schema",
    "Segment": "source",
    "Source": "source",
    "append": "conversion",
    "convert": "conversion",
    "defragment": "maintain",
    "delete": "marks",
    "find_source": "inputs",
    "merge": "maintain",
    "plan_convert": "conversion",
    "rechunk": "maintain",
    "sort": "maintain",
    "split": "parts",
    "undelete": "marks",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        # No submodule is called like a public name: importing it would hide the name.
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

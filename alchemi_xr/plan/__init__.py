"""How much, where, in what order: counts become offsets, offsets shards, shards
tasks, and a journal remembers which are done. One engine for every bulk write.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Extent": "plan",
    "Job": "job",
    "Journal": "journal",
    "PartResult": "tasks",
    "Piece": "plan",
    "Plan": "plan",
    "Quarantine": "rejects",
    "Recipe": "job",
    "Reject": "rejects",
    "Runner": "client",
    "ShardTask": "plan",
    "build_graph": "graph",
    "make_plan": "plan",
    "open_runner": "client",
    "run_plan": "run",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

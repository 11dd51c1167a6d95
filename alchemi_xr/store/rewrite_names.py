"""Names of the folders beside a store that a rewrite uses, and its journal."""

from __future__ import annotations

import json
from pathlib import Path

from alchemi_xr.store import fs

__all__ = ["journal_path", "previous_path", "rewrite_prefix", "swapped_in"]


def previous_path(path: Path) -> Path:
    """Where the generation before the last rewrite is kept."""
    return fs.sibling(path, "previous")


def rewrite_prefix(path: Path) -> str:
    """Beginning of the names of unfinished rewrites."""
    return f".{path.name}.rewrite-"


def journal_path(path: Path) -> Path:
    """The note that a swap by two renames has begun."""
    return fs.sibling(path, "swap")


def swapped_in(path: Path) -> Path | None:
    """The new generation while a swap stands between its two renames."""
    try:
        note = json.loads(journal_path(path).read_text())
        built = path.parent / str(note["built"])
    except (OSError, ValueError, KeyError):
        return None
    return built if built.is_dir() else None

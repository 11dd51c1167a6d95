"""Samples of stores that a condition keeps, found block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.etl.predicate import Predicate
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["check_condition", "kept_by"]


def check_condition(condition: Predicate, stores: Sequence[Any]) -> None:
    """Whether what it asks for is in one of the stores at least.

    Raises
    ------
    UnknownFieldError, ConfigError
    """
    levels: dict[str, tuple[str, tuple[int, ...]]] = {}
    for store in stores:
        with open_store(store) as snapshot:
            for name in snapshot.fields:
                levels.setdefault(name, (snapshot.level(name), snapshot.tail(name)))
    condition.check(levels)


def kept_by(condition: Predicate | None, snapshot: Snapshot) -> tuple[IntArray, int]:
    """Positions of the samples that are not deleted and of which it is true.

    Only the fields that it asks for are read, a block at a time.

    Parameters
    ----------
    condition : Predicate or None
        None keeps all.
    snapshot : Snapshot

    Returns
    -------
    int64 array, [M]
        Physical positions.
    int
        Samples about which it cannot be decided; none of them is kept.
    """
    active = snapshot.active
    if condition is None:
        return active, 0
    fields = [name for name in condition.fields if name in snapshot]
    keep = np.zeros(len(active), dtype=bool)
    first = undecided = 0
    for block in snapshot.iter_blocks(fields=fields, samples=active):
        verdict = condition(block)
        keep[first : first + block.num_samples] = verdict.keep
        undecided += int(verdict.unknown.sum())
        first += block.num_samples
    return active[keep], undecided

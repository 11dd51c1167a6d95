"""Samples of a store that are the same structure as one before them.

Fingerprints are 200 bytes a sample: they lie in a file, and only those of one
composition are looked at together.
"""

from __future__ import annotations

import numbers
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.cells import complete_cells, periodicity
from alchemi_xr.data.fingerprint import FIELDS_NEEDED, LENGTH, fingerprints_of, first_same
from alchemi_xr.data.pairs import unsearchable
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.etl.gather import count, opened
from alchemi_xr.etl.parts import composition_hash
from alchemi_xr.plan.client import Runner
from alchemi_xr.plan.plan import cut_by_bytes, extent_bytes
from alchemi_xr.plan.progress import Progress
from alchemi_xr.plan.tasks import trim
from alchemi_xr.store import fs
from alchemi_xr.store.reader import Snapshot

__all__ = ["check_tolerance", "repeats"]

CUTOFF = 5.0
"""Å of the fingerprints; molecules of one composition that differ only beyond it are the same."""

TOLERANCE = 1e-4
"""Of two fingerprints, relative to the largest of each entry."""


def check_tolerance(given: bool | float | None) -> float | None:
    """The tolerance that ``dedup`` asks for, or None.

    Raises
    ------
    ConfigError
    """
    if given is None or given is False:
        return None
    if given is True:
        return TOLERANCE
    if not isinstance(given, numbers.Real) or not 0 <= given < 1:
        raise ConfigError(
            "dedup",
            "is no tolerance",
            found=repr(given),
            expected="True, or the largest relative difference of two fingerprints, from 0 to 1",
        )
    return float(given)


def repeats(
    snapshot: Snapshot,
    *,
    runner: Runner,
    shown: Progress,
    tolerance: float = TOLERANCE,
    folder: str | None = None,
) -> IntArray:
    """Physical positions of the samples that are the same structure as an earlier one.

    Only samples of one composition are compared, as
    :func:`alchemi_xr.analysis.duplicates` does. One without a fingerprint (a position
    that is NaN, a cell without volume) is the same as no other; deleted ones take no part.

    Parameters
    ----------
    snapshot : Snapshot
    runner : Runner
    shown : Progress
    tolerance : float
    folder : str, optional
        Where the fingerprints lie meanwhile.
    """
    active = snapshot.active
    counted = count(snapshot, active)
    names = [name for name in FIELDS_NEEDED if name in snapshot]
    ranges = cut_by_bytes(snapshot.sample_bytes(names)[active], extent_bytes())
    token = uuid.uuid4().hex[:8]
    graph: dict[Any, Any] = {
        (f"prints-{token}", k): (_prints, counted.source, active[a:b], names)
        for k, (a, b) in enumerate(ranges)
    }
    shown.start("repeats", len(active), "samples")
    with tempfile.TemporaryDirectory(prefix="alchemi_xr-prints-", dir=folder) as scratch:
        table = fs.make_map(Path(scratch, "prints.npy"), np.float64, (len(active), LENGTH))
        scale = np.full(LENGTH, 1e-12)

        def report(key: Any, prints: NDArray) -> None:
            start, stop = ranges[key[1]]
            table[start:stop] = prints
            np.maximum(scale, np.fmax.reduce(np.abs(prints), axis=0, initial=0.0), out=scale)
            shown.advance(stop - start)

        runner.run(graph, list(graph), report)
        same = _same(table, scale, composition_hash(snapshot, active), tolerance)
    return active[same != np.arange(len(active))]


def _same(table: NDArray, scale: NDArray, kinds: NDArray, tolerance: float) -> IntArray:
    first = np.arange(len(table), dtype=np.int64)
    order = np.argsort(kinds, kind="stable")
    cuts = np.flatnonzero(np.diff(kinds[order])) + 1
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(order)], strict=True):
        members = order[start:stop]
        if len(members) < 2:
            continue
        prints = table[members] / scale
        known = np.isfinite(prints).all(axis=1)
        if known.sum() > 1:
            members = members[known]
            first[members] = first_same(prints[known], members, tolerance)
    return first


def _prints(source: bytes | Snapshot, samples: IntArray, names: list[str]) -> NDArray:
    """Fingerprints of some samples of a store; NaN for those that can have none."""
    block = opened(source).read_block(samples, names)
    out = np.full((block.num_samples, LENGTH), np.nan)
    good = np.flatnonzero(_whole(block))
    if len(good):
        out[good] = fingerprints_of(block.take(good), CUTOFF)
    trim()
    return out


def _whole(block: Block) -> NDArray:
    """Mask of the samples that have a fingerprint."""
    mask = np.ones(block.num_samples, dtype=bool)
    mask[[sample for sample, _ in unsearchable(block)]] = False
    cell, pbc = periodicity(block)
    for i in np.flatnonzero(pbc.any(axis=1)).tolist():
        try:
            complete_cells(cell[i : i + 1], pbc[i : i + 1])
        except FieldError:
            mask[i] = False
    return mask

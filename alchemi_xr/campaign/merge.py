"""Units to stores: results in the order of the input, frames by sample and step.

Memory holds two whole numbers a sample, one group of samples at a time, and
for frames the order of one unit's. The stores are built beside their places
and published by one rename.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.campaign.blocks import BlockFolder
from alchemi_xr.campaign.results import UnitFolder
from alchemi_xr.config import option
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import row_indices
from alchemi_xr.store.fs import publish, remove_tree, sibling
from alchemi_xr.store.reader import Snapshot
from alchemi_xr.store.writer import StoreWriter

__all__ = ["merge_frames", "merge_results"]


class _Located:
    """Where the result of each sample lies."""

    def __init__(self, units: list[UnitFolder], total: int) -> None:
        self.units = units
        self.which: NDArray = np.full(total, -1, dtype=np.int32)
        self.row: IntArray = np.zeros(total, dtype=np.int64)
        for number, unit in enumerate(units):
            ids = unit.finished
            rows = np.arange(len(ids), dtype=np.int64)
            # A worker of a driver that was killed may still have committed what
            # the next one planned again: the first unit counts, both are equal.
            new = self.which[ids] < 0
            self.which[ids[new]] = number
            self.row[ids[new]] = rows[new]

    def runs(self) -> Iterator[tuple[UnitFolder, IntArray, IntArray]]:
        """Stretches of the input within one unit: unit, sample numbers, rows."""
        ids = np.flatnonzero(self.which >= 0)
        unit_of = self.which[ids]
        cuts = np.flatnonzero(np.diff(unit_of)) + 1
        for part in np.split(ids, cuts):
            if len(part):
                yield self.units[self.which[part[0]]], part, self.row[part]


def _cut(sizes: IntArray, limit: int) -> Iterator[slice]:
    """Slices of consecutive items that hold about ``limit`` bytes, each one at least."""
    group = np.cumsum(sizes) // max(limit, 1)
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(sizes)]
    for start, stop in itertools.pairwise(cuts):
        if stop > start:
            yield slice(start, stop)


def _joined(blocks: Iterator[Block], limit: int) -> Iterator[Block]:
    """Small blocks put together until they hold ``limit`` bytes: fewer commits."""
    held: list[Block] = []
    size = 0
    for block in blocks:
        if held and size + block.nbytes > limit:
            yield Block.concat(held)
            held, size = [], 0
        held.append(block)
        size += block.nbytes
    if held:
        yield Block.concat(held)


def _write(
    blocks: Iterator[Block],
    path: Path,
    *,
    overwrite: bool,
    provenance: dict[str, Any] | None,
    config: Any,
    advance: Callable[[int], None] | None,
) -> int:
    """Blocks to a store at ``path``, which appears whole; returns the samples."""
    partial = sibling(path, "merging")
    remove_tree(partial)
    samples = 0
    try:
        writer = StoreWriter(str(partial), config)
        for block in blocks:
            if samples == 0:
                writer.write(block, provenance=provenance)
            else:
                writer.append(block)
            samples += block.num_samples
            if advance is not None:
                advance(block.num_samples)
        if samples:
            publish(partial, path, overwrite=overwrite)
    finally:
        remove_tree(partial)
    return samples


def merge_results(
    units: list[UnitFolder],
    source: Snapshot,
    path: Path,
    *,
    overwrite: bool = False,
    config: Any = None,
    provenance: dict[str, Any] | None = None,
    max_bytes: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> int:
    """The store of final states, one sample for each that finished.

    Text fields, which no batch carries, are taken over from the source.

    Parameters
    ----------
    units : list of UnitFolder
    source : Snapshot
    path : Path
        The store.
    overwrite : bool
    config : ZarrWriteConfig, optional
    provenance : dict, optional
    max_bytes : int, optional
        Bytes of a group; by default the option ``stream_bytes``.
    advance : callable, optional
        Told of samples written.

    Returns
    -------
    int
        Samples written; with none, no store is made.
    """
    active = source.active
    located = _Located(units, len(active))
    limit = max_bytes or option("stream_bytes")
    text = [name for name in source.fields if source.group(name) == "text"]
    folders = _folder_cache("result")

    def groups() -> Iterator[Block]:
        for unit, ids, rows in located.runs():
            folder = folders(unit.path)
            for part in _cut(folder.sample_bytes()[rows], limit):
                block = folder.take(rows[part])
                block = block.with_field("dataset_index", ids[part][:, None], "system")
                if text:
                    block = _with_text(block, source, active[ids[part]], text)
                yield block

    return _write(
        _joined(groups(), limit),
        path,
        overwrite=overwrite,
        provenance=provenance,
        config=config,
        advance=advance,
    )


def _with_text(block: Block, source: Snapshot, physical: IntArray, names: list[str]) -> Block:
    words = source.read_block(physical, fields=names)
    for name in words.arrays:
        block = block.with_field(name, words[name], "system", words.present.get(name))
    return block


def merge_frames(
    units: list[UnitFolder],
    total: int,
    path: Path,
    *,
    overwrite: bool = False,
    config: Any = None,
    provenance: dict[str, Any] | None = None,
    max_bytes: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> int:
    """The store of frames, by ``dataset_index`` and then ``step``.

    Parameters are those of ``merge_results``; ``total`` is the number of samples
    of the source. Returns the frames written.
    """
    located = _Located(units, total)
    limit = max_bytes or option("stream_bytes")
    folders = _folder_cache("frames")

    @lru_cache(maxsize=2)
    def order(path: Path) -> tuple[IntArray, IntArray]:
        return UnitFolder(path).frame_rows()

    def groups() -> Iterator[Block]:
        for unit, ids, rows in located.runs():
            if not unit.has_frames:
                continue
            folder = folders(unit.path)
            frame_order, frames_ptr = order(unit.path)
            picks, per_sample = row_indices(frames_ptr, rows)
            frames = np.asarray(frame_order[picks])
            owner = np.repeat(ids, np.diff(per_sample))
            for part in _cut(folder.sample_bytes()[frames], limit):
                block = folder.take(frames[part])
                yield block.with_field("dataset_index", owner[part][:, None], "system")

    return _write(
        _joined(groups(), limit),
        path,
        overwrite=overwrite,
        provenance=provenance,
        config=config,
        advance=advance,
    )


def _folder_cache(name: str) -> Any:
    """Open folders of the last few units: retries lie between the others."""

    @lru_cache(maxsize=4)
    def folder(path: Path) -> BlockFolder:
        return BlockFolder(path / name)

    return folder

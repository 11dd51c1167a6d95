"""Samples in any order out of a snapshot, as one flat block.

A plan knows which pieces of which arrays a request touches before any byte
moves. When they fit in the cache, whole pieces are decoded once and rows are
copied out of them; else the snapshot reads, in ascending order and each sample
once, and the order asked for is made in memory. Both ways give the same block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alchemi_xr._typing import IntArray, Level, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import row_indices
from alchemi_xr.data.datapipes.cache import PieceCache
from alchemi_xr.store._compat import chunk_rows_of
from alchemi_xr.store.reader import Snapshot

__all__ = ["Cut", "gather", "piece_rows", "plan_cuts"]

#: Bytes that a piece has at least: a call to zarr costs 1-3 ms however little it reads.
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows that a request takes from one piece of an array.

    Parameters
    ----------
    piece : int
        Rows ``piece * size`` to ``(piece + 1) * size`` of the array.
    source : slice or int64 array
        Rows within the piece.
    target : slice or int64 array
        Rows of the result.
    """

    piece: int
    source: slice | IntArray
    target: slice | IntArray


def plan_cuts(rows: IntArray, size: int) -> list[Cut]:
    """What to take from each piece of ``size`` rows, each piece once.

    Examples
    --------
    >>> plan_cuts(np.array([1, 2, 9]), 4)
    [Cut(piece=0, source=slice(1, 3, None), target=slice(0, 2, None)), \
Cut(piece=2, source=slice(1, 2, None), target=slice(2, 3, None))]
    """
    if len(rows) == 0:
        return []
    pieces = rows // size
    order: IntArray | None = None
    if bool((np.diff(pieces) < 0).any()):
        order = np.argsort(pieces, kind="stable")
        pieces = pieces[order]
    breaks = np.flatnonzero(np.diff(pieces)) + 1
    bounds = [0, *breaks.tolist(), len(rows)]
    cuts = []
    for begin, end in pairwise(bounds):
        piece = int(pieces[begin])
        target: slice | IntArray = slice(begin, end) if order is None else order[begin:end]
        within = rows[target] - piece * size
        first = int(within[0])
        run = bool((np.diff(within) == 1).all())
        cuts.append(Cut(piece, slice(first, first + len(within)) if run else within, target))
    return cuts


def piece_rows(snapshot: Snapshot, name: str) -> int:
    """Rows of one piece: whole chunks, of about a megabyte when chunks are small."""
    chunk = chunk_rows_of(snapshot.array(name))
    row = max(1, int(np.prod(snapshot.tail(name), dtype=np.int64)) * snapshot.dtype(name).itemsize)
    return chunk * max(1, _PIECE_BYTES // (chunk * row))


def gather(
    snapshot: Snapshot,
    samples: IntArray,
    fields: Sequence[str],
    cache: PieceCache | None = None,
) -> Block:
    """The samples as a block, in the order given.

    Parameters
    ----------
    snapshot : Snapshot
    samples : int64 array, [B]
        Physical positions, in range; any order, repeats allowed.
    fields : sequence of str
        None of them text.
    cache : PieceCache, optional
        Of this snapshot alone.

    Returns
    -------
    Block
        Arrays of its own, edges local to each sample.
    """
    # The edges of another tool's appends need the snapshot's own care.
    if cache is not None and not snapshot.schema.foreign_samples:
        block = _from_pieces(snapshot, samples, fields, cache)
        if block is not None:
            return block
    if len(samples) < 2 or bool((np.diff(samples) > 0).all()):
        return snapshot.read_block(samples, fields)
    unique, order = np.unique(samples, return_inverse=True)
    return snapshot.read_block(unique, fields).take(order)


def _from_pieces(
    snapshot: Snapshot, samples: IntArray, fields: Sequence[str], cache: PieceCache
) -> Block | None:
    """The block out of cached pieces; None when the pieces do not fit in the cache."""
    atom_rows, atoms_ptr = row_indices(snapshot.atoms_ptr, samples)
    edge_rows, edges_ptr = row_indices(snapshot.edges_ptr, samples)
    rows: dict[Level, IntArray] = {"atom": atom_rows, "edge": edge_rows, "system": samples}
    levels = {name: snapshot.level(name) for name in fields}
    sizes = {name: piece_rows(snapshot, name) for name in fields}
    plans: dict[tuple[Level, int], list[Cut]] = {}
    needed = 0
    for name in fields:
        key = (levels[name], sizes[name])
        if key not in plans:
            plans[key] = plan_cuts(rows[levels[name]], sizes[name])
        tail, dtype = snapshot.tail(name), snapshot.dtype(name)
        row_bytes = int(np.prod(tail, dtype=np.int64)) * dtype.itemsize
        needed += len(plans[key]) * min(sizes[name], snapshot.schema.rows(name)) * row_bytes
        if needed > cache.limit:
            return None
    arrays = {
        name: _take(snapshot, name, sizes[name], plans[levels[name], sizes[name]], rows, cache)
        for name in fields
    }
    if "neighbor_list" in arrays:
        arrays["neighbor_list"] = _localised(
            arrays["neighbor_list"], snapshot.atoms_ptr[samples], edges_ptr
        )
    present = {}
    for name in fields:
        mask = snapshot.present(name)
        if mask is not None and not mask[samples].all():
            present[name] = mask[samples]
    units = {name: snapshot.unit(name) for name in fields if snapshot.unit(name)}
    return Block(atoms_ptr, edges_ptr, arrays, levels, present, units)


def _take(
    snapshot: Snapshot,
    name: str,
    size: int,
    cuts: Sequence[Cut],
    rows: dict[Level, IntArray],
    cache: PieceCache,
) -> NDArray:
    total = snapshot.schema.rows(name)
    wanted = rows[snapshot.level(name)]
    out: NDArray = np.empty((len(wanted), *snapshot.tail(name)), dtype=snapshot.dtype(name))
    for cut in cuts:
        start = cut.piece * size
        stop = min(start + size, total)

        def load(start: int = start, stop: int = stop) -> NDArray:
            return snapshot.read_rows(name, start, stop)

        out[cut.target] = cache.get((name, cut.piece), load)[cut.source]
    return out


def _localised(pairs: NDArray, bases: IntArray, edges_ptr: Ptr) -> NDArray:
    """Store-global edges made local to their samples, in place."""
    pairs -= np.repeat(bases, np.diff(edges_ptr))[:, None].astype(pairs.dtype)
    return pairs

"""Dask chunks that end at sample boundaries.

One partition of the samples serves every level: block k of the atoms, of the
edges and of the samples hold the same samples, so that a block is a set of
whole systems and any verb runs block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, Level, Ptr
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ConfigError
from alchemi_xr.ragged.array import RowNumbers, StoreArray, is_dask, is_lazy, origin, wrap
from alchemi_xr.ragged.conventions import DIMS, Structure, level_of

__all__ = [
    "align",
    "by_bytes",
    "chunk_dataset",
    "every",
    "find_partition",
    "is_aligned",
    "level_chunks",
    "preferred",
    "resolve_chunks",
    "widest_rows",
]

STORED_BLOCK_BYTES = 16 * 2**20
"""Least bytes of the widest field in a block that follows the stored chunks:
below this the scheduler costs more than the work."""


def every(samples: int, size: int) -> tuple[int, ...]:
    """Sizes of blocks with ``size`` samples each.

    Examples
    --------
    >>> every(5, 2), every(0, 2)
    ((2, 2, 1), (0,))
    """
    if samples == 0:
        return (0,)
    full, rest = divmod(samples, size)
    return (size,) * full + ((rest,) if rest else ())


def by_bytes(loads: Sequence[Ptr], budget: int) -> tuple[int, ...]:
    """Sizes of blocks whose every load stays within the budget.

    Parameters
    ----------
    loads : sequence of int64 array, [N + 1]
        Cumulative bytes over samples, one for each level.
    budget : int
        Bytes; a sample larger than this is a block of its own.

    Examples
    --------
    >>> by_bytes([np.array([0, 4, 8, 30, 31])], 8)
    (2, 1, 1)
    """
    samples = len(loads[0]) - 1 if loads else 0
    sizes: list[int] = []
    start = 0
    while start < samples:
        stop = min(
            int(np.searchsorted(load, load[start] + budget, side="right")) - 1 for load in loads
        )
        stop = min(max(stop, start + 1), samples)
        sizes.append(stop - start)
        start = stop
    return tuple(sizes) or (0,)


def level_chunks(ptr: Ptr, sizes: Sequence[int]) -> tuple[int, ...]:
    """Rows of each block at a level, from its samples."""
    return tuple(np.diff(ptr[counts_to_ptr(np.asarray(sizes))]).tolist())


def preferred(
    struct: Structure, row_bytes: Mapping[Level, int], stored_rows: Callable[[Level], int]
) -> tuple[int, ...]:
    """Block sizes that follow the stored chunks of the widest level.

    A block ends at the first sample boundary at or after a whole number of
    stored chunks, and has some megabytes.
    """
    loads: dict[Level, int] = {
        level: struct.rows(level) * size for level, size in row_bytes.items() if size
    }
    if not loads or struct.num_samples == 0:
        return (struct.num_samples,)
    level = max(loads, key=lambda k: loads[k])
    if loads[level] <= STORED_BLOCK_BYTES:
        return (struct.num_samples,)
    ptr = struct.ptr(level)
    step = max(1, stored_rows(level))
    step *= max(1, -(-STORED_BLOCK_BYTES // (step * row_bytes[level])))
    marks = np.arange(step, int(ptr[-1]), step, dtype=np.int64)
    stops = np.unique(np.append(np.searchsorted(ptr, marks, side="left"), struct.num_samples))
    return tuple(np.diff(stops[stops > 0], prepend=0).tolist())


def resolve_chunks(
    chunks: Any, struct: Structure, row_bytes: Mapping[Level, int], stored: tuple[int, ...]
) -> tuple[int, ...]:
    """Samples of each block, for any way to ask for them.

    Parameters
    ----------
    chunks : int, str, tuple of int, or mapping
        Samples in a block (-1: all); bytes as text (``"64MiB"``); ``"auto"``
        for Dask's own block size; sizes; ``{"sample": any of these}``; ``{}``
        for blocks that follow the stored chunks.
    struct : Structure
    row_bytes : mapping of level to int
        Bytes of one row of the widest field of each level.
    stored : tuple of int
        Answer to ``{}``.

    Raises
    ------
    ConfigError
        A dimension other than ``sample``, or a size that is none.
    """
    samples = struct.num_samples
    if isinstance(chunks, Mapping):
        others = [d for d in chunks if d != DIMS["system"]]
        if others:
            raise ConfigError(
                "chunks",
                f"blocks are cut between samples, not along {', '.join(map(repr, others))}",
                expected="{'sample': n}",
                mend="give samples in a block, or bytes such as '64MiB'",
            )
        chunks = chunks.get(DIMS["system"], {})
        if isinstance(chunks, Mapping) or chunks is None:
            return stored
    if isinstance(chunks, (list, tuple)):
        sizes = tuple(int(c) for c in chunks)
        if sum(sizes) != samples or min(sizes, default=0) < 0:
            raise ConfigError(
                "chunks", "sizes do not add up to the samples", found=sum(sizes), expected=samples
            )
        return sizes or (0,)
    if isinstance(chunks, (int, np.integer)) and not isinstance(chunks, bool):
        if chunks == -1:
            return (samples,)
        if chunks > 0:
            return every(samples, int(chunks))
    elif isinstance(chunks, str):
        budget = _budget(chunks)
        loads = [struct.ptr(level) * size for level, size in row_bytes.items() if size]
        return by_bytes(loads, budget) if loads else (samples,)
    raise ConfigError(
        "chunks",
        f"{chunks!r} is no way to cut samples into blocks",
        expected="None, {}, 'auto', a number of samples, bytes such as '64MiB', {'sample': n}",
    )


def _budget(text: str) -> int:
    import dask.config
    from dask.utils import parse_bytes

    try:
        value = dask.config.get("array.chunk-size") if text == "auto" else text
        budget = int(parse_bytes(value))
        if budget < 1:
            raise ValueError(text)
    except ValueError as error:
        raise ConfigError(
            "chunks", f"{text!r} is no number of bytes", expected="'auto' or such as '64MiB'"
        ) from error
    return max(1, budget)


def chunk_dataset(ds: xr.Dataset, struct: Structure, sizes: tuple[int, ...]) -> xr.Dataset:
    """The Dataset with every lazy or Dask variable in these blocks."""
    changed = {
        name: align(var, struct, sizes, name=name)
        for name, var in ds.variables.items()
        if level_of(var.dims) is not None
        and (is_lazy(var) or is_dask(var))
        # One number a sample, made on the spot: nothing to gain from blocks.
        and not isinstance(origin(var), RowNumbers)
    }
    return ds.assign({n: v for n, v in changed.items() if n in ds.data_vars}).assign_coords(
        {n: v for n, v in changed.items() if n in ds.coords}
    )


def align(
    var: xr.Variable, struct: Structure, sizes: tuple[int, ...], *, name: Hashable = "values"
) -> xr.Variable:
    """The variable as a Dask array in these blocks of samples, trailing axes whole.

    One that still shows a field of a store is cut anew at the store, which
    moves no bytes; another Dask array is rechunked.
    """
    level = level_of(var.dims, name=name)
    if level is None:
        return var
    want = dict.fromkeys(var.dims, -1) | {DIMS[level]: level_chunks(struct.ptr(level), sizes)}
    if is_dask(var):
        if is_aligned(var, struct, sizes):
            return var
        source = origin(var)
        if source is None:
            return var.chunk(want)
        var = xr.Variable(var.dims, wrap(source), var.attrs, var.encoding)
    source = origin(var)
    token: str | None = None
    if isinstance(source, StoreArray):
        from dask.base import tokenize

        token = f"{name}-{tokenize(source, sizes)}"
    return var.chunk(want, name=token)


def is_aligned(var: xr.Variable, struct: Structure, sizes: Sequence[int]) -> bool:
    """Whether a Dask variable is in exactly these blocks, trailing axes whole."""
    level = level_of(var.dims)
    if level is None or not var.chunks:
        return False
    for dim, chunks in zip(var.dims, var.chunks, strict=True):
        if dim == DIMS[level]:
            if chunks != level_chunks(struct.ptr(level), sizes):
                return False
        elif len(chunks) > 1:
            return False
    return True


def find_partition(
    ds: xr.Dataset, struct: Structure, *extra: xr.Variable
) -> tuple[int, ...] | None:
    """Samples of each block as the Dask variables have it; None without Dask.

    Where they disagree, the variables over samples lead; where none is cut at
    sample boundaries, the first one's blocks are moved to the nearest.
    """
    chunked = [v for v in (*extra, *ds.variables.values()) if is_dask(v)]
    stops: dict[Level, IntArray] = {}
    for var in chunked:
        level = level_of(var.dims)
        if level is not None:
            axis = var.dims.index(DIMS[level])
            assert var.chunks is not None
            stops.setdefault(level, np.cumsum(var.chunks[axis], dtype=np.int64))
    for level in ("system", "atom", "edge"):
        if level not in stops:
            continue
        ptr = struct.ptr(level)
        at = np.searchsorted(ptr, stops[level], side="left")
        # Samples without rows after the last row belong to the last block.
        at[-1:] = struct.num_samples
        sizes = np.diff(np.maximum.accumulate(at), prepend=0)
        return tuple(sizes[sizes > 0].tolist()) or (0,)
    return None


def widest_rows(ds: xr.Dataset) -> dict[Level, int]:
    """Bytes of one row of the widest variable of each level."""
    out: dict[Level, int] = {"system": 0, "atom": 0, "edge": 0}
    for name, var in ds.variables.items():
        level = level_of(var.dims, name=name)
        if level is None:
            continue
        tail = [n for d, n in zip(var.dims, var.shape, strict=True) if d != DIMS[level]]
        out[level] = max(out[level], var.dtype.itemsize * int(np.prod(tail, dtype=np.int64)))
    return out

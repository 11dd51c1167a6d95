"""Choosing samples, all levels following.

A selection is pushed down into the store where a variable still shows a field
of one: only row ranges are remembered, and no row is read before values are
asked for, nor ever one that was not chosen. Dask arrays that were computed
are gathered block by block; arrays in memory are indexed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, Level, NDArray, Ptr
from alchemi_xr.data.csr import as_index, counts_to_ptr, row_indices
from alchemi_xr.errors import (
    ArgumentTypeError,
    FieldError,
    IndexRangeError,
    UnknownFieldError,
    nearest,
)
from alchemi_xr.ragged.array import RowNumbers, StoreArray, is_dask, origin, wrap
from alchemi_xr.ragged.chunks import align, find_partition
from alchemi_xr.ragged.conventions import (
    DIMS,
    POINTER_NAMES,
    PTR_DIM,
    Structure,
    level_of,
    pointer_coords,
    structure,
)
from alchemi_xr.ragged.rows import Selection

__all__ = ["head", "isel", "sample", "sample_values", "sel", "sortby", "take", "where"]


def isel(ds: xr.Dataset, samples: Any) -> xr.Dataset:
    """Samples by position; see ``RaggedAccessor.isel``."""
    struct = structure(ds)
    if isinstance(samples, xr.DataArray):
        samples = samples.values
    return take(ds, struct, as_index(samples, struct.num_samples, where="ds.ragged.isel"))


def head(ds: xr.Dataset, n: int) -> xr.Dataset:
    """The first ``n`` samples."""
    struct = structure(ds)
    _need_int(n, "ds.ragged.head")
    return take(ds, struct, np.arange(*slice(n).indices(struct.num_samples), dtype=np.int64))


def sample(ds: xr.Dataset, n: int, seed: int | None) -> xr.Dataset:
    """``n`` samples drawn without replacement, in their order."""
    struct = structure(ds)
    _need_int(n, "ds.ragged.sample")
    if seed is not None:
        _need_int(seed, "ds.ragged.sample (seed)")
    if not 0 <= n <= struct.num_samples:
        raise IndexRangeError(
            "ds.ragged.sample",
            "more samples asked for than there are",
            found=n,
            expected=f"0 to {struct.num_samples}",
        )
    drawn = np.random.default_rng(seed).choice(struct.num_samples, size=n, replace=False)
    return take(ds, struct, np.sort(drawn).astype(np.int64))


def _need_int(value: Any, where: str) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ArgumentTypeError(where, "a whole number is needed", found=repr(value)[:60])


def where(
    ds: xr.Dataset, condition: xr.DataArray | NDArray | Callable[[xr.Dataset], Any]
) -> xr.Dataset:
    """Samples for which a condition holds; see ``RaggedAccessor.where``."""
    struct = structure(ds)
    if callable(condition) and not isinstance(condition, xr.DataArray):
        condition = condition(ds)
    if isinstance(condition, xr.DataArray):
        _need_samples(condition.variable, condition.name, "ds.ragged.where", struct)
    mask = np.asarray(condition)
    if mask.dtype.kind != "b":
        raise FieldError(
            "ds.ragged.where", "the condition is no mask", found=mask.dtype, expected="bool"
        )
    return take(ds, struct, as_index(mask, struct.num_samples, where="ds.ragged.where"))


def sortby(ds: xr.Dataset, by: Hashable | xr.DataArray, *, ascending: bool) -> xr.Dataset:
    """Samples in the order of a key; see ``RaggedAccessor.sortby``."""
    struct = structure(ds)
    values = sample_values(ds, by, "ds.ragged.sortby", struct)
    if values.dtype.kind == "O":
        values = values.astype(str)
    order = np.argsort(values, kind="stable")
    if not ascending:
        # Stable in descending order too: equal keys keep their order.
        order = len(values) - 1 - np.argsort(values[::-1], kind="stable")[::-1]
        if values.dtype.kind == "f":
            missing = np.isnan(values[order])
            order = np.concatenate([order[~missing], order[missing]])
    return take(ds, struct, order.astype(np.int64))


def sel(ds: xr.Dataset, labels: Mapping[str, Any]) -> xr.Dataset:
    """Samples by the values of fields; see ``RaggedAccessor.sel``."""
    struct = structure(ds)
    chosen: IntArray | None = None
    for name, label in labels.items():
        values = sample_values(ds, name, "ds.ragged.sel", struct)
        found = _match(values, label, name)
        chosen = found if chosen is None else chosen[np.isin(chosen, found)]
    if chosen is None:
        chosen = np.arange(struct.num_samples, dtype=np.int64)
    return take(ds, struct, chosen)


def _match(values: NDArray, label: Any, name: Hashable) -> IntArray:
    """Positions of the samples with a label, with each of several in turn, or in a range."""
    if values.dtype.kind == "O":
        values = values.astype(str)
    if isinstance(label, slice):
        keep = np.ones(len(values), dtype=bool)
        if label.start is not None:
            keep &= values >= label.start
        if label.stop is not None:
            keep &= values <= label.stop
        return np.flatnonzero(keep).astype(np.int64)
    wanted = np.atleast_1d(np.asarray(label))
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    first = np.searchsorted(ranked, wanted, side="left")
    last = np.searchsorted(ranked, wanted, side="right")
    missing = wanted[first == last]
    if missing.size:
        raise IndexRangeError(
            "ds.ragged.sel",
            f"no sample has {name} {missing[0]!s}"
            + (f" (and {missing.size - 1} others)" if missing.size > 1 else ""),
            mend=f"choose by a mask: ds.ragged.where(ds[{name!r}].isin([...]))",
        )
    at, _ = row_indices_between(first, last)
    return order[at].astype(np.int64)


def row_indices_between(starts: IntArray, stops: IntArray) -> tuple[IntArray, Ptr]:
    """The whole numbers of each range, one range after the other, and their pointer."""
    counts = np.asarray(stops - starts, dtype=np.int64)
    ptr = counts_to_ptr(counts)
    rows = np.repeat(starts - ptr[:-1], counts)
    rows += np.arange(ptr[-1], dtype=np.int64)
    return rows, ptr


def sample_values(
    ds: xr.Dataset, by: Hashable | xr.DataArray, where: str, struct: Structure
) -> NDArray:
    if isinstance(by, xr.DataArray):
        name, var = by.name, by.variable
    elif by in ds.variables:
        name, var = by, ds.variables[by]
    else:
        raise UnknownFieldError(
            where, f"no variable {by!r}. {nearest(str(by), map(str, ds.variables))}"
        )
    _need_samples(var, name, where, struct)
    return np.asarray(var.values)


def _need_samples(var: xr.Variable, name: Hashable, where: str, struct: Structure) -> None:
    if var.dims != (DIMS["system"],):
        level = level_of(var.dims, name=name)
        mend = "give one value a sample"
        if level in ("atom", "edge"):
            mend = f"one value a sample comes from ds.ragged.reduce({str(name)!r}, 'any'), 'max' …"
        raise FieldError(
            where,
            f"{str(name)!r} has not one value a sample",
            found=f"dims {var.dims}",
            expected="('sample',)",
            mend=mend,
        )
    if var.shape != (struct.num_samples,):
        raise IndexRangeError(
            where,
            f"{str(name)!r} is of another Dataset",
            found=f"{var.shape[0]} samples",
            expected=struct.num_samples,
        )


def take(ds: xr.Dataset, struct: Structure, positions: IntArray) -> xr.Dataset:
    """The samples at these positions with their atoms and edges, lazily.

    Parameters
    ----------
    ds : Dataset
    struct : Structure
        Of ``ds``, checked.
    positions : int64 array, [M]
        In range, any order, repeats allowed.
    """
    # ``reset_coords`` may have made variables of them.
    ds = ds.set_coords([n for n in POINTER_NAMES if n in ds.data_vars])
    out_struct = struct.take(positions)
    partition = find_partition(ds, struct)
    out_sizes = None if partition is None else _out_partition(partition, positions, struct)
    pushed: dict[int, Selection] = {}
    made: dict[Hashable, xr.Variable] = {}
    for name, var in ds.variables.items():
        level = level_of(var.dims, name=name)
        if level is None or name in POINTER_NAMES:
            continue
        source = origin(var)
        if isinstance(source, StoreArray):
            key = id(source.selection)
            if key not in pushed:
                pushed[key] = source.selection.take(positions)
            new = xr.Variable(
                var.dims, wrap(source.take(pushed[key])), var.attrs, _encoding(var.encoding)
            )
            if is_dask(var):
                assert out_sizes is not None
                new = align(new, out_struct, out_sizes, name=name)
            made[name] = new
        elif is_dask(var) and not isinstance(source, RowNumbers):
            assert partition is not None
            assert out_sizes is not None
            made[name] = _take_dask(var, level, struct, partition, positions, out_sizes, name)
    rest = ds.drop_vars([*made, *(n for n in POINTER_NAMES if n in ds.variables)])
    rest = rest.isel(_indexers(rest, struct, positions))
    out = rest.assign({n: v for n, v in made.items() if n in ds.data_vars})
    out = out[list(ds.data_vars)] if len(ds.data_vars) else out
    # A choice of data variables drops coordinates of other levels: all are set again.
    coords = {n: v for n, v in rest.coords.items() if n not in out.coords}
    coords |= {n: v for n, v in made.items() if n in ds.coords}
    return out.assign_coords(coords | pointer_coords(out_struct)).assign_attrs(ds.attrs)


def _encoding(encoding: dict[Hashable, Any]) -> dict[Hashable, Any]:
    return {k: v for k, v in encoding.items() if k not in ("preferred_chunks", "chunks")}


def _indexers(ds: xr.Dataset, struct: Structure, positions: IntArray) -> dict[str, Any]:
    """Indexers of the dims that remain; slices where the samples are contiguous."""
    contiguous = len(positions) > 0 and bool((np.diff(positions) == 1).all())
    out: dict[str, Any] = {}
    for level, dim in DIMS.items():
        if dim not in ds.dims:
            continue
        ptr = struct.ptr(level)
        if contiguous:
            out[dim] = slice(int(ptr[positions[0]]), int(ptr[positions[-1] + 1]))
        elif level == "system":
            out[dim] = positions
        else:
            out[dim] = row_indices(ptr, positions)[0]
    if PTR_DIM in ds.dims:
        raise FieldError(
            "ds.ragged",
            f"a variable besides the pointers lies along {PTR_DIM!r}",
            found=[str(n) for n, v in ds.variables.items() if PTR_DIM in v.dims],
            mend="drop it before samples are chosen",
        )
    return out


def _out_partition(
    partition: Sequence[int], positions: IntArray, struct: Structure
) -> tuple[int, ...]:
    """Blocks of the chosen samples.

    A new block begins where the samples come from another block, unless that
    would cut them finer than the blocks they came from: samples in no order
    are grouped so that no block has more samples or atoms than the largest.
    """
    if len(positions) == 0:
        return (0,)
    edges = counts_to_ptr(np.asarray(partition))
    owner = np.searchsorted(edges, positions, side="right") - 1
    if (np.diff(owner) >= 0).all():
        _, counts = np.unique(owner, return_counts=True)
        return tuple(counts.tolist())
    limit = int(max(partition))
    atoms = int(max(np.diff(struct.atoms_ptr[edges]).max(), 1))
    load = counts_to_ptr(np.diff(struct.atoms_ptr)[positions])
    sizes: list[int] = []
    start = 0
    while start < len(positions):
        fits = int(np.searchsorted(load, load[start] + atoms, side="right")) - 1
        stop = min(max(fits, start + 1), start + limit, len(positions))
        sizes.append(stop - start)
        start = stop
    return tuple(sizes)


def _take_dask(
    var: xr.Variable,
    level: Level,
    struct: Structure,
    partition: tuple[int, ...],
    positions: IntArray,
    out_sizes: tuple[int, ...],
    name: Hashable,
) -> xr.Variable:
    """A computed Dask array, gathered: each new block asks only the blocks it needs."""
    import dask.array
    from dask.base import tokenize
    from dask.highlevelgraph import HighLevelGraph

    da: Any = dask.array
    dims = (DIMS[level], *(d for d in var.dims if d != DIMS[level]))
    source = align(var, struct, partition, name=name).transpose(*dims).data
    ptr = struct.ptr(level)
    edges = counts_to_ptr(np.asarray(partition))
    owner = np.searchsorted(edges, positions, side="right") - 1
    tail = (0,) * (source.ndim - 1)
    key = f"ragged-take-{tokenize(source.name, positions, out_sizes)}"
    graph: dict[Any, Any] = {}
    rows: list[int] = []
    bounds = counts_to_ptr(np.asarray(out_sizes))
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        chosen, owners = positions[start:stop], owner[start:stop]
        blocks = np.unique(owners)
        parts = []
        for block in blocks:
            picked = chosen[owners == block]
            parts.append(((source.name, int(block), *tail), ptr[picked] - ptr[edges[block]]))
        counts = ptr[chosen + 1] - ptr[chosen]
        # Where each chosen sample comes among those of its block, block after block.
        order = np.argsort(owners, kind="stable")
        graph[(key, k, *tail)] = (
            _gather,
            [array for array, _ in parts],
            [starts for _, starts in parts],
            counts,
            order,
        )
        rows.append(int(counts.sum()))
    if len(positions) == 0:
        empty = da.zeros((0, *source.shape[1:]), dtype=source.dtype)
        return xr.Variable(dims, empty, var.attrs).transpose(*var.dims)
    chunks = (tuple(rows), *((n,) for n in source.shape[1:]))
    layer = HighLevelGraph.from_collections(key, graph, dependencies=[source])
    out = da.Array(layer, key, chunks, dtype=source.dtype, meta=source._meta)
    return xr.Variable(dims, out, var.attrs).transpose(*var.dims)


def _gather(
    blocks: list[NDArray], starts: list[IntArray], counts: IntArray, order: IntArray
) -> NDArray:
    """Rows of samples out of several blocks, in the order asked for."""
    pieces, done = [], 0
    for block, first in zip(blocks, starts, strict=True):
        size = counts[order[done : done + len(first)]]
        pieces.append(block[row_indices_between(first, first + size)[0]])
        done += len(first)
    joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if (np.diff(order) > 0).all():
        return joined
    at = np.empty_like(order)
    at[order] = np.arange(len(order))
    return joined[row_indices(counts_to_ptr(counts[order]), at)[0]]

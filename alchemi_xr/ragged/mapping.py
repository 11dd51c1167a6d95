"""Functions of whole samples, block by block, in parallel.

One graph serves all: task k gets the samples of block k, loaded, and knows
nothing of the others. A Dataset on Dask gives a lazy result; any other is cut
into blocks of a few megabytes and computed at once, in bounded memory.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, Level, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import as_rows
from alchemi_xr.errors import ArgumentTypeError, FieldError
from alchemi_xr.ragged.array import is_dask
from alchemi_xr.ragged.chunks import align, by_bytes, find_partition, level_chunks, widest_rows
from alchemi_xr.ragged.conventions import (
    DIMS,
    POINTER_NAMES,
    PTR_DIM,
    Structure,
    level_of,
    pointer_coords,
    structure,
)
from alchemi_xr.ragged.select import take

__all__ = ["apply_blocks", "as_block", "map_blocks", "partition_of"]

READ_BYTES = 4 * 2**20
"""Bytes of the widest field in a block, where the Dataset is not on Dask."""

Rows = Literal["system", "atom", "edge", "block"]


def partition_of(
    ds: xr.Dataset, struct: Structure, *, max_bytes: int = READ_BYTES
) -> tuple[tuple[int, ...], bool]:
    """Samples of each block, and whether the Dataset is on Dask."""
    sizes = find_partition(ds, struct)
    if sizes is not None:
        return sizes, True
    loads = [struct.ptr(level) * size for level, size in widest_rows(ds).items() if size]
    return (by_bytes(loads, max_bytes) if loads else (struct.num_samples,)), False


def apply_blocks(
    ds: xr.Dataset,
    names: Sequence[Hashable],
    func: Callable[..., NDArray],
    *args: Any,
    rows: Rows,
    tail: tuple[int, ...] = (),
    dtype: Any = np.float64,
    max_bytes: int = READ_BYTES,
) -> Any:
    """An array out of a function of blocks of whole samples.

    Parameters
    ----------
    ds : Dataset
    names : sequence of str
        Variables that the function needs; only these are read.
    func : callable
        Gets a `Block` of these and ``args``; gives an array with one row a
        sample, atom or edge, or (``rows="block"``) one row in all.
    rows : {"system", "atom", "edge", "block"}
    tail : tuple of int
        Shape of one row.
    dtype : dtype
    max_bytes : int
        Of the widest field in a block, where the Dataset is not on Dask.

    Returns
    -------
    Dask array, or NumPy array where the Dataset is not on Dask
    """
    kept = _keep(ds, [*names, *(f"{n}_present" for n in names)])
    struct = structure(ds)
    sizes, lazy = partition_of(kept, struct, max_bytes=max_bytes)
    if not lazy and any(is_dask(v) for v in ds.variables.values()):
        sizes, lazy = partition_of(ds, struct)
    counts = {
        "system": tuple(sizes),
        "atom": level_chunks(struct.atoms_ptr, sizes),
        "edge": () if struct.edges_ptr is None else level_chunks(struct.edges_ptr, sizes),
        "block": (1,) * len(sizes),
    }[rows]

    def call(block: xr.Dataset) -> NDArray:
        out = np.asarray(func(as_block(block), *args), dtype=dtype)
        return out[None] if rows == "block" else out

    # The function by its name: to pickle it for a token takes as long as a block.
    name = None if "<" in func.__qualname__ else (func.__module__, func.__qualname__)
    token = (name or func, args, rows, np.dtype(dtype))
    chunks = (counts, *((n,) for n in tail))
    out = _stack(kept, struct, sizes, call, token, chunks, np.dtype(dtype))
    return out if lazy else out.compute()


def _keep(ds: xr.Dataset, names: Sequence[Hashable]) -> xr.Dataset:
    keep = {*names, *POINTER_NAMES}
    return ds.drop_vars([n for n in ds.variables if n not in keep])


def _stack(
    ds: xr.Dataset,
    struct: Structure,
    sizes: tuple[int, ...],
    call: Callable[[xr.Dataset], Any],
    token: Any,
    chunks: tuple[tuple[int, ...], ...],
    dtype: np.dtype[Any],
) -> Any:
    import dask.array
    from dask.highlevelgraph import HighLevelGraph

    da: Any = dask.array
    key, graph, inputs = _tasks(ds, struct, sizes, call, token)
    zeros = (0,) * (len(chunks) - 1)
    graph = {(*k, *zeros): task for k, task in graph.items()}
    layer = HighLevelGraph.from_collections(key, graph, dependencies=inputs)
    meta = np.empty((0,) * len(chunks), dtype=dtype)
    return da.Array(layer, key, chunks, dtype=dtype, meta=meta)


def _tasks(
    ds: xr.Dataset,
    struct: Structure,
    sizes: tuple[int, ...],
    call: Callable[[xr.Dataset], Any],
    token: Any,
) -> tuple[str, dict[Any, Any], list[Any]]:
    """Key, one task for each block, and the arrays that they depend on."""
    from dask.base import tokenize

    inputs: list[Any] = []
    arrays: dict[Hashable, tuple[Hashable, ...]] = {}
    keys: dict[Hashable, Any] = {}
    attrs: dict[Hashable, Any] = {}
    whole: dict[Hashable, xr.Variable] = {}
    for name, var in ds.variables.items():
        if name in POINTER_NAMES or PTR_DIM in var.dims:
            continue
        level = level_of(var.dims, name=name)
        if level is None:
            whole[name] = var
            continue
        var = var.transpose(DIMS[level], ...)
        data = align(var.to_base_variable(), struct, sizes, name=name).data
        inputs.append(data)
        arrays[name] = var.dims
        attrs[name] = var.attrs
        keys[name] = (data.name, (0,) * (data.ndim - 1))
    shell = _Shell(arrays, attrs, whole, frozenset(ds.coords), dict(ds.attrs))
    key = f"ragged-map-{tokenize(token, sizes, [x.name for x in inputs], struct.atoms_ptr)}"
    graph: dict[Any, Any] = {}
    bounds = counts_to_ptr(np.asarray(sizes))
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        cut = slice(int(start), int(stop) + 1)
        atoms = struct.atoms_ptr[cut] - struct.atoms_ptr[start]
        edges = None
        if struct.edges_ptr is not None:
            edges = struct.edges_ptr[cut] - struct.edges_ptr[start]
        blocks = [(name, k, *rest) for name, rest in keys.values()]
        graph[(key, k)] = (_run, call, shell, int(start), atoms, edges, blocks)
    return key, graph, inputs


class _Shell:
    """All of a block but its values."""

    def __init__(
        self,
        dims: Mapping[Hashable, tuple[Hashable, ...]],
        attrs: Mapping[Hashable, Any],
        whole: Mapping[Hashable, xr.Variable],
        coords: frozenset[Hashable],
        own: dict[Hashable, Any],
    ) -> None:
        self.dims, self.attrs, self.whole, self.coords, self.own = dims, attrs, whole, coords, own

    def fill(self, start: int, atoms: Ptr, edges: Ptr | None, values: list[NDArray]) -> xr.Dataset:
        """The Dataset of one block; ``block_start`` is its first sample in the whole."""
        made: dict[Hashable, xr.Variable] = dict(self.whole)
        for (name, dims), array in zip(self.dims.items(), values, strict=True):
            made[name] = xr.Variable(dims, array, self.attrs[name])
        coords: dict[Any, Any] = {n: v for n, v in made.items() if n in self.coords}
        coords |= pointer_coords(Structure(atoms, edges))
        data = {n: v for n, v in made.items() if n not in coords}
        return xr.Dataset(data, coords, {**self.own, "block_start": start})


def _run(
    call: Callable[[xr.Dataset], Any],
    shell: _Shell,
    start: int,
    atoms: Ptr,
    edges: Ptr | None,
    values: list[NDArray],
) -> Any:
    # On a worker nobody else may have registered ``ds.ragged`` yet.
    importlib.import_module("alchemi_xr.ragged.accessor")
    return call(shell.fill(start, atoms, edges, values))


def as_block(ds: xr.Dataset) -> Block:
    """A loaded Dataset as flat arrays; fields of one number a sample get their axis back."""
    struct = structure(ds)
    edges = struct.edges_ptr
    if edges is None:
        edges = np.zeros(struct.num_samples + 1, dtype=np.int64)
    arrays: dict[str, NDArray] = {}
    levels: dict[str, Level] = {}
    present = {}
    masks = {f"{n}_present": str(n) for n in ds.variables if f"{n}_present" in ds.variables}
    for key, var in ds.variables.items():
        name = str(key)
        level = level_of(var.dims, name=name)
        if level is None or name in POINTER_NAMES or PTR_DIM in var.dims:
            continue
        values = np.asarray(var.transpose(DIMS[level], ...).values)
        if name in masks:
            if not values.all():
                present[masks[name]] = values
            continue
        arrays[name] = as_rows(name, values) if level == "system" else values
        levels[name] = level
    return Block(struct.atoms_ptr, edges, arrays, levels, present)


def map_blocks(
    ds: xr.Dataset, func: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A function of whole samples over all of them; see ``RaggedAccessor.map_blocks``."""
    struct = structure(ds)
    ds = ds.drop_vars([n for n in ("samples_mask",) if n in ds.data_vars])
    args, kwargs = tuple(args), dict(kwargs)

    def call(block: xr.Dataset) -> Any:
        return _checked(func(block, *args, **kwargs), block, func)

    shape = _template(ds, struct, call)
    names = [None] if isinstance(shape, xr.DataArray) else list(shape.variables)
    sizes, lazy = partition_of(ds, struct)
    key, graph, inputs = _tasks(ds, struct, sizes, call, call)
    variables: dict[Hashable, xr.Variable] = {}
    for name in names:
        var = shape.variable if name is None else shape.variables[name]
        if name in POINTER_NAMES or PTR_DIM in var.dims:
            continue
        level = level_of(var.dims, name=name)
        if level is None:
            raise FieldError(
                "ds.ragged.map_blocks",
                f"result {str(name)!r} lies along no level, so blocks cannot be joined",
                found=f"dims {var.dims}",
                expected="'sample', 'atom' or 'edge' among them",
                mend="give a value for each sample, and reduce these in the end",
            )
        axis = var.dims.index(DIMS[level])
        chunks: list[tuple[int, ...]] = [(n,) for n in var.shape]
        chunks[axis] = level_chunks(struct.ptr(level), sizes)
        variables[name] = xr.Variable(
            var.dims, _pick(key, graph, inputs, name, axis, tuple(chunks), var.dtype), var.attrs
        )
    if isinstance(shape, xr.DataArray):
        var = variables[None]
        coords = {n: c.variable for n, c in ds.coords.items() if set(c.dims) <= set(var.dims)}
        out: Any = xr.DataArray(var, coords, name=shape.name)
    else:
        keep = {n: v for n, v in variables.items() if n in shape.data_vars}
        out = xr.Dataset(keep, attrs={k: v for k, v in shape.attrs.items() if k != "block_start"})
        own = {n: v for n, v in variables.items() if n in shape.coords}
        out = out.assign_coords(own | pointer_coords(struct))
    return out if lazy else out.compute()


def _pick(
    key: str,
    graph: dict[Any, Any],
    inputs: list[Any],
    name: Hashable,
    axis: int,
    chunks: tuple[tuple[int, ...], ...],
    dtype: np.dtype[Any],
) -> Any:
    """The Dask array of one variable of the results."""
    import dask.array
    from dask.highlevelgraph import HighLevelGraph

    da: Any = dask.array
    mine = f"{key}-{name}"
    layer: dict[Any, Any] = {}
    for k, at in enumerate(graph):
        index = [0] * len(chunks)
        index[axis] = k
        shape = tuple(c[k] if i == axis else c[0] for i, c in enumerate(chunks))
        layer[(mine, *index)] = (_values, at, name, shape, dtype)
    base = HighLevelGraph.from_collections(key, graph, dependencies=inputs)
    whole = HighLevelGraph({**base.layers, mine: layer}, {**base.dependencies, mine: {key}})
    meta = np.empty((0,) * len(chunks), dtype=dtype)
    return da.Array(whole, mine, chunks, dtype=dtype, meta=meta)


def _values(result: Any, name: Hashable, shape: tuple[int, ...], dtype: Any) -> NDArray:
    var = result.variable if isinstance(result, xr.DataArray) else result.variables[name]
    if var.shape != shape:
        raise FieldError(
            "ds.ragged.map_blocks",
            f"the function gave {str(name)!r} of another shape than for the first sample",
            found=list(var.shape),
            expected=list(shape),
        )
    return np.asarray(var.values, dtype=dtype)


def _checked(result: Any, block: xr.Dataset, func: Callable[..., Any]) -> Any:
    if not isinstance(result, (xr.DataArray, xr.Dataset)):
        raise ArgumentTypeError(
            "ds.ragged.map_blocks",
            f"{getattr(func, '__name__', 'the function')} gave no xarray object",
            found=type(result).__name__,
            expected="a DataArray or Dataset over sample, atom or edge",
        )
    return result


def _template(ds: xr.Dataset, struct: Structure, call: Callable[[xr.Dataset], Any]) -> Any:
    """What the function makes of the first sample that has atoms (of none, if none has)."""
    filled: IntArray = np.flatnonzero(np.diff(struct.atoms_ptr))[:1]
    one = take(ds, struct, filled.astype(np.int64)).load()
    return call(one.assign_attrs(block_start=int(filled[0]) if len(filled) else 0))

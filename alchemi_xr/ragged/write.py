"""``ds.ragged.to_zarr``: a lazy Dataset to a store, through the plan.

Fields that are still in a store are read by the tasks themselves, Dask arrays
are part of the same graph, arrays in memory travel in slices. Offsets are
known before the first byte, one task owns one storage object, and blocks end
at sample boundaries, so no row is written twice or lost.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import BoolArray, Level, NDArray
from alchemi_xr._version import __version__
from alchemi_xr.config import option
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    PlanError,
    StoreExistsError,
    StoreNotFoundError,
)
from alchemi_xr.plan.client import open_runner
from alchemi_xr.plan.elsewhere import check_reach, open_job, scratch_path
from alchemi_xr.plan.graph import Inputs
from alchemi_xr.plan.job import Job, Recipe, build, check_destination, settle
from alchemi_xr.plan.plan import plan_samples
from alchemi_xr.plan.progress import open_progress
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.ragged.array import StoreArray, is_dask, is_lazy, origin, wrap
from alchemi_xr.ragged.chunks import align, find_partition
from alchemi_xr.ragged.conventions import (
    DIMS,
    POINTER_NAMES,
    Structure,
    level_of,
    structure,
)
from alchemi_xr.ragged.select import take
from alchemi_xr.store.bulk import FieldLayout
from alchemi_xr.store.codecs import ZarrWriteConfig, as_config
from alchemi_xr.store.incoming import Incoming, fit, receive
from alchemi_xr.store.locate import locate
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.writer import StoreWriter

__all__ = ["PendingWrite", "WriteReport", "to_zarr"]

_WHERE = "ds.ragged.to_zarr"


@dataclass(frozen=True)
class WriteReport:
    """What ``to_zarr`` wrote.

    Parameters
    ----------
    destination : str
    samples, atoms, edges : int
    seconds : float
    resumed : bool
        A write that was stopped was taken up.
    """

    destination: str
    samples: int
    atoms: int
    edges: int
    seconds: float
    resumed: bool = False


@dataclass(frozen=True)
class _Column:
    """A variable that becomes a field; its level is the first axis."""

    field: str
    level: Level
    var: xr.Variable
    unit: str
    add_axis: bool
    from_core: bool

    @property
    def tail(self) -> tuple[int, ...]:
        tail = tuple(self.var.shape[1:])
        return (*tail, 1) if self.add_axis else tail

    def rows(self, values: NDArray) -> NDArray:
        """Values as rows of the field."""
        return values[:, None] if self.add_axis else values


class _Reader:
    """Reads ranges of samples of a Dataset; picklable for stores that are folders."""

    def __init__(
        self, columns: Sequence[_Column], given: Sequence[str], struct: Structure, masks: _Masks
    ) -> None:
        self._lazy = [c for c in columns if c.field not in given]
        self._columns = {c.field: c for c in columns}
        self._given = list(given)
        # Without variables that travel otherwise: they would be sent along.
        for c in columns:
            if c.field in given:
                empty = xr.Variable((), 0)
                self._columns[c.field] = _Column(
                    c.field, c.level, empty, c.unit, c.add_axis, c.from_core
                )
        self._atoms_ptr = struct.atoms_ptr
        self._edges_ptr = (
            np.zeros_like(struct.atoms_ptr) if struct.edges_ptr is None else struct.edges_ptr
        )
        self._masks = masks

    def __call__(self, payload: Any) -> PartResult:
        values: Sequence[Any] = ()
        if self._given:
            payload, values = payload
        start, stop = payload
        atoms, edges = self._atoms_ptr[start : stop + 1], self._edges_ptr[start : stop + 1]
        spans = {"atom": atoms, "edge": edges, "system": np.array([start, stop])}
        arrays: dict[str, NDArray] = {}
        for column in self._lazy:
            span = spans[column.level]
            part = column.var[int(span[0]) : int(span[-1])]
            arrays[column.field] = column.rows(np.asarray(part.values))
        for field, value in _by_field(self._given, values).items():
            arrays[field] = self._columns[field].rows(np.asarray(value))
        block = Block(
            atoms - atoms[0],
            edges - edges[0],
            arrays,
            {name: self._columns[name].level for name in arrays},
            {n: m[start:stop] for n, m in self._masks.items() if not m[start:stop].all()},
        )
        block.arrays = {n: i.values for n, i in receive(block, where=_WHERE).items()}
        return PartResult(block)


_Masks = Mapping[str, BoolArray]


def _by_field(given: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """The slices of arrays in memory (one dict), and one value for each Dask array."""
    held: dict[str, Any] = dict(values[0]) if values else {}
    rest = [name for name in given if name not in held]
    return held | dict(zip(rest, values[1:], strict=True))


class PendingWrite:
    """A write that is planned and not done yet: ``describe`` it, ``compute`` it."""

    def __init__(
        self,
        ds: xr.Dataset,
        dst: Any,
        *,
        mode: str,
        config: Any,
        client: Any,
        threads: int | None,
        memory: int | None,
        progress: Any,
        resume: bool,
    ) -> None:
        self._place = locate(dst)
        self._mode = mode
        self._how = (client, threads, memory, progress, resume)
        self._appends = mode == "a" and _is_there(self._place)
        if not self._appends:
            _check_free(self._place, overwrite=mode == "w")
        struct = structure(ds)
        mask = _samples_mask(ds)
        if self._appends and mask is not None:
            ds = take(ds, struct, np.flatnonzero(mask).astype(np.int64))
            struct, mask = structure(ds), None
        if struct.num_samples == 0:
            raise PlanError(_WHERE, "the Dataset has no sample to write")
        columns, masks = _columns(ds)
        incoming = receive(_empty(columns), where=_WHERE)
        if self._appends:
            _check_fits(incoming, columns, self._place)
        settings = as_config(config)
        self._inputs, given = _inputs(ds, struct, columns)
        ranges = None
        if self._inputs is not None and self._inputs.sizes:
            ptr = counts_to_ptr(np.array(self._inputs.sizes)).tolist()
            ranges = list(itertools.pairwise(ptr))
        self._reader = _Reader(columns, given, struct, masks)
        self._recipe = _recipe(ds, struct, columns, incoming, masks, mask, settings, ranges)
        if self._inputs is not None:
            bases = self._recipe.plan.sample_base
            self._inputs.cut(list(itertools.pairwise(bases)), struct)

    def describe(self, threads: int = 1) -> str:
        """Tasks, bytes, and memory a worker."""
        return self._recipe.plan.describe(threads)

    def compute(self) -> WriteReport:
        """Write it."""
        begun = time.perf_counter()
        client, threads, memory, progress, resume = self._how
        recipe, place = self._recipe, self._place
        inputs = None if self._inputs is None else self._inputs.of_plan()
        with open_runner(client, threads=threads) as runner, open_progress(progress) as shown:
            limit = memory or runner.memory
            if limit:
                recipe.plan.check_memory(limit, runner.threads_per_worker, _WHERE)
            if not self._appends:
                dst = place.path or place
                check_reach(dst, runner)
                job = open_job(dst)
            else:
                job = Job(place.path or scratch_path(place), "appending")
            with job:
                resumed = build(
                    recipe,
                    self._reader,
                    job,
                    runner,
                    shown,
                    title="write",
                    resume=resume,
                    inputs=inputs,
                )
                if self._appends:
                    _append(job, place)
                else:
                    job.publish(overwrite=self._mode == "w", keep=True)
        plan = recipe.plan
        return WriteReport(
            place.where,
            plan.num_samples,
            plan.num_atoms,
            plan.num_edges,
            time.perf_counter() - begun,
            resumed,
        )


def to_zarr(
    ds: xr.Dataset,
    dst: Any,
    *,
    mode: str = "w-",
    config: Any = None,
    client: Any = None,
    compute: bool = True,
    threads: int | None = None,
    memory: int | None = None,
    progress: Any = True,
    resume: bool = True,
) -> WriteReport | PendingWrite:
    """Write a Dataset to a store; see ``RaggedAccessor.to_zarr``."""
    if mode not in ("w-", "w", "a"):
        raise ConfigError(_WHERE, "mode is not known", found=repr(mode), expected="'w-', 'w', 'a'")
    pending = PendingWrite(
        ds,
        dst,
        mode=mode,
        config=config,
        client=client,
        threads=threads,
        memory=memory,
        progress=progress,
        resume=resume,
    )
    return pending.compute() if compute else pending


# -- what is written -----------------------------------------------------------


def _columns(ds: xr.Dataset) -> tuple[list[_Column], dict[str, BoolArray]]:
    """The variables as fields, and which samples carry each."""
    levels: dict[Hashable, Level] = {}
    stray = []
    for name, var in ds.variables.items():
        if name in POINTER_NAMES or name == "samples_mask":
            continue
        level = level_of(var.dims, name=name)
        if level is None:
            stray.append(name)
        else:
            levels[name] = level
    if stray:
        names = [str(name) for name in stray]
        along = sorted({str(d) for name in stray for d in ds.variables[name].dims})
        raise FieldError(
            _WHERE,
            f"{', '.join(map(repr, names))} lies along no sample, atom or edge, so a store has no "
            "place for it",
            found=f"dims {along}",
            mend=f"write ds.drop_vars({names!r}), or give each sample its value",
        )
    masks_of = {name: _mask_name(ds, name) for name in levels}
    used = {mask for mask in masks_of.values() if mask is not None}
    columns: dict[str, _Column] = {}
    masks: dict[str, BoolArray] = {}
    for name, level in levels.items():
        if name in used:
            continue
        column = _column(name, level, ds.variables[name])
        if column.field in columns:
            raise FieldError(
                _WHERE, f"two variables would be the field {column.field!r}", found=repr(name)
            )
        columns[column.field] = column
        mask = masks_of[name]
        if mask is not None:
            values = np.asarray(ds.variables[mask].values)
            if not values.all():
                masks[column.field] = values
    return list(columns.values()), masks


def _mask_name(ds: xr.Dataset, name: Hashable) -> Hashable | None:
    """The variable that says which samples have a value of another one."""
    for mask in (ds.variables[name].attrs.get("ancillary_variables"), f"{name}_present"):
        var = ds.variables.get(mask) if mask is not None else None
        if var is not None and var.dims == (DIMS["system"],) and var.dtype.kind == "b":
            return mask
    return None


def _column(name: Hashable, level: Level, var: xr.Variable) -> _Column:
    if not isinstance(name, str):
        raise FieldError(_WHERE, f"{name!r} cannot be the name of a field", expected="text")
    field = resolve(str(var.attrs.get("store_name", name)))
    source = origin(var)
    if isinstance(source, StoreArray):
        # Behind Dask too: the tasks read it from the store themselves.
        var = xr.Variable(var.dims, wrap(source), var.attrs)
    dims = (DIMS[level], *(d for d in var.dims if d != DIMS[level]))
    spec = FIELDS.get(field)
    squeezed = spec is not None and spec.tail == (1,) and len(dims) == 1
    return _Column(
        field,
        level,
        var if dims == var.dims else var.transpose(*dims),
        str(var.attrs.get("units", "")),
        squeezed,
        isinstance(source, StoreArray)
        and source.part == "values"
        and source.selection.snapshot.group(source.name) == "core",
    )


def _empty(columns: Sequence[_Column]) -> Block:
    """A block of no samples with these fields: names, levels, shapes and dtypes alone."""
    ptr = np.zeros(1, dtype=np.int64)
    return Block(
        ptr,
        ptr,
        {c.field: np.empty((0, *c.tail), c.var.dtype) for c in columns},
        {c.field: c.level for c in columns},
        {},
        {c.field: c.unit for c in columns if c.unit},
    )


def _recipe(
    ds: xr.Dataset,
    struct: Structure,
    columns: Sequence[_Column],
    incoming: Mapping[str, Incoming],
    masks: _Masks,
    samples_mask: BoolArray | None,
    config: ZarrWriteConfig,
    ranges: Sequence[tuple[int, int]] | None,
) -> Recipe:
    core = {c.field for c in columns if c.from_core}
    layouts = []
    for name, item in incoming.items():
        info = item.info
        dtype = "str" if info.is_text else info.dtype.name
        if name == "neighbor_list" and struct.rows("atom") > np.iinfo(info.dtype).max:
            dtype = "int64"
        group = "text" if info.is_text else "core" if name in FIELDS or name in core else "custom"
        layouts.append(
            FieldLayout(name, info.level, dtype, info.tail, group, info.unit, name in masks)
        )
    num_atoms = np.diff(struct.atoms_ptr)
    num_edges = np.zeros_like(num_atoms)
    if struct.edges_ptr is not None:
        num_edges = np.diff(struct.edges_ptr)
    plan = plan_samples(num_atoms, num_edges, layouts, config, ranges)
    provenance = _provenance(ds)
    fingerprint = plan.fingerprint(
        {
            "version": __version__,
            "variables": {c.field: _token(c.var) for c in columns},
            "masks": {name: _token(xr.Variable(("sample",), m)) for name, m in masks.items()},
            "deleted": None if samples_mask is None else _token(xr.Variable("s", samples_mask)),
            "config": repr(config),
            "provenance": provenance,
        }
    )
    return Recipe(
        plan, num_atoms, num_edges, config, fingerprint, provenance, samples_mask=samples_mask
    )


def _provenance(ds: xr.Dataset) -> dict[str, Any]:
    """What the Dataset knows of where it comes from, and its own attributes."""
    try:
        known = dict(json.loads(ds.attrs.get("provenance", "{}")))
    except (TypeError, ValueError):
        known = {}
    ours = ("Conventions", "source", "generation", "provenance")
    rest = {str(k): v for k, v in ds.attrs.items() if k not in ours}
    if rest:
        known["attributes"] = json.loads(json.dumps(rest, default=str))
    return known | {"written_by": f"alchemi_xr {__version__}"}


def _token(var: xr.Variable) -> str:
    """What stands for the values of a variable, without reading a store."""
    from dask.base import tokenize

    if is_dask(var):
        return str(var.data.name)
    if not is_lazy(var):
        return str(tokenize(np.asarray(var.values)))
    source = origin(var)
    if source is not None:
        return str(tokenize(source))
    # A view whose indexer we do not know to name: never taken for another.
    return uuid.uuid4().hex


def _samples_mask(ds: xr.Dataset) -> BoolArray | None:
    var = ds.variables.get("samples_mask")
    if var is None or var.dims != (DIMS["system"],) or var.dtype.kind != "b":
        return None
    mask = np.asarray(var.values)
    return None if mask.all() else mask


# -- what travels in the graph ---------------------------------------------------


class _GraphInputs:
    """Values that reach the tasks through the graph: Dask blocks and arrays in memory."""

    def __init__(
        self, dask: dict[str, Any], memory: dict[str, tuple[Level, NDArray]], sizes: tuple[int, ...]
    ) -> None:
        self.dask, self.memory, self.sizes = dask, memory, sizes
        self._token = f"memory-{uuid.uuid4().hex[:8]}"
        self._held: dict[Any, dict[str, NDArray]] = {}

    def cut(self, ranges: Sequence[tuple[int, int]], struct: Structure) -> None:
        """Slices of the arrays in memory, views that cost nothing here."""
        for number, (start, stop) in enumerate(ranges):
            held = {}
            for name, (level, values) in self.memory.items():
                if level == "system":
                    held[name] = values[start:stop]
                else:
                    ptr = struct.ptr(level)
                    held[name] = values[int(ptr[start]) : int(ptr[stop])]
            self._held[self._token, number] = held

    def of_plan(self) -> Inputs:
        """As the graph of a plan takes them."""
        keys = [
            [key, *((a.name, number, *(0,) * (a.ndim - 1)) for a in self.dask.values())]
            for number, key in enumerate(self._held)
        ]
        return Inputs(keys, self._graph)

    def _graph(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        graph: dict[Any, Any] = {key: self._held[key] for key in keys if key in self._held}
        wanted = [key for key in keys if key not in self._held]
        if wanted:
            from dask.array.optimization import optimize
            from dask.highlevelgraph import HighLevelGraph

            whole = HighLevelGraph.merge(*(a.dask for a in self.dask.values()))
            graph.update(dict(optimize(whole, wanted)))
        return graph


def _inputs(
    ds: xr.Dataset, struct: Structure, columns: Sequence[_Column]
) -> tuple[_GraphInputs | None, list[str]]:
    """What travels in the graph, and the fields that do."""
    dask = [c for c in columns if is_dask(c.var)]
    memory = {
        c.field: (c.level, np.asarray(c.var.values))
        for c in columns
        if not is_dask(c.var) and not is_lazy(c.var)
    }
    if not dask and not memory:
        return None, []
    sizes: tuple[int, ...] = ()
    arrays: dict[str, Any] = {}
    if dask:
        sizes = find_partition(ds, struct) or (struct.num_samples,)
        for c in dask:
            arrays[c.field] = align(c.var, struct, sizes, name=c.field).data
    return _GraphInputs(arrays, memory, sizes), [*memory, *arrays]


# -- where it goes -----------------------------------------------------------------


def _is_there(place: Any) -> bool:
    if place.path is not None:
        settle(place.path)
        if not place.path.exists():
            return False
        open_store(place).close()
        return True
    try:
        open_store(place).close()
    except StoreNotFoundError:
        return False
    return True


def _check_free(place: Any, *, overwrite: bool) -> None:
    if place.path is not None:
        check_destination(place.path, overwrite=overwrite)
    elif _is_there(place):
        raise StoreExistsError(
            place.where,
            "already exists",
            mend="mode='a' adds to it; a store that is no folder is not replaced",
        )


def _check_fits(incoming: Mapping[str, Incoming], columns: Sequence[_Column], place: Any) -> None:
    """Refuse, by name, what the store that is there cannot take."""
    units = {c.field: c.unit for c in columns}
    with open_store(place) as snapshot:
        for name, item in incoming.items():
            if name not in snapshot:
                continue
            info = snapshot.info(name)
            fit(item, info, where=place.where, warned=set())
            if units.get(name) and info.unit and units[name] != info.unit:
                raise FieldError(
                    place.where,
                    f"field {name!r} has another unit in the store",
                    found=units[name],
                    expected=info.unit,
                    mend=f"convert ds[{name!r}] first, and set its attrs['units']",
                )


def _append(job: Job, place: Any) -> None:
    """Add a finished store's samples to another one, once: many blocks, one commit."""
    size, token = int(option("stream_bytes")) // 2, job.token()
    with open_store(place) as there:
        if any(entry.get("job") == token for entry in there.schema.history):
            # Stopped between its commit and the removal of the job's folder.
            return
    with (
        open_store(job.store) as made,
        StoreWriter(place).transaction(max_bytes=size, job=token) as writer,
    ):
        for block in made.iter_blocks(max_bytes=size):
            writer.append(block)

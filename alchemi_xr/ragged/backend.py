"""The xarray engine ``alchemi_xr`` and ``open_dataset``.

Opening reads metadata, pointers and masks; fields stay in the store behind
arrays that read the rows asked for. Deleted samples are left out by a map of
row ranges, not by indexing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from xarray.backends import BackendEntrypoint

from alchemi_xr.data.fields import FIELDS, field_order, resolve
from alchemi_xr.errors import (
    ArgumentTypeError,
    ConfigError,
    FieldError,
    UnknownFieldError,
    nearest,
)
from alchemi_xr.ragged import accessor as accessor  # registers ds.ragged
from alchemi_xr.ragged.array import StoreArray, wrap
from alchemi_xr.ragged.chunks import (
    chunk_dataset,
    level_chunks,
    preferred,
    resolve_chunks,
    widest_rows,
)
from alchemi_xr.ragged.conventions import (
    DIMS,
    POINTER_NAMES,
    PTR_DIM,
    Structure,
    field_attrs,
    field_dims,
    level_of,
    pointer_coords,
)
from alchemi_xr.ragged.rows import Selection
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["AlchemiBackend", "open_dataset"]

_AXES = frozenset(dim for spec in FIELDS.values() for dim in spec.dims)


def open_dataset(
    store: Any,
    *,
    chunks: Any = None,
    fields: Iterable[str] | None = None,
    deleted: str = "drop",
    drop_deleted: bool | None = None,
    cache: bool = False,
    generation: int | None = None,
    storage_options: dict[str, Any] | None = None,
    branch: str | None = None,
    tag: str | None = None,
    snapshot: str | None = None,
) -> xr.Dataset:
    """A store as one lazy, ragged Dataset.

    Parameters
    ----------
    store : str, path, Zarr store, Icechunk Repository or Snapshot
        A path, any URL that fsspec knows, or ``icechunk:<path or URL>``.
    chunks : optional
        None keeps the fields in the store until they are asked for. Anything
        else makes Dask arrays whose blocks end at sample boundaries, the same
        samples in block k of every level: ``{}`` follows the stored chunks,
        ``"auto"`` Dask's block size, ``"64MiB"`` is bytes of the widest field
        in a block, a number (or ``{"sample": n}``) is samples in a block.
    fields : iterable of str, optional
        Only these (aliases are understood).
    deleted : {"drop", "keep", "only"}
        What becomes of soft-deleted samples: left out, lazily; shown with the
        others; or shown alone. In the last two cases the coordinate
        ``samples_mask`` says which are live.
    drop_deleted : bool, optional
        False is ``deleted="keep"``, True is ``deleted="drop"``.
    cache : bool
        Keep a field in memory once all of it was read.
    generation : int, optional
        An older committed generation, where the store still has it.
    storage_options : dict, optional
        For a URL: endpoint, credentials and the like.
    branch, tag, snapshot : str, optional
        A state of an Icechunk repository; by default the newest of branch ``main``.

    Returns
    -------
    Dataset
        Dims ``sample``, ``atom``, ``edge``; coordinates ``atoms_ptr``,
        ``edges_ptr``, ``num_atoms``, ``num_edges``; units on every variable
        that has one; ``neighbor_list`` numbered within its sample;
        ``<field>_present`` for each field that some samples lack. A field that
        is named like one of these or like a dim is shown as ``<field>_field``.

    Raises
    ------
    StoreNotFoundError, NotAStoreError
    UnknownFieldError
        A field of ``fields`` is not there.
    ConfigError
        ``chunks`` is not understood.
    """
    held = (
        store
        if isinstance(store, Snapshot)
        else open_store(
            store,
            generation=generation,
            storage_options=storage_options,
            branch=branch,
            tag=tag,
            snapshot=snapshot,
        )
    )
    deleted = _deleted(deleted, drop_deleted)
    selection = Selection.all(held)
    if deleted == "drop" and not held.samples_mask.all():
        selection = selection.take(np.asarray(held.active, dtype=np.int64))
    elif deleted == "only":
        gone = np.flatnonzero(~np.asarray(held.samples_mask))
        selection = selection.take(gone.astype(np.int64))
    names = _choose(held, fields)
    ds, struct, stored = _build(selection, names, cache=cache)
    if deleted != "drop":
        mask = xr.Variable(
            (DIMS["system"],),
            np.asarray(held.samples_mask)[selection.samples],
            {"long_name": "sample is not deleted", "level": "system"},
        )
        ds = ds.assign_coords(samples_mask=mask)
    if chunks is None:
        return ds
    sizes = resolve_chunks(chunks, struct, widest_rows(ds), stored)
    return chunk_dataset(ds, struct, sizes)


class AlchemiBackend(BackendEntrypoint):
    """``xr.open_dataset(path, engine="alchemi_xr")``.

    With ``chunks={}`` Dask blocks end at sample boundaries; ``sample_chunks``
    says where, in any form that ``alchemi_xr.open_dataset(chunks=)`` takes.
    Other ``chunks`` are xarray's own and cut each dimension for itself; the
    verbs of ``ds.ragged`` then cut anew at the store. (``chunks="auto"`` is
    refused by Dask itself where a store has text.)
    """

    description: ClassVar[str] = "Ragged stores of atoms, edges and samples (alchemi_xr)"
    url: ClassVar[str] = "https://docs.xarray.dev/en/stable/internals/how-to-add-new-backend.html"
    open_dataset_parameters: ClassVar[tuple[Any, ...] | None] = (
        "filename_or_obj",
        "drop_variables",
        "fields",
        "deleted",
        "drop_deleted",
        "generation",
        "sample_chunks",
        "storage_options",
        "branch",
        "tag",
        "snapshot",
    )

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        fields: Iterable[str] | None = None,
        deleted: str = "drop",
        drop_deleted: bool | None = None,
        generation: int | None = None,
        sample_chunks: Any = None,
        storage_options: dict[str, Any] | None = None,
        branch: str | None = None,
        tag: str | None = None,
        snapshot: str | None = None,
    ) -> xr.Dataset:
        """The lazy Dataset; caching and Dask are added by xarray."""
        ds = open_dataset(
            filename_or_obj,
            fields=fields,
            deleted=deleted,
            drop_deleted=drop_deleted,
            generation=generation,
            storage_options=storage_options,
            branch=branch,
            tag=tag,
            snapshot=snapshot,
        )
        if drop_variables is not None:
            drop = [drop_variables] if isinstance(drop_variables, str) else list(drop_variables)
            ds = ds.drop_vars(drop, errors="ignore")
        if sample_chunks is not None:
            _prefer(ds, sample_chunks)
        # xarray wraps each array anew; hand it the bare lazy one.
        for name, var in ds.variables.items():
            if name not in ds.indexes and hasattr(var._data, "array"):
                var.data = var._data.array
        return ds

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Whether a local path is a store of ours; cheap, never raises."""
        try:
            if not isinstance(filename_or_obj, (str, os.PathLike)):
                return False
            text = os.fspath(filename_or_obj)
            if text.startswith("icechunk:"):
                return True
            root = os.path.join(text, "zarr.json")
            with open(root, encoding="utf-8") as file:
                attributes = json.load(file).get("attributes", {})
            return "alchemi_xr" in attributes or {"num_samples", "fields"} <= set(attributes)
        except (OSError, ValueError, TypeError, AttributeError):
            return False


def _deleted(deleted: str, drop_deleted: bool | None) -> str:
    if deleted not in ("drop", "keep", "only"):
        raise ConfigError(
            "open_dataset",
            f"deleted={deleted!r} is not understood",
            expected="'drop', 'keep' or 'only'",
        )
    if drop_deleted is None:
        return deleted
    if drop_deleted and deleted != "drop":
        raise ConfigError("open_dataset", f"drop_deleted=True contradicts deleted={deleted!r}")
    return deleted if drop_deleted or deleted == "only" else "keep"


def _choose(snapshot: Snapshot, fields: Iterable[str] | None) -> list[str]:
    if fields is None:
        return list(snapshot.fields)
    if isinstance(fields, str):
        fields = [fields]
    if not isinstance(fields, Iterable):
        raise ArgumentTypeError(
            "open_dataset", "fields are a list of names", found=type(fields).__name__
        )
    known = set(snapshot.fields)
    names = [name if name in known else resolve(name) for name in map(str, fields)]
    for name in names:
        if name not in known:
            raise UnknownFieldError(
                snapshot.where, f"there is no field {name!r}. {nearest(name, known)}"
            )
    return field_order(names)


def _build(
    selection: Selection, names: list[str], *, cache: bool
) -> tuple[xr.Dataset, Structure, tuple[int, ...]]:
    """Variables and coordinates, the pointers, and blocks that follow the stored chunks."""
    snapshot = selection.snapshot
    struct = _structure(selection)
    variables: dict[Hashable, xr.Variable] = {}
    sizes: dict[str, int] = {
        "sample": struct.num_samples,
        "atom": struct.rows("atom"),
        "edge": struct.rows("edge"),
    }
    shown = _shown(names, {name for name in names if snapshot.present(name) is not None})
    masks = set()
    for name in names:
        array = StoreArray(selection, name)
        dims = _fit(shown[name], _dims(snapshot, name, array), array.shape, sizes)
        attrs = field_attrs(name, array.level, snapshot.unit(name))
        if shown[name] != name:
            attrs["store_name"] = name
        if snapshot.present(name) is not None:
            mask = f"{shown[name]}_present"
            masks.add(mask)
            attrs["ancillary_variables"] = mask
            variables[mask] = xr.Variable(
                (DIMS["system"],),
                wrap(StoreArray(selection, name, "present"), cache=cache),
                {"long_name": f"sample has a value of {name}", "level": "system"},
            )
        variables[shown[name]] = xr.Variable(dims, wrap(array, cache=cache), attrs)
    attributes: dict[str, Any] = {
        "Conventions": "CF-1.11",
        "source": str(snapshot.where),
        "generation": int(snapshot.generation),
    }
    provenance = getattr(snapshot.schema, "provenance", None)
    if provenance:
        # Text, so that the Dataset can be written to any file format.
        attributes["provenance"] = json.dumps(provenance, sort_keys=True, default=str)
    order = [n for n in variables if n not in masks]
    order += [n for n in variables if n in masks]
    ds = xr.Dataset({n: variables[n] for n in order}, pointer_coords(struct), attributes)
    stored = preferred(struct, widest_rows(ds), snapshot.chunk_rows)
    _set_preferred(ds, struct, stored)
    return ds, struct, stored


def _shown(names: list[str], with_holes: set[str]) -> dict[str, str]:
    """Each field's name in the Dataset: its own, unless a coordinate, dim or mask has that.

    Files in the wild have keys such as ``num_atoms``; shown as ``num_atoms_field``
    they are read, and the pointers stay true.
    """
    taken = {*POINTER_NAMES, *DIMS.values(), PTR_DIM, "samples_mask", *_AXES}
    out: dict[str, str] = {}
    # Shorter names first: whether "foo" has a mask is known before "foo_present" is named.
    for name in sorted(names, key=len):
        new = name
        while new in taken or (new != name and new in names):
            new += "_field"
        out[name] = new
        taken |= {new, f"{new}_present"} if name in with_holes else {new}
    return out


def _structure(selection: Selection) -> Structure:
    snapshot = selection.snapshot
    picked = selection.samples
    if isinstance(picked, slice) and len(selection) == snapshot.num_samples:
        return Structure(snapshot.atoms_ptr, snapshot.edges_ptr)
    whole = Structure(snapshot.atoms_ptr, snapshot.edges_ptr)
    return whole.take(selection.index)


def _dims(snapshot: Snapshot, name: str, array: StoreArray) -> tuple[str, ...]:
    stored: tuple[str | None, ...] = ()
    spec = FIELDS.get(name)
    if len(array.shape) > 1 and (spec is None or len(spec.dims) != len(array.shape) - 1):
        metadata: Any = snapshot.array(name).metadata
        stored = tuple(getattr(metadata, "dimension_names", None) or ())[1:]
    return field_dims(name, array.level, array.shape[1:], stored)


def _fit(
    name: str, dims: tuple[str, ...], shape: tuple[int, ...], sizes: dict[str, int]
) -> tuple[str, ...]:
    """The dims, those renamed that another field has with another length."""
    out = []
    for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if sizes.setdefault(dim, size) != size:
            if axis == 0:
                raise FieldError(
                    name, f"wrong number of rows along {dim!r}", found=size, expected=sizes[dim]
                )
            dim = f"{name}_{axis}"
            sizes[dim] = size
        out.append(dim)
    return tuple(out)


def _set_preferred(ds: xr.Dataset, struct: Structure, sizes: tuple[int, ...]) -> None:
    """Tell xarray's own ``chunks={}`` where blocks end."""
    rows = {level: level_chunks(struct.ptr(level), sizes) for level in DIMS}
    for var in ds.variables.values():
        level = level_of(var.dims)
        if level is not None:
            var.encoding["preferred_chunks"] = {DIMS[level]: rows[level]}


def _prefer(ds: xr.Dataset, sample_chunks: Any) -> None:
    from alchemi_xr.ragged.conventions import structure

    struct = structure(ds)
    stored = ds.sizes.get(DIMS["system"], 0)
    sizes = resolve_chunks(sample_chunks, struct, widest_rows(ds), (stored,))
    _set_preferred(ds, struct, sizes)

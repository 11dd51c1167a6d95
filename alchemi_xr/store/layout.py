"""Where the arrays of a store stand, how their axes are called, how they are made."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.storage import MemoryStore

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.store._compat import quiet
from alchemi_xr.store.codecs import ZarrWriteConfig, encoding
from alchemi_xr.store.schema import FieldInfo

__all__ = [
    "ATOMS_MASK",
    "ATOMS_PTR",
    "EDGES_MASK",
    "EDGES_PTR",
    "LEVEL_DIMS",
    "META",
    "PENDING_MASK",
    "SAMPLES_MASK",
    "create",
    "dims",
    "document",
    "field_spec",
    "meta_spec",
    "open_array",
    "present_spec",
]

ATOMS_PTR = "meta/atoms_ptr"
EDGES_PTR = "meta/edges_ptr"
SAMPLES_MASK = "meta/samples_mask"
ATOMS_MASK = "meta/atoms_mask"
EDGES_MASK = "meta/edges_mask"
PENDING_MASK = "meta/pending/samples_mask"

LEVEL_DIMS: dict[Level, str] = {"atom": "atom", "edge": "edge", "system": "sample"}

_BOOL = np.dtype(bool)
_INT64 = np.dtype(np.int64)

# path: (level for its chunks, dtype, name of its axis)
META: dict[str, tuple[Level, np.dtype[Any], str]] = {
    ATOMS_PTR: ("system", _INT64, "sample_ptr"),
    EDGES_PTR: ("system", _INT64, "sample_ptr"),
    SAMPLES_MASK: ("system", _BOOL, "sample"),
    ATOMS_MASK: ("atom", _BOOL, "atom"),
    EDGES_MASK: ("edge", _BOOL, "edge"),
    PENDING_MASK: ("system", _BOOL, "sample"),
}


def dims(info: FieldInfo) -> tuple[str, ...]:
    """Names of the axes of a field, so that any xarray user can read it.

    A letter axis of the table and an axis of a custom field are named after
    the field, since two fields may differ in its length.
    """
    spec = FIELDS.get(info.name)
    if spec is not None and len(spec.dims) == len(info.tail):
        tail = spec.dims
        fits = all(isinstance(w, str) or w == n for w, n in zip(spec.tail, info.tail, strict=True))
        if fits:
            return (LEVEL_DIMS[info.level], *tail)
    return (LEVEL_DIMS[info.level], *(f"{info.name}_{k}" for k in range(len(info.tail))))


def open_array(store: Store, path: str, *, write: bool = False) -> zarr.Array[Any]:
    """An array; for writing, one that also writes chunks of fill alone.

    Raises
    ------
    zarr errors
        When there is no array at this path.
    """
    with quiet():
        array = zarr.open_array(store, path=path, mode="r+" if write else "r", zarr_format=3)
    return _writing_empty(array) if write else array


def _writing_empty(array: zarr.Array[Any]) -> zarr.Array[Any]:
    return array.with_config({"write_empty_chunks": True})


def _create(store: Store, path: str, arguments: dict[str, Any]) -> zarr.Array[Any]:
    with quiet():
        array = zarr.create_array(
            store,
            name=path,
            zarr_format=3,
            overwrite=True,
            config={"write_empty_chunks": True},
            **arguments,
        )
    return _writing_empty(array)


def create(store: Store, spec: dict[str, Any], *, prefix: str = "") -> zarr.Array[Any]:
    """The array of a spec, made anew by zarr (its rows are not written yet)."""
    arguments = dict(spec)
    return _create(store, prefix + arguments.pop("path"), arguments)


_templates: dict[str, str] = {}
_MOST_TEMPLATES = 256


def document(spec: dict[str, Any]) -> dict[str, Any]:
    """The document that zarr would write for a spec.

    zarr makes one for every encoding that occurs, in memory; the shape, the names
    and the attributes of others like it are put in here.
    """
    shape = tuple(spec["shape"])
    wanted = {k: v for k, v in spec.items() if k not in ("path", "shape", "attributes")}
    own = {k: wanted.pop(k) for k in ("dimension_names",)}
    key = repr((shape[1:], sorted(wanted.items(), key=lambda item: item[0])))
    if key not in _templates:
        if len(_templates) >= _MOST_TEMPLATES:
            _templates.clear()
        held: dict[str, Any] = {}
        _create(MemoryStore(held), "a", {"shape": (0, *shape[1:]), **wanted})
        _templates[key] = held["a/zarr.json"].to_bytes().decode()
    made: dict[str, Any] = json.loads(_templates[key])
    made["shape"] = list(shape)
    made["attributes"] = spec.get("attributes", {})
    made["dimension_names"] = list(own["dimension_names"])
    return made


def field_spec(info: FieldInfo, rows: int, config: ZarrWriteConfig) -> dict[str, Any]:
    """What the array of a field with so many rows has to be."""
    attributes: dict[str, Any] = {"level": info.level}
    if info.unit:
        attributes["units"] = info.unit
    spec = FIELDS.get(info.name)
    if spec is not None:
        attributes["long_name"] = spec.description
    # By this the next writer tells a field that a killed one began from one
    # that another tool put there.
    attributes["alchemi_xr_generation"] = info.since
    return {
        "path": info.path,
        "shape": (rows, *info.tail),
        "dtype": str if info.is_text else info.dtype,
        "attributes": attributes,
        "dimension_names": dims(info),
        **encoding(
            config,
            info.group,
            info.name,
            info.level,
            info.dtype,
            info.tail,
            is_text=info.is_text,
            total=rows,
        ),
    }


def present_spec(info: FieldInfo, rows: int, config: ZarrWriteConfig) -> dict[str, Any]:
    """What the presence mask of a field with so many rows has to be."""
    return {
        "path": info.present_path,
        "shape": (rows,),
        "dtype": _BOOL,
        "dimension_names": ("sample",),
        **encoding(config, "meta", f"present/{info.name}", "system", _BOOL, (), total=rows),
    }


def meta_spec(path: str, rows: int, config: ZarrWriteConfig) -> dict[str, Any]:
    """What a ptr or mask with so many rows has to be."""
    level, dtype, dim = META[path]
    return {
        "path": path,
        "shape": (rows,),
        "dtype": dtype,
        "dimension_names": (dim,),
        **encoding(config, "meta", path.rpartition("/")[2], level, dtype, (), total=rows),
    }

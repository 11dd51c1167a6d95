"""One layout for the fields of many stores: union, holes, and dtypes that hold every value.

Fields are brought together by name. What cannot be one field without loss
(two levels, two row shapes, two units, numbers and text) is refused, with the
two stores named, before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alchemi_xr.data.fields import FIELDS, field_order, resolve
from alchemi_xr.errors import FieldError, LevelError, UnknownFieldError, nearest
from alchemi_xr.etl.gather import Counted
from alchemi_xr.store.bulk import FieldLayout
from alchemi_xr.store.schema import FieldInfo

__all__ = ["unify"]


def unify(
    stores: Sequence[Counted], fields: Collection[str] | None = None
) -> tuple[FieldLayout, ...]:
    """The layouts that hold the fields of all stores.

    Parameters
    ----------
    stores : sequence of Counted
    fields : names, optional
        Only these.

    Raises
    ------
    LevelError, FieldError
        A field is not the same thing in two stores.
    UnknownFieldError
        No store has a field of ``fields``.
    """
    known = field_order(name for store in stores for name in store.infos)
    names = known
    if fields is not None:
        wanted = [resolve(name) for name in fields]
        for name in wanted:
            if name not in known:
                raise UnknownFieldError(
                    stores[0].where, f"no store has a field {name!r}. {nearest(name, known)}"
                )
        names = field_order(wanted)
    total = sum(int(store.num_atoms.sum()) for store in stores)
    return tuple(_one(name, stores, total) for name in names)


def _one(name: str, stores: Sequence[Counted], total_atoms: int) -> FieldLayout:
    having = [store for store in stores if name in store.infos]
    found = having[0].infos[name]
    origin = having[0].where
    for store in having[1:]:
        joined = _join(found, store.infos[name], origin, store.where)
        if joined.dtype != found.dtype:
            origin = store.where
        found = joined
    dtype = "str" if found.is_text else found.dtype.name
    if name == "neighbor_list" and total_atoms > np.iinfo(found.dtype).max:
        # On disk its numbers count the atoms of the whole store.
        dtype = "int64"
    holes = any(name not in store.infos or name in store.holes for store in stores)
    return FieldLayout(name, found.level, dtype, found.tail, found.group, found.unit, holes)


def _join(first: FieldInfo, second: FieldInfo, here: str, there: str) -> FieldInfo:
    name = first.name
    if first.level != second.level:
        raise LevelError(
            there,
            f"field {name!r} has another level than in {here}",
            found=second.level,
            expected=first.level,
            mend=f"leave it out (fields=...), or rename it in one of the stores: {name!r} is not "
            "the same thing in both",
        )
    if first.is_text != second.is_text:
        raise FieldError(
            there,
            f"field {name!r} is {_kind(second)} here and {_kind(first)} in {here}",
            mend="leave it out (fields=...), or write it alike in both stores",
        )
    if first.tail != second.tail:
        raise FieldError(
            there,
            f"rows of field {name!r} have another shape than in {here}",
            found=list(second.tail),
            expected=list(first.tail),
            mend="leave it out (fields=...), or write it alike in both stores",
        )
    if first.unit and second.unit and first.unit != second.unit:
        raise FieldError(
            there,
            f"field {name!r} has another unit than in {here}",
            found=second.unit,
            expected=first.unit,
            mend="convert one of the stores first (alchemi_xr.open_dataset, then "
            "ds.ragged.to_zarr)",
        )
    group = "core" if "core" in (first.group, second.group) or name in FIELDS else first.group
    unit = first.unit or second.unit
    if first.is_text:
        return replace(first, unit=unit)
    dtype = np.result_type(first.dtype, second.dtype)
    for info in (first, second):
        if not _holds(dtype, info.dtype):
            raise FieldError(
                there,
                f"no dtype holds every value of field {name!r} of both this store and {here}",
                found=f"{second.dtype} and {first.dtype}",
                mend="leave it out (fields=...), or write it with one dtype in both stores",
            )
    return replace(first, dtype=dtype, group=group, unit=unit)


def _kind(info: FieldInfo) -> str:
    return "text" if info.is_text else str(info.dtype)


def _holds(wide: np.dtype[Any], given: np.dtype[Any]) -> bool:
    """Whether every value of a dtype is exact in another one."""
    if wide == given or given.kind == "b":
        return True
    if given.kind in "iu" and wide.kind in "fc":
        return np.iinfo(given).bits - (given.kind == "i") <= np.finfo(wide).nmant + 1
    return bool(np.can_cast(given, wide, "safe"))

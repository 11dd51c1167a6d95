"""Checks a block at the door, before anything is written."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import expand_mask
from alchemi_xr.data.fields import FIELDS, as_rows, field_order, fill_for, resolve
from alchemi_xr.errors import FieldError, LevelError
from alchemi_xr.store.schema import TEXT, Counts, FieldInfo, table_unit

__all__ = ["Incoming", "custom_field", "fit", "globalised", "receive"]

_NUMERIC = frozenset(
    np.dtype(t)
    for t in (
        *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
        *("f2", "f4", "f8", "c8", "c16"),
    )
)
_KIND = {"i": "integer", "u": "integer", "f": "float", "b": "bool", "c": "complex", "O": "text"}


@dataclass(frozen=True)
class Incoming:
    """One field of a block, ready to be written."""

    info: FieldInfo
    values: NDArray
    present: BoolArray | None


def receive(block: Block, *, where: str) -> dict[str, Incoming]:
    """The fields of a block, checked and in order.

    Rows of absent samples get the fill; unusual whole numbers in
    ``neighbor_list`` become int64, since global numbers would not fit them.

    Raises
    ------
    FieldError, LevelError
        A field has a wrong level, shape, length or dtype; it is named.
    """
    block = _canonical(block, where)
    block.validate(where)
    return {name: _receive_one(block, name, where) for name in field_order(block.arrays)}


def _canonical(block: Block, where: str) -> Block:
    """The block with the table's names, and a trailing axis of one where the table has it."""
    names: dict[str, str] = {}
    for given in block.arrays:
        name = resolve(given)
        if name in names:
            raise FieldError(where, f"field {name!r} is given twice, also as {given!r}")
        names[name] = given
    arrays = {
        name: as_rows(name, block.arrays[given])
        if block.levels.get(given) == "system"
        else block.arrays[given]
        for name, given in names.items()
    }
    if all(name == given and arrays[name] is block.arrays[name] for name, given in names.items()):
        return block

    def renamed(known: dict[str, Any]) -> dict[str, Any]:
        return {resolve(name): value for name, value in known.items()}

    return Block(
        block.atoms_ptr,
        block.edges_ptr,
        arrays,
        renamed(block.levels),
        renamed(block.present),
        renamed(block.units),
    )


def _receive_one(block: Block, canonical: str, where: str) -> Incoming:
    name = canonical
    if not canonical or "/" in canonical or canonical.startswith((".", "__")):
        raise FieldError(where, f"{name!r} cannot be the name of a field")
    values, level = block.arrays[name], block.levels[name]
    spec = FIELDS.get(canonical)
    if spec is not None and level != spec.level:
        raise LevelError(
            where, f"field {canonical!r} has the wrong level", found=level, expected=spec.level
        )
    present = block.present.get(name)
    if present is not None and present.all():
        present = None
    unit = block.units.get(name, table_unit(canonical))
    if values.dtype.kind in "UTO":
        text = _as_text(values, canonical, where)
        if level != "system":
            raise LevelError(
                where,
                f"field {canonical!r} is text, which is kept per sample",
                found=level,
                expected="system",
            )
        if present is not None:
            text = text.copy()
            text[~present] = ""
        return Incoming(FieldInfo(canonical, level, TEXT, (), "text", unit), text, present)
    values = _native(values)
    if values.dtype not in _NUMERIC:
        raise FieldError(
            where,
            f"field {canonical!r} has a dtype that cannot be stored",
            found=str(values.dtype),
            expected="bool, int8 to int64, uint8 to uint64, float16 to float64 or complex",
        )
    if spec is not None and values.dtype.kind not in spec.kind:
        raise FieldError(
            where,
            f"field {canonical!r} has the wrong dtype",
            found=str(values.dtype),
            expected=" or ".join(sorted({_KIND[k] for k in spec.kind})),
        )
    if canonical == "neighbor_list" and values.dtype not in (np.int32, np.int64):
        values = values.astype(np.int64)
    if present is not None:
        rows = ~present if level == "system" else ~expand_mask(present, block.ptr(level))
        values = values.copy()
        values[rows] = fill_for(values.dtype)
    info = FieldInfo(canonical, level, values.dtype, values.shape[1:], "core", unit)
    return Incoming(info, values, present)


def _native(values: NDArray) -> NDArray:
    if values.dtype.isnative:
        return values
    native: NDArray = values.astype(values.dtype.newbyteorder("="))
    return native


def _as_text(values: NDArray, name: str, where: str) -> NDArray:
    if values.dtype.kind == "O":
        wrong = [v for v in values.reshape(-1).tolist() if not isinstance(v, (str, type(None)))]
        if wrong:
            raise FieldError(
                where,
                f"field {name!r} holds Python objects that are not text",
                found=type(wrong[0]).__name__,
                expected="str",
            )
    if values.ndim != 1:
        raise FieldError(
            where,
            f"text field {name!r} has the wrong shape",
            found=list(values.shape),
            expected="[N]",
        )
    out = np.empty(len(values), dtype=object)
    out[:] = ["" if v is None else str(v) for v in values.tolist()]
    for number, word in enumerate(out):
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FieldError(
                where,
                f"the text of field {name!r} of sample {number} is no valid Unicode",
                found=f"{word!r} ({error.reason})",
                mend="decode the bytes it came from with errors='replace'",
            ) from None
    return out


def fit(incoming: Incoming, info: FieldInfo, *, where: str, warned: set[str]) -> NDArray:
    """The values of a field as the array that is on disk takes them.

    The dtype on disk stays as first given: values of the same kind are cast to
    it, with a warning where that narrows floats, and refused where whole
    numbers would not fit.

    Raises
    ------
    FieldError, LevelError
    """
    name, values, given = info.name, incoming.values, incoming.info
    if given.level != info.level:
        raise LevelError(
            where,
            f"field {name!r} has another level in the store",
            found=given.level,
            expected=info.level,
        )
    if given.tail != info.tail:
        raise FieldError(
            where,
            f"rows of field {name!r} have another shape in the store",
            found=list(given.tail),
            expected=list(info.tail),
        )
    kinds = {"u": "i"}
    here, there = values.dtype.kind, info.dtype.kind
    if kinds.get(here, here) != kinds.get(there, there):
        raise FieldError(
            where,
            f"field {name!r} has another kind of dtype in the store",
            found=str(values.dtype),
            expected="text" if info.is_text else str(info.dtype),
            mend=f"cast {name} before you append it",
        )
    if info.is_text or values.dtype == info.dtype:
        return values
    if here in "iu" and len(values):
        limits = np.iinfo(info.dtype)
        if int(values.min()) < limits.min or int(values.max()) > limits.max:
            raise FieldError(
                where,
                f"values of field {name!r} do not fit the dtype in the store",
                found=f"{int(values.min())} to {int(values.max())}",
                expected=str(info.dtype),
            )
    if here in "fc" and values.dtype.itemsize > info.dtype.itemsize:
        note = f"{name}:{values.dtype}"
        if note not in warned:
            warned.add(note)
            warnings.warn(
                f"{where}: field {name!r} is {info.dtype} in the store, so the "
                f"{values.dtype} values given are rounded to it",
                UserWarning,
                stacklevel=4,
            )
    return values.astype(info.dtype)


def globalised(values: NDArray, block: Block, atoms_before: int, *, where: str) -> NDArray:
    """Local edges as the store-global atom numbers that are on disk.

    Raises
    ------
    FieldError
        The numbers would not fit the dtype on disk.
    """
    last = atoms_before + block.num_atoms - 1
    if last > np.iinfo(values.dtype).max:
        raise FieldError(
            where,
            "neighbor_list counts atoms of the whole store, which its dtype cannot hold",
            found=f"{last + 1} atoms, {values.dtype}",
            expected="int64",
            mend="write the store with an int64 neighbor_list",
        )
    shift = np.repeat(block.atoms_ptr[:-1] + atoms_before, np.diff(block.edges_ptr))
    shifted: NDArray = values + shift[:, None].astype(values.dtype)
    return shifted


def custom_field(
    name: str, array: NDArray, level: Any, unit: str, where: str, counts: Counts
) -> Incoming:
    """A custom field, checked like one of a block of the whole store."""
    shape = {"atom": counts.atoms, "edge": counts.edges, "system": counts.samples}
    # One sample that owns all rows stands for the store: only the field is checked.
    if level == "system":
        ptr = np.zeros(counts.samples + 1, dtype=np.int64)
        block = Block(ptr, ptr, {name: array}, {name: level})
    else:
        rows = np.array([0, shape[level]], dtype=np.int64)
        none = np.array([0, 0], dtype=np.int64)
        pointers = (rows, none) if level == "atom" else (none, rows)
        block = Block(*pointers, {name: array}, {name: level})
    if unit:
        block.units[name] = unit
    return receive(block, where=where)[name]

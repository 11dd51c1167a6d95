"""Dimension names, attributes and pointers of a ragged Dataset, and their check.

A ragged Dataset has dims ``sample``, ``atom`` and ``edge``; ``atoms_ptr`` and
``edges_ptr`` over ``sample_ptr`` (N + 1) say which rows belong to which
sample, and ``num_atoms``, ``num_edges`` over ``sample`` say the same as the
count variables of a CF contiguous ragged array. xarray knows nothing of the
tie: plain ``isel(sample=...)`` leaves the atoms behind. ``structure`` finds
that, and names the call that was meant.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, Level, Ptr
from alchemi_xr.data.csr import counts_to_ptr, validate_ptr
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.errors import FieldError
from alchemi_xr.ragged.array import RowNumbers, origin, wrap

__all__ = [
    "DIMS",
    "POINTER_NAMES",
    "PTR_DIM",
    "Structure",
    "field_attrs",
    "field_dims",
    "level_of",
    "pointer_coords",
    "structure",
]

DIMS: dict[Level, str] = {"system": "sample", "atom": "atom", "edge": "edge"}
PTR_DIM = "sample_ptr"
POINTER_NAMES = ("atoms_ptr", "edges_ptr", "num_atoms", "num_edges", "sample_row")
_LEVELS: dict[Hashable, Level] = {dim: level for level, dim in DIMS.items()}


@dataclass(frozen=True, slots=True)
class Structure:
    """Pointers of a ragged Dataset, checked.

    Parameters
    ----------
    atoms_ptr : int64 array, [N + 1]
    edges_ptr : int64 array, [N + 1], or None
        None where the Dataset knows no edges.
    """

    atoms_ptr: Ptr
    edges_ptr: Ptr | None

    @property
    def num_samples(self) -> int:
        return len(self.atoms_ptr) - 1

    def ptr(self, level: Level) -> Ptr:
        """Pointer of a level; for systems, 0 to N.

        Raises
        ------
        FieldError
            There are no edges.
        """
        if level == "atom":
            return self.atoms_ptr
        if level == "system":
            return np.arange(self.num_samples + 1, dtype=np.int64)
        if self.edges_ptr is None:
            raise FieldError("ds.ragged", "the Dataset has no edges_ptr and no num_edges")
        return self.edges_ptr

    def rows(self, level: Level) -> int:
        """Number of rows at a level."""
        return int(self.ptr(level)[-1]) if level != "system" else self.num_samples

    def take(self, positions: IntArray) -> Structure:
        """Pointers of the chosen samples."""
        atoms = counts_to_ptr(np.diff(self.atoms_ptr)[positions])
        if self.edges_ptr is None:
            return Structure(atoms, None)
        return Structure(atoms, counts_to_ptr(np.diff(self.edges_ptr)[positions]))


def level_of(dims: Iterable[Hashable], *, name: Hashable = "") -> Level | None:
    """Level of a variable with these dims; None for one without a ragged dim.

    Raises
    ------
    FieldError
        It has two of them: an outer product of, say, atoms and samples.
    """
    dims = tuple(dims)
    found = [d for d in dims if d in _LEVELS]
    if len(found) > 1:
        raise FieldError(
            "ds.ragged",
            f"variable {name!r} is an outer product of {' and '.join(map(str, found))}",
            found=dims,
            expected="one of 'sample', 'atom', 'edge'",
            mend="bring the sample's value to its rows first, ds.ragged.broadcast(name, 'atom'); "
            "to choose samples by a condition use ds.ragged.where(...) instead of ds.where(...)",
        )
    return _LEVELS[found[0]] if found else None


def field_dims(
    name: str, level: Level, tail: tuple[int, ...], stored: tuple[str | None, ...] = ()
) -> tuple[str, ...]:
    """Dims of a field: the level's, then the table's, the store's, or numbered ones.

    Examples
    --------
    >>> field_dims("cell", "system", (3, 3)), field_dims("mine", "atom", (4,))
    (('sample', 'row', 'xyz'), ('atom', 'mine_1'))
    """
    spec = FIELDS.get(name)
    names: list[str] = []
    for axis in range(len(tail)):
        dim: str | None = None
        if spec is not None and len(spec.dims) == len(tail):
            dim = spec.dims[axis]
        elif len(stored) == len(tail):
            dim = stored[axis]
        if dim is None or dim in names or dim in _LEVELS:
            dim = f"{name}_{axis + 1}"
        names.append(dim)
    return (DIMS[level], *names)


def field_attrs(name: str, level: Level, unit: str) -> dict[str, Any]:
    """Attributes of a field: ``units`` (where it has one), ``long_name``, ``level``."""
    spec = FIELDS.get(name)
    attrs: dict[str, Any] = {}
    if unit:
        attrs["units"] = unit
    attrs["long_name"] = spec.description if spec else name.replace("_", " ")
    attrs["level"] = level
    return attrs


def pointer_coords(struct: Structure) -> dict[str, xr.Variable]:
    """The coordinates that make a Dataset ragged."""
    coords: dict[str, xr.Variable] = {}
    levels: list[tuple[Level, str, Ptr]] = [("atom", "atoms", struct.atoms_ptr)]
    if struct.edges_ptr is not None:
        levels.append(("edge", "edges", struct.edges_ptr))
    for level, plural, ptr in levels:
        coords[f"{plural}_ptr"] = xr.Variable(
            (PTR_DIM,),
            ptr,
            {
                "long_name": f"first {level} of each sample, and the end",
                "level": "system",
                "ragged_dimension": DIMS[level],
            },
        )
        coords[f"num_{plural}"] = xr.Variable(
            (DIMS["system"],),
            np.diff(ptr),
            {
                "long_name": f"number of {plural} of each sample",
                "level": "system",
                # CF conventions, section 9.3.3: contiguous ragged arrays.
                "sample_dimension": DIMS[level],
            },
        )
    coords["sample_row"] = xr.Variable(
        (DIMS["system"],),
        wrap(RowNumbers(struct.num_samples)),
        {"long_name": "position of the sample in atoms_ptr", "level": "system"},
    )
    return coords


def structure(ds: xr.Dataset) -> Structure:
    """Pointers of a Dataset, after checking that they fit it.

    Where a choice of variables (``ds[["energy", "forces"]]``) has dropped the
    pointers, they are made from ``num_atoms`` and ``num_edges``.

    Raises
    ------
    FieldError
        It is not ragged; or samples were chosen or moved by a plain xarray
        call, which leaves atoms and edges behind.
    """
    for name, var in ds.variables.items():
        level_of(var.dims, name=name)
    samples = ds.sizes.get(DIMS["system"])
    atoms_ptr = _pointer(ds, "atoms", samples)
    if atoms_ptr is None:
        raise FieldError(
            "ds.ragged",
            "the Dataset is not ragged",
            found=f"coordinates {list(map(str, ds.coords))}",
            expected="'atoms_ptr' (sample_ptr) or 'num_atoms' (sample)",
            mend="open it with alchemi_xr.open_dataset; choose variables by ds.ragged[[...]], "
            "which keeps the pointers",
        )
    edges_ptr = _pointer(ds, "edges", samples)
    if edges_ptr is None and DIMS["edge"] in ds.dims:
        raise FieldError(
            "ds.ragged",
            "the Dataset has edges but neither 'edges_ptr' nor 'num_edges'",
            mend="choose variables by ds.ragged[[...]], which keeps the pointers",
        )
    count = len(atoms_ptr) - 1
    _need_dims(ds, {"system": count, "atom": int(atoms_ptr[-1])})
    if edges_ptr is not None:
        _need_dims(ds, {"edge": int(edges_ptr[-1])})
    if samples is not None and samples != count:
        raise _torn(f"{samples} samples, pointers for {count}")
    if edges_ptr is not None and len(edges_ptr) - 1 != count:
        raise _torn(f"atoms_ptr for {count} samples, edges_ptr for {len(edges_ptr) - 1}")
    if "sample_row" in ds.variables and not _in_order(ds.variables["sample_row"]):
        raise _torn("samples in another order than their atoms")
    levels: list[tuple[Level, str, Ptr | None]] = [
        ("atom", "atoms", atoms_ptr),
        ("edge", "edges", edges_ptr),
    ]
    for level, plural, ptr in levels:
        if ptr is None:
            continue
        validate_ptr(ptr, where=f"{plural}_ptr")
        counts = ds.variables.get(f"num_{plural}")
        if counts is not None and not np.array_equal(counts.values, np.diff(ptr)):
            raise _torn(f"num_{plural} contradicts {plural}_ptr")
        rows = ds.sizes.get(DIMS[level])
        if rows is not None and rows != ptr[-1]:
            raise _torn(f"{rows} {plural}, pointers for {int(ptr[-1])}")
    return Structure(atoms_ptr, edges_ptr)


def _pointer(ds: xr.Dataset, plural: str, samples: int | None) -> Ptr | None:
    variables: Mapping[Hashable, xr.Variable] = ds.variables
    if f"{plural}_ptr" in variables:
        return np.asarray(variables[f"{plural}_ptr"].values, dtype=np.int64)
    if samples is not None and f"num_{plural}" in variables:
        return counts_to_ptr(variables[f"num_{plural}"].values)
    return None


def _need_dims(ds: xr.Dataset, rows: Mapping[Level, int]) -> None:
    """Raise where a level's dim was renamed: its variables would stay behind."""
    for name, var in ds.variables.items():
        if not var.ndim:
            continue
        level = next((one for one in rows if one == var.attrs.get("level")), None)
        if level is None:
            continue
        if DIMS[level] in var.dims or PTR_DIM in var.dims:
            continue
        dim, size = var.dims[0], var.shape[0]
        if size == rows[level] and dim not in _LEVELS:
            raise FieldError(
                "ds.ragged",
                f"variable {name!r} has one row {DIMS[level]} along another dim",
                found=dim,
                expected=DIMS[level],
                mend=f"name it again: ds.rename({{{dim!r}: {DIMS[level]!r}}})",
            )


def _in_order(rows: xr.Variable) -> bool:
    if isinstance(origin(rows), RowNumbers):
        return True
    return bool(np.array_equal(rows.values, np.arange(rows.shape[0])))


def _torn(found: str) -> FieldError:
    return FieldError(
        "ds.ragged",
        "the samples were torn from their atoms by a plain xarray call",
        found=found,
        expected="atoms and edges that follow their samples",
        mend="on the Dataset as opened use ds.ragged.isel(sample=...) instead of "
        "ds.isel(sample=...), and likewise ds.ragged.sel, .where, .sortby, .head",
    )

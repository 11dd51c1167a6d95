"""Elements of a Dataset and pairs of them, as analyses ask for them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import BoolArray, IntArray
from alchemi_xr.analysis.basics import symbols
from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError, FieldError, UnknownFieldError, nearest
from alchemi_xr.ragged.mapping import apply_blocks

__all__ = ["elements_of", "need", "number_of", "or_nan", "pair_table", "pairs_of", "sample_coords"]

_LARGEST = 128


def need(ds: xr.Dataset, names: tuple[str, ...], where: str) -> None:
    """Raise where a variable is missing."""
    for name in names:
        if name not in ds.variables:
            known = list(map(str, ds.data_vars))
            raise UnknownFieldError(
                where, f"needs {name!r}, which is not there. {nearest(name, known)}"
            )


def sample_coords(ds: xr.Dataset) -> dict[Any, Any]:
    """Coordinates of a result with one value a sample; the time is among them."""
    coords = {n: c.variable for n, c in ds.coords.items() if c.dims == ("sample",)}
    if "time" in ds.variables and ds.variables["time"].dims == ("sample",):
        var = ds.variables["time"]
        coords["time"] = xr.Variable(var.dims, var.data, {"units": "fs", **var.attrs})
    return coords


def or_nan(bottom: Any) -> Any:
    """A denominator whose zeros are NaN; a Dask array stays one."""
    return np.where(bottom == 0, np.nan, bottom)


def elements_of(ds: xr.Dataset) -> list[int]:
    """Atomic numbers that occur, in order; reads ``atomic_numbers`` once."""
    found = apply_blocks(
        ds, ["atomic_numbers"], _present, rows="block", tail=(_LARGEST,), dtype=bool
    )
    return [int(z) for z in np.flatnonzero(np.asarray(found).any(axis=0))]


def _present(block: Block) -> BoolArray:
    numbers = block["atomic_numbers"]
    out = np.zeros(_LARGEST, dtype=bool)
    if len(numbers):
        if numbers.min() < 0 or numbers.max() >= _LARGEST:
            bad = numbers[(numbers < 0) | (numbers >= _LARGEST)][0]
            raise FieldError("atomic_numbers", "is no element", found=int(bad))
        out[np.unique(numbers)] = True
    return out


def number_of(element: Any) -> int:
    """Atomic number of a symbol or number."""
    if isinstance(element, (int, np.integer)) and 0 <= element < _LARGEST:
        return int(element)
    known = symbols()
    if element in known:
        return known.index(element)
    raise ConfigError("elements", f"{element!r} is no element. {nearest(str(element), known)}")


def pairs_of(ds: xr.Dataset, pairs: Any) -> list[tuple[int, int]]:
    """Pairs of atomic numbers: all of those that occur, or those asked for.

    An empty list stands for one pair of anything with anything.
    """
    if isinstance(pairs, str) and pairs == "all":
        return []
    if isinstance(pairs, str) and pairs == "elements":
        return list(itertools.combinations_with_replacement(elements_of(ds), 2))
    try:
        made = [(number_of(a), number_of(b)) for a, b in pairs]
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "pairs",
            f"{pairs!r} names no pairs",
            expected="'elements', 'all', or such as [('O', 'H')]",
        ) from error
    if not made or len({tuple(sorted(pair)) for pair in made}) < len(made):
        raise ConfigError("pairs", f"{pairs!r} are none, or name one twice", expected="each once")
    return made


def pair_table(pairs: list[tuple[int, int]]) -> tuple[IntArray, list[str]]:
    """Number of the pair of two atomic numbers [128, 128], -1 for none; and labels."""
    if not pairs:
        return np.zeros((_LARGEST, _LARGEST), dtype=np.int64), ["all"]
    table = np.full((_LARGEST, _LARGEST), -1, dtype=np.int64)
    for k, (a, b) in enumerate(pairs):
        table[a, b] = table[b, a] = k
    names = symbols()
    return table, [f"{names[a]}-{names[b]}" for a, b in pairs]

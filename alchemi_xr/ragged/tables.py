"""Samples, atoms or edges as a pandas table.

``ds.to_dataframe()`` of a ragged Dataset is xarray's outer product of samples
and atoms; a table here has one row a sample, atom or edge.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._optional import import_optional
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.data.fields import canonical_level
from alchemi_xr.ragged.conventions import DIMS, PTR_DIM, level_of, structure

__all__ = ["to_dataframe"]

_AXES = {3: "xyz", 2: "ij"}


def to_dataframe(ds: xr.Dataset, level: str, names: Sequence[Hashable] | None) -> Any:
    """One row a sample, atom or edge; see ``RaggedAccessor.to_dataframe``."""
    pandas: Any = import_optional("pandas", extra="analysis", why="ds.ragged.to_dataframe")
    target = canonical_level(level, where="ds.ragged.to_dataframe")
    struct = structure(ds)
    columns: dict[str, Any] = {}
    index: Any = pandas.RangeIndex(struct.num_samples, name="sample")
    if target != "system":
        ptr = struct.ptr(target)
        sample = ptr_to_index(ptr)
        index = pandas.MultiIndex.from_arrays(
            [sample, np.arange(ptr[-1]) - ptr[:-1][sample]], names=["sample", target]
        )
    for name, var in ds.variables.items():
        if name in ("atoms_ptr", "edges_ptr", "sample_row") or PTR_DIM in var.dims:
            continue
        if names is not None and name not in names:
            continue
        if level_of(var.dims, name=name) != target:
            continue
        values: Any = np.asarray(var.transpose(DIMS[target], ...).values)
        if values.ndim == 1:
            columns[str(name)] = values
            continue
        for at in itertools.product(*(range(n) for n in values.shape[1:])):
            label = "_".join(
                _AXES[n][i] if n in _AXES else str(i)
                for i, n in zip(at, values.shape[1:], strict=True)
            )
            columns[f"{name}_{label}"] = values[(slice(None), *at)]
    return pandas.DataFrame(columns, index=index)

"""Samples in groups: by system, by config type, by composition.

A group is a set of samples; the atoms of a group are those of its samples. A
reduction goes over samples first, block by block, then over the samples of
each group, so that no group has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, NDArray, Ptr
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.segment import empty_extreme, segment_reduce
from alchemi_xr.errors import ConfigError, IndexRangeError, nearest
from alchemi_xr.ragged.array import is_dask
from alchemi_xr.ragged.conventions import DIMS, Structure, structure
from alchemi_xr.ragged.reduce import reduce, resolve_variable
from alchemi_xr.ragged.select import sample_values, take

__all__ = ["RaggedGroupBy"]

_OPS = ("sum", "mean", "min", "max", "norm", "any", "all")


class RaggedGroupBy:
    """Groups of samples, in the order of their labels.

    Parameters
    ----------
    ds : Dataset
    by : str or DataArray over ``sample``
        Its values are read; nothing else is.
    """

    def __init__(self, ds: xr.Dataset, by: Hashable | xr.DataArray) -> None:
        self._ds = ds
        self._struct: Structure = structure(ds)
        values = sample_values(ds, by, "ds.ragged.groupby", self._struct)
        if values.dtype.kind == "O":
            values = values.astype(str)
        self.name = str(by.name if isinstance(by, xr.DataArray) else by)
        self._labels, self._inverse = np.unique(values, return_inverse=True)
        self._order: IntArray = np.argsort(self._inverse, kind="stable").astype(np.int64)
        counts = np.bincount(self._inverse, minlength=len(self._labels))
        self._ptr: Ptr = counts_to_ptr(counts)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> NDArray:
        """Label of each group."""
        return self._labels

    def samples(self, label: Any) -> IntArray:
        """Positions of the samples of a group, in their order.

        Raises
        ------
        IndexRangeError
            No group has this label.
        """
        at = np.flatnonzero(self._labels == label)
        if not len(at):
            raise IndexRangeError(
                "ds.ragged.groupby",
                f"no sample has {self.name} {label!r}",
                mend=f"the first labels are {list(self._labels[:5])}",
            )
        group = int(at[0])
        return self._order[self._ptr[group] : self._ptr[group + 1]]

    def __getitem__(self, label: Any) -> xr.Dataset:
        """The samples of a group, lazily."""
        return take(self._ds, self._struct, self.samples(label))

    def __iter__(self) -> Iterator[tuple[Any, xr.Dataset]]:
        for group, label in enumerate(self._labels):
            at = self._order[self._ptr[group] : self._ptr[group + 1]]
            yield label, take(self._ds, self._struct, at)

    def __repr__(self) -> str:
        sizes = np.diff(self._ptr)
        span = f" of {sizes.min()} to {sizes.max()} samples" if len(sizes) else ""
        return f"RaggedGroupBy({self.name!r}: {len(self)} groups{span})"

    def count(self) -> xr.DataArray:
        """Number of samples of each group."""
        attrs = {"long_name": f"number of samples of each {self.name}"}
        return self._result(np.diff(self._ptr), (self.name,), "num_samples", attrs)

    def reduce(self, what: Hashable | xr.DataArray, op: str) -> xr.DataArray:
        """One value a group, over all rows of its samples.

        Parameters
        ----------
        what : str or DataArray
            Over ``sample``, ``atom`` or ``edge``.
        op : {"sum", "mean", "min", "max", "norm", "any", "all"}
            A mean goes over rows, not over means of samples.

        Returns
        -------
        DataArray over the groups
            A Dask array where ``what`` is one.
        """
        if op not in _OPS:
            raise ConfigError(
                "ds.ragged.groupby", f"{op!r} is no reduction. {nearest(op, _OPS, n=1)}"
            )
        name, var, level = resolve_variable(self._ds, what, self._struct, where="ds.ragged.groupby")
        var = var.transpose(DIMS[level], ...)
        order, ptr = self._order, self._ptr
        # Rows of each group; a sample without atoms says nothing about its group.
        rows = np.diff(ptr)
        parts = var.data if is_dask(var) else None
        if level == "system":
            parts = var.values if parts is None else parts
        else:
            rows = segment_reduce(np.diff(self._struct.ptr(level))[order], ptr, "sum")
            first = "sum" if op == "mean" else op
            initial = _neutral(var.dtype, op) if op in ("min", "max") else None
            parts = reduce(self._ds, what, first, initial=initial).data
        if op in ("min", "max") and var.dtype.kind not in "f" and not rows.all():
            raise empty_extreme(op, int(np.flatnonzero(rows == 0)[0]), var.dtype)
        dtype = segment_reduce(np.ones(1, var.dtype), np.array([0, 1]), op).dtype

        def combine(values: NDArray) -> NDArray:
            values = values[order]
            if level == "system" or op not in ("mean", "min", "max"):
                return segment_reduce(values, ptr, op)
            out = segment_reduce(values, ptr, "sum" if op == "mean" else op)
            if op == "mean":
                with np.errstate(invalid="ignore", divide="ignore"):
                    out = out / rows.reshape(-1, *[1] * (out.ndim - 1))
            elif out.dtype.kind == "f":
                out[rows == 0] = np.nan
            return out.astype(dtype, copy=False)

        tail = var.shape[1:] if op != "norm" else ()
        if is_dask(xr.Variable([f"dim_{i}" for i in range(parts.ndim)], parts)):
            import dask.array
            from dask import delayed

            da: Any = dask.array
            task = delayed(combine, pure=False)(parts)
            result = da.from_delayed(task, (len(self), *tail), dtype=dtype)
        else:
            result = combine(np.asarray(parts))
        attrs = {k: v for k, v in var.attrs.items() if k == "units" and op not in ("any", "all")}
        attrs["long_name"] = f"{op} of {var.attrs.get('long_name', name)} by {self.name}"
        dims = (self.name, *(var.dims[1:] if op != "norm" else ()))
        return self._result(result, dims, name, attrs)

    def mean(self, what: Hashable | xr.DataArray) -> xr.DataArray:
        """Mean over the rows of each group."""
        return self.reduce(what, "mean")

    def sum(self, what: Hashable | xr.DataArray) -> xr.DataArray:
        """Sum over the rows of each group."""
        return self.reduce(what, "sum")

    def min(self, what: Hashable | xr.DataArray) -> xr.DataArray:
        """Smallest value of each group."""
        return self.reduce(what, "min")

    def max(self, what: Hashable | xr.DataArray) -> xr.DataArray:
        """Largest value of each group."""
        return self.reduce(what, "max")

    def map(self, func: Callable[[xr.Dataset], Any]) -> Any:
        """A function of each group's Dataset, results side by side along the groups.

        Parameters
        ----------
        func : callable
            Gets the ragged Dataset of a group; gives a DataArray or Dataset
            without ragged dims (one number, a curve, ...), the same dims for all.
        """
        parts = [func(ds) for _, ds in self]
        index = xr.DataArray(self._labels, dims=self.name, name=self.name)
        return xr.concat(parts, dim=index)

    def trajectories(self, **options: Any) -> Iterator[tuple[Any, xr.Dataset]]:
        """Each group as a dense trajectory; ``options`` as for ``ds.ragged.trajectory``."""
        from alchemi_xr.ragged.trajectory import dense

        for label, ds in self:
            yield label, dense(ds, **options)

    def _result(self, values: Any, dims: Any, name: Any, attrs: dict[str, Any]) -> xr.DataArray:
        return xr.DataArray(values, {self.name: self._labels}, dims, name, attrs)


def _neutral(dtype: np.dtype[Any], op: str) -> Any:
    if dtype.kind == "f":
        return np.inf if op == "min" else -np.inf
    if dtype.kind == "b":
        return op == "min"
    info = np.iinfo(dtype)
    return info.max if op == "min" else info.min

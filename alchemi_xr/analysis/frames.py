"""Time series of atoms out of frames: some atoms, all frames, unwrapped on the way.

Correlations need all times of an atom at once. Frames are read in their order,
some megabytes at a time, and only the atoms of one slab are kept; a system too
large for the budget is read once for each slab.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.analysis.basics import masses_of, symbols
from alchemi_xr.analysis.species import need
from alchemi_xr.data.block import Block
from alchemi_xr.data.cells import complete_cells, periodicity
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.ragged.conventions import structure
from alchemi_xr.ragged.mapping import as_block, partition_of
from alchemi_xr.ragged.select import take

__all__ = ["SLAB_BYTES", "Frames", "correlate", "fast_length", "iter_systems"]

SLAB_BYTES = 64 * 2**20
"""Bytes of the time series held at once."""
_CACHE_BYTES = 2**20


@dataclass(frozen=True)
class Frames:
    """The frames of one system, in the order of time.

    Parameters
    ----------
    ds : Dataset
        Ragged; every sample has the same atoms.
    lag : float
        Between frames, in ``units``.
    units : str
    atoms : int
    numbers : int array, [atoms]
    """

    ds: xr.Dataset
    lag: float
    units: str
    atoms: int
    numbers: IntArray

    def __len__(self) -> int:
        return structure(self.ds).num_samples

    def blocks(self, names: tuple[str, ...]) -> Iterator[Block]:
        """Frames some megabytes at a time."""
        ds = self.ds.ragged[[n for n in names if n in self.ds.variables]]
        struct = structure(ds)
        sizes, _ = partition_of(ds, struct)
        start = 0
        for size in sizes:
            yield as_block(take(ds, struct, np.arange(start, start + size)).compute())
            start += size

    def slabs(self, itemsize: int = 24) -> list[slice]:
        """Atoms whose time series fit the budget together."""
        width = max(1, SLAB_BYTES // max(1, itemsize * len(self)))
        return [slice(a, min(a + width, self.atoms)) for a in range(0, self.atoms, width)]

    def groups(self, elements: bool = True) -> list[tuple[str, NDArray]]:
        """Labels and masks of atoms: all, and each element where there are several."""
        out = [("all", np.ones(self.atoms, dtype=bool))]
        found = np.unique(self.numbers)
        if elements and len(found) > 1:
            names = symbols()
            out += [(names[z], self.numbers == z) for z in found]
        return out

    def series(self, name: str, slab: slice) -> NDArray:
        """A per-atom vector of some atoms, float64 [atoms, 3, frames]."""
        out: NDArray = np.empty((slab.stop - slab.start, 3, len(self)))
        at = 0
        names: tuple[str, ...] = (name,)
        if name == "velocities" and name not in self.ds.variables:
            names = ("momenta", "atomic_masses", "atomic_numbers")
        for block in self.blocks(names):
            values = block[names[0]].reshape(-1, self.atoms, 3)[:, slab]
            if len(names) > 1:
                values = values / masses_of(block).reshape(-1, self.atoms, 1)[:, slab]
            out[:, :, at : at + len(values)] = values.transpose(1, 2, 0)
            at += len(values)
        return out

    def unwrapped(self, slab: slice, scheme: str = "fractional") -> NDArray:
        r"""Positions of some atoms without jumps at the faces of the cell, [atoms, 3, frames].

        Parameters
        ----------
        slab : slice
        scheme : {"fractional", "toroidal"}
            What a cell that changes means. ``fractional``: motion within the
            cell, in the mean cell (what the cell drags along is no motion of the
            atom). ``toroidal``: sum of the shortest displacements, each in the
            cell of its frame [1]_. The same for a constant cell.

        References
        ----------
        .. [1] J. T. Bullerjahn et al., *J. Chem. Theory Comput.* 19, 3406 (2023).
        """
        if scheme not in ("fractional", "toroidal"):
            raise ConfigError("unwrap", f"{scheme!r} is no scheme", expected="'fractional' …")
        out: NDArray = np.empty((slab.stop - slab.start, 3, len(self)))
        path = _Path(scheme, self._mean_cell() if scheme == "fractional" else None)
        at = 0
        # A few frames at a time: all that is made on the way stays in the processor's cache.
        step = max(1, _CACHE_BYTES // (24 * max(1, len(out))))
        for block in self.blocks(("positions", "cell", "pbc")):
            cell, pbc = periodicity(block)
            x = block["positions"].reshape(-1, self.atoms, 3)[:, slab]
            full = complete_cells(cell, pbc, at) if pbc.any() else None
            for start in range(0, len(x), step):
                cut = slice(start, start + step)
                part = x[cut].astype(np.float64)
                if not np.isfinite(part.sum()):
                    raise FieldError(
                        "trajectory", "positions are not finite", mend="leave such frames out"
                    )
                if full is not None:
                    part = path.follow(part, full[cut], pbc[cut])
                out[:, :, at : at + len(part)] = part.transpose(1, 2, 0)
                at += len(part)
        if path.largest > 0.45:
            warnings.warn(
                f"atoms move by up to {path.largest:.2f} of the cell between frames: which way they "
                "went cannot be told, and displacements come out too small. Write frames more often.",
                stacklevel=3,
            )
        return out

    def _mean_cell(self) -> NDArray:
        """Mean of the cells of all frames, one that is missing or open completed."""
        total = np.zeros((3, 3))
        for block in self.blocks(("cell", "pbc")):
            total += complete_cells(*periodicity(block)).sum(axis=0)
        return total / len(self)


class _Path:
    """Continuous positions of atoms, frame after frame."""

    def __init__(self, scheme: str, mean: NDArray | None) -> None:
        self.fractional = scheme == "fractional"
        self.mean = mean
        self.last: NDArray | None = None
        self.made: NDArray | None = None
        self.largest = 0.0

    def follow(self, x: NDArray, cell: NDArray, pbc: NDArray) -> NDArray:
        """The next frames, [f, a, 3]."""
        if not len(x) or not x.shape[1]:
            return x
        same = bool((cell == cell[0]).all())
        inverse = np.linalg.inv(cell[:1] if same else cell)
        state = _times(x, inverse) if self.fractional else x
        step = np.empty_like(state)
        step[0] = 0.0 if self.last is None else state[0] - self.last
        np.subtract(state[1:], state[:-1], out=step[1:])
        jump = np.rint(step if self.fractional else _times(step, inverse))
        if not pbc.all():
            jump *= pbc[:, None, :]
        if self.fractional:
            step -= jump
            moved = step
        else:
            step -= _times(jump, cell[:1] if same else cell)
            moved = _times(step, inverse)
        if not pbc.all():
            moved = moved * pbc[:, None, :]
        self.largest = max(self.largest, float(moved.max()), -float(moved.min()))
        step[0] += state[0] if self.made is None else self.made
        # Row upon row: cumsum along the first axis is several times slower.
        for k in range(1, len(step)):
            np.add(step[k], step[k - 1], out=step[k])
        self.last, self.made = state[-1].copy(), step[-1].copy()
        return step if self.mean is None else _times(step, self.mean[None])


def _times(x: NDArray, matrix: NDArray) -> NDArray:
    """Row vectors times a matrix, one for all frames or one for each."""
    if len(matrix) == 1:
        out: NDArray = (x.reshape(-1, 3) @ matrix[0]).reshape(x.shape)
        return out
    return x @ matrix


def iter_systems(
    ds: xr.Dataset, names: tuple[str, ...], where: str, by: str, time_step: float | None
) -> Iterator[tuple[Any, Frames]]:
    """Each system of a Dataset with its frames, checked.

    Where there is no variable ``by``, all samples are frames of one system.
    """
    need(ds, names, where)
    if by in ds.variables:
        for label, part in ds.ragged.groupby(by):
            yield label, _frames(part, f"{where}, {by} {label}", time_step)
    else:
        yield 0, _frames(ds, where, time_step)


def _frames(ds: xr.Dataset, where: str, time_step: float | None) -> Frames:
    from alchemi_xr.ragged.trajectory import times

    struct = structure(ds)
    counts = np.diff(struct.atoms_ptr)
    if not len(counts) or (counts != counts[0]).any():
        odd = int(np.flatnonzero(counts != counts[0])[0]) if len(counts) else 0
        raise FieldError(
            where,
            "the samples are not frames of one system",
            found=f"{counts[odd]} atoms in sample {odd}" if len(counts) else "no frames",
            expected=f"{counts[0]}, as in the first" if len(counts) else None,
            mend="choose one: ds.ragged.sel(...), or give the store a field system_id",
        )
    values, attrs, _ = times(ds, None, time_step)
    lag, units = 1.0, "frames"
    if values is not None:
        order = np.argsort(values, kind="stable").astype(np.int64)
        if (np.diff(order) < 0).any():
            ds = take(ds, struct, order)
        steps = np.diff(values[order].astype(np.float64))
        if len(steps):
            lag = float(steps.mean())
            if not np.allclose(steps, lag, rtol=1e-3) or lag <= 0:
                raise FieldError(
                    where,
                    "frames are not equally spaced in time",
                    found=f"steps of {steps.min():g} to {steps.max():g}",
                    mend="choose frames at equal distance with ds.ragged.isel",
                )
        units = str(attrs.get("units", "steps"))
    if "atomic_numbers" in ds.variables:
        one = take(ds.ragged[["atomic_numbers"]], structure(ds), np.zeros(1, dtype=np.int64))
        numbers = np.asarray(one["atomic_numbers"].values, dtype=np.int64)
    else:
        numbers = np.zeros(counts[0], dtype=np.int64)
    return Frames(ds, lag, units, int(counts[0]), numbers)


def fast_length(count: int) -> int:
    """A length at least this for which the transform is fast."""
    import scipy.fft

    return int(scipy.fft.next_fast_len(count, real=True))


def correlate(
    series: NDArray, weights: NDArray, *, center: bool = False
) -> tuple[NDArray, NDArray]:
    """Sums over atoms and axes of autocorrelations, by FFT.

    Parameters
    ----------
    series : float64 array, [A, 3, F]
    weights : float64 array, [G, A]
        Weight of each atom in each sum.
    center : bool
        Take off the mean of each series.

    Returns
    -------
    float64 arrays, [G, F]
        Sum over t of x(t) x(t + lag), not yet divided by the number of times; and the
        squares x(t)², summed over atoms and axes.

    Notes
    -----
    The power spectra are summed first (Wiener-Khinchin), so there is one
    transform back for each sum, not for each atom.
    """
    import scipy.fft

    atoms, axes, frames = series.shape
    length = fast_length(2 * frames)
    step = max(1, _CACHE_BYTES // (8 * axes * length))

    def some(a: int) -> tuple[NDArray, NDArray]:
        part, w = series[a : a + step], weights[:, a : a + step]
        if center:
            part = part - part.mean(axis=-1, keepdims=True)
        squares = w @ np.einsum("axf,axf->af", part, part)
        spectrum = scipy.fft.rfft(part, n=length, axis=-1).view(np.float64)
        both = w @ np.einsum("axk,axk->ak", spectrum, spectrum)
        return both[:, ::2] + both[:, 1::2], squares

    power = np.zeros((len(weights), length // 2 + 1))
    total = np.zeros((len(weights), frames))
    # The transforms leave the interpreter to others while they run; sums come in one order.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for spectrum, squares in pool.map(some, range(0, atoms, step)):
            power += spectrum
            total += squares
    out: NDArray = scipy.fft.irfft(power, n=length, axis=-1)[:, :frames]
    return out, total

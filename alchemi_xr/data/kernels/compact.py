"""Buffers of fixed capacity: which samples fit, copying them in, closing gaps.

The same words are moved whatever the dtype is, so that no dtype can be left
behind; the torch and the Warp version give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.kernels.gather import Backend, gather_rows
from alchemi_xr.errors import FieldError

__all__ = ["compact_rows", "fitting", "put_rows"]


def fitting(counts: Sequence[NDArray], room: Sequence[int]) -> BoolArray:
    """Which samples are taken when each is taken in order if it still fits at every level.

    A sample that does not fit is passed over; smaller ones after it may fit.

    Parameters
    ----------
    counts : sequence of int64 array, [M]
        Rows of each sample, one array a level.
    room : sequence of int
        Free rows, one number a level.

    Examples
    --------
    >>> fitting([np.array([2, 9, 3])], [5])
    array([ True, False,  True])
    """
    taken = np.zeros(len(counts[0]), dtype=bool)
    left = np.arange(len(taken))
    free = list(room)
    # Each round takes the longest prefix that fits; what does not fit by itself now never will,
    # as room only shrinks. So the rounds are as many as there are samples passed over, and
    # usually one or two.
    while len(left):
        alone = np.ones(len(left), dtype=bool)
        for level, limit in zip(counts, free, strict=True):
            alone &= level[left] <= limit
        left = left[alone]
        prefix = len(left)
        for level, limit in zip(counts, free, strict=True):
            prefix = min(prefix, int(np.searchsorted(np.cumsum(level[left]), limit, side="right")))
        chosen = left[:prefix]
        taken[chosen] = True
        free = [limit - int(level[chosen].sum()) for level, limit in zip(counts, free, strict=True)]
        left = left[prefix:]
    return taken


def put_rows(
    dst: Tensor,
    src: Tensor,
    ptr: Tensor,
    samples: Tensor,
    *,
    at: int = 0,
    total: int | None = None,
    backend: Backend | None = None,
) -> int:
    """Copy the rows of chosen samples into a buffer, in place.

    Parameters
    ----------
    dst : tensor, [capacity, ...]
        Its dtype wins.
    src : tensor, [V, ...]
    ptr : int64 tensor, [N + 1]
        Of ``src``.
    samples : int64 tensor, [M]
    at : int
        First row of ``dst`` that is written.
    total : int, optional
        Number of rows, where known.

    Returns
    -------
    int
        Number of rows written.

    Raises
    ------
    FieldError
        The rows do not fit, or have another shape.
    """
    if dst.shape[1:] != src.shape[1:]:
        raise FieldError(
            "put",
            "rows of source and buffer have different shapes",
            found=list(src.shape[1:]),
            expected=list(dst.shape[1:]),
        )
    rows, _ = gather_rows(src.detach(), ptr, samples, total=total, backend=backend)
    if at + len(rows) > len(dst):
        raise FieldError(
            "put", "the rows do not fit", found=at + len(rows), expected=f"at most {len(dst)} rows"
        )
    with torch.no_grad():
        dst[at : at + len(rows)] = rows  # casts where the dtypes differ
    return len(rows)


def compact_rows(
    values: Tensor,
    ptr: Tensor,
    samples: Tensor,
    *,
    total: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Move the rows of chosen samples to the front, in place; rows behind become 0.

    Parameters
    ----------
    values : tensor, [capacity, ...]
    ptr : int64 tensor, [N + 1]
    samples : int64 tensor, [M]
        Those to keep, in their new order.

    Returns
    -------
    new_ptr : int64 tensor, [M + 1]
    """
    # Through a copy: rows move over one another, and on a device in no order.
    rows, new = gather_rows(values.detach(), ptr, samples, total=total, backend=backend)
    with torch.no_grad():
        values[: len(rows)] = rows
        values[len(rows) :] = 0
    return new

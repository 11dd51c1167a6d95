"""Rows of chosen samples, copied one after the other.

The torch version and the Warp version give the same bits for every dtype: a
row is moved as words, whatever it means.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from alchemi_xr.errors import ConfigError

__all__ = ["Backend", "gather_rows", "pick_backend", "row_positions"]

Backend: TypeAlias = Literal["torch", "warp"]


def pick_backend(backend: str | None, device: torch.device) -> Backend:
    """The backend asked for; by default torch on CPU and Warp on CUDA."""
    if backend is None:
        return "warp" if device.type == "cuda" else "torch"
    if backend not in ("torch", "warp"):
        raise ConfigError("kernels", f"backend {backend!r} is not known", expected="torch or warp")
    return backend  # type: ignore[return-value]


def row_positions(ptr: Tensor, samples: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of the chosen samples, one after the other, and their new pointer.

    Parameters
    ----------
    ptr : int64 tensor, [N + 1]
    samples : int64 tensor, [M]
        In range, any order, repeats allowed.
    total : int, optional
        Number of rows, where the caller knows it: spares a wait for the device.

    Returns
    -------
    rows : int64 tensor, [total]
    new_ptr : int64 tensor, [M + 1]

    Examples
    --------
    >>> row_positions(torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0]))
    (tensor([2, 3, 4, 0, 1]), tensor([0, 3, 5]))
    """
    starts = ptr[samples]
    counts = ptr[samples + 1] - starts
    new = torch.zeros(len(samples) + 1, dtype=torch.int64, device=ptr.device)
    torch.cumsum(counts, 0, out=new[1:])
    rows = torch.repeat_interleave(starts - new[:-1], counts, output_size=total)
    rows += torch.arange(len(rows), dtype=torch.int64, device=ptr.device)
    return rows, new


def gather_rows(
    src: Tensor,
    ptr: Tensor,
    samples: Tensor,
    *,
    total: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows of the chosen samples out of a flat tensor, and their new pointer.

    Parameters
    ----------
    src : tensor, [V, ...]
        Any dtype.
    ptr : int64 tensor, [N + 1]
    samples : int64 tensor, [M]
        In range, any order, repeats allowed.
    total : int, optional
        Rows of the result, where known.
    backend : {"torch", "warp"}, optional
        By default torch on CPU and Warp on CUDA.

    Returns
    -------
    rows : tensor, [total, ...]
    new_ptr : int64 tensor, [M + 1]
    """
    # A gather with a gradient is torch's: Warp moves words, not values.
    if pick_backend(backend, src.device) == "torch" or src.requires_grad:
        rows, new = row_positions(ptr, samples, total)
        return src.index_select(0, rows), new
    from alchemi_xr.data.kernels.words import gather_words

    return gather_words(src, ptr, samples, total)

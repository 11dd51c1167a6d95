"""Warp kernels that move rows as words of 1, 2, 4 or 8 bytes, CPU and CUDA.

One kernel for each width, compiled when first asked for: a row of any dtype is
a row of the widest word that divides it, so no dtype needs code of its own.
"""

# mypy: ignore-errors
# The arguments of a Warp kernel are annotated with objects, which mypy cannot read; and they may
# not be postponed, as Warp reads them as they are.

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from alchemi_xr.data.kernels._warp import start_warp, stream_of

__all__ = ["gather_words"]

_WORDS = {
    8: (torch.int64, wp.int64),
    4: (torch.int32, wp.int32),
    2: (torch.int16, wp.int16),
    1: (torch.uint8, wp.uint8),
}


@functools.cache
def _gather_kernel(width: int) -> Any:
    start_warp()
    word = _WORDS[width][1]

    @wp.kernel(enable_backward=False, module="unique")
    def gather(
        src: wp.array2d(dtype=word),  # type: ignore[valid-type]
        ptr: wp.array(dtype=wp.int64),  # type: ignore[valid-type]
        samples: wp.array(dtype=wp.int64),  # type: ignore[valid-type]
        new_ptr: wp.array(dtype=wp.int64),  # type: ignore[valid-type]
        out: wp.array2d(dtype=word),  # type: ignore[valid-type]
    ) -> None:
        row, column = wp.tid()
        # The last sample whose first row is not behind this one: of samples without rows, which
        # share a start, it is the one that owns the row.
        low = int(0)  # noqa: UP018, RUF046  a Warp variable, not a constant
        high = samples.shape[0]
        while high - low > 1:
            middle = (low + high) // 2
            if new_ptr[middle] <= wp.int64(row):
                low = middle
            else:
                high = middle
        source = ptr[samples[low]] + wp.int64(row) - new_ptr[low]
        out[row, column] = src[int(source), column]

    return gather


def _as_words(values: Tensor) -> tuple[Tensor, int]:
    """The rows as words [V, words], and the width of a word."""
    rows = values.contiguous().reshape(len(values), -1)
    size = rows.shape[1] * rows.element_size()
    offset = rows.storage_offset() * rows.element_size()
    width = next(w for w in (8, 4, 2, 1) if size % w == 0 and offset % w == 0)
    return rows.view(torch.uint8).reshape(len(rows), size).view(_WORDS[width][0]), width


def gather_words(
    src: Tensor, ptr: Tensor, samples: Tensor, total: int | None
) -> tuple[Tensor, Tensor]:
    """Rows of chosen samples, as ``gather.gather_rows``."""
    counts = (ptr[1:] - ptr[:-1])[samples]
    new_ptr = torch.zeros(len(samples) + 1, dtype=torch.int64, device=src.device)
    torch.cumsum(counts, 0, out=new_ptr[1:])
    rows = int(new_ptr[-1]) if total is None else total
    out = torch.empty((rows, *src.shape[1:]), dtype=src.dtype, device=src.device)
    if out.numel() == 0:
        return out, new_ptr
    words, width = _as_words(src)
    target = out.reshape(rows, -1).view(torch.uint8).reshape(rows, -1).view(words.dtype)
    word = _WORDS[width][1]
    kernel = _gather_kernel(width)
    wp.launch(
        kernel,
        dim=(rows, words.shape[1]),
        inputs=[
            wp.from_torch(words, dtype=word),
            wp.from_torch(ptr.contiguous(), dtype=wp.int64),
            wp.from_torch(samples.contiguous(), dtype=wp.int64),
            wp.from_torch(new_ptr, dtype=wp.int64),
        ],
        outputs=[wp.from_torch(target, dtype=word)],
        device=wp.device_from_torch(src.device),
        stream=stream_of(src.device),
    )
    return out, new_ptr

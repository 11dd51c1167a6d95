"""Warp kernels of segment reductions: one thread a sample and column.

Each thread walks the rows of its sample in order, so a result does not depend
on scheduling. Two kernels do all operations: ``accumulate`` (sum, squares,
count of what is true) and ``extreme`` (the row of the smallest or largest).
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

__all__ = ["accumulate", "extreme_row"]

_SCALARS = {
    torch.uint8: wp.uint8,
    torch.int8: wp.int8,
    torch.int16: wp.int16,
    torch.int32: wp.int32,
    torch.int64: wp.int64,
    torch.float32: wp.float32,
    torch.float64: wp.float64,
}
_MODES = {"sum": 0, "squares": 1, "true": 2}


@functools.cache
def _accumulate_kernel(dtype: torch.dtype) -> Any:
    start_warp()
    scalar = _SCALARS[dtype]
    wide = wp.float64 if dtype.is_floating_point else wp.int64

    @wp.kernel(enable_backward=False, module="unique")
    def accumulate(
        values: wp.array2d(dtype=scalar),
        ptr: wp.array(dtype=wp.int64),
        mode: int,
        out: wp.array2d(dtype=wide),
    ):
        sample, column = wp.tid()
        total = wide(0)
        for row in range(int(ptr[sample]), int(ptr[sample + 1])):
            value = values[row, column]
            if mode == 0:
                total += wide(value)
            elif mode == 1:
                total += wide(value) * wide(value)
            elif value != scalar(0):
                total += wide(1)
        out[sample, column] = total

    return accumulate


@functools.cache
def _extreme_kernel(dtype: torch.dtype) -> Any:
    start_warp()
    scalar = _SCALARS[dtype]

    if dtype.is_floating_point:

        @wp.func
        def is_nan(value: scalar):
            return wp.isnan(value)

    else:

        @wp.func
        def is_nan(value: scalar):
            return False

    @wp.kernel(enable_backward=False, module="unique")
    def extreme(
        values: wp.array2d(dtype=scalar),
        ptr: wp.array(dtype=wp.int64),
        largest: int,
        out: wp.array2d(dtype=wp.int64),
    ):
        sample, column = wp.tid()
        start = int(ptr[sample])
        best = int(-1)  # noqa: UP018, RUF046  a Warp variable, not a constant
        for row in range(start, int(ptr[sample + 1])):
            value = values[row, column]
            if best < 0:
                best = row
            else:
                held = values[best, column]
                # The first NaN stays, as in NumPy.
                if not is_nan(held):
                    better = is_nan(value)
                    if largest == 1 and value > held:
                        better = True
                    if largest == 0 and value < held:
                        better = True
                    if better:
                        best = row
        if best < 0:
            out[sample, column] = wp.int64(-1)
        else:
            out[sample, column] = wp.int64(best - start)

    return extreme


def _known(values: Tensor) -> Tensor:
    """Rows [V, columns] in a dtype that the kernels are made for; no value changes."""
    flat = values.reshape(len(values), values.shape[1:].numel())
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    elif flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    return flat.contiguous()


def _launch(kernel: Any, flat: Tensor, ptr: Tensor, flag: int, out: Tensor) -> Tensor:
    if out.numel():
        wp.launch(
            kernel,
            dim=tuple(out.shape),
            inputs=[wp.from_torch(flat), wp.from_torch(ptr.contiguous()), flag],
            outputs=[wp.from_torch(out)],
            device=wp.device_from_torch(flat.device),
            stream=stream_of(flat.device),
        )
    return out


def accumulate(values: Tensor, ptr: Tensor, mode: str) -> Tensor:
    """Sum, sum of squares or count of true values, in float64 or int64, [N, columns]."""
    flat = _known(values)
    wide = torch.float64 if flat.is_floating_point() else torch.int64
    out = torch.zeros((len(ptr) - 1, flat.shape[1]), dtype=wide, device=flat.device)
    return _launch(_accumulate_kernel(flat.dtype), flat, ptr, _MODES[mode], out)


def extreme_row(values: Tensor, ptr: Tensor, *, largest: bool) -> Tensor:
    """First row, within its sample, of the extreme; -1 without rows. int64 [N, columns]."""
    flat = _known(values)
    out = torch.empty((len(ptr) - 1, flat.shape[1]), dtype=torch.int64, device=flat.device)
    return _launch(_extreme_kernel(flat.dtype), flat, ptr, int(largest), out)

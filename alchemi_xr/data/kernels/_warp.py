"""Warp, started without its banner and without a line for each module it loads."""

import functools
from types import ModuleType
from typing import Any

import torch
import warp as wp

__all__ = ["start_warp", "stream_of"]


@functools.cache
def start_warp() -> ModuleType:
    """Warp, ready for kernels and conversions; says nothing but warnings."""
    if hasattr(wp.config, "log_level"):  # from 1.19 on
        wp.config.log_level = getattr(wp, "LOG_WARNING", 30)
    else:
        setattr(wp.config, "quiet", True)  # noqa: B010  not in the stubs of the newest Warp
    wp.init()
    return wp


def stream_of(device: torch.device) -> Any:
    """torch's current stream for Warp launches on this device; None on CPU."""
    return (
        wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
    )

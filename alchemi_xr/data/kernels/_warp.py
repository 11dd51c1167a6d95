"""Warp, started without its banner, its lines for each module, and its remark on a missing GPU."""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import warp as wp

__all__ = ["on_stream_of", "start_warp", "stream_of"]


@functools.cache
def start_warp() -> ModuleType:
    """Warp, ready for kernels and conversions; says nothing but warnings.

    Everything that needs Warp, here or in a library, comes through this: what
    Warp prints, it prints when it is first started.
    """
    if hasattr(wp.config, "log_level"):  # from 1.19 on
        wp.config.log_level = getattr(wp, "LOG_WARNING", 30)
    else:
        setattr(wp.config, "quiet", True)  # noqa: B010  not in the stubs of the newest Warp
    with contextlib.nullcontext() if torch.cuda.is_available() else _without_driver_remark():
        wp.init()
    return wp


@contextlib.contextmanager
def _without_driver_remark() -> Iterator[None]:
    """Leaves Warp's lines about a missing CUDA driver out of the error stream.

    They come from C, past ``sys.stderr`` and every option; on a machine without
    a GPU they are no news. All other output is passed on.
    """
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (AttributeError, OSError, ValueError):  # no error stream to speak of
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught.read().splitlines(keepends=True):
                if b"CUDA driver" not in line:
                    os.write(2, line)


def stream_of(device: torch.device) -> Any:
    """torch's current stream for Warp launches on this device; None on CPU."""
    return (
        wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
    )


def on_stream_of(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Warp launches inside go to torch's current stream; for code that takes no stream.

    Warp's own stream waits for torch's default one, but not for a stream that
    ``with dynamics:`` works in.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = wp.ScopedStream(
        stream_of(device), sync_enter=False
    )
    return manager

"""The model call through ``torch.compile``, with a way back.

A batch is ragged: its sizes change with every refill, so shapes are compiled
as dynamic unless the caller says otherwise. Only the model is compiled: it is
what costs, and hooks stay ordinary Python.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["compile_model"]


def compile_model(model: Any, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """The model as a compiled call.

    A model that the compiler cannot take (calls of Warp kernels or of ASE under
    ``fullgraph=True``, no C++ compiler) is run as it is, after one
    ``RuntimeWarning`` that says why: a wish for speed does not stop a run.

    Parameters
    ----------
    model : callable
    options : dict
        Keywords of ``torch.compile``.
    """
    compiled = torch.compile(model, **{"dynamic": True, **options})
    works = True

    def call(batch: Any) -> Any:
        nonlocal works
        if works:
            _touch(batch)
            try:
                with _forces_in_graph(), warnings.catch_warnings():
                    # The tracer's own remarks on code that it rewrites.
                    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
                    return compiled(batch)
            except Exception as error:
                if not _is_compiler_error(error):
                    raise
                works = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    f"torch.compile cannot take {type(model).__name__} and it runs uncompiled: "
                    f"{reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return model(batch)

    return call


def _touch(batch: Any) -> None:
    """Make the lazy index tensors of a batch, which must not appear while it is traced."""
    for name in ("batch_idx", "batch_ptr", "atoms_ptr", "edges_ptr"):
        getattr(batch, name)


def _forces_in_graph() -> contextlib.AbstractContextManager[Any]:
    """Let the compiler trace ``torch.autograd.grad``, where this torch can."""
    config = torch._dynamo.config
    if hasattr(config, "trace_autograd_ops"):
        return config.patch(trace_autograd_ops=True)
    return contextlib.nullcontext()


def _is_compiler_error(error: BaseException) -> bool:
    """Whether the compiler failed, and not the model."""
    module = type(error).__module__
    return module.startswith(("torch._dynamo", "torch._inductor", "torch.fx")) or (
        isinstance(error, AssertionError) and "Guard failed" in str(error)
    )

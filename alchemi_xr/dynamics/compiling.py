"""The model call through ``torch.compile``, with a way back.

A batch is ragged: its sizes change with every refill, so shapes are compiled
as dynamic unless the caller says otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["compile_model"]


def compile_model(model: Any, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """The model as a compiled call.

    A model that the compiler cannot take (calls of Warp kernels or of ASE, a
    gradient inside ``fullgraph=True``, no C++ compiler) is run as it is, after
    one ``RuntimeWarning`` that says why: a wish for speed does not stop a run.

    Parameters
    ----------
    model : callable
    options : dict
        Keywords of ``torch.compile``.
    """
    compiled = torch.compile(model, **{"dynamic": True, **options})
    state = {"compiled": True}

    def call(batch: Any) -> Any:
        if state["compiled"]:
            try:
                return compiled(batch)
            except Exception as error:
                if not _is_compiler_error(error):
                    raise
                state["compiled"] = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    f"torch.compile cannot take {type(model).__name__} and it runs uncompiled: "
                    f"{reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return model(batch)

    return call


def _is_compiler_error(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))

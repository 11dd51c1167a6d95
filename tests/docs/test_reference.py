"""Every public name has its docstring.

That every public name has its entry in the reference needs no test: ``docs/conf.py``
makes the pages from ``__all__``.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

ROOMS = [
    "alchemi_xr",
    "alchemi_xr.errors",
    "alchemi_xr.units",
    "alchemi_xr.data",
    "alchemi_xr.data.datapipes",
    "alchemi_xr.store",
    "alchemi_xr.plan",
    "alchemi_xr.ragged",
    "alchemi_xr.analysis",
    "alchemi_xr.etl",
    "alchemi_xr.models",
    "alchemi_xr.dynamics",
    "alchemi_xr.dynamics.hooks",
    "alchemi_xr.dynamics.optimizers",
    "alchemi_xr.dynamics.integrators",
    "alchemi_xr.hooks",
    "alchemi_xr.campaign",
]


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_are_documented(room: str) -> None:
    module = importlib.import_module(room)
    undocumented = [
        name
        for name in module.__all__
        if (inspect.isclass(obj := getattr(module, name)) or inspect.isroutine(obj))
        and not inspect.getdoc(obj)
    ]
    assert not undocumented


def test_public_functions_name_their_parameters() -> None:
    """A public function's docstring names every parameter that it takes."""
    from alchemi_xr import convert, open_dataset

    for function in (convert, open_dataset):
        doc = inspect.getdoc(function)
        missing = [p for p in inspect.signature(function).parameters if p not in doc]
        assert not missing, f"{function.__name__}: {missing}"

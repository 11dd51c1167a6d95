"""Every public name has its docstring and its entry in the reference."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [
    "alchemi_xr",
    "alchemi_xr.errors",
    "alchemi_xr.units",
    "alchemi_xr.data",
    "alchemi_xr.data.datapipes",
    "alchemi_xr.store",
    "alchemi_xr.plan",
    "alchemi_xr.ragged",
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
    text = "\n".join(p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md"))
    undocumented, unlisted = [], []
    for name in module.__all__:
        obj = getattr(module, name)
        if (inspect.isclass(obj) or inspect.isroutine(obj)) and not inspect.getdoc(obj):
            undocumented.append(name)
        if f"`{name}`" not in text and f"{room}.{name}" not in text:
            unlisted.append(name)
    assert not undocumented, f"no docstring: {undocumented}"
    assert not unlisted, f"not in docs/reference: {unlisted}"


def test_public_functions_name_their_parameters() -> None:
    """A public function's docstring names every parameter that it takes."""
    from alchemi_xr import convert, open_dataset

    for function in (convert, open_dataset):
        doc = inspect.getdoc(function)
        missing = [p for p in inspect.signature(function).parameters if p not in doc]
        assert not missing, f"{function.__name__}: {missing}"

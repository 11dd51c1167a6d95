"""Sphinx configuration: Markdown pages, and a reference made from the public names."""

import enum
import importlib
import inspect
from pathlib import Path

from alchemi_xr import __version__

project = "alchemi_xr"
author = "the alchemi_xr developers"
copyright = "the alchemi_xr developers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_title = "alchemi_xr"
numpydoc_show_class_members = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
suppress_warnings = ["app.add_directive"]

# Rooms in the order in which data passes through them.
ROOMS = {
    "alchemi_xr": "The front door",
    "alchemi_xr.etl": "Files in, files out",
    "alchemi_xr.plan": "How much, where, in what order",
    "alchemi_xr.store": "What is on disk and when it is true",
    "alchemi_xr.ragged": "xarray, kept true",
    "alchemi_xr.analysis": "what people compute from structures and trajectories",
    "alchemi_xr.data": "What a sample is",
    "alchemi_xr.data.datapipes": "Storage to device",
    "alchemi_xr.models": "Energies and forces",
    "alchemi_xr.dynamics": "Optimisers, molecular dynamics, stages",
    "alchemi_xr.dynamics.optimizers": "Optimisers",
    "alchemi_xr.dynamics.integrators": "Integrators",
    "alchemi_xr.dynamics.hooks": "Hooks",
    "alchemi_xr.hooks": "Hooks, for every engine",
    "alchemi_xr.campaign": "Stage graphs over stores, on Dask workers",
    "alchemi_xr.testing.strategies": "Hypothesis strategies for tests",
    "alchemi_xr.units": "Units",
    "alchemi_xr.config": "Options",
    "alchemi_xr.registry": "Plug-ins",
    "alchemi_xr.errors": "Errors",
}


def _home(obj, rooms):
    """The room among ``rooms`` in whose code an object lies, else the first."""
    inside = [room for room in rooms if getattr(obj, "__module__", "").startswith(room + ".")]
    return max(inside or rooms[:1], key=len)


def _entry(room, name, homes):
    """One name of a room: where its home is another room, a pointer to it."""
    obj = getattr(importlib.import_module(room), name)
    if not (inspect.isclass(obj) or inspect.isroutine(obj)):
        kind = "a module" if inspect.ismodule(obj) else "a value"
        return f"``{name}``\n   {kind}\n"
    home = _home(obj, homes[id(obj)])
    if home != room:
        role = "class" if inspect.isclass(obj) else "func"
        return f"``{name}``\n   see :py:{role}:`{home}.{name}`\n"
    if inspect.isclass(obj):
        # Exceptions and enums say all in their own docstring.
        members = "" if issubclass(obj, (BaseException, enum.Enum)) else "   :members:\n"
        return f".. autoclass:: {room}.{name}\n{members}"
    return f".. autofunction:: {room}.{name}\n"


def _write_reference(app):
    """One page a room, from its ``__all__``: what is public cannot be missing here."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    index = ["# Reference", "", "```{toctree}", ":maxdepth: 1", ""]
    homes = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            homes.setdefault(id(getattr(module, name)), []).append(room)
    for room, title in ROOMS.items():
        names = sorted(importlib.import_module(room).__all__, key=str.lower)
        lines = [f"# `{room}`", "", f"{title}.", "", "```{eval-rst}"]
        lines += [_entry(room, name, homes) for name in names if not name.startswith("_")]
        text = "\n".join([*lines, "```", ""])
        page = folder / f"{room}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
        index.append(room)
    (folder / "index.md").write_text("\n".join([*index, "```", ""]))


def setup(app):
    app.connect("builder-inited", _write_reference)

"""The few loops that are written in C, each beside a NumPy version that does the same.

The extension modules are optional: where no compiler was found at installation
the NumPy versions serve, slower and equal. ``available()`` says which it is.
"""

from __future__ import annotations

__all__ = ["available"]


def available() -> dict[str, bool]:
    """Which extension modules were compiled at installation."""
    from importlib.util import find_spec

    return {name: find_spec(f"alchemi_xr.native._{name}") is not None for name in ("rows", "text")}

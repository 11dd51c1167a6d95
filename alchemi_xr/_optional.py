"""Import a package of an optional extra, or say which extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from alchemi_xr.errors import OptionalDependencyError

__all__ = ["import_optional"]


def import_optional(module: str, *, extra: str, why: str) -> ModuleType:
    """The module, imported.

    Parameters
    ----------
    module : str
        Dotted import name.
    extra : str
        The extra of ``alchemi_xr`` that brings it.
    why : str
        What needs it, for the message.

    Raises
    ------
    OptionalDependencyError
        It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionalDependencyError(
            why,
            f"the package {module.split('.')[0]!r} is not installed ({error})",
            mend=f"pip install 'alchemi_xr[{extra}]'",
        ) from error

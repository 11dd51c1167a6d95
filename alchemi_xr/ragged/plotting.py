"""``ds.ragged.plot``: figures of analyses by name.

The figures live in `alchemi_xr.analysis`, above this room; it is found by name
when a plot is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

import xarray as xr

__all__ = ["RaggedPlot"]


class RaggedPlot:
    """Draws: ``ds.ragged.plot.rdf(rmax=6.0)``, ``.msd()``, ``.sizes()``, ``.forces()`` ...

    Each takes the arguments of the function of `alchemi_xr.analysis` of its name,
    besides ``ax=``, and gives the matplotlib Axes.
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.__dir__():
            raise AttributeError(f"ds.ragged.plot has no {name!r}; it has {self.__dir__()}")
        module = _figures()

        def plot(*, ax: Any = None, **options: Any) -> Any:
            return module.run(self._ds, name, ax=ax, **options)

        plot.__name__ = name
        return plot

    def __call__(self, name: str, **options: Any) -> Any:
        return _figures().run(self._ds, name, **options)

    def __dir__(self) -> list[str]:
        module = _figures()
        return sorted({*module.PLOTS, *module.DISTRIBUTIONS} - {"diffusion"})


def _figures() -> Any:
    return importlib.import_module("alchemi_xr.analysis.plot")

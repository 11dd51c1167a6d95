"""What people compute from stores of structures and trajectories.

Each function takes a ragged Dataset and works block by block, so a store of
any size is analysed in bounded memory; on Dask the result is lazy where its
size allows. Results are Datasets with units; `alchemi_xr.analysis.plot` draws
each.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "angles": "alchemi_xr.analysis.geometry",
    "baseline": "alchemi_xr.analysis.element_energies",
    "bond_lengths": "alchemi_xr.analysis.geometry",
    "composition": "alchemi_xr.analysis.stats",
    "coordination": "alchemi_xr.analysis.geometry",
    "diffusion": "alchemi_xr.analysis.displacement",
    "duplicates": "alchemi_xr.analysis.repeats",
    "energy_drift": "alchemi_xr.analysis.thermo",
    "fmax": "alchemi_xr.analysis.largest_force",
    "fingerprints": "alchemi_xr.analysis.repeats",
    "msd": "alchemi_xr.analysis.displacement",
    "outliers": "alchemi_xr.analysis.element_energies",
    "pressure": "alchemi_xr.analysis.thermo",
    "rdf": "alchemi_xr.analysis.radial",
    "rmsd": "alchemi_xr.analysis.superposition",
    "rmsf": "alchemi_xr.analysis.superposition",
    "statistics": "alchemi_xr.analysis.stats",
    "temperature": "alchemi_xr.analysis.thermo",
    "vacf": "alchemi_xr.analysis.vibration",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})

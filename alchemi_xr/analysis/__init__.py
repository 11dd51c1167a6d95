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
    "baseline": "alchemi_xr.analysis.baseline",
    "bond_lengths": "alchemi_xr.analysis.geometry",
    "composition": "alchemi_xr.analysis.stats",
    "coordination": "alchemi_xr.analysis.geometry",
    "diffusion": "alchemi_xr.analysis.msd",
    "duplicates": "alchemi_xr.analysis.duplicates",
    "energy_drift": "alchemi_xr.analysis.thermo",
    "fmax": "alchemi_xr.analysis.fmax",
    "fingerprints": "alchemi_xr.analysis.duplicates",
    "msd": "alchemi_xr.analysis.msd",
    "outliers": "alchemi_xr.analysis.baseline",
    "pressure": "alchemi_xr.analysis.thermo",
    "rdf": "alchemi_xr.analysis.rdf",
    "rmsd": "alchemi_xr.analysis.rmsd",
    "rmsf": "alchemi_xr.analysis.rmsd",
    "statistics": "alchemi_xr.analysis.stats",
    "temperature": "alchemi_xr.analysis.thermo",
    "vacf": "alchemi_xr.analysis.vacf",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        module = importlib.import_module(_NAMES[name])
        # A submodule of the same name (``rdf``) was set by its import; the function wins.
        for known, home in _NAMES.items():
            if home == module.__name__:
                globals()[known] = getattr(module, known)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})

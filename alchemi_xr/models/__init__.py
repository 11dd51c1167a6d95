"""Models: from a batch to energies, forces and stresses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.models.ase import ASECalculatorModel as ASECalculatorModel
    from alchemi_xr.models.base import AdditiveModel as AdditiveModel
    from alchemi_xr.models.base import BaseModelMixin as BaseModelMixin
    from alchemi_xr.models.base import ModelConfig as ModelConfig
    from alchemi_xr.models.base import NeighborConfig as NeighborConfig
    from alchemi_xr.models.base import NeighborListFormat as NeighborListFormat
    from alchemi_xr.models.demo import DemoModel as DemoModel
    from alchemi_xr.models.demo import DemoModelWrapper as DemoModelWrapper
    from alchemi_xr.models.lj import LennardJonesModel as LennardJonesModel
    from alchemi_xr.models.lj import LennardJonesModelWrapper as LennardJonesModelWrapper

_HOME = {
    "ASECalculatorModel": "ase",
    "AdditiveModel": "base",
    "BaseModelMixin": "base",
    "DemoModel": "demo",
    "DemoModelWrapper": "demo",
    "LennardJonesModel": "lj",
    "LennardJonesModelWrapper": "lj",
    "ModelConfig": "base",
    "NeighborConfig": "base",
    "NeighborListFormat": "base",
}

__all__ = [
    "ASECalculatorModel",
    "AdditiveModel",
    "BaseModelMixin",
    "DemoModel",
    "DemoModelWrapper",
    "LennardJonesModel",
    "LennardJonesModelWrapper",
    "ModelConfig",
    "NeighborConfig",
    "NeighborListFormat",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

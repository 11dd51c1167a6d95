"""Lengths, element symbols and masses: what several analyses need."""

from __future__ import annotations

import math
import numbers

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError

__all__ = ["check_length", "masses_of", "symbols"]


def check_length(value: float, where: str, what: str) -> float:
    """A length > 0, or an error that names it."""
    if not (isinstance(value, numbers.Real) and math.isfinite(value) and value > 0):
        raise ConfigError(where, f"{what} is no length", found=value, expected="a number > 0, in Å")
    return float(value)


def symbols() -> list[str]:
    """Element symbols by atomic number; 0 is ``X``."""
    from ase.data import chemical_symbols

    return list(chemical_symbols)


def masses_of(block: Block) -> NDArray:
    """Mass of each atom, amu: the field, or the standard ones."""
    if "atomic_masses" in block and "atomic_masses" not in block.present:
        return block["atomic_masses"].astype(np.float64)
    from ase.data import atomic_masses

    return np.asarray(atomic_masses)[block["atomic_numbers"]]

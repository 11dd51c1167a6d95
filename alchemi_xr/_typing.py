"""Names for the few types that cross the doors of every room."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BoolArray", "IntArray", "Level", "NDArray", "PathLike", "Ptr"]

Level: TypeAlias = Literal["atom", "edge", "system"]
PathLike: TypeAlias = str | os.PathLike[str]
NDArray: TypeAlias = npt.NDArray[Any]
Ptr: TypeAlias = npt.NDArray[np.int64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

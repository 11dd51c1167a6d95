"""Values of one sample's fields become tensors of the right shape and dtype.

What a user may write (a number, a list, an array, a ``[3, 3]`` cell) and what
the field table asks for meet here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.data.level import from_numpy
from alchemi_xr.errors import FieldError

__all__ = ["CLASS_OF", "SPECS", "as_tensor", "check_finite", "coerce_field", "tail_fits"]

# (level, tail, rank, kind) of every field of the table: reading a dataclass costs more.
SPECS: dict[str, tuple[Level, tuple[int | str, ...], int, str]] = {
    spec.name: (spec.level, spec.tail, len(spec.tail) + 1, spec.kind) for spec in FIELDS.values()
}
CLASS_OF = {torch.bool: "b"} | dict.fromkeys(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64), "f"
)


def as_tensor(name: str, value: Any, *, kind: str, dtype: torch.dtype | None) -> Tensor:
    """A tensor of any array-like; Python floats take the dtype of the positions."""
    try:
        if isinstance(value, np.ndarray):
            return from_numpy(value)
        if name == "atom_categories" and isinstance(value, (list, tuple)):
            value = [int(item.value if isinstance(item, enum.Enum) else item) for item in value]
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            return torch.stack(list(value))
        if isinstance(value, np.generic):
            return torch.tensor(value)
        if isinstance(value, float) or kind == "f":
            # Python numbers are double; only the energy keeps that, the others follow positions.
            array = torch.tensor(value, dtype=torch.float64)
            return array if name == "energy" or dtype is None else array.to(dtype)
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FieldError(
            "AtomicData", f"field {name!r} is no array ({error})", found=type(value).__name__
        ) from None


def coerce_field(name: str, value: Any, *, dtype: torch.dtype | None = None) -> Tensor:
    """One sample's value of a field as a tensor with its level axis in front.

    System fields of the table get their leading 1 (a number becomes ``[1, 1]``
    for energy, ``[3, 3]`` becomes ``[1, 3, 3]`` for cell); all else keeps its
    shape.
    """
    spec = SPECS.get(name)
    kind = spec[3] if spec else ""
    tensor = value if isinstance(value, Tensor) else as_tensor(name, value, kind=kind, dtype=dtype)
    if spec is None:
        return tensor
    level, tail, rank, _ = spec
    if level == "system":
        if name == "pbc" and tensor.ndim == 0:
            tensor = tensor.expand(3).clone()
        if tensor.ndim == rank - 1 and tail_fits(tensor.shape, tail):
            tensor = tensor.unsqueeze(0)
        elif tail == (1,) and tensor.numel() == 1:
            tensor = tensor.reshape(1, 1)
        elif name == "cell" and tensor.shape in ((3,), (1, 3)):
            tensor = torch.diag(tensor.reshape(3)).unsqueeze(0)
        elif len(tail) == 2 and tensor.shape in ((9,), (1, 9)):
            tensor = tensor.reshape(1, 3, 3)
    if kind == "b" and tensor.dtype != torch.bool:
        if tensor.dtype not in CLASS_OF or bool(((tensor == 0) | (tensor == 1)).all()):
            tensor = tensor != 0
    elif kind == "iu" and tensor.numel() == 0 and CLASS_OF.get(tensor.dtype) == "f":
        tensor = tensor.long()  # torch.tensor([]) is float32
    return tensor


def tail_fits(shape: Sequence[int], tail: tuple[int | str, ...]) -> bool:
    """Whether a row shape is that of the table, where a letter stands for any length."""
    return len(shape) == len(tail) and all(
        isinstance(want, str) or want == got for want, got in zip(tail, shape, strict=True)
    )


def check_finite(positions: Tensor) -> None:
    """Raise when a position is NaN or infinite.

    Raises
    ------
    FieldError
    """
    if positions.device.type == "meta":
        return
    # A sum is finite only if every term is; the exact look is taken only when it is not.
    if math.isfinite(positions.detach().sum().item()):
        return
    bad = ~torch.isfinite(positions.detach()).all(dim=-1)
    rows = torch.nonzero(bad)
    if len(rows):
        raise FieldError(
            "AtomicData",
            f"positions of atom {int(rows[0])} are not finite ({len(rows)} such atoms)",
            found=positions[int(rows[0])].tolist(),
            mend="correct the structure, or pass validate=False to keep it as it is",
        )

"""The rows of one level of a Batch: pointers, fills and defaults, in torch.

``LevelRows`` keeps a pointer on the host (sizes and choices are made there,
without waiting for a device) and its device copies, made when asked for. What
fields mean is left to ``fields``, what a sample is to ``batch``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import NDArray, Ptr
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import FieldError

__all__ = [
    "DEFAULT_FIELDS",
    "PLAIN_DTYPES",
    "LevelRows",
    "default_rows",
    "fill_rows",
    "fill_value",
    "from_numpy",
    "own_storage",
    "to_numpy",
]

DEFAULT_FIELDS = ("atomic_masses", "atom_categories", "velocities")
"""Atom fields that every sample has: where not given, they are made on access."""


class LevelRows:
    """Which rows of a level belong to which sample.

    Parameters
    ----------
    ptr : int64 array or tensor, [B + 1]
        An array is on the host; a tensor is copied there only when needed.
    capacity : int
        Rows of the tensors at this level; may exceed ``ptr[-1]`` in buffers.
    device : torch.device
    """

    __slots__ = ("_device_copies", "_host", "capacity", "device")

    def __init__(self, ptr: Ptr | Tensor, capacity: int, device: torch.device) -> None:
        self._device_copies: dict[str, Tensor] = {}
        self._host: Ptr | None = None
        if isinstance(ptr, Tensor):
            self._device_copies["ptr"] = ptr.to(device=device, dtype=torch.int64)
        else:
            self._host = np.asarray(ptr, dtype=np.int64)
        self.capacity = int(capacity)
        self.device = device

    @classmethod
    def from_counts(cls, counts: Any, device: torch.device) -> LevelRows:
        """Rows without spare capacity, from the number of rows of each sample."""
        ptr = counts_to_ptr(np.asarray(counts, dtype=np.int64))
        return cls(ptr, int(ptr[-1]), device)

    @property
    def host(self) -> Ptr:
        """The pointer as a NumPy array."""
        if self._host is None:
            self._host = self._device_copies["ptr"].cpu().numpy()
        return self._host

    @property
    def used(self) -> int:
        """Rows that belong to a sample."""
        return int(self.host[-1])

    @property
    def counts(self) -> NDArray:
        """Rows of each sample, int64 [B], on the host."""
        return np.diff(self.host)

    def _copy(self, name: str, make: Any) -> Tensor:
        found = self._device_copies.get(name)
        if found is None:
            found = self._device_copies[name] = make()
        return found

    @property
    def ptr(self) -> Tensor:
        """int64 [B + 1] on the device."""
        return self._copy("ptr", lambda: torch.tensor(self.host, device=self.device))

    @property
    def ptr32(self) -> Tensor:
        """int32 [B + 1] on the device."""
        return self._copy("ptr32", lambda: self.ptr.to(torch.int32))

    @property
    def index32(self) -> Tensor:
        """Sample of every used row, int32, on the device."""

        def make() -> Tensor:
            samples = torch.arange(len(self.host) - 1, dtype=torch.int32, device=self.device)
            return torch.repeat_interleave(samples, self.counts_device, output_size=self.used)

        return self._copy("index32", make)

    @property
    def counts_device(self) -> Tensor:
        """Rows of each sample, int64 [B], on the device."""
        return self._copy("counts", lambda: self.ptr.diff())

    def tensors(self) -> list[Tensor]:
        """Copies on the device that were made so far."""
        return list(self._device_copies.values())

    def moved(self, device: torch.device) -> LevelRows:
        """The same rows for tensors on another device."""
        return LevelRows(self.host, self.capacity, device)

    def __getstate__(self) -> tuple[Ptr, int, str]:
        return (self.host, self.capacity, str(self.device))

    def __setstate__(self, state: tuple[Ptr, int, str]) -> None:
        host, capacity, device = state
        self.__init__(host, capacity, torch.device(device))  # type: ignore[misc]


def fill_value(dtype: torch.dtype) -> float | int | bool:
    """What stands in rows without data: NaN, 0 or False (as ``fields.fill_for``)."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else 0


def fill_rows(rows: int, tail: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    """A tensor of fill rows, [rows, *tail]."""
    return torch.full((rows, *tail), fill_value(dtype), dtype=dtype, device=device)


_masses: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _mass_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    table = _masses.get((dtype, device))
    if table is None:
        from ase.data import atomic_masses

        table = torch.tensor(atomic_masses, dtype=dtype, device=device)
        _masses[(dtype, device)] = table
    return table


def default_rows(name: str, numbers: Tensor, positions: Tensor) -> Tensor:
    """Values of a field of ``DEFAULT_FIELDS`` for atoms that were given none.

    Parameters
    ----------
    name : str
    numbers : integer tensor, [V]
    positions : float tensor, [V, 3]
        Gives dtype and device.

    Returns
    -------
    tensor
        Masses of the elements (amu), velocities of zero, category 0.

    Raises
    ------
    FieldError
        An atomic number has no element.
    """
    if name == "velocities":
        return torch.zeros_like(positions, requires_grad=False)
    if name == "atom_categories":
        return torch.zeros(len(numbers), dtype=torch.int64, device=positions.device)
    table = _mass_table(positions.dtype, positions.device)
    try:
        return table[numbers.long()]
    except IndexError:
        raise FieldError(
            "atomic_masses",
            "an atomic number has no mass in the element table",
            found=int(numbers.max()),
            expected=f"0 to {len(table) - 1}",
            mend="give atomic_masses",
        ) from None


# torch has these dtypes but few operations for them; the next wider signed one holds every value
# that is met in practice (uint64 beyond 2**63 does not occur as an index or number of atoms).
_WIDEN = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


# What torch takes as it is.
PLAIN_DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


def from_numpy(values: NDArray) -> Tensor:
    """A tensor over the same memory where torch allows it, else over a copy.

    Read-only arrays (memory maps) are copied: a Batch is changed in place.
    """
    flags = values.flags
    if values.dtype in PLAIN_DTYPES and flags.c_contiguous and flags.writeable:
        return torch.from_numpy(values)
    if values.dtype.name in _WIDEN:
        values = values.astype(_WIDEN[values.dtype.name])
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    # Negative strides are not for torch either.
    if not values.flags.writeable or any(s < 0 for s in values.strides):
        values = values.copy()
    return torch.from_numpy(values)


def to_numpy(values: Tensor) -> NDArray:
    """The tensor as an array, over the same memory on CPU (bfloat16 becomes float32)."""
    values = values.detach()
    if values.dtype == torch.bfloat16:
        values = values.float()
    out: NDArray = values.cpu().numpy()
    return out


def own_storage(values: Tensor) -> Tensor:
    """The tensor, or a copy when it is a window of a larger one.

    Pickling a window writes the whole storage behind it.
    """
    storage = values.untyped_storage()
    if storage.nbytes() != values.numel() * values.element_size():
        return values.detach().clone() if not values.requires_grad else values.clone()
    return values

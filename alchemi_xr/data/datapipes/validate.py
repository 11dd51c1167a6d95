"""Checks of a whole Batch at once, and the one dtype rule of ``AtomicData``.

What ``AtomicData`` checks for one sample is checked here with a few array
operations for all, so that a validated batch costs hardly more than a trusted
one and says which sample is wrong.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from alchemi_xr.data.atomic_data import AtomicData
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.errors import FieldError

__all__ = ["cast_floats", "match_dtypes", "validate_batch"]


def validate_batch(batch: Batch, indices: Sequence[int], *, where: str) -> Batch:
    """The batch itself, checked.

    Parameters
    ----------
    batch : Batch
    indices : sequence of int, [B]
        Names of its systems in messages.
    where : str

    Raises
    ------
    FieldError
        Positions or numbers are missing or no numbers; an edge leaves its sample.
    """
    for name in ("positions", "atomic_numbers"):
        if name not in batch:
            raise FieldError(
                where,
                f"the samples have no field {name!r}",
                mend="read it too, or skip_validation=True for batches without structures",
            )
        present = batch.present.get(name)
        if present is not None and not bool(present.all()):
            system = int((~present).nonzero()[0, 0])
            raise FieldError(where, f"sample {indices[system]} has no field {name!r}")
    positions = batch["positions"]
    # A sum is finite only if every term is; rows are looked at only when it is not.
    suspect = not math.isfinite(positions.sum().item())
    finite = torch.isfinite(positions).all(dim=-1) if suspect else None
    if finite is not None and not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        system = int(batch.batch_idx[row])
        raise FieldError(
            where,
            f"sample {indices[system]}, field 'positions', row {row - int(batch.atoms_ptr[system])}"
            " is not finite",
            found=positions[row].tolist(),
            mend="correct or delete the sample, or read with skip_validation=True",
        )
    numbers = batch["atomic_numbers"]
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise FieldError(
            where, "atomic_numbers are no whole numbers", found=numbers.dtype, expected="int64"
        )
    if "neighbor_list" in batch and batch.num_edges:
        pairs = batch["neighbor_list"]
        counts = batch.edges_ptr.diff()
        first = torch.repeat_interleave(batch.atoms_ptr[:-1], counts)[:, None]
        last = torch.repeat_interleave(batch.atoms_ptr[1:], counts)[:, None]
        wrong = ((pairs < first) | (pairs >= last)).any(dim=-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            system = int(torch.searchsorted(batch.edges_ptr, row, right=True)) - 1
            raise FieldError(
                where,
                f"neighbor_list of sample {indices[system]} names an atom it does not have",
                found=(pairs[row] - first[row]).tolist(),
                expected=f"0 to {int(last[row] - first[row]) - 1}",
            )
    return batch


def match_dtypes(batch: Batch, warned: set[tuple[str, torch.dtype]], *, where: str) -> Batch:
    """The batch itself, its float fields in the dtype of the positions.

    The rule of ``AtomicData``; energy keeps its dtype, and so do fields outside
    the table. Warns once for each field and dtype in ``warned``.
    """
    dtype = batch["positions"].dtype
    for name, value in list(batch):
        spec = FIELDS.get(name)
        if spec is None or spec.kind != "f" or name in AtomicData.precision_preserving_keys:
            continue
        if value.dtype == dtype:
            continue
        if (name, value.dtype) not in warned:
            warned.add((name, value.dtype))
            warnings.warn(
                f"{where}: field {name!r} is cast from {value.dtype} to {dtype}, the dtype of"
                " positions; skip_validation=True keeps it",
                UserWarning,
                stacklevel=2,
            )
        batch.set(name, value.to(dtype), present=batch.present.get(name))
    return batch


def cast_floats(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch itself, all its fields of floating-point numbers in one dtype."""
    for name, value in list(batch):
        if value.is_floating_point() and value.dtype != dtype:
            batch.set(name, value.to(dtype), present=batch.present.get(name))
    return batch

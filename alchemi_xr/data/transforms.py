"""Functions of samples or of batches, one after the other.

A sample transform takes ``(AtomicData, metadata)`` and gives both back; a batch
transform takes and gives a ``Batch``. Which one it is, the annotation of the
first parameter says.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alchemi_xr.data.atomic_data import AtomicData
from alchemi_xr.data.batch import Batch
from alchemi_xr.errors import ArgumentTypeError, FieldError, TransformError

__all__ = ["Compose", "make_supercell"]


def _kind_of(transform: Callable[..., Any], position: int) -> str | None:
    """``"sample"``, ``"batch"`` or None when it does not say."""
    where = f"Compose: transform[{position}]"
    if not callable(transform):
        raise ArgumentTypeError(where, "is not callable", found=type(transform).__name__)
    if isinstance(transform, Compose):
        return transform.kind
    function = transform if inspect.isroutine(transform) else type(transform).__call__
    if inspect.isclass(transform):
        return None
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    if not parameters:
        raise ArgumentTypeError(where, "takes no argument", expected="a sample or a batch")
    first = parameters[0]
    try:
        found = typing.get_type_hints(function).get(first.name, first.annotation)
    except Exception:  # an annotation that cannot be resolved is read as text
        found = first.annotation
    if found is inspect.Parameter.empty or found is Any:
        return None
    text = found if isinstance(found, str) else getattr(found, "__name__", str(found))
    text = text.strip("'\"").rpartition(".")[2]
    if text == "AtomicData":
        return "sample"
    if text == "Batch":
        return "batch"
    raise ArgumentTypeError(
        where,
        f"the annotation of its first parameter {first.name!r} is neither AtomicData nor Batch",
        found=text,
    )


class Compose:
    """Transforms from left to right as one.

    Parameters
    ----------
    transforms : sequence of callable
        All of one kind. A transform without annotations takes the kind of the
        others, else it is one of samples.

    Raises
    ------
    ArgumentTypeError
        No sequence, not callable, another annotation, or mixed kinds.

    Examples
    --------
    >>> def double(batch: Batch) -> Batch:
    ...     batch.positions = 2 * batch.positions
    ...     return batch
    >>> Compose([double]).kind
    'batch'
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        if isinstance(transforms, str) or not isinstance(transforms, Sequence):
            raise ArgumentTypeError(
                "Compose", "transforms is not a sequence", found=type(transforms).__name__
            )
        self.transforms = list(transforms)
        kinds = [_kind_of(transform, i) for i, transform in enumerate(self.transforms)]
        known = {kind for kind in kinds if kind is not None}
        if len(known) > 1:
            raise ArgumentTypeError(
                "Compose",
                "sample and batch transforms are mixed",
                found=kinds,
                mend="compose each kind by itself",
            )
        self.kind: str = known.pop() if known else "sample"

    def __call__(self, *arguments: Any) -> Any:
        """The transformed ``(data, metadata)``, or the transformed batch.

        Raises
        ------
        TransformError
            A transform raised (its error is the cause) or gave nothing back.
        """
        value: tuple[Any, ...] = arguments
        for position, transform in enumerate(self.transforms):
            name = getattr(transform, "__name__", type(transform).__name__)
            where = f"Compose: transform[{position}] {name}"
            try:
                result = transform(*value)
            except Exception as error:
                raise TransformError(
                    f"{where} raised {type(error).__name__}", str(error) or "no message"
                ) from error
            value = self._checked(result, where)
        return value if self.kind == "sample" else value[0]

    def _checked(self, result: Any, where: str) -> tuple[Any, ...]:
        if self.kind == "batch":
            if not isinstance(result, Batch):
                raise TransformError(where, "must return a Batch", found=type(result).__name__)
            return (result,)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TransformError(
                where, "must return (AtomicData, metadata)", found=type(result).__name__
            )
        return result

    def __len__(self) -> int:
        return len(self.transforms)

    def __repr__(self) -> str:
        names = [getattr(t, "__name__", type(t).__name__) for t in self.transforms]
        return f"Compose([{', '.join(names)}], kind={self.kind!r})"


def make_supercell(data: AtomicData, repeats: int | Sequence[int]) -> AtomicData:
    """The crystal repeated along its lattice vectors.

    Atom fields are repeated; energy, charge and virial grow with the number of
    cells; other system fields are kept. Edge and neighbour fields and the
    dipole are left out: they are no longer right.

    Parameters
    ----------
    data : AtomicData
        With a cell.
    repeats : int or 3 ints
        Along each lattice vector, at least 1.

    Raises
    ------
    FieldError
        No cell, or a number of repeats below 1.

    Examples
    --------
    >>> one = AtomicData(
    ...     atomic_numbers=torch.tensor([29]),
    ...     positions=torch.zeros(1, 3),
    ...     cell=torch.eye(3),
    ...     pbc=True,
    ...     energy=-3.5,
    ... )
    >>> make_supercell(one, 2).num_nodes, make_supercell(one, 2).energy.item()
    (8, -28.0)
    """
    counts = [repeats] * 3 if isinstance(repeats, int) else [int(n) for n in repeats]
    if len(counts) != 3 or min(counts) < 1:
        raise FieldError("make_supercell", "wrong repeats", found=counts, expected="3 ints >= 1")
    if data.cell is None:
        raise FieldError("make_supercell", "field 'cell' is missing")
    cell = data.cell[0]
    number = counts[0] * counts[1] * counts[2]
    grid = torch.cartesian_prod(*[torch.arange(n, device=data.device) for n in counts])
    shifts = grid.reshape(-1, 3).to(data.dtype) @ cell.to(data.dtype)
    values: dict[str, Any] = {}
    for name, tensor in data:
        level = data.level_of(name)
        if name in ("neighbor_matrix", "neighbor_matrix_shifts", "num_neighbors"):
            continue
        if level == "atom":
            values[name] = tensor.repeat(number, *[1] * (tensor.ndim - 1))
        elif level == "system" and name in ("energy", "charge", "virial"):
            values[name] = tensor * number
        elif level == "system" and name != "dipole":
            values[name] = tensor.clone()
    values["positions"] = values["positions"] + shifts.repeat_interleave(data.num_nodes, dim=0)
    values["cell"] = data.cell * torch.tensor(counts, device=data.device)[None, :, None]
    made = AtomicData._trusted(values, dict(data._levels), dict(data._units))
    made.info.update(data.info)
    return made

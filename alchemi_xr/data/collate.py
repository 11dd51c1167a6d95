"""Many samples side by side become one set of flat tensors.

The union of fields is taken; where a sample lacks one, its rows are fill and a
presence mask says so. Masses, categories and velocities have no holes: they
are made, as ``AtomicData`` itself would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import Level
from alchemi_xr.data.coerce import coerce_field
from alchemi_xr.data.fields import ALIASES, FIELDS, canonical_level
from alchemi_xr.data.level import DEFAULT_FIELDS, LevelRows, default_rows, fill_rows
from alchemi_xr.errors import FieldError

__all__ = ["Flat", "as_levels", "collate", "offset_edges", "raw_samples"]

_TABLE: dict[str, Level] = {spec.name: spec.level for spec in FIELDS.values()}


@dataclass(slots=True)
class Flat:
    """What a Batch is made of."""

    fields: dict[str, Tensor]
    levels: dict[str, Level]
    present: dict[str, Tensor]
    atoms: LevelRows
    edges: LevelRows
    num_systems: int
    device: torch.device
    units: dict[str, str] = field(default_factory=dict)


def as_levels(*maps: Mapping[str, Any] | None) -> dict[str, Level]:
    """Field name to level, from name-to-level and level-to-names mappings alike."""
    levels: dict[str, Level] = {}
    for mapping in maps:
        for key, value in (mapping or {}).items():
            if isinstance(value, str):
                levels[ALIASES.get(key, key)] = canonical_level(value, where=f"field {key!r}")
            else:
                level = canonical_level(key)
                levels.update({ALIASES.get(name, name): level for name in value})
    return levels


def raw_samples(
    data_list: Iterable[Mapping[str, Any]], levels: dict[str, Level], *, where: str
) -> list[dict[str, Tensor]]:
    """Plain mappings as tensors with their level axis; text and None are left out.

    Names that neither the table nor ``levels`` knows are system fields, and
    are added to ``levels``.

    Raises
    ------
    FieldError
        The list is empty, or a sample lacks positions or atomic numbers.
    """
    samples: list[dict[str, Tensor]] = []
    for i, raw in enumerate(data_list):
        sample: dict[str, Tensor] = {}
        for key, value in raw.items():
            if value is None or isinstance(value, (str, bytes, dict)):
                continue
            name = ALIASES.get(key, key)
            tensor = coerce_field(name, value)
            if name not in FIELDS and levels.setdefault(name, "system") == "system":
                tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
                tensor = tensor if len(tensor) == 1 else tensor.unsqueeze(0)
            sample[name] = tensor
        for required in ("positions", "atomic_numbers"):
            if required not in sample:
                raise FieldError(where, f"sample {i} has no {required!r}")
        samples.append(sample)
    if not samples:
        raise FieldError(where, "Cannot create batch from empty data list")
    return samples


def offset_edges(pairs: Tensor, atoms: LevelRows, edges: LevelRows, *, sign: int = 1) -> Tensor:
    """Edges of all samples with the first atom of their sample added (or taken off).

    Whole numbers narrower than int32 are widened, as batch-global ones may not fit.
    """
    if pairs.element_size() < 4:
        pairs = pairs.to(torch.int32)
    if len(atoms.host) <= 2 or pairs.shape[0] == 0:
        return pairs.clone()
    starts = atoms.ptr[:-1].to(pairs.dtype) * sign
    if pairs.device.type == "cpu":
        shift = torch.from_numpy(np.repeat(starts.numpy(), edges.counts))
    else:
        shift = torch.repeat_interleave(starts, edges.counts_device, output_size=len(pairs))
    return pairs + shift[:, None]


def _edge_count(values: Mapping[str, Tensor], levels: Mapping[str, Level]) -> int:
    pairs = values.get("neighbor_list")
    if pairs is not None:
        return len(pairs)
    for name, tensor in values.items():
        if (_TABLE.get(name) or levels.get(name)) == "edge":
            return len(tensor)
    return 0


def collate(
    samples: Sequence[Mapping[str, Tensor]],
    levels: Mapping[str, Level],
    *,
    exclude: Iterable[str] = (),
    device: torch.device | str | None = None,
    units: Mapping[str, str] | None = None,
    where: str = "Batch",
) -> Flat:
    """Flat tensors of many samples.

    Parameters
    ----------
    samples : sequence of dict of str to tensor
        Each with its level axis in front; edges local to the sample.
    levels : dict of str to level
        For names outside the field table.
    exclude : iterable of str
        Fields to leave out.
    device : optional
        Where the result goes; by default where the first sample is.
    """
    first = samples[0]
    keys = first.keys()
    # The same object of keys view compares fast; a mixed list takes the slower way below.
    same = all(sample.keys() == keys for sample in samples)
    names = list(keys) if same else list(dict.fromkeys(n for s in samples for n in s))
    dropped = {ALIASES.get(name, name) for name in exclude}
    names = [name for name in names if name not in dropped]
    num_atoms = [len(sample["positions"]) for sample in samples]
    known = {name: _TABLE.get(name) or levels[name] for name in names}
    if "edge" in known.values():
        num_edges = [_edge_count(sample, levels) for sample in samples]
    else:
        num_edges = [0] * len(samples)
    home = first["positions"].device
    atoms, edges = LevelRows.from_counts(num_atoms, home), LevelRows.from_counts(num_edges, home)
    rows = {"atom": num_atoms, "edge": num_edges, "system": None}
    fields: dict[str, Tensor] = {}
    present: dict[str, Tensor] = {}
    for name in names:
        parts: list[Any] = [sample.get(name) for sample in samples]
        if not same and any(part is None for part in parts):
            parts, mask = _filled(name, parts, samples, rows[known[name]])
            if mask is not None:
                present[name] = torch.tensor(mask, device=home)
        fields[name] = _cat(name, parts, where)
    if "neighbor_list" in fields:
        fields["neighbor_list"] = offset_edges(fields["neighbor_list"], atoms, edges)
    flat = Flat(fields, known, present, atoms, edges, len(samples), home, dict(units or {}))
    target = home if device is None else torch.device(device)
    if target.type != home.type or (target.index is not None and target != home):
        flat.fields = {k: v.to(target) for k, v in fields.items()}
        flat.present = {k: v.to(target) for k, v in present.items()}
        flat.device = next(iter(flat.fields.values())).device
        flat.atoms, flat.edges = atoms.moved(flat.device), edges.moved(flat.device)
    return flat


def _filled(
    name: str,
    parts: list[Tensor | None],
    samples: Sequence[Mapping[str, Tensor]],
    rows: Sequence[int] | None,
) -> tuple[list[Tensor], list[bool] | None]:
    """Every part, with defaults or fill for those that lack the field, and the presence."""
    if name in DEFAULT_FIELDS:
        return [
            part
            if part is not None
            else default_rows(name, sample["atomic_numbers"], sample["positions"])
            for part, sample in zip(parts, samples, strict=True)
        ], None
    model = next(part for part in parts if part is not None)
    tail = tuple(model.shape[1:])
    counts = rows if rows is not None else [1] * len(parts)
    filled = [
        part if part is not None else fill_rows(count, tail, model.dtype, model.device)
        for part, count in zip(parts, counts, strict=True)
    ]
    return filled, [part is not None for part in parts]


def _cat(name: str, parts: list[Tensor], where: str) -> Tensor:
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        tails = {tuple(part.shape[1:]): i for i, part in reversed(list(enumerate(parts)))}
        if len(tails) > 1:
            (tail, i), (other, j) = sorted(tails.items(), key=lambda item: item[1])[:2]
            raise FieldError(
                where,
                f"rows of field {name!r} have other shapes in samples {i} and {j}",
                found=list(other),
                expected=list(tail),
            ) from None
        devices = {str(part.device) for part in parts}
        if len(devices) > 1:
            raise FieldError(
                where, f"field {name!r} is on several devices", found=sorted(devices)
            ) from None
        raise FieldError(where, f"field {name!r} cannot be joined ({error})") from error

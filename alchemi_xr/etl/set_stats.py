"""What a set of structures is like, in one pass over a store or over files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray, PathLike
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import expand_mask
from alchemi_xr.errors import ConfigError, NotAStoreError, StoreNotFoundError
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.etl.predicate import DERIVED, Predicate
from alchemi_xr.plan.progress import Progress, open_progress

__all__ = ["FieldStats", "Moments", "SetStats", "stats"]

_LARGEST = 100_000
_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass
class Moments:
    """Mean, spread and extremes of numbers that come in blocks; NaN and infinities are counted.

    Parameters
    ----------
    count : int
        Finite numbers.
    mean, std : float
        Of these; the standard deviation of the population.
    minimum, maximum : float
    nan, inf : int
    """

    count: int = 0
    mean: float = math.nan
    std: float = math.nan
    minimum: float = math.nan
    maximum: float = math.nan
    nan: int = 0
    inf: int = 0

    def add(self, values: NDArray) -> None:
        """Take in more numbers (pairwise update: T. F. Chan et al., Am. Stat. 37, 242 (1983))."""
        flat = values.reshape(-1)
        if flat.dtype.kind == "f":
            finite = np.isfinite(flat)
            if not finite.all():
                self.nan += int(np.isnan(flat).sum())
                self.inf += int(np.isinf(flat).sum())
                flat = flat[finite]
        if flat.size == 0:
            return
        flat = flat.astype(np.float64)
        low, high = float(flat.min()), float(flat.max())
        # About one of the numbers: squares of large ones lose what differs in them.
        shifted = flat - low
        mean = low + float(shifted.mean())
        squares = float(((flat - mean) ** 2).sum())
        n = flat.size
        if self.count == 0:
            self.count, self.mean, self.std = n, mean, math.sqrt(squares / n)
            self.minimum, self.maximum = low, high
            return
        total = self.count + n
        delta = mean - self.mean
        squares += self.count * self.std**2 + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count, self.std = total, math.sqrt(squares / total)
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)


@dataclass
class FieldStats:
    """A field.

    Parameters
    ----------
    level, dtype, unit : str
    samples : int
        That have it.
    values : Moments, optional
        Of all its numbers; none for text.
    """

    level: str
    dtype: str
    unit: str
    samples: int = 0
    values: Moments | None = None


@dataclass
class SetStats:
    """Result of :func:`stats`.

    Parameters
    ----------
    samples, atoms, edges : int
    sizes : dict of float to int
        Number of atoms below which so large a share of the samples lies.
    elements : dict of str to (int, int)
        Atoms, and samples with it.
    derived : dict of str to Moments
        ``energy_per_atom`` (eV), ``fmax`` (eV/Å), ``volume`` (Å³), ``density`` (g/cm³).
    fields : dict of str to FieldStats
    rejected : int
        Records of files that could not be read.
    """

    samples: int = 0
    atoms: int = 0
    edges: int = 0
    sizes: dict[float, int] = field(default_factory=dict)
    elements: dict[str, tuple[int, int]] = field(default_factory=dict)
    derived: dict[str, Moments] = field(default_factory=dict)
    fields: dict[str, FieldStats] = field(default_factory=dict)
    rejected: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values; what is not a number is None."""
        return _plain(dataclasses.asdict(self))

    def to_json(self) -> str:
        """All of it, for programs."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    def __str__(self) -> str:
        lines = [f"{self.samples:,} samples, {self.atoms:,} atoms, {self.edges:,} edges"]
        if self.rejected:
            lines[0] += f"; {self.rejected:,} records cannot be read"
        if self.sizes:
            shares = ", ".join(f"{share:.0%} {size:,}" for share, size in self.sizes.items())
            lines.append(f"  atoms a sample: {shares}")
        ordered = sorted(self.elements.items(), key=lambda item: -item[1][0])
        if ordered:
            shown = ", ".join(f"{s} {atoms:,} (in {n:,})" for s, (atoms, n) in ordered[:12])
            more = f" and {len(ordered) - 12} more" if len(ordered) > 12 else ""
            lines.append(f"  {len(ordered)} elements, atoms (in samples): {shown}{more}")
        for name, found in self.derived.items():
            lines.append(f"  {name} ({DERIVED[name].doc}): {_numbers(found)}")
        for name, entry in self.fields.items():
            unit = f", {entry.unit}" if entry.unit else ""
            line = f"  {name} ({entry.level}, {entry.dtype}{unit}): in {entry.samples:,} samples"
            if entry.values is not None and (entry.values.count or entry.values.nan):
                line += f"; {_numbers(entry.values)}"
            lines.append(line)
        return "\n".join(lines)


def stats(
    src: PathLike | Sequence[PathLike],
    *,
    where: str | None = None,
    progress: bool | Progress = True,
    options: Mapping[str, Any] | None = None,
    **convert: Any,
) -> SetStats:
    """Sizes, elements, energies and forces of a store, or of files before they are converted.

    Parameters
    ----------
    src : store, or path, pattern or several of them
        Deleted samples do not count; records that cannot be read are counted apart.
    where : str, optional
        Of these samples only: see :class:`~alchemi_xr.etl.predicate.Predicate`.
    progress : bool or Progress
    options : dict, optional
        Further arguments of the source.
    **convert
        ``format``, ``energy_key``, ``units`` … of
        :func:`~alchemi_xr.etl.conversion.convert`, for files.

    Raises
    ------
    SourceNotFoundError, SourceError, ConfigError

    Examples
    --------
    >>> print(stats("train.zarr"))  # doctest: +SKIP
    """
    condition = None if where is None else Predicate(where)
    collected = _Collected()
    with open_progress(progress) as shown:
        for block, rejected, total in _blocks(src, condition, options, convert):
            if collected.result.samples == 0 and collected.result.rejected == 0:
                shown.start("stats", total, "samples")
            shown.advance(block.num_samples)
            collected.result.rejected += rejected
            if condition is not None:
                keep = condition(block).keep
                block = block if keep.all() else block.take(np.flatnonzero(keep))
            collected.add(block)
    return collected.finish()


def _blocks(
    src: Any,
    condition: Predicate | None,
    options: Mapping[str, Any] | None,
    convert: Mapping[str, Any],
) -> Iterator[tuple[Block, int, int]]:
    from alchemi_xr.store.reader import open_store

    try:
        snapshot = open_store(src) if not isinstance(src, (list, tuple)) else None
    except (NotAStoreError, StoreNotFoundError):
        snapshot = None
    if snapshot is not None:
        if convert or options:
            raise ConfigError("stats", "a store takes no options of files", found=sorted(convert))
        with snapshot:
            if condition is not None:
                condition.check({n: (snapshot.level(n), snapshot.tail(n)) for n in snapshot.fields})
            for block in snapshot.iter_blocks(samples=snapshot.active):
                units = {n: snapshot.unit(n) for n in block.names}
                yield dataclasses.replace(block, units=units), 0, len(snapshot.active)
        return
    yield from _of_files(src, condition, options, convert)


def _of_files(
    src: Any,
    condition: Predicate | None,
    options: Mapping[str, Any] | None,
    convert: Mapping[str, Any],
) -> Iterator[tuple[Block, int, int]]:
    from alchemi_xr.etl.request import Request
    from alchemi_xr.etl.source import plain_map

    plain: dict[str, Any] = {
        "format": None,
        "on_error": "quarantine",
        "energy_key": None,
        "forces_key": None,
        "key_map": None,
        "units": None,
        "dtype": None,
        "fields": None,
        "nonfinite": "keep",
        "max_force": None,
    }
    unknown = sorted(set(convert) - set(plain))
    if unknown:
        raise ConfigError("stats", "no such option", found=unknown, expected=", ".join(plain))
    given = Request(src, **{**plain, **convert}, options=options)
    given.run_scan(None, plain_map)
    units = {layout.name: layout.unit for layout in given.layouts()}
    if condition is not None:
        condition.check({x.name: (x.level, x.tail) for x in given.layouts()})
    rejected = len(given.scan.rejects)
    total = len(given.scan.num_atoms)
    for partition in given.scan.partitions:
        result = given.reading(partition)
        keep = result.kept()
        block = result.block if keep.all() else result.block.take(np.flatnonzero(keep))
        bad = int(np.count_nonzero(~keep))
        yield dataclasses.replace(block, units=units), rejected + bad, total
        rejected = 0


class _Collected:
    def __init__(self) -> None:
        self.result = SetStats()
        self._sizes: IntArray = np.zeros(1, np.int64)
        self._atoms: IntArray = np.zeros(len(SYMBOLS), np.int64)
        self._samples: IntArray = np.zeros(len(SYMBOLS), np.int64)
        self._derived = {n: Moments() for n in DERIVED if DERIVED[n].needs}

    def add(self, block: Block) -> None:
        if block.num_samples == 0:
            return
        out = self.result
        out.samples += block.num_samples
        out.atoms += block.num_atoms
        out.edges += block.num_edges
        counts = np.diff(block.atoms_ptr)
        found = np.bincount(np.minimum(counts, _LARGEST))
        if len(found) > len(self._sizes):
            self._sizes = np.pad(self._sizes, (0, len(found) - len(self._sizes)))
        self._sizes[: len(found)] += found
        self._elements(block)
        for name, moments in self._derived.items():
            if all(need in block for need in DERIVED[name].needs):
                column = DERIVED[name].of(block)
                moments.add(column.values[column.known])
        for name in block.names:
            self._field(block, name)

    def _elements(self, block: Block) -> None:
        numbers = np.clip(block["atomic_numbers"], 0, len(SYMBOLS) - 1).astype(np.int64)
        self._atoms += np.bincount(numbers, minlength=len(SYMBOLS))
        owner = np.repeat(np.arange(block.num_samples), np.diff(block.atoms_ptr))
        pairs = np.unique(owner * len(SYMBOLS) + numbers) % len(SYMBOLS)
        self._samples += np.bincount(pairs, minlength=len(SYMBOLS))

    def _field(self, block: Block, name: str) -> None:
        values, level = block[name], block.levels[name]
        text = values.dtype.kind in "OU"
        entry = self.result.fields.get(name)
        if entry is None:
            unit = block.units.get(name, "")
            plain = text or name in ("atomic_numbers", "neighbor_list")
            entry = self.result.fields[name] = FieldStats(
                level, "str" if text else values.dtype.name, unit, 0, None if plain else Moments()
            )
        mask = block.has(name)
        entry.samples += int(mask.sum())
        if entry.values is not None:
            if not mask.all():
                values = values[mask if level == "system" else expand_mask(mask, block.ptr(level))]
            entry.values.add(values)

    def finish(self) -> SetStats:
        out = self.result
        if out.samples:
            below = np.cumsum(self._sizes)
            for share in _SHARES:
                # The size of the sample at that place, in their order by size.
                place = min(int(share * out.samples), out.samples - 1)
                out.sizes[share] = int(np.searchsorted(below, place, side="right"))
        for z in np.flatnonzero(self._atoms).tolist():
            out.elements[SYMBOLS[z]] = (int(self._atoms[z]), int(self._samples[z]))
        out.derived = {n: m for n, m in self._derived.items() if m.count}
        return out


def _numbers(found: Moments) -> str:
    text = (
        f"mean {found.mean:.6g}, std {found.std:.4g}, "
        f"from {found.minimum:.6g} to {found.maximum:.6g}"
    )
    if not found.count:
        text = "no finite number"
    if found.nan or found.inf:
        text += f"; NaN {found.nan:,}, infinite {found.inf:,}"
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

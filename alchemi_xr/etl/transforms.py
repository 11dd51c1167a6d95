"""Block to Block, in the same pass as the reading: units, dtypes, fields, checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.errors import AlchemiError, ConfigError, SourceError, UnknownFieldError, nearest
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Partition, Source
from alchemi_xr.etl.stages import Stages
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.store.bulk import FieldLayout
from alchemi_xr.units import conversion_factor

__all__ = ["REQUIRED", "Checks", "Reading", "Transform", "make_transform"]

REQUIRED = ("atomic_numbers", "positions")


@dataclass(frozen=True)
class Transform:
    """What is done to every block.

    Parameters
    ----------
    factors : dict of str to float
        By field: what its values are multiplied with.
    dtypes : dict of str to str
        By field.
    fields : tuple of str
        What is kept, all when empty.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()

    def layouts(self, schema: Schema) -> tuple[FieldLayout, ...]:
        """The layouts after it."""
        return tuple(
            replace(layout, dtype=self.dtypes.get(layout.name, layout.dtype))
            for layout in schema
            if not self.fields or layout.name in self.fields
        )

    def __call__(self, block: Block) -> Block:
        """The block after it (the dtype is set when it is laid out)."""
        if self.fields:
            block = block.select_fields([n for n in block.names if n in self.fields])
        if self.factors:
            arrays = dict(block.arrays)
            for name, factor in self.factors.items():
                if name in arrays:
                    arrays[name] = arrays[name] * np.asarray(factor, arrays[name].dtype)
            block = replace(block, arrays=arrays)
        return block


def make_transform(
    schema: Schema,
    *,
    units: Mapping[str, str] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    fields: Sequence[str] | None = None,
    where: str = "convert",
) -> Transform:
    """The transform of the options of ``convert``.

    Parameters
    ----------
    schema : Schema
    units : dict of str to str, optional
        Unit of a field in the input, where it is not the project's own.
    dtype : str or dict of str to str, optional
        One for all floats but ``energy``, or by field.
    fields : sequence of str, optional
        What to keep; positions and atomic numbers always are.

    Raises
    ------
    UnknownFieldError
        A field is named that no record has.
    ConfigError
        A unit or dtype is not understood.
    """
    names = [layout.name for layout in schema]
    factors = {}
    for name, unit in (units or {}).items():
        known = _known(name, names, where)
        target = FIELDS[known].unit if known in FIELDS else ""
        if not target:
            raise ConfigError(where, f"field {known!r} has no unit to convert to", found=unit)
        factors[known] = conversion_factor(unit, target)
    dtypes: dict[str, str] = {}
    if isinstance(dtype, Mapping):
        dtypes = {_known(n, names, where): _dtype(d, where) for n, d in dtype.items()}
        _check_casts(schema, dtypes, where)
    elif dtype is not None:
        # Total energies lose their differences in float32; ask for it by name.
        dtypes = {
            layout.name: _dtype(dtype, where)
            for layout in schema
            if layout.dtype.startswith("float") and layout.name != "energy"
        }
        _check_casts(schema, dtypes, where)
    kept: tuple[str, ...] = ()
    if fields is not None:
        fields = [fields] if isinstance(fields, str) else fields
        chosen = {_known(name, names, where) for name in fields} | set(REQUIRED)
        kept = tuple(name for name in names if name in chosen)
    return Transform(factors, dtypes, kept)


def _known(name: str, names: Sequence[str], where: str) -> str:
    known = name if name in names else resolve(name)
    if known not in names:
        raise UnknownFieldError(where, f"the input has no field {name!r}. {nearest(name, names)}")
    return known


def _dtype(name: Any, where: str) -> str:
    try:
        return str(np.dtype(name).name)
    except TypeError:
        raise ConfigError(
            where, f"{name!r} is not a dtype", expected="float32, float64 …"
        ) from None


def _check_casts(schema: Schema, dtypes: Mapping[str, str], where: str) -> None:
    """Refuse a dtype that cannot hold what the field is (positions as whole numbers)."""
    for name, dtype in dtypes.items():
        layout = schema.get(name)
        assert layout is not None
        given = layout.dtype
        fits = dtype == given if given == "str" else np.can_cast(given, dtype, "same_kind")
        if not fits or (given != "str" and np.dtype(dtype).kind not in "fiub"):
            raise ConfigError(
                where,
                f"dtype: field {name!r} would lose its values",
                found=f"{given} to {dtype}",
                expected="a dtype of the same kind",
                mend=f"leave {name} out of dtype=, or give a float for floats, an int for ints",
            )


def _too_large(block: Block, dtypes: Mapping[str, str]) -> list[tuple[int, str, str]]:
    """Samples with a finite number that its dtype would turn into something else."""
    failed: dict[int, tuple[int, str, str]] = {}
    for name, dtype in dtypes.items():
        values = block.arrays.get(name)
        if values is None or dtype == "str" or np.can_cast(values.dtype, dtype, "safe"):
            continue
        target = np.dtype(dtype)
        limits = np.finfo(target) if target.kind == "f" else np.iinfo(target)
        bad: NDArray = np.asarray((values > limits.max) | (values < limits.min))
        if target.kind == "f":
            bad &= np.isfinite(values)
        if bad.any():
            bad = np.asarray(bad.any(axis=tuple(range(1, values.ndim))))
            for sample in Checks._samples(block, name, bad):
                failed.setdefault(sample, (sample, name, f"holds a number too large for {dtype}"))
    return [failed[sample] for sample in sorted(failed)]


@dataclass(frozen=True, slots=True)
class Checks:
    """Which samples are set aside for their values.

    Parameters
    ----------
    finite : bool
        Those with a NaN or an infinity in energy, forces, positions, stress or cell.
    max_force : float, optional
        Those with a force norm above it, eV/Å.
    """

    finite: bool = False
    max_force: float | None = None

    def __call__(self, block: Block) -> list[tuple[int, str, str]]:
        """Sample, field and reason of everything that fails."""
        failed: dict[int, tuple[int, str, str]] = {}
        if self.finite:
            for name in ("positions", "energy", "forces", "stress", "cell"):
                values = block.arrays.get(name)
                if values is None:
                    continue
                bad = np.logical_not(np.isfinite(values)).any(axis=tuple(range(1, values.ndim)))
                for sample in self._samples(block, name, np.asarray(bad)):
                    failed.setdefault(sample, (sample, name, "holds NaN or infinity"))
        if self.max_force is not None and "forces" in block:
            with np.errstate(over="ignore", invalid="ignore"):
                norms = np.sqrt((block["forces"] ** 2).sum(axis=1))
            above: NDArray = np.logical_not(norms <= self.max_force)
            for sample in self._samples(block, "forces", above):
                reason = f"a force is above {self.max_force} eV/Å"
                failed.setdefault(sample, (sample, "forces", reason))
        return [failed[sample] for sample in sorted(failed)]

    @staticmethod
    def _samples(block: Block, name: str, bad: BoolArray) -> list[int]:
        mask = block.has(name)
        samples: NDArray = np.flatnonzero(bad)
        if block.levels[name] == "atom":
            samples = np.unique(ptr_to_index(block.atoms_ptr)[samples])
        return [int(s) for s in samples if mask[s]]


@dataclass(frozen=True)
class Reading:
    """A source with its transforms and checks: what the plan's tasks call.

    Parameters
    ----------
    source : Source
    transform : Transform
    checks : Checks
    raises : bool
        The first broken record becomes an exception. A sample that fails a
        check is always set aside: the check asked for that.
    """

    source: Source
    transform: Transform
    checks: Checks = Checks()
    raises: bool = True
    stages: Stages = field(default_factory=Stages)

    def __call__(self, payload: Partition) -> PartResult:
        """The samples of a partition, as they go to the store.

        Raises
        ------
        SourceError
            A record is broken, and ``raises`` is on.
        """
        return self.filtered(self.read(payload))

    def read(self, payload: Partition) -> PartResult:
        """The samples of a partition, before the condition has been asked about them."""
        try:
            read = self.source.read(payload)
        except OSError as error:
            if isinstance(error, AlchemiError):
                raise
            raise SourceError(
                error.filename or self.origin(payload, 0)[0],
                f"cannot be read ({error.strerror or error})",
                mend="the input must stay as it is until the conversion has ended; run it again",
            ) from error
        result = PartResult(read) if isinstance(read, Block) else read
        block = self.transform(result.block)
        rejects = sorted(result.rejects, key=lambda r: -1 if r.sample is None else r.sample)
        if rejects and self.raises:
            raise rejects[0].error()
        taken = {reject.sample for reject in rejects}
        block, unfit = self.stages(block)
        late: list[tuple[int, str, str]] = []
        for sample, name, reason in [*unfit, *_too_large(block, self.transform.dtypes)]:
            if sample not in taken:
                taken.add(sample)
                late.append((sample, name, reason))
                if self.raises:
                    raise self.rejected(payload, late)[0].error()
        late += [failed for failed in self.checks(block) if failed[0] not in taken]
        rejects += self.rejected(payload, late)
        rejects.sort(key=lambda r: -1 if r.sample is None else r.sample)
        return PartResult(block, rejects, result.notes)

    def filtered(self, result: PartResult) -> PartResult:
        """What is read, with the verdict of the condition."""
        verdict = self.stages.verdict(result.block)
        if verdict is None:
            return result
        whole = result.kept()
        result.undecided = np.flatnonzero(whole & verdict.unknown)
        result.left_out = np.flatnonzero(whole & ~verdict.keep & ~verdict.unknown)
        return result

    def rejected(self, payload: Partition, failed: Sequence[tuple[int, str, str]]) -> list[Reject]:
        """Samples of a partition that were read and are set aside.

        Parameters
        ----------
        payload : Partition
        failed : sequence of (int, str, str)
            Place in the partition, field and reason.
        """
        # A source of text may say where in its file a record stands.
        find = getattr(self.source, "places", None)
        samples = [sample for sample, _, _ in failed]
        places = find(payload, samples) if find and samples else [(None, None)] * len(samples)
        out = []
        for (sample, name, reason), (offset, line) in zip(failed, places, strict=True):
            file, frame = self.origin(payload, sample)
            out.append(Reject(file, frame, reason, offset, line, name, sample))
        return out

    def origin(self, payload: Partition, sample: int) -> tuple[str, int]:
        """File and frame of a sample of a partition."""
        paths: Sequence[str] = getattr(self.source, "paths", ())
        for segment in payload.segments:
            if sample < segment.frames:
                return paths[segment.file], segment.first + sample
            sample -= segment.frames
        return "?", sample

"""What a conversion did, in numbers: nothing is left out without a word."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from alchemi_xr.plan.plan import format_bytes
from alchemi_xr.plan.rejects import Reject

__all__ = ["ConvertReport", "FieldReport", "MaintainReport"]


@dataclass(frozen=True, slots=True)
class FieldReport:
    """One field of the result.

    Parameters
    ----------
    level, dtype, unit : str
    samples : int
        How many samples carry it.
    nan, inf : int
        Rows with a NaN, with an infinity, in samples that carry it.
    """

    level: str
    dtype: str
    unit: str
    samples: int
    nan: int
    inf: int


@dataclass
class ConvertReport:
    """Result of ``convert`` and ``append``.

    Parameters
    ----------
    destination, source : str
        The store; the name of the source.
    records : int
        Records in the input.
    samples, atoms, edges : int
        Written and kept.
    rejected : int
    left_out, undecided : int
        Samples that the condition (``where``) did not keep; those about which it could
        not be decided, for a value is missing or NaN (not kept either).
    repeats : int
        Samples that are the same structure as an earlier one (``dedup``), left out.
    parts : dict of str to int
        Samples by store, where several were made (``split``).
    keys : dict of str to int
        By name in the input: records that have it.
    fields : dict of str to FieldReport
        By name in the store.
    nonfinite_samples : int
        Samples with a NaN or an infinity somewhere.
    notes : list of str
        Assumptions and warnings.
    rejects : list of Reject
    rejects_path : str, optional
        The file that lists them.
    input_bytes, output_bytes : int
    seconds : float
    resumed : bool
        An interrupted run was taken up.
    """

    destination: str
    source: str
    records: int
    samples: int
    atoms: int
    edges: int
    rejected: int
    keys: dict[str, int] = field(default_factory=dict)
    fields: dict[str, FieldReport] = field(default_factory=dict)
    nonfinite_samples: int = 0
    notes: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    rejects_path: str | None = None
    input_bytes: int = 0
    output_bytes: int = 0
    seconds: float = 0.0
    resumed: bool = False
    left_out: int = 0
    undecided: int = 0
    repeats: int = 0
    parts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ConvertReport:
        """The report that :meth:`to_dict` gave."""
        fields = {name: FieldReport(**entry) for name, entry in values["fields"].items()}
        rejects = [Reject(**entry) for entry in values["rejects"]]
        return cls(**{**values, "fields": fields, "rejects": rejects})

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """One line: records in, written, rejected, and how fast."""
        edges = f", {self.edges:,} edges" if self.edges else ""
        text = (
            f"{self.destination}: {self.records:,} records in, {self.samples:,} written "
            f"({self.atoms:,} atoms{edges}), {self.rejected:,} rejected"
        )
        if self.left_out or self.undecided:
            text += f", {self.left_out:,} left out"
        if self.undecided:
            text += f", {self.undecided:,} undecided"
        if self.repeats:
            text += f", {self.repeats:,} repeats"
        rate = self.input_bytes / self.seconds if self.seconds else 0.0
        text += (
            f"; {self.seconds:.1f} s, {self.samples_per_second:,.0f} samples/s, "
            f"{format_bytes(rate)}/s"
        )
        if self.resumed:
            text += "; resumed"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    def __str__(self) -> str:
        lines = [self.summary()]
        for name, entry in self.fields.items():
            unit = f", {entry.unit}" if entry.unit else ""
            line = f"  {name} ({entry.level}, {entry.dtype}{unit}): in {entry.samples:,} samples"
            if entry.nan or entry.inf:
                line += f"; rows with NaN {entry.nan:,}, with infinity {entry.inf:,}"
            lines.append(line)
        lines += [f"  {path}: {samples:,} samples" for path, samples in self.parts.items()]
        lines += [f"  note: {note}" for note in self.notes]
        if self.rejects_path:
            lines.append(f"  rejected records: {self.rejects_path}")
        return "\n".join(lines)


@dataclass
class MaintainReport:
    """Result of ``defragment``, ``rechunk``, ``sort``, ``merge`` and of each part of ``split``.

    Parameters
    ----------
    destination, operation : str
    samples, atoms, edges : int
        In the store now, samples that stay deleted included.
    removed : int
        Samples of the source (or sources) that are not.
    undecided : int
        Those of them about which the condition (``where``) could not be decided.
    deleted : int
        Samples in the store that stay deleted.
    output_bytes : int
        On disk; 0 for a store that is no folder.
    seconds : float
    resumed : bool
        A job that was stopped was taken up.
    """

    destination: str
    operation: str
    samples: int
    atoms: int
    edges: int
    removed: int = 0
    undecided: int = 0
    deleted: int = 0
    output_bytes: int = 0
    seconds: float = 0.0
    resumed: bool = False

    def summary(self) -> str:
        """One line: what was done, how much there is now, and how fast."""
        text = (
            f"{self.destination}: {self.operation}, {self.samples:,} samples "
            f"({self.atoms:,} atoms, {self.edges:,} edges)"
        )
        if self.removed:
            text += f", {self.removed:,} left out"
        if self.undecided:
            text += f" ({self.undecided:,} undecided, for a value is missing)"
        if self.deleted:
            text += f", {self.deleted:,} of them deleted"
        if self.output_bytes:
            text += f"; {format_bytes(self.output_bytes)}"
        text += f"; {self.seconds:.1f} s"
        return text + ("; resumed" if self.resumed else "")

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    def __str__(self) -> str:
        return self.summary()

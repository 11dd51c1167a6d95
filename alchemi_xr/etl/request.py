"""What a user asked for, checked and scanned: the side of ``convert`` that only reads."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alchemi_xr._typing import PathLike
from alchemi_xr._version import __version__
from alchemi_xr.data.fields import FIELDS, resolve
from alchemi_xr.errors import AlchemiError, ConfigError, SourceError
from alchemi_xr.etl.hints import name_notes, refuse_ambiguous
from alchemi_xr.etl.inputs import content_files, expand, find_source
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.neighbors import EdgeReading, Part, check_cutoff, edge_layouts, parts_of
from alchemi_xr.etl.source import Mapper, Partition, Scan, Source
from alchemi_xr.etl.stages import Stages
from alchemi_xr.etl.transforms import REQUIRED, Checks, Reading, Transform, make_transform
from alchemi_xr.plan.client import Runner
from alchemi_xr.plan.plan import Extent, Plan, make_plan, shard_rows
from alchemi_xr.plan.progress import Progress
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult, Reader
from alchemi_xr.store.bulk import FieldLayout
from alchemi_xr.store.codecs import ZarrWriteConfig
from alchemi_xr.units import conversion_factor

__all__ = ["Request"]

_BYTES_BEFORE_EDGES = 2**20


class Request:
    """An input with everything that was asked for on the way; arguments as in ``convert``."""

    def __init__(
        self,
        src: PathLike | Sequence[PathLike],
        *,
        format: str | None,
        on_error: str,
        energy_key: str | Sequence[str] | None,
        forces_key: str | Sequence[str] | None,
        key_map: Mapping[str, str] | None,
        units: Mapping[str, str] | None,
        dtype: str | Mapping[str, str] | None,
        fields: Sequence[str] | None,
        nonfinite: str,
        max_force: float | None,
        options: Mapping[str, Any] | None,
        stages: Stages | None = None,
    ) -> None:
        if on_error not in ("raise", "quarantine"):
            raise ConfigError("on_error", "not known", found=on_error, expected="raise, quarantine")
        if nonfinite not in ("keep", "quarantine"):
            raise ConfigError(
                "nonfinite", "not known", found=nonfinite, expected="keep, quarantine"
            )
        if units is not None and not (
            isinstance(units, Mapping) and all(isinstance(v, str) for v in units.values())
        ):
            raise ConfigError(
                "units", "no mapping of field to unit", found=repr(units), expected='{"a": "eV"}'
            )
        if max_force is not None and (
            isinstance(max_force, bool) or not isinstance(max_force, (int, float)) or max_force <= 0
        ):
            raise ConfigError(
                "max_force", "no force in eV/Å", found=repr(max_force), expected="> 0"
            )
        self.raises = on_error == "raise"
        self.paths = expand(src)
        self.kind, self.paths, strangers = find_source(self.paths, format, strict=self.raises)
        self.unknown = [Reject(path, 0, reason) for path, reason in strangers]
        self.names = NameMap.make(energy_key, forces_key, key_map)
        self.checks = Checks(nonfinite == "quarantine", max_force)
        self.asked = {"units": dict(units or {}), "dtype": dtype, "fields": fields}
        self.options = dict(options or {})
        self.stages = stages or Stages()
        check_cutoff(self.stages.cutoff)
        self._edges: EdgeReading | None = None
        self.input_bytes = sum(os.path.getsize(f) for p in self.paths for f in content_files(p))
        self.scan: Scan
        self.source: Source
        self.transform: Transform

    def run_scan(self, spool: str | None, mapper: Mapper) -> None:
        """Count, and stop at once where nothing can come of it.

        Raises
        ------
        SourceError
        """
        options: dict[str, Any] = {"names": self.names, **self.options}
        taken = inspect.signature(self.kind).parameters
        if spool is not None and "spool" in taken:
            options["spool"] = spool
        if self.stages.cutoff is not None and "partition_bytes" in taken:
            # Edges are many times the size of what they are made of.
            options.setdefault("partition_bytes", _BYTES_BEFORE_EDGES)
        try:
            self.source = self.kind(self.paths, **options)
        except TypeError as error:
            raise ConfigError(
                "options",
                f"the source {self.kind.name!r} does not take them ({error})",
                found=sorted(self.options),
            ) from error
        try:
            self.scan = self.source.scan(mapper)
        except OSError as error:
            if isinstance(error, AlchemiError):
                raise
            raise SourceError(
                error.filename or self.paths[0],
                f"cannot be read ({error.strerror or error})",
                mend="check that it is there and may be read",
            ) from error
        refuse_ambiguous(self.scan.schema, self.names)
        self.scan.rejects[:0] = self.unknown
        self.scan.records += len(self.unknown)
        if self.scan.rejects and self.raises:
            raise self.scan.rejects[0].error()
        if not self.scan.partitions:
            shown = self.paths[0] if len(self.paths) == 1 else f"{len(self.paths)} files"
            reason = self.scan.rejects[0].reason if self.scan.rejects else "it holds no record"
            raise SourceError(
                shown,
                f"no sample can be read ({reason})",
                mend="check that the file is whole and of the format that its name says",
            )
        for name in REQUIRED:
            if self.scan.schema.get(name) is None:
                raise SourceError(self.paths[0], f"no record has {name}")
        given = {resolve(n): u for n, u in self.asked["units"].items()}  # type: ignore[union-attr]
        # What the user says of a unit wins over what the file or its format says.
        asked: dict[str, Any] = {**self.asked, "units": {**self.scan.units, **given}}
        self.transform = make_transform(self.scan.schema, where=self.paths[0], **asked)
        self._layouts = self.transform.layouts(self.scan.schema)
        if self.stages.function is not None:
            # What the function makes of the first samples shows which fields there will be.
            probe = self._plain_reading(self.scan.partitions[0]).block
            self._layouts = self.stages.layouts(self._layouts, probe)
        levels = {layout.name: (layout.level, layout.tail) for layout in self._layouts}
        if self.stages.where is not None:
            self.stages.where.check(levels)
        for name in (n for n in REQUIRED if n not in levels):
            raise ConfigError("function", f"leaves out {name}", mend="every store has it")
        if self.stages.cutoff is not None:
            self._layouts, notes = edge_layouts(self._layouts)
            self.scan.notes += notes

    def survey(self, runner: Runner, shown: Progress, spool: Path | None = None) -> None:
        """Count the edges that there will be, where a cutoff asks for some.

        Parameters
        ----------
        runner : Runner
        shown : Progress
        spool : Path, optional
            A folder that the tasks can reach, for what is found.

        Raises
        ------
        SourceError
        """
        if self.stages.cutoff is None:
            return
        folder = None
        if spool is not None:
            told = json.dumps(
                [self.identity(ZarrWriteConfig()), repr(self.scan.partitions)], default=repr
            )
            folder = str(spool / f"edges-{hashlib.blake2s(told.encode()).hexdigest()[:32]}")
        self._edges = EdgeReading(self._plain_reading, self.stages.cutoff, folder)
        self.scan.num_edges = self._edges.survey(self.scan.partitions, runner, shown)

    @property
    def reading(self) -> Reader:
        return self._plain_reading if self._edges is None else self._edges

    @property
    def _plain_reading(self) -> Reading:
        return Reading(self.source, self.transform, self.checks, self.raises, self.stages)

    def read_whole(self, partition: Partition) -> PartResult:
        """A partition by itself, without a survey; edges as they come."""
        if self.stages.cutoff is None:
            return self._plain_reading(partition)
        part = Part(partition, -1, 0, partition.samples)
        return EdgeReading(self._plain_reading, self.stages.cutoff)(part)

    def layouts(self) -> tuple[FieldLayout, ...]:
        return self._layouts

    def plan(self, config: ZarrWriteConfig) -> Plan:
        """Offsets and shards of the whole conversion; nothing is written."""
        layouts = self.layouts()
        scan = self.scan
        if self._edges is None:
            extents = [
                Extent(p.samples, p.atoms, p.edges, p, p.input_bytes) for p in scan.partitions
            ]
        else:
            width = sum(x.to_info().row_bytes for x in layouts if x.level == "atom")
            extents = [
                Extent(part.stop - part.start, atoms, edges, part, part.partition.input_bytes)
                for part, atoms, edges in parts_of(
                    scan.partitions, scan.num_atoms, scan.num_edges, width
                )
            ]
        return make_plan(extents, layouts, shard_rows(layouts, config, extents))

    def notes(self) -> list[str]:
        """The scan's, and the units that were assumed."""
        assumed = [
            f"{layout.name} {layout.unit}"
            for layout in self.layouts()
            if layout.group == "core" and layout.unit and layout.name not in self.transform.factors
        ]
        notes = list(self.scan.notes)
        # A slip in energy_key= would silently leave another energy, or none.
        notes += [
            f"no record has {key!r}, which was to be {field}"
            for key, field in self.names.mapping.items()
            if key not in self.scan.keys
        ]
        notes += name_notes(self.scan.keys, self.scan.schema, self.names)
        if assumed:
            notes.append("units taken as they stand: " + ", ".join(assumed))
        given = {resolve(n): u for n, u in self.asked["units"].items()}  # type: ignore[union-attr]
        for name, unit in {**self.scan.units, **given}.items():
            target = FIELDS[name].unit if name in FIELDS else ""
            if name not in given and conversion_factor(unit, target) == 1.0:
                continue
            why = "" if name in given else " (as the input or its format says)"
            notes.append(f"units converted: {name} from {unit} to {target}{why}")
        return notes

    def identity(self, config: ZarrWriteConfig) -> dict[str, object]:
        """Everything that decides the bytes of the result, but for the plan."""
        files = [f for p in self.paths for f in content_files(p)]
        stats = [os.stat(f) for f in files]
        return {
            "version": __version__,
            "source": self.kind.__name__,
            "files": [(p, s.st_size, s.st_mtime_ns) for p, s in zip(files, stats, strict=True)],
            "names": dict(self.names.mapping),
            "transform": repr(self.transform),
            "checks": repr(self.checks),
            "stages": self.stages.identity(),
            "raises": self.raises,
            "config": repr(config),
        }

    def provenance(self) -> dict[str, Any]:
        """What the store remembers of where it came from (no times: equal runs, equal bytes)."""
        return {
            "converted_by": f"alchemi_xr {__version__}",
            "source": self.kind.name,
            "files": self.paths if len(self.paths) <= 100 else [*self.paths[:100], "…"],
            "num_files": len(self.paths),
            "key_map": dict(self.names.mapping),
            "units": {**self.scan.units, **self.asked["units"]},  # type: ignore[dict-item]
            "records": self.scan.records,
            **({"stages": self.stages.said()} if self.stages.any else {}),
        }

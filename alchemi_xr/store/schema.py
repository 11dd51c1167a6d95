"""What the root document of a store says: counts, fields, generation, history.

The root document is the one thing whose replacement is a commit. What other
tools read (``num_samples``, ``fields``) stands beside what is ours, which is
all under one key.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from alchemi_xr._typing import Level
from alchemi_xr.data.fields import FIELDS, canonical_level, field_order, fill_for
from alchemi_xr.errors import CorruptStoreError, StoreVersionError

__all__ = ["FORMAT_VERSION", "KEY", "Counts", "FieldInfo", "Group", "StoreSchema", "TEXT"]

FORMAT_VERSION = 1
KEY = "alchemi_xr"
TEXT = np.dtype(object)
"""dtype by which text is known inside; on disk it is Zarr's variable-length string."""

_HISTORY = 64

Group: TypeAlias = Literal["core", "custom", "text"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Committed rows at each level."""

    samples: int = 0
    atoms: int = 0
    edges: int = 0

    def rows(self, level: Level) -> int:
        """Rows at a level."""
        return {"atom": self.atoms, "edge": self.edges, "system": self.samples}[level]

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.samples + other.samples, self.atoms + other.atoms, self.edges + other.edges
        )


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field as it is on disk.

    Parameters
    ----------
    name : str
    level : {"atom", "edge", "system"}
    dtype : dtype
        ``TEXT`` for text.
    tail : tuple of int
        Shape of one row as the project sees it.
    group : {"core", "custom", "text"}
    unit : str
    holes : bool
        Whether some samples have no value; then a presence mask exists.
    since : int
        Generation in which it came.
    rows : int, optional
        Rows that are on disk when these are fewer than committed, because a
        foreign writer did not extend the array; the rest are holes.
    """

    name: str
    level: Level
    dtype: np.dtype[Any]
    tail: tuple[int, ...] = ()
    group: Group = "core"
    unit: str = ""
    holes: bool = False
    since: int = 0
    rows: int | None = None

    @property
    def path(self) -> str:
        """Path of the array in the store."""
        return f"{_FOLDERS[self.group]}/{self.name}"

    @property
    def present_path(self) -> str:
        return f"meta/present/{self.name}"

    @property
    def is_text(self) -> bool:
        return self.group == "text"

    @property
    def fill(self) -> Any:
        """What stands in rows without a value."""
        return "" if self.is_text else fill_for(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory; a guess for text."""
        size = 64 if self.is_text else self.dtype.itemsize
        return size * int(np.prod(self.tail, dtype=np.int64))


_FOLDERS: dict[str, str] = {"core": "core", "custom": "custom", "text": "meta/text"}


def table_unit(name: str) -> str:
    """Unit that the field table gives."""
    spec = FIELDS.get(name)
    return spec.unit if spec else ""


@dataclass(frozen=True)
class StoreSchema:
    """The committed state of a store, all but its bytes.

    Parameters
    ----------
    fields : dict of str to FieldInfo
    counts : Counts
    generation : int
    identity : str
        Made new with each rewrite: rows keep their place while it stays.
    masks_since : int
        Generation that last changed the deletion masks.
    pending_mask : bool
        A deletion is committed, and the masks that other tools read may not
        say so yet; the truth is ``meta/pending/samples_mask``.
    foreign_samples : int
        Samples written by another tool: their edges may have wrong bases, and
        chunks of fill alone may be absent.
    provenance : dict
    encoding : dict
        Profile, chunks and codecs by name that the store was last written with.
    history : list of dict
        The last commits: generation, operation, counts.
    others : dict
        Root attributes of other tools, kept as they are.
    """

    fields: dict[str, FieldInfo] = field(default_factory=dict)
    counts: Counts = Counts()
    generation: int = 0
    identity: str = ""
    masks_since: int = 0
    pending_mask: bool = False
    foreign_samples: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)
    encoding: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return field_order(self.fields)

    def rows(self, name: str) -> int:
        """Committed rows of a field."""
        return self.counts.rows(self.fields[name].level)

    def evolve(self, **changes: Any) -> StoreSchema:
        """This schema with some entries changed."""
        return replace(self, **changes)

    def next(self, operation: str, *, job: str = "", **changes: Any) -> StoreSchema:
        """The schema of the next generation, with the commit in its history.

        Parameters
        ----------
        operation : str
        job : str
            Of a job that may be repeated after an interruption: by this it finds
            out that its commit was made.
        **changes
            Fields of the schema.
        """
        after = replace(self, generation=self.generation + 1, **changes)
        entry = {
            "generation": after.generation,
            "operation": operation,
            "samples": after.counts.samples,
            "atoms": after.counts.atoms,
            "edges": after.counts.edges,
        }
        if job:
            entry["job"] = job
        return replace(after, history=[*self.history, entry][-_HISTORY:])

    def at_generation(self, generation: int) -> StoreSchema | None:
        """The schema as an older generation saw it, or None when that is gone.

        Appends and new fields leave older rows alone, so they can be looked
        away from; a deletion or a rewrite since then cannot.
        """
        if generation == self.generation:
            return self
        entry = next((e for e in self.history if e["generation"] == generation), None)
        if entry is None or self.masks_since > generation or generation > self.generation:
            return None
        return replace(
            self,
            generation=generation,
            counts=Counts(entry["samples"], entry["atoms"], entry["edges"]),
            fields={n: f for n, f in self.fields.items() if f.since <= generation},
        )

    # -- the document ------------------------------------------------------

    def to_attributes(self) -> dict[str, Any]:
        """Root attributes."""
        in_group: dict[str, dict[str, str]] = {"core": {}, "custom": {}}
        for name in self.names:
            info = self.fields[name]
            if not info.is_text:
                in_group[info.group][name] = info.level
        ours: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "generation": self.generation,
            "identity": self.identity,
            "counts": {
                "samples": self.counts.samples,
                "atoms": self.counts.atoms,
                "edges": self.counts.edges,
            },
            "fields": {name: _field_to_json(self.fields[name]) for name in self.names},
            "masks_since": self.masks_since,
            "history": self.history,
            "provenance": self.provenance,
        }
        if self.encoding:
            ours["encoding"] = self.encoding
        if self.pending_mask:
            ours["pending_mask"] = True
        if self.foreign_samples:
            ours["foreign_samples"] = self.foreign_samples
        return {
            **self.others,
            "num_samples": self.counts.samples,
            "fields": {**self.others.get("fields", {}), **in_group},
            KEY: ours,
        }

    @classmethod
    def from_attributes(
        cls, attributes: Mapping[str, Any], *, where: str
    ) -> tuple[StoreSchema | None, bool]:
        """Our schema in root attributes, and whether it still holds.

        Returns
        -------
        schema : StoreSchema or None
            None when there is nothing of ours.
        current : bool
            False when a foreign writer changed the store since.

        Raises
        ------
        StoreVersionError
            A newer format than this version knows.
        CorruptStoreError
            The entry under our key cannot be read.
        """
        ours = attributes.get(KEY)
        if not isinstance(ours, Mapping) or "counts" not in ours:
            return None, False
        version = ours.get("format", 0)
        if version > FORMAT_VERSION:
            raise StoreVersionError(
                where,
                "the store is of a newer format",
                found=version,
                expected=f"{FORMAT_VERSION} or older",
                mend="update alchemi_xr",
            )
        try:
            counts = Counts(**ours["counts"])
            infos = {name: _field_from_json(name, f) for name, f in ours["fields"].items()}
            declared = attributes.get("fields") or {}
            others = {
                k: v for k, v in attributes.items() if k not in (KEY, "num_samples", "fields")
            }
            kept = {k: v for k, v in declared.items() if k not in ("core", "custom")}
            if kept:
                others["fields"] = kept
            schema = cls(
                fields=infos,
                counts=counts,
                generation=int(ours["generation"]),
                identity=str(ours["identity"]),
                masks_since=int(ours.get("masks_since", 0)),
                pending_mask=bool(ours.get("pending_mask", False)),
                foreign_samples=int(ours.get("foreign_samples", 0)),
                provenance=copy.deepcopy(dict(ours.get("provenance", {}))),
                encoding=copy.deepcopy(dict(ours.get("encoding", {}))),
                history=copy.deepcopy(list(ours.get("history", []))),
                others=copy.deepcopy(others),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(
                where, f"the root attribute {KEY!r} cannot be understood ({error!r})"
            ) from error
        return schema, attributes.get("num_samples") == counts.samples


def _field_to_json(info: FieldInfo) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "level": info.level,
        "dtype": "str" if info.is_text else info.dtype.name,
        "tail": list(info.tail),
        "group": info.group,
        "unit": info.unit,
        "since": info.since,
    }
    if info.holes:
        entry["holes"] = True
    return entry


def _field_from_json(name: str, entry: Mapping[str, Any]) -> FieldInfo:
    group = entry["group"]
    if group not in _FOLDERS:
        raise ValueError(f"group {group!r} of field {name!r}")
    return FieldInfo(
        name=name,
        level=canonical_level(entry["level"]),
        dtype=TEXT if entry["dtype"] == "str" else np.dtype(entry["dtype"]),
        tail=tuple(int(n) for n in entry["tail"]),
        group=group,
        unit=str(entry.get("unit", "")),
        holes=bool(entry.get("holes", False)),
        since=int(entry.get("since", 0)),
    )

"""Reads what a store commits to: root document, pointers, sample mask.

Here a store of ours is told from one that another tool made or changed, and a
contradiction between its arrays becomes an error that names them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store

from alchemi_xr._typing import BoolArray, Level, NDArray, Ptr
from alchemi_xr.data.csr import validate_ptr
from alchemi_xr.data.fields import FIELDS, as_rows, canonical_level, field_order
from alchemi_xr.errors import (
    AlchemiError,
    CorruptStoreError,
    FieldError,
    NotAStoreError,
    StaleSnapshotError,
    StoreNotFoundError,
)
from alchemi_xr.store import fs, layout
from alchemi_xr.store._compat import read_json, wait
from alchemi_xr.store.locate import PinnedStore, Place
from alchemi_xr.store.remote import CheckedStore
from alchemi_xr.store.schema import KEY, TEXT, Counts, FieldInfo, Group, StoreSchema, table_unit

__all__ = ["StoreState", "read_state", "root_attributes"]

_TRIES = 20


@dataclass
class StoreState:
    """A committed state with what of it is kept in memory."""

    place: Place
    store: Store
    schema: StoreSchema
    foreign: bool
    stale: StoreSchema | None
    atoms_ptr: Ptr
    edges_ptr: Ptr
    samples_mask: BoolArray

    @property
    def pinned(self) -> PinnedStore | CheckedStore | None:
        """The store, when it tells a lost chunk from one of fill."""
        return self.store if isinstance(self.store, (PinnedStore, CheckedStore)) else None

    def open_array(self, path: str) -> zarr.Array[Any]:
        """An array of the store.

        Raises
        ------
        CorruptStoreError
            It is not there.
        """
        return _open(self.place, self.store, path)

    def present_rows(self, info: FieldInfo) -> int:
        """Entries of a field's presence mask that are on disk."""
        known = self.stale if self.stale is not None else self.schema
        before = known.fields.get(info.name)
        if before is None or not before.holes:
            return 0
        return min(known.counts.samples, self.schema.counts.samples)

    def samples_within(self, info: FieldInfo) -> int:
        """Samples whose rows of a field that ends early are all there."""
        rows = info.rows if info.rows is not None else self.schema.rows(info.name)
        if info.level == "system":
            return rows
        ptr = self.atoms_ptr if info.level == "atom" else self.edges_ptr
        return int(np.searchsorted(ptr, rows, side="right")) - 1


def root_attributes(place: Place, store: Store) -> dict[str, Any]:
    """Attributes of the root group.

    Raises
    ------
    StoreNotFoundError, NotAStoreError
    """
    try:
        document = read_json(store, place.key("zarr.json"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CorruptStoreError(
            place.where, f"the root document zarr.json is no JSON ({error})"
        ) from error
    if document is None:
        if wait(store.exists(place.key(".zgroup"))) or wait(store.exists(place.key(".zattrs"))):
            raise NotAStoreError(
                place.where,
                "this is a Zarr group of format 2",
                expected="format 3",
                mend="convert it with zarr's own tools, then open the result",
            )
        if place.is_local:
            raise NotAStoreError(
                place.where,
                "there is no root document zarr.json",
                mend="give the path of a store, or convert what is there with `alchemi-xr convert`",
            )
        raise StoreNotFoundError(place.where, "no store is here")
    if document.get("node_type") != "group":
        raise NotAStoreError(
            place.where, "this is no Zarr group", found=document.get("node_type"), expected="group"
        )
    attributes: dict[str, Any] = document.get("attributes") or {}
    return attributes


def _pin(place: Place) -> Store:
    if place.path is None:
        return place.for_reading()
    try:
        return PinnedStore(place.path)
    except FileNotFoundError:
        # Between the two renames of a swap the new generation stands aside.
        aside = fs.swapped_in(place.path)
        if aside is not None:
            try:
                return PinnedStore(aside)
            except OSError:
                return PinnedStore(place.path)
        raise StoreNotFoundError(
            place.where, "no store is here", mend="check the path, or make a store with convert"
        ) from None
    except NotADirectoryError:
        raise NotAStoreError(
            place.where,
            "this is a file, not a store",
            mend="`alchemi-xr convert` makes a store of it",
        ) from None


def read_state(place: Place, *, generation: int | None = None) -> StoreState:
    """The committed state of a store, whole.

    The root document is read again at the end: when a deletion or a rewrite
    was committed meanwhile, all is read anew.

    Raises
    ------
    StoreNotFoundError, NotAStoreError, StoreVersionError, CorruptStoreError,
    StaleSnapshotError
    """
    for attempt in range(_TRIES):
        store = _pin(place)
        before = root_attributes(place, store)
        try:
            state = _read_once(place, store, before, generation)
        except CorruptStoreError:
            if attempt + 1 < _TRIES and root_attributes(place, store) != before:
                continue
            raise
        after = root_attributes(place, store)
        if after == before or _same_rows(before, after):
            return state
    return state


def _same_rows(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether only appends lie between two root documents."""
    old, new = before.get(KEY, {}), after.get(KEY, {})
    keys = ("identity", "masks_since", "pending_mask")
    return bool(old) and all(old.get(k) == new.get(k) for k in keys)


def _read_once(
    place: Place, store: Store, attributes: dict[str, Any], generation: int | None
) -> StoreState:
    ours, current = StoreSchema.from_attributes(attributes, where=place.where)
    unfinished = isinstance(attributes.get(KEY), dict) and "counts" not in attributes[KEY]
    if unfinished and "num_samples" not in attributes:
        raise NotAStoreError(
            place.where,
            "the store is unfinished: the job that writes it has not committed",
            mend="let that job finish or resume it; else remove the folder",
        )
    nothing_declared = ours is None and "num_samples" not in attributes
    if nothing_declared and not _exists(store, place, layout.ATOMS_PTR):
        raise NotAStoreError(
            place.where,
            "missing 'meta' group: this Zarr group is no store of samples",
            mend="give the path of a store made by alchemi_xr or nvalchemi-toolkit",
        )
    foreign_generation = 0 if ours is None else ours.generation
    if not current and generation not in (None, foreign_generation):
        raise _gone(place, generation or 0)
    if ours is not None and current:
        if generation is not None:
            older = ours.at_generation(generation)
            if older is None:
                return _from_previous(place, generation)
            ours = older
        return _read_ours(place, store, ours, attributes)
    return _read_foreign(place, store, attributes, ours)


def _gone(place: Place, generation: int) -> StaleSnapshotError:
    return StaleSnapshotError(
        place.where,
        f"generation {generation} is no longer on disk",
        mend="open the store without asking for a generation",
    )


def _from_previous(place: Place, generation: int) -> StoreState:
    """An older generation from the folder that the last rewrite put aside."""
    if place.path is None or not fs.previous_path(place.path).is_dir():
        raise _gone(place, generation)
    aside = fs.previous_path(place.path)
    store = PinnedStore(aside)
    attributes = root_attributes(place, store)
    ours, current = StoreSchema.from_attributes(attributes, where=place.where)
    older = ours.at_generation(generation) if ours is not None and current else None
    if older is None:
        raise _gone(place, generation)
    return _read_ours(place, store, older, attributes)


def _read_ours(
    place: Place, store: Store, schema: StoreSchema, attributes: dict[str, Any]
) -> StoreState:
    if isinstance(store, (PinnedStore, CheckedStore)):
        store.strict = schema.foreign_samples == 0
    if isinstance(store, CheckedStore):
        store.identity = schema.identity
    samples = schema.counts.samples
    atoms_ptr = _read_meta(place, store, layout.ATOMS_PTR, samples + 1)
    edges_ptr = _read_meta(place, store, layout.EDGES_PTR, samples + 1)
    mask = layout.PENDING_MASK if schema.pending_mask else layout.SAMPLES_MASK
    samples_mask = _read_meta(place, store, mask, samples)
    _check_ptr(place, atoms_ptr, layout.ATOMS_PTR, schema.counts.atoms)
    _check_ptr(place, edges_ptr, layout.EDGES_PTR, schema.counts.edges)
    fields = dict(schema.fields)
    declared = attributes.get("fields") or {}
    # Another tool may have added a custom field without changing the counts.
    for group in ("core", "custom"):
        for name, level in (declared.get(group) or {}).items():
            if name not in fields and schema.generation == attributes[KEY]["generation"]:
                fields[name] = _inspect(place, store, name, group, level)
    schema = replace(schema, fields={n: fields[n] for n in field_order(fields)})
    return StoreState(
        place, store, schema, False, None, atoms_ptr, edges_ptr, samples_mask.astype(bool)
    )


def _read_foreign(
    place: Place, store: Store, attributes: dict[str, Any], stale: StoreSchema | None
) -> StoreState:
    """The state of a store that another tool wrote last: its arrays decide."""
    lengths = {
        path: _open(place, store, path).shape[0]
        for path in (layout.ATOMS_PTR, layout.EDGES_PTR, layout.SAMPLES_MASK)
    }
    samples = lengths[layout.SAMPLES_MASK]
    declared_samples = attributes.get("num_samples", samples)
    if not (
        lengths[layout.ATOMS_PTR] == lengths[layout.EDGES_PTR] == samples + 1
        and declared_samples == samples
    ):
        raise CorruptStoreError(
            place.where,
            "the arrays disagree on the number of samples; a writer was probably "
            "killed in an append",
            found=f"num_samples {declared_samples}, samples_mask {samples}, atoms_ptr "
            f"{lengths[layout.ATOMS_PTR]}, edges_ptr {lengths[layout.EDGES_PTR]}",
            expected="both ptrs one longer than samples_mask",
            mend="`alchemi-xr repair` cuts the store back to its last whole sample",
        )
    atoms_ptr = _read_meta(place, store, layout.ATOMS_PTR, samples + 1)
    edges_ptr = _read_meta(place, store, layout.EDGES_PTR, samples + 1)
    samples_mask = _read_meta(place, store, layout.SAMPLES_MASK, samples).astype(bool)
    _check_ptr(place, atoms_ptr, layout.ATOMS_PTR, None)
    _check_ptr(place, edges_ptr, layout.EDGES_PTR, None)
    counts = Counts(samples, int(atoms_ptr[-1]), int(edges_ptr[-1]))
    fields = foreign_fields(place, store, attributes, stale, counts)
    base = stale if stale is not None else StoreSchema()
    others = {k: v for k, v in attributes.items() if k not in (KEY, "num_samples", "fields")}
    kept = {
        k: v for k, v in (attributes.get("fields") or {}).items() if k not in ("core", "custom")
    }
    if kept:
        others["fields"] = kept
    schema = replace(
        base,
        fields=fields,
        counts=counts,
        pending_mask=False,
        foreign_samples=samples,
        others=others,
    )
    return StoreState(place, store, schema, True, stale, atoms_ptr, edges_ptr, samples_mask)


def foreign_fields(
    place: Place,
    store: Store,
    attributes: dict[str, Any],
    stale: StoreSchema | None,
    counts: Counts,
) -> dict[str, FieldInfo]:
    """Fields of a store that another tool wrote, each checked against the counts.

    Raises
    ------
    CorruptStoreError
        An array is shorter than its level: values would stand on other samples.
    """
    declared = attributes.get("fields") or {}
    fields: dict[str, FieldInfo] = {}
    for group in ("core", "custom"):
        levels = declared.get(group) or {}
        names = {*levels, *_members(store, place, group)}
        for name in field_order(names):
            info = _inspect(place, store, name, group, levels.get(name))
            fields[name] = _checked_length(place, store, info, stale, counts)
    if stale is not None:
        for name, info in stale.fields.items():
            if info.is_text and name not in fields:
                fields[name] = _checked_length(place, store, info, stale, counts)
            elif name in fields:
                fields[name] = replace(
                    fields[name],
                    unit=info.unit,
                    since=info.since,
                    holes=info.holes or fields[name].holes,
                )
    return {name: fields[name] for name in field_order(fields)}


def _checked_length(
    place: Place, store: Store, info: FieldInfo, stale: StoreSchema | None, counts: Counts
) -> FieldInfo:
    rows = _open(place, store, info.path).shape[0]
    expected = counts.rows(info.level)
    if rows >= expected:
        return info
    if (
        stale is not None
        and info.group != "core"
        and info.name in stale.fields
        and rows == stale.rows(info.name)
    ):
        # The toolkit's append leaves custom fields and text as they were: rows
        # that we committed are in place, the later samples have none.
        return replace(info, holes=True, rows=rows)
    raise CorruptStoreError(
        place.where,
        f"field {info.name!r} has fewer rows than the samples own, so values of one sample "
        "may stand on another: a writer appended without this field",
        found=f"{rows} rows",
        expected=f"{expected} rows ({info.level})",
        mend=f"`alchemi-xr repair --drop {info.name}` saves the other fields",
    )


def _inspect(place: Place, store: Store, name: str, group: Any, level: str | None) -> FieldInfo:
    """A field as its array and, failing that, the table describe it."""
    path = f"{group}/{name}"
    array = _open(place, store, path)
    kind: Level
    if level is not None and level in ("atom", "edge", "system", "node"):
        kind = canonical_level(level)
    elif name in FIELDS:
        kind = FIELDS[name].level
    else:
        # As the toolkit's own reader has it.
        kind = "atom" if group == "core" else "system"
    is_text = array.dtype.kind in "OUT"
    tail = tuple(int(n) for n in array.shape[1:])
    if kind == "system" and not is_text:
        tail = as_rows(name, np.empty((0, *tail), array.dtype)).shape[1:]
    chosen: Group = "text" if is_text and group == "text" else group
    dtype = TEXT if is_text else array.dtype
    return FieldInfo(name, kind, dtype, tail, chosen, table_unit(name))


def _members(store: Store, place: Place, group: str) -> list[str]:
    async def names() -> list[str]:
        return [key async for key in store.list_dir(place.key(group))]

    found = []
    for name in sorted(wait(names())):
        name = name.rstrip("/")
        document = read_json(store, place.key(f"{group}/{name}/zarr.json")) if name else None
        if document is not None and document.get("node_type") == "array":
            found.append(name)
    return found


def _exists(store: Store, place: Place, path: str) -> bool:
    return bool(wait(store.exists(place.key(f"{path}/zarr.json"))))


def _open(place: Place, store: Store, path: str) -> zarr.Array[Any]:
    try:
        return layout.open_array(store, place.key(path))
    except AlchemiError:
        raise
    except Exception as error:
        if isinstance(store, PinnedStore) and not store.is_whole():
            raise store.missing(path) from error
        if isinstance(store, CheckedStore):
            lost = store.missing(path)
            if isinstance(lost, StaleSnapshotError):
                raise lost from error
        raise CorruptStoreError(
            place.where,
            f"array {path!r} is missing or cannot be opened ({type(error).__name__})",
            mend="restore it from a copy; `alchemi-xr verify` lists all that is missing",
        ) from error


def _read_meta(place: Place, store: Store, path: str, rows: int) -> NDArray:
    array = _open(place, store, path)
    if array.shape[0] < rows:
        raise CorruptStoreError(
            place.where,
            f"array {path!r} is shorter than what is committed",
            found=array.shape[0],
            expected=rows,
        )
    try:
        return np.asarray(array[:rows])
    except (AlchemiError, OSError):
        raise
    except Exception as error:
        raise CorruptStoreError(
            place.where, f"array {path!r} cannot be decoded ({error})"
        ) from error


def _check_ptr(place: Place, ptr: NDArray, path: str, rows: int | None) -> None:
    try:
        validate_ptr(ptr, rows=rows, where=f"{place.where}, {path}")
    except FieldError as error:
        raise CorruptStoreError(
            error.where,
            error.what,
            found=error.found,
            expected=error.expected,
            mend="`alchemi-xr verify` tells what else is wrong",
        ) from error

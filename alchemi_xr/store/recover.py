"""Makes a store ready for a writer: clears what a killed one left behind.

Cut off are rows behind the committed end, arrays that never became fields, and
temporary files; finished is a deletion whose masks were not all written. A
store that another tool wrote to is completed, so that the next commit is ours.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.store import fs, layout
from alchemi_xr.store._compat import wait
from alchemi_xr.store.codecs import ZarrWriteConfig
from alchemi_xr.store.commit import Session
from alchemi_xr.store.locate import DurableStore, Place
from alchemi_xr.store.schema import FieldInfo, StoreSchema
from alchemi_xr.store.state import StoreState, read_state, root_attributes

__all__ = ["Opened", "finish_masks", "leftovers", "open_for_writing"]


@dataclass(frozen=True)
class Opened:
    """A store open for its writer.

    Parameters
    ----------
    session : Session
    schema : StoreSchema
        The committed state; after another tool wrote, what the next commit says.
    attributes : dict
        Root attributes as last seen.
    unsettled : bool
        The root document does not say yet what ``schema`` says.
    """

    session: Session
    schema: StoreSchema
    attributes: dict[str, Any]
    unsettled: bool = False


def open_for_writing(
    place: Place, known: Opened | None, *, took_over: bool, changed: NDArray | None = None
) -> Opened:
    """The store, ready to be written by the holder of its lease.

    Parameters
    ----------
    place : Place
    known : Opened, optional
        From the last call; used again when nobody else committed since.
    took_over : bool
        The lease was a dead owner's.
    changed : int array, optional
        Samples that a pending deletion touches; all when not given.
    """
    if (
        known is not None
        and not took_over
        and not known.schema.pending_mask
        and _same_folder(known, place)
        and _is_unchanged(place, known)
    ):
        return known
    session = Session(place)
    attributes = root_attributes(place, session.store)
    schema, current = StoreSchema.from_attributes(attributes, where=place.where)
    if schema is None or not current:
        state = read_state(place)
        return _adopt(session, state, attributes)
    session.absent_is_fill = schema.foreign_samples > 0
    state_fields = read_undeclared(place, session, schema, attributes)
    schema = replace(schema, fields=state_fields)
    if schema.pending_mask:
        schema, attributes = finish_masks(session, schema, changed)
    clear(session, schema, partials=took_over)
    return Opened(session, schema, attributes)


def _is_unchanged(place: Place, known: Opened) -> bool:
    """Whether the root document is still the one that the last call left."""
    if place.path is not None and known.session.root is not None:
        # Bytes are compared: to understand them takes longer than an append may.
        try:
            return (place.path / "zarr.json").read_bytes() == known.session.root
        except OSError:
            return False
    try:
        attributes = root_attributes(place, known.session.store)
    except (ValueError, OSError):
        return False
    return bool(attributes == json.loads(json.dumps(known.attributes)))


def _same_folder(known: Opened, place: Place) -> bool:
    """Whether the arrays held open are those under the store's name."""
    return known.schema.identity != "" and known.session.place == place


def read_undeclared(
    place: Place, session: Session, schema: StoreSchema, attributes: dict[str, Any]
) -> dict[str, FieldInfo]:
    """Fields of the schema, and those that another tool declared beside them."""
    declared = attributes.get("fields") or {}
    names = {n for group in ("core", "custom") for n in (declared.get(group) or {})}
    if names <= set(schema.fields):
        return schema.fields
    return read_state(place).schema.fields


def finish_masks(
    session: Session,
    schema: StoreSchema,
    changed: NDArray | None,
    *,
    mask: BoolArray | None = None,
) -> tuple[StoreSchema, dict[str, Any]]:
    """Write the masks that other tools read as the pending one says."""
    samples = schema.counts.samples
    if mask is None:
        mask = np.asarray(session.array(layout.PENDING_MASK)[:samples]).astype(bool)
    touched = np.arange(samples) if changed is None else changed
    for path, ptr_path, rows in (
        (layout.ATOMS_MASK, layout.ATOMS_PTR, schema.counts.atoms),
        (layout.EDGES_MASK, layout.EDGES_PTR, schema.counts.edges),
    ):
        session.resize(path, rows)
        if rows:
            ptr = np.asarray(session.array(ptr_path)[: samples + 1])
            session.write_row_mask(path, mask, ptr, touched)
    session.barrier()
    session.resize(layout.SAMPLES_MASK, samples)
    session.write(layout.SAMPLES_MASK, 0, mask)
    settled = replace(schema, pending_mask=False)
    attributes = session.commit(settled)
    session.remove("meta/pending")
    return settled, attributes


def clear(session: Session, schema: StoreSchema, *, partials: bool) -> None:
    """Cut off what is not committed."""
    for path, rows in committed_lengths(schema).items():
        if session.length(path) != rows:
            session.resize(path, rows)
    session.flush()
    for path in leftovers(session, schema):
        session.remove(path)
    if partials and isinstance(session.store, DurableStore):
        for file in fs.partial_files(session.store.root):
            fs.remove_file(file)


def committed_lengths(schema: StoreSchema) -> dict[str, int]:
    """Rows that every array of a store has by its last commit."""
    counts = schema.counts
    lengths = {
        layout.ATOMS_PTR: counts.samples + 1,
        layout.EDGES_PTR: counts.samples + 1,
        layout.SAMPLES_MASK: counts.samples,
        layout.ATOMS_MASK: counts.atoms,
        layout.EDGES_MASK: counts.edges,
    }
    for info in schema.fields.values():
        lengths[info.path] = counts.rows(info.level)
        if info.holes:
            lengths[info.present_path] = counts.samples
    return lengths


def leftovers(session: Session, schema: StoreSchema) -> list[str]:
    """Arrays that a killed writer of ours began and never committed.

    One that another tool put there does not carry our mark and is left alone.
    """
    found = []
    paths = {info.path for info in schema.fields.values()}
    for folder in ("core", "custom", "meta/text"):
        for name in _children(session, folder):
            path = f"{folder}/{name}"
            if path not in paths and session.exists(path):
                born = session.array(path).attrs.get("alchemi_xr_generation")
                if isinstance(born, int) and born > schema.generation:
                    found.append(path)
    holes = {info.name for info in schema.fields.values() if info.holes}
    found += [
        f"meta/present/{name}" for name in _children(session, "meta/present") if name not in holes
    ]
    if not schema.pending_mask and _children(session, "meta/pending"):
        found.append("meta/pending")
    return found


def _children(session: Session, folder: str) -> list[str]:
    async def names() -> list[str]:
        return [name async for name in session.store.list_dir(session.key(folder))]

    found = sorted({name.rstrip("/") for name in wait(names())})
    return [name for name in found if name and name != "zarr.json" and not name.startswith(".")]


def _adopt(session: Session, state: StoreState, attributes: dict[str, Any]) -> Opened:
    """Complete a store that another tool wrote to, so that the next commit is ours."""
    schema, config = state.schema, ZarrWriteConfig()
    session.absent_is_fill = True
    if not schema.identity:
        schema = replace(schema, identity=uuid.uuid4().hex)
    samples = schema.counts.samples
    fields = {}
    for name, info in schema.fields.items():
        done = replace(info, rows=None)
        if info.rows is not None:
            session.extend_filled(info.path, info.rows, schema.rows(name), info.fill)
        if info.holes:
            known = state.present_rows(info)
            if not known:
                session.new_present(done, samples, config)
                session.extend_filled(info.present_path, 0, samples, True)
            if info.rows is not None:
                whole = state.samples_within(info)
                session.extend_filled(info.present_path, max(known, whole), samples, False)
            else:
                session.extend_filled(info.present_path, known, samples, info.group == "core")
        fields[name] = done
    schema = replace(schema, fields=fields, masks_since=schema.generation + 1)
    clear(session, schema, partials=True)
    return Opened(session, schema, attributes, unsettled=True)

"""Tells whether a store is whole, and mends what can be mended.

``verify`` changes nothing. ``repair`` goes back to the last commit: it cuts
off what was never committed and, in stores of another tool, cuts back a torn
append, drops a field that it is told to, and puts edges right where their base
is proven.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.data.fields import resolve
from alchemi_xr.errors import AlchemiError, CorruptStoreError, UnknownFieldError, nearest
from alchemi_xr.store import fs, layout
from alchemi_xr.store._compat import object_keys
from alchemi_xr.store.checksums import check_chunks
from alchemi_xr.store.codecs import as_config
from alchemi_xr.store.commit import Session, row_mask
from alchemi_xr.store.lease import Lease
from alchemi_xr.store.locate import Place, locate
from alchemi_xr.store.reader import Snapshot, open_store
from alchemi_xr.store.recover import committed_lengths, leftovers, open_for_writing
from alchemi_xr.store.remote import absent
from alchemi_xr.store.report import Report
from alchemi_xr.store.rewrite import clear_unfinished, rewrite
from alchemi_xr.store.schema import StoreSchema
from alchemi_xr.store.state import root_attributes

__all__ = ["Report", "repair", "verify"]

_MASK_ROWS = 1 << 20


def verify(store: Any, *, data: bool = False, checksums: bool = False) -> Report:
    """Check the structure of a store.

    Counts, pointers, lengths, masks, edges, and that every chunk of committed
    rows is there.

    Parameters
    ----------
    store : path, dict, zarr store or StorePath
    data, checksums : bool
        Decode every chunk of every array too, several at once, each in a memory
        of its own size; reads the whole store. Chunks that carry a checksum are
        held against it, others are only found damaged when they do not decode.

    Raises
    ------
    StoreNotFoundError, NotAStoreError
        There is no store to check.
    """
    place = locate(store)
    report = Report(place.where)
    try:
        snapshot = open_store(place)
    except CorruptStoreError as error:
        report.problems.append(str(error))
        _torn_arrays(place, report)
        return report
    with snapshot:
        # Between the two renames of a swap the store stands under another name.
        folder = snapshot.folder
        on_disk = place if folder is None else Place(place.where, path=folder)
        session = Session(on_disk, read_only=True)
        if place.path is not None and fs.journal_path(place.path).exists():
            report.leftovers.append("a swap of folders was begun and not finished")
        for check in (_lengths, _chunks, _row_masks, _edges, _leftovers):
            try:
                check(snapshot, session, report)
            except AlchemiError as error:
                report.problems.append(str(error))
        if data or checksums:
            check_chunks(snapshot, session, report)
    report.problems = list(dict.fromkeys(report.problems))
    return report


def _torn_arrays(place: Place, report: Report) -> None:
    """Name all missing chunks of the pointers of a store of ours."""
    session = Session(place, read_only=True)
    ours, current = StoreSchema.from_attributes(
        root_attributes(place, session.store), where=place.where
    )
    if ours is None or not current or ours.foreign_samples:
        return
    for path in (layout.ATOMS_PTR, layout.EDGES_PTR, layout.SAMPLES_MASK):
        try:
            array = session.array(path)
        except Exception as error:
            report.problems.append(f"array {path!r} cannot be opened ({type(error).__name__})")
            continue
        report.problems += _missing(place, path, object_keys(array, 0, array.shape[0]), session)


def _lengths(snapshot: Snapshot, session: Session, report: Report) -> None:
    for path, rows in committed_lengths(snapshot.schema).items():
        if _short_on_purpose(snapshot, path):
            continue
        try:
            found = session.length(path)
        except Exception as error:
            report.problems.append(
                f"array {path!r} is missing or cannot be opened ({type(error).__name__})"
            )
            continue
        if found < rows:
            report.problems.append(f"array {path!r} has {found} rows, {rows} are committed")
        elif found > rows:
            report.leftovers.append(f"{found - rows} uncommitted rows at the end of {path!r}")


def _short_on_purpose(snapshot: Snapshot, path: str) -> bool:
    """Whether another tool appended without this array and we know what that means."""
    return snapshot.is_foreign and any(
        path == info.present_path or (path == info.path and info.rows is not None)
        for info in snapshot.schema.fields.values()
    )


def _chunks(snapshot: Snapshot, session: Session, report: Report) -> None:
    if snapshot.schema.foreign_samples or session.place.in_memory:
        # Other tools leave chunks of fill alone out, so a missing one says nothing.
        return
    for path, rows in committed_lengths(snapshot.schema).items():
        if session.exists(path):
            keys = object_keys(session.array(path), 0, rows)
            report.problems += _missing(session.place, path, keys, session)


def _missing(place: Place, path: str, keys: Iterable[str], session: Session) -> list[str]:
    if place.path is not None:
        lost = [key for key in keys if not os.path.exists(place.path / path / key)]
    else:
        full = {place.key(f"{path}/{key}"): key for key in keys}
        lost = [full[name] for name in absent(session.store, full)]
    return [f"chunk {key.removeprefix('c/')!r} of array {path!r} is missing" for key in lost]


def _row_masks(snapshot: Snapshot, session: Session, report: Report) -> None:
    mask = snapshot.samples_mask
    if snapshot.schema.pending_mask:
        report.leftovers.append("a deletion is committed, and the masks for other tools lag behind")
        return
    for path, ptr in (
        (layout.ATOMS_MASK, snapshot.atoms_ptr),
        (layout.EDGES_MASK, snapshot.edges_ptr),
    ):
        array = session.array(path)
        for start in range(0, int(ptr[-1]), _MASK_ROWS):
            stop = min(start + _MASK_ROWS, int(ptr[-1]))
            found = np.asarray(array[start:stop]).astype(bool)
            wanted = row_mask(mask, ptr, start, stop)
            if len(found) == len(wanted) and not np.array_equal(found, wanted):
                row = start + int(np.flatnonzero(found != wanted)[0])
                sample = int(np.searchsorted(ptr, row, side="right")) - 1
                report.problems.append(
                    f"{path!r} and {layout.SAMPLES_MASK!r} disagree on sample {sample}"
                )
                break


def _edges(snapshot: Snapshot, session: Session, report: Report) -> None:
    if "neighbor_list" not in snapshot:
        return
    if snapshot.schema.foreign_samples:
        bases = snapshot.edge_bases()
        if bases.unknown.size:
            report.problems.append(
                f"edges of {bases.unknown.size} samples have no provable base "
                f"(the first is sample {int(bases.unknown[0])}); another tool appended them"
            )
        moved = np.setdiff1d(bases.moved(snapshot.atoms_ptr), bases.unknown)
        if moved.size:
            report.notices.append(
                f"edges of {moved.size} samples have a wrong base on disk, which is proven and "
                "put right in reading; repair writes them anew"
            )
    start = snapshot.schema.foreign_samples
    edges = snapshot.edges_ptr
    while start < snapshot.num_samples:
        stop = int(np.searchsorted(edges, edges[start] + _MASK_ROWS, side="right")) - 1
        stop = min(max(stop, start + 1), snapshot.num_samples)
        begin, end = int(edges[start]), int(edges[stop])
        if end > begin:
            pairs = snapshot.read_rows("neighbor_list", begin, end)
            sample = start + ptr_to_index(edges[start : stop + 1] - begin)
            low, high = snapshot.atoms_ptr[sample], snapshot.atoms_ptr[sample + 1]
            wrong = ((pairs < low[:, None]) | (pairs >= high[:, None])).any(axis=1)
            if wrong.any():
                report.problems.append(
                    f"neighbor_list of sample {int(sample[wrong][0])} names atoms of others"
                )
                return
        start = stop


def _leftovers(snapshot: Snapshot, session: Session, report: Report) -> None:
    if not snapshot.is_foreign:
        report.leftovers += [
            f"array {path!r} was begun and never committed"
            for path in leftovers(session, snapshot.schema)
        ]
    path = session.place.path
    if path is None:
        return
    partials = fs.partial_files(path)
    if partials:
        report.leftovers.append(f"{len(partials)} temporary files of a killed writer")
    prefix = fs.unfinished_prefix(path)
    report.leftovers += [
        f"unfinished rewrite {name!r} beside the store"
        for name in sorted(os.listdir(path.parent))
        if name.startswith(prefix)
    ]


# -- repair ------------------------------------------------------------------


def repair(store: Any, *, drop: Iterable[str] = ()) -> Report:
    """Bring a store back to its last commit, and report what is left.

    Parameters
    ----------
    store : path, dict, zarr store or StorePath
    drop : names
        Fields to remove because their rows cannot be trusted (see ``verify``).

    Raises
    ------
    StoreNotFoundError, NotAStoreError, StoreLockedError
    CorruptStoreError
        What is wrong cannot be mended from what is there; nothing was changed.
    UnknownFieldError
        A field to drop is not there.
    """
    place = locate(store)
    if isinstance(drop, str):
        drop = [drop]
    with Lease(place):
        if place.path is not None:
            fs.finish_swap(place.path)
            if place.path.is_dir():
                clear_unfinished(place.path)
        session = Session(place)
        attributes = root_attributes(place, session.store)
        _drop_fields(place, session, attributes, [resolve(name) for name in drop])
        try:
            state = open_for_writing(place, None, took_over=True)
        except CorruptStoreError:
            if not _cut_back(place, session):
                raise
            state = open_for_writing(place, None, took_over=True)
        if state.unsettled:
            state.session.commit(state.schema.next("repair"))
        _put_edges_right(place)
    return verify(place)


def _drop_fields(
    place: Place, session: Session, attributes: dict[str, Any], names: list[str]
) -> None:
    """Take fields out of the root document, then remove their arrays."""
    declared = attributes.get("fields") or {}
    ours = attributes.get("alchemi_xr") or {}
    for name in names:
        groups = [g for g in ("core", "custom") if name in (declared.get(g) or {})]
        text = name in (ours.get("fields") or {}) and not groups
        if not groups and not text:
            known = [n for g in ("core", "custom") for n in (declared.get(g) or {})]
            raise UnknownFieldError(place.where, f"no field {name!r}. {nearest(name, known)}")
        for group in groups:
            del declared[group][name]
        (ours.get("fields") or {}).pop(name, None)
        session.write_root(attributes)
        for path in (*(f"{g}/{name}" for g in groups), f"meta/text/{name}", f"meta/present/{name}"):
            if session.exists(path):
                session.remove(path)


def _cut_back(place: Place, session: Session) -> bool:
    """Undo an append that another tool did not finish; False when it was not that.

    That tool changes ``num_samples`` last, so it tells the samples of before.
    They are kept if every array still has their rows.
    """
    attributes = root_attributes(place, session.store)
    samples = attributes.get("num_samples")
    if not isinstance(samples, int):
        return False
    lengths = {
        path: session.array(path).shape[0]
        for path in (layout.ATOMS_PTR, layout.EDGES_PTR, layout.SAMPLES_MASK)
    }
    whole = (
        lengths[layout.SAMPLES_MASK] >= samples
        and min(lengths[layout.ATOMS_PTR], lengths[layout.EDGES_PTR]) > samples
    )
    torn = lengths[layout.SAMPLES_MASK] != samples or any(
        lengths[p] != samples + 1 for p in (layout.ATOMS_PTR, layout.EDGES_PTR)
    )
    if not (whole and torn):
        return False
    rows = {
        "atom": int(np.asarray(session.array(layout.ATOMS_PTR)[samples])),
        "edge": int(np.asarray(session.array(layout.EDGES_PTR)[samples])),
        "system": samples,
    }
    for group, fields in (attributes.get("fields") or {}).items():
        if group not in ("core", "custom"):
            continue
        for name, level in fields.items():
            if session.array(f"{group}/{name}").shape[0] < rows[level]:
                return False
    for path in (layout.ATOMS_PTR, layout.EDGES_PTR):
        session.resize(path, samples + 1)
    session.resize(layout.SAMPLES_MASK, samples)
    session.flush()
    return True


def _put_edges_right(place: Place) -> None:
    """Write a store anew when the edges of another tool have wrong, provable bases."""
    with open_store(place) as snapshot:
        bases = snapshot.edge_bases()
        wrong = bases.moved(snapshot.atoms_ptr).size
        if not wrong or bases.unknown.size:
            return
    if place.path is not None or place.in_memory:
        rewrite(place, as_config(None), operation="repair", keep_deleted=True)

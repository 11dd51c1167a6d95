"""From one place to another: a store object by object, or its samples anew.

The root document is put last, so what is half copied is no store yet, wherever
the destination lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from alchemi_xr.errors import StoreError, StoreExistsError
from alchemi_xr.store import fs
from alchemi_xr.store._compat import buffer_prototype, read_json, wait
from alchemi_xr.store.codecs import ZarrWriteConfig
from alchemi_xr.store.commit import Session
from alchemi_xr.store.lease import LEASE_OBJECT, Lease
from alchemi_xr.store.locate import Place, locate
from alchemi_xr.store.reader import Snapshot, open_store
from alchemi_xr.store.recover import committed_lengths
from alchemi_xr.store.rewrite import clear, copy_samples
from alchemi_xr.store.schema import KEY

__all__ = ["building", "check_free", "copy_store", "rewrite_to"]

_COPIED_AT_ONCE = 16
_PARTS = ("meta", "core", "custom")


# -- a place for a new store -------------------------------------------------


def check_free(place: Place, *, overwrite: bool) -> None:
    """Refuse a place, which is no folder, where a new store may not be made.

    Raises
    ------
    StoreExistsError
        A store is there, or anything else.
    """
    mend = "give another place, or overwrite=True to replace a store"
    root = read_json(place.current(), place.key("zarr.json"))
    if root is not None and not _is_unfinished(root):
        if place.is_remote:
            raise StoreExistsError(
                place.where,
                "already exists, and an object store cannot replace a store in one step: readers "
                "would see the old and the new one mixed",
                mend="write to another prefix, remove this one yourself when nobody reads it, or "
                "use an Icechunk repository",
            )
        if not overwrite:
            raise StoreExistsError(place.where, "already exists", mend=mend)
    if root is None and place.is_remote:
        others = _others(place)
        if others:
            raise StoreExistsError(
                place.where,
                f"already exists: no store, but other objects (such as {others[0]!r})",
                mend="give a prefix where nothing is",
            )


def _is_unfinished(root: dict[str, Any]) -> bool:
    """Whether a root document is that of a write that was killed."""
    attributes = root.get("attributes") or {}
    return "building" in (attributes.get(KEY) or {}) and "num_samples" not in attributes


def _others(place: Place) -> list[str]:
    async def names() -> list[str]:
        return [name async for name in place.current().list_dir(place.prefix)]

    found = sorted(name.rstrip("/") for name in wait(names()))
    return [name for name in found if name and not name.startswith(LEASE_OBJECT)]


@contextlib.contextmanager
def building(place: Place, *, overwrite: bool = False) -> Iterator[None]:
    """Make a store at a place that is no folder; the caller holds its lease.

    What a killed write left there goes first; what fails here leaves nothing.
    """
    there = read_json(place.current(), place.key("zarr.json")) is not None
    if there or overwrite:
        clear(place)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            clear(place)
        raise


# -- copies ------------------------------------------------------------------


def rewrite_to(
    source: Place, dest: Any, config: ZarrWriteConfig, *, storage_options: Any = None
) -> None:
    """A new store of the samples that are not deleted; the source stays as it is.

    Raises
    ------
    StoreExistsError
        Something is at the destination.
    """
    target = locate(dest, storage_options=storage_options)
    with open_store(source) as snapshot, _new(target) as place:
        copy_samples(snapshot, snapshot.active, place, config)


@contextlib.contextmanager
def _new(target: Place) -> Iterator[Place]:
    """Where to build a new store that appears at the target when all went well."""
    if target.repository is not None:
        target.repository.create()
    if target.path is None:
        check_free(target, overwrite=False)
    elif os.path.lexists(target.path):
        raise StoreExistsError(target.where, "already exists", mend="give another path")
    with Lease(target):
        if target.path is None:
            check_free(target, overwrite=False)
            with building(target):
                yield target
            return
        built = fs.unfinished_path(target.path)
        try:
            yield Place(target.where, path=built)
            fs.publish(built, target.path)
        except BaseException:
            fs.remove_tree(built)
            raise


def copy_store(
    source: Any,
    dest: Any,
    *,
    storage_options: dict[str, Any] | None = None,
    source_options: dict[str, Any] | None = None,
) -> Snapshot:
    """Copy a store, object by object, to a place where nothing is.

    Chunks are not decoded, and deleted samples stay in it. What readers of the
    destination see is nothing, then the whole store.

    Parameters
    ----------
    source, dest : str, Path, dict, zarr store, StorePath or Icechunk Repository
    storage_options : dict, optional
        For the destination.
    source_options : dict, optional
        For the source.

    Returns
    -------
    Snapshot
        The copy.

    Raises
    ------
    StoreNotFoundError, NotAStoreError
        There is no store to copy.
    StoreExistsError
        Something is at the destination.
    StoreError
        The store was changed by a deletion or rewrite while it was copied, or
        another tool wrote it last.
    """
    target = locate(dest, storage_options=storage_options)
    with open_store(source, storage_options=source_options) as snapshot, _new(target) as place:
        if snapshot.schema.pending_mask or snapshot.is_foreign:
            raise StoreError(
                snapshot.where,
                "another tool wrote to this store last, or a deletion was interrupted",
                mend="`alchemi-xr repair` settles it; then copy",
            )
        _copy_objects(snapshot, place)
    return open_store(target)


def _copy_objects(snapshot: Snapshot, place: Place) -> None:
    source = snapshot.place
    held = snapshot.store
    if place.path is not None:
        place.path.mkdir(parents=True)
    session = Session(place)
    paths = list(committed_lengths(snapshot.schema))

    async def keys() -> list[str]:
        found = []
        for path in paths:
            prefix = source.key(path)
            found += [key async for key in held.list_prefix(f"{prefix}/")]
        found += [source.key(f"{part}/zarr.json") for part in _PARTS]
        return list(dict.fromkeys(found))

    async def copy(key: str, gate: asyncio.Semaphore) -> None:
        async with gate:
            value = await held.get(key, buffer_prototype())
            if value is not None:
                name = key[len(source.prefix) + 1 :] if source.prefix else key
                await session.store.set(place.key(name), value)

    async def copy_all() -> None:
        gate = asyncio.Semaphore(_COPIED_AT_ONCE)
        found = await keys()
        # Icechunk takes a chunk only of an array that it knows, so metadata goes first.
        metadata = [key for key in found if key.endswith("zarr.json")]
        for key in sorted(metadata, key=lambda key: key.count("/")):
            await copy(key, gate)
        chunks = [key for key in found if not key.endswith("zarr.json")]
        await asyncio.gather(*(copy(key, gate) for key in chunks))

    wait(copy_all())
    with snapshot.refresh() as newest:
        before, after = snapshot.schema, newest.schema
        if (before.identity, before.masks_since) != (after.identity, after.masks_since):
            raise StoreError(
                snapshot.where,
                "samples were deleted, or the store was rewritten, while it was copied",
                mend="copy it again",
            )
    # Rows that were appended meanwhile may be in the copy; the counts leave them out.
    session.commit(snapshot.schema)

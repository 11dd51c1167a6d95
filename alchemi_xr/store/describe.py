"""What a store holds and how it lies on disk, as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemi_xr.store import fs
from alchemi_xr.store._compat import chunk_rows_of, object_rows_of, stored_bytes
from alchemi_xr.store.reader import Snapshot, open_store
from alchemi_xr.store.schema import FieldInfo

__all__ = ["describe"]


def describe(store: Any) -> dict[str, Any]:
    """Counts, fields, chunks, codecs, sizes, provenance and history of a store.

    Parameters
    ----------
    store : path, URL, dict, zarr store, StorePath or Snapshot

    Returns
    -------
    dict
        ``samples``, ``atoms`` and ``edges`` count what is not deleted; sizes are
        of all committed rows. ``ratio`` is raw bytes over stored ones.
    """
    if isinstance(store, Snapshot):
        return _describe(store)
    with open_store(store) as snapshot:
        return _describe(snapshot)


def _describe(snapshot: Snapshot) -> dict[str, Any]:
    mask = snapshot.samples_mask
    fields = {name: _field(snapshot, snapshot.info(name)) for name in snapshot.fields}
    raw = sum(entry["raw_bytes"] for entry in fields.values())
    stored = [entry["stored_bytes"] for entry in fields.values()]
    whole = sum(stored) if None not in stored else None
    schema = snapshot.schema
    return {
        "store": snapshot.where,
        "samples": int(mask.sum()),
        "deleted": int((~mask).sum()),
        "atoms": int(np.diff(snapshot.atoms_ptr)[mask].sum()),
        "edges": int(np.diff(snapshot.edges_ptr)[mask].sum()),
        "generation": snapshot.generation,
        "foreign": snapshot.is_foreign,
        "fields": fields,
        "raw_bytes": raw,
        "stored_bytes": whole,
        "ratio": _ratio(raw, whole),
        "encoding": dict(schema.encoding),
        "provenance": dict(schema.provenance),
        "history": [dict(entry) for entry in schema.history],
    }


def _field(snapshot: Snapshot, info: FieldInfo) -> dict[str, Any]:
    present = snapshot.present(info.name)
    mask = snapshot.samples_mask
    carried = mask if present is None else mask & present
    array = snapshot.array(info.name)
    raw = snapshot.schema.rows(info.name) * info.row_bytes
    stored = _stored(snapshot, info.path)
    return {
        "level": info.level,
        "dtype": "text" if info.is_text else info.dtype.name,
        "row": list(info.tail),
        "unit": info.unit,
        "group": info.group,
        "samples": int(carried.sum()),
        "holes": 0 if present is None else int((mask & ~present).sum()),
        "chunk_rows": chunk_rows_of(array),
        "shard_rows": object_rows_of(array) if array.shards is not None else None,
        "codecs": _codecs(array.metadata.to_dict()),
        "raw_bytes": raw,
        "stored_bytes": stored,
        "ratio": _ratio(raw, stored),
    }


def _stored(snapshot: Snapshot, path: str) -> int | None:
    """Bytes that an array takes; None where the place cannot tell."""
    folder = snapshot.folder
    if folder is None:
        return stored_bytes(snapshot.place.store, snapshot.place.key(path))
    return fs.tree_bytes(folder / path)


def _ratio(raw: int, stored: int | None) -> float | None:
    return None if not stored else round(raw / stored, 3)


def _codecs(document: dict[str, Any]) -> list[str]:
    """The chain of an array's codecs by name, with what matters of their settings."""
    out = []
    codecs: Any = document.get("codecs", [])
    for codec in codecs:
        settings = codec.get("configuration") or {}
        if codec["name"] == "sharding_indexed":
            out += [_short(c) for c in settings["codecs"] if c["name"] != "bytes"]
        elif codec["name"] not in ("bytes", "vlen-utf8"):
            out.append(_short(codec))
    return out


def _short(codec: dict[str, Any]) -> str:
    settings = codec.get("configuration") or {}
    name = codec["name"].removeprefix("numcodecs.")
    said = [
        str(settings[key])
        for key in ("cname", "clevel", "level", "shuffle", "keepbits", "elementsize")
        if settings.get(key) is not None
    ]
    return f"{name}({', '.join(said)})" if said else name

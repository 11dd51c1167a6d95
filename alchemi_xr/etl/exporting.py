"""A store out to a format of other tools: streamed in blocks, published in one step.

The file is built beside its destination and renamed when it is whole. Deleted
samples are left out, memory is bounded by the block, and the report names what
the format cannot hold.
"""

from __future__ import annotations

import dataclasses
import glob
import inspect
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from alchemi_xr._typing import PathLike
from alchemi_xr.data.block import Block
from alchemi_xr.errors import AlchemiError, ConfigError, FieldError, StoreError, StoreExistsError
from alchemi_xr.plan.plan import format_bytes
from alchemi_xr.plan.progress import Progress, open_progress
from alchemi_xr.registry import exports
from alchemi_xr.store import fs
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["Export", "ExportReport", "export"]

_BLOCK_BYTES = 32 * 2**20


@runtime_checkable
class Export(Protocol):
    """One format of output.

    A class with a ``name``, registered in the entry-point group
    ``alchemi_xr.exports``. ``lost`` and ``notes`` are filled by ``begin`` and
    ``write``: by field, what the format cannot hold; and what changed on the way.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    lost: dict[str, str]
    notes: list[str]

    def __init__(self, **options: Any) -> None: ...

    @classmethod
    def owns(cls, path: str) -> bool:
        """Whether what is there looks like this format, so that it may be replaced."""
        ...

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Look at what is to be written; nothing of it need be there yet."""
        ...

    def write(self, block: Block) -> None:
        """Whole samples, in their order."""
        ...

    def finish(self) -> None:
        """Close the target: after it, the file or folder is whole."""
        ...

    def abort(self) -> None:
        """Let go of what is open, after an error (also one in ``begin``)."""
        ...


@dataclass
class ExportReport:
    """Result of :func:`export`.

    Parameters
    ----------
    destination, format : str
    samples, atoms : int
    fields : list of str
        What was written.
    lost : dict of str to str
        By field: what the format cannot hold.
    notes : list of str
    output_bytes : int
    seconds : float
    """

    destination: str
    format: str
    samples: int
    atoms: int
    fields: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    output_bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> str:
        """All of it, for programs."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1)

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.destination}: {self.samples:,} samples written ({self.atoms:,} atoms, "
            f"{self.format}, {format_bytes(self.output_bytes)}); {self.seconds:.1f} s"
        )

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += [f"  not held: {name}: {why}" for name, why in self.lost.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def export(
    store: Any,
    dest: PathLike,
    *,
    format: str | None = None,
    fields: Iterable[str] | None = None,
    samples: Any = None,
    overwrite: bool = False,
    block_bytes: int = _BLOCK_BYTES,
    progress: bool | Progress = True,
    options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write the samples of a store to a file (or folder) of another format.

    Parameters
    ----------
    store : path, URL or Snapshot
    dest : path
        Appears in one step, when all is written.
    format : str, optional
        Name of an export; by default that of the suffix of ``dest``.
    fields : names, optional
        What is written beside positions and atomic numbers; all by default.
    samples : int, slice, ints or mask, optional
        Physical positions; by default all that are not deleted.
    overwrite : bool
        Replace what is there, if it is of this format.
    block_bytes : int
        Samples of about so many bytes are held at a time.
    progress : bool or Progress
    options : dict, optional
        Further arguments of the export.

    Raises
    ------
    ConfigError, StoreExistsError, FieldError, StoreNotFoundError, StoreError
        Nothing is left at ``dest`` that was not there before.

    Examples
    --------
    >>> export("train.zarr", "train.extxyz")  # doctest: +SKIP
    """
    begun = time.perf_counter()
    snapshot = store if isinstance(store, Snapshot) else open_store(store)
    target = Path(os.path.expanduser(os.fspath(dest)))
    taken = dict(options or {})
    kind = exports.get(format) if format is not None else _by_suffix(target, taken)
    try:
        inspect.signature(kind).bind(**taken)
    except TypeError as error:
        raise ConfigError(
            "options", f"the export {kind.name!r} does not take them ({error})", found=sorted(taken)
        ) from error
    _check_free(target, kind, overwrite)
    names = _fields(snapshot, fields)
    index = snapshot.active if samples is None else _chosen(snapshot, samples)
    writer = kind(**taken)
    # In the folder of its destination, so that the last step is a rename.
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    total_samples = total_atoms = 0
    try:
        with open_progress(progress) as shown:
            shown.start("export", len(index), "samples")
            writer.begin(snapshot, index, names, partial)
            for block in snapshot.iter_blocks(fields=names, samples=index, max_bytes=block_bytes):
                writer.write(block)
                total_samples += block.num_samples
                total_atoms += block.num_atoms
                shown.advance(block.num_samples)
            writer.finish()
        _publish(partial, target)
    except BaseException as error:
        with suppress(Exception):
            writer.abort()
        if isinstance(error, OSError) and not isinstance(error, AlchemiError):
            raise StoreError(
                str(target),
                f"could not be written ({error.strerror or error})",
                mend="remove the cause (a full disk?) and run it again",
            ) from error
        raise
    finally:
        for left in target.parent.glob(glob.escape(partial.name) + "*"):
            _remove(left)
    return ExportReport(
        os.fspath(dest),
        kind.name,
        total_samples,
        total_atoms,
        [n for n in names if n not in writer.lost],
        dict(writer.lost),
        list(dict.fromkeys(writer.notes)),
        fs.tree_bytes(target) if target.is_dir() else target.stat().st_size,
        time.perf_counter() - begun,
    )


def _by_suffix(target: Path, options: dict[str, Any]) -> Any:
    name = target.name.lower()
    for known in exports.names():
        kind = exports.get(known)
        if name.endswith(kind.suffixes):
            return kind
    kind = exports.get("ase")
    guess = options.get("ase_format") or kind.format_of(target)
    if guess is not None:
        options["ase_format"] = guess
        return kind
    raise ConfigError(
        str(target),
        "no export is known by this suffix",
        mend="give format= (--format), one of: " + ", ".join(exports.names()),
    )


def _check_free(target: Path, kind: Any, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise ConfigError(str(target), "its folder does not exist", mend="make the folder first")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise StoreExistsError(
            str(target), "already exists", mend="give another path, or overwrite=True (--overwrite)"
        )
    if target.is_dir() and not kind.owns(os.fspath(target)):
        raise StoreExistsError(
            str(target),
            f"is there and is not of the format {kind.name!r}, so it is not replaced",
            mend="give another path, or move what is there away yourself",
        )


def _fields(snapshot: Snapshot, fields: Iterable[str] | None) -> list[str]:
    for name in ("atomic_numbers", "positions"):
        if name not in snapshot:
            raise FieldError(snapshot.where, f"the store has no {name}")
    if fields is None:
        return list(snapshot.fields)
    asked = [fields] if isinstance(fields, str) else list(fields)
    chosen = {snapshot.info(name).name for name in asked} | {"atomic_numbers", "positions"}
    return [name for name in snapshot.fields if name in chosen]


def _chosen(snapshot: Snapshot, samples: Any) -> Any:
    from alchemi_xr.data.csr import as_index

    return as_index(samples, snapshot.num_samples, where=snapshot.where)


def _publish(partial: Path, target: Path) -> None:
    if partial.is_dir():
        fs.fsync_tree(partial)
    else:
        fs.fsync_file(partial)
    old = None
    if target.is_dir() and not target.is_symlink():
        old = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
        if not fs.exchange(partial, target):
            os.rename(target, old)
            os.rename(partial, target)
    else:
        os.replace(partial, target)
    fs.fsync_dir(target.parent)
    if old is not None:
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        fs.remove_tree(path)
    elif os.path.lexists(path):
        os.unlink(path)

"""ASE databases: SQLite and JSON through ASE, LMDB (``.aselmdb``) written directly."""

from __future__ import annotations

import errno
import json
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.etl.ase_atoms import AseSample, ase_limits, iter_samples
from alchemi_xr.store.reader import Snapshot

__all__ = ["AseDbExport", "AseLmdbExport"]

_ROW_KEYS = ("momenta", "atomic_masses", "tags", "initial_magmoms", "initial_charges")
_RENAMED = {"atomic_masses": "masses"}
# LMDB maps its file; only what is written takes space.
_MAP_BYTES = 1 << 40


class AseDbExport:
    """Rows of an ASE database; one transaction, so a half-written one is never seen."""

    name: ClassVar[str] = "ase-db"
    suffixes: ClassVar[tuple[str, ...]] = (".db",)

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self._database: Any = None

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder never is."""
        return False

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Open the database."""
        from ase.db import connect

        self.lost, self.notes = ase_limits(snapshot, fields)
        self.notes += _levels(snapshot, samples, fields)
        target.touch()
        target.unlink()
        self._database = connect(target, type="db", append=False, use_lock_file=False)
        self._database.__enter__()

    def write(self, block: Block) -> None:
        """One row a sample; what is no result goes to the row's data."""
        for sample in iter_samples(block, self.lost):
            rest = dict(sample.info)
            arrays = sample.arrays
            sample.info = {}
            sample.arrays = {n: v for n, v in arrays.items() if n in _ROW_KEYS}
            rest |= {n: v for n, v in arrays.items() if n not in _ROW_KEYS}
            with _of_the_medium(sqlite3.Error):
                self._database.write(sample.to_atoms(), data=rest)

    def finish(self) -> None:
        """Commit."""
        with _of_the_medium(sqlite3.Error):
            self._database.__exit__(None, None, None)

    def abort(self) -> None:
        """Roll back."""
        if self._database is not None and self._database.connection is not None:
            self._database.__exit__(RuntimeError, None, None)


class AseLmdbExport:
    """Rows of an ASE LMDB database, the form of OMat24 and OMol25.

    Parameters
    ----------
    level : int
        Of zlib.
    """

    name: ClassVar[str] = "aselmdb"
    suffixes: ClassVar[tuple[str, ...]] = (".aselmdb",)

    def __init__(self, *, level: int = 1) -> None:
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self.level = level
        self._next = 1
        self._environment: Any = None
        self._error: type[Exception] = OSError

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder never is."""
        return False

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Make the file."""
        lmdb = import_optional("lmdb", extra="etl", why=str(target))
        self.lost, self.notes = ase_limits(snapshot, fields)
        self.notes += _levels(snapshot, samples, fields)
        self._error = lmdb.Error
        self._environment = lmdb.open(
            str(target), map_size=_MAP_BYTES, subdir=False, lock=False, meminit=False, sync=False
        )

    def write(self, block: Block) -> None:
        """One transaction a block."""
        with _of_the_medium(self._error), self._environment.begin(write=True) as transaction:
            for sample in iter_samples(block, self.lost):
                row = _row(sample, self._next)
                packed = zlib.compress(json.dumps(row).encode(), self.level)
                transaction.put(str(self._next).encode(), packed)
                self._next += 1
            self._count(transaction)

    def finish(self) -> None:
        """Write the count, and close."""
        with _of_the_medium(self._error):
            with self._environment.begin(write=True) as transaction:
                self._count(transaction)
            self._environment.sync(True)
        self._environment.close()

    def abort(self) -> None:
        """Close the file."""
        if self._environment is not None:
            self._environment.close()

    def _count(self, transaction: Any) -> None:
        for key, value in ((b"nextid", self._next), (b"deleted_ids", []), (b"metadata", {})):
            transaction.put(key, zlib.compress(json.dumps(value).encode()))


@contextmanager
def _of_the_medium(kind: type[Exception]) -> Iterator[None]:
    """What a database says of a full disk, as the system would."""
    try:
        yield
    except kind as error:
        raise OSError(errno.EIO, str(error)) from error


def _levels(snapshot: Snapshot, samples: Any, fields: list[str]) -> list[str]:
    """A row's data has no levels: lengths tell them, unless all samples are of one size."""
    counts = np.diff(snapshot.atoms_ptr)[samples]
    custom = [
        n for n in fields if snapshot.level(n) == "atom" and n not in FIELDS and n not in _ROW_KEYS
    ]
    if not custom or len(np.unique(counts)) > 1:
        return []
    return [
        "all samples are of one size, so nothing in a row tells that these are fields of atoms: "
        + ", ".join(custom)
    ]


def _row(sample: AseSample, identity: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "numbers": _array(np.asarray(sample.numbers, dtype=np.int64)),
        "positions": _array(sample.positions),
        "unique_id": f"{identity:032x}",
        "cell": _array(sample.cell),
        "pbc": _array(np.asarray(sample.pbc)),
        "ctime": 0.0,
        "mtime": 0.0,
        "user": None,
        "key_value_pairs": {},
    }
    if sample.results:
        row |= {"calculator": "unknown", "calculator_parameters": {}}
        row |= {n: _array(v) if isinstance(v, np.ndarray) else v for n, v in sample.results.items()}
    data: dict[str, Any] = {}
    for name, values in sample.arrays.items():
        if name in _ROW_KEYS:
            row[_RENAMED.get(name, name)] = _array(values)
        else:
            data[name] = _array(values)
    for name, value in sample.info.items():
        data[name] = _array(value) if isinstance(value, np.ndarray) else value
    row["data"] = data
    return row


def _array(values: Any) -> dict[str, Any]:
    return {"__ndarray__": [list(values.shape), values.dtype.name, values.ravel().tolist()]}

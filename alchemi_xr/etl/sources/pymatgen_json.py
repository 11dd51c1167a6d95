"""JSON files of structures in pymatgen's form: MatPES, MPtrj, mlearn, lists of structures.

Files are read record by record, whatever their size; ``.gz`` is unpacked first, so
that a task can begin anywhere.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from typing import Any, ClassVar

import numpy as np

from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl.ase_records import fault_of
from alchemi_xr.etl.json_index import iter_records, record_depth
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.pymatgen_records import RecordFault, StressForm, to_record
from alchemi_xr.etl.records import Record, records_to_block
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, no_edges, pack, plain_map
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["PymatgenJsonSource"]

_ORDERS = {"voigt": (0, 1, 2, 3, 4, 5), "vasp": (0, 1, 2, 4, 5, 3)}


class PymatgenJsonSource:
    """Structures in JSON, with energies, forces and what else stands beside them.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    stress : str, optional
        Unit and sign of the stresses, which such files do not say: ``"-kbar"`` for what
        VASP prints. Without it they are kept as they stand, under a name of their own.
    stress_order : {"voigt", "vasp"}
        Of six numbers: xx yy zz yz xz xy, or xx yy zz xy yz zx.
    partition_bytes : int
    spool : str, optional
        Folder in which compressed files are unpacked.
    """

    name: ClassVar[str] = "pymatgen-json"

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        stress: str | None = None,
        stress_order: str = "voigt",
        partition_bytes: int = 16 * 2**20,
        spool: str | None = None,
    ) -> None:
        if stress_order not in _ORDERS:
            raise ConfigError(
                "stress_order", "not known", found=stress_order, expected=", ".join(_ORDERS)
            )
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.stress = None if stress is None else StressForm(stress)
        self.order = _ORDERS[stress_order]
        self.partition_bytes = partition_bytes
        self._spool = spool
        self.schema: Schema | None = None

    @classmethod
    def matches(cls, path: str) -> bool:
        """A JSON file in whose beginning there are sites; not a database of ASE's."""
        name = path.lower()
        if not name.removesuffix(".gz").endswith((".json", ".jsonl")):
            return False
        try:
            with gzip.open(path) if name.endswith(".gz") else open(path, "rb") as file:
                head = file.read(256 * 1024)
        except (OSError, EOFError, zlib.error):
            return False
        return b'"sites"' in head and b'"numbers"' not in head

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Read every record once, for its counts and fields."""
        damage: list[Reject] = []
        for number, path in enumerate(self.paths):
            if path.lower().endswith(".gz"):
                damage += self._unpack(number)
        results = map_files(_scan_file, [(self, i) for i in range(len(self.paths))])
        observer, keys, unstored = FieldObserver(), Counter[str](), Counter[str]()
        for result in results:
            observer.merge(result["observer"])
            keys.update(result["keys"])
            unstored.update(result["unstored"])
        self.schema = observer.schema(self.paths[0])
        notes = [f"{n!r} is not stored ({c} records)" for n, c in sorted(unstored.items())]
        notes += [f"{n!r} is not stored: {why}" for n, why in self.schema.dropped.items()]
        notes += self._assumed(keys)
        atoms = np.concatenate([np.array(r["atoms"], dtype=np.int64) for r in results])
        return Scan(
            pack((s for r in results for s in r["segments"]), target_bytes=self.partition_bytes),
            atoms,
            no_edges(len(atoms)),
            self.schema,
            damage + [reject for result in results for reject in result["rejects"]],
            notes,
            dict(keys),
            sum(r["records"] for r in results) + len(damage),
        )

    def _assumed(self, keys: Counter[str]) -> list[str]:
        notes = []
        found = [k for k in ("stress", "virial_stress", "stresses") if keys[k]]
        if found and self.stress is None:
            notes.append(
                f"{found[0]!r} is kept as it stands, for the file says neither unit nor sign "
                '(stress="-kbar" in options, if it is what VASP prints)'
            )
        elif found:
            assert self.stress is not None
            notes.append(f"stress is {found[0]!r} in {self.stress.text}")
        chosen = "energy" in self.names.mapping.values()
        if keys["uncorrected_total_energy"] and not keys["energy"] and not chosen:
            notes.append(
                "energy is 'uncorrected_total_energy', to which the forces belong "
                "(energy_key= for another)"
            )
        return notes

    def read(self, partition: Partition) -> PartResult:
        """The records of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        records: list[Record] = []
        for segment in partition.segments:
            with open(self.files[segment.file], "rb") as file:
                file.seek(segment.start)
                text = file.read(segment.stop - segment.start)
            try:
                found = [self.record(entry) for entry in _entries(text)]
            except (ValueError, RecordFault):
                found = []
            atoms = sum(r.atoms for r in found)
            if (len(found), atoms) != (segment.frames, segment.atoms):
                raise SourceError(
                    f"{self.paths[segment.file]}, record {segment.first}",
                    "the file is not what it was when it was scanned",
                    mend="do not change the input while it is read; run it again",
                )
            records += found
        return PartResult(records_to_block(records, self.schema))

    def record(self, entry: Any) -> Record:
        """One entry; RecordFault where it is none."""
        if not isinstance(entry, dict):
            raise RecordFault("", f"found {type(entry).__name__}, expected an object")
        return to_record(entry, self.names, self.stress, self.order)

    def _unpack(self, number: int) -> list[Reject]:
        if self._spool is None:
            self._spool = tempfile.mkdtemp(prefix="alchemi_xr-")
            weakref.finalize(self, _remove, self._spool, os.getpid())
        os.makedirs(self._spool, exist_ok=True)
        shown = self.paths[number]
        target = os.path.join(self._spool, f"{number:06d}.json")
        self.files[number] = target
        with open(target, "wb") as out:
            try:
                with gzip.open(shown, "rb") as packed:
                    while block := packed.read1(2**20):
                        out.write(block)
            except (OSError, EOFError, zlib.error) as error:
                reason = f"the compressed data are damaged after byte {out.tell()}: {error}"
                return [Reject(shown, -1, reason)]
        return []


def _entries(text: bytes) -> list[Any]:
    """The records of a stretch of a file, from the first byte of one to the last of another."""
    # Whatever dicts and lists end and begin between two, each begins as deep as the first.
    return [json.loads(text[a:b]) for a, b in iter_records(BytesIO(text), 1)]


def _scan_file(job: tuple[PymatgenJsonSource, int]) -> dict[str, Any]:
    source, number = job
    shown = source.paths[number]
    observer, keys, unstored = FieldObserver(), Counter[str](), Counter[str]()
    atoms: list[int] = []
    segments: list[tuple[Segment, int]] = []
    rejects: list[Reject] = []
    index = -1
    with open(source.files[number], "rb") as file, open(source.files[number], "rb") as lookup:
        depth = record_depth(file)
        if depth is None:
            rejects.append(Reject(shown, 0, "no structure with sites is found in it"))
        else:
            try:
                for index, (start, stop) in enumerate(iter_records(file, depth)):
                    lookup.seek(start)
                    fault = _take(
                        source, lookup.read(stop - start), observer, keys, unstored, atoms
                    )
                    if fault is not None:
                        rejects.append(Reject(shown, index, fault[1], start, field=fault[0]))
                        continue
                    _extend(segments, number, start, stop, index, atoms[-1], source.partition_bytes)
            except ValueError as error:
                index += 1
                rejects.append(Reject(shown, index, str(error)))
    return {
        "observer": observer,
        "keys": keys,
        "unstored": unstored,
        "atoms": atoms,
        "segments": segments,
        "rejects": rejects,
        "records": max(index + 1, len(rejects)),
    }


def _extend(
    segments: list[tuple[Segment, int]],
    number: int,
    start: int,
    stop: int,
    index: int,
    atoms: int,
    limit: int,
) -> None:
    """Add a record to the last segment, or begin a new one."""
    if segments:
        last, _ = segments[-1]
        if index == last.first + last.frames and stop - last.start <= limit:
            grown = Segment(
                number, last.start, stop, last.first, last.frames + 1, last.atoms + atoms
            )
            segments[-1] = (grown, stop - last.start)
            return
    segments.append((Segment(number, start, stop, index, 1, atoms), stop - start))


def _take(
    source: PymatgenJsonSource,
    text: bytes,
    observer: FieldObserver,
    keys: Counter[str],
    unstored: Counter[str],
    atoms: list[int],
) -> tuple[str, str] | None:
    try:
        record = source.record(json.loads(text))
    except RecordFault as error:
        return error.field, error.reason
    except (ValueError, RecursionError) as error:
        return "", f"is no JSON ({error})"
    fault = fault_of(record)
    if fault is not None:
        return fault
    record.observe(observer)
    keys.update(record.keys)
    unstored.update(record.unstored)
    atoms.append(record.atoms)
    return None


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)

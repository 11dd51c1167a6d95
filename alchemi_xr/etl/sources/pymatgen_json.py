"""JSON files of structures in pymatgen's form: MatPES, MPtrj, mlearn, lists of structures.

Files are read record by record, whatever their size; ``.gz`` is unpacked first, so
that a task can begin anywhere.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from typing import Any, ClassVar

from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl.ase_records import fault_of
from alchemi_xr.etl.file_scan import FileScan, joined
from alchemi_xr.etl.json_index import iter_records, record_depth
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.pymatgen_records import RecordFault, StressForm, to_record
from alchemi_xr.etl.records import Record, records_to_block
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.etl.unpacking import own_folder, unpack
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
                self._spool = self._spool or own_folder(self)
                os.makedirs(self._spool, exist_ok=True)
                self.files[number] = os.path.join(self._spool, f"{number:06d}.json")
                damage += unpack(path, self.files[number])
        results = map_files(_scan_file, [(self, i) for i in range(len(self.paths))])
        scan = joined(
            results,
            self.paths[0],
            unstored="{name!r} is not stored ({count} records)",
            target_bytes=self.partition_bytes,
            damage=damage,
        )
        scan.notes += self._assumed(Counter(scan.keys))
        self.schema = scan.schema
        return scan

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


def _entries(text: bytes) -> list[Any]:
    """The records of a stretch of a file, from the first byte of one to the last of another."""
    # Whatever dicts and lists end and begin between two, each begins as deep as the first.
    return [json.loads(text[a:b]) for a, b in iter_records(BytesIO(text), 1)]


def _scan_file(job: tuple[PymatgenJsonSource, int]) -> FileScan:
    source, number = job
    shown = source.paths[number]
    out = FileScan()
    index = -1
    with open(source.files[number], "rb") as file, open(source.files[number], "rb") as lookup:
        depth = record_depth(file)
        if depth is None:
            out.rejects.append(Reject(shown, 0, "no structure with sites is found in it"))
        else:
            try:
                for index, (start, stop) in enumerate(iter_records(file, depth)):
                    lookup.seek(start)
                    found = _looked_at(source, lookup.read(stop - start))
                    if not isinstance(found, Record):
                        name, reason = found
                        out.rejects.append(Reject(shown, index, reason, start, field=name))
                        continue
                    out.take(found, found.keys)
                    segment = Segment(number, start, stop, index, 1, found.atoms)
                    out.extend(segment, stop - start, limit=source.partition_bytes)
            except ValueError as error:
                index += 1
                out.rejects.append(Reject(shown, index, str(error)))
    out.records = max(index + 1, len(out.rejects))
    return out


def _looked_at(source: PymatgenJsonSource, text: bytes) -> Record | tuple[str, str]:
    """The record of a text, or field and reason why there is none."""
    try:
        record = source.record(json.loads(text))
    except RecordFault as error:
        return error.field, error.reason
    except (ValueError, RecursionError) as error:
        return "", f"is no JSON ({error})"
    return fault_of(record) or record

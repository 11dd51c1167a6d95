"""The headers, the index and the schema of an atompack file (format version 2).

The atompack package opens a file that lost its end as an older, shorter one, and
believes what index and schema say of places and sizes, even where no memory could hold
them. So they are read and checked here first; the records themselves are the package's.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.errors import SourceError

__all__ = ["MAGIC", "AtompackIndex", "read_index"]

MAGIC = b"ATPK"
_VERSION = 2
_SLOT = 4096
_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u4"),
        ("generation", "<u8"),
        ("data_start", "<u8"),
        ("index_start", "<u8"),
        ("index_bytes", "<u8"),
        ("molecules", "<u8"),
        ("compression", "u1"),
        ("_", "V11"),
        ("schema_start", "<u8"),
        ("schema_bytes", "<u8"),
    ]
)
_ENTRY = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("size", "<u4"), ("atoms", "<u4")])
_COUNT_BYTES = 8
# Of the schema: version, type of the positions, count; of a section: its kind, type,
# whether it is one of atoms, length of its name, bytes of an element and of a sample.
_SCHEMA, _SECTION = struct.Struct("<IBI"), struct.Struct("<BBBHII")
_LARGEST_ELEMENT = 72
_ENTRIES = 65_536
# Of a record: the count of atoms, three float32 and an element each, the count of sections.
_LEAST, _LEAST_PER_ATOM = 6, 13
_CUT_OFF = "restore the file; a copy that was cut off has lost its last bytes"


@dataclass(frozen=True)
class AtompackIndex:
    """Where the records of a file lie.

    Parameters
    ----------
    molecules : int
    generation : int
        Grows with each flush.
    data_start, index_start : int
        Records lie between the two.
    packed : bool
        Whether each record is compressed.
    file_bytes, tail_bytes : int
        Of the file, and of what lies behind its last flush.
    changed : int
        When the file was last written, in ns.
    sample_bytes, atom_bytes : int
        What the flat read takes for a molecule and for an atom, absent properties
        included.
    largest_property : int
        Bytes of the largest property of a molecule.
    """

    molecules: int
    generation: int
    data_start: int
    index_start: int
    packed: bool
    file_bytes: int
    tail_bytes: int
    changed: int
    sample_bytes: int = 0
    atom_bytes: int = 0
    largest_property: int = 0

    def pieces(self, path: str) -> Iterator[tuple[int, NDArray]]:
        """All entries, in pieces with the number of their first."""
        for start in range(0, self.molecules, _ENTRIES):
            yield start, self.entries(path, start, min(start + _ENTRIES, self.molecules))

    def entries(self, path: str, start: int, stop: int) -> NDArray:
        """Place, stored size, size and atoms of some records, as a structured array."""
        at = self.index_start + _COUNT_BYTES + start * _ENTRY.itemsize
        return np.fromfile(path, _ENTRY, stop - start, offset=at)

    def possible(self, entries: NDArray) -> BoolArray:
        """Which entries name a place within the records, and sizes that can be."""
        offset, stored = entries["offset"], entries["stored"].astype(np.uint64)
        size = entries["size"].astype(np.uint64)
        # Compared without a sum of the two, which could overflow.
        inside = (offset >= self.data_start) & (offset <= self.index_start)
        inside &= stored <= np.where(inside, np.uint64(self.index_start) - offset, np.uint64(0))
        holds = _LEAST + _LEAST_PER_ATOM * entries["atoms"].astype(np.uint64) <= size
        fits = (stored > 0) if self.packed else (stored == size)
        return np.asarray(inside & holds & fits, dtype=bool)


def read_index(path: str, shown: str) -> AtompackIndex:
    """The newest header of a file whose index is whole.

    Parameters
    ----------
    path : str
    shown : str
        As the user named it.

    Raises
    ------
    SourceError
        The file is cut off, damaged, of another version, or was never flushed.
    """
    try:
        with open(path, "rb") as file:
            index, schema = _read(file, os.fstat(file.fileno()), shown)
    except OSError as error:
        raise SourceError(shown, f"cannot be read ({error.strerror})") from error
    if schema:
        molecule, atom, largest = _flat_bytes(schema, shown)
        index = replace(index, sample_bytes=molecule, atom_bytes=atom, largest_property=largest)
    return index


def _read(file: BinaryIO, stat: os.stat_result, shown: str) -> tuple[AtompackIndex, bytes]:
    size = stat.st_size
    if size < 2 * _SLOT:
        raise SourceError(
            shown,
            "is no whole atompack file: its headers are cut off",
            found=f"{size} bytes",
            expected=f"at least {2 * _SLOT}",
            mend=_CUT_OFF,
        )
    head, alone = _newest([file.read(_SLOT), file.read(_SLOT)], shown)
    molecules, data_start, start, length, schema_start, schema_bytes = (
        int(head[name])
        for name in (
            "molecules",
            "data_start",
            "index_start",
            "index_bytes",
            "schema_start",
            "schema_bytes",
        )
    )
    end = start + length
    if start == 0:
        # Of a file that was made, but not flushed.
        start = end = data_start
        if size > end:
            why = "the header that names it is damaged" if alone else "it was not flushed"
            raise SourceError(
                shown,
                f"has {size - end} bytes of records, but no index ({why})",
                mend="restore the file, or write it again, with flush() at the end",
            )
    else:
        if max(end, schema_start + schema_bytes) > size:
            raise SourceError(
                shown,
                f"is cut off: the index of its {molecules} molecules ends at byte {end}",
                found=f"{size} bytes",
                mend=_CUT_OFF,
            )
        file.seek(start)
        counted = int.from_bytes(file.read(_COUNT_BYTES), "little")
        if counted != molecules or length != _COUNT_BYTES + molecules * _ENTRY.itemsize:
            raise SourceError(
                shown,
                "the index is damaged",
                found=f"{counted} molecules in {length} bytes",
                expected=f"{molecules} molecules in {_COUNT_BYTES + molecules * _ENTRY.itemsize}",
                mend="restore the file",
            )
    file.seek(schema_start)
    index = AtompackIndex(
        molecules,
        int(head["generation"]),
        data_start,
        start,
        bool(head["compression"]),
        size,
        size - end,
        stat.st_mtime_ns,
    )
    return index, file.read(schema_bytes)


def _newest(slots: Sequence[bytes], shown: str) -> tuple[NDArray, bool]:
    """The newest header, and whether it is the only whole one."""
    heads = [np.frombuffer(slot, _HEADER, 1)[0] for slot in slots]
    ours = [(h, slot) for h, slot in zip(heads, slots, strict=True) if h["magic"] == MAGIC]
    if not ours:
        raise SourceError(shown, "is no atompack file", mend="give the format= that it has")
    whole = [
        h
        for h, slot in ours
        if h["version"] == _VERSION
        and zlib.adler32(slot[:-4]) == int.from_bytes(slot[-4:], "little")
    ]
    if whole:
        return max(whole, key=lambda h: int(h["generation"])), len(whole) < len(slots)
    # Another version may keep its checksum elsewhere.
    versions = [int(h["version"]) for h, _ in ours if h["version"] != _VERSION]
    if not versions:
        raise SourceError(shown, "both headers are damaged", mend="restore the file")
    raise SourceError(
        shown,
        f"is of version {versions[0]} of the atompack format",
        expected=f"version {_VERSION}",
        mend="write it again with atompack 0.4",
    )


def _flat_bytes(schema: bytes, shown: str) -> tuple[int, int, int]:
    """What the flat read takes for a molecule and an atom, and the largest property."""
    molecule, atom = [0], 0
    try:
        version, _, count = _SCHEMA.unpack_from(schema)
        at = _SCHEMA.size
        for _ in range(count if version == 1 else 0):
            _, _, of_atoms, length, element, slot = _SECTION.unpack_from(schema, at)
            at += _SECTION.size + length
            if element > _LARGEST_ELEMENT or (of_atoms and slot > _LARGEST_ELEMENT):
                raise struct.error("an element cannot be so large")
            if of_atoms:
                atom += element
            else:
                molecule.append(slot)
    except struct.error as error:
        raise SourceError(
            shown, f"the schema is damaged ({error})", mend="restore the file"
        ) from error
    return sum(molecule), atom, max(molecule)

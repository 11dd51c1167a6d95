"""Extended XYZ, in full precision: what is read back is what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.etl.comment import parse_value
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.store.reader import Snapshot

__all__ = ["ExtxyzExport"]

_COLUMN_NAMES = {"positions": "pos", "atomic_masses": "masses"}
_KINDS = {"f": "R", "i": "I", "u": "I", "b": "L"}
_SHAPED = ("cell", "stress", "virial")
_UNSAFE = set(" \t\n\r\"'={}[]\\,:")


class ExtxyzExport:
    """Frames as text, one after the other."""

    name: ClassVar[str] = "extxyz"
    suffixes: ClassVar[tuple[str, ...]] = (".extxyz", ".xyz")

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self._file: BinaryIO | None = None
        self._atom: list[str] = []
        self._system: list[str] = []

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder never is."""
        return False

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Which fields are columns, which stand in the comment line."""
        narrowed = []
        for name in fields:
            level = snapshot.level(name)
            if level == "edge":
                self.lost[name] = "extended XYZ has no edges"
            elif _UNSAFE & set(name) or not name:
                self.lost[name] = "its name cannot stand in a comment line"
            elif level == "atom":
                tail = snapshot.tail(name)
                if len(tail) > 1:
                    self.lost[name] = "a column holds one row of numbers an atom"
                elif name != "atomic_numbers":
                    self._atom.append(name)
            else:
                self._system.append(name)
            if name not in self.lost and snapshot.dtype(name).name in (
                "float16",
                "float32",
                "int8",
                "int16",
                "int32",
                "uint8",
                "uint16",
                "uint32",
            ):
                narrowed.append(f"{name} {snapshot.dtype(name).name}")
        if narrowed:
            self.notes.append("text has no narrow dtypes (values are kept): " + ", ".join(narrowed))
        self._file = open(target, "wb")  # noqa: SIM115

    def write(self, block: Block) -> None:
        """Frames of a block, column by column."""
        bodies = _Bodies(block, [n for n in self._atom if n in block])
        comments = self._comments(block)
        counts = np.diff(block.atoms_ptr).tolist()
        out: list[str] = []
        for i, count in enumerate(counts):
            properties, lines = bodies.frame(i)
            out.append(f"{count}\nProperties={properties}{comments[i]}\n")
            out += lines
        assert self._file is not None
        self._file.write("".join(out).encode())

    def finish(self) -> None:
        """Close the file."""
        self.abort()

    def abort(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _comments(self, block: Block) -> list[str]:
        out = [""] * block.num_samples
        for name in self._system:
            if name not in block:
                continue
            texts = _values(name, block.arrays[name])
            key = "Lattice" if name == "cell" else name
            here = block.has(name)
            for i in np.flatnonzero(here).tolist():
                out[i] += f" {key}={texts[i]}"
        return out


class _Bodies:
    """Atom lines of a block; frames with the same columns are formatted together."""

    def __init__(self, block: Block, names: list[str]) -> None:
        self._ptr: list[int] = block.atoms_ptr.tolist()
        masks = np.array([block.has(n) for n in names], dtype=bool).reshape(
            len(names), block.num_samples
        )
        self._of: list[tuple[str, list[str], int]] = [("", [], 0)] * block.num_samples
        symbols = np.array(SYMBOLS, dtype=object)
        numbers = block["atomic_numbers"]
        if masks.all():
            groups = {(True,) * len(names): np.arange(block.num_samples)}
        else:
            found: dict[tuple[bool, ...], list[int]] = {}
            for i, key in enumerate(map(tuple, masks.T.tolist())):
                found.setdefault(key, []).append(i)
            groups = {k: np.array(v) for k, v in found.items()}
        for key, members in groups.items():
            chosen = [n for n, there in zip(names, key, strict=True) if there]
            whole = len(members) == block.num_samples
            part = (
                block if whole else block.select_fields(["atomic_numbers", *chosen]).take(members)
            )
            numbers = part["atomic_numbers"]
            columns: list[Any] = [symbols[np.clip(numbers, 0, len(SYMBOLS) - 1)].tolist()]
            formats = ["%s"]
            spec = ["species:S:1"]
            for name in chosen:
                values = part.arrays[name]
                flat = values.reshape(len(values), -1)
                kind = _KINDS[values.dtype.kind]
                spec.append(f"{_COLUMN_NAMES.get(name, name)}:{kind}:{flat.shape[1]}")
                for k in range(flat.shape[1]):
                    columns.append(_column(flat[:, k]))
                    formats.append("%r" if kind == "R" else "%s")
            template = " ".join(formats) + "\n"
            lines = [template % row for row in zip(*columns, strict=True)]
            start = 0
            for j, i in enumerate(members.tolist()):
                start = int(part.atoms_ptr[j])
                self._of[i] = (":".join(spec), lines, start)

    def frame(self, i: int) -> tuple[str, list[str]]:
        """Properties and lines of a frame."""
        spec, lines, start = self._of[i]
        return spec, lines[start : start + self._ptr[i + 1] - self._ptr[i]]


def _column(values: NDArray) -> list[Any]:
    if values.dtype.kind == "b":
        return np.where(values, "T", "F").tolist()
    return list(values.tolist())


def _values(name: str, values: NDArray) -> list[str]:
    """Every row as it stands behind its key."""
    if values.dtype.kind in "OUST":
        return [_quoted(_as_text(str(v))) for v in values.tolist()]
    flat = values.reshape(len(values), -1)
    known = name in FIELDS
    tail = values.shape[1:]
    if known and (tail == (1,) or name in _SHAPED or len(tail) == 1):
        rows = _texts(flat)
        return [r if flat.shape[1] == 1 else f'"{r}"' for r in rows]
    if tail == ():
        return _texts(flat)
    # JSON keeps the shape of what the field table does not know.
    return [f'"_JSON {_json(v)}"' for v in values.tolist()]


def _as_text(text: str) -> str:
    """A text that is read as one: what looks like numbers or JSON says that it is none."""
    same = parse_value(text)
    # Many tools take a carriage return for the end of the line.
    is_plain = isinstance(same, str) and same == text and "\r" not in text
    return text if is_plain else f"_JSON {_json(text)}"


def _json(value: Any) -> str:
    return json.dumps(value)


def _texts(flat: NDArray) -> list[str]:
    if flat.dtype.kind == "b":
        return [" ".join("T" if v else "F" for v in row) for row in flat.tolist()]
    return [" ".join(map(repr, row)) for row in flat.tolist()]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

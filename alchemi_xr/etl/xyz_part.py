"""The frames of one partition of XYZ files, put together field by field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr, row_indices
from alchemi_xr.data.fields import fill_for
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.columns import (
    SYMBOL_NUMBERS,
    ColumnSpec,
    LineFault,
    check_elements,
    odd_elements,
    out_name,
    parse_columns,
)
from alchemi_xr.etl.frame_index import index_text
from alchemi_xr.etl.frames import FrameFault, FrameHead, column_targets_of, read_head
from alchemi_xr.etl.heads import Heads, Repeated, read_heads
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import as_text
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Segment
from alchemi_xr.native import text as native
from alchemi_xr.native.text import ATOMS, BODY, COMMENT, COMMENT_STOP, LINE, OFFSET, STOP
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["FramesOfText", "assemble"]

_DTYPES: dict[str, Any] = {"E": np.int64, "R": np.float64, "I": np.int64, "L": np.bool_}


class FramesOfText:
    """The frames of a segment, and what their comments say.

    Parameters
    ----------
    text : bytes
    segment : Segment
    shown : str
        The file's name, for messages.
    names : NameMap

    Raises
    ------
    SourceError
        The file is not what it was when it was scanned.
    """

    def __init__(self, text: bytes, segment: Segment, shown: str, names: NameMap) -> None:
        if segment.start == 0 and text.startswith(b"\xef\xbb\xbf"):
            text = b"   " + text[3:]
        self.text, self.segment, self.shown = text, segment, shown
        found = index_text(text)
        if found is None or (len(found), int(found[:, ATOMS].sum())) != (
            segment.frames,
            segment.atoms,
        ):
            raise self.changed(0)
        self.frames = found
        self.heads: Heads = read_heads(text, self.frames, names)
        self.singles: dict[int, FrameHead] = {}
        for i in self.heads.odd:
            row = self.frames[i]
            comment = text[int(row[COMMENT]) : int(row[COMMENT_STOP])].decode("utf-8", "replace")
            try:
                self.singles[i] = read_head(comment, names)
            except FrameFault:
                # The scan took every comment of the segment.
                raise self.changed(i) from None

    def place(self, i: int) -> tuple[int, int]:
        """Byte and line at which a frame begins in its file."""
        segment, row = self.segment, self.frames[i]
        return segment.start + int(row[OFFSET]), segment.line + int(row[LINE])

    def changed(self, i: int) -> SourceError:
        """What is said when the file is not that of the scan."""
        return SourceError(
            f"{self.shown}, frame {self.segment.first + i}",
            "the file is not what it was when it was scanned",
            mend="do not change the input while it is read; run it again",
        )


def assemble(parts: Sequence[FramesOfText], schema: Schema, names: NameMap) -> PartResult:
    """One block of the frames of all parts, in their order."""
    return _Assembly(parts, schema, names).result()


class _Assembly:
    def __init__(self, parts: Sequence[FramesOfText], schema: Schema, names: NameMap) -> None:
        self.parts, self.schema, self.names = parts, schema, names
        self.counts = np.concatenate([p.frames[:, ATOMS] for p in parts])
        self.ptr = counts_to_ptr(self.counts)
        self.firsts = np.cumsum([0] + [len(p.frames) for p in parts]).tolist()
        self.total = len(self.counts)
        self.rejects: list[Reject] = []
        self.arrays: dict[str, NDArray] = {}
        self.levels: dict[str, Level] = {}
        self.present: dict[str, BoolArray] = {}

    def result(self) -> PartResult:
        for part, first in zip(self.parts, self.firsts[:-1], strict=True):
            for spec, index in _by_spec(part):
                self._atoms(part, first, spec, index)
        self._system()
        for name in [n for n, m in self.present.items() if m.all()]:
            del self.present[name]
        # A broken frame keeps its rows, and is deleted.
        self.rejects.sort(key=lambda r: -1 if r.sample is None else r.sample)
        block = Block(self.ptr, np.zeros_like(self.ptr), self.arrays, self.levels, self.present)
        return PartResult(block, self.rejects)

    # -- fields of atoms

    def _atoms(self, part: FramesOfText, first: int, spec: ColumnSpec, index: IntArray) -> None:
        targets, _ = column_targets_of(spec, self.names)
        for chosen, columns in self._parse(part, first, spec, index):
            whole = len(chosen) == self.total
            rows = None if whole else row_indices(self.ptr, chosen + first)[0]
            for source, name in targets.items():
                if source in columns:
                    self._put_atoms(name, columns[source], rows, chosen + first)

    def _put_atoms(self, name: str, values: NDArray, rows: NDArray | None, chosen: NDArray) -> None:
        layout = self.schema.get(name)
        if layout is None or layout.level != "atom":
            return
        values = values.reshape(len(values), *layout.tail)
        if rows is None:
            self.arrays[name] = values.astype(layout.dtype, copy=False)
            self.levels[name] = "atom"
            return
        if name not in self.arrays:
            dtype = np.dtype(layout.dtype)
            shape = (int(self.ptr[-1]), *layout.tail)
            self.arrays[name] = np.full(shape, fill_for(dtype), dtype)
            self.levels[name] = "atom"
            self.present[name] = np.zeros(self.total, dtype=bool)
        self.arrays[name][rows] = values
        self.present[name][chosen] = True

    def _parse(
        self, part: FramesOfText, first: int, spec: ColumnSpec, index: IntArray
    ) -> Iterator[tuple[NDArray, dict[str, NDArray]]]:
        """Columns of some frames of a part; those that are broken are rejected."""
        frames = part.frames[index]
        counts = frames[:, ATOMS]
        ptr = counts_to_ptr(counts)
        columns, targets = _targets(spec, int(ptr[-1]))
        ranges = np.column_stack([frames[:, BODY], frames[:, STOP], counts, ptr[:-1]])
        good = np.ones(len(index), dtype=bool)
        at = 0
        if not native.available() or any(c.name == "species" and c.width > 1 for c in spec.columns):
            good[:], at = False, len(index)
        while at < len(index):
            at += native.table(part.text, ranges[at:], targets, SYMBOL_NUMBERS, loose=spec.loose)
            if at < len(index):
                good[at] = False
                at += 1
        if good.any():
            # Only frames with an atomic number that is none are read again, which says where.
            owner = np.repeat(np.arange(len(index)), counts)
            good[owner[odd_elements(columns, spec)]] = False
        if good.any():
            if not good.all():
                rows = row_indices(ptr, np.flatnonzero(good))[0]
                columns = {name: values[rows] for name, values in columns.items()}
            yield index[good], check_elements(columns, spec)
        yield from self._slowly(part, first, spec, index[~good])

    def _slowly(
        self, part: FramesOfText, first: int, spec: ColumnSpec, members: IntArray
    ) -> Iterator[tuple[NDArray, dict[str, NDArray]]]:
        """As above, by the grammar in full; a broken frame is found by halving."""
        if len(members) == 0:
            return
        frames = part.frames[members]
        body = b"".join(part.text[a:b] for a, b in frames[:, [BODY, STOP]].tolist())
        try:
            columns = parse_columns(body, int(frames[:, ATOMS].sum()), spec)
        except LineFault as fault:
            if len(members) == 1:
                self._reject(part, first, int(members[0]), fault)
                return
            half = len(members) // 2
            yield from self._slowly(part, first, spec, members[:half])
            yield from self._slowly(part, first, spec, members[half:])
            return
        yield members, columns

    def _reject(self, part: FramesOfText, first: int, i: int, fault: LineFault) -> None:
        reason = fault.reason
        if fault.row is not None:
            reason = f"atom {fault.row}: {reason}"
        self.rejects.append(
            Reject(
                part.shown,
                part.segment.first + i,
                reason,
                *part.place(i),
                fault.field,
                first + i,
            )
        )

    # -- fields of systems

    def _system(self) -> None:
        pieces: dict[str, list[tuple[FramesOfText, IntArray, Any]]] = {}
        for part, first in zip(self.parts, self.firsts[:-1], strict=True):
            for name, columns in part.heads.columns.items():
                for index, values in columns:
                    pieces.setdefault(name, []).append((part, index + first, values))
            for i, head in part.singles.items():
                for name, value in head.system.items():
                    at = np.array([first + i])
                    pieces.setdefault(name, []).append((part, at, [value]))
        for name, given in pieces.items():
            layout = self.schema.get(name)
            if layout is None:
                continue
            if layout.level == "atom":
                if name in self.schema.dropped:
                    continue  # columns of that name are the field
                for _, index, values in given:
                    for i, value in zip(index.tolist(), values, strict=True):
                        chosen = np.array([i])
                        rows = row_indices(self.ptr, chosen)[0]
                        self._put_atoms(name, np.asarray(value), rows, chosen)
                continue
            self._put_system(layout, given)

    def _put_system(
        self, layout: FieldLayout, given: list[tuple[FramesOfText, IntArray, Any]]
    ) -> None:
        text = layout.dtype == "str"
        dtype: np.dtype[Any] = np.dtype(object if text else layout.dtype)
        tail = () if text else layout.tail
        mask = np.zeros(self.total, dtype=bool)
        out = np.full((self.total, *tail), "" if text else fill_for(dtype), dtype)
        for part, index, values in given:
            mask[index] = True
            each = values.values if isinstance(values, Repeated) else values
            if text:
                rows = np.empty(len(each), dtype=object)
                rows[:] = [v if isinstance(v, str) else as_text(v.tolist()) for v in each]
                out[index] = rows[values.codes] if isinstance(values, Repeated) else rows
                continue
            try:
                rows = np.asarray(each, dtype=dtype).reshape(len(each), *tail)
            except (ValueError, TypeError):
                # The schema holds every value that the scan saw.
                raise part.changed(0) from None
            out[index] = rows[values.codes] if isinstance(values, Repeated) else rows
        self.arrays[layout.name], self.levels[layout.name] = out, "system"
        if not mask.all():
            self.present[layout.name] = mask


def _by_spec(part: FramesOfText) -> Iterator[tuple[ColumnSpec, IntArray]]:
    """Frames of the same columns."""
    groups: dict[ColumnSpec, list[IntArray]] = {}
    for plan, index in part.heads.plans:
        groups.setdefault(plan.spec, []).append(index)
    for i, head in part.singles.items():
        groups.setdefault(head.spec, []).append(np.array([i]))
    for spec, parts in groups.items():
        yield spec, np.sort(np.concatenate(parts))


def _targets(
    spec: ColumnSpec, rows: int
) -> tuple[dict[str, NDArray], list[tuple[str, int, NDArray | None]]]:
    """Arrays for the columns of a spec, by name, and in the order of the words."""
    arrays: dict[str, NDArray] = {}
    targets: list[tuple[str, int, NDArray | None]] = []
    for column in spec.columns:
        kind = "E" if column.name == "species" and column.kind == "S" else column.kind
        if kind == "S":
            targets.append((kind, column.width, None))
            continue
        shape = (rows,) if column.width == 1 else (rows, column.width)
        array = np.empty(shape, _DTYPES[kind])
        targets.append((kind, column.width, array))
        arrays[out_name(spec, column)] = array
    return arrays, targets

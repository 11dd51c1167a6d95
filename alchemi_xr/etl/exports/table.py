"""Parquet: one row a sample, lists for atoms and edges, nulls where there is no value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr.data.block import Block
from alchemi_xr.store.reader import Snapshot

__all__ = ["ParquetExport"]


class ParquetExport:
    """A Parquet file, a row group a block; level, shape and unit stand in its metadata.

    Parameters
    ----------
    compression : str
    """

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def __init__(self, *, compression: str = "zstd") -> None:
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self.compression = compression
        self._writer: Any = None

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder never is."""
        return False

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """The schema, from the store's."""
        pa = import_optional("pyarrow", extra="table", why=str(target))
        pq = import_optional("pyarrow.parquet", extra="table", why=str(target))
        self._pa = pa
        columns, described = [], {}
        for name in fields:
            level, dtype, tail = snapshot.level(name), snapshot.dtype(name), snapshot.tail(name)
            text = dtype.kind not in "biuf"
            kind = pa.string() if text else pa.from_numpy_dtype(dtype)
            for size in reversed(tail if tail != (1,) or level != "system" else ()):
                kind = pa.list_(kind, int(size))
            if level != "system":
                kind = pa.list_(kind)
            columns.append(pa.field(name, kind))
            described[name] = {"level": level, "tail": list(tail), "unit": snapshot.unit(name)}
        self._schema = pa.schema(columns, metadata={"alchemi_xr": json.dumps(described)})
        self._writer = pq.ParquetWriter(str(target), self._schema, compression=self.compression)

    def write(self, block: Block) -> None:
        """A row group."""
        pa = self._pa
        columns = []
        for column in self._schema:
            values = block.arrays.get(column.name)
            if values is None:
                columns.append(pa.nulls(block.num_samples, column.type))
                continue
            here = block.has(column.name)
            level = block.levels[column.name]
            kind = column.type
            if level == "system":
                columns.append(_nested(pa, values, kind, None if here.all() else ~here))
                continue
            inner = _nested(pa, values, kind.value_type, None)
            ptr = block.ptr(level)
            offsets = pa.array(ptr.astype(np.int32), mask=None)
            if not here.all():
                # A null stands at the offset of its list.
                mask = np.append(~here, False)
                offsets = pa.array(ptr.astype(np.int32), mask=mask)
                keep = np.repeat(here, np.diff(ptr))
                inner = inner.filter(pa.array(keep))
                counts = np.where(here, np.diff(ptr), 0)
                moved = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
                offsets = pa.array(moved, mask=mask)
            columns.append(pa.ListArray.from_arrays(offsets, inner, type=kind))
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()

    def abort(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _nested(pa: Any, values: Any, kind: Any, mask: Any) -> Any:
    """Rows of numbers as (nested) fixed lists, or scalars, or text."""
    if not pa.types.is_fixed_size_list(kind):
        flat = values.reshape(-1) if values.dtype.kind != "O" else values
        if pa.types.is_string(kind):
            flat = [str(v) for v in flat.tolist()]
        return pa.array(flat, type=kind, mask=mask)
    inner = _nested(pa, values.reshape(-1, *values.shape[2:]), kind.value_type, None)
    nulls = None if mask is None else pa.array(mask)
    return pa.FixedSizeListArray.from_arrays(inner, type=kind, mask=nulls)

"""Stores as input: those of ours and of nvalchemi-toolkit, to be changed on the way.

``merge`` copies stores; read as a source their samples go through conditions,
functions, casts and selections of fields like those of any file. Deleted samples
are left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl.gather import Counted, count, opened
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.schema import Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, plain_map
from alchemi_xr.etl.union import unify
from alchemi_xr.plan.tasks import PartResult
from alchemi_xr.store import fs
from alchemi_xr.store.bulk import FieldLayout
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["StoreSource"]


class StoreSource:
    """Samples of stores on this machine that are not deleted.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
        Fields of the stores to be renamed.
    partition_bytes : int
        About so much one task reads.
    """

    name: ClassVar[str] = "store"
    takes_folders: ClassVar[bool] = True

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        partition_bytes: int = 16 * 2**20,
    ) -> None:
        self.paths = [os.fspath(p) for p in paths]
        self.names = names or NameMap()
        self.partition_bytes = partition_bytes
        self._sources: list[bytes | Snapshot] = []
        self._fields: list[list[str]] = []
        self.schema: Schema | None = None

    @classmethod
    def matches(cls, path: str) -> bool:
        """A folder with the root document of a store."""
        return os.path.isdir(path) and fs.looks_like_store(Path(path))

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Pointers, masks and the fields of every store; no values."""
        stores: list[Counted] = []
        keys: dict[str, int] = {}
        for path in self.paths:
            with open_store(os.path.abspath(path)) as snapshot:
                stores.append(count(snapshot, snapshot.active))
                for name in snapshot.fields:
                    there = snapshot.present(name)
                    number = len(snapshot.active) if there is None else there[snapshot.active].sum()
                    keys[name] = keys.get(name, 0) + int(number)
        self._sources = [store.source for store in stores]
        self._fields = [list(store.infos) for store in stores]
        units: dict[str, str] = {}
        layouts = [self._layout(layout, units) for layout in unify(stores)]
        self.schema = Schema(tuple(layouts))
        partitions = [
            partition
            for number, store in enumerate(stores)
            for partition in self._cut(number, store, layouts)
        ]
        return Scan(
            partitions,
            np.concatenate([store.num_atoms for store in stores]).astype(np.int64),
            np.concatenate([store.num_edges for store in stores]).astype(np.int64),
            self.schema,
            keys=keys,
            records=sum(len(store.order) for store in stores),
            units=units,
        )

    def _layout(self, layout: FieldLayout, units: dict[str, str]) -> FieldLayout:
        name = self.names.mapping.get(layout.name, layout.name)
        spec = FIELDS.get(name)
        if name != layout.name and spec is not None and spec.level != layout.level:
            raise ConfigError(
                "key_map",
                f"{layout.name!r} is a field of the {layout.level} level, {name!r} one of the "
                f"{spec.level} level",
            )
        if spec is None or layout.group == "text":
            return replace(layout, name=name)
        if layout.unit and layout.unit != spec.unit:
            units[name] = layout.unit
        return replace(layout, name=name, group="core", unit=spec.unit)

    def _cut(self, number: int, store: Counted, layouts: list[FieldLayout]) -> list[Partition]:
        """The samples of a store as partitions of about equal size."""
        width = {"atom": 0, "edge": 0, "system": 0}
        for layout in layouts:
            item = 16 if layout.dtype == "str" else np.dtype(layout.dtype).itemsize
            width[layout.level] += item * int(np.prod(layout.tail, dtype=np.int64))
        atoms: IntArray = store.num_atoms.astype(np.int64)
        edges: IntArray = store.num_edges.astype(np.int64)
        sizes = atoms * width["atom"] + edges * width["edge"] + width["system"]
        ends = np.cumsum(sizes)
        # A new one begins with the sample that reaches into the next multiple of the size.
        starts = np.flatnonzero(np.diff((ends - sizes) // self.partition_bytes, prepend=-1))
        out = []
        for a, b in zip(starts.tolist(), [*starts[1:].tolist(), len(atoms)], strict=True):
            segment = Segment(number, a, b, a, b - a, int(atoms[a:b].sum()))
            size = int(sizes[a:b].sum())
            out.append(Partition((segment,), edges=int(edges[a:b].sum()), input_bytes=size))
        return out

    def read(self, partition: Partition) -> PartResult:
        """The samples of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        blocks = []
        for segment in partition.segments:
            snapshot = opened(self._sources[segment.file])
            samples = snapshot.active[segment.start : segment.stop]
            blocks.append(snapshot.read_block(samples, self._fields[segment.file]))
        block = blocks[0] if len(blocks) == 1 else Block.concat(blocks)
        return PartResult(self._renamed(block))

    def _renamed(self, block: Block) -> Block:
        mapping = {a: b for a, b in self.names.mapping.items() if a in block and a != b}
        if not mapping:
            return block
        return replace(
            block,
            arrays={mapping.get(n, n): v for n, v in block.arrays.items()},
            levels={mapping.get(n, n): v for n, v in block.levels.items()},
            present={mapping.get(n, n): v for n, v in block.present.items()},
            units={mapping.get(n, n): v for n, v in block.units.items()},
        )

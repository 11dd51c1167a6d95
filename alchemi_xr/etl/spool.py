"""Samples in an order that has nothing to do with where they stand, without reading all for each.

Gathering a range of such an order touches every chunk of the store, so that
the work would grow with the square of its size. Instead the store is read once
from front to back; each run of it is sorted by where its samples go, and put
down uncompressed. A range of the result is then one short stretch of each run.
"""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, Level, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index, counts_to_ptr
from alchemi_xr.etl.gather import Counted, opened
from alchemi_xr.plan.client import Runner
from alchemi_xr.plan.plan import Plan, cut_by_bytes, extent_bytes
from alchemi_xr.plan.progress import Progress
from alchemi_xr.plan.tasks import PartResult, trim
from alchemi_xr.store import fs
from alchemi_xr.store.reader import Snapshot

__all__ = ["Runs", "is_scattered"]

_RUN_EXTENTS = 2
_TOO_MANY = 4


def is_scattered(snapshot: Snapshot, order: IntArray, plan: Plan) -> bool:
    """Whether gathering the extents would read the chunks of a store many times over."""
    chunk = min(snapshot.chunk_rows("atom"), max(1, snapshot.num_atoms))
    owner = snapshot.atoms_ptr[order] // chunk
    bases = np.array(plan.sample_base)
    if len(bases) <= _TOO_MANY:
        return False
    touched = sum(len(np.unique(owner[a:b])) for a, b in itertools.pairwise(bases) if b > a)
    return bool(touched > _TOO_MANY * (snapshot.num_atoms // chunk + len(bases)))


class Runs:
    """Reads ranges of the new order out of sorted runs; picklable.

    Parameters
    ----------
    store : Counted
    snapshot : Snapshot
        The same, open here.
    names : sequence of str
    plan : Plan
    folder : Path
        Of this job and no other: finished runs found there are taken as they are.
    """

    def __init__(
        self, store: Counted, snapshot: Snapshot, names: Sequence[str], plan: Plan, folder: Path
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = str(folder)
        self._source = store.source
        self._names = [name for name in names if name in store.infos]
        self._levels: dict[str, Level] = {n: store.infos[n].level for n in self._names}
        self._starts = {start: k for k, start in enumerate(plan.sample_base[:-1])}
        self._bases = np.array(plan.sample_base, dtype=np.int64)
        rank = np.full(snapshot.num_samples, -1, dtype=np.int64)
        rank[store.order] = np.arange(len(store.order))
        fs.write_file(Path(self._path("rank")), rank.tobytes())
        size = _RUN_EXTENTS * extent_bytes()
        self.ranges = cut_by_bytes(snapshot.sample_bytes(self._names), size)
        self._bounds: NDArray = np.empty((0, 0), np.int64)

    def prepare(self, runner: Runner, shown: Progress, title: str) -> None:
        """Put the runs down."""
        token = uuid.uuid4().hex[:8]
        missing = [k for k in range(len(self.ranges)) if not os.path.exists(self._path(f"run-{k}"))]
        shared: Any = (f"shared-{token}", "runs")
        graph: dict[Any, Any] = {shared: self}
        graph |= {(f"run-{token}", k): (_write_run, shared, k) for k in missing}
        shown.start(f"{title}: runs", len(self.ranges), "runs")
        shown.advance(len(self.ranges) - len(missing))
        runner.run(
            graph, [(f"run-{token}", k) for k in missing], lambda key, result: shown.advance()
        )
        bounds = []
        for k in range(len(self.ranges)):
            with _Run(self._path(f"run-{k}")) as run:
                bounds.append(np.searchsorted(run.read("rank"), self._bases))
        self._bounds = np.array(bounds, dtype=np.int64).reshape(len(self.ranges), -1)

    def write(self, number: int) -> None:
        """Read a run of the store and put it down, sorted by where its samples go."""
        start, stop = self.ranges[number]
        rank = np.fromfile(self._path("rank"), dtype=np.int64, count=stop - start, offset=8 * start)
        chosen = np.flatnonzero(rank >= 0)
        order = chosen[np.argsort(rank[chosen])]
        snapshot = opened(self._source)
        block = snapshot.read_block(slice(start, stop), self._names).take(order)
        arrays: dict[str, NDArray] = {
            "rank": rank[order],
            "atoms_ptr": block.atoms_ptr,
            "edges_ptr": block.edges_ptr,
        }
        for name in self._names:
            values = block.arrays[name]
            if values.dtype.kind == "O":
                words = [str(word).encode("utf-8") for word in values.tolist()]
                arrays[f"ends/{name}"] = counts_to_ptr(np.array([len(w) for w in words], np.int64))
                values = np.frombuffer(b"".join(words), dtype=np.uint8)
            arrays[f"field/{name}"] = values
            if name in block.present:
                arrays[f"present/{name}"] = block.present[name]
        _write(self._path(f"run-{number}"), arrays)

    def __call__(self, payload: tuple[int, int]) -> PartResult:
        extent = self._starts[payload[0]]
        blocks, ranks = [], []
        for number in range(len(self.ranges)):
            first, last = self._bounds[number, extent : extent + 2].tolist()
            if last > first:
                with _Run(self._path(f"run-{number}")) as run:
                    ranks.append(run.read("rank", first, last))
                    blocks.append(self._block(run, first, last))
        order = np.argsort(np.concatenate(ranks))
        return PartResult(Block.concat(blocks).take(as_index(order, len(order))))

    def _block(self, run: _Run, first: int, last: int) -> Block:
        atoms = run.read("atoms_ptr", first, last + 1)
        edges = run.read("edges_ptr", first, last + 1)
        spans = {
            "atom": (int(atoms[0]), int(atoms[-1])),
            "edge": (int(edges[0]), int(edges[-1])),
            "system": (first, last),
        }
        arrays: dict[str, NDArray] = {}
        present = {}
        for name in self._names:
            if f"ends/{name}" in run:
                arrays[name] = _words(run, name, first, last)
            else:
                arrays[name] = run.read(f"field/{name}", *spans[self._levels[name]])
            if f"present/{name}" in run:
                present[name] = run.read(f"present/{name}", first, last)
        return Block(atoms - atoms[0], edges - edges[0], arrays, dict(self._levels), present)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


def _write_run(runs: Runs, number: int) -> int:
    runs.write(number)
    trim()
    return number


def _words(run: _Run, name: str, first: int, last: int) -> NDArray:
    ends: Ptr = run.read(f"ends/{name}", first, last + 1)
    data = run.read(f"field/{name}", int(ends[0]), int(ends[-1])).tobytes()
    cuts = (ends - ends[0]).tolist()
    out = np.empty(last - first, dtype=object)
    out[:] = [data[a:b].decode("utf-8") for a, b in itertools.pairwise(cuts)]
    return out


def _write(path: str, arrays: dict[str, NDArray]) -> None:
    """Arrays one after the other, a table of them at the end; appears whole."""
    partial = f"{path}.{uuid.uuid4().hex}{fs.PARTIAL}"
    table = {}
    with open(partial, "wb") as file:
        for name, values in arrays.items():
            table[name] = (file.tell(), values.dtype.str, values.shape)
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        end = file.tell()
        file.write(json.dumps(table).encode())
        file.write(end.to_bytes(8, "little"))
    os.replace(partial, path)


class _Run:
    """One run, open for reading stretches of its arrays."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._file.seek(-8, os.SEEK_END)
        stop = self._file.tell()
        start = int.from_bytes(self._file.read(8), "little")
        self._file.seek(start)
        self._table: dict[str, Any] = json.loads(self._file.read(stop - start))

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray:
        """Rows of an array."""
        offset, code, shape = self._table[name]
        dtype = np.dtype(code)
        stop = shape[0] if stop is None else stop
        width = int(np.prod(shape[1:], dtype=np.int64))
        self._file.seek(offset + start * width * dtype.itemsize)
        values = np.fromfile(self._file, dtype=dtype, count=(stop - start) * width)
        return values.reshape(stop - start, *shape[1:])

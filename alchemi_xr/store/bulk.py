"""Parallel writes into a store that is being built.

All counts are known first, so every array has its full length from the start
and tasks write disjoint, aligned row ranges: no storage object is touched by
two of them, and a task that runs twice writes the same bytes. Nothing of it is
a store before :meth:`BulkWriter.commit`.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, Level, NDArray, PathLike, Ptr
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import canonical_level, field_order, resolve
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    NotAStoreError,
    PlanError,
    StoreExistsError,
    UnknownFieldError,
    nearest,
)
from alchemi_xr.store import fs, layout
from alchemi_xr.store._compat import wait
from alchemi_xr.store.codecs import DEFAULT_CHUNK_ROWS, ZarrWriteConfig, as_config
from alchemi_xr.store.commit import Session, row_mask
from alchemi_xr.store.locate import Place, locate
from alchemi_xr.store.schema import (
    FORMAT_VERSION,
    KEY,
    TEXT,
    Counts,
    FieldInfo,
    StoreSchema,
    table_unit,
)
from alchemi_xr.store.state import root_attributes

__all__ = ["BulkWriter", "FieldLayout"]

_MASK_ROWS = 1 << 22


@dataclass(frozen=True)
class FieldLayout:
    """A field of a store that is to be built.

    Parameters
    ----------
    name : str
    level : {"atom", "edge", "system"}
    dtype : str
        A NumPy dtype's name, or ``"str"`` for text.
    tail : tuple of int
        Shape of one row.
    group : {"core", "custom", "text"}
    unit : str
        By default that of the field table.
    holes : bool
        Whether some samples have no value; then write their presence too.
    """

    name: str
    level: Level
    dtype: str
    tail: tuple[int, ...] = ()
    group: str = "core"
    unit: str = ""
    holes: bool = False

    def to_info(self, *, since: int = 1) -> FieldInfo:
        """The field as the schema has it.

        Raises
        ------
        FieldError
            Group, level and dtype do not go together.
        """
        name, where = resolve(self.name), f"layout of {self.name!r}"
        is_text = self.dtype == "str" or self.group == "text"
        if self.group not in ("core", "custom", "text"):
            raise FieldError(
                where, "unknown group", found=self.group, expected="core, custom, text"
            )
        level = canonical_level(self.level, where=where)
        if is_text and (level != "system" or self.tail):
            raise FieldError(where, "text is kept per sample", found=f"{level}, {list(self.tail)}")
        return FieldInfo(
            name,
            level,
            TEXT if is_text else np.dtype(self.dtype),
            tuple(int(n) for n in self.tail),
            "text" if is_text else ("custom" if self.group == "custom" else "core"),
            self.unit or table_unit(name),
            self.holes,
            since,
        )


class BulkWriter:
    """A store being built; picklable, so that tasks on workers write to it.

    Made by :meth:`create` (once) and :meth:`open` (anywhere).
    """

    def __init__(
        self,
        place: Place,
        schema: StoreSchema,
        config: ZarrWriteConfig,
        *,
        private: bool = False,
    ) -> None:
        self.place = place
        self._private = private
        self.schema = schema
        self.config = config
        # Who drives it calls flush, not each task; a copy for another process does not.
        self.defers = False
        self._session: Session | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        place = self.place.for_other_processes()
        if place.repository is not None:
            raise TypeError(
                f"{place.where}: a transaction of Icechunk cannot be written by many processes"
            )
        return (_open_place, (place if place.path is None else str(place.path),))

    # -- making it ---------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Any,
        layouts: Iterable[FieldLayout | FieldInfo],
        num_atoms: NDArray | Sequence[int],
        num_edges: NDArray | Sequence[int],
        *,
        config: Any = None,
        provenance: dict[str, Any] | None = None,
        generation: int = 1,
        operation: str = "write",
        identity: str | None = None,
        private: bool = False,
    ) -> BulkWriter:
        """Make all arrays at their full length, and write the pointers.

        Parameters
        ----------
        path : path, dict or zarr store
            Must not exist.
        layouts : FieldLayout
        num_atoms, num_edges : int array, [N]
        config : ZarrWriteConfig, mapping or profile name, optional
        provenance : dict, optional
            What this was made from; kept in the root document.
        identity : str, optional
            Given by a job that can be repeated, so that equal runs leave equal
            bytes; by default a random one.
        private : bool
            All is written by this object, in a folder that nobody else looks into
            before it is moved: files need no detour over temporary names.

        Raises
        ------
        StoreExistsError
            Something is at this path.
        """
        place = locate(path)
        if place.path is not None and place.path.exists():
            raise StoreExistsError(
                place.where, "already exists", mend="give another path, or remove it first"
            )
        chosen = as_config(config)
        infos: dict[str, FieldInfo] = {}
        for item in layouts:
            info = item.to_info(since=generation) if isinstance(item, FieldLayout) else item
            if info.name in infos:
                raise FieldError(place.where, f"field {info.name!r} is laid out twice")
            infos[info.name] = info
        _check_known(chosen, infos, place.where)
        atoms = _counts(num_atoms, "num_atoms", place.where)
        edges = _counts(num_edges, "num_edges", place.where)
        if len(atoms) != len(edges):
            raise PlanError(
                place.where,
                "num_atoms and num_edges have different lengths",
                found=f"{len(atoms)} and {len(edges)}",
            )
        counts = Counts(len(atoms), *(int(n.sum(dtype=np.int64)) for n in (atoms, edges)))
        schema = StoreSchema(
            fields={name: infos[name] for name in field_order(infos)},
            generation=generation - 1,
            identity=identity or uuid.uuid4().hex,
            provenance=dict(provenance or {}),
            encoding=chosen.to_json(),
        ).next(operation, counts=counts)
        # Deletions of an older generation are not visible here.
        schema = replace(schema, masks_since=generation)
        writer = cls(place, schema, chosen, private=private)
        writer._make(atoms, edges)
        return writer

    def _make(self, num_atoms: NDArray, num_edges: NDArray) -> None:
        if self.place.path is not None:
            self.place.path.mkdir(parents=True)
        session = self.session
        ours = self.schema.to_attributes()[KEY]
        session.write_root({KEY: {"format": FORMAT_VERSION, "building": ours}})
        for group in ("meta", "core", "custom"):
            session.write_group(group)
        counts = self.schema.counts
        for path, rows in ((layout.ATOMS_PTR, num_atoms), (layout.EDGES_PTR, num_edges)):
            session.new_meta(path, counts.samples + 1, self.config)
            session.write(path, 0, counts_to_ptr(rows))
        session.new_meta(layout.SAMPLES_MASK, counts.samples, self.config)
        session.new_meta(layout.ATOMS_MASK, counts.atoms, self.config)
        session.new_meta(layout.EDGES_MASK, counts.edges, self.config)
        for info in self.schema.fields.values():
            session.new_field(info, counts.rows(info.level), self.config)
            if info.holes:
                session.new_present(info, counts.samples, self.config)
        session.flush()

    @classmethod
    def open(cls, path: PathLike | Any) -> BulkWriter:
        """A store that is being built.

        Raises
        ------
        NotAStoreError
            There is none, or it is finished already.
        """
        place = locate(path)
        if place.path is not None and not place.path.is_dir():
            raise NotAStoreError(place.where, "no store is being built here")
        attributes = root_attributes(place, Session(place).store)
        building = (attributes.get(KEY) or {}).get("building")
        if building is None:
            raise NotAStoreError(place.where, "no store is being built here")
        counts = building["counts"]
        schema, _ = StoreSchema.from_attributes(
            {"num_samples": counts["samples"], KEY: building}, where=place.where
        )
        assert schema is not None
        return cls(place, schema, ZarrWriteConfig())

    @property
    def path(self) -> Path | None:
        """The folder, when it is one."""
        return self.place.path

    @property
    def session(self) -> Session:
        """This process's access to the files."""
        if self._session is None:
            self._session = Session(self.place, private=self._private, shared=True)
        return self._session

    @property
    def counts(self) -> Counts:
        return self.schema.counts

    def info(self, name: str) -> FieldInfo:
        """What was laid out for a field.

        Raises
        ------
        UnknownFieldError
        """
        info = self.schema.fields.get(resolve(name))
        if info is None:
            raise UnknownFieldError(
                self.place.where,
                f"no field {name!r} was laid out. {nearest(name, self.schema.fields)}",
            )
        return info

    # -- filling it --------------------------------------------------------

    def shard_rows(self, level: Level) -> int:
        """Rows to which writes at a level must align, right for each of its arrays."""
        paths = [i.path for i in self.schema.fields.values() if i.level == level]
        if level == "system":
            paths += [i.present_path for i in self.schema.fields.values() if i.holes]
        if not paths:
            return DEFAULT_CHUNK_ROWS[level]
        return math.lcm(*(self.session.unit(path) for path in paths))

    def write_rows(self, name: str, start: int, values: NDArray, *, flush: bool = True) -> None:
        """Write the rows of a field from ``start`` on; may be done again.

        Parameters
        ----------
        name : str
        start : int
        values : array
            ``neighbor_list`` with store-global atom numbers.
        flush : bool
            Force them to the medium; else a call of :meth:`flush` has to follow.

        Raises
        ------
        PlanError
            The range does not begin and end at shards (or end at the end).
        FieldError
            dtype kind or shape differ from what was laid out.
        """
        self.write_parts(name, start, [np.asarray(values)])
        if flush and not self._private:
            self.flush()

    def write_parts(self, name: str, start: int, parts: Sequence[NDArray]) -> None:
        """As :meth:`write_rows` of rows that lie in several arrays, without a flush."""
        info = self.info(name)
        rows = sum(len(part) for part in parts)
        self._check_aligned(info.name, info.path, start, rows, self.counts.rows(info.level))
        for part in parts:
            self._check_rows(info, part)
        self.session.write_parts(info.path, start, parts)

    def _check_rows(self, info: FieldInfo, values: NDArray) -> None:
        if info.is_text:
            if values.dtype.kind not in "UTO":
                raise FieldError(
                    self.place.where,
                    f"field {info.name!r} was laid out as text",
                    found=str(values.dtype),
                    expected="text",
                )
        elif values.shape[1:] != info.tail or not _same_kind(values.dtype, info.dtype):
            raise FieldError(
                self.place.where,
                f"field {info.name!r} was laid out otherwise",
                found=f"{values.dtype} rows {list(values.shape[1:])}",
                expected=f"{info.dtype} rows {list(info.tail)}",
            )

    def write_present(self, name: str, start: int, mask: NDArray, *, flush: bool = True) -> None:
        """Write which samples, from ``start`` on, carry a field; ``flush`` as for rows.

        Raises
        ------
        PlanError
            The field was laid out without holes, or the range is not aligned.
        """
        info = self.info(name)
        if not info.holes:
            raise PlanError(
                self.place.where,
                f"field {info.name!r} was laid out without holes",
                mend="lay it out with holes=True",
            )
        path = info.present_path
        self._check_aligned(info.name, path, start, len(mask), self.counts.samples)
        self.session.write(path, start, np.asarray(mask, dtype=bool))
        if flush and not self._private:
            self.flush()

    def flush(self) -> None:
        """Force what this process wrote to the medium: from here on a journal may say so."""
        self.session.flush()

    def _check_aligned(self, name: str, path: str, start: int, num: int, total: int) -> None:
        unit = self.session.unit(path)
        stop = start + num
        if not 0 <= start <= stop <= total or start % unit or (stop % unit and stop != total):
            raise PlanError(
                self.place.where,
                f"rows {start}:{stop} of field {name!r} are no whole shards, so two tasks would "
                "write one storage object",
                expected=f"multiples of {unit} rows within 0:{total}",
            )

    # -- making it true ----------------------------------------------------

    def commit(self, samples_mask: BoolArray | None = None) -> None:
        """Write the masks, force all to the medium, and make it a store.

        Parameters
        ----------
        samples_mask : bool array, [N], optional
            False for samples that count as deleted (quarantined ones).

        Raises
        ------
        PlanError
            Rows were never written.
        """
        counts, session = self.counts, self.session
        mask = np.ones(counts.samples, dtype=bool)
        if samples_mask is not None:
            mask = np.asarray(samples_mask, dtype=bool)
            if mask.shape != (counts.samples,):
                raise PlanError(
                    self.place.where,
                    "samples_mask has the wrong length",
                    found=list(mask.shape),
                    expected=[counts.samples],
                )
        self._check_written()
        for path, ptr_path, rows in (
            (layout.ATOMS_MASK, layout.ATOMS_PTR, counts.atoms),
            (layout.EDGES_MASK, layout.EDGES_PTR, counts.edges),
        ):
            # Where all is kept, no pointer is needed to say so.
            ptr = None if mask.all() else np.asarray(session.array(ptr_path)[:])
            self._write_row_mask(path, mask, ptr, rows)
        session.write(layout.SAMPLES_MASK, 0, mask)
        schema = self._without_false_holes()
        session.flush()
        if self._private and session.stage is not None:
            # The move to its own name is what makes it true.
            session.write_root(schema.to_attributes())
            session.stage.force()
        else:
            if self.place.path is not None:
                # Other processes wrote too, so the whole tree is forced, not only our files.
                fs.fsync_tree(self.place.path)
            session.write_root(schema.to_attributes())
        self.schema = schema

    def _write_row_mask(self, path: str, mask: BoolArray, ptr: Ptr | None, total: int) -> None:
        unit = self.session.unit(path)
        step = max(unit, _MASK_ROWS // unit * unit)
        for start in range(0, total, step):
            stop = min(start + step, total)
            rows: BoolArray = np.ones(stop - start, dtype=bool)
            if ptr is not None:
                rows = row_mask(mask, ptr, start, stop)
            self.session.write(path, start, rows)

    def _check_written(self) -> None:
        wanted = [(i.path, self.counts.rows(i.level)) for i in self.schema.fields.values()]
        wanted += [
            (i.present_path, self.counts.samples) for i in self.schema.fields.values() if i.holes
        ]
        for path, rows in wanted:
            for key in self.session.object_keys(path, rows):
                whole = f"{self.place.key(path)}/{key}"
                there = (
                    (self.place.path / path / key).exists()
                    if self.place.path is not None
                    else wait(self.session.store.exists(whole))
                )
                if not there:
                    raise PlanError(
                        self.place.where,
                        f"rows of array {path!r} were never written (object {key!r} is missing)",
                        mend="run the tasks that write them, then commit",
                    )

    def _without_false_holes(self) -> StoreSchema:
        """The schema, with the presence masks dropped that are True throughout."""
        fields = dict(self.schema.fields)
        for name, info in fields.items():
            if info.holes and bool(np.asarray(self.session.array(info.present_path)[:]).all()):
                self.session.remove(info.present_path)
                fields[name] = replace(info, holes=False)
        return replace(self.schema, fields=fields)


def _open_place(place: str | Place) -> BulkWriter:
    return BulkWriter.open(place)


def _counts(values: Any, name: str, where: str) -> NDArray:
    counts = np.asarray(values)
    if counts.size == 0:
        counts = counts.astype(np.int64)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise PlanError(
            where, f"{name} has to be whole numbers [N], none negative", found=str(counts.dtype)
        )
    return counts


def _same_kind(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    alike = {"u": "i"}
    return alike.get(given.kind, given.kind) == alike.get(wanted.kind, wanted.kind)


def _check_known(config: ZarrWriteConfig, infos: dict[str, FieldInfo], where: str) -> None:
    """Refuse overrides of fields that are nowhere: they would do nothing."""
    meta = [path.rpartition("/")[2] for path in layout.META]
    presents = [f"present/{name}" for name in infos]
    for name in config.field_overrides:
        if resolve(name) not in infos and name not in (*meta, *presents):
            raise ConfigError(
                where, f"field_overrides names {name!r}, which is no field. {nearest(name, infos)}"
            )

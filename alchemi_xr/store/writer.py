"""The writer of a store: each call takes the lease and makes one commit.

Rows are written behind the committed end, forced to the medium, and become
true by the replacement of the root document. What a killed writer left behind
that end is cut off by the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index
from alchemi_xr.data.fields import FIELDS, canonical_level, field_order, resolve
from alchemi_xr.errors import (
    FieldError,
    NotAStoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from alchemi_xr.store import fs, layout
from alchemi_xr.store.bulk import BulkWriter
from alchemi_xr.store.codecs import ZarrWriteConfig, as_config
from alchemi_xr.store.commit import Session
from alchemi_xr.store.copying import building, check_free, rewrite_to
from alchemi_xr.store.icechunk import retried
from alchemi_xr.store.incoming import Incoming, fit, globalised, receive
from alchemi_xr.store.lease import Lease
from alchemi_xr.store.locate import Place, locate
from alchemi_xr.store.reader import Snapshot
from alchemi_xr.store.recover import Opened, open_for_writing
from alchemi_xr.store.rewrite import check_rewritable, rewrite
from alchemi_xr.store.schema import Counts, FieldInfo, StoreSchema

__all__ = ["StoreWriter"]


class StoreWriter:
    """Writes one store.

    Parameters
    ----------
    store : str, Path, dict, zarr store, StorePath or Icechunk Repository
        A path, any URL that fsspec knows, or ``icechunk:<path or URL>``.
    config : ZarrWriteConfig, mapping or profile name, optional
        Acts where an array is made.
    lock_timeout : float
        Seconds to wait when another writer holds the lease.
    storage_options : dict, optional
        For a URL: endpoint, credentials and the like.
    branch : str, optional
        Branch of an Icechunk repository; by default ``main``.
    single_writer : bool
        You answer for it that nobody else writes, where the place itself cannot
        keep two writers apart.
    """

    def __init__(
        self,
        store: Any,
        config: Any = None,
        *,
        lock_timeout: float = 0.0,
        storage_options: dict[str, Any] | None = None,
        branch: str | None = None,
        single_writer: bool = False,
    ) -> None:
        self.place: Place = locate(
            store, storage_options=storage_options, branch=branch, single_writer=single_writer
        )
        self.config: ZarrWriteConfig = as_config(config)
        self.lock_timeout = lock_timeout
        self._opened: Opened | None = None
        self._warned: set[str] = set()

    @property
    def where(self) -> str:
        """The store's address, for messages."""
        return self.place.where

    def _lease(self) -> Lease:
        return Lease(self.place, timeout=self.lock_timeout)

    def _open(self, lease: Lease) -> Opened:
        """The store, ready to be written; what a killed writer left is cleared."""
        self._check_there()
        self._opened = open_for_writing(self.place, self._opened, took_over=lease.took_over)
        return self._opened

    def _check_there(self) -> None:
        path = self.place.path
        if path is None:
            return
        fs.finish_swap(path)
        if not path.exists():
            raise StoreNotFoundError(self.where, "no store is here", mend="write one first")
        if not path.is_dir():
            raise NotAStoreError(self.where, "this is a file, not a store")

    def _commit(self, opened: Opened, schema: StoreSchema) -> None:
        try:
            attributes = opened.session.commit(schema)
        except BaseException:
            self._opened = None
            raise
        self._opened = Opened(opened.session, schema, attributes)

    # -- write -------------------------------------------------------------

    @retried()
    def write(
        self, block: Block, *, overwrite: bool = False, provenance: dict[str, Any] | None = None
    ) -> None:
        """Make a new store of these samples.

        It is built beside its place and moved there whole, so that nothing half
        written is ever found under its name.

        Parameters
        ----------
        block : Block
            At least one sample.
        overwrite : bool
            Replace a store that is there (never a folder that is none).
        provenance : dict, optional

        Raises
        ------
        StoreExistsError
            Something is there, be it an empty folder.
        FieldError, LevelError
            The block is not right; nothing was written.
        """
        if block.num_samples == 0:
            raise FieldError(
                self.where,
                "Cannot create a store from an empty batch",
                found="0 samples",
                mend="give at least one sample",
            )
        incoming = receive(block, where=self.where)
        if self.place.repository is not None:
            self.place.repository.create()
        self._check_free(overwrite=overwrite)
        with self._lease():
            if self.place.path is not None:
                fs.finish_swap(self.place.path)
            self._check_free(overwrite=overwrite)
            if self.place.path is None:
                with building(self.place, overwrite=overwrite):
                    self._build(self.place, block, incoming, provenance)
                return
            path = self.place.path
            built = fs.unfinished_path(path)
            try:
                self._build(Place(self.where, path=built), block, incoming, provenance)
                fs.publish(built, path, overwrite=overwrite)
            except BaseException:
                fs.remove_tree(built)
                raise
        self._opened = None

    def _check_free(self, *, overwrite: bool) -> None:
        mend = "give another path, or overwrite=True to replace a store"
        if self.place.path is not None:
            if not os.path.lexists(self.place.path):
                return
            if overwrite and fs.looks_like_store(self.place.path):
                return
            if overwrite:
                mend = "a folder that is no store is not replaced; move it away yourself"
            raise StoreExistsError(self.where, "already exists", mend=mend)
        check_free(self.place, overwrite=overwrite)

    def _build(
        self,
        place: Place,
        block: Block,
        incoming: dict[str, Incoming],
        provenance: dict[str, Any] | None,
    ) -> None:
        infos = [
            replace(item.info, holes=item.present is not None, since=1)
            for item in incoming.values()
        ]
        writer = BulkWriter.create(
            place,
            infos,
            np.diff(block.atoms_ptr),
            np.diff(block.edges_ptr),
            config=self.config,
            provenance=provenance,
        )
        for name, item in incoming.items():
            values = item.values
            if name == "neighbor_list":
                values = globalised(values, block, 0, where=self.where)
            writer.write_rows(name, 0, values)
            if item.present is not None:
                writer.write_present(name, 0, item.present)
        writer.commit()

    # -- append ------------------------------------------------------------

    @retried()
    def append(self, block: Block) -> None:
        """Add samples at the end.

        Fields that the block lacks get the fill and a False in their presence
        mask; fields that the store lacks are added, with the same for all
        earlier samples. The dtype on disk stays as first given.

        Parameters
        ----------
        block : Block

        Raises
        ------
        StoreNotFoundError
            There is no store yet.
        StoreLockedError
            Another writer is at work.
        FieldError, LevelError
            A field has another level, shape or kind of dtype; nothing was written.
        """
        incoming = receive(block, where=self.where)
        with self._lease() as lease:
            opened = self._open(lease)
            if block.num_samples == 0:
                return
            self._append(opened, block, incoming)

    def _append(self, opened: Opened, block: Block, incoming: dict[str, Incoming]) -> None:
        session, schema = opened.session, opened.schema
        before = schema.counts
        after = before + Counts(block.num_samples, block.num_atoms, block.num_edges)
        generation = schema.generation + 1
        # All checks first: what is refused has written nothing.
        known: dict[str, NDArray] = {}
        fresh: dict[str, Incoming] = {}
        for name, item in incoming.items():
            info = schema.fields.get(name)
            values = (
                item.values
                if info is None
                else fit(item, info, where=self.where, warned=self._warned)
            )
            if name == "neighbor_list":
                values = globalised(values, block, before.atoms, where=self.where)
            if info is None:
                fresh[name] = replace(item, values=values)
            else:
                known[name] = values
        fields: dict[str, FieldInfo] = {}
        self._opened = None
        for name, info in schema.fields.items():
            start, stop = before.rows(info.level), after.rows(info.level)
            given = incoming.get(name)
            if given is not None:
                session.extend(info.path, start, known[name])
            elif name == "neighbor_list":
                # Rows without a value hold the fill, 0, in local numbers.
                zeros = np.zeros((block.num_edges, 2), dtype=info.dtype)
                session.extend(
                    info.path, start, globalised(zeros, block, before.atoms, where=self.where)
                )
            else:
                session.extend_filled(info.path, start, stop, info.fill)
            present = (
                np.zeros(block.num_samples, dtype=bool)
                if given is None
                else given.present
                if given.present is not None
                else np.ones(block.num_samples, dtype=bool)
            )
            fields[name] = self._extend_present(session, info, before.samples, present)
        for name, item in fresh.items():
            info = replace(item.info, since=generation)
            rows = before.rows(info.level)
            session.new_field(info, rows, self.config)
            self._fill_before(session, info, schema, rows)
            session.extend(info.path, rows, item.values)
            mask = (
                item.present if item.present is not None else np.ones(block.num_samples, dtype=bool)
            )
            fields[name] = self._extend_present(session, info, before.samples, mask, earlier=False)
        self._grow_meta(session, block, before, after)
        self._commit(
            opened,
            schema.next("append", counts=after, fields={n: fields[n] for n in field_order(fields)}),
        )

    def _fill_before(
        self, session: Session, info: FieldInfo, schema: StoreSchema, rows: int
    ) -> None:
        """Fill the rows of the samples that were there before a field."""
        if info.name != "neighbor_list":
            session.extend_filled(info.path, 0, rows, info.fill)
            return
        if rows:
            # Edges without a list: local 0, so that the numbers stay in range.
            samples = schema.counts.samples
            atoms_ptr = np.asarray(session.array(layout.ATOMS_PTR)[: samples + 1])
            edges_ptr = np.asarray(session.array(layout.EDGES_PTR)[: samples + 1])
            first = np.repeat(atoms_ptr[:-1], np.diff(edges_ptr)).astype(info.dtype)
            session.extend(info.path, 0, np.repeat(first[:, None], 2, axis=1))

    def _extend_present(
        self,
        session: Session,
        info: FieldInfo,
        samples: int,
        present: BoolArray,
        *,
        earlier: bool = True,
    ) -> FieldInfo:
        """Add to the presence mask of a field, making it at the first hole."""
        if not info.holes:
            if present.all() and (earlier or samples == 0):
                return info
            session.new_present(info, samples, self.config)
            session.extend_filled(info.present_path, 0, samples, earlier)
        session.extend(info.present_path, samples, present)
        return replace(info, holes=True)

    @staticmethod
    def _grow_meta(session: Session, block: Block, before: Counts, after: Counts) -> None:
        """Masks of rows, then pointers, and the sample mask last.

        Other tools count the sample mask: while it is short they see nothing.
        """
        session.extend_filled(layout.ATOMS_MASK, before.atoms, after.atoms, True)
        session.extend_filled(layout.EDGES_MASK, before.edges, after.edges, True)
        for path, ptr, rows in (
            (layout.ATOMS_PTR, block.atoms_ptr, before.atoms),
            (layout.EDGES_PTR, block.edges_ptr, before.edges),
        ):
            session.extend(path, before.samples + 1, ptr[1:] + rows)
        session.flush()
        session.extend_filled(layout.SAMPLES_MASK, before.samples, after.samples, True)

    # -- fields ------------------------------------------------------------

    @retried()
    def add_custom(self, name: str, values: Any, level: str, *, unit: str | None = None) -> None:
        """Add a field of your own over all samples, deleted ones included.

        Parameters
        ----------
        name : str
        values : array
            [V, ...], [E, ...] or [N, ...]; text only per sample.
        level : {"atom", "edge", "system"}
        unit : str, optional

        Raises
        ------
        LevelError
            The level is not known.
        FieldError
            The name is taken or is that of a core field; or the number of rows
            is not the store's.
        """
        where = f"{self.where}, field {name!r}"
        chosen = canonical_level(level, where=where)
        array = np.asarray(values)
        if resolve(name) in FIELDS:
            raise FieldError(
                where,
                f"{name!r} is the name of a core field and would shadow it",
                mend="choose another name, or append samples that carry the field",
            )
        with self._lease() as lease:
            opened = self._open(lease)
            session, schema = opened.session, opened.schema
            if name in schema.fields:
                raise FieldError(
                    where, "a field of this name already exists", mend="choose another name"
                )
            rows = schema.counts.rows(chosen)
            if array.ndim == 0 or len(array) != rows:
                raise FieldError(
                    where,
                    f"the number of rows does not match expected size {rows}",
                    found=list(array.shape),
                    expected=f"{rows} rows, one per {chosen} with the deleted ones",
                )
            item = _custom(name, array, chosen, unit or "", where, schema.counts)
            info = replace(
                item.info,
                group="text" if item.info.is_text else "custom",
                since=schema.generation + 1,
            )
            self._opened = None
            session.new_field(info, rows, self.config)
            session.write(info.path, 0, item.values)
            fields = {**schema.fields, name: info}
            self._commit(
                opened,
                schema.next("add_custom", fields={n: fields[n] for n in field_order(fields)}),
            )

    # -- deletion ----------------------------------------------------------

    @retried(positions=True)
    def delete(self, indices: Any) -> None:
        """Mark samples as deleted; their data stays and ``undelete`` brings them back.

        Parameters
        ----------
        indices : int, slice, ints, bool mask or function
            Physical positions; negative ones count from the end. A function gets
            the newest Snapshot while the lease is held, and gives them.

        Raises
        ------
        IndexRangeError
        """
        self._mark(indices, alive=False)

    @retried(positions=True)
    def undelete(self, indices: Any) -> None:
        """Take deletions back; positions as in :meth:`delete`."""
        self._mark(indices, alive=True)

    def _mark(self, indices: Any, *, alive: bool) -> None:
        with self._lease() as lease:
            opened = self._open(lease)
            session, schema = opened.session, opened.schema
            samples = schema.counts.samples
            if callable(indices):
                indices = indices(self.snapshot())
            index = np.unique(as_index(indices, samples, where=self.where))
            mask = np.asarray(session.array(layout.SAMPLES_MASK)[:samples]).astype(bool)
            changed = index[mask[index] != alive]
            if len(changed) == 0 and not opened.unsettled:
                return
            mask[changed] = alive
            self._opened = None
            # The masks that other tools read span many files. So the whole new
            # sample mask is written aside, the root document makes it true, and
            # only then the others follow; a writer after a crash repeats that.
            session.new_meta(layout.PENDING_MASK, samples, self.config)
            session.write(layout.PENDING_MASK, 0, mask)
            operation = "undelete" if alive else "delete"
            after = schema.next(operation, masks_since=schema.generation + 1, pending_mask=True)
            attributes = session.commit(after)
            opened = Opened(session, after, attributes)
            self._opened = open_for_writing(self.place, opened, took_over=False, changed=changed)

    # -- rewrite -----------------------------------------------------------

    @retried()
    def defragment(
        self,
        config: Any = None,
        *,
        dest: Any = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Rewrite the store without its deleted samples.

        A new store is built beside it, in pieces of bounded memory, and put in
        its place in one step. The old one is kept aside, hidden, for those who
        read it, until the next rewrite.

        Parameters
        ----------
        config : ZarrWriteConfig, mapping or profile name, optional
            New chunks and codecs; they stay.
        dest : path, URL or store, optional
            Write the result there, where nothing is, and leave this store as it
            is. An object store needs it: it cannot replace a store in one step.
        storage_options : dict, optional
            For ``dest``.

        Raises
        ------
        StoreError
            The store is in an object store, and there is no ``dest``.
        """
        chosen = self.config if config is None else as_config(config)
        if dest is not None:
            rewrite_to(self.place, dest, chosen, storage_options=storage_options)
            return
        check_rewritable(self.place)
        with self.rewriting():
            rewrite(self.place, chosen)
        if config is not None:
            self.config = chosen

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Snapshot]:
        """Hold the lease while another one builds this store anew; gives its newest generation."""
        with self._lease() as lease:
            opened = self._open(lease)
            if opened.unsettled:
                self._commit(opened, opened.schema.next("adopt"))
            self._opened = None
            yield self.snapshot()

    # -- reading back ------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The newest committed generation."""
        from alchemi_xr.store.reader import open_store

        return open_store(self.place)


def _custom(
    name: str, array: NDArray, level: Any, unit: str, where: str, counts: Counts
) -> Incoming:
    """A custom field, checked like one of a block of the whole store."""
    shape = {"atom": counts.atoms, "edge": counts.edges, "system": counts.samples}
    # One sample that owns all rows stands for the store: only the field is checked.
    if level == "system":
        ptr = np.zeros(counts.samples + 1, dtype=np.int64)
        block = Block(ptr, ptr, {name: array}, {name: level})
    else:
        rows = np.array([0, shape[level]], dtype=np.int64)
        none = np.array([0, 0], dtype=np.int64)
        pointers = (rows, none) if level == "atom" else (none, rows)
        block = Block(*pointers, {name: array}, {name: level})
    if unit:
        block.units[name] = unit
    return receive(block, where=where)[name]

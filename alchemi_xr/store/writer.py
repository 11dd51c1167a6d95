"""The writer of a store: each call takes the lease and makes one commit.

Rows are written behind the committed end, forced to the medium, and become
true by the replacement of the root document. What a killed writer left behind
that end is cut off by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index
from alchemi_xr.data.fields import FIELDS, canonical_level, field_order, resolve
from alchemi_xr.errors import (
    AlchemiError,
    ConfigError,
    FieldError,
    NotAStoreError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from alchemi_xr.store import fs, layout
from alchemi_xr.store.bulk import BulkWriter
from alchemi_xr.store.codecs import ZarrWriteConfig, as_config
from alchemi_xr.store.copying import building, check_free, rewrite_to
from alchemi_xr.store.growth import Growth
from alchemi_xr.store.icechunk import retried
from alchemi_xr.store.incoming import Incoming, custom_field, globalised, receive
from alchemi_xr.store.lease import Lease
from alchemi_xr.store.locate import Place, locate
from alchemi_xr.store.reader import Snapshot
from alchemi_xr.store.recover import Opened, finish_masks, open_for_writing
from alchemi_xr.store.rewrite import check_rewritable, rewrite
from alchemi_xr.store.schema import StoreSchema
from alchemi_xr.store.transaction import TRANSACTION_BYTES, Transaction

__all__ = ["StoreWriter"]


class StoreWriter:
    """Writes one store.

    Parameters
    ----------
    store : str, Path, dict, zarr store, StorePath or Icechunk Repository
        A path, any URL that fsspec knows, or ``icechunk:<path or URL>``.
    config : ZarrWriteConfig, mapping or profile name, optional
        Acts where an array is made. By default as the store was made, or the
        default profile where nothing is known of that.
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
        self._given = config is not None
        self.config: ZarrWriteConfig = as_config(config)
        self.lock_timeout = lock_timeout
        self._opened: Opened | None = None
        self._warned: set[str] = set()
        self._transaction: Transaction | None = None

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
        if not self._given and self._opened.schema.encoding:
            # A record that this version does not understand leaves the defaults.
            with contextlib.suppress(ConfigError):
                self.config = as_config(self._opened.schema.encoding)
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
        attributes = opened.session.commit(schema)
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
        self._check_no_transaction("a new store")
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
                fs.publish(built, path, overwrite=overwrite, forced=True)
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
            private=place.path is not None,
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
        if self._transaction is not None:
            self._transaction.append(block)
            return
        incoming = receive(block, where=self.where)
        with self._lease() as lease:
            opened = self._open(lease)
            if block.num_samples == 0:
                return
            with self._undone_on_error(opened):
                grown = self._growth(opened).add(
                    opened.schema, block, incoming, opened.schema.generation + 1
                )
                self._commit(opened, grown.next("append"))

    def _growth(self, opened: Opened) -> Growth:
        return Growth(opened.session, self.config, self.where, self._warned)

    @contextlib.contextmanager
    def _undone_on_error(self, opened: Opened) -> Iterator[None]:
        """What an error interrupts leaves no staged files, and the next call looks anew."""
        self._opened = None
        try:
            yield
        except BaseException:
            self._opened = None
            opened.session.drop()
            raise

    # -- transactions ------------------------------------------------------

    @contextlib.contextmanager
    def transaction(
        self, *, max_bytes: int = TRANSACTION_BYTES, job: str = ""
    ) -> Iterator[StoreWriter]:
        """Make all appends and deletions of a ``with`` block one commit.

        Readers see nothing of them before its end, and nothing at all when an
        error leaves it. The lease is held throughout.

        Parameters
        ----------
        max_bytes : int
            Samples held in memory; more are written behind the committed end.
        job : str
            Name kept with the commit in the store's history.

        Raises
        ------
        StoreNotFoundError, StoreLockedError
        StoreError
            A transaction is open already.

        Examples
        --------
        >>> with writer.transaction():  # doctest: +SKIP
        ...     for block in blocks:
        ...         writer.append(block)
        """
        self._check_no_transaction("another transaction")
        with self._lease() as lease:
            opened = self._open(lease)
            begun = Transaction(self._growth(opened), opened.schema, max_bytes=max_bytes)
            try:
                with self._undone_on_error(opened):
                    self._transaction = begun
                    try:
                        yield self
                    finally:
                        self._transaction = None
                    self._commit_transaction(opened, begun, job)
            except BaseException:
                # What zarr wrote behind the end, or a document that grew, is cut off again.
                if self.place.repository is None:
                    with contextlib.suppress(AlchemiError, OSError):
                        open_for_writing(self.place, None, took_over=False)
                raise

    def _commit_transaction(self, opened: Opened, done: Transaction, job: str) -> None:
        schema, mask, changed = done.finish()
        if mask is not None:
            operation = "append, delete" if schema.counts != opened.schema.counts else "delete"
            self._commit_masks(opened, schema, mask, changed, operation)
        elif schema is not opened.schema or opened.unsettled:
            self._commit(opened, schema.next("append", job=job))
        else:
            self._opened = opened

    def _check_no_transaction(self, what: str) -> None:
        if self._transaction is not None:
            raise StoreError(
                self.where,
                f"{what} cannot begin inside a transaction",
                mend="end the transaction first; inside it append, delete and undelete",
            )

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
        self._check_no_transaction("add_custom")
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
            item = custom_field(name, array, chosen, unit or "", where, schema.counts)
            info = replace(
                item.info,
                group="text" if item.info.is_text else "custom",
                since=schema.generation + 1,
            )
            fields = {**schema.fields, name: info}
            with self._undone_on_error(opened):
                session.new_field(info, rows, self.config)
                session.write(info.path, 0, item.values)
                self._commit(
                    opened,
                    schema.next("add_custom", fields={n: fields[n] for n in field_order(fields)}),
                )

    @retried()
    def annotate(self, facts: Mapping[str, Any]) -> None:
        """Add to what the store remembers of where it came from.

        Parameters
        ----------
        facts : mapping of str to JSON value
            They replace those of the same names. Nothing is committed where all are known.

        Raises
        ------
        ConfigError
            They are no JSON object.
        """
        self._check_no_transaction("annotate")
        try:
            given = dict(json.loads(json.dumps(facts, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "annotate", f"the facts are no JSON object ({error})", mend="give a dict of values"
            ) from error
        with self._lease() as lease:
            opened = self._open(lease)
            known = {**opened.schema.provenance, **given}
            if known != opened.schema.provenance:
                with self._undone_on_error(opened):
                    self._commit(opened, opened.schema.next("annotate", provenance=known))

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
        if self._transaction is not None:
            if callable(indices):
                self._check_no_transaction("a search for samples to delete")
            self._transaction.mark(indices, alive=alive)
            return
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
            with self._undone_on_error(opened):
                operation = "undelete" if alive else "delete"
                self._commit_masks(opened, schema, mask, changed, operation)

    def _commit_masks(
        self,
        opened: Opened,
        schema: StoreSchema,
        mask: BoolArray,
        changed: NDArray,
        operation: str,
    ) -> None:
        """Make deletions true, with all that was written before.

        The masks that other tools read span many files. So the whole new sample
        mask is written aside, the root document makes it true, and only then the
        others follow; a writer after a crash repeats that.
        """
        session = opened.session
        session.new_meta(layout.PENDING_MASK, len(mask), self.config)
        session.write(layout.PENDING_MASK, 0, mask)
        after = schema.next(operation, masks_since=schema.generation + 1, pending_mask=True)
        session.commit(after)
        settled, attributes = finish_masks(session, after, changed, mask=mask)
        self._opened = Opened(session, settled, attributes)

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
            rewrite(self.place, self.config if config is None else chosen)
        if config is not None:
            self.config, self._given = chosen, True

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Snapshot]:
        """Hold the lease while another one builds this store anew; gives its newest generation."""
        self._check_no_transaction("a rewrite")
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

"""Samples are added behind the committed end; a commit makes them true.

Everything is checked before anything is written. Fields that the new samples
lack get the fill and a False in their presence mask, and fields that the store
lacks are made, with the same for all earlier samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import field_order
from alchemi_xr.store import layout
from alchemi_xr.store.codecs import ZarrWriteConfig
from alchemi_xr.store.commit import Session
from alchemi_xr.store.incoming import Incoming, fit, globalised
from alchemi_xr.store.schema import Counts, FieldInfo, StoreSchema

__all__ = ["Growth"]


@dataclass
class Growth:
    """Adds samples to one store, in one session.

    Parameters
    ----------
    session : Session
    config : ZarrWriteConfig
        Acts where an array is made.
    where : str
    warned : set of str
        What was warned of already.
    """

    session: Session
    config: ZarrWriteConfig
    where: str
    warned: set[str]

    def check(self, schema: StoreSchema, incoming: dict[str, Incoming]) -> dict[str, NDArray]:
        """The values as the arrays on disk take them; nothing is written.

        Raises
        ------
        FieldError, LevelError
        """
        fitted = {}
        for name, item in incoming.items():
            info = schema.fields.get(name)
            fitted[name] = (
                item.values
                if info is None
                else fit(item, info, where=self.where, warned=self.warned)
            )
        return fitted

    def add(
        self, schema: StoreSchema, block: Block, incoming: dict[str, Incoming], generation: int
    ) -> StoreSchema:
        """Write the samples of a block; the schema that a commit would make true.

        Parameters
        ----------
        schema : StoreSchema
            Of the samples before, committed or not.
        block : Block
        incoming : dict
            Its fields, as received.
        generation : int
            Of the commit to come.
        """
        session = self.session
        before = schema.counts
        after = before + Counts(block.num_samples, block.num_atoms, block.num_edges)
        # All checks first: what is refused has written nothing.
        values = self.check(schema, incoming)
        if "neighbor_list" in values:
            values["neighbor_list"] = globalised(
                values["neighbor_list"], block, before.atoms, where=self.where
            )
        fields: dict[str, FieldInfo] = {}
        for name, info in schema.fields.items():
            start, stop = before.rows(info.level), after.rows(info.level)
            given = incoming.get(name)
            if given is not None:
                session.extend(info.path, start, values[name])
            elif name == "neighbor_list":
                # Rows without a value hold the fill, 0, in local numbers.
                zeros = np.zeros((block.num_edges, 2), dtype=info.dtype)
                session.extend(
                    info.path, start, globalised(zeros, block, before.atoms, where=self.where)
                )
            else:
                session.extend_filled(info.path, start, stop, info.fill)
            fields[name] = self._extend_present(
                info, before.samples, _present(given, block.num_samples)
            )
        for name, item in incoming.items():
            if name in schema.fields:
                continue
            info = replace(item.info, since=generation)
            rows = before.rows(info.level)
            session.new_field(info, rows, self.config)
            self._fill_before(info, schema, rows)
            session.extend(info.path, rows, values[name])
            fields[name] = self._extend_present(
                info, before.samples, _present(item, block.num_samples), earlier=False
            )
        self._grow_meta(block, before, after)
        return replace(schema, counts=after, fields={n: fields[n] for n in field_order(fields)})

    def _fill_before(self, info: FieldInfo, schema: StoreSchema, rows: int) -> None:
        """Fill the rows of the samples that were there before a field."""
        if info.name != "neighbor_list":
            self.session.extend_filled(info.path, 0, rows, info.fill)
            return
        if rows:
            # Edges without a list: local 0, so that the numbers stay in range.
            samples = schema.counts.samples
            atoms_ptr = np.asarray(self.session.array(layout.ATOMS_PTR)[: samples + 1])
            edges_ptr = np.asarray(self.session.array(layout.EDGES_PTR)[: samples + 1])
            first = np.repeat(atoms_ptr[:-1], np.diff(edges_ptr)).astype(info.dtype)
            self.session.extend(info.path, 0, np.repeat(first[:, None], 2, axis=1))

    def _extend_present(
        self, info: FieldInfo, samples: int, present: BoolArray, *, earlier: bool = True
    ) -> FieldInfo:
        """Add to the presence mask of a field, making it at the first hole."""
        if not info.holes:
            if present.all() and (earlier or samples == 0):
                return info
            self.session.new_present(info, samples, self.config)
            self.session.extend_filled(info.present_path, 0, samples, earlier)
        self.session.extend(info.present_path, samples, present)
        return replace(info, holes=True)

    def _grow_meta(self, block: Block, before: Counts, after: Counts) -> None:
        """Masks of rows, then pointers, and the sample mask last.

        Other tools count the sample mask: while it is short they see nothing.
        """
        session = self.session
        session.extend_filled(layout.ATOMS_MASK, before.atoms, after.atoms, True)
        session.extend_filled(layout.EDGES_MASK, before.edges, after.edges, True)
        for path, ptr, rows in (
            (layout.ATOMS_PTR, block.atoms_ptr, before.atoms),
            (layout.EDGES_PTR, block.edges_ptr, before.edges),
        ):
            session.extend(path, before.samples + 1, ptr[1:] + rows)
        session.barrier()
        session.extend_filled(layout.SAMPLES_MASK, before.samples, after.samples, True)


def _present(item: Incoming | None, samples: int) -> BoolArray:
    """Which of so many samples carry a field."""
    if item is None:
        return np.zeros(samples, dtype=bool)
    return np.ones(samples, dtype=bool) if item.present is None else item.present

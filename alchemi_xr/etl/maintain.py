"""Stores kept in shape: without deleted samples, cut anew, in another order, many in one.

Each is a Dask graph of the plan: one task owns one storage object, memory is
bounded whatever the size, and a job that was stopped is taken up by the same
call with the same bytes as result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, NDArray
from alchemi_xr._version import __version__
from alchemi_xr.errors import ConfigError, FieldError, UnknownFieldError, nearest
from alchemi_xr.etl.choosing import check_condition, kept_by
from alchemi_xr.etl.gather import Counted, count
from alchemi_xr.etl.predicate import Predicate
from alchemi_xr.etl.rebuild import How, build_new, recipe_of, rewritten
from alchemi_xr.etl.report import MaintainReport
from alchemi_xr.etl.union import unify
from alchemi_xr.plan.elsewhere import check_place, destination_of
from alchemi_xr.plan.progress import Progress
from alchemi_xr.store.codecs import as_config
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["defragment", "merge", "rechunk", "sort"]


def defragment(
    store: Any,
    *,
    destination: Any = None,
    config: Any = None,
    overwrite: bool = False,
    client: Any = None,
    threads: int | None = None,
    memory: int | None = None,
    progress: bool | Progress = True,
    resume: bool = True,
) -> MaintainReport:
    """A store without its deleted samples.

    Parameters
    ----------
    store : path, dict, zarr store
    destination : path or zarr store, optional
        Where the result goes; by default it takes the place of the store in one
        step, under the writer's lease. Readers that hold the old generation go
        on reading it. A store that is neither a folder nor in memory needs one.
    config : ZarrWriteConfig, mapping or profile name, optional
        New chunks and codecs; by default those that the fields have.
    overwrite : bool
        Replace a store that is at the destination.
    client : None, int, str, LocalCluster or Client
        Where it runs: threads here, so many worker processes, or a cluster.
    threads : int, optional
        Threads here, where there is no client.
    memory : int, optional
        Bytes that a worker may use; a plan that needs more is refused.
    progress : bool or Progress
    resume : bool
        Take up the same job where it was stopped.

    Raises
    ------
    StoreNotFoundError, NotAStoreError, StoreLockedError, StoreExistsError, PlanError
        The store is as it was.
    """
    return rewritten(
        store,
        lambda snapshot: (snapshot.active, None),
        How(client, threads, memory, progress, resume),
        operation="defragment",
        config=config,
        destination=destination,
        overwrite=overwrite,
    )


def rechunk(
    store: Any,
    config: Any,
    *,
    destination: Any = None,
    overwrite: bool = False,
    client: Any = None,
    threads: int | None = None,
    memory: int | None = None,
    progress: bool | Progress = True,
    resume: bool = True,
) -> MaintainReport:
    """A store with other chunks, shards and codecs; deleted samples stay, deleted.

    Parameters
    ----------
    store : path, dict, zarr store
    config : ZarrWriteConfig, mapping or profile name
    destination, overwrite, client, threads, memory, progress, resume
        As for :func:`defragment`.

    Raises
    ------
    StoreNotFoundError, NotAStoreError, StoreLockedError, StoreExistsError, ConfigError, PlanError
    """
    return rewritten(
        store,
        lambda snapshot: _kept(snapshot, np.arange(snapshot.num_samples, dtype=np.int64)),
        How(client, threads, memory, progress, resume),
        operation="rechunk",
        config=as_config(config),
        destination=destination,
        overwrite=overwrite,
    )


def sort(
    store: Any,
    by: str | Callable[[Any], Any] = "num_atoms",
    *,
    ascending: bool = True,
    destination: Any = None,
    config: Any = None,
    overwrite: bool = False,
    client: Any = None,
    threads: int | None = None,
    memory: int | None = None,
    progress: bool | Progress = True,
    resume: bool = True,
) -> MaintainReport:
    """A store with its samples in the order of a key.

    The order is stable, also when descending; samples without a value, and NaN,
    come last. Deleted samples are sorted too and stay deleted.

    Parameters
    ----------
    store : path, dict, zarr store
    by : str or callable
        ``"num_atoms"``, ``"num_edges"``, or a field with one value a sample; or
        a function of the lazy Dataset (deleted samples included) that gives one
        value a sample, such as ``lambda ds: ds.ragged.reduce("forces", "norm")``.
    ascending : bool
    destination, config, overwrite, client, threads, memory, progress, resume
        As for :func:`defragment`.

    Raises
    ------
    UnknownFieldError, FieldError
        There is no such key, or it has not one value a sample.
    StoreNotFoundError, NotAStoreError, StoreLockedError, StoreExistsError, PlanError
    """

    def choose(snapshot: Snapshot) -> tuple[IntArray, BoolArray | None]:
        values, there = sample_key(snapshot, by)
        return _kept(snapshot, stable_order(values, there, ascending=ascending))

    return rewritten(
        store,
        choose,
        How(client, threads, memory, progress, resume),
        operation="sort",
        config=config,
        destination=destination,
        overwrite=overwrite,
    )


def _kept(snapshot: Snapshot, order: IntArray) -> tuple[IntArray, BoolArray | None]:
    """The samples in this order, the deleted ones kept."""
    mask = snapshot.samples_mask
    if snapshot.schema.foreign_samples:
        # Another tool zeroes what it deletes: nothing is there to be kept.
        return order[mask[order]], None
    return order, None if mask.all() else mask[order]


def merge(
    sources: Sequence[Any],
    destination: Any,
    *,
    fields: Sequence[str] | None = None,
    where: str | None = None,
    config: Any = None,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    client: Any = None,
    threads: int | None = None,
    memory: int | None = None,
    progress: bool | Progress = True,
    resume: bool = True,
) -> MaintainReport:
    """One store of the samples of many, in the order given, without deleted ones.

    The result has every field of every store; a sample without a field has the
    fill and a False in its presence mask. Numbers get the dtype that holds
    every value of all stores.

    Parameters
    ----------
    sources : sequence of path, dict, zarr store
    destination : path, URL, dict or zarr store
        Where the store appears, in one step, when all is done.
    fields : sequence of str, optional
        Keep only these.
    where : str, optional
        Keep the samples of which this is true, such as ``"natoms < 200 and fmax < 50"``;
        see :class:`~alchemi_xr.etl.predicate.Predicate`. It may ask for fields that are
        not kept; of a sample that lacks one it is undecided, and the sample is not kept.
    config : ZarrWriteConfig, mapping or profile name, optional
    overwrite : bool
        Replace a store that is at the destination.
    storage_options : dict, optional
        For a URL: endpoint, credentials and the like.
    client, threads, memory, progress, resume
        As for :func:`defragment`.

    Raises
    ------
    LevelError, FieldError
        A field is not the same thing in two stores; both are named, and nothing
        was written.
    ConfigError, UnknownFieldError
        The condition cannot be read, no store has what it asks for, or no sample meets it.
    StoreNotFoundError, NotAStoreError, StoreExistsError, PlanError
    """
    begun = time.perf_counter()
    if isinstance(sources, (str, bytes)) or not isinstance(sources, Sequence):
        raise ConfigError("merge", "give the stores as a list", found=type(sources).__name__)
    if not sources:
        raise ConfigError("merge", "there is no store to merge")
    given = destination_of(destination, storage_options=storage_options)
    place = check_place(given, overwrite=overwrite)
    condition = None if where is None else Predicate(where)
    if condition is not None:
        check_condition(condition, sources)
    stores, dropped, undecided = [], 0, 0
    for source in sources:
        counted, out, unknown = _counted(source, condition)
        stores.append(counted)
        dropped += out
        undecided += unknown
    if condition is not None and not any(len(store.order) for store in stores):
        raise ConfigError(
            "where",
            f"no sample of the stores meets it ({undecided:,} undecided)",
            found=condition.text,
            mend="loosen it",
        )
    recipe = recipe_of(
        stores,
        unify(stores, fields),
        as_config(config),
        operation="merge",
        provenance={
            "merged_by": f"alchemi_xr {__version__}",
            "stores": [
                {"store": store.where, "samples": len(store.order)} for store in stores[:100]
            ],
            "num_stores": len(stores),
            **({} if condition is None else {"where": condition.text, "undecided": undecided}),
        },
    )
    how = How(client, threads, memory, progress, resume)
    with how.running() as running:
        (report,) = build_new([(place, recipe, stores)], how, *running, overwrite=overwrite)
    report.removed, report.undecided = dropped, undecided
    report.seconds = time.perf_counter() - begun
    return report


def _counted(source: Any, condition: Predicate | None) -> tuple[Counted, int, int]:
    """The samples of a store to be merged, and how many are not and are undecided."""
    # By itself, so that nothing holds on to the pointers of all stores.
    with open_store(source) as snapshot:
        kept, undecided = kept_by(condition, snapshot)
        return count(snapshot, kept), snapshot.num_samples - len(kept), undecided


# -- keys ----------------------------------------------------------------------


def sample_key(
    snapshot: Snapshot, by: str | Callable[[Any], Any]
) -> tuple[NDArray, BoolArray | None]:
    """One value for every sample, deleted ones included, and which have one.

    Raises
    ------
    UnknownFieldError, FieldError
    """
    if callable(by):
        from alchemi_xr.etl.marks import lazy_dataset

        values = np.asarray(by(lazy_dataset(snapshot)))
        return _one_each(values, snapshot, "the key"), None
    if by in ("num_atoms", "num_edges") and by not in snapshot:
        return np.diff(snapshot.atoms_ptr if by == "num_atoms" else snapshot.edges_ptr), None
    if by not in snapshot:
        known = [n for n in snapshot.fields if snapshot.level(n) == "system"]
        raise UnknownFieldError(
            snapshot.where, f"no key {by!r}. {nearest(by, [*known, 'num_atoms', 'num_edges'])}"
        )
    if snapshot.level(by) != "system":
        raise FieldError(
            snapshot.where,
            f"field {by!r} is a field of {snapshot.level(by)}s and has not one value a sample",
            mend="give a function of the Dataset, such as "
            f"lambda ds: ds.ragged.reduce({by!r}, 'max')",
        )
    values = snapshot.read_rows(by, 0, snapshot.num_samples)
    return _one_each(values, snapshot, f"field {by!r}"), snapshot.present(by)


def _one_each(values: NDArray, snapshot: Snapshot, what: str) -> NDArray:
    if values.shape == (snapshot.num_samples, 1):
        values = values[:, 0]
    if values.shape != (snapshot.num_samples,):
        raise FieldError(
            snapshot.where,
            f"{what} has not one value a sample",
            found=list(values.shape),
            expected=[snapshot.num_samples],
        )
    if values.dtype.kind in "OU":
        # Variable-length: one long text does not make all as long.
        values = values.astype(np.dtypes.StringDType())
    return values


def stable_order(values: NDArray, there: BoolArray | None, *, ascending: bool) -> IntArray:
    """Positions in the order of the values, equal ones as they were, missing ones last.

    Examples
    --------
    >>> stable_order(np.array([2.0, np.nan, 3.0, 2.0]), None, ascending=False)
    array([2, 0, 3, 1])
    """
    have = np.ones(len(values), dtype=bool) if there is None else there.copy()
    if values.dtype.kind in "fc":
        have &= ~np.isnan(values)
    if have.all():
        # Without copies of the keys: this is where a sort takes most memory.
        return _argsort(values, ascending=ascending)
    held = np.flatnonzero(have)
    order = held[_argsort(values[held], ascending=ascending)]
    return np.concatenate([order, np.flatnonzero(~have)])


def _argsort(keys: NDArray, *, ascending: bool) -> IntArray:
    if ascending:
        return np.argsort(keys, kind="stable")
    # Reversed twice: equal keys keep their order.
    order = np.argsort(keys[::-1], kind="stable")[::-1]
    np.subtract(len(keys) - 1, order, out=order)
    return order

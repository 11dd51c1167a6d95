"""``ds.ragged``: where raggedness is kept true. Names and docs, no algorithms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import xarray as xr

from alchemi_xr._typing import Level, NDArray, Ptr
from alchemi_xr.errors import UnknownFieldError, nearest
from alchemi_xr.ragged import broadcast as _broadcast
from alchemi_xr.ragged import chunks as _chunks
from alchemi_xr.ragged import display as _display
from alchemi_xr.ragged import mapping as _mapping
from alchemi_xr.ragged import pad as _pad
from alchemi_xr.ragged import reduce as _reduce
from alchemi_xr.ragged import samples as _samples
from alchemi_xr.ragged import select as _select
from alchemi_xr.ragged import tables as _tables
from alchemi_xr.ragged import trajectory as _trajectory
from alchemi_xr.ragged.conventions import POINTER_NAMES, Structure, level_of, structure
from alchemi_xr.ragged.groupby import RaggedGroupBy
from alchemi_xr.ragged.plotting import RaggedPlot

if TYPE_CHECKING:
    from ase import Atoms
    from pandas import DataFrame

__all__ = ["RaggedAccessor"]


_xarray: Any = xr


@_xarray.register_dataset_accessor("ragged")
class RaggedAccessor:
    """Verbs on whole samples of a ragged Dataset.

    Each verb first checks that samples, atoms and edges still belong
    together; a Dataset whose samples were chosen by plain ``ds.isel(sample=…)``
    is refused with the call that was meant.

    Notes
    -----
    Arithmetic between an atom-level and a sample-level variable is an outer
    product for xarray. Write ``ds.forces - ds.ragged.broadcast("mean_force")``.
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    # -- what there is ---------------------------------------------------

    def validate(self) -> None:
        """Return when samples, atoms and edges belong together, else raise.

        Raises
        ------
        FieldError
            Says what does not fit and which call was meant.
        """
        structure(self._ds)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self._structure.num_samples

    def ptr(self, level: Level) -> Ptr:
        """Pointer of a level, int64 [N + 1]."""
        return self._structure.ptr(level)

    def level(self, name: Hashable) -> Level | None:
        """Level of a variable; None for one that lies along none."""
        if name not in self._ds.variables:
            known = map(str, self._ds.variables)
            raise UnknownFieldError(
                "ds.ragged", f"no variable {name!r}. {nearest(str(name), known)}"
            )
        return level_of(self._ds.variables[name].dims, name=name)

    @property
    def _structure(self) -> Structure:
        return structure(self._ds)

    def __getitem__(self, names: Sequence[Hashable]) -> xr.Dataset:
        """A Dataset of these variables that keeps the pointers.

        ``ds[["forces"]]`` drops them, since they lie along other dims.
        """
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            self.level(name)
        keep = {*names, *POINTER_NAMES, *self._ds.xindexes}
        return self._ds.drop_vars([n for n in self._ds.variables if n not in keep])

    # -- choose samples --------------------------------------------------

    def isel(self, sample: Any) -> xr.Dataset:
        """Samples by position, with their atoms and edges.

        Parameters
        ----------
        sample : int, slice, sequence or array of int or bool
            Any order, negatives and repeats allowed. One number keeps the
            ``sample`` dim, with length 1.

        Returns
        -------
        Dataset
            Lazy where this one is: fields of a store remember row ranges and
            read only rows of chosen samples, Dask arrays keep whole samples a
            block.

        Raises
        ------
        IndexRangeError
        """
        return _select.isel(self._ds, sample)

    def sel(self, **labels: Any) -> xr.Dataset:
        """Samples by the values of variables over ``sample``.

        Parameters
        ----------
        **labels : value, sequence of values, or slice
            One value takes every sample that has it; several are taken in
            their order; a slice holds both its ends. With several names, the
            samples that fit all, in the order of the first.

        Raises
        ------
        IndexRangeError
            No sample has a value asked for.
        UnknownFieldError

        Examples
        --------
        >>> ds.ragged.sel(dataset_index=[7, 3])        # doctest: +SKIP
        >>> ds.ragged.sel(energy=slice(-5.0, -4.0))    # doctest: +SKIP
        """
        return _select.sel(self._ds, labels)

    def where(self, condition: xr.DataArray | NDArray | Callable[[xr.Dataset], Any]) -> xr.Dataset:
        """Samples for which a condition holds.

        Parameters
        ----------
        condition : bool DataArray over ``sample``, bool array [N], or function
            A function gets the Dataset. The mask is computed now (it decides
            the lengths); nothing else is read.

        Raises
        ------
        FieldError
            The condition is no mask, or lies along atoms or edges.
        """
        return _select.where(self._ds, condition)

    def sortby(self, by: Hashable | xr.DataArray, *, ascending: bool = True) -> xr.Dataset:
        """Samples in the order of a key, stably, NaN last.

        Parameters
        ----------
        by : str or DataArray over ``sample``
        ascending : bool
        """
        return _select.sortby(self._ds, by, ascending=ascending)

    def head(self, n: int = 5) -> xr.Dataset:
        """The first ``n`` samples."""
        return _select.head(self._ds, n)

    def sample(self, n: int, *, seed: int | None = None) -> xr.Dataset:
        """``n`` samples drawn without replacement, kept in their order."""
        return _select.sample(self._ds, n, seed)

    # -- between levels --------------------------------------------------

    def reduce(
        self, what: Hashable | xr.DataArray, op: str, *, initial: Any = None
    ) -> xr.DataArray:
        """One value a sample, out of its atoms or edges.

        Parameters
        ----------
        what : str or DataArray
            A variable over ``atom`` or ``edge``, or an expression of such.
        op : {"sum", "mean", "min", "max", "norm", "any", "all", "argmin", "argmax"}
            ``norm`` is the square root of the sum of squares over rows and
            trailing axes; the others keep the trailing axes. ``argmin`` and
            ``argmax`` give the row within the sample.
        initial : scalar, optional
            Start of ``min`` and ``max``, and their value for a sample without
            rows; needed for whole numbers there.

        Returns
        -------
        DataArray over ``sample``
            A Dask array where ``what`` is one; else computed. Empty samples
            give 0 for ``sum`` and ``norm``, False for ``any``, True for
            ``all``, -1 for ``argmin`` and ``argmax``, NaN for the others.

        Examples
        --------
        >>> norm = xr.dot(ds.forces, ds.forces, dim="xyz") ** 0.5  # doctest: +SKIP
        >>> fmax = ds.ragged.reduce(norm, "max")                   # doctest: +SKIP
        """
        return _reduce.reduce(self._ds, what, op, initial=initial)

    def broadcast(self, what: Hashable | xr.DataArray, level: str = "atom") -> xr.DataArray:
        """The value of its sample for every atom or edge.

        Parameters
        ----------
        what : str or DataArray
            A variable over ``sample``.
        level : {"atom", "edge"}

        Returns
        -------
        DataArray over ``atom`` or ``edge``
            A Dask array where ``what`` or the fields of that level are.
        """
        return _broadcast.broadcast(self._ds, what, level)

    def chunk(self, chunks: Any = "auto") -> xr.Dataset:
        """Dask blocks that end at sample boundaries.

        Parameters
        ----------
        chunks : int, str, tuple of int, or mapping
            As for ``alchemi_xr.open_dataset``; ``{}`` keeps the blocks that
            are there, or makes blocks of Dask's own size.
        """
        struct = self._structure
        rows = _chunks.widest_rows(self._ds)
        here = _chunks.find_partition(self._ds, struct)
        if here is None:
            here = _chunks.resolve_chunks("auto", struct, rows, ())
        sizes = _chunks.resolve_chunks(chunks, struct, rows, here)
        return _chunks.chunk_dataset(self._ds, struct, sizes)

    def map_blocks(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function of whole samples, block by block, in parallel.

        Parameters
        ----------
        func : callable
            Gets a loaded ragged Dataset (some samples with all their atoms and
            edges; ``attrs["block_start"]`` is the first one's position) and
            gives a DataArray or Dataset over ``sample``, ``atom`` or ``edge``.
            It is called once before with the first sample, to learn dims and dtypes.
        *args, **kwargs
            Handed on to it.

        Returns
        -------
        DataArray or Dataset
            On Dask where this Dataset is; else computed, in bounded memory.

        Raises
        ------
        ArgumentTypeError
            The function gave no xarray object.
        FieldError
            It gave something without a ragged dim, or of changing shape.

        Examples
        --------
        >>> def centered(ds):
        ...     mean = ds.ragged.reduce("positions", "mean")
        ...     return ds.positions - ds.ragged.broadcast(mean)
        >>> ds.ragged.map_blocks(centered)                 # doctest: +SKIP
        """
        return _mapping.map_blocks(self._ds, func, args, kwargs)

    def groupby(self, by: Hashable | xr.DataArray) -> RaggedGroupBy:
        """Samples in groups by a value of theirs.

        Parameters
        ----------
        by : str or DataArray over ``sample``

        Returns
        -------
        RaggedGroupBy
            ``for label, ds in ...``, ``[label]``, ``reduce``, ``mean``, ``sum``,
            ``min``, ``max``, ``count``, ``map``, ``trajectories``.

        Examples
        --------
        >>> ds.ragged.groupby("system_id").mean("energy")  # doctest: +SKIP
        """
        return RaggedGroupBy(self._ds, by)

    def trajectory(
        self,
        system_id: Any = None,
        *,
        by: str = "system_id",
        time: str | None = None,
        time_step: float | None = None,
    ) -> xr.Dataset:
        """The frames of one system as a dense Dataset over (frame, atom, xyz).

        Parameters
        ----------
        system_id : optional
            Which system; None where all samples are frames of one.
        by : str
            Variable over ``sample`` that names the system.
        time : str, optional
            Variable that holds the time; by default ``time``, ``step``, ``frame``
            or ``frame_index``, whichever is there first. Frames come in its order; ``time``
            without a unit is in fs.
        time_step : float, optional
            fs between frames where there is no such variable, fs of one step
            where it counts steps.

        Returns
        -------
        Dataset
            On Dask unless this one is in memory; with the coordinate ``time``
            over ``frame``. Atomic numbers, masses and categories lie along
            ``atom`` alone; edges are left out.

        Raises
        ------
        FieldError
            No such system, or samples that are not frames of one.
        """
        return _trajectory.trajectory(self._ds, system_id, by=by, time=time, time_step=time_step)

    def to_padded(self, fill: Any = None) -> xr.Dataset:
        """Dense arrays over (sample, atom_slot, ...), short samples filled up.

        Parameters
        ----------
        fill : scalar or dict of name to scalar, optional
            By default NaN, 0 or False by dtype, and -1 for ``neighbor_list``.

        Returns
        -------
        Dataset
            ``num_atoms`` and ``num_edges`` say how many slots are used;
            `alchemi_xr.ragged.from_padded` goes back.
        """
        return _pad.to_padded(self._ds, fill)

    def to_zarr(
        self,
        dst: Any,
        *,
        mode: str = "w-",
        config: Any = None,
        client: Any = None,
        compute: bool = True,
        threads: int | None = None,
        memory: int | None = None,
        progress: Any = True,
        resume: bool = True,
    ) -> Any:
        """Write to a store, in bounded memory, in parallel.

        What is still in a store is read block by block, Dask arrays are
        computed in the same graph, block by block too. The store appears at its
        place in one step when all is written. Units, presence masks, text,
        custom variables and (with ``drop_deleted=False``) deletions are kept.

        Parameters
        ----------
        dst : path, dict or zarr store
        mode : {"w-", "w", "a"}
            ``"w-"`` makes a store; ``"w"`` replaces one too (be it the one that
            this Dataset reads, which stays readable); ``"a"`` adds the samples
            to a store that is there: all is computed and checked first, then
            appended in one commit, deleted samples left out.
        config : ZarrWriteConfig, mapping or profile name, optional
        client : None, int, str, LocalCluster or Client
            Where it runs: threads here, so many worker processes, or a cluster.
        compute : bool
            If False, nothing is written yet: the result has ``describe()`` and
            ``compute()``.
        threads : int, optional
            Threads here, where there is no client.
        memory : int, optional
            Bytes that a worker may use; a plan that needs more is refused.
        progress : bool or Progress
        resume : bool
            Take up the same write where it was stopped.

        Returns
        -------
        WriteReport or PendingWrite

        Raises
        ------
        FieldError, LevelError
            A variable cannot be a field (it lies along no level, say); it is
            named, and nothing was written.
        StoreExistsError, NotAStoreError, PlanError

        Examples
        --------
        >>> ds = alchemi_xr.open_dataset("all.zarr")                       # doctest: +SKIP
        >>> ds.ragged.where(ds.energy < 0).ragged.to_zarr("bound.zarr")    # doctest: +SKIP
        """
        from alchemi_xr.ragged.write import to_zarr

        return to_zarr(
            self._ds,
            dst,
            mode=mode,
            config=config,
            client=client,
            compute=compute,
            threads=threads,
            memory=memory,
            progress=progress,
            resume=resume,
        )

    # -- one by one ------------------------------------------------------

    def iter_samples(self, *, max_bytes: int = _samples.READ_BYTES) -> Iterator[xr.Dataset]:
        """Each sample in turn as a loaded Dataset without the ``sample`` dim.

        Fields that a sample has no value of are left out of its Dataset.

        Parameters
        ----------
        max_bytes : int
            Of the widest field, read at a time.
        """
        return _samples.iter_samples(self._ds, max_bytes=max_bytes)

    def to_atoms(self, i: int) -> Atoms:
        """Sample ``i`` as ``ase.Atoms``.

        Energy, forces, stress, dipole and charges become a single-point
        calculator's results; other fields go to ``arrays`` and ``info``.
        """
        return _samples.to_atoms(self._ds, i)

    def to_dataframe(
        self, level: str = "system", names: Sequence[Hashable] | None = None
    ) -> DataFrame:
        """A pandas table with one row a sample, atom or edge.

        Parameters
        ----------
        level : {"system", "atom", "edge"}
        names : sequence of str, optional
            Only these variables.

        Returns
        -------
        DataFrame
            Vectors become ``dipole_x``, ``dipole_y``, ...; atoms and edges are
            numbered within their sample.
        """
        return _tables.to_dataframe(self._ds, level, names)

    # -- for torch -------------------------------------------------------

    def to_batch(self, device: Any = "cpu") -> Any:
        """All samples as one `alchemi_xr.data.Batch`; text is left out."""
        from alchemi_xr.ragged.batches import to_batch

        return to_batch(self._ds, device)

    def iter_batches(
        self,
        batch_size: int | None = None,
        *,
        max_atoms: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        device: Any = "cpu",
    ) -> Iterator[Any]:
        """Batches (`alchemi_xr.data.Batch`) of whole samples in turn.

        Parameters
        ----------
        batch_size : int, optional
            Samples in a batch.
        max_atoms : int, optional
            Atoms that a batch may hold.
        shuffle : bool
        seed : int, optional
            Of the order.
        drop_last : bool
            Leave out a last batch with fewer than ``batch_size`` samples.
        device : str or torch.device
        """
        from alchemi_xr.ragged.batches import iter_batches

        return iter_batches(
            self._ds,
            batch_size,
            max_atoms=max_atoms,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            device=device,
        )

    # -- for people ------------------------------------------------------

    @property
    def plot(self) -> RaggedPlot:
        """Figures: ``ds.ragged.plot.rdf()``, ``.msd()``, ``.sizes()``, ``.forces()`` ..."""
        return RaggedPlot(self._ds)

    def __repr__(self) -> str:
        return _display.text_repr(self._ds)

    def _repr_html_(self) -> str:
        return _display.html_repr(self._ds)

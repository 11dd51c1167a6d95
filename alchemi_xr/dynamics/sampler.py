"""Which samples of a dataset are simulated next, so that a batch stays full.

The sampler knows sizes only; samples are read when they are drawn, many at
once where the dataset can. Its memory is two numbers a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from alchemi_xr._typing import IntArray
from alchemi_xr.data.atomic_data import AtomicData
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.datapipes.backends.zarr import AtomicDataZarrReader
from alchemi_xr.data.datapipes.dataset import Dataset
from alchemi_xr.data.datapipes.in_memory import InMemoryDataset
from alchemi_xr.errors import ConfigError, DynamicsError

__all__ = ["SizeAwareSampler"]

# Bytes that an atom costs in a simulation (fields, neighbours, a small model), and the share of the
# memory that is left when CUDA, the model and fragments have theirs. Rough on purpose: a wrong
# guess is corrected with max_atoms.
_BYTES_PER_ATOM = 300
_OVERHEAD = 0.8


class SizeAwareSampler:
    """Draws samples of a dataset by size, each once.

    Samples stand in bins of similar size. The first batch takes one of each bin
    in turn, small ones first; replacements fill the room that is left, large
    ones first.

    Parameters
    ----------
    dataset : object
        With ``__len__``, ``__getitem__`` giving ``(AtomicData, dict)`` and
        ``get_metadata(i)`` giving numbers of atoms and edges; ``get_batch`` is
        used where it is there.
    max_atoms, max_edges : int, optional
        Limits of a batch. Without ``max_atoms``, on CUDA, what fits the memory.
    max_batch_size : int, optional
        Most systems of a batch.
    bin_width : int
        Atoms that the sizes of one bin differ by.
    shuffle : bool
        Order inside each bin.
    max_gpu_memory_fraction : float
    seed : int
        Of the shuffle.

    Raises
    ------
    TypeError
        The dataset lacks a method.
    ConfigError
        There is no limit, or one makes no sense.
    DynamicsError
        A sample alone is above a limit.
    """

    def __init__(
        self,
        dataset: Any,
        max_atoms: int | None = None,
        max_edges: int | None = None,
        max_batch_size: int | None = None,
        bin_width: int = 1,
        shuffle: bool = False,
        max_gpu_memory_fraction: float = 0.8,
        *,
        seed: int = 0,
    ) -> None:
        for method in ("__len__", "__getitem__", "get_metadata"):
            if not hasattr(dataset, method):
                raise TypeError(
                    f"dataset must have {method}, which {type(dataset).__name__} lacks. "
                    "Mend: wrap it in alchemi_xr.data.Dataset"
                )
        limits = {"max_atoms": max_atoms, "max_edges": max_edges, "max_batch_size": max_batch_size}
        for name, value in {**limits, "bin_width": bin_width}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError("SizeAwareSampler", f"{name} must be at least 1", found=value)
        if max_atoms is None and max_batch_size is None:
            raise ConfigError(
                "SizeAwareSampler",
                "a batch has no limit: neither max_atoms nor max_batch_size is given",
                mend="give one of them",
            )
        if not 0 < max_gpu_memory_fraction <= 1:
            raise ConfigError(
                "SizeAwareSampler",
                "max_gpu_memory_fraction is out of range",
                found=max_gpu_memory_fraction,
                expected="above 0, up to 1",
            )
        self.dataset = dataset
        self.max_edges = max_edges
        self.max_batch_size = max_batch_size
        self.bin_width = bin_width
        self.shuffle = shuffle
        self.seed = seed
        self.max_atoms = (
            max_atoms if max_atoms is not None else _atoms_that_fit(max_gpu_memory_fraction)
        )
        self.num_atoms, self.num_edges = _sizes(dataset)
        self._check_sizes()
        self._consumed = np.zeros(len(self.num_atoms), dtype=bool)
        self._bins = self._make_bins()
        self._heads = [0] * len(self._bins)
        self._left = len(self.num_atoms)
        self._next_id = 0

    def _check_sizes(self) -> None:
        for word, sizes, limit in (
            ("atoms", self.num_atoms, self.max_atoms),
            ("edges", self.num_edges, self.max_edges),
        ):
            if limit is not None and len(sizes) and sizes.max() > limit:
                i = int(np.argmax(sizes > limit))
                raise DynamicsError(
                    "SizeAwareSampler",
                    f"Sample {i} has {sizes[i]} {word}, exceeding max_{word}={limit}",
                    mend=f"raise max_{word} to at least {sizes.max()}, or leave the sample out",
                )

    def _make_bins(self) -> list[IntArray]:
        """Sample numbers of each bin, bins by ascending size."""
        bins = self.num_atoms // self.bin_width
        order = np.argsort(bins, kind="stable")
        cuts = np.flatnonzero(np.diff(bins[order])) + 1
        parts = [part for part in np.split(order, cuts) if len(part)]
        if self.shuffle:
            generator = np.random.default_rng(self.seed)
            parts = [generator.permutation(part) for part in parts]
        return parts

    # ---------------------------------------------------------------- what is left

    def __len__(self) -> int:
        """Samples not yet drawn."""
        return self._left

    @property
    def exhausted(self) -> bool:
        """Whether every sample has been drawn."""
        return self._left == 0

    @property
    def has_edges(self) -> bool:
        """Whether the samples bring edges of their own."""
        return bool(self.num_edges.any())

    def __iter__(self) -> Iterator[int]:
        """Numbers of the samples not yet drawn, small ones first; draws nothing."""
        for part in self._bins:
            yield from part[~self._consumed[part]].tolist()

    # ---------------------------------------------------------------- drawing

    def _first_fitting(self, which: int, atoms: float, edges: float) -> int | None:
        """First sample of a bin that is not drawn and fits, or None."""
        part, head = self._bins[which], self._heads[which]
        while head < len(part) and self._consumed[part[head]]:
            head += 1
        self._heads[which] = head
        # Windows: a bin may hold millions, and nearly always its head fits.
        for start in range(head, len(part), 1024):
            window = part[start : start + 1024]
            fits = ~self._consumed[window]
            fits &= (self.num_atoms[window] <= atoms) & (self.num_edges[window] <= edges)
            if fits.any():
                return int(window[np.argmax(fits)])
        return None

    def _take(self, index: int) -> int:
        self._consumed[index] = True
        self._left -= 1
        return index

    def _draw_first(self) -> list[int]:
        """Sample numbers of a first batch: one of each bin in turn."""
        atoms, edges, count = self._budget(None, None, None)
        drawn: list[int] = []
        alive = list(range(len(self._bins)))
        while alive and len(drawn) < count:
            still = []
            for which in alive:
                if len(drawn) >= count:
                    break
                index = self._first_fitting(which, atoms, edges)
                if index is None:
                    continue  # the room only shrinks: this bin is done
                drawn.append(self._take(index))
                atoms -= self.num_atoms[index]
                edges -= self.num_edges[index]
                still.append(which)
            alive = still
        return drawn

    def _draw_budget(self, atoms: float, edges: float, count: float) -> list[int]:
        """Sample numbers that fill a budget, large ones first."""
        drawn: list[int] = []
        for which in reversed(range(len(self._bins))):
            while len(drawn) < count:
                index = self._first_fitting(which, atoms, edges)
                if index is None:
                    break
                drawn.append(self._take(index))
                atoms -= self.num_atoms[index]
                edges -= self.num_edges[index]
        return drawn

    def _budget(
        self, atoms: int | None, edges: int | None, count: int | None
    ) -> tuple[float, float, float]:
        given = (atoms, edges, count)
        limits = (self.max_atoms, self.max_edges, self.max_batch_size)
        best = [g if g is not None else limit for g, limit in zip(given, limits, strict=True)]
        atoms_, edges_, count_ = (np.inf if b is None else float(b) for b in best)
        return atoms_, edges_, count_

    # ---------------------------------------------------------------- batches

    def build_initial_batch(self) -> Batch:
        """The first batch, with ``status`` 0, ``system_id`` and ``dataset_index``.

        Raises
        ------
        DynamicsError
            No sample is left.
        """
        drawn = self._draw_first()
        if not drawn:
            raise DynamicsError(
                "SizeAwareSampler", "no samples available", found=f"{self._left} left"
            )
        return self._numbered(drawn)

    def replacement_batch(
        self,
        *,
        atom_budget: int | None = None,
        edge_budget: int | None = None,
        max_count: int | None = None,
    ) -> Batch | None:
        """As many samples as fit the room, as one batch; None when none does."""
        drawn = self._draw_budget(*self._budget(atom_budget, edge_budget, max_count))
        return self._numbered(drawn) if drawn else None

    def request_replacement(self, num_atoms: int, num_edges: int) -> AtomicData | None:
        """One sample for a place of this size: of the same bin, else of a smaller one."""
        sizes = [int(self.num_atoms[part[0]]) // self.bin_width for part in self._bins]
        for which in reversed(range(len(self._bins))):
            if sizes[which] > num_atoms // self.bin_width:
                continue
            index = self._first_fitting(which, num_atoms, num_edges)
            if index is not None:
                return self._numbered([self._take(index)]).get_data(0)
        return None

    def request_replacements(
        self, node_counts: Sequence[int], edge_counts: Sequence[int]
    ) -> list[AtomicData | None]:
        """One sample, or None, for each of the places."""
        return [
            self.request_replacement(int(atoms), int(edges))
            for atoms, edges in zip(node_counts, edge_counts, strict=True)
        ]

    def request_replacements_budget(
        self,
        atom_budget: int | None = None,
        edge_budget: int | None = None,
        max_count: int | None = None,
    ) -> list[AtomicData]:
        """As `replacement_batch`, as a list of samples."""
        batch = self.replacement_batch(
            atom_budget=atom_budget, edge_budget=edge_budget, max_count=max_count
        )
        return [] if batch is None else batch.to_data_list()

    def _numbered(self, drawn: list[int]) -> Batch:
        """The samples as one batch, with their numbers."""
        batch = _load(self.dataset, drawn)
        found = np.asarray(batch.num_nodes_list)
        expected = self.num_atoms[drawn]
        if len(found) != len(drawn) or (found != expected).any():
            wrong = 0 if len(found) != len(drawn) else int(np.argmax(found != expected))
            raise DynamicsError(
                "SizeAwareSampler",
                f"sample {drawn[wrong]} of the dataset is not what its metadata says",
                found=f"{found[wrong]} atoms" if len(found) else "no sample",
                expected=f"{expected[wrong]} atoms",
            )
        count, first = len(drawn), self._next_id
        self._next_id += count
        device = batch.device
        ids = torch.arange(first, first + count, dtype=torch.int64, device=device)
        index = torch.tensor(drawn, dtype=torch.int64, device=device)
        status = torch.zeros(count, 1, dtype=torch.int64, device=device)
        batch.set("status", status, level="system")
        batch.set("system_id", ids.reshape(-1, 1), level="system")
        batch.set("dataset_index", index.reshape(-1, 1), level="system")
        return batch

    # ---------------------------------------------------------------- going on later

    def state_dict(self) -> dict[str, Any]:
        """What has been drawn, for `load_state_dict` of a sampler over the same dataset."""
        drawn = np.flatnonzero(self._consumed).tolist()
        return {"consumed": drawn, "next_id": self._next_id, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another sampler stood.

        Raises
        ------
        ConfigError
            The state is of another dataset or seed.
        """
        consumed = np.asarray(state["consumed"], dtype=np.int64)
        if state["seed"] != self.seed:
            raise ConfigError(
                "SizeAwareSampler", "the seed differs", found=state["seed"], expected=self.seed
            )
        if len(consumed) and consumed.max() >= len(self._consumed):
            raise ConfigError(
                "SizeAwareSampler",
                "the state names a sample that the dataset does not have",
                found=int(consumed.max()),
                expected=f"below {len(self._consumed)}",
            )
        self._consumed[:] = False
        self._consumed[consumed] = True
        self._left = int((~self._consumed).sum())
        self._heads = [0] * len(self._bins)
        self._next_id = int(state["next_id"])

    def __repr__(self) -> str:
        return (
            f"SizeAwareSampler({len(self)} of {len(self.num_atoms)} left, "
            f"max_atoms={self.max_atoms}, max_edges={self.max_edges}, "
            f"max_batch_size={self.max_batch_size})"
        )


def _sizes(dataset: Any) -> tuple[IntArray, IntArray]:
    """Numbers of atoms and of edges of every sample, int64 [N]."""
    known = _known_sizes(dataset)
    if known is not None:
        return known
    sizes = np.zeros((len(dataset), 2), dtype=np.int64)
    for i in range(len(dataset)):
        try:
            sizes[i] = dataset.get_metadata(i)
        except Exception as error:
            raise DynamicsError(
                "SizeAwareSampler", f"sample {i} of the dataset has no size ({error})"
            ) from error
    return sizes[:, 0].copy(), sizes[:, 1].copy()


def _known_sizes(dataset: Any) -> tuple[IntArray, IntArray] | None:
    """Sizes from pointers that are in memory anyway, where the dataset has them."""
    if hasattr(dataset, "get_counts"):
        atoms, edges = dataset.get_counts()
        return np.asarray(atoms, dtype=np.int64), np.asarray(edges, dtype=np.int64)
    if type(dataset) is Dataset and type(dataset.reader) is AtomicDataZarrReader:
        snapshot = dataset.reader.snapshot
        if len(snapshot.active) == len(dataset):
            atoms, edges = np.diff(snapshot.atoms_ptr), np.diff(snapshot.edges_ptr)
            return atoms[snapshot.active], edges[snapshot.active]
    if type(dataset) is InMemoryDataset:
        batch = dataset.in_memory_batch
        return batch.atoms_ptr.diff().cpu().numpy(), batch.edges_ptr.diff().cpu().numpy()
    return None


def _load(dataset: Any, indices: list[int]) -> Batch:
    """Samples as one batch; a bad one is named."""
    if hasattr(dataset, "get_batch"):
        try:
            return dataset.get_batch(indices)
        except Exception as error:
            # The batch read does not say who is bad: ask each, once.
            for index in indices:
                _probe(dataset, index)
            raise DynamicsError(
                "SizeAwareSampler", f"samples {indices} of the dataset cannot be read ({error})"
            ) from error
    return Batch.from_data_list([_probe(dataset, index) for index in indices])


def _probe(dataset: Any, index: int) -> AtomicData:
    try:
        sample = dataset[index]
    except Exception as error:
        raise DynamicsError(
            "SizeAwareSampler",
            f"sample {index} of the dataset cannot be read ({type(error).__name__}: {error})",
            mend="delete or correct it in the source",
        ) from error
    data = sample[0] if isinstance(sample, tuple) else sample
    if not isinstance(data, AtomicData):
        raise DynamicsError(
            "SizeAwareSampler",
            f"sample {index} of the dataset is no AtomicData",
            found=type(data).__name__,
            expected="(AtomicData, dict)",
        )
    return data


def _atoms_that_fit(fraction: float) -> int | None:
    """Atoms that the GPU holds; None (no limit) without one."""
    if not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, int(total * fraction * _OVERHEAD / _BYTES_PER_ATOM))

"""Orders over a MultiDataset: how often each of its datasets is drawn from.

Every order is a pure function of ``seed + epoch``; ranks take every
``num_replicas``-th item of the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from torch.utils.data import Sampler

from alchemi_xr._typing import IntArray, NDArray
from alchemi_xr.data.datapipes.multi import MultiDataset
from alchemi_xr.errors import ArgumentTypeError, ConfigError

__all__ = ["EpochPolicy", "MultiDatasetBatchSampler", "MultiDatasetSampler"]

EpochPolicy: TypeAlias = Literal["dataset_size", "min_size", "max_size"]
_POLICIES = ("dataset_size", "min_size", "max_size")


class _Ranked:
    """Seed, epoch, and this rank's share of an order."""

    def __init__(
        self,
        dataset: MultiDataset,
        *,
        generator: torch.Generator | None,
        num_replicas: int | None,
        rank: int | None,
        distributed_manager: Any,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        offsets = np.asarray(dataset.offsets, dtype=np.int64)
        self.lengths: IntArray = offsets[1:] - offsets[:-1]
        self.generator = generator
        if distributed_manager is not None:
            num_replicas = distributed_manager.world_size if num_replicas is None else num_replicas
            rank = distributed_manager.rank if rank is None else rank
        self.num_replicas = 1 if num_replicas is None else num_replicas
        self.rank = 0 if rank is None else rank
        if self.num_replicas < 1 or not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                type(self).__name__,
                "rank and num_replicas do not fit",
                found=f"rank {self.rank} of {self.num_replicas}",
                expected="0 <= rank < num_replicas",
            )
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = int(epoch)

    def _rng(self) -> np.random.Generator:
        if self.generator is not None:
            # The generator's own state decides, and moves on, as torch samplers do.
            drawn = torch.randint(2**62, (1,), generator=self.generator)
            return np.random.default_rng(int(drawn))
        return np.random.default_rng(self.seed + self.epoch)

    def _share(self, total: int) -> int:
        """Number of items of this rank: the same on every rank."""
        if self.drop_last:
            return total // self.num_replicas
        return -(-total // self.num_replicas)

    def _mine(self, items: NDArray) -> NDArray:
        """This rank's items; padded by repetition, or cut, so that ranks have equally many."""
        if self.num_replicas == 1:
            return items
        total = self._share(len(items)) * self.num_replicas
        mine: NDArray = np.resize(items, (total, *items.shape[1:]))[self.rank :: self.num_replicas]
        return mine


class MultiDatasetSampler(_Ranked, Sampler[int]):
    """Global indices of a MultiDataset, with a rate for each dataset.

    Parameters
    ----------
    dataset : MultiDataset
    weights : sequence of float, optional
        Rate of each dataset; by default its length.
    num_samples : int, optional
        Of one epoch over all ranks; by default the length of the dataset.
    replacement : bool
        Whether a sample may come twice in an epoch.
    shuffle : bool
    generator : torch.Generator, optional
        Decides instead of ``seed`` and the epoch.
    num_replicas, rank : int, optional
    distributed_manager : object, optional
        Gives ``world_size`` and ``rank`` where these are not given.
    seed : int
    drop_last : bool
        Cut what does not divide by the ranks, instead of repeating.

    Raises
    ------
    ConfigError
        Weights, sizes or ranks do not fit.
    """

    def __init__(
        self,
        dataset: MultiDataset,
        *,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        replacement: bool = True,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        distributed_manager: Any = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            generator=generator,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=seed,
            drop_last=drop_last,
        )
        self.weights = _shares(weights, self.lengths)
        self.num_samples = len(dataset) if num_samples is None else num_samples
        _positive("num_samples", self.num_samples)
        self.replacement = replacement
        self.shuffle = shuffle
        if not replacement:
            counts = _allot(self.weights, self.num_samples)
            short = np.flatnonzero(counts > self.lengths)
            if short.size:
                n = int(short[0])
                raise ConfigError(
                    "MultiDatasetSampler",
                    f"replacement=False cannot draw {counts[n]} samples from dataset {n}",
                    found=f"{self.lengths[n]} samples",
                    mend="lower num_samples or its weight, or replacement=True",
                )

    def __len__(self) -> int:
        return self._share(self.num_samples)

    def __iter__(self) -> Iterator[int]:
        yield from self._mine(self._order(self._rng())).tolist()

    def _order(self, rng: np.random.Generator) -> IntArray:
        offsets = np.asarray(self.dataset.offsets[:-1], dtype=np.int64)
        if self.replacement and self.shuffle:
            owner = rng.choice(len(self.lengths), size=self.num_samples, p=self.weights)
            return offsets[owner] + rng.integers(self.lengths[owner])
        counts = _allot(self.weights, self.num_samples)
        parts = [
            offset + np.resize(_local(int(length), self.shuffle, rng), count)
            for offset, length, count in zip(offsets, self.lengths, counts, strict=True)
        ]
        order = np.concatenate(parts)
        return rng.permutation(order) if self.shuffle else order


class MultiDatasetBatchSampler(_Ranked, Sampler[list[int]]):
    """Batches of global indices with a fixed number from each dataset.

    Parameters
    ----------
    dataset : MultiDataset
    batch_size : int
    weights : sequence of float, optional
        Rates that share out the batch; by default the lengths.
    samples_per_dataset : sequence of int or float, optional
        Exact numbers in a batch; with any float, rates. Excludes ``weights``.
    num_batches : int, optional
        Of one epoch over all ranks; by default what ``epoch_policy`` says.
    epoch_policy : {"dataset_size", "min_size", "max_size"}
        As many batches as all samples make, or until the first or the last
        dataset has been seen whole.
    replacement, shuffle, generator, num_replicas, rank, distributed_manager, seed, drop_last
        As in ``MultiDatasetSampler``.

    Raises
    ------
    ConfigError
        Numbers, policy or ranks do not fit.
    """

    def __init__(
        self,
        dataset: MultiDataset,
        *,
        batch_size: int,
        weights: Sequence[float] | None = None,
        samples_per_dataset: Sequence[int | float] | None = None,
        num_batches: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        replacement: bool = True,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        distributed_manager: Any = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            generator=generator,
            num_replicas=num_replicas,
            rank=rank,
            distributed_manager=distributed_manager,
            seed=seed,
            drop_last=drop_last,
        )
        _positive("batch_size", batch_size)
        if weights is not None and samples_per_dataset is not None:
            raise ConfigError(
                "MultiDatasetBatchSampler", "weights and samples_per_dataset exclude each other"
            )
        if epoch_policy not in _POLICIES:
            raise ConfigError(
                "MultiDatasetBatchSampler",
                "epoch_policy is not known",
                found=repr(epoch_policy),
                expected=", ".join(map(repr, _POLICIES)),
            )
        self.batch_size = batch_size
        self.epoch_policy = epoch_policy
        self.replacement = replacement
        self.shuffle = shuffle
        counts = self._counts(weights, samples_per_dataset)
        self.samples_per_dataset: list[int] = counts.tolist()
        self.num_batches = self._num_batches(counts) if num_batches is None else num_batches
        _positive("num_batches", self.num_batches)
        if not replacement:
            most = int((self.lengths[counts > 0] // counts[counts > 0]).min())
            if self.num_batches > most:
                raise ConfigError(
                    "MultiDatasetBatchSampler",
                    f"replacement=False supports at most {most} complete batches",
                    found=self.num_batches,
                    mend="lower num_batches, or replacement=True",
                )

    @classmethod
    def balanced(cls, dataset: MultiDataset, *, batch_size: int, **options: Any) -> Self:
        """A sampler that draws equally often from each dataset."""
        return cls(dataset, batch_size=batch_size, weights=[1.0] * len(dataset.datasets), **options)

    def __len__(self) -> int:
        return self._share(self.num_batches)

    def __iter__(self) -> Iterator[list[int]]:
        rng = self._rng()
        offsets = np.asarray(self.dataset.offsets[:-1], dtype=np.int64)
        parts = []
        for offset, length, count in zip(
            offsets, self.lengths, self.samples_per_dataset, strict=True
        ):
            if count == 0:
                continue
            total = self.num_batches * count
            if self.replacement and self.shuffle:
                local = rng.integers(int(length), size=total)
            else:
                local = np.resize(_local(int(length), self.shuffle, rng), total)
            parts.append(offset + local.reshape(self.num_batches, count))
        batches = np.concatenate(parts, axis=1)
        if self.shuffle:
            batches = rng.permuted(batches, axis=1)
        yield from self._mine(batches).tolist()

    def _counts(
        self,
        weights: Sequence[float] | None,
        samples_per_dataset: Sequence[int | float] | None,
    ) -> IntArray:
        """Samples of each dataset in a batch."""
        where = "MultiDatasetBatchSampler"
        if samples_per_dataset is None:
            return _allot(_shares(weights, self.lengths), self.batch_size)
        given = np.asarray(samples_per_dataset)
        if given.shape != self.lengths.shape:
            raise ConfigError(
                where,
                "samples_per_dataset needs one entry for each dataset",
                found=given.size,
                expected=len(self.lengths),
            )
        if given.dtype.kind == "f":
            return _allot(_shares(samples_per_dataset, self.lengths), self.batch_size)
        if given.dtype.kind not in "iu":
            raise ArgumentTypeError(
                where, "samples_per_dataset entries must be numbers", found=given.tolist()
            )
        counts: IntArray = given.astype(np.int64)
        if (counts < 0).any() or counts.sum() != self.batch_size:
            raise ConfigError(
                where,
                "samples_per_dataset counts must sum to batch_size and not be negative",
                found=counts.tolist(),
                expected=f"a sum of {self.batch_size}",
            )
        empty = np.flatnonzero((counts > 0) & (self.lengths == 0))
        if empty.size:
            raise ConfigError(where, f"dataset {empty[0]} has no samples to give")
        return counts

    def _num_batches(self, counts: IntArray) -> int:
        drawn = counts > 0
        lengths, counts = self.lengths[drawn], counts[drawn]
        whole = lengths // counts if not self.replacement else -(-lengths // counts)
        if self.epoch_policy == "min_size":
            return int(whole.min())
        if self.epoch_policy == "dataset_size":
            every = -(-len(self.dataset) // self.batch_size)
            return every if self.replacement else int(whole.min())
        if not self.replacement and whole.max() > whole.min():
            raise ConfigError(
                "MultiDatasetBatchSampler",
                "epoch_policy='max_size' would draw twice from the smaller datasets",
                mend="replacement=True",
            )
        return int(whole.max())


def _local(length: int, shuffle: bool, rng: np.random.Generator) -> IntArray:
    if shuffle:
        return rng.permutation(length).astype(np.int64, copy=False)
    return np.arange(length, dtype=np.int64)


def _shares(weights: Sequence[float] | None, lengths: IntArray) -> NDArray:
    """Weights that sum to 1, float64 [D]."""
    found = np.asarray(lengths if weights is None else weights, dtype=np.float64)
    where = "MultiDataset sampler"
    if found.shape != lengths.shape:
        raise ConfigError(
            where, "needs one weight for each dataset", found=found.size, expected=len(lengths)
        )
    if not np.isfinite(found).all() or (found < 0).any() or found.sum() <= 0:
        raise ConfigError(
            where,
            "weights must be finite, not negative, and not all zero",
            found=found.tolist(),
        )
    empty = np.flatnonzero((found > 0) & (lengths == 0))
    if empty.size:
        raise ConfigError(where, f"dataset {empty[0]} has a positive weight but no samples")
    shares: NDArray = found / found.sum()
    return shares


def _allot(shares: NDArray, total: int) -> IntArray:
    """A whole number shared out: floors, then one more to the largest remainders."""
    exact = shares * total
    counts: IntArray = np.floor(exact).astype(np.int64)
    rest = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError("MultiDataset sampler", f"{name} is too small", found=value, expected=1)

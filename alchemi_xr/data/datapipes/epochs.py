"""The batches of an epoch over a dataset: its order, cut by number and by size, for one rank.

The order itself is ``orders``; here are the dataset's blocks and sizes, looked
up once, and the plan that ``len`` and the iteration after it share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from alchemi_xr._typing import IntArray
from alchemi_xr.data.datapipes.orders import batch_bounds, epoch_order, of_rank
from alchemi_xr.data.datapipes.prefetch import BLOCK_SAMPLES, PrefetchingDataset, sample_sizes
from alchemi_xr.errors import ConfigError

__all__ = ["EpochPlan"]


class EpochPlan:
    """What each batch of an epoch holds.

    Parameters
    ----------
    dataset : Dataset
    batch_size : int or None
    limits : dict of str to int or None
        ``max_atoms`` and ``max_edges``.
    shuffle : bool or "block"
    shuffle_blocks, seed : int
    drop_last : bool
    rank, world_size : int
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        limits: Mapping[str, int | None],
        shuffle: bool | Literal["block"],
        shuffle_blocks: int,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.limits = dict(limits)
        self.shuffle, self.shuffle_blocks, self.seed = shuffle, shuffle_blocks, seed
        self.drop_last = drop_last
        self.rank, self.world_size = rank, world_size
        self._sizes: tuple[IntArray, IntArray] | None = None
        # Order and bounds of one epoch, kept for ``len`` and the iteration after it.
        self._planned: tuple[tuple[int, int], IntArray, IntArray] | None = None

    def count(self, epoch: int) -> int:
        """Number of batches of this rank."""
        if any(most is not None for most in self.limits.values()):
            bounds = self._plan(epoch)[1]
        else:
            bounds = batch_bounds(
                len(self.dataset),
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                world_size=self.world_size,
            )
        return -(-(len(bounds) - 1) // self.world_size)

    def lists(self, epoch: int, skip: int) -> Iterator[Any]:
        """Indices of each batch of this rank, from batch ``skip`` on."""
        order, bounds = self._plan(epoch)
        self._planned = None
        # Our datasets take arrays as they are; of others nothing is known.
        plain = not isinstance(self.dataset, PrefetchingDataset)
        for number in of_rank(bounds, self.rank, self.world_size)[skip:].tolist():
            indices = order[bounds[number] : bounds[number + 1]]
            yield indices.tolist() if plain else indices

    def _plan(self, epoch: int) -> tuple[IntArray, IntArray]:
        """The order of an epoch and the bounds of its batches, over all ranks."""
        length = len(self.dataset)
        if self._planned is not None and self._planned[0] == (epoch, length):
            return self._planned[1:]
        starts = None
        if self.shuffle == "block":
            find = getattr(self.dataset, "block_starts", None)
            starts = np.arange(0, length, BLOCK_SAMPLES) if find is None else find()
        order = epoch_order(
            length,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            block_starts=starts,
            blocks_at_once=self.shuffle_blocks,
        )
        bounds = batch_bounds(
            length,
            batch_size=self.batch_size,
            limits=self._limits(order),
            drop_last=self.drop_last,
            world_size=self.world_size,
        )
        self._planned = (epoch, length), order, bounds
        return order, bounds

    def _limits(self, order: IntArray) -> list[tuple[IntArray, int]]:
        """Sizes of the samples in an order, with what a batch may have of each."""
        limits = []
        for level, name in enumerate(("max_atoms", "max_edges")):
            most = self.limits.get(name)
            if most is None:
                continue
            if self._sizes is None or len(self._sizes[0]) != len(order):
                self._sizes = sample_sizes(self.dataset)
            sizes = self._sizes[level]
            if len(sizes) and sizes.max() > most:
                worst = int(np.argmax(sizes))
                raise ConfigError(
                    "DataLoader",
                    f"sample {worst} alone has more than {name}",
                    found=int(sizes[worst]),
                    expected=f"at most {most}",
                    mend=f"raise {name}, or leave such samples out",
                )
            limits.append((sizes[order], most))
        return limits

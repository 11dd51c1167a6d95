"""What the loader asks of a dataset, and of a sampler in a distributed run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from alchemi_xr.data.batch import Batch

__all__ = ["BatchDatasetProtocol", "DistributedSamplerProtocol"]


@runtime_checkable
class BatchDatasetProtocol(Protocol):
    """A dataset that a DataLoader can iterate over.

    ``load_batches`` alone is called by the loader; the fused prefetch is for
    those who drive a dataset by hand.
    """

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def load_batches(
        self, batch_index_lists: Sequence[Sequence[int]], stream: Any = None
    ) -> list[Batch]:
        """One Batch for each list of indices."""
        ...

    def prefetch_fused_batches(
        self, batch_index_lists: Sequence[Sequence[int]], stream: Any = None
    ) -> None:
        """Start to read; two requests may wait."""
        ...

    def get_fused_batches(self) -> list[Batch]:
        """The batches of the oldest request."""
        ...

    def has_pending_fused_batches(self) -> bool:
        """Whether a request waits."""
        ...

    def cancel_prefetch(self, index: int | None = None) -> None:
        """Forget what was prefetched."""
        ...


@runtime_checkable
class DistributedSamplerProtocol(Protocol):
    """A sampler whose order hangs on the epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Indices, or lists of them."""
        ...

    def __len__(self) -> int:
        """Number of items of one epoch on this rank."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        ...

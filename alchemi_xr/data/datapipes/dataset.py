"""A reader's samples and batches on a device, checked and transformed.

The batch path is one read, one check and one copy a batch; no sample object is
made on it unless a sample transform asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch

from alchemi_xr._typing import IntArray
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.datapipes.backends.base import Reader, as_reader
from alchemi_xr.data.datapipes.prefetch import (
    BLOCK_SAMPLES,
    Loaded,
    PrefetchingDataset,
    batch_tensors,
    sample_sizes,
)
from alchemi_xr.data.datapipes.streams import (
    Staged,
    move_batch,
    on_stream,
    record_event,
    resolve_device,
)
from alchemi_xr.data.datapipes.validate import cast_floats, match_dtypes, validate_batch
from alchemi_xr.data.transforms import Compose
from alchemi_xr.errors import ArgumentTypeError

__all__ = ["Dataset", "compose", "compose_batch", "few", "noting"]


def compose(transforms: Sequence[Callable[..., Any]] | None, *, name: str) -> Compose | None:
    """The transforms as one, or None when there are none.

    Raises
    ------
    ArgumentTypeError
        Not a sequence.
    """
    if transforms is None:
        return None
    if isinstance(transforms, str) or not isinstance(transforms, Sequence):
        raise ArgumentTypeError(
            name,
            "must be a Sequence of callables",
            found=type(transforms).__name__,
            mend="pass [fn] instead of fn",
        )
    return Compose(transforms) if transforms else None


def compose_batch(transforms: Sequence[Callable[..., Any]] | None, *, name: str) -> Compose | None:
    """As ``compose``, where a function without annotations is one of batches.

    Raises
    ------
    ArgumentTypeError
        Not a sequence, or a transform of samples.
    """
    return compose(transforms, name=name) and Compose([*(transforms or ()), _same])


def _same(batch: Batch) -> Batch:
    """Decides the kind of transforms that do not say theirs."""
    return batch


@contextmanager
def noting(text: str) -> Iterator[None]:
    """Adds to an error what it happened to; a traceback out of a worker process shows it."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def few(indices: Sequence[int]) -> str:
    """The first of some indices, as text."""
    shown = ", ".join(str(index) for index in indices[:8])
    return shown if len(indices) <= 8 else f"{shown} … ({len(indices)})"


class Dataset(PrefetchingDataset):
    """Samples of a reader as ``AtomicData`` and ``Batch`` on a device.

    Parameters
    ----------
    reader : Reader
        Or any object with a length and ``read_many``, ``_load_many_samples`` or
        ``_load_sample``. Closed with the dataset.
    device : str or torch.device, optional
        None and ``"auto"`` mean CUDA when there, else the CPU.
    num_workers : int
        Threads that read ahead; 0 reads in the calling thread.
    skip_validation : bool
        Trust the reader: no checks, and dtypes stay as stored.
    transforms : sequence of callable, optional
        ``(AtomicData, dict) -> (AtomicData, dict)`` for each sample, or
        ``Batch -> Batch`` (told apart as in ``Compose``), applied on the device.
    fields : sequence of str, optional
        Read only these.
    dtype : torch.dtype, optional
        All fields of floating-point numbers come in it, energy too; the cast is made
        once a batch, before the copy to the device.

    Raises
    ------
    TypeError
        The reader, the device or the transforms are of the wrong kind.
    """

    def __init__(
        self,
        reader: Any,
        *,
        device: str | torch.device | None = None,
        num_workers: int = 2,
        skip_validation: bool = False,
        transforms: Sequence[Callable[..., Any]] | None = None,
        fields: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_workers=num_workers)
        self.reader: Reader = as_reader(reader)
        if getattr(self.reader, "closed", False) and hasattr(self.reader, "reopen"):
            # Another dataset closed it: a dataset opens and closes its reader itself.
            self.reader.reopen()
        self.device = resolve_device(device)
        self.skip_validation = skip_validation
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentTypeError(
                "dtype",
                "is no floating-point dtype of torch",
                found=repr(dtype)[:60],
                expected="torch.float32, torch.float64 …",
            )
        self.dtype = dtype
        self.fields = None if fields is None else list(fields)
        # Ours cast while they copy; of others nothing is known.
        self._casts = "dtype" in signature(self.reader.read_batches).parameters
        self._transform = compose(transforms, name="transforms")
        self._warned: set[tuple[str, torch.dtype]] = set()

    @property
    def target_device(self) -> torch.device:
        """The device, under its name in nvalchemi-toolkit."""
        return self.device

    @property
    def pin_memory(self) -> bool:
        """Whether the reader gives page-locked memory."""
        return self.reader.pin_memory

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        self.reader.pin_memory = bool(value)

    @property
    def field_names(self) -> list[str]:
        return list(self.fields) if self.fields is not None else self.reader.field_names

    def __len__(self) -> int:
        return len(self.reader)

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Numbers of atoms and edges; from pointers alone where the reader has them."""
        find = getattr(self.reader, "get_metadata", None)
        if find is None:
            find = getattr(getattr(self.reader, "inner", None), "get_metadata", None)
        if find is None:
            return super().get_metadata(index)
        atoms, edges = find(self._positions([index])[0])
        return int(atoms), int(edges)

    def sample_sizes(self) -> tuple[IntArray, IntArray]:
        """Numbers of atoms and edges of all samples, int64 [N] each."""
        if hasattr(self.reader, "sample_sizes"):
            return sample_sizes(self.reader)
        pairs = [self.get_metadata(i) for i in range(len(self))]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def block_starts(self) -> IntArray:
        """First sample of each block that storage is best read in, ascending from 0."""
        find = getattr(self.reader, "block_starts", None)
        if find is None:
            return np.arange(0, len(self), BLOCK_SAMPLES, dtype=np.int64)
        starts: IntArray = find()
        return starts

    def refresh(self) -> None:
        """Move to the newest state of the storage; what was prefetched is dropped."""
        self.cancel_prefetch()
        refresh = getattr(self.reader, "refresh", None)
        if refresh is not None:
            refresh()

    def version(self) -> Any:
        find = getattr(self.reader, "version", None)
        return len(self), None if find is None else find()

    def settle_in_worker(self) -> None:
        super().settle_in_worker()
        self.device = torch.device("cpu")
        self.reader.pin_memory = False

    def close(self) -> None:
        """End the threads, close the reader; safe to call twice."""
        super().close()
        self.reader.close()

    # -- the path --------------------------------------------------------------

    def _read(self, lists: Sequence[Sequence[int]]) -> list[Batch]:
        """Batches on the CPU, checked."""
        if self.dtype is not None and self._casts:
            batches = self.reader.read_batches(lists, self.fields, dtype=self.dtype)  # type: ignore[call-arg]
        else:
            batches = self.reader.read_batches(lists, self.fields)
        if not self.skip_validation:
            for batch, indices in zip(batches, lists, strict=True):
                # A choice of fields may leave positions out: then nothing hangs on them.
                if self.fields is None or "positions" in batch:
                    validate_batch(batch, indices, where=self.reader.where)
                    if self.dtype is None:
                        match_dtypes(batch, self._warned, where=self.reader.where)
        if self.dtype is not None:
            for batch in batches:
                cast_floats(batch, self.dtype)
        return batches

    def _load(self, positions: list[int], stream: Any) -> Staged[Loaded]:
        metadata = self.reader.read_metadata(positions)
        (batch,) = self._read([positions])
        with on_stream(stream):
            loaded = self._transformed(move_batch(batch, self.device), metadata, positions)
            event = record_event(stream)
        return Staged(loaded, event, Loaded.tensors)

    def _stage_batches(self, lists: Sequence[Sequence[int]], stream: Any) -> list[Staged[Batch]]:
        batches = self._read(lists)
        if self._transform is None and stream is None and self.device.type == "cpu":
            return [Staged(move_batch(batch, self.device)) for batch in batches]
        staged: list[Staged[Batch]] = []
        for batch, indices in zip(batches, lists, strict=True):
            with on_stream(stream):
                moved = move_batch(batch, self.device)
                if self._transform is not None:
                    samples = self._transform.kind == "sample"
                    metadata = self.reader.read_metadata(indices) if samples else []
                    ready = self._transformed(moved, metadata, indices).batch
                    assert ready is not None
                    moved = ready
                staged.append(Staged(moved, record_event(stream), batch_tensors))
        return staged

    def _transformed(
        self, batch: Batch, metadata: list[dict[str, Any]], indices: Sequence[int]
    ) -> Loaded:
        if self._transform is None:
            return Loaded(batch, metadata)
        if self._transform.kind == "batch":
            with noting(f"in a transform of the batch of samples {few(indices)}"):
                return Loaded(self._transform(batch), metadata)
        pairs = []
        for index, sample, about in zip(indices, batch.to_data_list(), metadata, strict=True):
            with noting(f"in a transform of sample {index}"):
                pairs.append(self._transform(sample, about))
        samples = [sample for sample, _ in pairs]
        return Loaded(Batch.from_data_list(samples), [about for _, about in pairs], samples)

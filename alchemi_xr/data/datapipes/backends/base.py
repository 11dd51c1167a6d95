"""What a storage format has to give: samples by index, as CPU tensors.

``read_batch`` is the call that everything above uses. A format that can gather
flat rows overrides it (and ``read_batches``); one that only knows single
samples writes ``_load_sample`` or ``_load_many_samples`` and inherits the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from alchemi_xr._typing import Level
from alchemi_xr.data.batch import Batch
from alchemi_xr.data.csr import as_index
from alchemi_xr.data.fields import canonical_level, level_of, resolve
from alchemi_xr.errors import (
    ArgumentTypeError,
    FieldError,
    IndexRangeError,
    StoreError,
    UnknownFieldError,
    nearest,
)

__all__ = ["RawSample", "Reader", "Tensors", "as_reader"]

RawSample: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]


class Tensors(dict[str, Tensor]):
    """Tensors of a sample by field name, an alias being as good as its name."""

    def __missing__(self, name: str) -> Tensor:
        key = resolve(name)
        if key == name:
            raise UnknownFieldError("sample", f"no field {name!r}. {nearest(name, self)}")
        return self[key]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(resolve(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or ``default`` where the sample has none."""
        return super().get(resolve(name), default)


class Reader(ABC):
    """Random access to the samples of a store.

    A subclass gives ``__len__`` and one of ``_load_sample`` and
    ``_load_many_samples`` (each falls back on the other).

    Parameters
    ----------
    pin_memory : bool
        Give tensors in page-locked memory. Without CUDA there is none, and the
        option has no effect.
    include_index_in_metadata : bool
        Add the sample's index to its metadata as ``"index"``.
    """

    def __init__(self, *, pin_memory: bool = False, include_index_in_metadata: bool = True) -> None:
        self.pin_memory = pin_memory
        self.include_index_in_metadata = include_index_in_metadata

    # -- what a subclass gives -------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    def _load_sample(self, index: int) -> dict[str, Tensor]:
        """Tensors of one sample; system fields have a leading axis of length 1."""
        if type(self)._load_many_samples is Reader._load_many_samples:
            raise NotImplementedError(
                f"{type(self).__name__} has neither _load_sample nor _load_many_samples"
            )
        return self._load_many_samples([index])[0]

    def _load_many_samples(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Tensors of several samples, in the order asked for."""
        return [self._load_sample(int(index)) for index in indices]

    def _get_sample_metadata(self, index: int) -> dict[str, Any]:
        """Whatever else is known about a sample."""
        return {}

    def _get_field_names(self) -> list[str]:
        """Names of the fields that samples can have."""
        return list(self._load_sample(0)) if len(self) else []

    @property
    def field_levels(self) -> Mapping[str, str]:
        """Level of each field that is not in the project's table."""
        return {}

    def close(self) -> None:  # noqa: B027 - most readers hold nothing
        """Give back what the reader holds; safe to call twice."""

    # -- what everybody calls --------------------------------------------------

    @property
    def field_names(self) -> list[str]:
        """Names of the fields that samples can have."""
        return self._get_field_names()

    @property
    def where(self) -> str:
        """The reader's name in messages."""
        return type(self).__name__

    def read(self, index: int) -> RawSample:
        """Tensors and metadata of one sample.

        Raises
        ------
        IndexRangeError
        """
        found = self.read_many([index])
        if len(found) != 1:
            raise IndexRangeError(
                self.where,
                "read takes one index",
                found=f"{len(found)} indices",
                mend="read_many(indices) gives several samples",
            )
        return found[0]

    def read_many(self, indices: Sequence[int]) -> list[RawSample]:
        """Tensors and metadata of several samples, in the order asked for.

        Raises
        ------
        IndexRangeError
        StoreError
            The reader gave another number of samples than asked for.
        """
        positions = self._positions(indices)
        samples = self._load_many_samples(positions)
        self._check_count(len(samples), len(positions))
        return [
            (self._pinned(tensors), self._metadata(index))
            for tensors, index in zip(samples, positions, strict=True)
        ]

    def read_metadata(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Metadata alone of several samples."""
        return [self._metadata(index) for index in self._positions(indices)]

    def read_batch(self, indices: Sequence[int], fields: Sequence[str] | None = None) -> Batch:
        """Several samples as one Batch on the CPU.

        Parameters
        ----------
        indices : sequence of int
            Any order, repeats and negatives allowed.
        fields : sequence of str, optional
            Only these; by default all.

        Raises
        ------
        IndexRangeError
        FieldError
            No index at all; a Batch has at least one sample.
        """
        positions = self._positions(indices)
        if not positions:
            raise FieldError(
                self.where, "no sample to read", found="an empty list of indices", expected="some"
            )
        samples = self._load_many_samples(positions)
        self._check_count(len(samples), len(positions))
        if fields is not None:
            wanted = {resolve(name) for name in fields}
            samples = [
                {name: value for name, value in tensors.items() if resolve(name) in wanted}
                for tensors in samples
            ]
        batch = Batch.from_raw_dicts(samples, field_levels=dict(self._levels(samples)))
        return batch.pin_memory() if self._pins() else batch

    def read_batches(
        self, lists: Sequence[Sequence[int]], fields: Sequence[str] | None = None
    ) -> list[Batch]:
        """One Batch for each list of indices, out of one read.

        Raises
        ------
        FieldError
            One of the lists is empty.
        """
        return [self.read_batch(indices, fields) for indices in lists]

    def __getitem__(self, index: int) -> RawSample:
        return self.read(index)

    def __iter__(self) -> Iterator[RawSample]:
        for index in range(len(self)):
            try:
                sample = self.read(index)
            except Exception as error:
                raise StoreError(
                    self.where,
                    f"Sample {index} failed with exception {type(error).__name__}: {error}",
                ) from error
            yield sample

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------

    def _positions(self, indices: Iterable[int]) -> list[int]:
        """Indices as non-negative Python ints, checked."""
        found: list[int] = as_index(indices, len(self), where=self.where).tolist()
        return found

    def _check_count(self, found: int, expected: int) -> None:
        if found != expected:
            raise StoreError(
                self.where,
                "the reader gave another number of samples than was asked for",
                found=found,
                expected=expected,
            )

    def _metadata(self, index: int) -> dict[str, Any]:
        metadata = dict(self._get_sample_metadata(index))
        if self.include_index_in_metadata:
            metadata.setdefault("index", index)
        return metadata

    def _pins(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()

    def _pinned(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._pins():
            return tensors
        return {name: value.pin_memory() for name, value in tensors.items()}

    def _levels(self, samples: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, Level]]:
        """Recorded levels of the fields that the samples carry."""
        recorded = self.field_levels
        for name in {name for tensors in samples for name in tensors}:
            level = level_of(name, recorded)
            if level is not None:
                yield name, canonical_level(level)


class _DuckReader(Reader):
    """A reader that is none by class: an object with the right methods."""

    def __init__(self, inner: Any) -> None:
        super().__init__(
            pin_memory=bool(getattr(inner, "pin_memory", False)),
            include_index_in_metadata=bool(getattr(inner, "include_index_in_metadata", True)),
        )
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def where(self) -> str:
        return type(self.inner).__name__

    @property
    def field_levels(self) -> Mapping[str, str]:
        return getattr(self.inner, "field_levels", None) or {}

    def _get_field_names(self) -> list[str]:
        names = getattr(self.inner, "field_names", None)
        return list(names) if names is not None else super()._get_field_names()

    def _get_sample_metadata(self, index: int) -> dict[str, Any]:
        find = getattr(self.inner, "_get_sample_metadata", None)
        return dict(find(index)) if find is not None else {}

    def _load_many_samples(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        inner = self.inner
        if hasattr(inner, "read_many"):
            return [tensors for tensors, _ in self.read_many(indices)]
        if hasattr(inner, "_load_many_samples"):
            return list(inner._load_many_samples(indices))
        return [inner._load_sample(index) for index in indices]

    def read_many(self, indices: Sequence[int]) -> list[RawSample]:
        if not hasattr(self.inner, "read_many"):
            return super().read_many(indices)
        positions = self._positions(indices)
        samples = list(self.inner.read_many(positions))
        self._check_count(len(samples), len(positions))
        return [(dict(tensors), dict(metadata)) for tensors, metadata in samples]

    def read_metadata(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        if not hasattr(self.inner, "read_many"):
            return super().read_metadata(indices)
        return [metadata for _, metadata in self.read_many(indices)]

    def close(self) -> None:
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()


def as_reader(candidate: Any) -> Reader:
    """The object itself when it is a Reader, else a Reader around it.

    Any object will do that has a length and one of ``read_many``,
    ``_load_many_samples`` and ``_load_sample``.

    Raises
    ------
    ArgumentTypeError
        It has none of these.
    """
    if isinstance(candidate, Reader):
        return candidate
    loads = ("read_many", "_load_many_samples", "_load_sample")
    if (
        isinstance(candidate, type)
        or not hasattr(candidate, "__len__")
        or not any(callable(getattr(candidate, name, None)) for name in loads)
    ):
        raise ArgumentTypeError(
            "reader",
            "does not have the Reader interface",
            found=candidate.__name__ if isinstance(candidate, type) else type(candidate).__name__,
            expected=f"__len__ and one of {', '.join(loads)}",
            mend="subclass alchemi_xr.data.datapipes.Reader",
        )
    return _DuckReader(candidate)

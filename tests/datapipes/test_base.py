from __future__ import annotations

from typing import Any

import pytest
import torch

from alchemi_xr.data.datapipes import Dataset, Reader
from alchemi_xr.data.datapipes.backends.base import Tensors, as_reader
from alchemi_xr.errors import FieldError, IndexRangeError, StoreError, UnknownFieldError


def sample(index: int) -> dict[str, torch.Tensor]:
    atoms = index + 1
    return {
        "positions": torch.full((atoms, 3), float(index)),
        "atomic_numbers": torch.ones(atoms, dtype=torch.long),
        "energies": torch.tensor([[float(index)]]),
        "my_charge": torch.full((atoms,), 0.5),
    }


class One(Reader):
    field_levels = {"my_charge": "node"}  # noqa: RUF012

    def __len__(self) -> int:
        return 4

    def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
        return sample(index)


class Many(One):
    def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
        return self._load_many_samples([index])[0]

    def _load_many_samples(self, indices: Any) -> list[dict[str, torch.Tensor]]:
        return [sample(i) for i in indices]


class Neither(Reader):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("kind", [One, Many])
def test_a_reader_needs_one_of_two_methods(kind: type[Reader]) -> None:
    reader = kind()
    assert len(reader.read_many([2, 0])) == 2
    tensors, metadata = reader[-1]
    assert len(tensors["positions"]) == 4
    assert metadata == {"index": 3}
    assert [m["index"] for _, m in reader] == [0, 1, 2, 3]
    assert "positions" in reader.field_names


def test_a_reader_with_neither_says_so() -> None:
    with pytest.raises(NotImplementedError, match="neither _load_sample nor _load_many"):
        Neither().read(0)


def test_index_in_metadata_is_optional_and_never_overwrites() -> None:
    class Tagged(One):
        def _get_sample_metadata(self, index: int) -> dict[str, Any]:
            return {"index": "mine"}

    assert One(include_index_in_metadata=False).read(0)[1] == {}
    assert Tagged().read(0)[1] == {"index": "mine"}


def test_read_batch_goes_through_raw_dicts_with_recorded_levels() -> None:
    batch = One().read_batch([3, 0, 3])
    assert batch.num_nodes_list == [4, 1, 4]
    assert batch["energies"].tolist() == [[3.0], [0.0], [3.0]]
    assert batch.level_of("my_charge") == "atom"
    few = One().read_batch([1], fields=["positions", "atomic_numbers"])
    assert "energy" not in few


def test_errors_of_indices() -> None:
    with pytest.raises(IndexRangeError, match="out of range"):
        One().read(4)
    with pytest.raises(IndexRangeError):
        One().read_batch([0, -5])
    with pytest.raises(FieldError, match="no sample to read"):
        One().read_batch([])


def test_a_reader_that_gives_too_few_is_told() -> None:
    class Short(One):
        def _load_many_samples(self, indices: Any) -> list[dict[str, torch.Tensor]]:
            return [sample(0)]

    with pytest.raises(RuntimeError, match="another number of samples"):
        Short().read_many([0, 1])
    with pytest.raises(RuntimeError, match="another number of samples"):
        Short().read_batch([0, 1])


def test_iteration_names_the_sample_that_failed() -> None:
    class Broken(One):
        def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
            if index == 2:
                raise OSError("disk gone")
            return sample(index)

    seen = []
    with pytest.raises(StoreError, match="Sample 2 failed with exception OSError: disk gone"):
        seen.extend(m["index"] for _, m in Broken())
    assert seen == [0, 1]


def test_context_manager_closes() -> None:
    class Closing(One):
        closed = False

        def close(self) -> None:
            self.closed = True

    with Closing() as reader:
        pass
    assert reader.closed


class Duck:
    """A reader by its methods alone."""

    field_levels = {"my_charge": "atom"}  # noqa: RUF012

    def __init__(self) -> None:
        self.closed = False

    def __len__(self) -> int:
        return 4

    def close(self) -> None:
        self.closed = True


class DuckMany(Duck):
    def read_many(self, indices: Any) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
        return [(sample(i), {"from": "duck"}) for i in indices]


class DuckSample(Duck):
    def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
        return sample(index)


class DuckSamples(Duck):
    def _load_many_samples(self, indices: Any) -> list[dict[str, torch.Tensor]]:
        return [sample(i) for i in indices]


@pytest.mark.parametrize("kind", [DuckMany, DuckSample, DuckSamples])
def test_an_object_with_the_right_methods_is_a_reader(kind: type[Duck]) -> None:
    duck = kind()
    with Dataset(duck, device="cpu") as dataset:
        data, metadata = dataset[1]
        assert data.num_nodes == 2
        assert metadata.get("from", metadata.get("index")) in ("duck", 1)
        assert dataset.get_batch([2, 0])["energy"].tolist() == [[2.0], [0.0]]
        assert dataset.get_metadata(2) == (3, 0)
    assert duck.closed


@pytest.mark.parametrize("thing", [object(), Duck(), [1, 2], One, "path"])
def test_anything_else_is_no_reader(thing: Any) -> None:
    with pytest.raises(TypeError, match="Reader interface"):
        as_reader(thing)


def test_tensors_know_aliases() -> None:
    tensors = Tensors({"energy": torch.ones(1, 1)})
    assert tensors["energies"] is tensors["energy"]
    assert "energies" in tensors
    assert "forces" not in tensors
    assert tensors.get("energies") is tensors["energy"]
    assert tensors.get("forces", 3) == 3
    with pytest.raises(UnknownFieldError, match="energy"):
        tensors["energi"]

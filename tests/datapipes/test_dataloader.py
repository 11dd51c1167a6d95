from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SequentialSampler

from alchemi_xr.data import Batch
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
)
from alchemi_xr.errors import ConfigError, FieldError


def ids(batch: Batch) -> list[int]:
    return [int(e) for e in batch["energy"].flatten()]


def epoch(loader: DataLoader) -> list[list[int]]:
    return [ids(batch) for batch in loader]


@pytest.fixture
def dataset(store: Path) -> Iterator[Dataset]:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        yield dataset


@pytest.fixture(scope="module")
def resident(make_module: Any) -> InMemoryDataset:
    return InMemoryDataset(Batch.from_data_list(make_module(101)))


@pytest.fixture(scope="module")
def make_module() -> Any:
    from alchemi_xr.data import AtomicData

    def build(count: int) -> list[AtomicData]:
        return [
            AtomicData(
                positions=torch.full((1 + i % 4, 3), float(i)),
                atomic_numbers=torch.ones(1 + i % 4, dtype=torch.long),
                energy=torch.tensor([[float(i)]], dtype=torch.float64),
            )
            for i in range(count)
        ]

    return build


@pytest.mark.parametrize("prefetch_factor", [0, 1, 2, 5, 50])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_order_gives_the_samples_of_a_plain_loop(
    dataset: Dataset, make_samples: Any, prefetch_factor: int, shuffle: bool, drop_last: bool
) -> None:
    samples = make_samples(23)
    loader = DataLoader(
        dataset,
        batch_size=4,
        shuffle=shuffle,
        drop_last=drop_last,
        prefetch_factor=prefetch_factor,
    )
    seen: list[int] = []
    batches = 0
    for batch in loader:
        assert isinstance(batch, Batch)
        expected = Batch.from_data_list([samples[i] for i in ids(batch)])
        for name, value in expected:
            assert torch.equal(batch[name], value), name
        seen += ids(batch)
        batches += 1
    assert batches == len(loader) == (5 if drop_last else 6)
    if shuffle:
        assert len(set(seen)) == len(seen) == (20 if drop_last else 23)
        assert seen != sorted(seen)
    else:
        assert seen == list(range(20 if drop_last else 23))


def test_epochs_differ_and_can_be_made_again(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    first, second = epoch(loader), epoch(loader)
    assert first != second
    loader.set_epoch(0)
    assert epoch(loader) == first
    assert epoch(loader) == second
    torch.manual_seed(1234)  # no part in it
    assert epoch(DataLoader(dataset, batch_size=5, shuffle=True, prefetch_factor=0)) == first
    assert epoch(DataLoader(dataset, batch_size=5, shuffle=True, seed=1)) != first


def test_prefetch_does_not_change_a_shuffled_order(dataset: Dataset) -> None:
    orders = [
        epoch(DataLoader(dataset, batch_size=3, shuffle=True, prefetch_factor=k))
        for k in (0, 1, 4, 16)
    ]
    assert all(order == orders[0] for order in orders)


def test_samplers_decide(dataset: Dataset) -> None:
    assert epoch(DataLoader(dataset, batch_size=3, sampler=[5, 1, 1, 9])) == [[5, 1, 1], [9]]
    loader = DataLoader(dataset, batch_size=3, sampler=[5, 1, 1, 9], drop_last=True)
    assert (epoch(loader), len(loader)) == ([[5, 1, 1]], 1)
    torch_order = DataLoader(dataset, batch_size=4, sampler=SequentialSampler(dataset))
    assert list(chain.from_iterable(epoch(torch_order))) == list(range(23))
    drawn = epoch(DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset)))
    assert sorted(chain.from_iterable(drawn)) == list(range(23))

    lists = [[4, 2], [0], [7, 7, 1]]
    loader = DataLoader(dataset, batch_sampler=lists, batch_size=99, drop_last=True)
    assert (epoch(loader), len(loader)) == (lists, 3)


def test_wrong_arguments(dataset: Dataset) -> None:
    for wrong in (
        {"batch_size": 0},
        {"prefetch_factor": -1},
        {"seed": -1},
        {"batch_sampler": [[0]], "shuffle": True},
        {"batch_sampler": [[0]], "sampler": [0]},
    ):
        with pytest.raises(ValueError):
            DataLoader(dataset, **wrong)
    with pytest.raises(TypeError, match="Sequence"):
        DataLoader(dataset, batch_transforms=lambda b: b)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        DataLoader(dataset, 4)  # type: ignore[misc]
    loader = DataLoader(dataset)
    with pytest.raises(ValueError, match="step"):
        loader.set_epoch_step(-1)
    with pytest.raises(ValueError, match="epoch"):
        loader.set_epoch(-1)


def test_read_window(dataset: Dataset) -> None:
    assert DataLoader(dataset, batch_size=8, prefetch_factor=3).effective_read_window == 24
    assert DataLoader(dataset, batch_size=8, prefetch_factor=0).effective_read_window == 8


def test_batch_transforms_run_in_the_consumer(dataset: Dataset) -> None:
    import threading

    def mark(batch: Batch) -> Batch:
        assert threading.current_thread() is threading.main_thread()
        batch["energy"] = batch["energy"] + 100
        return batch

    loader = DataLoader(dataset, batch_size=23, batch_transforms=[mark, mark])
    assert epoch(loader) == [[200 + i for i in range(23)]]


def test_steps_are_skipped_once(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=5)
    loader.set_epoch_step(3)
    assert epoch(loader) == [[15, 16, 17, 18, 19], [20, 21, 22]]
    assert len(epoch(loader)) == 5
    loader.set_epoch_step(3)
    loader.set_epoch(0)
    assert len(epoch(loader)) == 2
    loader.set_epoch_step(99)
    assert epoch(loader) == []


def test_set_epoch_reaches_a_sampler(dataset: Dataset) -> None:
    class Rotating:
        epoch = 0
        told: list[int]

        def __init__(self) -> None:
            self.told = []

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch, self.epoch + 1, self.epoch + 2])

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch
            self.told.append(epoch)

    sampler = Rotating()
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    loader.set_epoch(7)
    assert epoch(loader) == [[7, 8, 9]]
    assert epoch(loader) == [[8, 9, 10]]
    sampler.set_epoch(2)  # by its owner, not through the loader
    assert epoch(loader) == [[2, 3, 4]]
    assert loader.epoch == 3


def run_with_stops(
    make: Callable[[int], DataLoader], stops: list[int], epochs: int
) -> list[list[int]]:
    """Batches of some epochs, each stop saved, serialised and taken up by a fresh loader."""
    seen: list[list[int]] = []
    loader = make(len(stops))
    pending = list(stops)
    while loader.epoch < epochs:
        stopped = False
        for done, batch in enumerate(loader, start=1):
            seen.append(ids(batch))
            if pending and done == pending[0]:
                pending.pop(0)
                state = json.loads(json.dumps(loader.state_dict()))
                loader = make(len(pending))
                loader.load_state_dict(state)
                stopped = True
                break
        if not stopped and loader.epoch >= epochs:
            break
    return seen


@given(
    stops=st.lists(st.integers(1, 13), max_size=5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    factor=st.integers(0, 4),
)
def test_resuming_is_as_if_nothing_had_happened(
    resident: InMemoryDataset, stops: list[int], shuffle: bool, drop_last: bool, factor: int
) -> None:
    def make(number: int) -> DataLoader:
        # Another number of prefetched batches after each stop.
        return DataLoader(
            resident,
            batch_size=8,
            shuffle=shuffle,
            drop_last=drop_last,
            prefetch_factor=(factor + number) % 5,
        )

    assert run_with_stops(make, stops, 2) == run_with_stops(make, [], 2)


def test_case_c35(shared: Path, resident: InMemoryDataset) -> None:
    case = json.loads((shared / "cases/C35-resume-mid-epoch/expected.json").read_text())["expected"]

    def make(_: int) -> DataLoader:
        return DataLoader(resident, batch_size=case["batch"], shuffle=True, seed=5)

    assert len(resident) == case["n"]
    whole = run_with_stops(make, [], 2)
    assert run_with_stops(make, case["stop_after_batches"], 2) == whole
    assert sorted(chain.from_iterable(whole)) == sorted(2 * list(range(case["n"])))


def test_resume_with_a_store_and_threads(dataset: Dataset) -> None:
    def make(_: int) -> DataLoader:
        return DataLoader(dataset, batch_size=2, shuffle=True, prefetch_factor=3)

    assert run_with_stops(make, [4, 1, 7], 2) == run_with_stops(make, [], 2)


def test_a_state_at_the_very_end_leaves_nothing_of_the_epoch(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 3)
    assert list(iterator) == []
    assert loader.state_dict()["epoch"] == 1
    other = DataLoader(dataset, batch_size=8, shuffle=True)
    other.load_state_dict(state)
    assert epoch(other) == []
    assert epoch(other) == epoch(loader)


def test_a_restored_position_is_for_its_epoch(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=8)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "step": 2})
    loader.set_epoch(3)
    assert epoch(loader) == [list(range(16, 23))]
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "step": 2})
    loader.set_epoch(4)
    assert len(epoch(loader)) == 3


def test_a_state_of_another_loader_is_refused(dataset: Dataset) -> None:
    state = DataLoader(dataset, batch_size=4, shuffle=True, seed=1).state_dict()
    with pytest.raises(ConfigError, match="another batch_size"):
        DataLoader(dataset, batch_size=5, shuffle=True, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="another seed"):
        DataLoader(dataset, batch_size=4, shuffle=True).load_state_dict(state)
    with pytest.raises(ConfigError, match="version"):
        DataLoader(dataset).load_state_dict({})


@pytest.mark.parametrize("factor", [0, 1, 2])
def test_a_sampler_with_a_state_of_its_own(dataset: Dataset, factor: int) -> None:
    class Stateful:
        """Counts up for ever; what was drawn is its state."""

        def __init__(self) -> None:
            self.at = 0

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[list[int]]:
            for _ in range(self.at % 6, 6):
                self.at += 1
                yield [self.at - 1]

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader = DataLoader(dataset, batch_sampler=Stateful(), prefetch_factor=factor)
    iterator = iter(loader)
    assert [ids(next(iterator)) for _ in range(2)] == [[0], [1]]
    other = DataLoader(dataset, batch_sampler=Stateful(), prefetch_factor=factor)
    other.load_state_dict(loader.state_dict())
    assert epoch(other) == [[2], [3], [4], [5]]


def test_no_thread_is_left_however_an_iteration_ends(
    store: Path, no_threads: Callable[[], list[str]]
) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        loader = DataLoader(dataset, batch_size=2, prefetch_factor=2)
        for number, _ in enumerate(loader):
            assert no_threads()
            if number == 1:
                break
        assert no_threads() == []
        epoch(loader)
        assert no_threads() == []
        with pytest.raises(ZeroDivisionError):
            for _ in loader:
                raise ZeroDivisionError
        assert no_threads() == []
        iterator = iter(loader)
        next(iterator)
        del iterator
        assert no_threads() == []


def test_an_error_in_a_thread_reaches_the_loop(
    store: Path, no_threads: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        loader = DataLoader(dataset, batch_size=2, sampler=[0, 1, 2, 3, 4, 99])
        seen = []
        with pytest.raises(IndexError, match="99 is out of range"):
            seen.extend(ids(batch) for batch in loader)
        assert seen == [[0, 1], [2, 3]]  # the wrong index is in the second read
        assert no_threads() == []
        seen.clear()
        loader = DataLoader(dataset, batch_size=2, sampler=[*range(8), 99], prefetch_factor=1)
        with pytest.raises(IndexError):
            seen.extend(ids(batch) for batch in loader)
        assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_each_batch_waits_for_its_stream(dataset: Dataset) -> None:
    waited: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            waited.append(self.name)

    class Stream:
        """Stands for a CUDA stream: the path is the same without one."""

        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> Event:
            return Event(self.name)

    loader = DataLoader(dataset, batch_size=4, prefetch_factor=2)
    assert loader.use_streams == torch.cuda.is_available()
    loader._streams = [Stream("a"), Stream("b")]  # type: ignore[list-item]
    iterator = iter(loader)
    next(iterator)
    assert waited == ["a"]
    assert len(list(iterator)) == 5
    assert waited == ["a", "a", "b", "b", "a", "a"]


def test_without_workers_everything_is_read_here(
    store: Path, no_threads: Callable[[], list[str]]
) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu", num_workers=0) as dataset:
        loader = DataLoader(dataset, batch_size=4, prefetch_factor=2)
        for _ in loader:
            assert no_threads() == []
        assert list(chain.from_iterable(epoch(loader))) == list(range(23))


def test_torchs_own_loader_takes_a_dataset(dataset: Dataset) -> None:
    from torch.utils.data import DataLoader as TorchLoader

    def collate(samples: list[Any]) -> Batch:
        return Batch.from_data_list([data for data, _ in samples])

    seen = [ids(b) for b in TorchLoader(dataset, batch_size=5, collate_fn=collate)]
    assert list(chain.from_iterable(seen)) == list(range(23))


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu(store: Path) -> None:
    with (
        Dataset(AtomicDataZarrReader(store), device="cuda") as dataset,
        Dataset(AtomicDataZarrReader(store), device="cpu") as plain,
    ):
        loader = DataLoader(dataset, batch_size=4, shuffle=True, pin_memory=True)
        assert loader.use_streams
        for batch in loader:
            assert batch.device.type == "cuda"
            expected = plain.get_batch(ids(batch))
            for name, value in expected:
                assert torch.equal(batch[name].cpu(), value), name


def test_two_iterations_at_once_do_not_mix(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=6)
    pairs = [(ids(a), ids(b)) for a, b in zip(loader, loader, strict=True)]
    assert all(a == b for a, b in pairs)
    assert len(pairs) == 4


def test_a_foreign_dataset_needs_load_batches_alone() -> None:
    class Foreign:
        def __len__(self) -> int:
            return 5

        def load_batches(self, lists: Any, stream: Any = None) -> list[list[int]]:
            return [list(indices) for indices in lists]

    assert list(DataLoader(Foreign(), batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert list(DataLoader(Foreign(), batch_size=2, prefetch_factor=0)) == [[0, 1], [2, 3], [4]]


def test_deleted_samples_never_come(store: Path) -> None:
    AtomicDataZarrWriter(store).delete([0, 5, 22])
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        kept = sorted(chain.from_iterable(epoch(DataLoader(dataset, batch_size=4, shuffle=True))))
        assert kept == [i for i in range(23) if i not in (0, 5, 22)]


def test_an_empty_dataset_has_no_batch(store: Path) -> None:
    AtomicDataZarrWriter(store).delete(list(range(23)))
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        assert epoch(DataLoader(dataset, batch_size=4)) == []
        assert len(DataLoader(dataset, batch_size=4)) == 0
        with pytest.raises(FieldError):
            dataset.get_batch([])

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter, Dataset
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    IndexRangeError,
    StoreClosedError,
    UnknownFieldError,
)


def open_dataset(path: Path, **options: Any) -> Dataset:
    return Dataset(AtomicDataZarrReader(path), device="cpu", **options)


def energies(batch: Batch) -> list[float]:
    return [float(e) for e in batch["energy"].flatten()]


def test_samples_and_metadata(store: Path, make_samples: Any, assert_same: Any) -> None:
    with open_dataset(store) as dataset:
        assert len(dataset) == 23
        for index, expected in enumerate(make_samples(23)):
            found, metadata = dataset[index]
            assert_same(found, expected)
            assert metadata["index"] == index
            assert dataset.get_metadata(index) == (expected.num_nodes, expected.num_edges)
        assert dataset[-1][1]["index"] == 22
        assert [m["index"] for _, m in dataset] == list(range(23))
        assert "positions" in dataset.field_names


def test_batches_are_what_their_samples_make(store: Path, make_samples: Any) -> None:
    samples = make_samples(23)
    with open_dataset(store) as dataset:
        for indices in ([0], [5, 2, 9], [3, 3, -1], list(range(23))):
            found = dataset.get_batch(indices)
            expected = Batch.from_data_list([samples[i] for i in indices])
            assert found.num_nodes_list == expected.num_nodes_list
            for name, value in expected:
                assert torch.equal(found[name], value), name
        many = dataset.load_batches([[1, 2], [7], [2, 1]])
        assert [energies(b) for b in many] == [[1.0, 2.0], [7.0], [2.0, 1.0]]


def test_no_sample_object_on_the_batch_path(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an AtomicData was made")

    monkeypatch.setattr(AtomicData, "__init__", refuse)
    monkeypatch.setattr(AtomicData, "_trusted", refuse)
    monkeypatch.setattr(AtomicDataZarrReader, "_load_many_samples", refuse)
    with open_dataset(store) as dataset:
        dataset.prefetch_fused_batches([[0, 1], [2]])
        assert [energies(b) for b in dataset.get_fused_batches()] == [[0.0, 1.0], [2.0]]
        assert energies(dataset.get_batch([4])) == [4.0]


def test_holes_are_filled_and_known(holed_store: Path) -> None:
    with open_dataset(holed_store) as dataset:
        batch = dataset.get_batch([0, 1, 2])
        assert batch["energies"].shape == (3, 1)
        assert torch.isnan(batch["energies"].flatten()).tolist() == [False, True, False]
        assert batch.has("energies").tolist() == [True, False, True]
        assert batch["pbc"][1].tolist() == [False] * 3
        assert dataset[1][0].energy is None
        assert dataset[2][0].energy.tolist() == [[2.0]]


def test_prefetch_is_one_read_and_is_taken_once(
    store: Path, no_threads: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[list[int]] = []
    plain = AtomicDataZarrReader.read_batches

    def counted(self: Any, lists: Any, fields: Any = None) -> Any:
        reads.extend(list(indices) for indices in lists)
        return plain(self, lists, fields)

    monkeypatch.setattr(AtomicDataZarrReader, "read_batches", counted)
    with open_dataset(store) as dataset:
        dataset.prefetch(3)
        dataset.prefetch(3)
        dataset.prefetch(-20)
        assert dataset.prefetch_count == 1
        assert dataset[3][1]["index"] == 3
        assert dataset.prefetch_count == 0
        assert reads == [[3]]
        dataset[3]
        assert reads == [[3], [3]]

        dataset.prefetch_many([4, 5, 6])
        assert dataset.prefetch_count == 3
        assert energies(dataset.get_batch([4, 5, 6])) == [4.0, 5.0, 6.0]
        assert dataset.prefetch_count == 0
        assert reads[2:] == [[4, 5, 6]]

        dataset.prefetch_many([7, 8])
        assert dataset[8][1]["index"] == 8
        assert dataset[7][1]["index"] == 7
        assert dataset.prefetch_count == 0
        assert reads[3:] == [[7, 8]]
        assert no_threads()


def test_streams_take_turns_and_are_waited_for(store: Path) -> None:
    waited: list[int] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    class Stream:
        def __init__(self, number: int) -> None:
            self.number = number

        def record_event(self) -> Event:
            return Event(self.number)

    with open_dataset(store) as dataset:
        dataset.prefetch_batch([0, 1, 2, 3, 4], streams=[Stream(0), Stream(1)])
        assert [dataset[i][1]["index"] for i in (4, 1, 0, 2, 3)] == [4, 1, 0, 2, 3]
        assert waited == [0, 1]  # one event a read, whoever of it comes first
        dataset.prefetch_batch([5, 6])
        dataset.prefetch(9, stream=Stream(7))
        dataset[9]
        assert waited == [0, 1, 7]


def test_cancel_forgets(store: Path) -> None:
    with open_dataset(store) as dataset:
        dataset.prefetch_many([1, 2, 3])
        dataset.cancel_prefetch(2)
        assert dataset.prefetch_count == 2
        dataset.prefetch_fused_batches([[1]])
        dataset.cancel_prefetch()
        assert dataset.prefetch_count == 0
        assert not dataset.has_pending_fused_batches()
        assert dataset[2][1]["index"] == 2
        dataset.cancel_prefetch(5)


def test_the_fused_queue_holds_two(store: Path) -> None:
    with open_dataset(store) as dataset:
        with pytest.raises(RuntimeError, match="No fused batch prefetch pending"):
            dataset.get_fused_batches()
        dataset.prefetch_fused_batches([[0], [1]])
        dataset.prefetch_fused_batches([[2]])
        with pytest.raises(RuntimeError, match="queue is full"):
            dataset.prefetch_fused_batches([[3]])
        assert dataset.has_pending_fused_batches()
        assert [energies(b) for b in dataset.get_fused_batches()] == [[0.0], [1.0]]
        assert [energies(b) for b in dataset.get_fused_batches()] == [[2.0]]
        assert not dataset.has_pending_fused_batches()


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_a_thread_come_back_where_they_are_asked_for(
    store: Path, workers: int, no_threads: Any
) -> None:
    with open_dataset(store, num_workers=workers) as dataset:
        dataset.prefetch_fused_batches([[0], []])
        with pytest.raises(FieldError, match="list 1 of the batch is empty"):
            dataset.get_fused_batches()
        with pytest.raises(FieldError, match="empty"):
            dataset.get_batch([])
        with pytest.raises(IndexRangeError):
            dataset[23]
        with pytest.raises(IndexRangeError):
            dataset.prefetch(99)


def test_close_ends_threads_and_the_reader(store: Path, no_threads: Callable[[], Any]) -> None:
    dataset = open_dataset(store)
    dataset.prefetch_many([1, 2])
    assert no_threads()
    dataset.close()
    dataset.close()
    assert no_threads() == []
    with pytest.raises(RuntimeError, match="Cannot read from a closed reader"):
        dataset[0]
    with pytest.raises(StoreClosedError):
        dataset.prefetch(0)


def test_sample_transforms_run_on_both_paths(store: Path) -> None:
    def tag(data: AtomicData, metadata: dict[str, Any]) -> tuple[AtomicData, dict[str, Any]]:
        data.energy = data.energy * 2
        return data, {**metadata, "tagged": True}

    with open_dataset(store, transforms=[tag, tag]) as dataset:
        data, metadata = dataset[3]
        assert float(data.energy) == 12.0
        assert metadata["tagged"]
        assert energies(dataset.get_batch([3, 1])) == [12.0, 4.0]
        dataset.prefetch(2)
        assert float(dataset[2][0].energy) == 8.0
    with open_dataset(store, transforms=[tag], skip_validation=True) as dataset:
        assert energies(dataset.get_batch([3])) == [6.0]


def test_batch_transforms_need_no_samples(store: Path) -> None:
    def double(batch: Batch) -> Batch:
        batch["energy"] = batch["energy"] * 2
        return batch

    with open_dataset(store, transforms=[double]) as dataset:
        assert energies(dataset.get_batch([3, 1])) == [6.0, 2.0]
        assert float(dataset[4][0].energy) == 8.0


def test_a_failing_transform_is_named(store: Path) -> None:
    def broken(data: AtomicData, metadata: dict[str, Any]) -> Any:
        raise KeyError("label")

    with (
        open_dataset(store, transforms=[broken]) as dataset,
        pytest.raises(RuntimeError, match=r"transform\[0\].*KeyError") as caught,
    ):
        dataset[0]
    assert isinstance(caught.value.__cause__, KeyError)


def test_wrong_arguments(store: Path) -> None:
    reader = AtomicDataZarrReader(store)
    with pytest.raises(TypeError, match="Reader interface"):
        Dataset(object())
    with pytest.raises(TypeError, match="device"):
        Dataset(reader, device=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Sequence"):
        Dataset(reader, transforms=lambda a, b: (a, b))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_workers"):
        Dataset(reader, num_workers=-1)
    reader.close()


def test_validation_names_the_sample_and_the_row(tmp_path: Path, make_samples: Any) -> None:
    samples = make_samples(6)
    bad = samples[4].positions.clone()
    bad[-1, 1] = float("nan")
    samples[4] = AtomicData(positions=bad, atomic_numbers=samples[4].atomic_numbers, validate=False)
    AtomicDataZarrWriter(tmp_path / "nan.zarr").write(samples)
    with open_dataset(tmp_path / "nan.zarr") as dataset:
        dataset.get_batch([0, 1, 2, 3, 5])
        row = len(bad) - 1
        with pytest.raises(FieldError, match=rf"sample 4, field 'positions', row {row} is not fin"):
            dataset.get_batch([5, 4])
    with open_dataset(tmp_path / "nan.zarr", skip_validation=True) as dataset:
        assert torch.isnan(dataset.get_batch([4])["positions"]).any()


def test_floats_take_the_dtype_of_positions_unless_trusted(store: Path) -> None:
    batch = AtomicDataZarrReader(store).read_batch(range(23))
    batch["forces"] = batch["forces"].double()
    path = store.parent / "mixed.zarr"
    AtomicDataZarrWriter(path).write(batch)
    with open_dataset(path) as dataset:
        with pytest.warns(UserWarning, match="'forces' is cast"):
            found = dataset.get_batch([0, 1])
        assert found["forces"].dtype == torch.float32
        assert found["energy"].dtype == torch.float64
        dataset.get_batch([2])  # warned once: a second warning would be an error here
    with open_dataset(path, skip_validation=True) as dataset:
        assert dataset.get_batch([0])["forces"].dtype == torch.float64


def test_only_some_fields(store: Path) -> None:
    with open_dataset(store, fields=["positions", "atomic_numbers", "energies"]) as dataset:
        assert set(dataset.get_batch([0, 1]).to_dict()) == {"positions", "atomic_numbers", "energy"}
    with (
        open_dataset(store, fields=["force_s"]) as dataset,
        pytest.raises(UnknownFieldError, match="'forces'"),
    ):
        dataset.get_batch([0])


def test_refresh_shows_what_was_appended(store: Path, make_samples: Any) -> None:
    with open_dataset(store) as dataset:
        AtomicDataZarrWriter(store).append(make_samples(2))
        assert len(dataset) == 23
        dataset.refresh()
        assert len(dataset) == 25
        assert energies(dataset.get_batch([24, 0])) == [1.0, 0.0]


def test_many_threads_may_read_one_dataset(store: Path) -> None:
    with open_dataset(store) as dataset:
        failures: list[BaseException] = []

        def read(offset: int) -> None:
            try:
                for i in range(10):
                    index = (i * 7 + offset) % 23
                    assert energies(dataset.load_batches([[index]])[0]) == [float(index)]
            except BaseException as error:  # pragma: no cover - only on failure
                failures.append(error)

        threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_a_dataset_goes_to_another_process(store: Path) -> None:
    with open_dataset(store) as dataset:
        dataset.prefetch(1)
        with pickle.loads(pickle.dumps(dataset)) as other:
            assert other.prefetch_count == 0
            assert energies(other.get_batch([1])) == [1.0]

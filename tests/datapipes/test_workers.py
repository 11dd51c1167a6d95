"""Worker processes of our own loader: the same batches, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemi_xr import set_options
from alchemi_xr.config import get_options
from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
    Reader,
    packing,
    workers,
)
from alchemi_xr.data.datapipes.torch_compat import BatchStream
from alchemi_xr.errors import (
    ArgumentTypeError,
    ConfigError,
    FieldError,
    StoreClosedError,
    TransformError,
    WorkerError,
)
from tests.datapipes.conftest import make

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="most of it forks: it is quick")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def segments() -> set[str]:
    """Segments and semaphores that this process has, or nobody any more; not those of others."""
    room = Path("/dev/shm")
    if not room.is_dir():
        return set()
    others, mine = "", ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            if maps.parent.name == str(os.getpid()):
                mine = text
            elif "/dev/shm" in text:
                others += text
    names = [p.name for p in room.iterdir() if p.name.startswith(("torch_", "psm_", "sem."))]
    # The lock of numcodecs in a worker that was killed stays until our resource tracker ends.
    return {n for n in names if n in mine or (n not in others and not n.startswith("sem."))}


def our_threads() -> set[threading.Thread]:
    """Threads but for those that zarr and our writers keep, and begin when they like."""
    theirs = ("zarr", "asyncio", "alchemi-store")
    return {one for one in threading.enumerate() if not one.name.startswith(theirs)}


def new_segments(before: set[str]) -> set[str]:
    """Those that were not there before, once others had time to map what they made."""
    for _ in range(50):
        if not segments() - before:
            break
        time.sleep(0.1)
    return segments() - before


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, thread, descriptor or segment is left by any test here."""
    # What the first use begins and keeps: the server of processes, and its tracker.
    _warm()
    gc.collect()
    files, names, threads = descriptors(), segments(), our_threads()
    yield
    gc.collect()
    assert multiprocessing.active_children() == []
    assert descriptors() <= files
    assert new_segments(names) == set()
    assert our_threads() <= threads


def _warm(done: list[int] = []) -> None:  # noqa: B006 - once a process
    if not done:
        done.append(1)
        memory: dict[str, Any] = {}  # zarr's own threads and their descriptors
        AtomicDataZarrWriter(memory).write(make(3))
        dataset = InMemoryDataset(reader=AtomicDataZarrReader(memory))
        assert len(list(DataLoader(dataset, num_workers=1))) == 3


@pytest.fixture
def dataset(store: Path) -> Iterator[Dataset]:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        yield dataset


def energies(batches: Any) -> list[list[float]]:
    return [batch.energy.flatten().tolist() for batch in batches]


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Batch)
        assert list(one.to_dict()) == list(other.to_dict())
        for name, value in other:
            assert one[name].dtype == value.dtype
            assert one[name].shape == value.shape
            assert (
                torch.allclose(one[name], value, 0, 0, equal_nan=True)
                if (value.is_floating_point())
                else torch.equal(one[name], value)
            ), name
            assert torch.equal(one.has(name), other.has(name))
        assert one.atoms_ptr.tolist() == other.atoms_ptr.tolist()
        assert one.edges_ptr.tolist() == other.edges_ptr.tolist()
        assert one._units == other._units


# -- the same batches ------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Raw, compressed, and with holes; a few samples of each are deleted."""
    folder = tmp_path_factory.mktemp("workers")
    found = {}
    for name, config, holes in (
        ("raw", "raw", False),
        ("small", "small", False),
        ("holes", None, True),
    ):
        found[name] = folder / f"{name}.zarr"
        writer = AtomicDataZarrWriter(found[name], config)
        writer.write(make(31, seed=len(found), holes=holes))
        writer.delete([0, 5, 6, 30])
    return found


def open_one(place: Path, **options: Any) -> Dataset:
    return Dataset(AtomicDataZarrReader(place), device="cpu", **options)


def order(kind: str, both: MultiDataset) -> dict[str, Any]:
    """Options of a loader by the name of its order."""
    orders: dict[str, dict[str, Any]] = {
        "sequential": {"batch_size": 4},
        "shuffle": {"batch_size": 5, "shuffle": True, "drop_last": True},
        "block": {"batch_size": 4, "shuffle": "block", "shuffle_blocks": 2},
        "atoms": {"max_atoms": 17, "shuffle": True},
        "edges": {"max_edges": 9, "max_atoms": 25, "batch_size": 6},
        "rank": {"batch_size": 3, "shuffle": True, "rank": 1, "world_size": 3},
        "weighted": {
            "batch_size": 4,
            "sampler": MultiDatasetSampler(both, weights=[1, 3], num_samples=30, seed=4),
        },
        "balanced": {"batch_sampler": MultiDatasetBatchSampler.balanced(both, batch_size=4)},
    }
    return orders[kind]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(
        ["sequential", "shuffle", "block", "atoms", "edges", "rank", "weighted", "balanced"]
    ),
    num_workers=st.integers(1, 3),
    ahead=st.integers(0, 3),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 3),
    stop=st.integers(0, 6),
    again=st.integers(0, 2),
    memory=st.booleans(),
)
def test_every_order_is_that_of_no_workers_and_goes_on_anywhere(
    places: dict[str, Path],
    kind: str,
    num_workers: int,
    ahead: int,
    seed: int,
    epoch: int,
    stop: int,
    again: int,
    memory: bool,
) -> None:
    """Of two stores with deleted samples and holes; stopped, and gone on with other workers."""
    second: Any = open_one(places["holes"])
    if memory:
        second = InMemoryDataset(reader=AtomicDataZarrReader(places["holes"]))
    with MultiDataset(open_one(places["small"]), second, output_strict=False) as both:

        def loader(count: int) -> DataLoader:
            return DataLoader(
                both,
                seed=seed,
                num_workers=count,
                prefetch_factor=ahead,
                multiprocessing_context="fork",
                **order(kind, both),
            )

        plain, theirs = loader(0), loader(num_workers)
        plain.set_epoch(epoch)
        expected = list(plain)
        theirs.set_epoch(epoch)
        assert len(theirs) == len(expected)
        steps = iter(theirs)
        found = [next(steps) for _ in range(min(stop, len(expected)))]
        state = theirs.state_dict()
        assert (state["epoch"], state["step"]) == (epoch, len(found))  # given, not read ahead
        steps.close()  # type: ignore[attr-defined]
        other = loader(again)
        other.load_state_dict(state)
        found += list(other)
        assert_equal(found, expected)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_processes_that_share_nothing_give_the_same(places: dict[str, Path], method: str) -> None:
    """Dataset, readers and transforms are pickled; the batch in memory goes along once."""
    resident = InMemoryDataset(reader=AtomicDataZarrReader(places["raw"]))
    expected = list(DataLoader(resident, batch_size=4))  # rows are planned by their addresses
    with MultiDataset(open_one(places["raw"], transforms=[nudge]), resident) as both:
        how: Any = {"batch_size": 5, "shuffle": True, "batch_transforms": [lambda b: double(b)]}
        plain = list(DataLoader(both, **how))
        theirs = DataLoader(both, num_workers=2, multiprocessing_context=method, **how)
        assert_equal(list(theirs), plain)
        assert_equal(list(DataLoader(resident, batch_size=4)), expected)


def nudge(data: AtomicData, about: dict[str, Any]) -> tuple[AtomicData, dict[str, Any]]:
    data.positions = data.positions + int(about["index"])
    return data, about


def double(batch: Batch) -> Batch:
    batch["energy"] = batch["energy"] * 2
    return batch


@pytest.mark.parametrize("through_pipe", [True, False])
def test_a_batch_is_ones_own(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, through_pipe: bool
) -> None:
    """Shared memory or not: changed in place it is no other's, and autograd counts each tensor."""
    if not through_pipe:
        monkeypatch.setattr(packing, "_THROUGH_PIPE", 0)  # forked workers have it, too
    batches = list(DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="fork"))
    before = batches[1].positions.clone()
    positions = batches[0].positions.requires_grad_()
    loss = (positions**2).sum()
    batches[0].forces += 1.0  # another tensor of the same memory: no in-place error
    loss.backward()
    batches[0].energy.zero_()
    assert torch.equal(batches[1].positions, before)


def assert_on_cpu(batch: Batch) -> Batch:
    assert batch.device.type == "cpu"
    return batch


def test_batches_are_moved_in_the_process_of_the_loader(store: Path) -> None:
    """A device without memory stands in for a GPU."""
    resident = InMemoryDataset(Batch.from_data_list(make(9)), device="meta")
    with Dataset(AtomicDataZarrReader(store), device="meta") as dataset:
        for source in (dataset, resident):
            how: Any = {"batch_size": 5, "shuffle": True}
            loader = DataLoader(source, num_workers=1, batch_transforms=[assert_on_cpu], **how)
            for batch, other in zip(loader, DataLoader(source, **how), strict=True):
                assert batch.device.type == other.device.type == "meta"
                assert batch.positions.shape == other.positions.shape


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_come_to_the_gpu_on_side_streams(store: Path, pin_memory: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with Dataset(AtomicDataZarrReader(store), device="cuda") as dataset:
        how: Any = {"batch_size": 4, "shuffle": True}
        loader = DataLoader(dataset, num_workers=2, pin_memory=pin_memory, **how)
        found = [batch.to("cpu") for batch in loader]
        dataset.pin_memory = False
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        assert_equal(found, list(DataLoader(dataset, **how)))


# -- epochs ----------------------------------------------------------------------------


def tell_process(batch: Batch) -> Batch:
    batch.set("process", torch.full((batch.num_graphs, 1), os.getpid()), level="system")
    return batch


def test_processes_live_on_and_notice_a_refresh(store: Path) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        how: Any = {"batch_size": 4, "shuffle": True, "seed": 3}
        plain = DataLoader(dataset, **how)
        theirs = DataLoader(
            dataset, num_workers=2, persistent_workers=True, batch_transforms=[tell_process], **how
        )
        seen = set()
        for epoch in (0, 1, 5):
            plain.set_epoch(epoch)
            theirs.set_epoch(epoch)
            found = list(theirs)
            seen |= {int(p) for batch in found for p in batch["process"]}
            assert energies(found) == energies(plain)
            steps = iter(theirs)  # begun and left: what is under way is no other epoch's
            next(steps)
            del steps
        assert len(seen) <= 2
        assert os.getpid() not in seen
        AtomicDataZarrWriter(store).delete([2, 3])
        assert len(energies(theirs)) == 6  # the generation that is held
        dataset.refresh()
        plain.set_epoch(7)
        theirs.set_epoch(7)
        found = list(theirs)
        assert energies(found) == energies(plain)
        assert sum(batch.num_graphs for batch in found) == 21
        assert not seen & {int(p) for batch in found for p in batch["process"]}
        theirs.close()
        assert multiprocessing.active_children() == []
        assert len(list(theirs)) == 6  # and can go on
        theirs.close()


def test_iterations_side_by_side(dataset: Dataset) -> None:
    loader = DataLoader(
        dataset,
        batch_size=6,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    expected = energies(DataLoader(dataset, batch_size=6))
    pairs = list(zip(loader, loader, strict=True))
    assert energies(a for a, _ in pairs) == energies(b for _, b in pairs) == expected
    loader.close()


def test_a_closed_dataset_says_so(store: Path) -> None:
    dataset = Dataset(AtomicDataZarrReader(store), device="cpu")
    loader = DataLoader(dataset, num_workers=1)
    dataset.close()
    with pytest.raises(StoreClosedError):
        next(iter(loader))


# -- random numbers --------------------------------------------------------------------


def draw(batch: Batch) -> Batch:
    numbers = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
    rows = torch.tensor([numbers] * batch.num_graphs, dtype=torch.float64)
    batch.set("drawn", rows, level="system")
    return batch


def test_random_transforms_hang_on_seed_epoch_batch_and_rank(dataset: Dataset) -> None:
    def drawn(count: int, *, step: int = 0, epoch: int = 2, **options: Any) -> list[list[float]]:
        loader = DataLoader(
            dataset,
            **{"batch_size": 4, "seed": 9, **options},
            batch_transforms=[draw],
            num_workers=count,
            multiprocessing_context="fork",
        )
        loader.set_epoch(epoch)
        loader.set_epoch_step(step)
        return [batch["drawn"][0].tolist() for batch in loader]

    torch.manual_seed(1)
    state = torch.get_rng_state(), random.getstate()
    first = drawn(1)
    assert drawn(3) == first
    assert drawn(2, step=2) == first[2:]
    assert torch.equal(torch.get_rng_state(), state[0])  # ours were not touched
    assert random.getstate() == state[1]
    others = [*drawn(1, epoch=3), *drawn(1, seed=8)]
    others += drawn(1, rank=1, world_size=2, batch_size=12)
    numbers = [one for row in first + others for one in row]
    assert len(set(numbers)) == len(numbers)


# -- errors ----------------------------------------------------------------------------


def refuse_seven(data: AtomicData, about: dict[str, Any]) -> tuple[AtomicData, dict[str, Any]]:
    if float(data.energy) == 7.0:
        raise ZeroDivisionError("seven")
    return data, about


def refuse_batch(batch: Batch) -> Batch:
    if 7.0 in batch.energy:
        raise ZeroDivisionError("seven")
    return batch


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("whole", [False, True])
def test_an_error_of_a_transform_names_its_sample(store: Path, method: str, whole: bool) -> None:
    transforms = [] if whole else [refuse_seven]
    with Dataset(AtomicDataZarrReader(store), device="cpu", transforms=transforms) as dataset:
        loader = DataLoader(
            dataset,
            batch_size=3,
            batch_transforms=[refuse_batch] if whole else [],
            num_workers=2,
            multiprocessing_context=method,
        )
        seen = []
        with pytest.raises(TransformError, match="seven") as caught:
            seen.extend(energies([batch])[0] for batch in loader)
        assert seen == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]  # those before it come first
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        told = "".join(caught.value.__notes__)
        assert ("on the batch of samples 6, 7, 8" if whole else "transform of sample 7") in told
        assert "in refuse_" in told  # where it happened
        assert "batch 2 of epoch 0" in told
        assert loader.state_dict()["step"] == 2  # resumed, it comes again


class OddError(Exception):
    """Cannot be pickled, not even where tblib (of distributed) helps exceptions along."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()


class OddReader(Reader):
    """Fails at one sample, in one of the ways that there are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __len__(self) -> int:
        return 12

    def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
        if index == 6:
            if self.kind == "file":
                raise FileNotFoundError(2, "no such file", "lost.dat")
            if self.kind == "odd":
                raise OddError(1, 2)
        bad = index == 6 and self.kind == "nan"
        return {
            "positions": torch.full((1, 3), float("nan") if bad else 0.0),
            "atomic_numbers": torch.ones(1, dtype=torch.long),
        }


@pytest.mark.parametrize(
    ("kind", "error"), [("file", FileNotFoundError), ("odd", WorkerError), ("nan", FieldError)]
)
def test_an_error_of_a_reader_keeps_its_type_and_names_its_sample(
    kind: str, error: type[Exception]
) -> None:
    with Dataset(OddReader(kind), device="cpu") as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
        steps = iter(loader)
        assert next(steps).num_graphs == 4
        with pytest.raises(error) as caught:
            next(steps)
        told = str(caught.value) + "".join(caught.value.__notes__)
        assert "sample 6" in told
        assert "samples 4, 5, 6, 7" in told
        if kind == "file":
            assert caught.value.filename == "lost.dat"  # type: ignore[attr-defined]
        if kind == "odd":
            assert "OddError" in str(caught.value)
            assert "1 and 2" in told


def test_an_error_of_a_sampler_comes_after_what_it_gave(dataset: Dataset) -> None:
    def sampler() -> Iterator[int]:
        yield from range(6)
        raise LookupError("no more")

    class Source:
        def __iter__(self) -> Iterator[int]:
            return sampler()

    loader = DataLoader(
        dataset, batch_size=2, sampler=Source(), num_workers=2, multiprocessing_context="fork"
    )
    seen: list[Any] = []
    with pytest.raises(LookupError, match="no more"):
        seen.extend(loader)
    assert len(seen) == 3


def die(batch: Batch) -> Batch:
    if 7.0 in batch.energy:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


@pytest.mark.kill
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_that_is_killed_is_told_and_no_hang(dataset: Dataset, method: str) -> None:
    loader = DataLoader(
        dataset,
        batch_size=2,
        batch_transforms=[die],
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    for _ in range(2):  # and it begins anew with other processes
        loader.set_epoch(0)
        with pytest.raises(WorkerError, match=r"died.*SIGKILL"):
            list(loader)
        assert multiprocessing.active_children() == []


# -- what cannot be --------------------------------------------------------------------


def test_what_cannot_be_sent_is_told_with_the_way_out() -> None:
    memory: dict[str, Any] = {}
    AtomicDataZarrWriter(memory).write(make(9))
    with Dataset(AtomicDataZarrReader(memory), device="cpu") as dataset:
        with pytest.raises(ArgumentTypeError, match=r"Dataset.*\n.*write it to a path.*fork"):
            next(iter(DataLoader(dataset, num_workers=1)))
        loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert_equal(list(loader), list(DataLoader(dataset, batch_size=4)))
        lock = threading.Lock()
        with pytest.raises(ArgumentTypeError, match="batch_transforms cannot be sent"):
            next(iter(DataLoader(dataset, num_workers=1, batch_transforms=[lambda b: (lock, b)])))


def test_wrong_arguments(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        DataLoader(dataset, num_workers=-1)
    with pytest.raises(ConfigError, match="forkserver"):
        DataLoader(dataset, num_workers=1, multiprocessing_context="threads")
    with pytest.raises(ArgumentTypeError, match="start processes"):
        DataLoader(dataset, num_workers=1, multiprocessing_context=3)
    context = multiprocessing.get_context("fork")
    assert len(list(DataLoader(dataset, num_workers=1, multiprocessing_context=context))) == 23
    assert DataLoader(dataset, batch_size=4, num_workers=2).effective_read_window == 4


def _in_daemon(dataset: Dataset, answers: Any) -> None:
    try:
        next(iter(DataLoader(dataset, num_workers=1, multiprocessing_context="fork")))
    except ConfigError as error:
        answers.put(str(error))


def test_a_daemon_is_told(dataset: Dataset) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_in_daemon, args=(dataset, answers), daemon=True)
    process.start()
    assert "num_workers=0" in answers.get()
    process.join(30)
    process.close()
    answers.close()


def test_workers_of_torch_read_for_themselves(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    theirs = torch.utils.data.DataLoader(
        BatchStream(loader), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    assert energies(theirs) == energies(DataLoader(dataset, batch_size=4, shuffle=True))


def tell_options(batch: Batch) -> Batch:
    options = get_options()
    told = torch.tensor([[int(options["cache_bytes"]), int(options["lease_timeout"])]])
    batch.set("told", told.repeat(batch.num_graphs, 1), level="system")
    return batch


def test_workers_share_the_cache_of_their_loader_out(dataset: Dataset) -> None:
    with set_options(cache_bytes=2**30, lease_timeout=17):
        loader = DataLoader(dataset, batch_size=23, num_workers=4, batch_transforms=[tell_options])
        (batch,) = loader
    assert batch["told"][0].tolist() == [2**28, 17]


# -- the end ---------------------------------------------------------------------------


def sleepy(batch: Batch) -> Batch:
    time.sleep(60 if 7.0 in batch.energy else 0)
    return batch


def test_an_interrupt_is_for_the_loader_to_hear(dataset: Dataset) -> None:
    # A shell that puts its jobs into the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loader = DataLoader(
            dataset,
            batch_transforms=[tell_process],
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        seen = {int(batch["process"]) for batch in loader}
        for process in seen:
            os.kill(process, signal.SIGINT)
        assert {int(batch["process"]) for batch in loader} <= seen
        loader.close()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_worker_that_is_stuck_is_ended(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.3)
    loader = DataLoader(
        dataset,
        batch_size=4,
        batch_transforms=[sleepy],
        num_workers=1,
        multiprocessing_context="fork",
    )
    steps = iter(loader)
    next(steps)
    start = time.monotonic()
    del steps
    assert time.monotonic() - start < 30
    assert multiprocessing.active_children() == []


def test_a_fork_under_way_leaves_the_parent_its_workers(dataset: Dataset) -> None:
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    expected = energies(DataLoader(dataset, batch_size=2))

    def in_child(steps: Any = None) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(60)
                if steps is not None:
                    with contextlib.suppress(WorkerError):
                        next(steps)
                        os._exit(2)
                    del steps
                    gc.collect()
                loader.set_epoch(0)
                assert energies(loader) == expected  # with workers of its own
                loader.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    list(loader)
    assert in_child() == 0  # the workers wait
    steps = iter(loader)
    found = energies([next(steps)])
    assert in_child(steps) == 0  # they read
    assert found + energies(steps) == expected
    loader.close()


class Counted:
    """A transform that takes a while and leaves a line a batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, batch: Batch) -> Batch:
        with self.path.open("a") as lines:
            lines.write("batch\n")
        time.sleep(0.1)
        return batch


def test_what_nobody_waits_for_is_not_made(dataset: Dataset, tmp_path: Path) -> None:
    loader = DataLoader(
        dataset,
        batch_transforms=[Counted(tmp_path / "lines")],
        num_workers=1,
        prefetch_factor=9,
        multiprocessing_context="fork",
    )
    steps = iter(loader)
    next(steps)
    del steps
    # The first, the one that was begun; two more were in the queue already.
    assert len((tmp_path / "lines").read_text().split()) <= 3


ENDLESS = """
    import os, signal, sys, time
    from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset

    if __name__ == "__main__":
        # A shell that puts its jobs into the background has them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def slow(batch):
            time.sleep(0.02)
            return batch

        dataset = Dataset(AtomicDataZarrReader(sys.argv[1]), device="cpu")
        loader = DataLoader(
            dataset,
            num_workers=2,
            batch_transforms=[slow],
            multiprocessing_context=sys.argv[2],
            persistent_workers=sys.argv[3] == "True",
        )
        while True:
            for batch in loader:
                print("batch", flush=True)
"""


@pytest.mark.kill
@pytest.mark.parametrize(
    ("method", "how", "persistent"),
    [
        ("forkserver", signal.SIGINT, True),
        ("fork", signal.SIGINT, False),
        ("forkserver", signal.SIGKILL, False),
        ("fork", signal.SIGKILL, True),
    ],
)
def test_an_end_of_the_loader_is_the_end_of_its_workers(
    store: Path, tmp_path: Path, method: str, how: signal.Signals, persistent: bool
) -> None:
    """Ctrl-C reaches them all; a kill the loader's process alone."""
    psutil = pytest.importorskip("psutil")
    before = segments()
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS))
    run = subprocess.Popen(
        [sys.executable, str(script), str(store), method, str(persistent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"batch\n"
    group = [p for p in psutil.process_iter() if _group(p.pid) == run.pid]
    assert len(group) >= 3
    if how == signal.SIGINT:
        os.killpg(run.pid, how)
    else:
        run.kill()
    _, errors = run.communicate(timeout=60)
    _, alive = psutil.wait_procs([p for p in group if p.pid != run.pid], timeout=20)
    assert [p.pid for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert new_segments(before) == set()
    if how == signal.SIGINT:
        # One traceback, of the loader's process: workers are silent.
        assert errors.count(b"Traceback") == 1, errors
        assert b"KeyboardInterrupt" in errors


def _group(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except (ProcessLookupError, PermissionError):
        return None

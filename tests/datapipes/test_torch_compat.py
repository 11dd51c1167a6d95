"""Datasets inside torch's own DataLoader, in worker processes and in gloo ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from alchemi_xr.data import Batch
from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset
from alchemi_xr.data.datapipes.torch_compat import BatchStream, as_batch, as_edge_index_dict
from alchemi_xr.errors import ArgumentTypeError, TransformError

# Torch is imported once, in the process that the others come from.
multiprocessing.set_forkserver_preload(
    ["torch.utils.data", "alchemi_xr.data.datapipes.torch_compat"]
)


def double(batch: Batch) -> Batch:
    batch["energy"] = batch["energy"] * 2
    return batch


def refuse_seven(sample: Any, about: dict[str, Any]) -> Any:
    if float(sample.energy) == 7.0:
        raise ZeroDivisionError("seven")
    return sample, about


def energies(batches: Any) -> list[list[float]]:
    return [batch.energy.flatten().tolist() for batch in batches]


def living(group: int) -> list[int]:
    """Processes of a group after it had time to end; those that only wait for a parent are dead."""
    psutil = pytest.importorskip("psutil")
    left = []
    for _ in range(100):
        left = [
            process.pid
            for process in psutil.process_iter(["status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE and _group(process.pid) == group
        ]
        if not left:
            break
        time.sleep(0.1)
    return left


def _group(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except (ProcessLookupError, PermissionError):
        return None


def shared_segments() -> set[str]:
    room = Path("/dev/shm")
    return {p.name for p in room.glob("torch_*")} if room.is_dir() else set()


def test_map_style_gives_batches_of_one_read(store: Path) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        theirs = TorchLoader(dataset, batch_size=5, collate_fn=as_batch)
        assert energies(theirs) == energies(DataLoader(dataset, batch_size=5))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_map_style_in_processes_leaves_nothing(store: Path, method: str) -> None:
    before = shared_segments()
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        dataset.prefetch(3)
        assert (
            float(dataset[3][0].energy) == 3.0
        )  # threads run here, and are not there in a forked child
        theirs = TorchLoader(
            dataset,
            batch_size=5,
            collate_fn=as_edge_index_dict,
            num_workers=2,
            multiprocessing_context=method,
        )
        found = [batch["energy"].flatten().tolist() for batch in theirs]
        assert found == energies(DataLoader(dataset, batch_size=5))
    assert multiprocessing.active_children() == []
    assert shared_segments() <= before


@pytest.mark.parametrize(("workers", "shuffle"), [(0, True), (0, "block"), (2, "block")])
def test_stream_has_our_order_and_resumes(store: Path, workers: int, shuffle: Any) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        loader = DataLoader(
            dataset, batch_size=4, shuffle=shuffle, seed=3, batch_transforms=[double]
        )
        loader.set_epoch(2)
        expected = energies(loader)
        stream = BatchStream(loader)
        stream.set_epoch(2)
        theirs = TorchLoader(
            stream,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="forkserver" if workers else None,
        )
        assert len(stream) == len(expected)
        assert energies(theirs) == expected
        loader.set_epoch_step(3)
        assert energies(theirs) == expected[3:]
        state = {**loader.state_dict(), "epoch": 2, "step": 5}
        loader.load_state_dict(state)
        assert energies(theirs) == expected[5:]


def test_set_epoch_reaches_processes_that_go_on_living(store: Path) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=3)
        expected = []
        for epoch in (0, 1, 5):
            loader.set_epoch(epoch)
            expected.append(energies(loader))
        stream = BatchStream(DataLoader(dataset, batch_size=4, shuffle=True, seed=3))
        theirs = TorchLoader(
            stream,
            batch_size=None,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )
        found = []
        for epoch in (0, 1, 5):
            stream.set_epoch(epoch)
            found.append(energies(theirs))
        del theirs
        assert found == expected
        assert expected[0] != expected[1]


def test_stopping_early_ends_the_processes(store: Path) -> None:
    before = shared_segments()
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        steps = iter(TorchLoader(BatchStream(DataLoader(dataset)), batch_size=None, num_workers=2))
        next(steps)
        del steps
    assert multiprocessing.active_children() == []
    assert shared_segments() <= before


@pytest.mark.parametrize("workers", [0, 2])
def test_error_names_its_sample(store: Path, workers: int) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu", transforms=[refuse_seven]) as dataset:
        stream = BatchStream(DataLoader(dataset, batch_size=4))
        theirs = TorchLoader(stream, batch_size=None, num_workers=workers)
        with pytest.raises(TransformError, match="seven") as caught:
            list(theirs)
        told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "in a transform of sample 7" in told
        assert not workers or "refuse_seven" in told  # the traceback of the worker


def refuse_batch(batch: Batch) -> Batch:
    if 7.0 in batch.energy:
        raise ZeroDivisionError("seven")
    return batch


@pytest.mark.parametrize("workers", [0, 2])
def test_error_of_a_batch_transform_names_its_samples(store: Path, workers: int) -> None:
    """Out of a worker, too, with the traceback that it had there."""
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        loader = DataLoader(dataset, batch_size=3, batch_transforms=[refuse_batch])
        theirs: Any = loader
        if workers:
            theirs = TorchLoader(BatchStream(loader), batch_size=None, num_workers=workers)
        seen = []
        with pytest.raises(TransformError, match="seven") as caught:
            seen.extend(energies([batch])[0] for batch in theirs)
        assert seen == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "on the batch of samples 6, 7, 8" in told
        assert "refuse_batch" in told or not workers
        assert workers or loader.state_dict()["step"] == 2  # resumed, it comes again


def test_forked_child_reads_with_threads_of_its_own(store: Path) -> None:
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        dataset.prefetch(1)
        assert float(dataset[1][0].energy) == 1.0  # a thread waits for work, and is not forked
        child = multiprocessing.get_context("fork").Process(target=_read_ahead, args=(dataset,))
        child.start()
        child.join(30)
        code = child.exitcode
        if code is None:
            child.kill()
        assert code == 0


def _read_ahead(dataset: Dataset) -> None:
    dataset.prefetch(1)
    assert float(dataset[1][0].energy) == 1.0


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_interrupt_leaves_no_process_or_segment(store: Path, tmp_path: Path) -> None:
    before = shared_segments()
    script = tmp_path / "endless.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal, sys
            from torch.utils.data import DataLoader as TorchLoader
            from alchemi_xr.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset
            from alchemi_xr.data.datapipes.torch_compat import BatchStream

            if __name__ == "__main__":
                # A shell that puts its jobs into the background has them ignore it.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                with Dataset(AtomicDataZarrReader(sys.argv[1]), device="cpu") as dataset:
                    stream = BatchStream(DataLoader(dataset))
                    loader = TorchLoader(stream, batch_size=None, num_workers=2)
                    while True:
                        for batch in loader:
                            print("batch", flush=True)
            """
        )
    )
    run = subprocess.Popen(
        [sys.executable, str(script), str(store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"batch\n"
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)
    assert living(run.pid) == []
    assert shared_segments() <= before


def _rank(rank: int, world: int, store: str, meeting: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        loader = DataLoader(dataset, batch_size=4, shuffle=True, rank=rank, world_size=world)
        counts = torch.zeros(len(dataset))
        for batch in loader:
            energy = batch.energy.float()
            model(energy).sum().backward()  # waits for the other rank: unequal steps hang
            counts[energy.flatten().long()] += 1
        dist.all_reduce(counts)
        assert counts.tolist() == [1.0] * len(dataset)
    dist.destroy_process_group()


def test_ddp_over_two_processes(store: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    meeting = (tmp_path / "meeting").as_uri()
    ranks = [
        context.Process(target=_rank, args=(rank, 2, str(store), meeting)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert codes == [0, 0]


def test_dtype_casts_floats_and_nothing_else(store: Path) -> None:
    reader = AtomicDataZarrReader(store)
    with Dataset(reader, device="cpu", dtype=torch.float64) as dataset:
        batch = dataset.get_batch([0, 5])
        plain = reader.read_batch([0, 5])
        for name, value in plain:
            wanted = value.double() if value.is_floating_point() else value
            assert torch.equal(batch[name], wanted), name
            assert batch[name].dtype == wanted.dtype


def test_dtype_has_to_be_one_of_floats(store: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="floating-point"):
        Dataset(AtomicDataZarrReader(store), device="cpu", dtype=torch.int64)


def test_wrong_things_are_refused() -> None:
    with pytest.raises(ArgumentTypeError):
        BatchStream([])  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError):
        as_batch(3)

"""Our side of ``benchmarks/bridge.py``, in a process of its own."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from alchemi_xr._typing import Level
from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    DataLoader,
    Dataset,
    InMemoryDataset,
)
from alchemi_xr.store.writer import StoreWriter
from benchmarks.bridge_data import (
    BATCH,
    LEVELS,
    PROBE,
    count,
    digest,
    load,
    sample_fields,
    serve,
    timed,
)


def heavy(batch: Batch) -> Batch:
    """A transform in Python alone that takes some milliseconds and changes nothing."""
    total = 0
    for number in range(200_000):
        total += number & 7
    return batch


class Ours:
    """Loaders and readers are made once and kept, as a training run does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._loaders: dict[tuple[Any, ...], Any] = {}
        self._readers: dict[tuple[str, str], AtomicDataZarrReader] = {}

    def write(self, kind: str, profile: str, times: int = 1) -> None:
        """A store of the data, ``times`` behind one another."""
        arrays = load(self.root, kind)
        fields = {name: np.asarray(arrays[name]) for name in arrays if name in LEVELS}
        block = Block(
            np.asarray(arrays["atoms_ptr"]),
            np.asarray(arrays["edges_ptr"]),
            fields,
            {name: cast(Level, LEVELS[name]) for name in fields},
        )
        writer = StoreWriter(self._path(kind, profile, times), profile)
        writer.write(block)
        for _ in range(times - 1):
            writer.append(block)

    def _path(self, kind: str, profile: str, times: int = 1) -> Path:
        return self.root / f"{kind}_{profile}_{times}.zarr"

    def _reader(
        self, kind: str, profile: str, times: int = 1, cache: int | None = None
    ) -> AtomicDataZarrReader:
        return AtomicDataZarrReader(self._path(kind, profile, times), cache_bytes=cache)

    def epoch(
        self,
        kind: str,
        profile: str,
        order: str,
        times: int = 1,
        memory: bool = False,
        num: int | None = None,
        validate: bool = False,
        cache: int | None = None,
    ) -> dict[str, float]:
        """One epoch of the DataLoader with its own defaults, or ``num`` random samples."""
        key = (kind, profile, order, times, memory, num, validate, cache)
        if key not in self._loaders:
            reader = self._reader(kind, profile, times, cache)
            dataset: Any = (
                InMemoryDataset(reader=reader, device="cpu", skip_validation=True)
                if memory
                else Dataset(reader, device="cpu", skip_validation=not validate)
            )
            orders = {"full": True, "sequential": False, "block": "block"}
            how: dict[str, Any] = {"shuffle": orders[order]}
            if num is not None:
                chosen = np.random.default_rng(0).permutation(len(dataset))[:num]
                how = {"sampler": chosen.tolist()}
            self._loaders[key] = DataLoader(dataset, batch_size=BATCH, **how)
        return timed(lambda: count(self._loaders[key]))

    def transformed(self, kind: str, workers: int, num: int) -> dict[str, float]:
        """An epoch of ``num`` samples with a heavy transform, in so many processes."""
        key = (kind, "transformed", workers, num)
        if key not in self._loaders:
            self._loaders[key] = DataLoader(
                Dataset(self._reader(kind, "raw"), device="cpu", skip_validation=True),
                batch_size=BATCH,
                sampler=np.random.default_rng(0).permutation(num).tolist(),
                batch_transforms=[heavy],
                num_workers=workers,
                persistent_workers=True,
            )
        return timed(lambda: count(self._loaders[key]))

    def digest(self, kind: str, profile: str) -> dict[str, str]:
        """A batch as all sides have to give it."""
        with self._reader(kind, profile) as reader:
            batch = reader.read_batch(PROBE)
        return digest(lambda name: getattr(batch, name), kind)

    def close(self) -> None:
        """Forget all loaders and readers."""
        for loader in self._loaders.values():
            loader.close()
            loader.dataset.close()
        for reader in self._readers.values():
            reader.close()
        self._loaders.clear()
        self._readers.clear()

    def one(self, kind: str, profile: str) -> dict[str, float]:
        """``reader.read(i)``."""
        if (kind, profile) not in self._readers:
            self._readers[kind, profile] = self._reader(kind, profile)
        reader = self._readers[kind, profile]
        order = np.random.default_rng(0).permutation(len(reader))[:500].tolist()

        def run() -> int:
            for index in order:
                reader.read(index)
            return len(order)

        return timed(run)

    def first(self, kind: str, profile: str) -> dict[str, float]:
        """From a path to the first batch."""

        def run() -> int:
            dataset = Dataset(self._reader(kind, profile), device="cpu", skip_validation=True)
            loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
            next(iter(loader))
            return 1

        return timed(run)

    def construct(self) -> dict[str, float]:
        """``AtomicData(...)`` of samples of data A."""
        fields = sample_fields(self.root)

        def run() -> int:
            for given in fields:
                AtomicData(**given)
            return len(fields)

        return timed(run)

    def join(self) -> dict[str, float]:
        """``Batch.from_data_list`` of the same."""
        samples = [AtomicData(**given) for given in sample_fields(self.root)]

        def run() -> int:
            for start in range(0, len(samples), BATCH):
                Batch.from_data_list(samples[start : start + BATCH])
            return len(samples)

        return timed(run)

    def copy(self, kind: str, row_bytes: int) -> float:
        """Bytes a second of plain copies of whole batches into one buffer."""
        source = np.random.default_rng(0).integers(0, 255, 2**28, np.uint8)
        size = min(row_bytes * BATCH, 2**26)
        into = np.empty(size, np.uint8)
        starts = np.random.default_rng(1).integers(0, len(source) - size, 4000)
        starts = starts[: max(20, 2**32 // size)].tolist()

        def run() -> int:
            for start in starts:
                np.copyto(into, source[start : start + size])
            return len(starts) * size

        run()
        return 1 / min(timed(run)["wall"] for _ in range(3))

    def layers(self, kind: str, profile: str) -> dict[str, dict[str, float]]:
        """The same batches at each height of the path, the lower ones inside the higher."""
        reader = self._reader(kind, profile)
        dataset = Dataset(reader, device="cpu", skip_validation=True)
        order = np.random.default_rng(0).permutation(len(reader))
        parts = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]

        def each(call: Callable[[Any], Any]) -> Callable[[], int]:
            def run() -> int:
                for part in parts:
                    call(part)
                return len(order)

            return run

        runs: dict[str, Callable[[], int]] = {
            "reader.read_block": each(reader.read_block),
            "reader.read_batch": each(reader.read_batch),
            "Dataset.load_batches": each(lambda part: list(dataset.load_batches([part]))),
        }
        for factor in (0, 2, 16):
            loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, prefetch_factor=factor)
            runs[f"DataLoader, prefetch_factor={factor}"] = partial(count, loader)
        for run in runs.values():
            run()
        found = {name: [timed(run) for _ in range(3)] for name, run in runs.items()}
        dataset.close()
        return {name: min(times, key=lambda t: t["wall"]) for name, times in found.items()}

    def profile(self, kind: str, profile: str) -> list[str]:
        """The functions with most time of their own in an epoch without threads."""
        dataset = Dataset(self._reader(kind, profile), device="cpu", skip_validation=True)
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, prefetch_factor=0)
        count(loader)
        watch = cProfile.Profile()
        watch.runcall(count, loader)
        dataset.close()
        text = io.StringIO()
        stats = pstats.Stats(watch, stream=text).strip_dirs().sort_stats("tottime")
        total = float(getattr(stats, "total_tt"))  # noqa: B009 - not in the stubs
        lines = []
        for place, (_, calls, own, _, _) in sorted(
            getattr(stats, "stats").items(),  # noqa: B009
            key=lambda item: -item[1][2],
        )[:8]:
            name = place[2] if place[0] == "~" else f"{place[0]}:{place[1]} {place[2]}"
            lines.append(f"{100 * own / total:5.1f} %  {calls:8,} calls  {name}")
        return lines


def _calls(root: Path) -> dict[str, Callable[..., Any]]:
    ours = Ours(root)
    names = (
        *("write", "digest", "close", "epoch", "transformed", "one", "first", "construct", "join"),
        *("copy", "layers", "profile"),
    )
    return {name: getattr(ours, name) for name in names}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(_calls)

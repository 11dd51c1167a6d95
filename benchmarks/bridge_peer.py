"""The peers of ``benchmarks/bridge.py``, each in a process of its own.

``python -m benchmarks.bridge_peer FOLDER toolkit | atompack | packed``. The
toolkit reads the very store that we read. atompack is asked for its flat batch
and the result made the same flat tensors. The packed memmap is gathered in the
ways that NumPy and torch have without a loop over samples, and the fastest
counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bridge_data import (
    BATCH,
    LEVELS,
    PROBE,
    Arrays,
    count,
    digest,
    load,
    sample_fields,
    serve,
    timed,
)

Calls = dict[str, Callable[..., Any]]


def parts_of(length: int, num: int | None, *, shuffled: bool = True) -> list[np.ndarray]:
    """Indices of the batches of an epoch."""
    order = np.random.default_rng(0).permutation(length) if shuffled else np.arange(length)
    order = order[:num]
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


# -- nvalchemi-toolkit -----------------------------------------------------------


def toolkit(root: Path) -> Calls:
    """The fastest settings that its documentation names."""
    from nvalchemi.data import AtomicData, Batch
    from nvalchemi.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset
    from nvalchemi.data.datapipes.in_memory_dataset import InMemoryDataset

    kept: dict[Any, Any] = {}

    def reader(kind: str, profile: str, times: int = 1) -> Any:
        return AtomicDataZarrReader(str(root / f"{kind}_{profile}_{times}.zarr"))

    def epoch(
        kind: str, profile: str, order: str, num: int, times: int = 1, memory: bool = False
    ) -> dict[str, float]:
        key = (kind, profile, times, memory)
        if key not in kept:
            source = reader(kind, profile, times)
            kept[key] = (
                InMemoryDataset(reader=source, device="cpu", skip_validation=True)
                if memory
                else Dataset(source, device="cpu", skip_validation=True)
            )
        dataset = kept[key]
        parts = parts_of(len(dataset), num, shuffled=order != "sequential")
        loader = DataLoader(
            dataset,
            batch_size=BATCH,
            sampler=np.concatenate(parts).tolist(),
            # Fused reads of a store are its fastest; in memory they only cost it.
            prefetch_factor=2 if memory else 16,
        )
        return timed(lambda: count(loader))

    def probe(kind: str) -> dict[str, str]:
        dataset = Dataset(reader(kind, "raw"), device="cpu", skip_validation=True)
        batch = dataset.load_batches([PROBE])[0]
        dataset.close()
        return digest(lambda name: getattr(batch, name), kind)

    def close() -> None:
        for dataset in kept.values():
            dataset.close()
        kept.clear()

    def one(kind: str, profile: str) -> dict[str, float]:
        key = ("reader", kind, profile)
        if key not in kept:
            kept[key] = reader(kind, profile)
        source = kept[key]
        chosen = parts_of(len(source), 20)[0].tolist()

        def run() -> int:
            for index in chosen:
                source.read(index)
            return len(chosen)

        return timed(run)

    def first(kind: str, profile: str) -> dict[str, float]:
        def run() -> int:
            dataset = Dataset(reader(kind, profile), device="cpu", skip_validation=True)
            loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, prefetch_factor=16)
            next(iter(loader))
            return 1

        return timed(run)

    def construct() -> dict[str, float]:
        fields = sample_fields(root)

        def run() -> int:
            for given in fields:
                AtomicData(**given)
            return len(fields)

        return timed(run)

    def join() -> dict[str, float]:
        samples = [AtomicData(**given) for given in sample_fields(root)]

        def run() -> int:
            for start in range(0, len(samples), BATCH):
                Batch.from_data_list(samples[start : start + BATCH])
            return len(samples)

        return timed(run)

    return {
        "digest": probe,
        "epoch": epoch,
        "close": close,
        "one": one,
        "first": first,
        "construct": construct,
        "join": join,
    }


# -- atompack --------------------------------------------------------------------


def atompack(root: Path) -> Calls:
    """Its batch call, and the casts that make of it what the other sides give."""
    from atompack import Database, Molecule

    kept: dict[str, Any] = {}

    def path(kind: str, compression: str) -> str:
        return str(root / f"{kind}_{compression}.atp")

    def write(kind: str, compression: str) -> None:
        arrays = {name: np.asarray(values) for name, values in load(root, kind).items()}
        ptr = arrays["atoms_ptr"]
        numbers = arrays["atomic_numbers"].astype(np.uint8)
        database = Database(path(kind, compression), compression=compression, overwrite=True)
        for start in range(0, len(ptr) - 1, 10_000):
            database.add_molecules(
                [
                    Molecule.from_arrays(
                        arrays["positions"][a:b],
                        numbers[a:b],
                        energy=float(arrays["energy"][i, 0]),
                        forces=arrays["forces"][a:b],
                        cell=arrays["cell"][i],
                        pbc=tuple(arrays["pbc"][i].tolist()),
                    )
                    for i in range(start, min(start + 10_000, len(ptr) - 1))
                    for a, b in [(ptr[i], ptr[i + 1])]
                ]
            )
        database.flush()

    def opened(kind: str, compression: str) -> Any:
        name = path(kind, compression)
        if name not in kept:
            kept[name] = Database.open(name)
        return kept[name]

    def read(database: Any, part: list[int]) -> dict[str, torch.Tensor]:
        flat = database.get_molecules_flat(part)
        batch = {
            field: torch.from_numpy(flat[field]) for field in ("positions", "forces", "cell", "pbc")
        }
        batch["atomic_numbers"] = torch.from_numpy(flat["atomic_numbers"]).long()
        batch["energy"] = torch.from_numpy(flat["energy"])[:, None]
        ptr = np.zeros(len(part) + 1, np.int64)
        np.cumsum(flat["n_atoms"], out=ptr[1:])
        batch["ptr"] = torch.from_numpy(ptr)
        return batch

    def epoch(kind: str, compression: str) -> dict[str, float]:
        database = opened(kind, compression)
        parts = parts_of(len(database), None)

        def run() -> int:
            for part in parts:
                read(database, part.tolist())
            return sum(map(len, parts))

        return timed(run)

    def probe(kind: str) -> dict[str, str]:
        batch = read(opened(kind, "none"), PROBE)
        return digest(batch.__getitem__, kind)

    return {"write": write, "digest": probe, "epoch": epoch, "close": kept.clear}


# -- packed memmap ---------------------------------------------------------------


def _row_numbers(ptr: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = ptr[part]
    counts = ptr[part + 1] - starts
    into = np.zeros(len(part) + 1, np.int64)
    np.cumsum(counts, out=into[1:])
    return np.arange(into[-1]) + np.repeat(starts - into[:-1], counts), into


def _gathered(
    arrays: Arrays, part: np.ndarray, take: Callable[[str, np.ndarray], torch.Tensor]
) -> dict[str, torch.Tensor]:
    rows: dict[str, np.ndarray] = {"system": part}
    rows["atom"], ptr = _row_numbers(arrays["atoms_ptr"], part)
    batch = {"ptr": torch.from_numpy(ptr)}
    edges = None
    if "neighbor_list" in arrays:
        rows["edge"], edges = _row_numbers(arrays["edges_ptr"], part)
    for name in arrays:
        if name in LEVELS:
            batch[name] = take(name, rows[LEVELS[name]])
    if edges is not None:
        batch["neighbor_list"] += torch.from_numpy(np.repeat(ptr[:-1], np.diff(edges)))[:, None]
    return batch


def _ways(arrays: Arrays) -> dict[str, Callable[[np.ndarray], dict[str, torch.Tensor]]]:
    fields = {name: arrays[name] for name in arrays if name in LEVELS}
    # A row as one value of its width: one memory copy instead of one a number.
    wide = {
        name: values.reshape(len(values), -1).view(
            np.dtype((np.void, values.nbytes // len(values)))
        )[:, 0]
        for name, values in fields.items()
    }
    tensors = {name: torch.from_numpy(values) for name, values in fields.items()}

    def by_void(name: str, rows: np.ndarray) -> torch.Tensor:
        values = fields[name]
        taken = wide[name].take(rows).view(values.dtype)
        return torch.from_numpy(taken.reshape(len(rows), *values.shape[1:]))

    def by_torch(name: str, rows: np.ndarray) -> torch.Tensor:
        return torch.index_select(tensors[name], 0, torch.from_numpy(rows))

    def by_take(name: str, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(fields[name].take(rows, axis=0))

    return {
        way: lambda part, take=take: _gathered(arrays, part, take)
        for way, take in (("take", by_take), ("void", by_void), ("index_select", by_torch))
    }


def packed(root: Path) -> Calls:
    """One file a field, mapped."""
    kept: dict[tuple[str, bool], Any] = {}

    def fastest(arrays: Arrays) -> Callable[[np.ndarray], dict[str, torch.Tensor]]:
        ways, parts = _ways(arrays), parts_of(len(arrays["energy"]), 4_000)

        def seconds(call: Callable[[np.ndarray], Any]) -> float:
            def run() -> int:
                for part in parts:
                    call(part)
                return 1

            run()
            return min(timed(run)["wall"] for _ in range(3))

        return min(ways.values(), key=seconds)

    def epoch(kind: str, equal: bool = False) -> dict[str, float]:
        if (kind, equal) not in kept:
            arrays = load(root, kind)
            if equal:
                # Samples of one size are rows of one array: no rows are numbered.
                num = len(arrays["energy"])
                tensors = {
                    name: torch.from_numpy(values.reshape(num, -1))
                    for name, values in arrays.items()
                    if name in LEVELS
                }
                call: Callable[[np.ndarray], Any] = lambda part: {  # noqa: E731
                    name: torch.index_select(values, 0, torch.from_numpy(part))
                    for name, values in tensors.items()
                }
            else:
                call = fastest(arrays)
            kept[kind, equal] = call, parts_of(len(arrays["energy"]), None)
        call, parts = kept[kind, equal]

        def run() -> int:
            for part in parts:
                call(part)
            return sum(map(len, parts))

        return timed(run)

    def probe(kind: str) -> dict[str, str]:
        found = [
            digest(way(np.array(PROBE)).__getitem__, kind)
            for way in _ways(load(root, kind)).values()
        ]
        if any(other != found[0] for other in found):
            raise ValueError(f"the ways of the packed memmap differ: {found}")
        return found[0]

    return {"digest": probe, "epoch": epoch, "close": kept.clear}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"toolkit": toolkit, "atompack": atompack, "packed": packed}[sys.argv[2]])

"""Samples and batches beside the least that torch, NumPy and ASE can do.

Data: samples of 64 atoms with positions, atomic numbers, forces (float32) and
energy; a ragged batch of 1,000 samples of 2 to 100 atoms. The contract: an
AtomicData under 50 µs, a Batch of 64 of them under 1 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.segment import segment_reduce
from benchmarks.report import Row, compare

REPEAT = 200


def _times(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(REPEAT):
            call()

    return run


def _per_call(row: Row, limit_s: float | None = None) -> Row:
    ours = row.ours_s / REPEAT
    note = row.note
    if limit_s is not None:
        note = f"{ours * 1e6:.0f} µs a call, contract {limit_s * 1e6:.0f} µs"
    return Row(row.work, row.peer, ours, row.peer_s / REPEAT, row.target, note)


def _sample(atoms: int, seed: int) -> AtomicData:
    generator = torch.Generator().manual_seed(seed)
    return AtomicData(
        positions=torch.randn(atoms, 3, generator=generator),
        atomic_numbers=torch.ones(atoms, dtype=torch.int64),
        forces=torch.randn(atoms, 3, generator=generator),
        energy=torch.zeros(1, 1),
    )


def _construction() -> Row:
    fields = _sample(64, 0).to_dict()
    arrays = {name: values.numpy() for name, values in fields.items()}

    def ase() -> object:
        atoms = Atoms(numbers=arrays["atomic_numbers"], positions=arrays["positions"])
        atoms.calc = SinglePointCalculator(atoms, energy=0.0, forces=arrays["forces"])
        return atoms

    row = compare(
        "AtomicData of 64 atoms, checked",
        _times(lambda: AtomicData(**fields)),
        "ase.Atoms with a SinglePointCalculator",
        _times(ase),
        target=1.0,
    )
    return _per_call(row, 50e-6)


def _joining() -> Row:
    samples = [_sample(64, i) for i in range(64)]
    names = list(samples[0].to_dict())

    def plain() -> object:
        return {name: torch.cat([getattr(s, name) for s in samples]) for name in names}

    row = compare(
        "Batch.from_data_list of 64 x 64 atoms",
        _times(lambda: Batch.from_data_list(samples)),
        "torch.cat of the same fields, nothing else",
        _times(plain),
        target=0.3,
    )
    return _per_call(row, 1e-3)


def _ragged() -> Batch:
    sizes = np.random.default_rng(0).integers(2, 101, 1000)
    return Batch.from_data_list([_sample(int(n), i) for i, n in enumerate(sizes)])


def _choosing() -> Row:
    batch = _ragged()
    order = np.random.default_rng(1).permutation(1000)
    parts = batch.to_data_list()
    return compare(
        "index_select of 1,000 systems in random order",
        lambda: batch.index_select(order),
        "torch.cat over a Python list of samples",
        lambda: {n: torch.cat([parts[i].to_dict()[n] for i in order]) for n, _ in batch},
        target=2.0,
    )


def _reducing() -> Row:
    batch = _ragged()
    forces, ptr = batch.forces.numpy(), counts_to_ptr(np.array(batch.num_nodes_list))
    return compare(
        "segment_reduce sum of forces, 1,000 systems",
        lambda: segment_reduce(forces, ptr, "sum"),
        "a loop of ndarray.sum over samples",
        lambda: np.array([forces[a:b].sum(0) for a, b in itertools.pairwise(ptr)]),
        target=2.0,
    )


def rows() -> Iterator[Row]:
    """The rows of this module."""
    yield _construction()
    yield _joining()
    yield _choosing()
    yield _reducing()

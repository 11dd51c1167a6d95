"""Analyses of a trajectory beside MDAnalysis and a loop over ASE, on the same frames.

Frames: ALCHEMI_XR_BENCH_FRAMES (2,000 by default; 20,000 is the size of the targets) of
ALCHEMI_XR_BENCH_ATOMS (1,000) atoms, float32, a liquid's density, written with the default
profile; MDAnalysis holds them in memory, ours are read from the store. The slow peers run on a
part of the frames, and their time is scaled to all of them (stated in the note of each row).

Predicted before it was measured: fmax 20 times the ASE loop and 5 times MDAnalysis (reading
bound); RDF at 6 Å 5 times MDAnalysis (the pair search of vesin, no arrays of pairs kept); MSD 5
times (power spectra are summed, one transform back for all atoms).
Measured at 20,000 frames on a busy 2-core machine: fmax 12 times MDAnalysis on a TRR file, 1.8
times its arrays in memory, 27 times the ASE loop; RDF 11 to 20 and 27 to 50 times; MSD 3.4 times.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr import analysis
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.ragged import open_dataset
from alchemi_xr.store.writer import StoreWriter
from benchmarks.report import Row, compare

FRAMES = int(os.environ.get("ALCHEMI_XR_BENCH_FRAMES", "2000"))
ATOMS = int(os.environ.get("ALCHEMI_XR_BENCH_ATOMS", "1000"))
RMAX = 6.0
LENGTH = (ATOMS / 0.1) ** (1 / 3)
STEP = 250


def frames(start: int, stop: int) -> np.ndarray:
    """A lattice gas that shakes and slowly drifts, wrapped; any frames, the same each time."""
    rng = np.random.default_rng(0)
    base = rng.random((ATOMS, 3)) * LENGTH
    speed = rng.normal(size=(ATOMS, 3)) * 2e-3
    phase = rng.random((ATOMS, 3)) * 2 * np.pi
    t = np.arange(start, stop)[:, None, None]
    x = base + speed * t + 0.3 * np.sin(0.2 * t + phase)
    return np.mod(x, LENGTH).astype(np.float32)


def write(path: str, count: int) -> None:
    """The frames as a store, some hundreds at a time."""
    for start in range(0, count, STEP):
        x = frames(start, min(start + STEP, count))
        ptr = counts_to_ptr(np.full(len(x), ATOMS))
        flat = x.reshape(-1, 3)
        block = Block(
            ptr,
            np.zeros_like(ptr),
            {
                "positions": flat,
                "forces": flat[:, ::-1].copy(),
                "atomic_numbers": np.full(len(flat), 18),
                "cell": np.tile(np.eye(3, dtype=np.float32) * LENGTH, (len(x), 1, 1)),
                "pbc": np.ones((len(x), 3), dtype=bool),
            },
            {
                "positions": "atom",
                "forces": "atom",
                "atomic_numbers": "atom",
                "cell": "system",
                "pbc": "system",
            },
        )
        writer = StoreWriter(path)
        writer.write(block) if start == 0 else writer.append(block)


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room."""
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    try:
        path = str(folder / "frames.zarr")
        write(path, FRAMES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from _rows(path)
    finally:
        shutil.rmtree(folder)


def _rows(path: str) -> Iterator[Row]:
    import MDAnalysis
    from MDAnalysis.analysis.msd import EinsteinMSD
    from MDAnalysis.analysis.rdf import InterRDF

    universe: Any = MDAnalysis.Universe.empty(ATOMS, trajectory=True, forces=True)
    x = np.concatenate([frames(a, min(a + STEP, FRAMES)) for a in range(0, FRAMES, STEP)])
    box = np.array([LENGTH] * 3 + [90.0] * 3, dtype=np.float32)
    universe.load_new(x, dimensions=np.tile(box, (FRAMES, 1)), forces=x[:, :, ::-1].copy())
    ds = open_dataset(path)

    trr = str(Path(path).with_suffix(".trr"))
    with MDAnalysis.Writer(trr, ATOMS) as writer:
        for _ in universe.trajectory:
            writer.write(universe.atoms)
    on_file: Any = MDAnalysis.Universe.empty(ATOMS, trajectory=False)
    on_file.load_new(trr)

    def fmax() -> Any:
        return analysis.fmax(open_dataset(path))

    def fmax_mda(universe: Any) -> Any:
        return [np.sqrt((ts.forces**2).sum(1).max()) for ts in universe.trajectory]

    few = min(FRAMES, 200)

    def fmax_ase() -> Any:
        return [np.sqrt((a.get_forces() ** 2).sum(1).max()) for a in _atoms(ds, few)]

    work = "largest force of each frame"
    yield compare(work, fmax, "MDAnalysis, TRR file", lambda: fmax_mda(on_file), target=3)
    yield compare(
        work,
        fmax,
        "MDAnalysis, arrays in memory",
        lambda: fmax_mda(universe),
        target=1,
        note="ours reads the store",
    )
    yield _scaled(compare(work, fmax, "ASE loop", fmax_ase, target=20, rounds=3), few)
    part = min(FRAMES, 100)
    small = ds.ragged.head(part)
    yield compare(
        f"RDF to {RMAX:g} Å",
        lambda: analysis.rdf(small, RMAX, pairs="all"),
        "MDAnalysis InterRDF",
        lambda: InterRDF(universe.atoms, universe.atoms, nbins=200, range=(0, RMAX)).run(stop=part),
        target=3,
        rounds=3,
        note=f"both on {part} frames",
    )
    tiny = min(FRAMES, 8)

    def rdf_ase() -> Any:
        from ase.geometry.rdf import get_rdf

        return [get_rdf(a, RMAX, 200) for a in _atoms(ds, tiny)]

    yield _scaled(
        compare(
            f"RDF to {RMAX:g} Å",
            lambda: analysis.rdf(small, RMAX, pairs="all"),
            "ASE loop",
            rdf_ase,
            target=20,
            rounds=1,
        ),
        tiny,
        part,
    )
    # Unwrapped for MDAnalysis, which does not do it here; ours unwraps as well.
    steps = np.diff(x, axis=0)
    steps -= np.float32(LENGTH) * np.rint(steps / np.float32(LENGTH))
    universe.load_new(np.concatenate([x[:1], x[:1] + np.cumsum(steps, axis=0)]))
    few_atoms = min(ATOMS, 100)
    row = compare(
        "MSD, all lags",
        lambda: analysis.msd(ds, blocks=0),
        "MDAnalysis EinsteinMSD (FFT)",
        lambda: EinsteinMSD(universe.atoms[:few_atoms], fft=True).run(),
        target=3,
        rounds=3,
    )
    yield Row(
        row.work,
        row.peer,
        row.ours_s,
        row.peer_s * ATOMS / few_atoms,
        row.target,
        f"peer measured on {few_atoms} atoms",
    )


def _atoms(ds: Any, count: int) -> Iterator[Any]:
    """What a plain script does: frame by frame as ase.Atoms, from a file of ASE."""
    import ase
    from ase.calculators.singlepoint import SinglePointCalculator

    x = frames(0, count)
    for frame in x:
        atoms = ase.Atoms(numbers=np.full(ATOMS, 18), positions=frame, cell=[LENGTH] * 3, pbc=True)
        atoms.calc = SinglePointCalculator(atoms, forces=frame[:, ::-1])
        yield atoms


def _scaled(row: Row, count: int, total: int = FRAMES) -> Row:
    """The peer's time for all frames."""
    return Row(
        row.work,
        row.peer,
        row.ours_s,
        row.peer_s * total / count,
        row.target,
        f"peer measured on {count} frames",
    )

"""Files of whole arrays (NPZ, HDF5, packed memmap) to a store beside copying the bytes.

Data: 100,000 frames of one molecule of 21 atoms as in the MD17 packs (101 MB), 100,000
padded molecules of 9 to 29 atoms as QM9 packs have them (95 MB), 400 molecules with 600
conformations each in groups as ANI-1x has them (88 MB), and 200,000 molecules of 5 to 30
atoms in a packed memmap folder (101 MB). Beside each: a copy of the same files, and as many
bytes as the store has in one new file, each forced to the disk as the store is. Predicted:
0.5 to 0.8 of either. Measured (one run, two cores): 0.21 to 0.23 for the MD17 form, 0.13 to
0.23 for QM9, 0.05 for HDF5, 0.09 to 0.14 for the packed memmap. What was profiled: many small
files, each forced to the disk, and for HDF5 a look-up of each group in the scan and again
in the reading.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from alchemi_xr.etl.conversion import convert
from benchmarks.report import Row, compare

FRAMES = 100_000
_PIECE = 1 << 20


def rows() -> Iterator[Row]:
    """The rows of ``make bench`` for this room."""
    folder = Path(tempfile.mkdtemp(prefix="alchemi_xr_bench_"))
    try:
        for title, write in _KINDS.items():
            path = write(folder)
            if path is not None:
                yield from _beside(title, path, folder)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(folder)


def _md17(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    shape = (FRAMES, 21, 3)
    np.savez(
        folder / "md17.npz",
        R=rng.normal(size=shape),
        F=rng.normal(size=shape),
        E=rng.normal(size=(FRAMES, 1)),
        z=rng.integers(1, 9, 21).astype(np.uint8),
    )
    return folder / "md17.npz"


def _qm9(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    atoms = rng.integers(9, 30, FRAMES)
    there = np.arange(29)[None, :] < atoms[:, None]
    np.savez(
        folder / "qm9.npz",
        R=np.where(there[:, :, None], rng.normal(size=(FRAMES, 29, 3)), 0.0),
        Z=np.where(there, rng.integers(1, 10, there.shape), 0),
        N=atoms,
        E=rng.normal(size=FRAMES),
        D=rng.normal(size=(FRAMES, 3)),
    )
    return folder / "qm9.npz"


def _ani1x(folder: Path) -> Path | None:
    if find_spec("h5py") is None:
        return None
    import h5py

    rng = np.random.default_rng(2)
    with h5py.File(folder / "ani1x.h5", "w") as file:
        for molecule in range(400):
            atoms, frames = int(rng.integers(4, 27)), 600
            group = file.create_group(f"C{molecule}H{atoms}")
            group["atomic_numbers"] = rng.integers(1, 9, atoms).astype(np.uint8)
            group["coordinates"] = rng.normal(size=(frames, atoms, 3)).astype(np.float32)
            group["wb97x_dz.energy"] = rng.normal(size=frames)
            group["wb97x_dz.forces"] = rng.normal(size=(frames, atoms, 3)).astype(np.float32)
    return folder / "ani1x.h5"


def _packed(folder: Path) -> Path:
    rng = np.random.default_rng(3)
    molecules = 2 * FRAMES
    atoms = rng.integers(5, 31, molecules)
    offsets = np.concatenate(([0], np.cumsum(atoms)))
    total = int(offsets[-1])
    out = folder / "packed"
    out.mkdir()
    np.save(out / "offsets.npy", offsets)
    np.save(out / "n_atoms.npy", atoms.astype(np.int32))
    rng.integers(1, 9, total).astype(np.int32).tofile(out / "Z_pack.int32")
    for name in ("R_pack.f32", "F_pack.f32"):
        rng.normal(size=(total, 3)).astype(np.float32).tofile(out / name)
    rng.normal(size=molecules).tofile(out / "E.f64")
    return out


_KINDS: dict[str, Callable[[Path], Path | None]] = {
    "NPZ, MD17 form": _md17,
    "NPZ, padded QM9 form": _qm9,
    "HDF5, ANI-1x form": _ani1x,
    "packed memmap": _packed,
}


def _beside(title: str, path: Path, folder: Path) -> Iterator[Row]:
    """A conversion beside a copy of what it reads, and beside what it writes as one file."""
    number = itertools.count()
    files = [path] if path.is_file() else sorted(path.iterdir())
    size = sum(f.stat().st_size for f in files)
    first = folder / "first.zarr"
    convert(path, first, progress=False)
    stored = sum(f.stat().st_size for f in first.rglob("*") if f.is_file())
    shutil.rmtree(first)
    clocks: list[float] = []

    def ours() -> None:
        dst = folder / f"{next(number)}.zarr"
        begun = time.process_time()
        convert(path, dst, threads=1, progress=False)
        clocks.append(time.process_time() - begun)
        shutil.rmtree(dst)

    def copy() -> None:
        dst = folder / f"copy-{next(number)}"
        dst.mkdir()
        for file in files:
            with file.open("rb") as source, (dst / file.name).open("wb") as target:
                while piece := source.read(_PIECE):
                    target.write(piece)
                _force(target.fileno())
        shutil.rmtree(dst)

    piece = np.random.default_rng(0).bytes(_PIECE)

    def write() -> None:
        dst = folder / f"write-{next(number)}"
        with dst.open("wb") as target:
            for start in range(0, stored, _PIECE):
                target.write(piece[: stored - start])
            _force(target.fileno())
        dst.unlink()

    for peer, call in (
        (f"copy of the {size / 1e6:.0f} MB", copy),
        ("as many bytes written", write),
    ):
        clocks.clear()
        row = compare(f"{title}, to store, one thread", ours, peer, call, target=0.5, rounds=5)
        cpu = statistics.median(clocks[1:])
        note = (
            f"{size / 1e6:.0f} MB in, {stored / 1e6:.0f} MB out; {size / 1e6 / row.ours_s:.0f} MB/s "
            f"against {size / 1e6 / row.peer_s:.0f}; ours {cpu:.2f} s CPU"
        )
        yield replace(row, note=note)


def _force(handle: int) -> None:
    os.fsync(handle)

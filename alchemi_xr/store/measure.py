"""Measures on a sample of somebody's data what each profile makes of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.store import fs
from alchemi_xr.store.codecs import as_config
from alchemi_xr.store.describe import describe
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.writer import StoreWriter

__all__ = ["Measured", "best", "measure"]

# A profile that reads at this share of the fastest one counts as equally fast.
_FAST_ENOUGH = 0.5
_WORTH_IT = 1.1


@dataclass(frozen=True, slots=True)
class Measured:
    """One profile on one sample.

    Parameters
    ----------
    profile : str
    raw_bytes, stored_bytes : int
    write_speed, read_speed : float
        Raw bytes a second; read with a warm page cache.
    """

    profile: str
    raw_bytes: int
    stored_bytes: int
    write_speed: float
    read_speed: float

    @property
    def ratio(self) -> float:
        """How many times smaller the stored fields are."""
        return self.raw_bytes / max(1, self.stored_bytes)


def measure(
    block: Block, profiles: Sequence[str], folder: Path, *, rounds: int = 3
) -> list[Measured]:
    """Write and read a block with each profile, in turns.

    Parameters
    ----------
    block : Block
    profiles : sequence of str
    folder : Path
        Where to write; what is made there is removed again.
    rounds : int
        The median counts.

    Raises
    ------
    FieldError
        The block is empty.
    ConfigError
        A profile is not known.
    """
    if block.num_samples == 0:
        raise FieldError("measure", "there is no sample to measure with", found="0 samples")
    for profile in profiles:
        as_config(profile)
    times: dict[str, tuple[list[float], list[float]]] = {p: ([], []) for p in profiles}
    sizes: dict[str, tuple[int, int]] = {}
    for _ in range(rounds):
        for profile, (writes, reads) in times.items():
            write, read, sizes[profile] = _once(block, profile, folder / "measured.zarr")
            writes.append(write)
            reads.append(read)
    return [
        Measured(
            profile,
            *sizes[profile],
            sizes[profile][0] / statistics.median(writes),
            sizes[profile][0] / statistics.median(reads),
        )
        for profile, (writes, reads) in times.items()
    ]


def _once(block: Block, profile: str, path: Path) -> tuple[float, float, tuple[int, int]]:
    """Seconds to write, seconds to read, bytes raw and stored."""
    writer = StoreWriter(path, profile)
    try:
        write = _timed(lambda: writer.write(block))
        with open_store(path) as snapshot:
            read = _timed(lambda: snapshot.read_block(slice(None)))
            facts = describe(snapshot)
    finally:
        fs.remove_tree(path)
    return write, read, (facts["raw_bytes"], facts["stored_bytes"])


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return max(time.perf_counter() - start, 1e-9)


def best(found: Sequence[Measured]) -> Measured:
    """The smallest of those that read about as fast as the fastest, lossy ones aside.

    A profile that saves less than a tenth is not worth its decoding.

    Raises
    ------
    ConfigError
        Nothing was measured, or lossy profiles alone.
    """
    exact = [m for m in found if not m.profile.startswith("lossy")]
    if not exact:
        raise ConfigError("recommend", "no profile that keeps every bit was measured")
    fastest = max(exact, key=lambda m: m.read_speed)
    small = max(
        (m for m in exact if m.read_speed >= _FAST_ENOUGH * fastest.read_speed),
        key=lambda m: m.ratio,
    )
    return small if small.ratio > _WORTH_IT * fastest.ratio else fastest

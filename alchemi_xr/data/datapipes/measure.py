"""How fast a dataset gives batches: orders, batch sizes and read-ahead, tried out.

Nothing is computed between two batches, so a rate is what a training could be
given at most. Settings are visited twice, the second time backwards: what the
first visit brought into the page cache then helps all alike, and shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch

from alchemi_xr.data.datapipes.dataloader import DataLoader
from alchemi_xr.data.datapipes.prefetch import batch_tensors
from alchemi_xr.errors import ConfigError

__all__ = ["ORDERS", "Advice", "Measured", "Order", "Setting", "advise", "copy_bandwidth", "sweep"]

Order: TypeAlias = Literal["sequential", "block", "full"]
ORDERS: tuple[Order, ...] = ("sequential", "block", "full")
_SHUFFLE: dict[str, Any] = {"sequential": False, "block": "block", "full": True}
#: What counts as as fast: less is within the noise of a short measurement.
_BATCH_NEAR, _PREFETCH_NEAR, _ORDER_NEAR = 0.9, 0.95, 0.8


@dataclass(frozen=True)
class Setting:
    """Arguments of a loader."""

    order: Order
    batch_size: int
    prefetch_factor: int

    def __str__(self) -> str:
        return f"{self.order}, batches of {self.batch_size}, prefetch {self.prefetch_factor}"


@dataclass
class Measured:
    """What a setting gave.

    Parameters
    ----------
    setting : Setting
    structures, batches : int
        That were read.
    seconds : float
        In which they were.
    bytes_per_structure : float
    first_batch_s : float
        From the beginning of an epoch to its first batch; the least of the visits.
    rates : list of float
        Structures a second of each visit.
    """

    setting: Setting
    structures: int = 0
    batches: int = 0
    seconds: float = 0.0
    bytes_per_structure: float = 0.0
    first_batch_s: float = float("inf")
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Structures a second, over all visits."""
        return self.structures / self.seconds if self.seconds else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes of tensors a second."""
        return self.rate * self.bytes_per_structure

    def facts(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            **asdict(self.setting),
            "structures_per_s": self.rate,
            "bytes_per_s": self.bandwidth,
            "first_batch_s": self.first_batch_s,
            "structures": self.structures,
            "batches": self.batches,
            "seconds": self.seconds,
            "structures_per_s_of_each_visit": self.rates,
        }


@dataclass(frozen=True)
class Advice:
    """A setting and why it is that one."""

    setting: Setting
    reasons: list[str]

    @property
    def shuffle(self) -> bool | str:
        """The order as ``DataLoader`` takes it."""
        found: bool | str = _SHUFFLE[self.setting.order]
        return found


def copy_bandwidth(size: int = 2**26, rounds: int = 5) -> float:
    """Bytes a second of a plain copy between two warm arrays: what a batch can reach at most."""
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begun)
    return size / best


def sweep(
    dataset: Any,
    *,
    seconds: float,
    orders: Sequence[Order] = ORDERS,
    batch_sizes: Sequence[int] = (16, 64, 256, 1024),
    prefetch_factors: Sequence[int] = (0, 2, 8),
    each: Callable[[], object] = lambda: None,
) -> list[Measured]:
    """Measure every setting within a time.

    Parameters
    ----------
    dataset : Dataset
    seconds : float
        For all of it; a single read that takes longer is waited for.
    orders, batch_sizes, prefetch_factors : sequences
        Batches larger than the dataset count as one of all its samples.
    each : callable
        Called after every visit.

    Returns
    -------
    list of Measured
        In the order of the grid; settings without time for them are not there.

    Raises
    ------
    ConfigError
        The dataset is empty, or an argument cannot be.
    """
    if len(dataset) == 0:
        raise ConfigError("bench-io", "the store has no samples to read")
    if not seconds > 0:
        raise ConfigError("bench-io", "no time to measure in", found=seconds, expected="> 0")
    for order in orders:
        if order not in ORDERS:
            raise ConfigError("bench-io", "order is not known", found=order, expected=ORDERS)
    for name, values, least in (
        ("batch size", batch_sizes, 1),
        ("prefetch", prefetch_factors, 0),
    ):
        if not values or min(values) < least:
            raise ConfigError("bench-io", f"{name} too small", found=values, expected=f">= {least}")
    sizes = sorted({min(size, len(dataset)) for size in batch_sizes})
    grid = [
        Setting(order, size, factor)
        for order in dict.fromkeys(orders)
        for size in sizes
        for factor in sorted(set(prefetch_factors))
    ]
    found = {setting: Measured(setting) for setting in grid}
    visits = _middle_first(grid)
    begun = time.perf_counter()
    rng = np.random.default_rng(0)
    for number, setting in enumerate([*visits, *reversed(visits)]):
        left = begun + seconds - time.perf_counter()
        if left <= 0:
            break
        share = left / (2 * len(visits) - number)
        _visit(dataset, found[setting], share, rng)
        each()
    return [one for one in found.values() if one.batches]


def _middle_first(grid: Sequence[Setting]) -> list[Setting]:
    """Settings with the usual values before the extremes: a slow store leaves time for few."""
    sizes = sorted({s.batch_size for s in grid})
    factors = sorted({s.prefetch_factor for s in grid})

    def away(setting: Setting) -> float:
        return sum(
            abs(values.index(value) - (len(values) - 1) / 2)
            for values, value in (
                (sizes, setting.batch_size),
                (factors, setting.prefetch_factor),
            )
        )

    return sorted(grid, key=away)


def _visit(dataset: Any, found: Measured, seconds: float, rng: np.random.Generator) -> None:
    """One setting for some time: other samples at each visit, as an epoch of many has them."""
    setting = found.setting
    loader = DataLoader(
        dataset,
        batch_size=setting.batch_size,
        shuffle=_SHUFFLE[setting.order],
        prefetch_factor=setting.prefetch_factor,
        seed=int(rng.integers(2**31)),
    )
    if setting.order == "sequential":
        # From anywhere: what lies at the beginning is in the page cache soon.
        loader.set_epoch_step(int(rng.integers(len(loader))))
    # Until two reads are through, batches come that were waited for already.
    warm_up = 2 * setting.prefetch_factor
    stop = time.perf_counter() + seconds
    structures, took, sizes = 0, 0.0, []
    while True:
        run = _epoch(loader, warm_up, stop)
        found.first_batch_s = min(found.first_batch_s, run.first)
        found.batches += run.batches
        structures, took = structures + run.structures, took + run.seconds
        sizes.append(run.bytes / run.of)
        if time.perf_counter() >= stop:
            break
    found.bytes_per_structure = float(
        np.mean([*sizes, found.bytes_per_structure] if found.bytes_per_structure else sizes)
    )
    found.structures += structures
    found.seconds += took
    found.rates.append(structures / took)


@dataclass
class _Run:
    first: float
    batches: int
    structures: int
    seconds: float
    bytes: int
    of: int


def _epoch(loader: DataLoader, warm_up: int, stop: float) -> _Run:
    begun = time.perf_counter()
    batches = cast(Generator[Any, None, None], iter(loader))
    try:
        batch = next(batches)
        _wait(batch)
        now = time.perf_counter()
        run = _Run(now - begun, 1, batch.num_graphs, now - begun, *_bytes(batch))
        late, late_begun = 0, now
        for batch in batches:
            run.batches += 1
            run.structures += batch.num_graphs
            if run.batches > warm_up + 1:
                late += batch.num_graphs
            now = time.perf_counter()
            if run.batches == warm_up + 1:
                late_begun = now
            if now >= stop:
                break
        _wait(batch)
        now = time.perf_counter()
    finally:
        batches.close()
    run.seconds = now - begun
    if late and late >= run.structures // 4:
        # Long enough to leave the beginning out.
        run.structures, run.seconds = late, now - late_begun
    return run


def _wait(batch: Any) -> None:
    if batch.device.type == "cuda":
        torch.cuda.synchronize(batch.device)


def _bytes(batch: Any) -> tuple[int, int]:
    tensors = batch_tensors(batch)
    return sum(t.nbytes for t in tensors), batch.num_graphs


def advise(found: Sequence[Measured]) -> Advice:
    """The setting to train with, of those measured, and why.

    Raises
    ------
    ConfigError
        Nothing was measured.
    """
    if not found:
        raise ConfigError("bench-io", "nothing was measured", mend="give it more seconds")

    def best(**fixed: Any) -> Measured | None:
        fitting = [m for m in found if all(getattr(m.setting, k) == v for k, v in fixed.items())]
        return max(fitting, key=lambda m: m.rate, default=None)

    reasons: list[str] = []
    by_order = {order: best(order=order) for order in ORDERS}
    order = _order([m for m in by_order.values() if m is not None], reasons)
    top = best(order=order)
    assert top is not None
    sizes = sorted({m.setting.batch_size for m in found if m.setting.order == order})
    rates = {size: m.rate for size in sizes if (m := best(order=order, batch_size=size))}
    size = next(s for s in sizes if rates[s] >= _BATCH_NEAR * top.rate)
    if len(sizes) > 1:
        smaller = [s for s in sizes if s < size]
        text = f"batch size {size}: the smallest within 10 % of the fastest"
        if smaller:
            text += f" (batches of {smaller[-1]} give {rates[smaller[-1]] / top.rate:.0%} of it)"
        reasons.append(f"{text}; your model may want another")
    factors = sorted(
        {
            m.setting.prefetch_factor
            for m in found
            if (m.setting.order, m.setting.batch_size) == (order, size)
        }
    )
    ahead = {
        f: m.rate for f in factors if (m := best(order=order, batch_size=size, prefetch_factor=f))
    }
    most = max(ahead.values())
    factor = next(f for f in factors if ahead[f] >= _PREFETCH_NEAR * most)
    if len(factors) > 1:
        text = f"prefetch {factor}: the smallest within 5 % of the fastest; more only takes memory"
        if factor == 0:
            text += " (here, where no model computes: 2 hides the reading behind a training step)"
            factor = min((f for f in factors if f > 0), default=0)
        reasons.append(text)
    return Advice(Setting(order, size, factor), reasons)


def _order(found: Sequence[Measured], reasons: list[str]) -> Order:
    rates: dict[Order, float] = {m.setting.order: m.rate for m in found}
    shuffled = {order: rate for order, rate in rates.items() if order != "sequential"}
    if not shuffled:
        reasons.append("order sequential: no other was measured")
        return "sequential"
    fastest = max(shuffled.values())
    if "full" in shuffled and shuffled["full"] >= _ORDER_NEAR * fastest:
        order: Order = "full"
        text = "order full: true randomness"
        if "block" in shuffled:
            text += f", at {shuffled['full'] / shuffled['block']:.2f}x the speed of block shuffle"
    else:
        order = "block"
        text = "order block: pieces of the storage are read whole and shuffled together"
        if "full" in shuffled:
            text += f", {shuffled['block'] / shuffled['full']:.1f}x as fast as full shuffle"
    if "sequential" in rates:
        text += f" ({rates[order] / rates['sequential']:.2f}x of reading in sequence)"
    reasons.append(text)
    return order

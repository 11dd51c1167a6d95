"""A store parted into several: at random, by groups, or by composition.

Every sample that is not deleted goes into exactly one part, and keeps its
place among those of its part. Equal seeds give equal parts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, NDArray, PathLike
from alchemi_xr._version import __version__
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.etl.gather import count
from alchemi_xr.etl.maintain import sample_key
from alchemi_xr.etl.rebuild import How, build_new, kept_config, recipe_of
from alchemi_xr.etl.report import MaintainReport
from alchemi_xr.etl.union import unify
from alchemi_xr.plan.elsewhere import check_place, destination_of
from alchemi_xr.plan.plan import extent_bytes
from alchemi_xr.plan.progress import Progress
from alchemi_xr.store.codecs import as_config
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["composition_hash", "split"]

_MAX_GROUPS = 10_000


def split(
    store: Any,
    parts: Mapping[PathLike, float] | PathLike,
    *,
    by: str | None = None,
    seed: int = 0,
    config: Any = None,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    client: Any = None,
    threads: int | None = None,
    memory: int | None = None,
    progress: bool | Progress = True,
    resume: bool = True,
) -> dict[str, MaintainReport]:
    """Several stores, in which each sample of one store is exactly once.

    Parameters
    ----------
    store : path, dict, zarr store
    parts : dict of path or URL to fraction, or path or URL with ``{}``
        Fractions that add up to 1. Or one path in which ``{}`` stands for the
        value of ``by``: each group then becomes a store.
    by : str, optional
        None: each sample is drawn by itself, and the parts have the sizes asked
        for, to one sample. A field with one value a sample: samples of equal
        value stay together (no molecule is in both training and test set), and
        the parts have those sizes as nearly as the groups allow.
        ``"composition"``: the hash of a sample's atomic numbers and the seed
        says where it goes, whatever else is in the store; so samples that come
        later do not move those that were there.
    seed : int
    config : ZarrWriteConfig, mapping or profile name, optional
        By default chunks and codecs of the store.
    overwrite : bool
        Replace stores that are there.
    storage_options : dict, optional
        For URLs: endpoint, credentials and the like.
    client, threads, memory, progress, resume
        As for :func:`alchemi_xr.etl.defragment`.

    Returns
    -------
    dict of str to MaintainReport
        By path.

    Raises
    ------
    ConfigError
        The fractions do not add up to 1, or a part would have no sample.
    UnknownFieldError, FieldError
        ``by`` is no field with one value a sample.
    StoreNotFoundError, NotAStoreError, StoreExistsError, PlanError

    Examples
    --------
    >>> split("all.zarr", {"train.zarr": 0.9, "test.zarr": 0.1})  # doctest: +SKIP
    >>> split("all.zarr", "{}.zarr", by="config_type")            # doctest: +SKIP
    """
    begun = time.perf_counter()
    if isinstance(parts, Mapping):
        fractions = _fractions(parts)
        given = [destination_of(path, storage_options=storage_options) for path in fractions]
        # A run that was stopped may have put some of them in their places.
        if not any(isinstance(dst, Path) and not os.path.lexists(dst) for dst in given):
            for dst in given:
                check_place(dst, overwrite=overwrite)
    with open_store(store) as snapshot:
        if isinstance(parts, Mapping):
            chosen = dict(zip(fractions, _draw(snapshot, fractions, by, seed), strict=True))
        else:
            chosen = _each(snapshot, os.fspath(parts), by)
        settings = kept_config(snapshot) if config is None else as_config(config)
        jobs = []
        for path, order in chosen.items():
            if len(order) == 0:
                raise ConfigError(
                    path,
                    "no sample would go into this part",
                    mend="ask for a larger fraction, another seed, or fewer parts",
                )
            counted = count(snapshot, order)
            recipe = recipe_of(
                [counted],
                unify([counted]),
                settings,
                operation="split",
                provenance={
                    **snapshot.schema.provenance,
                    "split_by": f"alchemi_xr {__version__}",
                    "split_from": {
                        "store": snapshot.where,
                        "by": by,
                        "seed": seed,
                        "part": os.path.basename(path),
                    },
                },
            )
            dst = destination_of(path, storage_options=storage_options)
            jobs.append((dst, recipe, [counted]))
        how = How(client, threads, memory, progress, resume)
        with how.running() as running:
            reports = build_new(jobs, how, *running, overwrite=overwrite)
    for report in reports:
        report.seconds = time.perf_counter() - begun
    return dict(zip(chosen, reports, strict=True))


def _fractions(parts: Mapping[PathLike, float]) -> dict[str, float]:
    fractions = {os.fspath(path): float(share) for path, share in parts.items()}
    paths = {path if "://" in path else os.path.abspath(path) for path in fractions}
    if len(paths) < len(fractions) or not fractions:
        raise ConfigError("split", "give each part a path of its own", found=list(fractions))
    total = sum(fractions.values())
    if any(not 0 < share <= 1 for share in fractions.values()) or abs(total - 1) > 1e-6:
        raise ConfigError(
            "split",
            "fractions are more than 0 and add up to 1, so that each sample has its part",
            found=f"{list(fractions.values())}, in all {total:g}",
            mend="give what you do not need a part of its own",
        )
    return fractions


def _draw(
    snapshot: Snapshot, fractions: Mapping[str, float], by: str | None, seed: int
) -> list[IntArray]:
    """Physical positions of each part, ascending."""
    shares = np.array(list(fractions.values()))
    active = snapshot.active
    if by == "composition" and by not in snapshot:
        hashes = composition_hash(snapshot, active, seed)
        # 53 bits are what a double holds.
        where = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
        part = np.searchsorted(np.cumsum(shares)[:-1] / shares.sum(), where, side="right")
    else:
        rng = np.random.default_rng(seed)
        if by is None:
            part = np.repeat(np.arange(len(shares)), _sizes(shares, len(active)))
            part = part[np.argsort(rng.permutation(len(active)), kind="stable")]
        else:
            part = _whole_groups(_groups(snapshot, by)[1], shares, rng)
    return [active[part == number] for number in range(len(shares))]


def _sizes(shares: NDArray, total: int) -> IntArray:
    """Whole numbers that add up to the total, the largest remainders rounded up."""
    exact = shares / shares.sum() * total
    sizes = np.floor(exact).astype(np.int64)
    short = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes


def _whole_groups(group: IntArray, shares: NDArray, rng: np.random.Generator) -> IntArray:
    """Part of each sample: groups in random order, each to the part that lacks most."""
    counts = np.bincount(group)
    room = shares / shares.sum() * len(group)
    target = np.empty(len(counts), dtype=np.int64)
    for number in rng.permutation(len(counts)):
        target[number] = int(np.argmax(room))
        room[target[number]] -= counts[number]
    return target[group]


def _groups(snapshot: Snapshot, by: str) -> tuple[NDArray, IntArray]:
    """The values of a field among samples that are not deleted, and the group of each."""
    values, there = sample_key(snapshot, by)
    active = snapshot.active
    if there is not None and not there[active].all():
        lacking = int(active[~there[active]][0])
        raise FieldError(
            snapshot.where,
            f"sample {lacking} has no value of {by!r} ({int((~there[active]).sum())} in all)",
            mend="delete these samples, or split by a field that all have",
        )
    found, inverse = np.unique(values[active], return_inverse=True)
    return found, inverse.reshape(-1).astype(np.int64)


def _each(snapshot: Snapshot, template: str, by: str | None) -> dict[str, IntArray]:
    """A path for each group, and its samples."""
    if by is None or template.count("{}") != 1:
        raise ConfigError(
            "split",
            "give fractions, or a field and a path with one {} for its value",
            found=f"{template!r}, by {by!r}",
            expected="{'train.zarr': 0.9, 'test.zarr': 0.1}, or '{}.zarr' and by=...",
        )
    found, group = _groups(snapshot, by)
    if len(found) > _MAX_GROUPS:
        raise ConfigError(
            "split", f"{by!r} has {len(found)} values", expected=f"at most {_MAX_GROUPS} stores"
        )
    # One sort for all groups; within a group the samples stay in their order.
    ordered = np.split(
        snapshot.active[np.argsort(group, kind="stable")], np.cumsum(np.bincount(group))[:-1]
    )
    paths = [template.replace("{}", _word(value)) for value in found.tolist()]
    if len(set(paths)) < len(paths):
        raise ConfigError("split", f"two values of {by!r} give one path", found=sorted(paths)[:20])
    return dict(zip(paths, ordered, strict=True))


def _word(value: object) -> str:
    """A value as part of a file name."""
    word = re.sub(r"[^\w.+=-]+", "_", str(value)).strip(".")
    return word or "_"


def composition_hash(snapshot: Snapshot, samples: IntArray, seed: int = 0) -> NDArray:
    """A number for each sample that depends on its atomic numbers, not on their order.

    The atomic numbers are read once, block by block.

    Returns
    -------
    uint64 array, [M]
    """
    base = _mix(np.array([seed], dtype=np.int64).view(np.uint64))[0]
    out = []
    for block in snapshot.iter_blocks(
        samples=samples, fields=["atomic_numbers"], max_bytes=extent_bytes()
    ):
        total = np.zeros(block.num_samples, dtype=np.uint64)
        terms = _mix(block["atomic_numbers"].astype(np.uint64) ^ base)
        # A sum (modulo 2**64) of a random number an atom: the same in any order.
        np.add.at(total, ptr_to_index(block.atoms_ptr), terms)
        out.append(_mix(total ^ base))
    return np.concatenate(out) if out else np.empty(0, dtype=np.uint64)


def _mix(values: NDArray) -> NDArray:
    """The finaliser of splitmix64: every bit depends on every bit."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

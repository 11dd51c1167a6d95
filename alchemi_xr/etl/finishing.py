"""What is done with all samples of a conversion together: repeats, order, parts.

None of it can be known before the last record is read. So the conversion first
builds a store of its own, hidden beside the destination; the store, or the parts,
that are asked for are made of it, and appear when they are whole. Stopped at any
point, the same call goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alchemi_xr._typing import PathLike
from alchemi_xr._version import __version__
from alchemi_xr.errors import AlchemiError, ConfigError, StoreError
from alchemi_xr.etl.inputs import content_files, expand
from alchemi_xr.etl.maintain import defragment, sort
from alchemi_xr.etl.parts import split
from alchemi_xr.etl.rebuild import How
from alchemi_xr.etl.repeats import check_tolerance, repeats
from alchemi_xr.etl.report import ConvertReport, MaintainReport
from alchemi_xr.plan.elsewhere import Destination, check_place, destination_of, scratch_path
from alchemi_xr.plan.rejects import Quarantine
from alchemi_xr.store import fs
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.writer import StoreWriter

__all__ = ["Finish", "finished", "make_finish"]


@dataclass(frozen=True)
class Finish:
    """What is done after the last record.

    Parameters
    ----------
    tolerance : float, optional
        Of two fingerprints of one structure; None keeps repeats.
    by : str, optional
        What the samples are sorted by.
    parts : dict of str to float
        Fractions by what stands for ``{}`` in the destination.
    groups : str, optional
        The field that keeps samples together, or whose values are the parts.
    seed : int
    """

    tolerance: float | None = None
    by: str | None = None
    parts: Mapping[str, float] | None = None
    groups: str | None = None
    seed: int = 0

    @property
    def any(self) -> bool:
        """Whether anything is done at all."""
        return self.tolerance is not None or self.by is not None or self.splits

    @property
    def splits(self) -> bool:
        """Whether several stores are made."""
        return self.parts is not None or self.groups is not None

    def said(self, repeats: int) -> dict[str, Any]:
        """What the stores remember of it."""
        out: dict[str, Any] = {}
        if self.tolerance is not None:
            out["dedup"] = {"tolerance": self.tolerance, "repeats": repeats}
        if self.by is not None:
            out["sorted_by"] = self.by
        return out


def make_finish(
    *,
    dedup: bool | float | None,
    sort_by: str | None,
    split: Mapping[str, float] | None,
    split_by: str | None,
    seed: int,
) -> Finish:
    """The options of ``convert``, checked.

    Raises
    ------
    ConfigError
    """
    if sort_by is not None and not isinstance(sort_by, str):
        raise ConfigError(
            "sort", "is no field", found=repr(sort_by), expected='"num_atoms", or a field'
        )
    if split is not None and not (
        isinstance(split, Mapping) and split and all(isinstance(name, str) for name in split)
    ):
        raise ConfigError(
            "split",
            "is no mapping of names to fractions",
            found=repr(split),
            expected='{"train": 0.9, "test": 0.1}, and {} in the destination',
        )
    parts = None if split is None else dict(split)
    return Finish(check_tolerance(dedup), sort_by, parts, split_by, seed)


def finished(
    src: PathLike | Sequence[PathLike],
    dst: PathLike,
    finish: Finish,
    build: Callable[[Path], ConvertReport],
    how: How,
    *,
    request: Any,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> ConvertReport:
    """A conversion with everything that comes after it.

    Parameters
    ----------
    src : path or sequence of path
    dst : path or URL
        With one ``{}`` for the names of the parts, where there are some.
    finish : Finish
    build : callable
        Converts to the path that it is given.
    how : How
    request : object
        Whose text tells this conversion from others.
    overwrite : bool
    storage_options : dict, optional

    Raises
    ------
    ConfigError, StoreExistsError, NotAStoreError
    """
    begun = time.perf_counter()
    name = os.fspath(dst)
    if name.count("{}") != int(finish.splits):
        raise ConfigError(
            "destination",
            "has one {} for the names of the parts, where there are some, and none otherwise",
            found=name,
            mend='give such as "sets/{}.zarr"' if finish.splits else "leave {} out",
        )
    base = destination_of(name.replace("{}", "parts"), storage_options=storage_options)
    whole = _hidden(base)
    told = whole.with_name(whole.name + ".done")
    key = _key(src, finish, request)
    state = _known(told, key, whole) if how.resume else None
    if state is None:
        places = [name.replace("{}", part) for part in finish.parts or ()]
        for place in places or ([] if finish.splits else [name]):
            given = destination_of(place, storage_options=storage_options)
            check_place(given, overwrite=overwrite)
        fs.remove_file(told)
        report = build(whole)
        state = {"key": key, "report": report.to_dict(), "sorted_by": None}
        _remember(told, state)
    else:
        report = ConvertReport.from_dict(state["report"])
        report.resumed = True
    if finish.tolerance is not None:
        report.repeats = report.samples - _leave_out_repeats(whole, finish.tolerance, how)
    # Those made of it take this over; a split adds its own.
    StoreWriter(whole).annotate(finish.said(report.repeats))
    if finish.splits and finish.by is not None and state["sorted_by"] != finish.by:
        sort(whole, finish.by, **_running(how))
        _remember(told, {**state, "sorted_by": finish.by})
    made = _made(whole, name, finish, how, overwrite, storage_options)
    _count(report, name, made, finish)
    if report.rejects_path is not None:
        rejects = _rejects_of(base)
        Quarantine(rejects).write(report.rejects)
        report.rejects_path = str(rejects)
    fs.remove_file(told)
    fs.remove_file(_rejects_of(whole))
    fs.remove_tree(fs.previous_path(whole))
    fs.remove_tree(whole)
    report.seconds = time.perf_counter() - begun
    return report


def _hidden(base: Destination) -> Path:
    """Where the store lies of which the others are made."""
    if isinstance(base, Path):
        return fs.sibling(base, "converted")
    path = scratch_path(base)
    return path.with_name(path.name + "-converted")


def _rejects_of(base: Destination) -> Path:
    path = base if isinstance(base, Path) else scratch_path(base)
    return path.with_name(path.name + ".rejects.jsonl")


def _key(src: PathLike | Sequence[PathLike], finish: Finish, request: Any) -> str:
    files = [f for path in expand(src) for f in content_files(path)]
    stats = [os.stat(f) for f in files]
    told = [(f, s.st_size, s.st_mtime_ns) for f, s in zip(files, stats, strict=True)]
    text = repr((__version__, told, finish.tolerance, finish.by, request))
    return hashlib.blake2s(text.encode()).hexdigest()


def _known(told: Path, key: str, whole: Path) -> dict[str, Any] | None:
    """What an earlier call for the same remembers of the store that it has built."""
    try:
        state: dict[str, Any] = json.loads(told.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return state if state.get("key") == key and fs.looks_like_store(whole) else None


def _remember(told: Path, state: dict[str, Any]) -> None:
    fs.atomic_replace(told, json.dumps(state).encode())


def _running(how: How) -> dict[str, Any]:
    return {
        "client": how.client,
        "threads": how.threads,
        "memory": how.memory,
        "progress": how.progress,
        "resume": how.resume,
    }


def _made(
    whole: Path,
    name: str,
    finish: Finish,
    how: How,
    overwrite: bool,
    storage_options: dict[str, Any] | None,
) -> list[MaintainReport]:
    """The stores that were asked for; what is deleted goes into none of them."""
    running = {**_running(how), "overwrite": overwrite}
    if finish.splits:
        parts: Any = name
        if finish.parts is not None:
            parts = {name.replace("{}", part): share for part, share in finish.parts.items()}
        made = split(
            whole,
            parts,
            by=finish.groups,
            seed=finish.seed,
            storage_options=storage_options,
            **running,
        )
        return list(made.values())
    destination = destination_of(name, storage_options=storage_options)
    if finish.by is None:
        return [defragment(whole, destination=destination, **running)]
    with open_store(whole) as snapshot:
        deleted = snapshot.num_samples - len(snapshot.active)
    if deleted:
        defragment(whole, **_running(how))
    return [sort(whole, finish.by, destination=destination, **running)]


def _leave_out_repeats(whole: Path, tolerance: float, how: How) -> int:
    """Mark them as deleted; how many samples are left."""
    folder = whole.with_name(whole.name + ".prints")
    fs.remove_tree(folder)  # of a run that was killed
    try:
        folder.mkdir()
        with how.running() as (runner, shown), open_store(whole) as snapshot:
            found = repeats(
                snapshot, runner=runner, shown=shown, tolerance=tolerance, folder=str(folder)
            )
            left = len(snapshot.active) - len(found)
    except OSError as error:
        if isinstance(error, AlchemiError):
            raise
        raise StoreError(
            str(whole),
            f"repeats could not be found ({error.strerror or error})",
            mend="remove the cause (a full disk?) and run it again: it goes on where it was",
        ) from error
    finally:
        fs.remove_tree(folder)
    if len(found):
        StoreWriter(whole).delete(found)
    return left


def _count(
    report: ConvertReport, name: str, made: Sequence[MaintainReport], finish: Finish
) -> None:
    report.destination = name
    report.samples = sum(part.samples for part in made)
    report.atoms = sum(part.atoms for part in made)
    report.edges = sum(part.edges for part in made)
    report.output_bytes = sum(part.output_bytes for part in made)
    if finish.splits:
        report.parts = {part.destination: part.samples for part in made}
    # Their rows are in none of the stores.
    report.rejects = [replace(reject, sample=None) for reject in report.rejects]

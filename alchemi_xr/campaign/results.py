"""The folder of a campaign: what was planned, what each unit gave, who runs it.

A unit is a folder that appears by one rename, so it is there whole or not at
all, and the first to commit it wins; whatever else a driver or a worker left
behind is rubbish by its name. The folders are the truth about what is done;
the journal tells people the story.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, IntArray, PathLike
from alchemi_xr.campaign.blocks import BlockFolder, BlockFolderWriter
from alchemi_xr.campaign.state import Unit
from alchemi_xr.data.block import Block
from alchemi_xr.errors import CampaignError
from alchemi_xr.store.fs import atomic_replace, fsync_dir, fsync_tree

__all__ = ["CampaignFolder", "Rejected", "UnitFolder", "UnitWriter"]

_TEMPORARY = ".tmp-"
_LOCK_TRIES = 4


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample set aside: which, why, and where in the code.

    Parameters
    ----------
    dataset_index : int
        Sample of the source, counted without deleted ones.
    reason : str
        One line.
    kind : str
        ``"error"``, ``"non-finite"``, ``"memory"``, ``"worker"`` or ``"input"``.
    traceback : str
    unit : str
    """

    dataset_index: int
    reason: str
    kind: str
    traceback: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What is told of a committed unit beside its arrays."""

    key: str
    ranges: tuple[tuple[int, int], ...]
    finished: int
    rejected: int
    steps: int
    frames: int
    seconds: float
    retries: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


class UnitWriter:
    """A unit being computed: a temporary folder until ``commit`` renames it."""

    def __init__(self, units: Path, unit: Unit) -> None:
        self._units = units
        self.unit = unit
        self.path = units / f"{_TEMPORARY}{unit.key}-{secrets.token_hex(4)}"
        self.path.mkdir()
        self.frames: BlockFolderWriter | None = None

    def open_frames(self) -> BlockFolderWriter:
        """The place where frames go as they come."""
        self.frames = BlockFolderWriter(self.path / "frames")
        return self.frames

    def commit(
        self,
        block: Block | None,
        finished: IntArray,
        rejects: Sequence[Rejected],
        facts: UnitFacts,
        *,
        frame_order: IntArray | None = None,
        frames_ptr: IntArray | None = None,
    ) -> bool:
        """Make the unit true; False when another did so before.

        Parameters
        ----------
        block : Block, optional
            Final states, in the order of ``finished``; None when there are none.
        finished : int64 array, [n]
            Sample numbers, ascending.
        rejects : sequence of Rejected
        facts : UnitFacts
        frame_order : int64 array, [F], optional
            Frames to keep, by sample and step; the others came from tries that failed.
        frames_ptr : int64 array, [n + 1], optional
            Which of them belong to which of ``finished``.
        """
        result = BlockFolderWriter(self.path / "result")
        if block is not None and block.num_samples:
            result.append(block)
        result.close()
        np.save(self.path / "finished.npy", finished)
        if self.frames is not None and frame_order is not None and frames_ptr is not None:
            self.frames.close()
            np.save(self.path / "frame_order.npy", frame_order)
            np.save(self.path / "frames_ptr.npy", frames_ptr)
        with (self.path / "rejects.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(r)) + "\n" for r in rejects)
        with (self.path / "unit.json").open("w", encoding="utf-8") as file:
            json.dump(asdict(facts), file)
        fsync_tree(self.path)
        try:
            # A folder that is not empty cannot be renamed over: the first wins.
            self.path.rename(self._units / self.unit.key)
        except OSError:
            if not (self._units / self.unit.key).is_dir():
                raise
            shutil.rmtree(self.path, ignore_errors=True)
            return False
        fsync_dir(self._units)
        return True

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self.frames is not None:
            self.frames.abandon()
        shutil.rmtree(self.path, ignore_errors=True)


class UnitFolder:
    """A committed unit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = json.loads((path / "unit.json").read_text(encoding="utf-8"))
        raw["ranges"] = tuple(tuple(r) for r in raw["ranges"])
        self.facts = UnitFacts(**raw)

    @property
    def finished(self) -> IntArray:
        """Sample numbers of the rows of the result, ascending."""
        ids: IntArray = np.load(self.path / "finished.npy")
        return ids

    @property
    def result(self) -> BlockFolder:
        return BlockFolder(self.path / "result")

    @property
    def has_frames(self) -> bool:
        return (self.path / "frames").is_dir()

    @property
    def frames(self) -> BlockFolder:
        return BlockFolder(self.path / "frames")

    def frame_rows(self) -> tuple[IntArray, IntArray]:
        """Frames by sample and step (memory-mapped), and their pointer over ``finished``."""
        return (
            np.load(self.path / "frame_order.npy", mmap_mode="r"),
            np.load(self.path / "frames_ptr.npy"),
        )

    def rejects(self) -> Iterator[Rejected]:
        """The samples that this unit set aside."""
        with (self.path / "rejects.jsonl").open(encoding="utf-8") as file:
            for line in file:
                yield Rejected(**json.loads(line))


class CampaignFolder:
    """All that a campaign keeps until its results are merged, and after.

    Parameters
    ----------
    path : path
        ``campaign.json``, ``journal.jsonl``, ``spec.pkl``, ``lock``, ``units/``.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.units_path = self.path / "units"
        self._lock: Any = None
        self._abandoned: list[Rejected] = []

    @property
    def exists(self) -> bool:
        return (self.path / "campaign.json").is_file()

    def create(self, identity: dict[str, Any]) -> None:
        """Make the folder of a new campaign."""
        self.units_path.mkdir(parents=True, exist_ok=True)
        atomic_replace(self.path / "campaign.json", json.dumps(identity, indent=2).encode())

    def identity(self) -> dict[str, Any]:
        """What the campaign is over.

        Raises
        ------
        CampaignError
            There is no campaign here.
        """
        try:
            text = (self.path / "campaign.json").read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CampaignError(str(self.path), "no campaign here (no campaign.json)") from error
        identity: dict[str, Any] = json.loads(text)
        return identity

    def clear(self) -> None:
        """Forget all units and the journal; the lock stays with its holder."""
        shutil.rmtree(self.units_path, ignore_errors=True)
        for name in ("campaign.json", "journal.jsonl", "rejects.jsonl", "spec.pkl"):
            (self.path / name).unlink(missing_ok=True)

    # One driver at a time ------------------------------------------------------------------------

    def acquire(self) -> None:
        """Become the campaign's driver. The kernel frees the lock of a killed one.

        Raises
        ------
        CampaignError
            Another process drives it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise CampaignError(
                str(self.path),
                f"no campaign can be kept there ({error.strerror})",
                mend="give directory= a folder where you may write",
            ) from error
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                # Somebody who only asks for the owner holds it for a moment.
                if attempt < _LOCK_TRIES - 1:
                    time.sleep(0.05)
                    continue
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                lock.close()
                raise CampaignError(
                    str(self.path),
                    f"the campaign is being run by {owner}",
                    mend="wait for it, or stop it; its finished units are kept",
                ) from error
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self._lock = lock

    def owner(self) -> str:
        """Who drives the campaign now; empty when nobody does."""
        try:
            lock = (self.path / "lock").open(encoding="utf-8")
        except FileNotFoundError:
            return ""
        with lock:
            try:
                # A shared lock of a moment: it tells, and never blocks a driver for long.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return lock.read().strip() or "another process"
        return ""

    def release(self) -> None:
        """Stop being its driver."""
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    # Journal -------------------------------------------------------------------------------------

    def record(self, event: str, **facts: Any) -> None:
        """Add a line to the journal."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts})
        with (self.path / "journal.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def journal(self) -> Iterator[dict[str, Any]]:
        """Lines of the journal; a torn last one is left out."""
        try:
            file = (self.path / "journal.jsonl").open(encoding="utf-8")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue

    # Units ---------------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> UnitWriter:
        """A place for the results of a unit."""
        return UnitWriter(self.units_path, unit)

    def sweep(self, key: str | None = None) -> bool:
        """Remove what unfinished units left; True when there was anything.

        Parameters
        ----------
        key : str, optional
            Only of this unit.
        """
        prefix = _TEMPORARY if key is None else f"{_TEMPORARY}{key}-"
        left = [p for p in self.units_path.iterdir() if p.name.startswith(prefix)]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return bool(left)

    def unit(self, key: str) -> UnitFolder | None:
        """The committed unit of this key."""
        path = self.units_path / key
        return UnitFolder(path) if path.is_dir() else None

    def units(self) -> list[UnitFolder]:
        """All committed units, in the order of their keys."""
        if not self.units_path.is_dir():
            return []
        names = sorted(p.name for p in self.units_path.iterdir())
        return [UnitFolder(self.units_path / n) for n in names if not n.startswith(".")]

    def finished_mask(self, total: int) -> BoolArray:
        """Mask of the samples with a result, bool [N]."""
        mask = np.zeros(total, dtype=bool)
        for unit in self.units():
            mask[unit.finished] = True
        return mask

    def rejects(self, total: int) -> Iterator[Rejected]:
        """The last reason of each sample that has no result, unit by unit.

        A sample that failed in one start and finished in the next is no reject.
        """
        units = self.units()
        last = np.full(total, -1, dtype=np.int32)
        for number, unit in enumerate(units):
            for reject in unit.rejects():
                last[reject.dataset_index] = number
        last[self.finished_mask(total)] = -1
        for number, unit in enumerate(units):
            for reject in unit.rejects():
                if last[reject.dataset_index] == number:
                    yield reject

    def remember_abandoned(self, rejects: Sequence[Rejected]) -> None:
        """Failures of a unit that was given up, so that their reasons are not lost."""
        self._abandoned.extend(rejects)

    def write_rejects(self, total: int) -> int:
        """``rejects.jsonl`` of the whole campaign; returns their number."""
        count = 0
        partial = self.path / "rejects.jsonl.tmp"
        with partial.open("w", encoding="utf-8") as file:
            for reject in chain(self.rejects(total), self._abandoned):
                file.write(json.dumps(asdict(reject)) + "\n")
                count += 1
        partial.replace(self.path / "rejects.jsonl")
        return count

    def is_merged(self) -> bool:
        """Whether nothing was computed since the last merge."""
        merged = False
        for line in self.journal():
            if line["event"] in ("start", "merged"):
                merged = line["event"] == "merged"
        return merged

    def runs(self) -> int:
        """How often the campaign was started."""
        return sum(1 for line in self.journal() if line["event"] == "start")

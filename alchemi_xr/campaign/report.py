"""What a campaign did: totals, throughput, failures with reasons, and a lazy table."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alchemi_xr._typing import PathLike
from alchemi_xr.campaign.results import CampaignFolder, Rejected

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["CampaignReport", "CampaignStatus", "campaign_status"]

#: Columns of the table, where the results have them.
TABLE_FIELDS = (
    "dataset_index",
    "steps",
    "energy_initial",
    "energy",
    "fmax",
    "status",
)


@dataclass(frozen=True)
class CampaignReport:
    """End of a campaign.

    Parameters
    ----------
    directory : Path
        Folder of the campaign, with its journal and ``rejects.jsonl``.
    results, trajectory : Path, optional
        The stores; None when there is none.
    total, finished, rejected : int
        Samples: of the source, with a result, set aside.
    computed : int
        Samples settled by this start; the others were there before.
    steps : int
        Steps of all systems together, in all starts.
    frames : int
        Frames of the trajectory.
    units, lost, retries : int
        Units committed; units whose worker was lost; tries inside units that
        were repeated (all starts).
    seconds : float
        Wall time of this start.
    """

    directory: Path
    results: Path | None
    trajectory: Path | None
    total: int
    finished: int
    rejected: int
    computed: int
    steps: int
    frames: int
    units: int
    lost: int
    retries: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every sample has a result."""
        return self.finished == self.total

    @property
    def throughput(self) -> float:
        """Systems settled a second in this start."""
        return self.computed / self.seconds if self.seconds > 0 else float("nan")

    @property
    def rejects(self) -> Iterator[Rejected]:
        """The samples set aside, read from disk one by one."""
        return CampaignFolder(self.directory).rejects(self.total)

    def table(self, fields: tuple[str, ...] | None = None) -> xr.Dataset:
        """One row a finished system, lazy, over the dimension ``sample``.

        Parameters
        ----------
        fields : tuple of str, optional
            By default the text fields of the source and steps, energies, fmax,
            status and index of each system.

        Raises
        ------
        CampaignError
            No system finished, so there are no results.
        """
        from alchemi_xr.errors import CampaignError
        from alchemi_xr.ragged import open_dataset
        from alchemi_xr.store.reader import open_store

        if self.results is None:
            raise CampaignError(str(self.directory), "no system finished, so there is no table")
        if fields is None:
            results = open_store(str(self.results))
            text = [n for n in results.fields if results.group(n) == "text"]
            fields = tuple(text) + tuple(n for n in TABLE_FIELDS if n in results.fields)
        table: xr.Dataset = open_dataset(str(self.results), fields=list(fields))
        return table

    def __str__(self) -> str:
        lines = [
            f"{self.finished:,} of {self.total:,} systems finished, {self.rejected:,} set aside"
            + (f" (reasons: {self.directory / 'rejects.jsonl'})" if self.rejected else ""),
            f"{self.computed:,} systems in {self.seconds:.1f} s: {self.throughput:.1f} systems/s; "
            f"{self.steps:,} steps in all",
            f"{self.units:,} units, {self.lost:,} lost with their worker and redone, "
            f"{self.retries:,} tries repeated",
        ]
        if self.results is not None:
            lines.append(f"results: {self.results}")
        if self.trajectory is not None:
            lines.append(f"trajectory: {self.trajectory} ({self.frames:,} frames)")
        return "\n".join(lines)


@dataclass(frozen=True)
class CampaignStatus:
    """A campaign seen from outside, while it runs or later.

    Parameters
    ----------
    directory : Path
    source, results : str
    total, finished, rejected : int
        Samples.
    units : int
        Units committed.
    running : bool
        Whether a process drives it now.
    owner : str
        Which, while it does.
    merged : bool
        Whether its results are in their store.
    last : str
        The last thing that happened.
    age : float
        Seconds since then.
    """

    directory: Path
    source: str
    results: str
    total: int
    finished: int
    rejected: int
    units: int
    running: bool
    owner: str
    merged: bool
    last: str
    age: float
    recent: tuple[Rejected, ...] = field(default=())

    def __str__(self) -> str:
        state = f"running ({self.owner})" if self.running else "not running"
        if self.merged and not self.running:
            state = "finished, results merged"
        lines = [
            f"{self.directory}: {state}",
            f"  {self.source} -> {self.results}",
            f"  {self.finished:,} of {self.total:,} finished, {self.rejected:,} set aside, "
            f"{self.units:,} units committed",
            f"  last: {self.last}, {self.age:.0f} s ago",
        ]
        lines += [f"  sample {r.dataset_index}: {r.reason}" for r in self.recent]
        return "\n".join(lines)


def campaign_status(directory: PathLike, *, rejects: int = 5) -> CampaignStatus:
    """Where a campaign stands; never disturbs it.

    Parameters
    ----------
    directory : path
        Folder of the campaign.
    rejects : int
        How many of the samples set aside to name.

    Raises
    ------
    CampaignError
        There is no campaign here.
    """
    folder = CampaignFolder(directory)
    identity = folder.identity()
    total = int(identity["num_samples"])
    last: dict[str, Any] = {}
    for line in folder.journal():
        last = line
    owner = folder.owner()
    rejected = list(folder.rejects(total))
    return CampaignStatus(
        directory=Path(os.fspath(directory)),
        source=identity["source"],
        results=identity["results"],
        total=total,
        finished=int(folder.finished_mask(total).sum()),
        rejected=len(rejected),
        units=len(folder.units()),
        running=bool(owner),
        owner=owner,
        merged=folder.is_merged(),
        last=last.get("event", "nothing"),
        age=time.time() - last.get("time", time.time()),
        recent=tuple(rejected[:rejects]),
    )

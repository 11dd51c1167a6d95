"""``Campaign``: a stage graph over every sample of a store, to its end."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from alchemi_xr._typing import IntArray, PathLike
from alchemi_xr.campaign.driver import drive, open_executor
from alchemi_xr.campaign.merge import merge_frames, merge_results
from alchemi_xr.campaign.report import CampaignReport, CampaignStatus, campaign_status
from alchemi_xr.campaign.results import CampaignFolder
from alchemi_xr.campaign.state import CampaignState, Unit, failure_limit, plan_units
from alchemi_xr.errors import CampaignError, ConfigError, StoreExistsError
from alchemi_xr.plan.progress import Progress, open_progress
from alchemi_xr.store.codecs import as_config
from alchemi_xr.store.fs import looks_like_store
from alchemi_xr.store.locate import local_path
from alchemi_xr.store.reader import Snapshot, open_store

__all__ = ["Campaign"]

#: Largest unit chosen by default: what a lost worker costs at most.
_MAX_UNIT = 1024
#: Units a worker is meant to get: enough that they end at about the same time.
_UNITS_PER_WORKER = 4
#: Systems in flight on a CPU worker, where the user says nothing.
_BATCH_SIZE = 64


class Campaign:
    """Run a stage graph over a store; failures are set aside, stops are resumed.

    Every sample of the source goes once through the stages, in batches that are
    refilled in flight, on workers that each hold one copy of the model. Units of
    samples are committed one by one; ``run`` called again, also in another
    process after a crash, computes only what has no result yet.

    Parameters
    ----------
    source : path
        The store to read. Deleted samples are passed over.
    stages : callable
        ``stages()`` builds a ``BaseDynamics`` or ``FusedStage``, without sampler
        and sinks, on the worker. It must pickle; what it closes over does too.
        A plain dynamics' ``n_steps`` is the most steps of one system.
    results : path
        The store of final states that is made at the end, in the order of the
        source: its fields as the stages left them, its text, and ``steps``,
        ``energy_initial``, ``fmax``, ``status``, ``dataset_index``.
    unit_size : int, optional
        Most samples of a unit; by default 4 units a worker, at most 1024 samples.
    max_atoms, max_batch_size : int, optional
        Most atoms and systems in flight on a worker; by default 64 systems.
    trajectory : path, optional
        Store of frames by ``dataset_index`` and ``step``; none by default.
    trajectory_every : int
        Steps between frames; a system's first and last state are always there.
    directory : path, optional
        Where units are kept; by default ``<results>.campaign``. On a file system
        that driver and workers share.
    workers : optional
        None: one worker a GPU where there are any, else one a core. An int: so
        many, 0 for this process without Dask. An address, cluster or client: as
        it is.
    max_failures : float, int or None
        Part (or number) of all samples that may fail before the campaign stops
        with an error; None never stops.
    max_force : float, optional, eV/Å
        A system with a larger force on an atom has exploded and is set aside.
    max_attempts : int
        Workers that a unit may lose before it is halved, and a sample alone
        before it is set aside.
    overwrite : bool
        Forget an earlier campaign of this directory and replace its results.
    retry_rejected : bool
        Whether ``run`` on an earlier campaign tries the samples set aside again.
    device : {"auto", "cpu", "cuda"}
    config : ZarrWriteConfig, optional
        Of the stores written.
    progress : bool or Progress

    Raises
    ------
    ConfigError
        An option has no meaning.
    """

    def __init__(
        self,
        source: PathLike,
        stages: Callable[[], Any],
        results: PathLike,
        *,
        unit_size: int | None = None,
        max_atoms: int | None = None,
        max_batch_size: int | None = None,
        trajectory: PathLike | None = None,
        trajectory_every: int = 1,
        directory: PathLike | None = None,
        workers: Any = None,
        max_failures: float | int | None = 0.1,
        max_force: float | None = None,
        max_attempts: int = 2,
        overwrite: bool = False,
        retry_rejected: bool = True,
        device: str = "auto",
        config: Any = None,
        progress: bool | Progress = True,
    ) -> None:
        if not callable(stages):
            raise ConfigError(
                "Campaign",
                "stages is built on each worker",
                found=type(stages).__name__,
                expected="a callable without arguments that returns the stages",
                mend="write def stages(): return FIRE(...)",
            )
        for name, value in [
            ("unit_size", unit_size),
            ("max_atoms", max_atoms),
            ("max_batch_size", max_batch_size),
            ("trajectory_every", trajectory_every),
            ("max_attempts", max_attempts),
        ]:
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1
            ):
                raise ConfigError("Campaign", name, found=value, expected="at least 1")
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError("Campaign", "device", found=device, expected="auto, cpu or cuda")
        if max_force is not None and (
            isinstance(max_force, bool) or not isinstance(max_force, (int, float)) or max_force <= 0
        ):
            raise ConfigError("Campaign", "max_force", found=max_force, expected="a force in eV/Å")
        as_config(config)  # refuses a wrong one now, not when all is computed
        failure_limit(max_failures, 1)  # refuses a wrong one now, not on the cluster
        self.source = local_path(source, "Campaign, source")
        self.stages = stages
        self.results = local_path(results, "Campaign, results")
        self.unit_size = unit_size
        self.max_atoms = max_atoms
        self.max_batch_size = max_batch_size
        self.trajectory = (
            None if trajectory is None else local_path(trajectory, "Campaign, trajectory")
        )
        self.trajectory_every = trajectory_every
        self.directory = Path(f"{self.results}.campaign" if directory is None else directory)
        self.workers = workers
        self.max_failures = max_failures
        self.max_force = max_force
        self.max_attempts = max_attempts
        self.overwrite = overwrite
        self.retry_rejected = retry_rejected
        self.device = device
        self.config = config
        self.progress = progress

    def status(self) -> CampaignStatus:
        """Where the campaign stands, from what is on disk."""
        return campaign_status(self.directory)

    def run(self) -> CampaignReport:
        """Compute what is missing, then merge.

        Returns
        -------
        CampaignReport

        Raises
        ------
        CampaignError
            The failure limit was passed, the stages cannot be built, no worker
            is left, nothing finished, or another process runs this campaign.
            What is finished is kept for the next run.
        StoreExistsError
            Results (or trajectory) are there and are not of this campaign.
        """
        source = open_store(str(self.source))
        self._refuse_overlap()
        folder = CampaignFolder(self.directory)
        self._refuse_foreign(folder)
        folder.acquire()
        try:
            return self._run(source, folder)
        finally:
            folder.release()

    # ------------------------------------------------------------------------------------ parts

    def _refuse_overlap(self) -> None:
        """Source, results, trajectory and campaign folder lie apart, links followed."""
        places = {
            "source": self.source,
            "results": self.results,
            "trajectory": self.trajectory,
            "directory": self.directory,
        }
        real = {name: Path(os.path.realpath(p)) for name, p in places.items() if p is not None}
        for (one, first), (other, second) in itertools.combinations(real.items(), 2):
            if first == second or first in second.parents or second in first.parents:
                raise ConfigError(
                    "Campaign",
                    f"{one} and {other} overlap",
                    found=f"{places[one]} and {places[other]}",
                    mend="give each a path of its own; a campaign never changes its source",
                )
        for name in ("results", "trajectory"):
            if name in real:
                inside = next(filter(looks_like_store, real[name].parents), None)
                if inside is not None:
                    raise ConfigError("Campaign", f"{name} lies inside the store {inside}")
                if (place := places[name]) is not None and place.is_symlink():
                    # The store that the link leads to is meant, not the link.
                    setattr(self, name, real[name])

    def _refuse_foreign(self, folder: CampaignFolder) -> None:
        """Nothing that is not this campaign's own is ever replaced."""
        if not self.source.exists():  # open_store has said so already
            return
        for path in (self.results, self.trajectory):
            if path is None or not os.path.lexists(path):
                continue
            if not looks_like_store(path):
                raise StoreExistsError(
                    str(path), "already exists and is no store", mend="give another path"
                )
            if not folder.exists and not self.overwrite:
                raise StoreExistsError(
                    str(path),
                    "already exists, and there is no campaign to go on with",
                    mend="give another path, or overwrite=True",
                )
        if folder.path.is_dir() and not folder.exists:
            # Hidden: a document that another driver is just writing.
            inside = {p.name for p in folder.path.iterdir() if p.name[0] != "."} - {"lock", "units"}
            if inside:
                raise CampaignError(
                    str(folder.path),
                    "the folder is not empty and holds no campaign",
                    found=sorted(inside)[:3],
                    mend="give another directory",
                )

    def _identity(self, source: Snapshot) -> dict[str, Any]:
        return {
            "format": 1,
            "source": str(self.source.resolve()),
            "generation": source.generation,
            "num_samples": len(source.active),
            "results": str(self.results.resolve()),
            "trajectory": None if self.trajectory is None else str(self.trajectory.resolve()),
            "trajectory_every": self.trajectory_every,
            "stages": _name_of(self.stages),
        }

    def _open(self, folder: CampaignFolder, source: Snapshot) -> None:
        """Start a campaign in the folder, or check that it is this one."""
        identity = self._identity(source)
        if folder.exists and self.overwrite:
            folder.clear()
        if not folder.exists:
            folder.create(identity)
            return
        before = folder.identity()
        for key in ("source", "num_samples", "generation", "trajectory", "trajectory_every"):
            if before.get(key) != identity[key]:
                raise CampaignError(
                    str(folder.path),
                    f"an earlier campaign here has another {key}",
                    found=before.get(key),
                    expected=identity[key],
                    mend="give another directory, or overwrite=True to start anew",
                )

    def _missing(self, folder: CampaignFolder, total: int) -> IntArray:
        """Samples to compute now, ascending."""
        settled = folder.finished_mask(total)
        if not self.retry_rejected:
            for reject in folder.rejects(total):
                settled[reject.dataset_index] = True
        return np.flatnonzero(~settled).astype(np.int64)

    def _run(self, source: Snapshot, folder: CampaignFolder) -> CampaignReport:
        begun = time.perf_counter()
        total = len(source.active)
        self._open(folder, source)
        folder.sweep()
        missing = self._missing(folder, total)
        settled = total - len(missing)
        with open_progress(self.progress) as progress:
            if len(missing):
                self._compute(folder, missing, source, progress)
            report = self._merge(source, folder, settled, begun, progress)
        if total and not report.finished:
            raise CampaignError(
                str(folder.path),
                f"none of {total} samples finished",
                mend="see rejects.jsonl in this folder for the reasons",
            )
        return report

    def _compute(
        self,
        folder: CampaignFolder,
        missing: IntArray,
        source: Snapshot,
        progress: Progress,
    ) -> None:
        from alchemi_xr.campaign.worker import Spec, save_spec

        run, total = folder.runs(), len(source.active)
        folder.record("start", run=run, missing=len(missing), total=total, pid=os.getpid())
        spec = Spec(
            source=str(self.source.resolve()),
            generation=source.generation,
            stages=self.stages,
            max_atoms=self.max_atoms,
            max_batch_size=self.max_batch_size or (None if self.max_atoms else _BATCH_SIZE),
            trajectory=self.trajectory is not None,
            trajectory_every=self.trajectory_every,
            max_force=self.max_force,
            device=self.device,
            one_thread=self.workers != 0,  # this process keeps its own setting
        )
        token = save_spec(folder.path, spec)
        progress.start("campaign", len(missing), "systems")
        executor = open_executor(self.workers, folder, token, device=self.device)
        try:
            units = self._units(missing, executor.slots, run)
            folder.record("plan", units=len(units), slots=executor.slots)
            finished = int(folder.finished_mask(total).sum())
            state = CampaignState(
                units,
                total=total,
                slots=executor.slots,
                finished=finished,
                rejected=total - finished - len(missing),
                limit=failure_limit(self.max_failures, total),
                max_attempts=self.max_attempts,
            )
            drive(state, executor, folder, advance=progress.advance)
        finally:
            executor.close()
            folder.sweep()
            folder.write_rejects(total)
        folder.record("computed")

    def _units(self, missing: IntArray, slots: int, run: int) -> list[Unit]:
        share = -(-len(missing) // max(slots * _UNITS_PER_WORKER, 1))
        return plan_units(missing, self.unit_size or min(max(share, 1), _MAX_UNIT), run=run)

    def _merge(
        self,
        source: Snapshot,
        folder: CampaignFolder,
        settled: int,
        begun: float,
        progress: Progress,
    ) -> CampaignReport:
        units = folder.units()
        total = len(source.active)
        finished = int(folder.finished_mask(total).sum())
        frames = sum(u.facts.frames for u in units)
        provenance = {
            "campaign": {
                "source": str(self.source),
                "generation": source.generation,
                "stages": _name_of(self.stages),
                "rejected": total - finished,
            }
        }
        stale = not folder.is_merged()
        results = self.results if finished else None
        if finished and (stale or not looks_like_store(self.results)):
            progress.start("merging results", finished, "systems")
            merge_results(
                units,
                source,
                self.results,
                overwrite=True,
                config=self.config,
                provenance=provenance,
                advance=progress.advance,
            )
        trajectory = self.trajectory if finished and frames else None
        if trajectory is not None and (stale or not looks_like_store(trajectory)):
            progress.start("merging trajectory", frames, "frames")
            merge_frames(
                units,
                total,
                trajectory,
                overwrite=True,
                config=self.config,
                provenance=provenance,
                advance=progress.advance,
            )
        if stale:
            folder.record("merged", finished=finished, rejected=total - finished)
        return CampaignReport(
            directory=self.directory,
            results=results,
            trajectory=trajectory,
            total=total,
            finished=finished,
            rejected=total - finished,
            computed=total - settled,
            steps=sum(u.facts.steps for u in units),
            frames=frames,
            units=len(units),
            lost=sum(1 for line in folder.journal() if line["event"] == "lost"),
            retries=sum(u.facts.retries for u in units),
            seconds=time.perf_counter() - begun,
        )


def _name_of(stages: Callable[[], Any]) -> str:
    """How the stages are called, for people; two runs may differ in more."""
    name = getattr(stages, "__qualname__", None) or repr(stages)
    return json.dumps(f"{getattr(stages, '__module__', '')}.{name}")[1:-1]

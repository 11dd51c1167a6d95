"""One unit on one worker: read its samples, run the stages, set bad systems aside,
commit once. A failure inside a unit is mended here (the batch goes on without the
system, or with half the size); only what kills the process is left to the driver.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch

from alchemi_xr._typing import BoolArray, IntArray
from alchemi_xr.campaign.recorder import FRAME_FIELDS, UnitRecorder, UnitSink
from alchemi_xr.campaign.results import CampaignFolder, Rejected, UnitFacts, UnitWriter
from alchemi_xr.campaign.state import Unit
from alchemi_xr.data.block import Block
from alchemi_xr.data.datapipes import AtomicDataZarrReader, Dataset
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.dynamics import BaseDynamics, FusedStage, SizeAwareSampler
from alchemi_xr.errors import CampaignError, ConfigError
from alchemi_xr.store.reader import open_store

if TYPE_CHECKING:
    from alchemi_xr.data.atomic_data import AtomicData
    from alchemi_xr.data.batch import Batch

__all__ = ["Outcome", "Spec", "is_out_of_memory", "load_spec", "run_unit", "save_spec"]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker needs to know once.

    ``stages`` builds the stage graph; everything else is plain. ``one_thread``
    is for workers that share a machine, one a core.
    """

    source: str
    generation: int
    stages: Callable[[], Any]
    max_atoms: int | None
    max_batch_size: int | None
    trajectory: bool
    trajectory_every: int
    max_force: float | None
    device: str
    one_thread: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a unit ended: ``"done"``, ``"limit"`` or ``"fatal"``."""

    key: str
    kind: str
    finished: int = 0
    rejected: int = 0
    steps: int = 0
    seconds: float = 0.0
    retries: int = 0
    reason: str = ""
    traceback: str = ""
    rejects: tuple[Rejected, ...] = ()


def save_spec(folder: Path, spec: Spec) -> str:
    """Write the spec beside the units; returns its token.

    A file, not an argument of each task: stages may hold a model of many MB,
    and a worker that comes later must find it too.
    """
    token = f"{time.time_ns():x}-{os.getpid():x}"
    partial = folder / f"spec.{token}.tmp"
    try:
        data = cloudpickle.dumps((token, spec))
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise ConfigError(
            "stages",
            f"cannot be sent to a worker ({error})",
            mend="build models, locks and files inside the function, not around it",
        ) from error
    partial.write_bytes(data)
    partial.replace(folder / "spec.pkl")
    return token


def load_spec(folder: Path, token: str) -> Spec:
    """The spec of this token.

    Raises
    ------
    CampaignError
        Another start of the campaign has replaced it.
    """
    found, spec = cloudpickle.loads((folder / "spec.pkl").read_bytes())
    if found != token:
        raise CampaignError(str(folder), "the campaign was started anew", found=found)
    assert isinstance(spec, Spec)
    return spec


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on either device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    words = ("out of memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class _BadSample(Exception):
    """A sample that cannot even be read."""

    def __init__(self, number: int, cause: Exception) -> None:
        self.number = number
        super().__init__(_one_line(cause))


class _Samples:
    """Samples of a unit as a dataset of its own: what a sampler asks for.

    Parameters
    ----------
    dataset : Dataset
    ids : int64 array, [m]
        Sample numbers of the source.
    counts : int64 array, [m, 2]
        Their atoms and edges.
    """

    def __init__(self, dataset: Dataset, ids: IntArray, counts: IntArray) -> None:
        self._dataset = dataset
        self._ids = ids
        self._counts = counts

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        try:
            return self._dataset[int(self._ids[index])]
        except Exception as error:
            raise _BadSample(int(self._ids[index]), error) from error

    def get_batch(self, indices: Sequence[int]) -> Batch:
        return self._dataset.get_batch(self._ids[np.asarray(indices, dtype=np.int64)].tolist())

    def get_metadata(self, index: int) -> tuple[int, int]:
        return int(self._counts[index, 0]), int(self._counts[index, 1])

    def get_counts(self) -> tuple[IntArray, IntArray]:
        return self._counts[:, 0], self._counts[:, 1]


class _Engine:
    """Stage graph and source of one campaign, kept by the process between units."""

    def __init__(self, folder: Path, token: str) -> None:
        self.token = token
        self.spec = load_spec(folder, token)
        device = self.spec.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and self.spec.one_thread:
            torch.set_num_threads(1)  # threads of each worker would fight for the cores
        snapshot = open_store(self.spec.source)
        if snapshot.generation != self.spec.generation:
            # Somebody wrote to the source meanwhile: sample numbers are those of the plan.
            snapshot = open_store(self.spec.source, generation=self.spec.generation)
        self.reader = AtomicDataZarrReader(snapshot)
        self.dataset = Dataset(self.reader, device=device, num_workers=0)
        active = snapshot.active
        atoms, edges = np.diff(snapshot.atoms_ptr)[active], np.diff(snapshot.edges_ptr)[active]
        self.counts: IntArray = np.stack([atoms, edges], axis=1)
        built = self.spec.stages()
        if not isinstance(built, BaseDynamics):
            raise CampaignError(
                "stages",
                "must return a dynamics or fused stage",
                found=type(built).__name__,
                expected="BaseDynamics or FusedStage",
            )
        if isinstance(built, FusedStage):
            self.fused = built
        else:
            self.fused = FusedStage([(0, built)], exit_status=built.exit_status)
        self._check_ends()
        self._init_fn, self.fused.init_fn = self.fused.init_fn, self._number
        self._drawn: IntArray = np.empty(0, dtype=np.int64)
        self.recorder = UnitRecorder(self.fused)
        outputs = set(getattr(self.fused.model.model_config, "outputs", ()))
        made: set[str] = set().union(*(s.__provides_keys__ for _, s in self.fused.sub_stages))
        source = set(self.reader.field_names)
        self.frame_fields = [n for n in FRAME_FIELDS if n in source | outputs]
        # Neighbours are the model's business and belong to one geometry.
        neighbors = {n for n, spec in FIELDS.items() if "neighbor" in n or spec.level == "edge"}
        own = {"steps", "energy_initial", "status"}
        self.result_fields = ((source | outputs | made) - neighbors) | own

    def draw_from(self, ids: IntArray) -> _Samples:
        """These samples of the source, for a sampler."""
        self._drawn = ids
        return _Samples(self.dataset, ids, self.counts[ids])

    def _number(self, batch: Batch) -> Batch | None:
        """New systems get the numbers of the source in place of those of the try.

        Hooks, and optimizers with a number a sample, then mean the same samples
        wherever a unit begins.
        """
        drawn = torch.from_numpy(self._drawn).to(batch.device)
        batch["dataset_index"] = drawn[batch["dataset_index"]]
        return batch if self._init_fn is None else self._init_fn(batch)

    def _check_ends(self) -> None:
        """Our own hook hides from the engine that nothing would end a system."""
        if self.fused.n_steps is not None or _may_end(self.fused.hooks):
            return
        for code, stage in self.fused.sub_stages:
            endless = stage.n_steps is None and stage.convergence_hook is None
            if endless and not _may_end(stage.hooks):
                raise CampaignError(
                    "stages",
                    f"nothing ends the stage of status {code} ({type(stage).__name__})",
                    mend="give it n_steps or a convergence_hook",
                )


_engine: _Engine | None = None


def _get_engine(folder: Path, token: str) -> _Engine:
    global _engine
    if _engine is None or _engine.token != token:
        _engine = None  # the old model leaves the device before the new one comes
        gc.collect()
        _engine = _Engine(folder, token)
    return _engine


def run_unit(
    directory: str, token: str, unit: Unit, scale: float = 1.0, budget: int | None = None
) -> Outcome:
    """Compute a unit and commit it.

    Parameters
    ----------
    directory : str
        Folder of the campaign.
    token : str
        Which spec.
    unit : Unit
    scale : float
        Part of the batch limits to use.
    budget : int, optional
        Samples that may fail before the unit is given up.

    Returns
    -------
    Outcome
        ``"fatal"`` when the stages cannot be built: no system is to blame.
    """
    folder = CampaignFolder(directory)
    done = folder.unit(unit.key)
    if done is not None:  # a task that Dask ran twice
        return Outcome(unit.key, "done", done.facts.finished, done.facts.rejected)
    writer = folder.begin(unit)
    try:
        try:
            engine = _get_engine(folder.path, token)
        except Exception as error:
            return Outcome(
                unit.key,
                "fatal",
                reason=f"the stages cannot be built: {_one_line(error)}",
                traceback=traceback.format_exc(),
            )
        return _UnitRun(engine, writer, unit, scale, budget).compute()
    finally:
        writer.abandon()  # after a commit nothing is left to remove


class _OverBudget(Exception):
    """More samples failed than the campaign allows."""


class _UnitRun:
    """The tries of one unit until each sample is finished or set aside.

    Inside, a *system* is a position in the unit, an *id* a sample of the source.
    """

    def __init__(
        self, engine: _Engine, writer: UnitWriter, unit: Unit, scale: float, budget: int | None
    ) -> None:
        self.engine = engine
        self.writer = writer
        self.unit = unit
        self.budget = budget
        self.ids = unit.samples()
        self.counts = engine.counts[self.ids]
        self.rejects: list[Rejected] = []
        self.retries = 0
        spec = engine.spec
        self.max_atoms = _scaled(spec.max_atoms, scale)
        self.max_systems = _scaled(spec.max_batch_size, scale)
        self.recorder = engine.recorder
        self.recorder.arm(
            self.ids,
            frames=writer.open_frames() if spec.trajectory else None,
            frame_fields=engine.frame_fields,
            every=spec.trajectory_every,
            max_force=spec.max_force,
        )
        self.sink = UnitSink(self.recorder, len(self.ids), engine.result_fields)

    def compute(self) -> Outcome:
        """All tries, then the commit."""
        start = time.perf_counter()
        try:
            self._reject_oversized()
            # A stack of sets of systems: what failed as a whole comes back in parts.
            todo = [np.arange(len(self.ids))]
            while todo:
                group = self._open(todo.pop())
                if len(group):
                    todo += self._try(group)
        except _OverBudget:
            return Outcome(
                self.unit.key,
                "limit",
                rejected=len(self.rejects),
                reason=self.rejects[-1].reason,
                rejects=tuple(self.rejects),
            )
        return self._commit(start)

    # ------------------------------------------------------------------------------ setting aside

    def _open(self, group: IntArray) -> IntArray:
        """Those of the group that are neither finished nor set aside."""
        return group[(self.recorder.finished_try[group] < 0) & ~self._rejected_mask()[group]]

    def _rejected_mask(self) -> BoolArray:
        mask = np.zeros(len(self.ids), dtype=bool)
        ids = np.array([r.dataset_index for r in self.rejects], dtype=np.int64)
        mask[np.searchsorted(self.ids, ids)] = True
        return mask

    def _reject(self, system: int, reason: str, kind: str, trace: str = "") -> None:
        number = int(self.ids[system])
        self.rejects.append(Rejected(number, reason, kind, trace, self.unit.key))
        if self.budget is not None and len(self.rejects) > self.budget:
            raise _OverBudget

    def _reject_oversized(self) -> None:
        limit = self.engine.spec.max_atoms
        if limit is None:
            return
        for system in np.flatnonzero(self.counts[:, 0] > limit):
            atoms = int(self.counts[system, 0])
            self._reject(int(system), f"{atoms} atoms are more than max_atoms={limit}", "input")

    def _reject_evicted(self) -> None:
        """Set aside what the recorder sent to the exit."""
        failed, self.sink.failed = self.sink.failed, []
        limit = self.engine.spec.max_force
        for system, step in failed:
            reason = self.recorder.reasons.get(system)
            if reason is None:
                reason = "energy or forces are not finite"
                reason += "" if limit is None else f", or a force is above {limit} eV/Å"
            self._reject(system, f"{reason} (step {step})", "non-finite")

    # -------------------------------------------------------------------------------------- tries

    def _try(self, group: IntArray) -> list[IntArray]:
        """Run a group; the sets of systems that must be tried again.

        What finished before a failure stays finished; the others start anew.
        """
        error: Exception | None = None
        trace = ""
        flight = group[:0]
        try:
            self._run(group)
        except Exception as caught:
            trace = traceback.format_exc()
            flight = self.recorder.in_flight
            # The frames of the traceback hold the batch; let its memory go.
            error = caught.with_traceback(None)
        self.recorder.end_try()
        self._reject_evicted()
        if error is None:
            return []
        self.retries += 1
        return list(self._after_error(group, flight, error, trace))

    def _run(self, group: IntArray) -> None:
        """All systems of the group through the stages, refilled in flight."""
        self.recorder.begin_try(group)
        _forget_systems(self.engine.fused)
        largest = int(self.counts[group, 0].max())
        sampler = SizeAwareSampler(
            self.engine.draw_from(self.ids[group]),
            max_atoms=None if self.max_atoms is None else max(self.max_atoms, largest, 1),
            max_batch_size=self.max_systems,
        )
        fused = self.engine.fused
        fused.sampler, fused.sinks = sampler, [self.sink]
        fused.done, fused.active_batch, fused.step_count = False, None, 0
        try:
            while not sampler.exhausted:  # a limit on the whole run may come first
                rest = fused.run()
                if rest is not None and rest.num_graphs:
                    self.sink.write(rest)
        finally:
            fused.sampler, fused.sinks = None, []

    def _after_error(
        self, group: IntArray, flight: IntArray, error: Exception, trace: str
    ) -> Iterator[IntArray]:
        """Blame somebody, or make the suspects fewer."""
        bad = _cause(error, _BadSample)
        if bad is not None:
            system = int(np.searchsorted(self.ids, bad.number))
            self._reject(system, f"cannot be read: {bad}", "input", trace)
            yield group
            return
        named = self._open(_named(error, flight))
        suspects = self._open(flight)
        suspects = suspects if len(suspects) else self._open(group)
        if is_out_of_memory(error):
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if len(suspects) > 1:
                self._halve_batch(suspects)
            else:
                self._reject(int(suspects[0]), "out of memory even alone", "memory", trace)
            yield group
            return
        if len(named) == 0 and len(suspects) == 1:
            named = suspects
        if len(named):
            for system in named:
                self._reject(int(system), _one_line(error), "error", trace)
            yield group
            return
        # Nobody is named: the halves tell. They come off the stack first; the
        # rest of the group follows with its full batch.
        half = len(suspects) // 2
        yield np.setdiff1d(group, suspects)
        yield suspects[half:]
        yield suspects[:half]

    def _halve_batch(self, suspects: IntArray) -> None:
        self.max_systems = max(len(suspects) // 2, 1)
        if self.max_atoms is not None:
            self.max_atoms = max(int(self.counts[suspects, 0].sum()) // 2, 1)

    # ------------------------------------------------------------------------------------- commit

    def _commit(self, start: float) -> Outcome:
        block = self.sink.collected()
        order = np.flatnonzero(self.recorder.finished_try >= 0)
        steps = 0
        if block is not None:
            block = _final(block)
            steps = int(block["steps"].sum())
        frame_order, frames_ptr = self.recorder.frame_order(order)
        facts = UnitFacts(
            key=self.unit.key,
            ranges=self.unit.ranges,
            finished=len(order),
            rejected=len(self.rejects),
            steps=steps,
            frames=len(frame_order),
            seconds=round(time.perf_counter() - start, 3),
            retries=self.retries,
        )
        rejects = sorted(self.rejects, key=lambda r: r.dataset_index)
        self.writer.commit(
            block,
            self.ids[order],
            rejects,
            facts,
            frame_order=frame_order,
            frames_ptr=frames_ptr,
        )
        return Outcome(
            key=self.unit.key,
            kind="done",
            finished=facts.finished,
            rejected=facts.rejected,
            steps=facts.steps,
            seconds=facts.seconds,
            retries=facts.retries,
        )


def _final(block: Block) -> Block:
    """Final states as they are kept: scalars flat, ``fmax`` of the forces as they are."""
    for name in ("steps", "energy_initial"):
        block = block.with_field(name, block[name].reshape(-1), "system")
    block.units["energy_initial"] = "eV"
    if "forces" in block:
        norms = np.linalg.norm(block["forces"].astype(np.float64), axis=1)
        # A system without atoms has no force on any of them.
        fmax = segment_reduce(norms, block.atoms_ptr, "max", initial=0.0)
        block = block.with_field("fmax", fmax[:, None], "system")
    return block.select_fields([n for n in block.names if n != "dataset_index"])


def _scaled(limit: int | None, scale: float) -> int | None:
    return None if limit is None else max(int(limit * scale), 1)


def _cause(error: BaseException, kind: type[_BadSample]) -> _BadSample | None:
    """The first of a kind in the chain of causes."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kind):
            return seen
        seen = seen.__cause__
    return None


def _named(error: Exception, flight: IntArray) -> IntArray:
    """Systems that an error blames by their slots in the batch."""
    slots = np.asarray(getattr(error, "systems", ()), dtype=np.int64).reshape(-1)
    return flight[slots[(slots >= 0) & (slots < len(flight))]]


def _forget_systems(fused: FusedStage) -> None:
    """Tell models that hold something for each system that others come now.

    Without it a system tried again would start from what its first try left.
    """
    for _, stage in fused.sub_stages:
        reset = getattr(stage.model, "reset_systems", None)
        if reset is not None:
            reset()


def _may_end(hooks: Iterable[Any]) -> bool:
    """Whether one of these hooks could set the status of a system; one that only looks cannot."""
    return any(not getattr(hook, "read_only", False) for hook in hooks)

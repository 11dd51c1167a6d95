"""What a unit remembers while its stages run: first energies, failures, frames.

One hook for the whole batch and one sink. What belongs to a system is kept in
bookkeeping fields of the batch, so it follows the system through refills and
nothing waits for the device; only frames, where they are wanted, are copied to
the host in every step that is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alchemi_xr._typing import BoolArray, IntArray, Level, NDArray
from alchemi_xr.campaign.blocks import BlockFolderWriter
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr, row_indices
from alchemi_xr.data.fields import FIELDS, fill_for
from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.dynamics.sinks import DataSink

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics import FusedStage

__all__ = ["FRAME_FIELDS", "UnitRecorder", "UnitSink"]

#: Fields of a frame, where the batch has them.
FRAME_FIELDS = ("atomic_numbers", "positions", "forces", "energy", "cell", "pbc")


def _numpy(tensor: torch.Tensor) -> NDArray:
    return tensor.detach().cpu().numpy()


def _column(batch: Batch, value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((batch.num_graphs, 1), value, dtype=dtype, device=batch.device)


def _hole(name: str, rows: int) -> NDArray:
    """Rows of a field of the table that nothing has."""
    spec = FIELDS[name]
    dtype = np.dtype({"f": np.float64, "b": np.bool_}.get(spec.kind, np.int64))
    tail = [n for n in spec.tail if isinstance(n, int)]
    return np.full((rows, *tail), fill_for(dtype), dtype)


class UnitRecorder:
    """Hook of a campaign, registered once on the stages and re-armed for each unit.

    Before the compute it takes note of the batch (to know who is in flight when
    the model raises). After it, a system whose energy or forces are no numbers
    is sent to the exit with a mark, alone: its batch goes on undisturbed.

    Parameters
    ----------
    fused : FusedStage
    """

    frequency = 1
    stage = None

    def __init__(self, fused: FusedStage) -> None:
        self._exit_status = fused.exit_status
        fused.register_bookkeeping_key(
            "energy_initial", lambda batch: _column(batch, torch.nan, torch.float64)
        )
        fused.register_bookkeeping_key("failed_step", lambda batch: _column(batch, -1, torch.int64))
        fused.register_fused_hook(self)
        self._batch: Batch | None = None
        self.arm(np.empty(0, dtype=np.int64))

    def arm(
        self,
        ids: IntArray,
        *,
        frames: BlockFolderWriter | None = None,
        frame_fields: Iterable[str] = FRAME_FIELDS,
        every: int = 1,
        max_force: float | None = None,
    ) -> None:
        """Forget the last unit.

        Parameters
        ----------
        ids : int64 array, [n]
            Samples of the unit, ascending.
        frames : BlockFolderWriter, optional
            Where frames go; none are kept without it.
        frame_fields : iterable of str
            What a frame holds: of the field table, the same for all frames.
        every : int
            Steps from one frame to the next.
        max_force : float, optional, eV/Å
            A system with a larger force on an atom has failed.
        """
        size = len(ids)
        self._ids = ids
        self.finished_try: IntArray = np.full(size, -1, dtype=np.int64)
        self.reasons: dict[int, str] = {}
        self._last_frame: IntArray = np.full(size, -1, dtype=np.int64)
        self._try = 0
        self._every = every
        self._max_force = max_force
        self._frames = frames
        self._frame_fields = tuple(frame_fields)
        self._index: list[NDArray] = []

    def begin_try(self, members: IntArray) -> None:
        """These systems start (again) from their first step.

        Parameters
        ----------
        members : int64 array, [m]
            Their positions in the unit.
        """
        self._last_frame[members] = -1
        self._try += 1
        self._batch = None

    def end_try(self) -> None:
        """Let go of the batch."""
        self._batch = None

    def systems(self, batch: Batch) -> IntArray:
        """Positions in the unit of the systems of a batch, int64 [B]."""
        numbers = _numpy(batch["dataset_index"]).reshape(-1).astype(np.int64)
        return np.searchsorted(self._ids, numbers)

    @property
    def in_flight(self) -> IntArray:
        """Positions in the unit of the systems last handed to the model."""
        return self._ids[:0] if self._batch is None else self.systems(self._batch)

    def _runs_on_stage(self, stage: Any) -> bool:
        return stage in (DynamicsStage.BEFORE_COMPUTE, DynamicsStage.AFTER_COMPUTE)

    def __call__(self, ctx: Any, stage: Any) -> None:
        batch = ctx.batch
        self._batch = batch
        if stage is DynamicsStage.BEFORE_COMPUTE:
            return
        with torch.no_grad():
            steps = batch["steps"] + (~batch["needs_prime"]).to(torch.int64)
            if "energy" in batch:
                first = batch["needs_prime"] & (batch["steps"] == 0)
                initial = batch["energy_initial"]
                energy = batch["energy"].reshape(initial.shape).to(initial.dtype)
                initial.copy_(torch.where(first, energy, initial))
            self._evict(batch, steps)
        failures = getattr(ctx.model, "failures", None)
        if failures:
            systems = self.systems(batch)
            self.reasons.update({int(systems[slot]): why for slot, why in failures.items()})
        if self._frames is not None:
            self._record_due(batch, _numpy(steps).reshape(-1))

    def _evict(self, batch: Batch, steps: torch.Tensor) -> None:
        """Mark failed systems and send them to the exit; no look by the host."""
        status = batch["status"]
        bad = torch.zeros_like(status, dtype=torch.bool)
        if "energy" in batch:
            bad |= ~torch.isfinite(batch["energy"]).reshape(bad.shape)
        if "forces" in batch:
            forces = batch["forces"]
            wild = ~torch.isfinite(forces).all(dim=1)
            if self._max_force is not None:
                wild |= torch.linalg.vector_norm(forces, dim=1) > self._max_force
            hits = torch.zeros(len(bad), dtype=torch.int32, device=bad.device)
            hits.index_add_(0, batch.batch_idx.long(), wild.to(torch.int32))
            bad |= (hits > 0).reshape(bad.shape)
            # An update that still comes in this step must not make the others'
            # neighbour lists meet a NaN.
            now = (bad & (status < self._exit_status)).reshape(-1)
            forces.masked_fill_(now[batch.batch_idx.long()].reshape(-1, 1), 0.0)
        bad &= status < self._exit_status
        batch["failed_step"].copy_(torch.where(bad, steps, batch["failed_step"]))
        status.masked_fill_(bad, self._exit_status)

    # ------------------------------------------------------------------------------------ frames

    def _record_due(self, batch: Batch, steps: IntArray) -> None:
        systems = self.systems(batch)
        active = _numpy(batch["status"]).reshape(-1) < self._exit_status
        # A system that only gets fresh forces on entering a stage shows no new step.
        new = steps > self._last_frame[systems]
        self._record(batch, active & new & (steps % self._every == 0), systems, steps)

    def record_last(self, batch: Batch, mask: BoolArray) -> None:
        """The last frame of systems that leave, where it was not due."""
        if self._frames is None:
            return
        systems, steps = self.systems(batch), _numpy(batch["steps"]).reshape(-1)
        self._record(batch, mask & (steps > self._last_frame[systems]), systems, steps)

    def _record(self, batch: Batch, mask: BoolArray, systems: IntArray, steps: IntArray) -> None:
        chosen = np.flatnonzero(mask)
        if self._frames is None or len(chosen) == 0:
            return
        rows, ptr = row_indices(_numpy(batch.atoms_ptr).astype(np.int64), chosen)
        arrays: dict[str, NDArray] = {}
        levels: dict[str, Level] = {}
        present: dict[str, BoolArray] = {}
        for name in self._frame_fields:
            levels[name] = FIELDS[name].level
            picked = rows if levels[name] == "atom" else chosen
            if name in batch:
                arrays[name] = _numpy(batch[name])[picked]
                has = _numpy(batch.has(name))[chosen]
            else:
                # No system in flight has it, others of the unit may.
                arrays[name] = _hole(name, len(picked))
                has = np.zeros(len(chosen), dtype=bool)
            if not has.all():
                present[name] = has
        arrays["step"], levels["step"] = steps[chosen], "system"
        mine = systems[chosen]
        self._last_frame[mine] = steps[chosen]
        no_edges = np.zeros(len(chosen) + 1, dtype=np.int64)
        self._frames.append(Block(ptr, no_edges, arrays, levels, present))
        tries = np.full(len(mine), self._try)
        self._index.append(np.stack([mine, steps[chosen], tries], axis=1))

    def frame_order(self, finished: IntArray) -> tuple[IntArray, IntArray]:
        """Frames of the finished systems by system and step, and their pointer.

        Frames of tries that came to nothing are left out.
        """
        if not self._index:
            return np.empty(0, dtype=np.int64), np.zeros(len(finished) + 1, dtype=np.int64)
        index = np.concatenate(self._index)
        good = np.flatnonzero(index[:, 2] == self.finished_try[index[:, 0]])
        order = good[np.lexsort((index[good, 1], index[good, 0]))]
        counts = np.bincount(index[order, 0], minlength=len(self.finished_try))[finished]
        return order, counts_to_ptr(counts)

    def finish(self, systems: IntArray) -> None:
        """These systems have a result, of this try."""
        self.finished_try[systems] = self._try


class UnitSink(DataSink):
    """Takes finished systems to the host as blocks, and failed ones by name.

    Parameters
    ----------
    recorder : UnitRecorder
    capacity : int
        Samples of the unit: it never fills before they all are there.
    fields : set of str
        What to keep of a batch.

    Attributes
    ----------
    failed : list of (int, int)
        Position in the unit and step of systems that were evicted.
    """

    def __init__(self, recorder: UnitRecorder, capacity: int, fields: Iterable[str]) -> None:
        super().__init__(max(capacity, 1))
        self._recorder = recorder
        self._wanted = frozenset(fields)
        self._blocks: list[Block] = []
        self._count = 0
        self.failed: list[tuple[int, int]] = []

    def _write(self, batch: Batch) -> None:
        failed_step = _numpy(batch["failed_step"]).reshape(-1)
        systems = self._recorder.systems(batch)
        good = failed_step < 0
        for slot in np.flatnonzero(~good):
            self.failed.append((int(systems[slot]), int(failed_step[slot])))
        if not good.any():
            return
        self._recorder.record_last(batch, good)
        self._recorder.finish(systems[good])
        block = batch.to("cpu").to_block()
        block = block.select_fields([n for n in block.names if n in self._wanted])
        block = block.with_field("dataset_index", systems[:, None], "system")
        self._blocks.append(block.take(np.flatnonzero(good)))
        self._count += int(good.sum())

    def collected(self) -> Block | None:
        """All that finished, by position in the unit; None when nothing did."""
        if not self._blocks:
            return None
        block = Block.concat(self._blocks)
        return block.take(np.argsort(block["dataset_index"].reshape(-1), kind="stable"))

    def _read(self) -> Batch:
        from alchemi_xr.data.batch import Batch as _Batch

        block = self.collected()
        assert block is not None  # read() has looked
        return _Batch.from_block(block)

    def zero(self) -> None:
        self._blocks = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

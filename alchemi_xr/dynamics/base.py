"""One stage of a simulation: the loop around ``pre_update``, one model call and
``post_update``.

What a system carries from step to step lives in fields of its batch
(bookkeeping), so that a system may change place, batch or process between two
steps. The loop waits for the device only where it has to decide something on
the host. Many stages at once are `fused`, refilling is `refill`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from alchemi_xr.data.fields import FIELDS
from alchemi_xr.dynamics.bookkeeping import Guard, InitFn, check_count, put, zero_output
from alchemi_xr.dynamics.convergence import ConvergenceHook, derive
from alchemi_xr.dynamics.hook import (
    DynamicsContext,
    DynamicsStage,
    Hook,
    HookContext,
    HookRegistryMixin,
)
from alchemi_xr.dynamics.options import BufferConfig, EngineOptions
from alchemi_xr.errors import ConfigError, DynamicsError
from alchemi_xr.models.base import BaseModelMixin

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.fused import FusedStage
    from alchemi_xr.dynamics.integrators.demo import DemoDynamics
    from alchemi_xr.dynamics.sampler import SizeAwareSampler
    from alchemi_xr.dynamics.sinks import DataSink

__all__ = [
    "BaseDynamics",
    "BufferConfig",
    "ConvergenceHook",
    "DataSink",
    "DemoDynamics",
    "DynamicsContext",
    "DynamicsStage",
    "FusedStage",
    "Hook",
    "HookContext",
    "SizeAwareSampler",
]

_Self = TypeVar("_Self", bound="BaseDynamics")


class BaseDynamics(EngineOptions, HookRegistryMixin):
    """A stage: subclasses write `pre_update` and `post_update`.

    A run primes the forces (one model call that is no step), then steps:
    BEFORE_STEP · BEFORE_PRE_UPDATE, `pre_update`, AFTER_PRE_UPDATE ·
    BEFORE_COMPUTE, `compute`, AFTER_COMPUTE · BEFORE_POST_UPDATE,
    `post_update`, AFTER_POST_UPDATE · AFTER_STEP · ON_CONVERGE. A system that
    has converged, or whose ``status`` is at ``exit_status``, is left as it is.

    State that a system carries from step to step belongs in a field of the
    batch, announced with `register_bookkeeping_key`; an attribute of the
    integrator does not follow a refill.

    Parameters
    ----------
    model : BaseModelMixin
        Called as ``model(batch)`` once a step.
    hooks : list of Hook, optional
    convergence_hook : ConvergenceHook or dict, optional
        Ends a system; without it only the number of steps does.
    n_steps : int, optional
        Steps of a run; in a fused stage or with a sampler, steps of each system.
    exit_status : int
        A system whose status has come so far is finished.
    reprime_on_entry : bool
        In a fused stage: systems that enter get fresh forces first.
    prior_rank, next_rank : int or None
        Neighbours in a pipeline of ranks; -1 unset, None the end.
    sinks : list of DataSink, optional
        Where finished systems go, the first with room first.
    active_batch : Batch, optional
    max_batch_size : int
        Most systems held when they come from another rank.
    done : bool
    sampler : SizeAwareSampler, optional
        Where new systems come from (in-flight batching).
    refill_frequency : int
        Steps between two looks for finished systems to replace.
    init_fn : callable, optional
        Called with each batch of systems that the sampler brings, before their
        first forces; may return another batch.
    device_type : str, optional
        ``"cuda"`` or ``"cpu"``; by default that of the model.
    comm_mode : {"async_recv", "sync", "fully_async"}
    buffer_config : BufferConfig or dict, optional
    debug_mode : bool
    """

    __needs_keys__: ClassVar[set[str]] = set()
    __provides_keys__: ClassVar[set[str]] = set()

    #: Fields that an update may change and that are put back for systems outside its mask.
    _updated_fields: ClassVar[tuple[str, ...]] = ("positions", "velocities", "cell", "momenta")
    #: True for an update that itself leaves systems outside ``active_mask`` alone.
    _masks_itself: ClassVar[bool] = False

    def __init__(
        self,
        model: BaseModelMixin,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | Mapping[str, Any] | None = None,
        n_steps: int | None = None,
        exit_status: int = 1,
        *,
        reprime_on_entry: Any = False,
        prior_rank: int | None = -1,
        next_rank: int | None = -1,
        sinks: Sequence[DataSink] | None = None,
        active_batch: Batch | None = None,
        max_batch_size: int = 100,
        done: bool = False,
        sampler: SizeAwareSampler | None = None,
        refill_frequency: int = 1,
        init_fn: Callable[[Batch], Batch | None] | None = None,
        device_type: str | None = None,
        comm_mode: str = "async_recv",
        buffer_config: BufferConfig | Mapping[str, int] | None = None,
        debug_mode: bool = False,
    ) -> None:
        if not isinstance(model, BaseModelMixin):
            raise TypeError(
                f"model must be a BaseModelMixin, found {type(model).__name__}. "
                "Mend: wrap it in a model of alchemi_xr.models"
            )
        if isinstance(convergence_hook, Mapping):
            convergence_hook = ConvergenceHook(**convergence_hook)
        check_count(type(self).__name__, "n_steps", n_steps, optional=True)
        self.model: Any = model
        self.convergence_hook = convergence_hook
        self.n_steps = n_steps
        self.exit_status = exit_status
        self.reprime_on_entry = reprime_on_entry
        self._init_options(
            prior_rank=prior_rank,
            next_rank=next_rank,
            sinks=sinks,
            active_batch=active_batch,
            max_batch_size=max_batch_size,
            done=done,
            sampler=sampler,
            refill_frequency=refill_frequency,
            init_fn=init_fn,
            device_type=device_type,
            comm_mode=comm_mode,
            buffer_config=buffer_config,
            debug_mode=debug_mode,
        )
        self.step_count = 0
        self.current_hook_stage: DynamicsStage | None = None
        self.active_mask: torch.Tensor | None = None
        self._atoms_of: tuple[torch.Tensor, torch.Tensor] | None = None
        self.stream: Any = None
        self._stream_context: Any = None
        self._frozen: torch.Tensor | None = None
        self._converged: torch.Tensor | None = None
        self._primed = False
        self._compiled: Callable[..., Any] | None = None
        self._last_outputs: dict[str, torch.Tensor] = {}
        self._bookkeeping: dict[str, tuple[InitFn, str]] = {}
        self._init_hooks(hooks)

    # ---------------------------------------------------------------- what a subclass writes

    def pre_update(self, batch: Batch) -> None:
        """First half of a step, before the model call; changes ``batch`` in place."""

    def post_update(self, batch: Batch) -> None:
        """Second half of a step, after the model call; changes ``batch`` in place."""

    def register_bookkeeping_key(self, key: str, init_fn: InitFn, *, level: str = "system") -> None:
        """Give every system a field that follows it through refills.

        Parameters
        ----------
        key : str
        init_fn : callable
            From a batch of new systems to the first values, [B, ...] or [V, ...].
        level : {"system", "atom"}
        """
        self._bookkeeping[key] = (init_fn, level)

    # ---------------------------------------------------------------- composition

    def __add__(self, other: Any) -> FusedStage:
        """Stages that share one batch and one model call a step."""
        from alchemi_xr.dynamics.composition import compose

        return compose(self, other)

    # ---------------------------------------------------------------- running

    def run(self, batch: Batch | None = None, n_steps: int | None = None) -> Batch | None:
        """Simulate, in place, and return the batch.

        Without a sampler: the given steps, or fewer when all systems have
        converged. With one, systems come and go and each has ``self.n_steps``
        of its own; ``n_steps`` is then the most steps of the whole, and the
        answer is None when everything has been simulated.

        Parameters
        ----------
        batch : Batch, optional
            Not needed with a sampler.
        n_steps : int, optional
            Instead of ``self.n_steps``.

        Raises
        ------
        DynamicsError, ValueError
            There is nothing to run, or no number of steps.
        """
        if self.inflight_mode:
            from alchemi_xr.dynamics.composition import run_inflight

            return run_inflight(self, batch, n_steps)
        batch = self.active_batch if batch is None else batch
        if batch is None:
            raise ConfigError(type(self).__name__, "No batch provided and no sampler configured")
        total = self.n_steps if n_steps is None else n_steps
        if total is None:
            raise ConfigError(
                type(self).__name__,
                "No step count provided",
                mend="run(batch, n_steps=...) or n_steps=... in the constructor",
            )
        check_count(type(self).__name__, "n_steps", total)
        self._ensure_fields(batch)
        if self.convergence_hook is not None:
            self._frozen = torch.zeros(batch.num_graphs, dtype=torch.bool, device=batch.device)
        with self._session():
            try:
                if "status" in batch and bool((~self._active(batch)).all()):
                    return batch
                self._prime(batch)
                for _ in range(total):
                    checked = self._take_step(batch)
                    if checked and not bool(self._active(batch).any()):
                        break
            finally:
                self._frozen = None
        return batch

    def step(self, batch: Batch) -> tuple[Batch, torch.Tensor | None]:
        """One step; the batch and the numbers of the systems that converged, if any.

        Outside of a run nothing is primed, and a system that converged goes on
        unless its status says that it is finished.
        """
        self._ensure_fields(batch)
        self._converged = None
        self._take_step(batch)
        if self._converged is None:
            return batch, None
        indices = self._converged.nonzero().reshape(-1)
        return batch, indices if len(indices) else None

    def _take_step(self, batch: Batch) -> bool:
        """One step; True when convergence was looked at."""
        active = self._active(batch)
        frozen = Guard(batch, self._updated_fields) if self._hooks_may_move(active) else None
        self._fire(DynamicsStage.BEFORE_STEP, batch)
        self._fire(DynamicsStage.BEFORE_PRE_UPDATE, batch)
        self._update(self.pre_update, batch, active)
        self._fire(DynamicsStage.AFTER_PRE_UPDATE, batch)
        # Twice: the model must see finished systems where they will stay.
        if frozen is not None and active is not None:
            frozen.restore_except(active)
        self._fire(DynamicsStage.BEFORE_COMPUTE, batch)
        self.compute(batch)
        self._fire(DynamicsStage.AFTER_COMPUTE, batch)
        self._fire(DynamicsStage.BEFORE_POST_UPDATE, batch)
        self._update(self.post_update, batch, active)
        self._fire(DynamicsStage.AFTER_POST_UPDATE, batch)
        if frozen is not None and active is not None:
            frozen.restore_except(active)
        self._derive(batch, active)
        self._fire(DynamicsStage.AFTER_STEP, batch)
        checked = self._check_convergence(batch, active)
        self.step_count += 1
        return checked

    def _check_convergence(self, batch: Batch, active: torch.Tensor | None) -> bool:
        hook = self.convergence_hook
        if hook is None or self.step_count % hook.frequency:
            return False
        converged = hook.mask(batch)
        if active is not None and (self._frozen is not None or self.inflight_mode):
            converged = converged & active
        self._converged = converged
        if self._frozen is not None:
            self._frozen = self._frozen | converged
        if self.inflight_mode and "status" in batch:
            status = batch["status"]
            status.masked_fill_(converged.reshape(status.shape), self.exit_status)
        if self._hooks_at(DynamicsStage.ON_CONVERGE, self.step_count) and bool(converged.any()):
            self._fire(DynamicsStage.ON_CONVERGE, batch, converged)
        return True

    def _active(self, batch: Batch) -> Any:
        """Systems that move in this step, bool [B]; None = all."""
        active = None if self._frozen is None else ~self._frozen
        if "status" in batch:
            open_ = batch["status"].reshape(-1) < self.exit_status
            active = open_ if active is None else active & open_
        elif self.convergence_hook is None:
            return None  # nothing can freeze: spare the guard
        return active

    # ---------------------------------------------------------------- parts of a step

    def compute(self, batch: Batch) -> None:
        """One model call; its outputs go into the fields of the batch.

        An existing field keeps its dtype; an absent one of the field table is
        made. An output of another name is written where the batch has such a
        field already, as its level is not known else.

        Raises
        ------
        DynamicsError
            An output that the integrator needs is missing, or one has the wrong
            shape.
        """
        model = self._compiled if self._compiled is not None else self.model
        outputs = model(batch)
        found = {k: v.detach() for k, v in outputs.items() if isinstance(v, torch.Tensor)}
        missing = sorted(self._needed_outputs() - set(found))
        if missing:
            raise DynamicsError(
                type(self.model).__name__,
                f"the model gives no {', '.join(missing)}, which {type(self).__name__} needs",
                found=sorted(found),
            )
        with torch.no_grad():
            for name in ("positions", "cell"):
                if name not in batch or not batch[name].requires_grad:
                    continue
                if batch[name].is_leaf:
                    batch[name].requires_grad_(False)
                else:
                    batch[name] = batch[name].detach()
            for name, value in found.items():
                self._write_output(batch, name, value)
        self._last_outputs = found

    def _needed_outputs(self) -> set[str]:
        return set(self.__needs_keys__)

    @staticmethod
    def _write_output(batch: Batch, name: str, value: torch.Tensor) -> None:
        if name in batch:
            target = batch[name]
            if value.numel() != target.numel():
                raise DynamicsError(
                    "compute",
                    f"the model's {name!r} has the wrong shape",
                    found=list(value.shape),
                    expected=list(target.shape),
                )
            target.copy_(value.reshape(target.shape))
            if batch.present:
                batch.set(name, target, level=batch.level_of(name))  # every system has it now
        elif name in FIELDS:
            batch.set(name, value.clone(), level=FIELDS[name].level)

    def _prime(self, batch: Batch) -> None:
        """Fresh forces before the first step; no step is counted."""
        self._fire(DynamicsStage.BEFORE_COMPUTE, batch)
        self.compute(batch)
        self._fire(DynamicsStage.AFTER_COMPUTE, batch)
        self._primed = True

    def masked_update(self, batch: Batch, mask: torch.Tensor) -> None:
        """Both updates, on the systems of a mask only, bool [B]."""
        self._update(self.pre_update, batch, mask)
        self._update(self.post_update, batch, mask)

    def _update(
        self, update: Callable[[Batch], None], batch: Batch, active: torch.Tensor | None
    ) -> None:
        """An update of which systems outside ``active`` see nothing.

        The mask stands in ``self.active_mask`` meanwhile (None = all).
        """
        guard = None
        if active is not None and not self._masks_itself:
            guard = Guard(batch, {*self._updated_fields, *self._bookkeeping})
        self.active_mask = active
        try:
            with torch.no_grad():
                update(batch)
                if guard is not None and active is not None:
                    guard.restore_except(active)
        finally:
            self.active_mask = None

    def active_atoms(self, batch: Batch) -> torch.Tensor | None:
        """Atoms that the update at hand may move, bool [V]; None = all."""
        mask = self.active_mask
        if mask is None:
            return None
        # Both updates of a step have the same mask: its atoms are found once.
        if self._atoms_of is None or self._atoms_of[0] is not mask:
            self._atoms_of = (mask, mask[batch.batch_idx.long()])
        return self._atoms_of[1]

    def _hooks_may_move(self, active: torch.Tensor | None) -> bool:
        """Whether a hook could change systems that have finished."""
        return active is not None and any(not getattr(h, "read_only", False) for h in self.hooks)

    def _fire(
        self, stage: DynamicsStage, batch: Batch, converged: torch.Tensor | None = None
    ) -> None:
        hooks = self._hooks_at(stage, self.step_count)
        self.current_hook_stage = stage
        if not hooks:
            return
        ctx = self._context(batch, self.step_count, converged)
        for hook in hooks:
            hook(ctx, stage)

    def _context(
        self, batch: Batch, step_count: int, converged: torch.Tensor | None = None
    ) -> DynamicsContext:
        return DynamicsContext(
            batch=batch,
            model=self.model,
            global_rank=self.global_rank,
            workflow=self,
            step_count=step_count,
            converged_mask=converged,
        )

    # ---------------------------------------------------------------- fields of the engine

    def _asked(self) -> set[str]:
        """Derived fields that a criterion or a hook wants in this step."""
        asked: set[str] = set()
        for hook in (self.convergence_hook, *self.hooks):
            asked |= set(getattr(hook, "needs", None) or ())
        return asked

    def _derive(self, batch: Batch, active: torch.Tensor | None) -> None:
        """Bring ``fmax`` and ``energy_change`` up to date where someone asks."""
        asked = self._asked()
        with torch.no_grad():
            if "fmax" in asked:
                put(batch, "fmax", derive(batch, "fmax"))
            if "energy_change" not in asked or "energy" not in batch:
                return
            energy = batch["energy"].detach()
            for name in ("energy_change", "energy_previous"):
                if name not in batch:
                    put(batch, name, torch.full_like(energy, torch.inf))
            # |E - inf| = inf: the first step of a system has no change to show.
            previous = batch["energy_previous"]
            change = (energy - previous).abs()
            if active is not None:
                column = active.reshape(-1, 1)
                change = torch.where(column, change, batch["energy_change"])
                energy = torch.where(column, energy, previous)
            put(batch, "energy_change", change)
            put(batch, "energy_previous", energy)

    def _keys(self) -> dict[str, tuple[InitFn, str]]:
        """All bookkeeping that a batch needs before a step."""
        return dict(self._bookkeeping)

    def _ensure_fields(self, batch: Batch, *, new: bool = False) -> None:
        """Make the fields that are absent; ``new`` systems get all of them afresh."""
        for key, (init_fn, level) in self._keys().items():
            if new or key not in batch:
                batch.set(key, init_fn(batch), level=level)
        for key in sorted(self._needed_outputs()):
            if key not in batch and key in FIELDS:
                batch.set(key, zero_output(batch, key), level=FIELDS[key].level)

    def admit(self, batch: Batch) -> Batch:
        """New systems made ready: ``init_fn``, then bookkeeping afresh.

        What a sample brings of an earlier run (status, counters) does not count.
        """
        if self.init_fn is not None:
            made = self.init_fn(batch)
            batch = batch if made is None else made
        for key in ("energy_change", "energy_previous", "fmax"):
            if key in batch:
                batch[key].fill_(torch.inf)
        self._ensure_fields(batch, new=True)
        if "needs_prime" in batch:
            batch["needs_prime"].fill_(True)
        return batch

    # ---------------------------------------------------------------- refilling

    def refill_check(self, batch: Batch, exit_status: int) -> Batch | None:
        """Hand finished systems to the sinks and take others from the sampler.

        Parameters
        ----------
        batch : Batch
        exit_status : int
            Systems with this status, or one above, are finished.

        Returns
        -------
        Batch or None
            The same object when nothing is finished, None when nothing is left.

        Raises
        ------
        DynamicsError
            There is no sampler, or the sinks are full.
        """
        from alchemi_xr.dynamics.refill import refill

        return refill(self, batch, exit_status)

    _refill_check = refill_check

    # ---------------------------------------------------------------- begin and end

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Hooks open inside, closed afterwards."""
        try:
            self._enter_hooks()
            yield
        except BaseException:
            # The failure of the run is the one to tell; closing comes second.
            with suppress(Exception):
                self._exit_hooks()
            raise
        else:
            self._exit_hooks()
        finally:
            self._primed = False
            self.current_hook_stage = None

    def __enter__(self: _Self) -> _Self:
        """On CUDA, work in a stream of its own until the block ends."""
        if self.device_type == "cuda" and torch.cuda.is_available():
            self.stream = torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self._stream_context = torch.cuda.stream(self.stream)
            self._stream_context.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._stream_context is not None:
            self._stream_context.__exit__(*exc)
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self._stream_context = self.stream = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={type(self.model).__name__}, n_steps={self.n_steps})"


def __getattr__(name: str) -> Any:
    """Engine classes that live beside this module, under the name they had in one file."""
    from alchemi_xr import dynamics

    if name in dynamics.__all__:
        return getattr(dynamics, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

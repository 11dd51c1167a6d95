"""Many stages on one batch, with one model call a step.

The ``status`` of a system says in which stage it is. A system leaves a stage
when its criterion is met or its steps there are used up, and goes to the next;
past the last one it has graduated and is no longer moved. What is decided for
each system is decided on the device; the host only looks when it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from alchemi_xr.dynamics.base import BaseDynamics
from alchemi_xr.dynamics.bookkeeping import Guard, InitFn, column
from alchemi_xr.dynamics.compiling import compile_model
from alchemi_xr.dynamics.composition import check_sub_stages, migration_rules, reprime_codes
from alchemi_xr.dynamics.convergence import ConvergenceHook
from alchemi_xr.dynamics.hook import DynamicsContext, DynamicsStage, Hook
from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["FusedStage"]

# What a hook of one stage may not change for systems of another.
_SCOPED = ("positions", "velocities", "momenta", "cell", "forces", "energy", "stress", "virial")
_FIRST_STAGES = frozenset(
    {
        DynamicsStage.BEFORE_STEP,
        DynamicsStage.BEFORE_PRE_UPDATE,
        DynamicsStage.BEFORE_COMPUTE,
        DynamicsStage.BEFORE_POST_UPDATE,
    }
)


class FusedStage(BaseDynamics):
    """Stages that share a batch, each for the systems that have its status.

    A step: pre-updates of all stages · one model call · post-updates ·
    AFTER_STEP hooks · migration · ON_CONVERGE hooks. A system moves on when the
    ``convergence_hook`` of its stage says so, or after the stage's ``n_steps``
    of its own; a stage with neither keeps its systems (there is no hidden
    threshold). Hooks of a stage fire whether or not a system is in it and act
    on its systems only; `register_fused_hook` is for the whole batch. Before
    a ``BEFORE_*`` point the hooks of the whole batch come first, at the others
    last.

    New systems (first batch and refills) get their first forces in a model
    call that counts no step for them, so a system goes the same way in a
    refilled batch as alone.

    Parameters
    ----------
    sub_stages : list of (int, BaseDynamics)
        Status code and stage, in the order that systems go through.
    entry_status : int
        Status of a new system.
    exit_status : int
        Status of a finished one; -1: one above the codes.
    compile_step : bool
        Compile the model call with ``torch.compile``.
    compile_kwargs : dict, optional
        Its keywords.
    init_fn : callable, optional
        See `BaseDynamics`.
    reprime_on_entry : list of int, optional
        Codes of stages whose entering systems get fresh forces first: they sit
        out one pre- and post-update, which counts no step.
    hooks, n_steps, sinks, sampler, refill_frequency, **base
        See `BaseDynamics`; ``n_steps`` is the most steps of a run. A sampler, its
        frequency, sinks and ``init_fn`` are taken from the first stage that
        has them when they are not given here.

    Attributes
    ----------
    step_count : int
        Model calls that moved something; bookkeeping fields of the batch are
        ``status``, ``system_id``, ``n_steps_counter_<code>``, ``steps`` (all the
        steps a system has made) and, inside a run, ``needs_prime``.
    """

    def __init__(
        self,
        sub_stages: Sequence[tuple[int, BaseDynamics]],
        *,
        entry_status: int = 0,
        exit_status: int = -1,
        compile_step: bool = False,
        compile_kwargs: Mapping[str, Any] | None = None,
        init_fn: Callable[[Batch], Batch | None] | None = None,
        reprime_on_entry: Iterable[int] | None = None,
        refill_frequency: int | None = None,
        device_type: str | None = None,
        **base: Any,
    ) -> None:
        sub_stages = list(sub_stages)
        check_sub_stages(sub_stages)
        stages = [stage for _, stage in sub_stages]
        kinds = sorted({stage.device_type for stage in stages})
        if len(kinds) > 1:
            raise ConfigError(
                "FusedStage", "all stages must have the same device_type", found=kinds
            )
        sampled = next((s for s in stages if s.sampler is not None), None)
        if base.get("sampler") is None and sampled is not None:
            base["sampler"] = sampled.sampler
            refill_frequency = refill_frequency or sampled.refill_frequency
        if not base.get("sinks"):
            base["sinks"] = next((s.sinks for s in stages if s.sinks), None)
        if init_fn is None:
            init_fn = next((s.init_fn for s in stages if s.init_fn is not None), None)
        self.sub_stages: list[tuple[int, BaseDynamics]] = sub_stages
        self.codes = [code for code, _ in sub_stages]
        past = max(len(sub_stages), max(self.codes) + 1)
        super().__init__(
            stages[0].model,
            exit_status=past if exit_status == -1 else exit_status,
            init_fn=init_fn,
            refill_frequency=refill_frequency or 1,
            device_type=device_type or stages[0]._device_type,
            **base,
        )
        if self.exit_status <= max(self.codes):
            raise ConfigError(
                "FusedStage",
                "exit_status must lie above the status of every stage",
                found=self.exit_status,
                expected=f"at least {max(self.codes) + 1}, or -1",
            )
        self._explicit_exit = exit_status != -1
        self.entry_status = entry_status
        self.reprime_codes = reprime_codes(reprime_on_entry, sub_stages)
        self.migration_hooks = migration_rules(sub_stages, self.exit_status)
        self.compile_step = compile_step
        self.compile_kwargs = dict(compile_kwargs or {})
        self._next_look = 0

    # ---------------------------------------------------------------- composition

    @property
    def dynamics(self) -> list[BaseDynamics]:
        """The stages without their codes."""
        return [stage for _, stage in self.sub_stages]

    def register_fused_hook(self, hook: Hook, stage: DynamicsStage | None = None) -> None:
        """Add a hook for the whole batch."""
        self.register_hook(hook, stage)

    def compile(self, **kwargs: Any) -> FusedStage:
        """Have the model call compiled; keywords go to ``torch.compile``. Returns itself.

        Compilation itself waits for the first call.
        """
        self.compile_step = True
        self.compile_kwargs = {**self.compile_kwargs, **kwargs}
        self._compiled = compile_model(self.model, self.compile_kwargs)
        return self

    def __enter__(self) -> FusedStage:
        super().__enter__()
        if self.compile_step and self._compiled is None:
            self.compile()
        return self

    def _extended(self, added: Sequence[tuple[int, BaseDynamics]]) -> FusedStage:
        """This stage with more sub-stages; all else is kept."""
        last = max(code for code, _ in added)
        keeps_exit = self._explicit_exit and self.exit_status > last
        fused = FusedStage(
            [*self.sub_stages, *added],
            entry_status=self.entry_status,
            exit_status=self.exit_status if keeps_exit else -1,
            compile_step=self.compile_step,
            compile_kwargs=self.compile_kwargs,
            init_fn=self.init_fn,
            reprime_on_entry=self.reprime_codes,
            refill_frequency=self.refill_frequency if self.sampler is not None else None,
            device_type=self._device_type,
            sampler=self.sampler,
            sinks=self.sinks,
            n_steps=self.n_steps,
            prior_rank=self.prior_rank,
            next_rank=self.next_rank,
            active_batch=self.active_batch,
            max_batch_size=self.max_batch_size,
            done=self.done,
            comm_mode=self.comm_mode,
            buffer_config=self.buffer_config,
            debug_mode=self.debug_mode,
        )
        fused._take_hooks_of(self)
        for key, (init_fn, level) in self._bookkeeping.items():
            fused.register_bookkeeping_key(key, init_fn, level=level)
        return fused

    # ---------------------------------------------------------------- running

    def run(self, batch: Batch | None = None, n_steps: int | None = None) -> Batch | None:
        """Simulate until every system has graduated.

        Parameters
        ----------
        batch : Batch, optional
            By default the first that the sampler builds. Systems that have a
            ``status`` start in that stage.
        n_steps : int, optional
            The most steps of the whole.

        Returns
        -------
        Batch or None
            None when a sampler was used and nothing is left.

        Raises
        ------
        ValueError
            There is nothing to run, or nothing that could end it.
        """
        limit = self.n_steps if n_steps is None else n_steps
        if limit is not None and limit < 1:
            raise ConfigError("FusedStage", "n_steps must be at least 1", found=limit)
        self._check_ends(limit)
        batch = self.active_batch if batch is None else batch
        if batch is None:
            if self.sampler is None:
                raise ConfigError("FusedStage", "No batch provided and no sampler configured")
            batch = self.admit(self.sampler.build_initial_batch())
        else:
            self._ensure_fields(batch)
        if self.compile_step and self._compiled is None:
            self.compile()
        with self._session():
            try:
                result = self._loop(batch, limit)
                if result is not None and "needs_prime" in result:
                    del result["needs_prime"]
                return result
            finally:
                for stage in self.dynamics:
                    stage._primed = False

    def _loop(self, batch: Batch, limit: int | None) -> Batch | None:
        """Steps until the end; the looks of the host are here."""
        current: Batch | None = batch
        left, graduated = self._look(batch)
        if left:
            self._prime(batch)
        taken = since_refill = 0
        while current is not None:
            if self.inflight_mode and (graduated or left == 0):
                # A batch without a system in flight does not wait for its turn.
                if left == 0 or since_refill >= self.refill_frequency:
                    current, since_refill = self.refill_check(current, self.exit_status), 0
                    if current is None:
                        break
                    left, graduated = self._look(current)
                    continue
            elif left == 0:
                break
            if limit is not None and taken >= limit:
                break
            self._take_step(current)
            taken, since_refill = taken + 1, since_refill + 1
            if self.step_count >= self._next_look:
                left, graduated = self._look(current)
        return current

    def _look(self, batch: Batch) -> tuple[int, int]:
        """Systems in flight and systems graduated; the one wait of a step.

        Also finds out when to look next: as long as only steps are counted, no
        system can leave before the smallest number of steps that is left to one.
        """
        status = batch["status"].reshape(-1)
        open_ = status < self.exit_status
        facts = [open_.sum()]
        counted = not self._may_leave_any_time()
        if counted:
            far = torch.iinfo(torch.int64).max
            remaining = torch.full_like(status, far)
            for code, stage in self.sub_stages:
                if stage.n_steps is not None:
                    done = batch[f"n_steps_counter_{code}"].reshape(-1)
                    here = (status == code) & open_
                    remaining = torch.where(here, stage.n_steps - done, remaining)
            facts.append(remaining.min() if len(remaining) else remaining.new_tensor(far))
        numbers = torch.stack(facts).tolist()
        self._next_look = self.step_count + (max(1, numbers[1]) if counted else 1)
        return numbers[0], len(status) - numbers[0]

    def _may_leave_any_time(self) -> bool:
        """Whether something other than a step count can move a system on."""
        return self._hooks_may_migrate() or any(h is not None for h in self.migration_hooks)

    def _hooks_may_migrate(self) -> bool:
        """Whether a hook could set the status of a system."""
        hooks = self._every_hook()
        return any(not getattr(h, "read_only", False) or _migrates(h) for h in hooks)

    def _check_ends(self, limit: int | None) -> None:
        if self.entry_status not in self.codes and self.entry_status < self.exit_status:
            raise ConfigError(
                "FusedStage",
                "no stage has the entry_status",
                found=self.entry_status,
                expected=f"one of {self.codes}",
            )
        if limit is not None or self._hooks_may_migrate():
            return
        for code, stage in self.sub_stages:
            if stage.n_steps is None and stage.convergence_hook is None:
                raise ConfigError(
                    "FusedStage",
                    f"No step count provided: the stage of status {code} "
                    f"({type(stage).__name__}) has neither n_steps nor a convergence_hook",
                    mend="give it one of them, or run(n_steps=...)",
                )

    def step(self, batch: Batch) -> tuple[Batch, torch.Tensor | None]:
        """One step; the batch and the numbers of the systems that graduated in it, if any."""
        self._ensure_fields(batch)
        before = batch["status"].reshape(-1) >= self.exit_status
        self._take_step(batch)
        after = batch["status"].reshape(-1) >= self.exit_status
        indices = (after & ~before).nonzero().reshape(-1)
        return batch, indices if len(indices) else None

    def _take_step(self, batch: Batch) -> bool:
        status = batch["status"].reshape(-1)
        waiting = batch["needs_prime"].reshape(-1).clone()
        members = [status == code for code in self.codes]
        masks = [here & ~waiting for here in members]
        open_ = status < self.exit_status
        frozen = Guard(batch, self._updated_fields) if self._hooks_may_move(open_) else None
        stages = self.dynamics
        self._fire_all(DynamicsStage.BEFORE_STEP, batch, members)
        self._fire_all(DynamicsStage.BEFORE_PRE_UPDATE, batch, members)
        for stage, mask in zip(stages, masks, strict=True):
            stage._update(stage.pre_update, batch, mask)
        self._fire_all(DynamicsStage.AFTER_PRE_UPDATE, batch, members)
        if frozen is not None:
            frozen.restore_except(open_)
        self._call_model(batch, members)
        self._fire_all(DynamicsStage.BEFORE_POST_UPDATE, batch, members)
        for stage, mask in zip(stages, masks, strict=True):
            stage._update(stage.post_update, batch, mask)
        self._fire_all(DynamicsStage.AFTER_POST_UPDATE, batch, members)
        if frozen is not None:
            frozen.restore_except(open_)
        moved = open_ & ~waiting
        batch["needs_prime"].zero_()
        self._derive(batch, moved)
        self._fire_all(DynamicsStage.AFTER_STEP, batch, members)
        self._migrate(batch, masks, members)
        self.step_count += 1
        return True

    def _call_model(self, batch: Batch, members: Sequence[torch.Tensor]) -> None:
        self._fire_all(DynamicsStage.BEFORE_COMPUTE, batch, members)
        self.compute(batch)
        self._fire_all(DynamicsStage.AFTER_COMPUTE, batch, members)

    def _prime(self, batch: Batch) -> None:
        status = batch["status"].reshape(-1)
        batch["needs_prime"].fill_(True)
        self._call_model(batch, [status == code for code in self.codes])
        batch["needs_prime"].zero_()
        for engine in (self, *self.dynamics):
            engine._primed = True

    # ---------------------------------------------------------------- migration

    def _migrate(
        self, batch: Batch, masks: Sequence[torch.Tensor], members: Sequence[torch.Tensor]
    ) -> None:
        """Move systems that are converged or out of steps on to the next stage."""
        status = batch["status"].reshape(-1)
        new = status.clone()
        converged: list[torch.Tensor | None] = []
        after = [*self.codes[1:], self.exit_status]
        for (code, stage), hook, mask, next_code in zip(
            self.sub_stages, self.migration_hooks, masks, after, strict=True
        ):
            counter = batch[f"n_steps_counter_{code}"]
            # A hook may have moved it in this very step.
            here = mask & (status == code)
            done = self._converged_in(batch, hook, here, counter.reshape(-1))
            counter.add_(mask.reshape(counter.shape))
            leaving = done if done is not None else torch.zeros_like(here)
            if stage.n_steps is not None:
                spent = here & ~leaving & (counter.reshape(-1) >= stage.n_steps)
                counter.masked_fill_(spent.reshape(counter.shape), 0)
                leaving = leaving | spent
            new = torch.where(leaving, next_code, new)
            converged.append(done)
        steps = batch["steps"]
        moved = torch.stack(list(masks)).any(dim=0)
        steps.add_(moved.reshape(steps.shape))
        batch["status"].copy_(new.reshape(batch["status"].shape))
        if self.reprime_codes:
            # Whoever moved it here, this stage's rule or a hook.
            enters = [
                (new == code) & ~here
                for code, here in zip(self.codes, members, strict=True)
                if code in self.reprime_codes
            ]
            batch["needs_prime"].copy_(torch.stack(enters).any(dim=0).reshape(-1, 1))
        self._fire_converged(batch, members, converged)

    def _converged_in(
        self,
        batch: Batch,
        hook: ConvergenceHook | None,
        here: torch.Tensor,
        counter: torch.Tensor,
    ) -> torch.Tensor | None:
        """Systems of a stage that meet its criterion now; None when none is due.

        The frequency is counted for each system, from its entry into the
        stage: so the way of a system does not hang on when it was admitted.
        """
        if hook is None:
            return None
        if hook.frequency > 1:
            here = here & (counter % hook.frequency == 0)
            # On a device the look costs more than a criterion that nobody asks for.
            if here.device.type == "cpu" and not bool(here.any()):
                return None
        return hook.mask(batch) & here

    def _fire_converged(
        self,
        batch: Batch,
        members: Sequence[torch.Tensor],
        converged: Sequence[torch.Tensor | None],
    ) -> None:
        stage = DynamicsStage.ON_CONVERGE
        listening = [bool(s._hooks_at(stage, self.step_count)) for s in self.dynamics]
        own = bool(self._hooks_at(stage, self.step_count))
        found = [(i, mask) for i, mask in enumerate(converged) if mask is not None]
        if not found or not (own or any(listening[i] for i, _ in found)):
            return
        hit = torch.stack([mask.any() for _, mask in found]).tolist()
        for (i, mask), some in zip(found, hit, strict=True):
            if some and listening[i]:
                self._fire_sub(self.dynamics[i], stage, batch, members[i], mask)
        if own and any(hit):
            self._fire(stage, batch, torch.stack([mask for _, mask in found]).any(dim=0))

    # ---------------------------------------------------------------- hooks

    def _fire_all(
        self, stage: DynamicsStage, batch: Batch, members: Sequence[torch.Tensor]
    ) -> None:
        if stage in _FIRST_STAGES:
            self._fire(stage, batch)
        for sub, here in zip(self.dynamics, members, strict=True):
            self._fire_sub(sub, stage, batch, here)
        if stage not in _FIRST_STAGES:
            self._fire(stage, batch)

    def _fire_sub(
        self,
        sub: BaseDynamics,
        stage: DynamicsStage,
        batch: Batch,
        here: torch.Tensor,
        converged: torch.Tensor | None = None,
    ) -> None:
        """Hooks of one stage; what they change of other systems is put back."""
        hooks = sub._hooks_at(stage, self.step_count)
        if not hooks:
            return
        alone = len(self.sub_stages) == 1
        changing = not alone and any(not getattr(h, "read_only", False) for h in hooks)
        guard = Guard(batch, _SCOPED) if changing else None
        ctx: DynamicsContext = sub._context(batch, self.step_count, converged)
        ctx.status_mask = here
        sub.current_hook_stage = stage
        for hook in hooks:
            hook(ctx, stage)
        if guard is not None:
            with torch.no_grad():
                guard.restore_except(here)

    def _hooks_may_move(self, active: torch.Tensor | None) -> bool:
        return super()._hooks_may_move(active) or any(
            stage._hooks_may_move(active) for stage in self.dynamics
        )

    def _every_hook(self) -> list[Any]:
        return [hook for engine in (self, *self.dynamics) for hook in engine.hooks]

    # ---------------------------------------------------------------- fields

    def _asked(self) -> set[str]:
        asked = super()._asked()
        for stage in self.dynamics:
            asked |= stage._asked()
        return asked

    def _needed_outputs(self) -> set[str]:
        needed = super()._needed_outputs()
        for stage in self.dynamics:
            needed |= stage._needed_outputs()
        return needed

    def _keys(self) -> dict[str, tuple[InitFn, str]]:
        keys: dict[str, tuple[InitFn, str]] = {
            "status": (column(self.entry_status, torch.int64), "system"),
            "steps": (column(0, torch.int64), "system"),
            "needs_prime": (column(False, torch.bool), "system"),
        }
        for code in self.codes:
            keys[f"n_steps_counter_{code}"] = (column(0, torch.int64), "system")
        for engine in (self, *self.dynamics):
            keys.update(engine._bookkeeping)
        return keys

    def _ensure_fields(self, batch: Batch, *, new: bool = False) -> None:
        super()._ensure_fields(batch, new=new)
        if "system_id" not in batch:
            batch.set("system_id", column(-1, torch.int64)(batch), level="system")
        if any("velocities" in stage.__provides_keys__ for stage in self.dynamics):
            batch["velocities"]  # made on access: a guard has to see it


def _migrates(hook: Any) -> bool:
    return isinstance(hook, ConvergenceHook) and hook.target_status is not None

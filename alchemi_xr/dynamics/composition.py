"""How stages become one: the ``+`` of stages, and what a fused stage takes from its parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from alchemi_xr.dynamics.base import BaseDynamics
from alchemi_xr.dynamics.convergence import ConvergenceHook
from alchemi_xr.errors import ConfigError, DynamicsError

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.fused import FusedStage

__all__ = ["check_sub_stages", "compose", "migration_rules", "reprime_codes", "run_inflight"]


def compose(left: Any, right: Any) -> FusedStage:
    """``left + right``: the stages of both, one after the other.

    Raises
    ------
    TypeError
        One of them is no dynamics.
    """
    from alchemi_xr.dynamics.fused import FusedStage

    if not isinstance(left, BaseDynamics) or not isinstance(right, BaseDynamics):
        raise TypeError(
            "Both operands of + must be BaseDynamics (other must be a BaseDynamics instance), "
            f"found {type(left).__name__} and {type(right).__name__}"
        )
    more = right.dynamics if isinstance(right, FusedStage) else [right]
    if not isinstance(left, FusedStage):
        fused = FusedStage(list(enumerate([left, *more])))
        return _inherit(fused, right, shift=1) if isinstance(right, FusedStage) else fused
    start = max(left.codes) + 1
    fused = left._extended([(start + i, stage) for i, stage in enumerate(more)])
    return _inherit(fused, right, shift=start) if isinstance(right, FusedStage) else fused


def _inherit(fused: FusedStage, right: FusedStage, *, shift: int) -> FusedStage:
    """What a fused right operand had of its own, where the left had nothing."""
    fused._take_hooks_of(right)
    fused._bookkeeping = {**right._bookkeeping, **fused._bookkeeping}
    for position, (code, _) in enumerate(right.sub_stages):
        if code in right.reprime_codes:
            fused.reprime_codes |= {shift + position}
    if fused.sampler is None and right.sampler is not None:
        fused.sampler, fused.refill_frequency = right.sampler, right.refill_frequency
    fused.sinks = fused.sinks or list(right.sinks)
    fused.init_fn = fused.init_fn or right.init_fn
    fused.n_steps = fused.n_steps if fused.n_steps is not None else right.n_steps
    if right.compile_step:
        fused.compile_step = True
        fused.compile_kwargs = {**right.compile_kwargs, **fused.compile_kwargs}
    return fused


def run_inflight(
    stage: BaseDynamics, batch: Batch | None = None, n_steps: int | None = None
) -> Batch | None:
    """Run one stage with its sampler: a fused stage of one."""
    from alchemi_xr.dynamics.fused import FusedStage

    fused = FusedStage(
        [(0, stage)],
        exit_status=stage.exit_status,
        active_batch=stage.active_batch,
        max_batch_size=stage.max_batch_size,
    )
    fused.step_count = stage.step_count
    try:
        return fused.run(batch, n_steps)
    finally:
        stage.step_count = fused.step_count
        stage.done = fused.done
        stage.active_batch = fused.active_batch


def check_sub_stages(sub_stages: Sequence[tuple[int, BaseDynamics]]) -> None:
    if not sub_stages:
        raise ConfigError("FusedStage", "there is no sub-stage")
    for code, stage in sub_stages:
        if not isinstance(stage, BaseDynamics):
            raise TypeError(
                f"every sub-stage must be a BaseDynamics instance, found {type(stage).__name__}"
            )
        if hasattr(stage, "sub_stages"):
            raise TypeError("a FusedStage cannot be a sub-stage. Mend: compose with +")
        if not isinstance(code, int) or isinstance(code, bool) or code < 0:
            raise ConfigError("FusedStage", "a status code must be an integer ≥ 0", found=code)
    codes = [code for code, _ in sub_stages]
    if len(set(codes)) < len(codes):
        raise ConfigError("FusedStage", "two sub-stages have the same status code", found=codes)


def reprime_codes(
    codes: Iterable[int] | None, sub_stages: Sequence[tuple[int, BaseDynamics]]
) -> frozenset[int]:
    """Codes given for the whole, and those of stages that ask for it themselves."""
    if isinstance(codes, bool):
        raise TypeError("reprime_on_entry of a FusedStage is a list of status codes, not a bool")
    wanted = frozenset(codes or ())
    unknown = sorted(wanted - {code for code, _ in sub_stages})
    if unknown:
        raise ConfigError(
            "FusedStage",
            f"reprime_on_entry names statuses of no stage: {unknown}",
            expected=[code for code, _ in sub_stages],
        )
    return wanted | {code for code, stage in sub_stages if stage.reprime_on_entry}


def migration_rules(
    sub_stages: Sequence[tuple[int, BaseDynamics]], exit_status: int
) -> list[ConvergenceHook | None]:
    """The rule by which each stage passes systems on, or None for steps alone."""
    after = [*(code for code, _ in sub_stages[1:]), exit_status]
    rules: list[ConvergenceHook | None] = []
    for (code, stage), target in zip(sub_stages, after, strict=True):
        hook = stage.convergence_hook
        if hook is None:
            rules.append(None)
            continue
        if not isinstance(hook, ConvergenceHook):
            raise DynamicsError(
                type(stage).__name__,
                "convergence_hook must be a ConvergenceHook",
                found=type(hook).__name__,
            )
        rule = copy.copy(hook)  # the user's own stays as it is
        rule.source_status, rule.target_status = code, target
        rules.append(rule)
    return rules

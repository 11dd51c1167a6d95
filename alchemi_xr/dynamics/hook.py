"""Hooks: what they are, when they fire, what they are handed.

A hook is any object with ``frequency``, ``stage`` and a call; an engine (a
dynamics stage or a fused stage) owns a list of them and calls those that are
due. Nothing here knows an integrator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from alchemi_xr.data.batch import Batch

__all__ = ["DynamicsContext", "DynamicsStage", "Hook", "HookContext", "HookRegistryMixin"]


_OWN: tuple[None] = (None,)


class DynamicsStage(Enum):
    """The nine points of a step at which hooks fire, in order."""

    BEFORE_STEP = 0
    BEFORE_PRE_UPDATE = 1
    AFTER_PRE_UPDATE = 2
    BEFORE_COMPUTE = 3
    AFTER_COMPUTE = 4
    BEFORE_POST_UPDATE = 5
    AFTER_POST_UPDATE = 6
    AFTER_STEP = 7
    ON_CONVERGE = 8


@dataclass
class HookContext:
    """What a hook may look at and change.

    Parameters
    ----------
    batch : Batch
        The systems in flight; a hook changes them in place.
    model : BaseModelMixin, optional
    global_rank : int
    workflow : object, optional
        The engine that calls.
    """

    batch: Batch
    model: Any = None
    global_rank: int = 0
    workflow: Any = None


@dataclass
class DynamicsContext(HookContext):
    """`HookContext` of a simulation.

    Parameters
    ----------
    step_count : int
        Steps taken before this one.
    converged_mask : bool tensor, [B], optional
        At ON_CONVERGE: the systems that met their criterion in this step.
    status_mask : bool tensor, [B], optional
        For a hook of a sub-stage: the systems in that stage. Forces, energies,
        positions, velocities and cells of the others are put back after it.
    """

    step_count: int = 0
    converged_mask: torch.Tensor | None = None
    status_mask: torch.Tensor | None = None

    def derived(self, name: str) -> torch.Tensor:
        """``fmax`` or ``energy_change`` of this moment, float [B, 1].

        A hook that wants ``energy_change`` says so with an attribute
        ``needs = {"energy_change"}``, because it has to be followed from the
        first step on.
        """
        from alchemi_xr.dynamics.convergence import derive

        return derive(self.batch, name)


@runtime_checkable
class Hook(Protocol):
    """Protocol of a hook.

    It fires at ``stage`` in every step whose number is a multiple of
    ``frequency`` (so in step 0 always). Optional members: ``_runs_on_stage``
    (several stages), ``on_register(engine)``, ``__enter__``/``__exit__`` or
    ``close()`` (called at the start and end of a run), ``needs`` (derived
    fields, see `DynamicsContext.derived`), ``read_only`` (True: it changes no
    field of the batch, so nothing has to be guarded).
    """

    frequency: int
    stage: Enum | None

    def __call__(self, ctx: Any, stage: Enum) -> None: ...


class HookRegistryMixin:
    """A list of hooks and the rule by which they fire."""

    _stage_type: ClassVar[type[Enum]] = DynamicsStage

    def _init_hooks(self, hooks: Iterable[Hook] | None) -> None:
        self.hooks: list[Any] = []
        # Where each was registered, by identity; None: where the hook itself says.
        self._hook_stages: dict[int, list[Enum | None]] = {}
        self._open_hooks: list[Any] = []
        for hook in hooks or ():
            self.register_hook(hook)

    def register_hook(self, hook: Hook, stage: Enum | None = None) -> None:
        """Add a hook; it fires after those registered before it.

        One hook may be registered at several stages, and fires once at each.

        Parameters
        ----------
        hook : Hook
        stage : DynamicsStage, optional
            Where it fires; by default where the hook itself says.

        Raises
        ------
        ConfigError
            ``frequency`` is not an integer of at least 1.
        TypeError
            There is no stage, or it is not of this engine's kind.
        """
        name = type(hook).__name__
        if not callable(hook):
            raise TypeError(f"a hook must be callable as hook(ctx, stage), found {name}")
        frequency = getattr(hook, "frequency", None)
        if not isinstance(frequency, int) or isinstance(frequency, bool) or frequency < 1:
            raise ConfigError(
                name,
                "hook frequency must be a positive integer",
                found=repr(frequency),
                mend="set frequency to how many steps lie between two calls",
            )
        where = stage if stage is not None else getattr(hook, "stage", None)
        if where is None and not hasattr(hook, "_runs_on_stage"):
            raise TypeError(
                f"{name} has no stage. Mend: give it one, or register_hook(hook, stage=...)"
            )
        if where is not None and not isinstance(where, self._stage_type):
            raise TypeError(
                f"{name} has stage {where!r}, which is not a {self._stage_type.__name__}"
            )
        if stage is not None and getattr(hook, "stage", None) is None:
            hook.stage = stage
        stages = self._hook_stages.setdefault(id(hook), [])
        if stage not in stages:
            stages.append(stage)
        if any(hook is known for known in self.hooks):
            return
        self.hooks.append(hook)
        on_register = getattr(hook, "on_register", None)
        if on_register is not None:
            on_register(self)

    def _hooks_at(self, stage: Enum, step_count: int) -> list[Any]:
        """The hooks that are due at a stage of a step, in order."""
        return [
            hook
            for hook in self.hooks
            if step_count % hook.frequency == 0 and self._runs_at(hook, stage)
        ]

    def _runs_at(self, hook: Any, stage: Enum) -> bool:
        registered = self._hook_stages.get(id(hook), _OWN)
        if stage in registered:
            return True
        if None not in registered:
            return False
        runs_on = getattr(hook, "_runs_on_stage", None)
        return bool(runs_on(stage)) if runs_on is not None else hook.stage is stage

    def _take_hooks_of(self, other: HookRegistryMixin) -> None:
        """Register the hooks of another engine at the stages they have there."""
        for hook in other.hooks:
            for stage in other._hook_stages.get(id(hook), _OWN):
                self.register_hook(hook, stage)

    def _every_hook(self) -> list[Any]:
        """The hooks that a run of this engine calls."""
        return self.hooks

    def _enter_hooks(self) -> None:
        """Open the hooks that want it; remembered, so that each is closed once."""
        for hook in self._every_hook():
            if any(hook is opened for opened in self._open_hooks):
                continue
            enter = getattr(hook, "__enter__", None)
            if enter is not None:
                enter()
            self._open_hooks.append(hook)

    def _exit_hooks(self) -> None:
        """Close every hook of the run, also when one of them fails."""
        opened, self._open_hooks = self._open_hooks, []
        failure: BaseException | None = None
        for hook in opened:
            try:
                if hasattr(hook, "__exit__"):
                    hook.__exit__(None, None, None)
                elif hasattr(hook, "close"):
                    hook.close()
            except Exception as error:  # the others still have files to close
                failure = failure or error
        if failure is not None:
            raise failure

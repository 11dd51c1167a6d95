"""What a stage is told beside its physics: device, ranks, buffers, sinks, sampler.

Options of a pipeline of ranks are taken and checked here, whether or not the
stage becomes part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from alchemi_xr.dynamics.bookkeeping import check_count
from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch
    from alchemi_xr.dynamics.sampler import SizeAwareSampler
    from alchemi_xr.dynamics.sinks import DataSink

__all__ = ["COMM_MODES", "BufferConfig", "EngineOptions", "global_rank", "local_rank"]

COMM_MODES = ("sync", "async_recv", "fully_async")


@dataclass(frozen=True)
class BufferConfig:
    """Capacity of the buffers between two ranks.

    Parameters
    ----------
    num_systems, num_nodes, num_edges : int
        Most systems, atoms and edges that one hand-over carries.
    """

    num_systems: int
    num_nodes: int
    num_edges: int

    def __post_init__(self) -> None:
        for name in ("num_systems", "num_nodes", "num_edges"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(
                    "BufferConfig", f"{name} must be an integer ≥ 0", found=repr(value)
                )


def global_rank() -> int:
    """Rank of this process, 0 outside of ``torch.distributed``."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def local_rank() -> int:
    """Rank of this process on its machine, 0 outside of ``torch.distributed``."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_node_local_rank(fallback_rank=0))
    return 0


class EngineOptions:
    """Options of a stage and what follows from them; see `BaseDynamics`."""

    model: Any
    _device_type: str | None

    def _init_options(
        self,
        *,
        prior_rank: int | None,
        next_rank: int | None,
        sinks: Sequence[DataSink] | None,
        active_batch: Batch | None,
        max_batch_size: int,
        done: bool,
        sampler: SizeAwareSampler | None,
        refill_frequency: int,
        init_fn: Callable[[Batch], Batch | None] | None,
        device_type: str | None,
        comm_mode: str,
        buffer_config: BufferConfig | Mapping[str, int] | None,
        debug_mode: bool,
    ) -> None:
        where = type(self).__name__
        check_count(where, "refill_frequency", refill_frequency)
        check_count(where, "max_batch_size", max_batch_size)
        if isinstance(buffer_config, Mapping):
            buffer_config = BufferConfig(**buffer_config)
        if comm_mode not in COMM_MODES:
            raise ConfigError(
                where, f"unknown comm_mode {comm_mode!r}", expected=", ".join(COMM_MODES)
            )
        for name, rank in (("prior_rank", prior_rank), ("next_rank", next_rank)):
            if rank is not None and rank >= 0 and buffer_config is None:
                raise ConfigError(
                    where,
                    f"buffer_config is required when {name} is given",
                    found=rank,
                    mend="give a BufferConfig, or compose the stages with | (unbuffered)",
                )
        self.prior_rank = prior_rank
        self.next_rank = next_rank
        self.sinks: list[DataSink] = list(sinks or ())
        self.active_batch = active_batch
        self.max_batch_size = max_batch_size
        self.done = done
        self.sampler = sampler
        self.refill_frequency = refill_frequency
        self.init_fn = init_fn
        self.comm_mode = comm_mode
        self.buffer_config = buffer_config
        self.debug_mode = debug_mode
        self._device_type = device_type

    @property
    def model_config(self) -> Any:
        return self.model.model_config

    @property
    def model_is_conservative(self) -> bool:
        """Whether forces are the gradient of the energy."""
        return "forces" in set(getattr(self.model_config, "autograd_outputs", ()) or ())

    @property
    def device_type(self) -> str:
        if self._device_type is not None:
            return torch.device(self._device_type).type
        if isinstance(self.model, torch.nn.Module):
            parameter = next(self.model.parameters(), None)
            if parameter is not None:
                return parameter.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device(self._device_type or self.device_type)

    @property
    def inflight_mode(self) -> bool:
        """Whether finished systems are replaced from a sampler."""
        return self.sampler is not None

    @property
    def is_first_stage(self) -> bool:
        return self.prior_rank in (None, -1)

    @property
    def is_final_stage(self) -> bool:
        return self.next_rank in (None, -1)

    @property
    def active_batch_size(self) -> int:
        return 0 if self.active_batch is None else self.active_batch.num_graphs

    @property
    def room_in_active_batch(self) -> int:
        return max(0, self.max_batch_size - self.active_batch_size)

    @property
    def global_rank(self) -> int:
        return global_rank()

    @property
    def local_rank(self) -> int:
        return local_rank()

"""What a model promises: which fields it reads, which it gives, and their sum.

A model is called with a Batch and answers with a mapping of field name to
tensor, at most ``energy`` [B, 1], ``forces`` [V, 3] and ``stress`` [B, 3, 3] and
whatever else its config names. It never changes the batch.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from alchemi_xr.errors import ConfigError, ModelError, UnknownFieldError, nearest

__all__ = [
    "AdditiveModel",
    "BaseModelMixin",
    "ModelConfig",
    "NeighborConfig",
    "NeighborListFormat",
]

# The order in which outputs stand, whatever order a model made them in.
_ORDER = ("energy", "forces", "stress")


class NeighborListFormat(StrEnum):
    """How neighbours are laid out: pairs, or a row of slots an atom."""

    COO = "coo"
    MATRIX = "matrix"


def _refuse_unknown(where: str, unknown: dict[str, Any], known: Iterable[str]) -> None:
    if unknown:
        name = next(iter(unknown))
        raise ConfigError(where, f"unknown option {name!r}. {nearest(name, known)}")


class _Config:
    """Options that compare by value and refuse names they do not know."""

    _names: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The options by name."""
        return {name: getattr(self, name) for name in self._names}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.as_dict().items())
        return f"{type(self).__name__}({options})"


class NeighborConfig(_Config):
    """The neighbours a model wants.

    Parameters
    ----------
    cutoff : float
        Å.
    format : {"coo", "matrix"} or NeighborListFormat
    half_list : bool
        Each pair once.
    skin : float
        Å beyond the cutoff that a list may be kept for.

    Raises
    ------
    ConfigError
        A length is not one, the format or an option is not known.
    """

    _names = ("cutoff", "format", "half_list", "skin")

    def __init__(
        self,
        cutoff: float,
        format: NeighborListFormat | str = NeighborListFormat.COO,
        half_list: bool = False,
        skin: float = 0.0,
        **unknown: Any,
    ) -> None:
        _refuse_unknown("NeighborConfig", unknown, self._names)
        for name, value, low in (("cutoff", cutoff, True), ("skin", skin, False)):
            if not math.isfinite(value) or value < 0.0 or (low and value == 0.0):
                raise ConfigError("NeighborConfig", f"{name} is no length", found=value)
        self.cutoff = float(cutoff)
        self.half_list = bool(half_list)
        self.skin = float(skin)
        try:
            self.format = NeighborListFormat(format)
        except ValueError:
            raise ConfigError(
                "NeighborConfig",
                f"format {format!r} is not known",
                expected=[f.value for f in NeighborListFormat],
            ) from None


class ModelConfig(_Config):
    """What a model reads and gives.

    Parameters
    ----------
    outputs : set of str
        All it can give.
    autograd_outputs : set of str
        Those that are derivatives of the energy made by autograd.
    autograd_inputs : set of str
        Inputs that such derivatives are taken by.
    required_inputs, optional_inputs : set of str
        Fields beyond ``positions`` and ``atomic_numbers``.
    supports_pbc, needs_pbc : bool
    neighbor_config : NeighborConfig, optional
    active_outputs : set of str, optional
        Those that a call computes; by default all.
    gradient_keys : set of str
        Further fields that need gradients.

    Raises
    ------
    ConfigError
        An option is not known, or a model needs a periodicity it does not support.
    """

    _names = (
        "outputs",
        "autograd_outputs",
        "autograd_inputs",
        "required_inputs",
        "optional_inputs",
        "supports_pbc",
        "needs_pbc",
        "neighbor_config",
        "active_outputs",
        "gradient_keys",
    )

    def __init__(
        self,
        *,
        outputs: Iterable[str] = ("energy",),
        autograd_outputs: Iterable[str] = (),
        autograd_inputs: Iterable[str] = ("positions",),
        required_inputs: Iterable[str] = (),
        optional_inputs: Iterable[str] = (),
        supports_pbc: bool = False,
        needs_pbc: bool = False,
        neighbor_config: NeighborConfig | None = None,
        active_outputs: Iterable[str] | None = None,
        gradient_keys: Iterable[str] = (),
        **unknown: Any,
    ) -> None:
        _refuse_unknown("ModelConfig", unknown, self._names)
        self.outputs = _names("outputs", outputs)
        self.autograd_outputs = _names("autograd_outputs", autograd_outputs)
        self.autograd_inputs = _names("autograd_inputs", autograd_inputs)
        self.required_inputs = _names("required_inputs", required_inputs)
        self.optional_inputs = _names("optional_inputs", optional_inputs)
        self.supports_pbc = bool(supports_pbc)
        self.needs_pbc = bool(needs_pbc)
        self.neighbor_config = neighbor_config
        self.active_outputs = (
            set(self.outputs)
            if active_outputs is None
            else _names("active_outputs", active_outputs)
        )
        self.gradient_keys = _names("gradient_keys", gradient_keys)
        if self.needs_pbc and not self.supports_pbc:
            raise ConfigError("ModelConfig", "needs_pbc without supports_pbc")

    @property
    def needs_neighborlist(self) -> bool:
        """Whether the model works on neighbours."""
        return self.neighbor_config is not None


def _names(option: str, names: Iterable[str]) -> set[str]:
    if isinstance(names, str):
        raise ConfigError("ModelConfig", f"{option} is a set of names", found=repr(names))
    return set(names)


class _ConfigSlot:
    """`BaseModelMixin.model_config`: says so when a subclass forgot to set it."""

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self
        try:
            return model.__dict__["_model_config"]
        except KeyError:
            raise TypeError(
                f"{type(model).__name__} has no model_config. "
                "Mend: self.model_config = ModelConfig(...) in its __init__"
            ) from None

    def __set__(self, model: Any, config: Any) -> None:
        if not isinstance(config, ModelConfig):
            raise TypeError(f"model_config must be a ModelConfig, found {type(config).__name__}")
        model.__dict__["_model_config"] = config


class BaseModelMixin:
    """Beside ``torch.nn.Module``, what every model of the project has.

    A subclass sets ``self.model_config`` in ``__init__`` and defines
    ``forward(batch)``, usually as `adapt_input`, its own work, `adapt_output`.
    """

    model_config = _ConfigSlot()

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Row shapes of the embeddings it can compute, by field name."""
        return {}

    def compute_embeddings(self, data: Any, **kwargs: Any) -> Any:
        """The data with the model's embeddings as fields.

        Raises
        ------
        ModelError
            This model has none.
        """
        raise ModelError(type(self).__name__, "this model has no embeddings")

    def input_data(self) -> set[str]:
        """Fields that a call reads and must find."""
        needed: set[str] = {"positions", "atomic_numbers"} | self.model_config.required_inputs
        if self.model_config.needs_pbc:
            needed |= {"cell", "pbc"}
        return needed

    def output_data(self) -> set[str]:
        """Fields that a call gives: the active outputs that there are."""
        config = self.model_config
        unsupported = config.active_outputs - config.outputs
        if unsupported:
            warnings.warn(
                f"{type(self).__name__} does not give {sorted(unsupported)}; "
                f"it gives {sorted(config.outputs)}",
                UserWarning,
                stacklevel=2,
            )
        given: set[str] = config.active_outputs & config.outputs
        return given

    def set_config(self, key: str, value: Any) -> None:
        """Change one option of the config.

        Raises
        ------
        UnknownFieldError
            There is no such option (an ``AttributeError``).
        ConfigError
            The value is of the wrong kind.
        """
        options = self.model_config.as_dict()
        if key not in options:
            raise UnknownFieldError(
                type(self).__name__, f"the config has no option {key!r}. {nearest(key, options)}"
            )
        self.model_config = ModelConfig(**{**options, key: value})

    def adapt_input(self, data: Any, **kwargs: Any) -> dict[str, Any]:
        """The inputs of the model out of a batch.

        Raises
        ------
        UnknownFieldError
            A required field is not there (a ``KeyError``).
        """
        inputs: dict[str, Any] = {}
        for name in sorted(self.input_data()):
            if name not in data or data[name] is None:
                raise UnknownFieldError(
                    type(self).__name__,
                    f"the input {name!r} is not in the batch",
                    mend=f"add {name} to the samples, or load it from the store",
                )
            inputs[name] = data[name]
        for name in sorted(self.model_config.optional_inputs):
            if name in data:
                inputs[name] = data[name]
        return inputs

    def adapt_output(self, output: Any, data: Any) -> OrderedDict[str, Tensor]:
        """The active outputs, in the project's order and shapes.

        Raises
        ------
        ModelError
            The model did not give an output that it promises.
        """
        active = self.output_data()
        result: OrderedDict[str, Tensor] = OrderedDict()
        for name in sorted(active, key=_rank):
            value = output.get(name)
            if value is None:
                raise ModelError(
                    type(self).__name__,
                    f"the output {name!r} is missing",
                    found=sorted(output),
                    expected=sorted(active),
                )
            result[name] = value.reshape(-1, 1) if name == "energy" else value
        return result

    def make_neighbor_hooks(
        self, max_neighbors: int | None = None, neighbor_list_method: str | None = None
    ) -> list[Any]:
        """Hooks that keep this model's neighbours in the batch during a simulation.

        They are a matter of sharing a list between models: a model that gets
        none makes its own.
        """
        config = self.model_config.neighbor_config
        if config is None:
            return []
        # By name: hooks live above models.
        from alchemi_xr.registry import hooks

        hook = hooks.get("neighbor-list")
        return [
            hook(config, skin=config.skin, max_neighbors=max_neighbors, method=neighbor_list_method)
        ]

    def __add__(self, other: Any) -> AdditiveModel:
        if not isinstance(other, BaseModelMixin):
            return NotImplemented
        return AdditiveModel([self, other])


def _rank(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


class AdditiveModel(nn.Module, BaseModelMixin):
    """The sum of models: every output is the sum of theirs.

    Only outputs that all of them give are given, because a sum that lacks a
    term would be wrong without a sign of it.

    Parameters
    ----------
    models : list of BaseModelMixin
        Sums among them are taken apart, so ``a + b + c`` is one flat sum.

    Raises
    ------
    ModelError
        There is no output that all of them give.
    """

    def __init__(self, models: Iterable[BaseModelMixin]) -> None:
        super().__init__()
        flat: list[Any] = []
        for model in models:
            flat.extend(model.models if isinstance(model, AdditiveModel) else [model])
        # Models need not be torch modules; those that are take part in .to() and .parameters().
        self._terms = flat
        self._modules_of_terms = nn.ModuleList(m for m in flat if isinstance(m, nn.Module))
        configs = [m.model_config for m in flat]
        outputs = set.intersection(*(c.outputs for c in configs))
        active = set.intersection(*(c.active_outputs for c in configs)) & outputs
        if not active:
            raise ModelError(
                "AdditiveModel",
                "the models have no output in common",
                found=[sorted(c.active_outputs) for c in configs],
            )
        neighbors = [c.neighbor_config for c in configs if c.neighbor_config is not None]
        self.model_config = ModelConfig(
            outputs=outputs,
            autograd_outputs=set().union(*(c.autograd_outputs for c in configs)) & outputs,
            autograd_inputs=set().union(*(c.autograd_inputs for c in configs)),
            required_inputs=set().union(*(c.required_inputs for c in configs)),
            optional_inputs=set().union(*(c.optional_inputs for c in configs)),
            supports_pbc=all(c.supports_pbc for c in configs),
            needs_pbc=any(c.needs_pbc for c in configs),
            neighbor_config=max(neighbors, key=lambda n: n.cutoff, default=None),
            active_outputs=active,
            gradient_keys=set().union(*(c.gradient_keys for c in configs)),
        )

    @property
    def models(self) -> list[Any]:
        """The terms."""
        return list(self._terms)

    def set_config(self, key: str, value: Any) -> None:
        """As of a single model; ``active_outputs`` goes to every term."""
        super().set_config(key, value)
        if key == "active_outputs":
            for model in self._terms:
                model.set_config(key, value)

    def forward(self, data: Any, **kwargs: Any) -> OrderedDict[str, Tensor]:
        """Sum of the terms' outputs, in the highest of their precisions."""
        parts = [model(data, **kwargs) for model in self._terms]
        total: dict[str, Tensor] = {}
        for name in self.output_data():
            values = [part[name] for part in parts]
            total[name] = torch.stack([v.to(_widest(values)) for v in values], dim=0).sum(dim=0)
        return self.adapt_output(total, data)


def _widest(values: list[Tensor]) -> torch.dtype:
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.dtype)
    return dtype

"""The promises of a model: config, inputs, outputs, sums."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.errors import ConfigError, ModelError, UnknownFieldError
from alchemi_xr.models.base import (
    AdditiveModel,
    BaseModelMixin,
    ModelConfig,
    NeighborConfig,
    NeighborListFormat,
)
from alchemi_xr.models.demo import DemoModelWrapper
from alchemi_xr.models.lj import LennardJonesModel


class Spring(nn.Module, BaseModelMixin):
    """E = k/2 · Σx², a user's model in a few lines."""

    def __init__(self, k: float = 1.0, **config: object) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(k, dtype=torch.float64))
        options = {"outputs": {"energy", "forces"}, **config}
        self.model_config = ModelConfig(**options)  # type: ignore[arg-type]

    def forward(self, data: Batch) -> OrderedDict[str, Tensor]:
        x = self.adapt_input(data)["positions"]
        per_atom = 0.5 * self.k * x.square().sum(dim=1)
        energy = x.new_zeros(data.num_graphs).index_add(0, data.batch_idx.long(), per_atom)
        return self.adapt_output({"forces": -self.k * x, "energy": energy}, data)


@pytest.fixture
def batch() -> Batch:
    rng = torch.Generator().manual_seed(1)
    sizes = (3, 1, 4)
    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.full((n,), 18),
                positions=4.0 * torch.rand((n, 3), generator=rng, dtype=torch.float64),
            )
            for n in sizes
        ]
    )


class TestConfig:
    @pytest.mark.parametrize("kind", [ModelConfig, NeighborConfig])
    def test_unknown_options_are_refused_and_the_nearest_named(self, kind: type) -> None:
        args = {"cutoff": 3.0} if kind is NeighborConfig else {}
        with pytest.raises(ConfigError, match=r"unknown option 'suports_pbc'|'cutof'"):
            kind(**args, **{"suports_pbc" if kind is ModelConfig else "cutof": True})

    def test_defaults(self) -> None:
        config = ModelConfig()
        assert config.outputs == config.active_outputs == {"energy"}
        assert config.autograd_inputs == {"positions"}
        assert not config.needs_neighborlist
        assert ModelConfig(neighbor_config=NeighborConfig(3.0)).needs_neighborlist

    def test_equality_is_by_value(self) -> None:
        assert NeighborConfig(3.0, "matrix") == NeighborConfig(3, NeighborListFormat.MATRIX)
        assert NeighborConfig(3.0) != NeighborConfig(4.0)
        assert ModelConfig(outputs=["energy"]) == ModelConfig()
        assert copy.deepcopy(ModelConfig()) == pickle.loads(pickle.dumps(ModelConfig()))

    @pytest.mark.parametrize(
        "options", [{"cutoff": 0.0}, {"cutoff": -1.0}, {"cutoff": 3.0, "skin": -0.1}]
    )
    def test_lengths_are_lengths(self, options: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match="is no length"):
            NeighborConfig(**options)

    def test_unknown_format(self) -> None:
        with pytest.raises(ConfigError, match="'dense' is not known"):
            NeighborConfig(3.0, "dense")

    def test_needing_what_is_not_supported(self) -> None:
        with pytest.raises(ConfigError, match="needs_pbc"):
            ModelConfig(needs_pbc=True)

    def test_one_name_is_no_set_of_names(self) -> None:
        with pytest.raises(ConfigError, match="outputs is a set"):
            ModelConfig(outputs="energy")

    def test_a_model_without_config_says_so(self) -> None:
        class Forgetful(nn.Module, BaseModelMixin):
            pass

        with pytest.raises(TypeError, match="Forgetful has no model_config"):
            _ = Forgetful().model_config
        with pytest.raises(TypeError, match="must be a ModelConfig"):
            Forgetful().model_config = {"outputs": {"energy"}}  # type: ignore[assignment]


class TestModel:
    def test_outputs_stand_in_order(self, batch: Batch) -> None:
        output = Spring()(batch)
        assert list(output) == ["energy", "forces"]
        assert output["energy"].shape == (3, 1)

    def test_set_config(self, batch: Batch) -> None:
        model = Spring()
        model.set_config("active_outputs", {"energy"})
        assert list(model(batch)) == ["energy"]
        with pytest.raises(AttributeError, match=r"no option 'active_output'.*active_outputs"):
            model.set_config("active_output", {"energy"})

    def test_unsupported_outputs_warn(self, batch: Batch) -> None:
        model = Spring(active_outputs={"energy", "dipole"})
        with pytest.warns(UserWarning, match="does not give"):
            assert list(model(batch)) == ["energy"]

    def test_missing_output(self, batch: Batch) -> None:
        with pytest.raises(ModelError, match="output 'forces' is missing"):
            Spring().adapt_output({"energy": torch.zeros(3, 1)}, batch)

    def test_missing_input_is_a_key_error(self, batch: Batch) -> None:
        model = Spring(required_inputs={"charge"})
        assert "charge" in model.input_data()
        with pytest.raises(KeyError, match="the input 'charge' is not in the batch"):
            model(batch)

    def test_periodic_inputs_are_needed_only_if_needed(self) -> None:
        assert "cell" in Spring(supports_pbc=True, needs_pbc=True).input_data()
        assert "cell" not in Spring(supports_pbc=True).input_data()

    def test_optional_inputs(self, batch: Batch) -> None:
        model = Spring(optional_inputs={"charge"})
        assert "charge" not in model.adapt_input(batch)
        batch.set("charge", torch.ones(3, 1))
        assert model.adapt_input(batch)["charge"].shape == (3, 1)

    def test_no_embeddings(self, batch: Batch) -> None:
        assert Spring().embedding_shapes == {}
        with pytest.raises(ModelError, match="no embeddings"):
            Spring().compute_embeddings(batch)

    def test_batch_is_left_as_it_was(self, batch: Batch) -> None:
        before = {name: value.clone() for name, value in batch}
        Spring()(batch)
        after = dict(iter(batch))
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_neighbor_hooks(self) -> None:
        assert Spring().make_neighbor_hooks() == []
        (hook,) = LennardJonesModel(0.01, 3.4, 8.0, skin=0.3).make_neighbor_hooks()
        assert hook.config.cutoff == 8.0
        assert hook.table.skin == 0.3


class TestSum:
    def test_is_the_sum_of_the_terms(self, batch: Batch) -> None:
        a, b, lj = Spring(1.0), Spring(0.5), LennardJonesModel(0.01, 3.4, 8.0)
        model = a + b + lj
        assert isinstance(model, AdditiveModel)
        assert model.models == [a, b, lj]
        total = model(batch)
        for name in ("energy", "forces"):
            torch.testing.assert_close(
                total[name], a(batch)[name] + b(batch)[name] + lj(batch)[name]
            )

    def test_only_common_outputs(self, batch: Batch) -> None:
        model = Spring() + Spring(outputs={"energy"}, active_outputs={"energy"})
        assert list(model(batch)) == ["energy"]
        with pytest.raises(ModelError, match="no output in common"):
            _ = Spring() + Spring(outputs={"dipole"}, active_outputs={"dipole"})

    def test_config_of_a_sum(self) -> None:
        near, far = LennardJonesModel(0.01, 3.4, 6.0), LennardJonesModel(0.01, 3.4, 8.0)
        config = (near + far).model_config
        assert config.neighbor_config == far.model_config.neighbor_config
        assert config.supports_pbc
        assert not (near + DemoModelWrapper()).model_config.supports_pbc

    def test_active_outputs_reach_the_terms(self, batch: Batch) -> None:
        model = LennardJonesModel(0.01, 3.4, 6.0) + LennardJonesModel(0.02, 3.4, 6.0)
        model.set_config("active_outputs", {"energy", "forces", "stress"})
        assert list(model(batch)) == ["energy", "forces", "stress"]

    def test_parameters_and_precision(self, batch: Batch) -> None:
        model = Spring() + DemoModelWrapper()
        assert len(list(model.parameters())) > 1
        assert model(batch)["energy"].dtype == torch.float64

    def test_other_things_cannot_be_added(self) -> None:
        with pytest.raises(TypeError, match="unsupported operand"):
            _ = Spring() + 1


def test_unknown_config_option_error_is_typed() -> None:
    with pytest.raises(UnknownFieldError):
        Spring().set_config("cutoff", 3.0)


def test_room_is_lazy_and_complete() -> None:
    from alchemi_xr import models

    assert all(getattr(models, name) is not None for name in models.__all__)
    assert set(models.__all__) <= set(dir(models))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        models.Nothing


def test_registry_finds_the_models() -> None:
    from alchemi_xr.registry import hooks, models

    assert models.get("lj") is LennardJonesModel
    assert all(callable(hooks.get(name)) for name in hooks)

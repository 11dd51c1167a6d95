"""ASE calculators: values, reuse, charges and failures."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.errors import ConfigError, ModelError
from alchemi_xr.models.ase import ASECalculatorModel, CalculatorError


def data_of(atoms: Atoms, dtype: torch.dtype = torch.float64, **fields: Any) -> AtomicData:
    if atoms.pbc.any():
        fields |= {
            "cell": torch.from_numpy(atoms.cell.array).to(dtype)[None],
            "pbc": torch.from_numpy(atoms.pbc)[None],
        }
    return AtomicData(
        atomic_numbers=torch.from_numpy(atoms.numbers.astype(np.int64)),
        positions=torch.from_numpy(atoms.positions).to(dtype),
        **fields,
    )


def batch_of(systems: list[Atoms], **options: Any) -> Batch:
    return Batch.from_data_list([data_of(a, **options) for a in systems])


class Witness(Calculator):
    """Remembers what it was asked, and how many of its kind there are."""

    implemented_properties = ("energy", "forces")
    made = 0
    calls = 0
    charges: list[float] = []  # noqa: RUF012
    moments: list[float] = []  # noqa: RUF012
    fail_on: int | None = None

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1

    @classmethod
    def forget(cls) -> None:
        cls.made = cls.calls = 0
        cls.charges, cls.moments, cls.fail_on = [], [], None

    def calculate(
        self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        cls = type(self)
        cls.calls += 1
        if cls.fail_on is not None and cls.fail_on in self.atoms.numbers:
            raise RuntimeError("SCF did not converge")
        cls.charges.append(float(self.atoms.get_initial_charges().sum()))
        cls.moments.append(float(self.atoms.get_initial_magnetic_moments().sum()))
        self.results = {
            "energy": float(self.atoms.positions.sum()),
            "forces": -np.ones((len(self.atoms), 3)),
        }


@pytest.fixture(autouse=True)
def _fresh_witness() -> None:
    Witness.forget()


def test_values_are_those_of_the_calculator() -> None:
    crystal = bulk("Cu", cubic=True)
    crystal.rattle(0.1, seed=2)
    systems = [crystal, molecule("CO"), bulk("Au")]
    model = ASECalculatorModel(EMT, ("energy", "forces", "stress"))
    batch = batch_of(systems)
    output = model(batch)
    assert list(output) == ["energy", "forces", "stress"]
    ptr = batch.atoms_ptr.tolist()
    for k, atoms in enumerate(systems):
        atoms.calc = EMT()
        assert float(output["energy"][k]) == atoms.get_potential_energy()
        np.testing.assert_array_equal(output["forces"][ptr[k] : ptr[k + 1]], atoms.get_forces())
        if atoms.pbc.all():
            np.testing.assert_array_equal(output["stress"][k], atoms.get_stress(voigt=False))
        else:
            assert torch.isnan(output["stress"][k]).all()


def test_energy_is_double_and_the_rest_like_positions() -> None:
    output = ASECalculatorModel(EMT)(batch_of([bulk("Cu")], dtype=torch.float32))
    assert output["energy"].dtype == torch.float64
    assert output["forces"].dtype == torch.float32


def test_calculators_stay_with_their_systems() -> None:
    model = ASECalculatorModel(Witness)
    batch = batch_of([molecule("H2O"), molecule("CO")])
    for _ in range(3):
        batch.positions.add_(0.01)
        model(batch)
    assert (Witness.made, Witness.calls) == (2, 6)


def test_a_system_that_did_not_move_costs_nothing() -> None:
    model = ASECalculatorModel(Witness)
    batch = batch_of([molecule("H2O"), molecule("CO")])
    first = model(batch)
    batch.positions[3:] += 0.01
    second = model(batch)
    assert Witness.calls == 3
    assert torch.equal(first["energy"][0], second["energy"][0])


def test_calculators_follow_system_ids_through_a_refill() -> None:
    model = ASECalculatorModel(Witness)
    batch = batch_of([molecule("H2O"), molecule("CO"), molecule("CH4")])
    batch.set("system_id", torch.tensor([[4], [5], [6]]))
    model(batch)
    rest = batch.index_select([1, 2])
    rest.positions.add_(0.01)
    model(rest)
    assert Witness.made == 3


def test_another_molecule_with_the_same_number_is_another_system() -> None:
    model = ASECalculatorModel(Witness)
    batch = batch_of([molecule("H2O")])
    model(batch)
    batch.positions.add_(5.0)  # no step is that long
    model(batch)
    assert Witness.made == 2
    model(batch_of([molecule("CO")]))
    assert Witness.made == 3


def test_shared_calculator() -> None:
    model = ASECalculatorModel(Witness, calculators="shared")
    batch = batch_of([molecule("H2O"), molecule("CO")])
    output = model(batch)
    assert Witness.made == 1
    expected = [float(a.positions.sum()) for a in (molecule("H2O"), molecule("CO"))]
    assert output["energy"][:, 0].tolist() == pytest.approx(expected)


def test_charge_and_spin_reach_the_calculator() -> None:
    ion = data_of(molecule("OH"), charge=-1.0, spin=1.0)
    radical = data_of(molecule("CH3"), charge=0.0, spin=2.0)
    ASECalculatorModel(Witness)(Batch.from_data_list([ion, radical]))
    assert Witness.charges == [-1.0, 0.0]
    assert Witness.moments == [0.0, 1.0]


def test_absent_charge_and_spin_are_not_told() -> None:
    with_charge = data_of(molecule("OH"), charge=-1.0)
    without = data_of(molecule("CH3"))
    ASECalculatorModel(Witness)(Batch.from_data_list([with_charge, without]))
    assert Witness.charges == [-1.0, 0.0]
    assert Witness.moments == [0.0, 0.0]


class TestFailures:
    def batch(self) -> Batch:
        return batch_of([molecule("H2O"), molecule("SO2"), molecule("CO")])

    def test_raising_names_the_systems(self) -> None:
        Witness.fail_on = 8  # every one of them has oxygen
        with pytest.raises(ModelError, match=r"system 0.*systems \[1, 2\].*SCF did not") as caught:
            ASECalculatorModel(Witness)(self.batch())
        assert caught.value.systems == [0, 1, 2]  # type: ignore[attr-defined]
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_the_error_survives_pickling(self) -> None:
        error = CalculatorError("system 1", "failed", systems=[1, 4])
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.systems) == (str(error), [1, 4])

    def test_nan_goes_on_with_the_others(self) -> None:
        Witness.fail_on = 16
        model = ASECalculatorModel(Witness, on_error="nan")
        batch = self.batch()
        output = model(batch)
        assert torch.isfinite(output["energy"][:, 0]).tolist() == [True, False, True]
        assert torch.isnan(output["forces"][3:6]).all()
        assert torch.isfinite(output["forces"][:3]).all()
        assert list(model.failures) == [1]
        assert "SCF did not converge" in model.failures[1]
        Witness.fail_on = None
        assert torch.isfinite(model(batch)["energy"]).all()
        assert model.failures == {}

    def test_a_shared_calculator_that_failed_serves_nobody_any_more(self) -> None:
        model = ASECalculatorModel(Witness, on_error="nan", calculators="shared")
        batch = self.batch()
        model(batch)
        Witness.fail_on = 16
        batch.positions.add_(0.01)
        model(batch)
        made, Witness.fail_on = Witness.made, None
        batch.positions.add_(0.01)
        used = {id(model._calculator_of(site)) for site in model._sites.values()}
        assert torch.isfinite(model(batch)["energy"]).all()
        assert used == {id(model._shared)}
        assert Witness.made == made + 1

    def test_results_of_the_wrong_shape_are_a_failure_of_their_system(self) -> None:
        class Short(Witness):
            def calculate(self, *args: Any, **kwargs: Any) -> None:
                super().calculate(*args, **kwargs)
                if 16 in self.atoms.numbers:
                    self.results["forces"] = self.results["forces"][:1]

        output = ASECalculatorModel(Short, on_error="nan")(self.batch())
        assert torch.isfinite(output["energy"][:, 0]).tolist() == [True, False, True]
        with pytest.raises(CalculatorError, match=r"system 1.*forces has the wrong shape"):
            ASECalculatorModel(Short)(self.batch())

    def test_a_property_that_the_calculator_lacks(self) -> None:
        model = ASECalculatorModel(Witness, ("energy", "dipole"))
        with pytest.raises(ModelError, match="dipole"):
            model(self.batch())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"factory": EMT()}, "factory must be callable"),
        ({"properties": ("forces",)}, "lack 'energy'"),
        ({"properties": ("energy", "magmoms")}, r"\['magmoms'\] are not known"),
        ({"on_error": "skip"}, "on_error"),
        ({"workers": 0}, "workers"),
        ({"calculators": "one"}, "calculators"),
        ({"workers": 2, "calculators": "shared"}, "several threads"),
    ],
)
def test_options_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ASECalculatorModel(**{"factory": EMT, **options})


def test_threads_give_the_same() -> None:
    systems = [bulk("Cu", cubic=True), bulk("Au"), molecule("H2O"), molecule("CO")]
    for k, atoms in enumerate(systems):
        atoms.rattle(0.05, seed=k)
    batch = batch_of(systems)
    one, many = ASECalculatorModel(EMT)(batch), ASECalculatorModel(EMT, workers=2)(batch)
    assert torch.equal(one["forces"], many["forces"])


def test_the_model_travels_to_workers() -> None:
    model = ASECalculatorModel(partial(EMT, asap_cutoff=False))
    batch = batch_of([bulk("Cu")])
    energy = model(batch)["energy"]
    assert torch.equal(pickle.loads(pickle.dumps(model))(batch)["energy"], energy)


@pytest.mark.physics
def test_gfn2_xtb() -> None:
    tblite = pytest.importorskip("tblite.ase")
    model = ASECalculatorModel(partial(tblite.TBLite, method="GFN2-xTB", verbosity=0))
    radical = molecule("CH3")
    spin = float(radical.get_initial_magnetic_moments().sum()) + 1.0
    data = [data_of(molecule("H2O"), spin=1.0), data_of(radical, spin=spin)]
    energies = model(Batch.from_data_list(data))["energy"]
    for k, atoms in enumerate((molecule("H2O"), radical)):
        atoms.calc = tblite.TBLite(method="GFN2-xTB", verbosity=0)
        assert float(energies[k]) == pytest.approx(atoms.get_potential_energy(), abs=1e-6)


def test_reset_forgets_the_systems() -> None:
    model, batch = ASECalculatorModel(Witness), batch_of([molecule("H2O")])
    model(batch)
    model.reset_systems()
    model(batch)
    assert (Witness.made, Witness.calls) == (2, 2)

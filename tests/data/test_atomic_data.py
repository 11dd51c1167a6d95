"""One sample: what is accepted, what is refused and with which words."""

import copy
import pickle

import numpy as np
import pytest
import torch

from alchemi_xr.data import AtomCategory, AtomicData, Batch
from alchemi_xr.errors import FieldError, UnknownFieldError


def water(**fields):
    given = {
        "atomic_numbers": torch.tensor([8, 1, 1]),
        "positions": torch.tensor([[0.0, 0.0, 0.1], [0.0, 0.8, -0.5], [0.0, -0.8, -0.5]]),
    }
    return AtomicData(**{**given, **fields})


def test_the_smallest():
    data = water()
    assert data.num_nodes == 3
    assert data.num_edges == 0
    assert data.dtype == torch.float32
    assert data.device == torch.device("cpu")
    assert data.energy is None
    assert data.cell is None


def test_defaults_are_made_when_asked_for():
    data = water()
    assert "velocities" not in data.node_properties
    assert torch.equal(data.velocities, torch.zeros(3, 3))
    assert data.atomic_masses.tolist() == pytest.approx([15.999, 1.008, 1.008])
    assert data.atom_categories.dtype == torch.int64
    assert data.atom_categories.tolist() == [0, 0, 0]
    data.velocities += 1.0
    assert torch.equal(data.velocities, torch.ones(3, 3))


@pytest.mark.parametrize(
    ("name", "value", "shape", "dtype"),
    [
        ("energy", -1.5, (1, 1), torch.float64),
        ("energy", [-1.5], (1, 1), torch.float64),
        ("energy", torch.tensor(-1.5), (1, 1), torch.float32),
        ("energy", np.float64(-1.5), (1, 1), torch.float64),
        ("energies", torch.tensor([-1.5], dtype=torch.float64), (1, 1), torch.float64),
        ("cell", np.eye(3, dtype=np.float32), (1, 3, 3), torch.float32),
        ("cell", [1.0, 2.0, 3.0], (1, 3, 3), torch.float32),
        ("pbc", [True, False, True], (1, 3), torch.bool),
        ("pbc", True, (1, 3), torch.bool),
        ("pbc", torch.tensor([[1, 0, 1]]), (1, 3), torch.bool),
        ("stresses", torch.zeros(3, 3), (1, 3, 3), torch.float32),
        ("virials", torch.zeros(1, 3, 3), (1, 3, 3), torch.float32),
        ("dipole", [0.0, 0.0, 1.0], (1, 3), torch.float32),
        ("charge", 1, (1, 1), torch.float32),
        ("forces", np.zeros((3, 3), np.float32), (3, 3), torch.float32),
        ("atom_categories", [AtomCategory.GAS, AtomCategory.SPECIAL, 0], (3,), torch.int64),
    ],
)
def test_system_fields_are_coerced(name, value, shape, dtype):
    data = water(**{name: value})
    found = data[name]
    assert tuple(found.shape) == shape
    assert found.dtype == dtype


def test_aliases_are_the_same_field():
    data = water(energies=torch.tensor([[2.0]]))
    assert data.energy is data.energies
    assert "energies" in data
    data.energies = torch.tensor([[3.0]])
    assert data.energy.item() == 3.0
    with pytest.raises(FieldError, match="given twice"):
        water(energy=1.0, energies=2.0)


def test_energy_keeps_its_dtype_and_others_follow_the_positions():
    energy = torch.tensor([[-123456.789012345]], dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"'forces' is cast from torch.float64 to torch.float32"):
        data = water(energy=energy, forces=torch.zeros(3, 3, dtype=torch.float64))
    assert data.energy.dtype == torch.float64
    assert data.energy.item() == energy.item()
    assert data.forces.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"positions": None}, "required field 'positions' is missing"),
        ({"atomic_numbers": None}, "required field 'atomic_numbers' is missing"),
        (
            {"forces": torch.zeros(2, 3)},
            "Inconsistent number of atoms in forces: expected 3, got 2",
        ),
        ({"positions": torch.zeros(2, 3)}, "Inconsistent number of atoms in positions"),
        ({"positions": torch.zeros(3, 2)}, r"found \[3, 2\], expected \[V, 3\]"),
        ({"charges": torch.zeros(3, 1)}, r"'charges' has the wrong shape"),
        ({"neighbor_list": torch.zeros(2, 5, dtype=torch.long)}, r"expected \[E, 2\]"),
        (
            {
                "neighbor_list": torch.zeros(4, 2, dtype=torch.long),
                "shifts": torch.zeros(3, 3),
            },
            "Inconsistent number of edges in shifts: expected 4, got 3",
        ),
        ({"neighbor_list": torch.tensor([[0, 3]])}, "names an atom that is not there: found 3"),
        ({"neighbor_list": torch.tensor([[-1, 0]])}, "names an atom that is not there: found -1"),
        ({"energy": torch.zeros(2, 1)}, "'energy'"),
        ({"cell": torch.zeros(2, 3, 3)}, "'cell'"),
        ({"atomic_numbers": torch.tensor([1.0, 1.0, 1.0])}, "'atomic_numbers' has the wrong dtype"),
        ({"positions": torch.zeros(3, 3, dtype=torch.long)}, "'positions' has the wrong dtype"),
        ({"pbc": torch.tensor([0.5, 1.0, 0.0])}, "'pbc' has the wrong dtype"),
        ({"forces": "none"}, "'forces' is no array"),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(FieldError, match=words):
        water(**fields)
    with pytest.raises(ValueError, match=words):
        water(**fields)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_positions_must_be_finite(bad):
    positions = torch.zeros(3, 3)
    positions[1, 2] = bad
    with pytest.raises(FieldError, match="positions of atom 1 are not finite"):
        water(positions=positions)
    assert (
        AtomicData(
            positions=positions, atomic_numbers=torch.tensor([8, 1, 1]), validate=False
        ).num_nodes
        == 3
    )


def test_large_but_finite_positions_pass():
    # The sum overflows float16, each number is finite.
    data = water(positions=torch.full((3, 3), 60000.0, dtype=torch.float16))
    assert data.dtype == torch.float16


def test_assignment_is_checked():
    data = water()
    with pytest.raises(FieldError, match="expected 3, got 4"):
        data.forces = torch.zeros(4, 3)
    data["forces"] = torch.ones(3, 3)
    assert data.forces.sum() == 9
    data.forces = None
    assert data.forces is None
    with pytest.raises(FieldError, match="cannot be None"):
        data.positions = None
    with pytest.raises(FieldError, match="number of atoms"):
        data.atomic_numbers = torch.tensor([1])
    with pytest.raises(AttributeError):
        data.num_nodes = 3


def test_edges_of_another_length_need_the_other_edge_fields_gone():
    data = water(neighbor_list=torch.tensor([[0, 1], [1, 0]]), shifts=torch.zeros(2, 3))
    with pytest.raises(FieldError, match="Inconsistent number of edges in shifts"):
        data.neighbor_list = torch.tensor([[0, 1]])
    data.shifts = None
    data.neighbor_list = torch.tensor([[0, 1]])
    assert data.num_edges == 1


def test_unknown_names_are_plain_until_registered():
    data = water(foo=torch.ones(3))
    assert data.foo.sum() == 3
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        _ = data.force_
    data.add_node_property("foo", torch.ones(3))
    data.add_node_property("wide", torch.ones(2, 3), node_dim=1)
    data.add_system_property("temperature_k", 300.0)
    data.neighbor_list = torch.tensor([[0, 1]])
    data.add_edge_property("weight", torch.ones(1, 4))
    assert set(data.node_properties) >= {"foo", "wide"}
    assert data.wide.shape == (3, 2)
    assert data.level_of("temperature_k") == "system"
    assert list(data.edge_properties) == ["neighbor_list", "weight"]
    with pytest.raises(FieldError, match="expected 3, got 2"):
        data.add_node_property("bar", torch.ones(2))
    with pytest.raises(FieldError, match="leading axis of 1"):
        data.add_system_property("bar", torch.ones(2))
    with pytest.raises(FieldError, match="fixed level"):
        data.add_system_property("forces", torch.ones(1, 3))
    with pytest.raises(FieldError, match="is a member"):
        data.add_node_property("device", torch.ones(3))
    batch = Batch.from_data_list([data])
    assert batch.level_of("foo") == "atom"
    assert batch.level_of("weight") == "edge"


def test_unregistered_tensors_can_be_given_a_level():
    data = water(foo=torch.ones(3))
    with pytest.warns(UserWarning, match=r"\['foo'\] have no level and are left out"):
        assert "foo" not in Batch.from_data_list([data])
    assert "foo" not in Batch.from_data_list([data], exclude_keys=["foo"])
    batch = Batch.from_data_list([data, data], field_levels={"foo": "node"})
    assert batch.level_of("foo") == "atom"
    assert len(batch.foo) == 6
    batch = Batch.from_data_list([data], attr_map={"atoms": ["foo"]})
    assert batch.level_of("foo") == "atom"


def test_hash_is_of_the_structure_only():
    data = water(energy=1.0)
    assert data == water(energy=2.0)
    assert data.chemical_hash == water().chemical_hash
    assert data != water(pbc=True, cell=torch.eye(3))
    swapped = AtomicData(
        atomic_numbers=torch.tensor([1, 8, 1]),
        positions=data.positions[[1, 0, 2]],
    )
    assert swapped == data
    assert len({data, water(), swapped}) == 1
    assert data != "water"


def test_copies_share_nothing():
    data = water(energy=1.0, foo=torch.ones(2))
    data.info["note"] = "x"
    data.add_system_property("label", torch.tensor([7]))
    for made in (
        data.clone(),
        data.to("cpu"),
        data.cpu(),
        copy.deepcopy(data),
        pickle.loads(pickle.dumps(data)),
    ):
        made.positions[0, 0] = 99.0
        assert data.positions[0, 0] == 0.0
        assert made.info == {"note": "x"}
        assert made.foo.tolist() == [1.0, 1.0]
        assert made.level_of("label") == "system"
        assert made.energy.dtype == torch.float64
    double = data.to(dtype=torch.float64)
    assert double.positions.dtype == torch.float64
    assert double.atomic_numbers.dtype == torch.int64


def test_pickling_a_part_does_not_write_the_whole():
    many = Batch.from_data_list([water()] * 1000)
    assert len(pickle.dumps(many.to_data_list()[3])) < 4000
    assert len(pickle.dumps(many.get_data(3))) < 4000


def test_dicts_and_iteration():
    data = water(energy=1.0)
    assert list(data.to_dict()) == ["atomic_numbers", "positions", "energy"]
    assert dict(data) == data.model_dump()
    assert "AtomicData(atomic_numbers=[3], positions=[3, 3], energy=[1, 1])" in repr(data)
    del data.energy
    assert data.energy is None


def test_mass_of_an_unknown_element():
    data = water(atomic_numbers=torch.tensor([8, 1, 250]))
    with pytest.raises(FieldError, match="no mass in the element table: found 250"):
        _ = data.atomic_masses


@pytest.mark.gpu
def test_one_device():
    with pytest.raises(FieldError, match="another device"):
        water(forces=torch.zeros(3, 3).cuda())
    assert water().cuda().device.type == "cuda"


def test_a_refused_property_leaves_no_trace():
    data = AtomicData(atomic_numbers=torch.tensor([1, 8]), positions=torch.zeros(2, 3))
    data.depth = "a plain attribute"
    with pytest.raises(FieldError, match="leading axis of 1"):
        data.add_system_property("depth", torch.zeros(3))
    assert data.depth == "a plain attribute"
    with pytest.raises(UnknownFieldError):
        data.level_of("depth")
    data.add_node_property("depth", torch.zeros(2))
    with pytest.raises(FieldError):
        data.add_system_property("depth", torch.zeros(3))
    assert data.level_of("depth") == "atom"


def test_pin_memory_needs_no_gpu():
    data = AtomicData(atomic_numbers=torch.tensor([1]), positions=torch.zeros(1, 3))
    pinned = data.pin_memory()
    assert pinned.positions.is_pinned() == torch.cuda.is_available()
    assert pinned.positions.data_ptr() != data.positions.data_ptr()

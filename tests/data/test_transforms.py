"""Compose tells samples from batches and says which transform failed."""

import pickle

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch, Compose, transforms
from alchemi_xr.errors import FieldError


def one(**fields):
    return AtomicData(atomic_numbers=torch.tensor([29]), positions=torch.zeros(1, 3), **fields)


def shift(data: AtomicData, meta: dict) -> tuple[AtomicData, dict]:
    data.positions = data.positions + 1
    return data, {**meta, "shifted": True}


def untyped(data, meta):
    data.positions = data.positions * 10
    return data, meta


def fail(data: "AtomicData", meta):
    raise KeyError("nothing")


def double(batch: Batch) -> Batch:
    batch.positions = batch.positions * 2
    return batch


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, batch: "Batch") -> "Batch":
        batch.positions = batch.positions * self.factor
        return batch


def test_samples_from_left_to_right():
    both = Compose([shift, untyped])
    assert both.kind == "sample"
    data, meta = both(one(), {"index": 3})
    assert data.positions.tolist() == [[10.0] * 3]
    assert meta == {"index": 3, "shifted": True}
    assert Compose([untyped]).kind == "sample"
    assert len(Compose([])) == 0
    data = one()
    assert Compose([])(data, {}) == (data, {})


def test_batches():
    both = Compose([double, Scale(3.0), lambda batch: batch])
    assert both.kind == "batch"
    batch = Batch.from_data_list([one()])
    batch.positions = torch.ones(1, 3)
    assert both(batch).positions.tolist() == [[6.0] * 3]
    assert Compose([Compose([double])]).kind == "batch"
    assert "double" in repr(both)
    assert pickle.loads(pickle.dumps(Compose([double]))).kind == "batch"


def test_wrong_transforms():
    with pytest.raises(TypeError, match="mixed"):
        Compose([shift, double])
    with pytest.raises(TypeError, match=r"transform\[1\]: is not callable"):
        Compose([shift, 3])
    with pytest.raises(TypeError, match="not a sequence"):
        Compose(shift)

    def other(x: int):
        return x

    with pytest.raises(TypeError, match="neither AtomicData nor Batch: found int"):
        Compose([other])

    def nothing():
        return None

    with pytest.raises(TypeError, match="takes no argument"):
        Compose([nothing])


def test_failures_name_the_transform():
    with pytest.raises(
        RuntimeError, match=r"Compose: transform\[1\] fail raised KeyError"
    ) as caught:
        Compose([shift, fail])(one(), {})
    assert isinstance(caught.value.__cause__, KeyError)

    def forget(data: AtomicData, meta):
        data.positions += 1

    with pytest.raises(RuntimeError, match=r"transform\[0\] forget: must return"):
        Compose([forget])(one(), {})

    def lose(batch: Batch):
        return None

    with pytest.raises(RuntimeError, match="must return a Batch: found NoneType"):
        Compose([lose])(Batch.from_data_list([one()]))


def test_supercell_equals_ase():
    from ase.build import bulk

    atoms = bulk("NaCl", "rocksalt", a=5.64)
    data = AtomicData.from_atoms(atoms, dtype=torch.float64)
    data.energy = -2.0
    data.add_node_property("tag", torch.tensor([1, 2]))
    data.neighbor_list = torch.tensor([[0, 1]])
    made = transforms.make_supercell(data, (2, 1, 3))
    expected = atoms.repeat((2, 1, 3))
    torch.testing.assert_close(made.positions, torch.from_numpy(expected.positions))
    torch.testing.assert_close(made.cell[0], torch.from_numpy(expected.cell.array))
    assert made.atomic_numbers.tolist() == expected.numbers.tolist()
    assert made.energy.item() == -12.0
    assert made.tag.tolist() == [1, 2] * 6
    assert made.neighbor_list is None
    assert data.num_nodes == 2
    with pytest.raises(FieldError, match="'cell' is missing"):
        transforms.make_supercell(one(), 2)
    with pytest.raises(FieldError, match="wrong repeats"):
        transforms.make_supercell(data, (0, 1, 1))

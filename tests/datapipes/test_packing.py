"""Objects with their tensors in one piece of shared memory."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from alchemi_xr.data import Batch
from alchemi_xr.data.datapipes.packing import pack, unpack
from tests.datapipes.conftest import make


def test_what_is_in_it_comes_out() -> None:
    one = torch.arange(12).reshape(3, 4)
    value: dict[str, Any] = {
        "one": one,
        "again": [one],
        "columns": one.T,
        "none": torch.empty(0, 3, dtype=torch.float64),
        "single": torch.tensor(3, dtype=torch.int8),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "conj": torch.tensor([1 + 2j]).conj(),
        "grad": torch.ones(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "text": "x",
    }
    packed = pack(value)
    found = unpack(packed)
    assert found["again"][0] is found["one"]
    for name, tensor in value.items():
        if isinstance(tensor, torch.Tensor):
            other = found[name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            assert other.requires_grad == tensor.requires_grad
            assert torch.equal(other.to_dense(), tensor.to_dense()), name
    assert not packed.memory.is_shared()  # so little goes through the pipe
    large = pack(torch.ones(2**20 + 1))
    assert large.memory.is_shared()
    assert float(unpack(large).sum()) == 2**20 + 1
    small = pickle.loads(pickle.dumps(pack(torch.arange(5))))
    assert unpack(small).tolist() == [0, 1, 2, 3, 4]
    before = found["one"]._version, found["half"]._version
    found["one"][0, 0] = 99
    assert found["flags"].tolist() == [True, False]
    assert one[0, 0] == 0
    assert (found["one"]._version, found["half"]._version) == (before[0] + 1, before[1])


def test_a_batch_keeps_all_of_it() -> None:
    batch = Batch.from_data_list(make(8, holes=True))
    found = unpack(pack(batch))
    assert list(found.to_dict()) == list(batch.to_dict())
    for name, value in batch:
        assert torch.equal(found.has(name), batch.has(name))
        assert torch.allclose(found[name].double(), value.double(), 0, 0, equal_nan=True)
    kept = found.index_select([3, 1])
    assert kept.num_graphs == 2


def test_a_function_of_a_script_goes_along_by_value() -> None:
    spare = torch.ones(2)
    found = unpack(pack(lambda: spare * 3, by_value=True))
    assert found().tolist() == [3, 3]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack(lambda: spare)

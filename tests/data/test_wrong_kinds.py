"""Arguments of the wrong kind are named, with what was found and what to do instead."""

from __future__ import annotations

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.errors import ArgumentTypeError


def sample() -> AtomicData:
    return AtomicData(positions=torch.zeros(2, 3), atomic_numbers=torch.ones(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda b: Batch.from_data_list(None), "found NoneType, expected a list of AtomicData"),
        (lambda b: Batch.from_data_list(sample()), "put it into a list"),
        (lambda b: Batch.from_data_list([sample(), 1]), "sample 1: .*found int"),
        (lambda b: b.append_data([{}]), "sample 0: .*found dict"),
        (lambda b: b.append(sample()), "append_data"),
        (lambda b: b.append(None), "found NoneType, expected a Batch"),
        (lambda b: b.get_data("x"), "found str, expected a whole number"),
        (lambda b: Batch.from_block(None), "expected a Block"),
        (lambda b: AtomicData.from_atoms(None), "expected ase.Atoms"),
    ],
)
def test_a_wrong_kind_is_named(call, text) -> None:
    batch = Batch.from_data_list([sample(), sample()])
    with pytest.raises(ArgumentTypeError, match=text):
        call(batch)
    assert batch.num_graphs == 2

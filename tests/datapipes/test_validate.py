from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from alchemi_xr.data import Batch
from alchemi_xr.data.datapipes.validate import match_dtypes, validate_batch
from alchemi_xr.errors import FieldError


def batch(**changes: torch.Tensor) -> Batch:
    samples: list[dict[str, Any]] = []
    for atoms, pairs in ((2, [[0, 1], [1, 0]]), (1, []), (3, [[2, 0]])):
        samples.append(
            {
                "positions": torch.zeros(atoms, 3),
                "atomic_numbers": torch.ones(atoms, dtype=torch.long),
                "neighbor_list": torch.tensor(pairs, dtype=torch.long).reshape(-1, 2),
                "energy": torch.zeros(1, 1, dtype=torch.float64),
            }
        )
    made = Batch.from_raw_dicts(samples)
    for name, value in changes.items():
        made[name] = value
    return made


def test_a_right_batch_passes() -> None:
    made = batch()
    assert validate_batch(made, [7, 8, 9], where="s") is made


def test_positions_must_be_finite() -> None:
    positions = torch.zeros(6, 3)
    positions[4, 2] = float("inf")
    with pytest.raises(FieldError, match=r"s: sample 9, field 'positions', row 1 is not finite"):
        validate_batch(batch(positions=positions), [7, 8, 9], where="s")


@pytest.mark.parametrize("wrong", [[2, 0], [3, 6], [3, -1]])
def test_edges_stay_in_their_sample(wrong: list[int]) -> None:
    pairs = batch()["neighbor_list"].clone()
    pairs[2] = torch.tensor(wrong)
    with pytest.raises(FieldError, match=r"neighbor_list of sample 9.*expected 0 to 2"):
        validate_batch(batch(neighbor_list=pairs), [7, 8, 9], where="s")


def test_numbers_are_whole() -> None:
    made = batch()
    made.set("atomic_numbers", torch.ones(6), level="atom")
    with pytest.raises(FieldError, match="no whole numbers"):
        validate_batch(made, [7, 8, 9], where="s")


def test_required_fields() -> None:
    made = batch()
    del made["positions"]
    with pytest.raises(FieldError, match="no field 'positions'"):
        validate_batch(made, [7, 8, 9], where="s")


def test_dtypes_follow_positions_with_one_warning() -> None:
    warned: set[Any] = set()
    made = batch(forces=torch.zeros(6, 3, dtype=torch.float64))
    made.set("mine", torch.zeros(3, 1, dtype=torch.float64), level="system")
    with pytest.warns(UserWarning, match="'forces' is cast from torch.float64 to torch.float32"):
        match_dtypes(made, warned, where="s")
    assert made["forces"].dtype == torch.float32
    assert made["energy"].dtype == torch.float64
    assert made["mine"].dtype == torch.float64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        match_dtypes(batch(forces=torch.zeros(6, 3, dtype=torch.float64)), warned, where="s")

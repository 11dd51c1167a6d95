from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.data.datapipes.orders import cut, cut_lists, epoch_order


def test_a_shuffle_hangs_on_seed_and_epoch_alone() -> None:
    first = epoch_order(50, shuffle=True, seed=3, epoch=2)
    assert sorted(first.tolist()) == list(range(50))
    assert np.array_equal(first, epoch_order(50, shuffle=True, seed=3, epoch=2))
    for seed, epoch in ((3, 3), (4, 2), (2, 3)):
        assert not np.array_equal(first, epoch_order(50, shuffle=True, seed=seed, epoch=epoch))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("skip", [0, 1, 2, 5])
def test_cut_is_the_list_of_slices(length: int, drop_last: bool, skip: int) -> None:
    order = np.arange(length)
    expected = [order[i : i + 4].tolist() for i in range(0, length, 4)]
    if drop_last:
        expected = [part for part in expected if len(part) == 4]
    found = [p.tolist() for p in cut(order, 4, drop_last=drop_last, skip=skip)]
    assert found == expected[skip:]
    lists = list(cut_lists(iter(order), 4, drop_last=drop_last))
    assert lists == expected

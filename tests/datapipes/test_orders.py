from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.datapipes.orders import batch_bounds, cut_lists, epoch_order, of_rank


def test_a_shuffle_hangs_on_seed_and_epoch_alone() -> None:
    first = epoch_order(50, shuffle=True, seed=3, epoch=2)
    assert sorted(first.tolist()) == list(range(50))
    assert np.array_equal(first, epoch_order(50, shuffle=True, seed=3, epoch=2))
    for seed, epoch in ((3, 3), (4, 2), (2, 3)):
        assert not np.array_equal(first, epoch_order(50, shuffle=True, seed=seed, epoch=epoch))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_slices(length: int, drop_last: bool) -> None:
    order = np.arange(length)
    expected = [order[i : i + 4].tolist() for i in range(0, length, 4)]
    if drop_last:
        expected = [part for part in expected if len(part) == 4]
    bounds = batch_bounds(length, batch_size=4, drop_last=drop_last).tolist()
    assert [order[a:b].tolist() for a, b in itertools.pairwise(bounds)] == expected
    lists = list(cut_lists(iter(order), 4, drop_last=drop_last))
    assert lists == expected


@given(data=st.data(), world=st.integers(1, 7), length=st.integers(0, 60))
def test_ranks_share_an_epoch(data: st.DataObject, world: int, length: int) -> None:
    """Equal steps, no sample twice, none missing, no limit broken."""
    sizes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)))
    most = data.draw(st.one_of(st.none(), st.integers(9, 30)))
    batch = data.draw(st.integers(1, 9)) if most is None or data.draw(st.booleans()) else None
    drop = data.draw(st.booleans())
    limits = [] if most is None else [(sizes.astype(np.int64), most)]
    bounds = batch_bounds(length, batch_size=batch, limits=limits, drop_last=drop, world_size=world)
    steps = [of_rank(bounds, rank, world) for rank in range(world)]
    assert len({len(s) for s in steps}) == 1
    given: list[int] = []
    for number in range(len(steps[0])):
        for rank in range(world):
            a, b = bounds[steps[rank][number]], bounds[steps[rank][number] + 1]
            assert b > a
            assert batch is None or b - a <= batch
            assert most is None or sizes[a:b].sum() <= most
            given += range(a, b)
    # Whole rounds can be made of the samples there are, but for the very few.
    if drop:
        assert len(given) == len(set(given))
    elif len(given) != len(set(given)):
        assert np.diff(bounds)[-2 * world :].max() == 1
    if not drop:
        assert set(given) == set(range(length))
    elif most is None and batch is not None:
        assert len(given) == length // batch // world * world * batch


@given(
    cuts=st.lists(st.integers(1, 40), max_size=8, unique=True),
    length=st.integers(1, 40),
    together=st.integers(1, 4),
)
def test_blocks_are_shuffled_together(cuts: list[int], length: int, together: int) -> None:
    starts = np.array([0, *sorted(c for c in cuts if c < length)], np.int64)
    order = epoch_order(
        length, shuffle="block", seed=1, epoch=2, block_starts=starts, blocks_at_once=together
    )
    assert sorted(order.tolist()) == list(range(length))
    owner = np.searchsorted(starts, order, side="right") - 1
    # A block is left before the one after next begins.
    if len(starts) > 1:
        first = {b: int(np.flatnonzero(owner == b)[0]) for b in range(len(starts))}
        last = {b: int(np.flatnonzero(owner == b)[-1]) for b in range(len(starts))}
        at_once = [
            sum(first[b] <= place <= last[b] for b in range(len(starts))) for place in range(length)
        ]
        assert max(at_once) <= together


def test_batches_of_one_at_the_end_are_no_reason_to_give_one_twice() -> None:
    sizes = np.array([1, 1, 1, 1] + [4] * 9)
    bounds = batch_bounds(13, batch_size=None, limits=[(sizes, 4)], world_size=3)
    assert (len(bounds) - 1) % 3 == 0
    assert (np.diff(bounds) > 0).all()
    assert (bounds[0], bounds[-1]) == (0, 13)
    # Nothing to cut anywhere: a rank repeats the last batch.
    bounds = batch_bounds(4, batch_size=1, world_size=3)
    assert bounds.tolist() == [0, 1, 2, 3, 4]

"""Courses of a campaign as plain events and instructions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.campaign.state import (
    Abort,
    CampaignState,
    Fatal,
    Finish,
    LimitHit,
    Reject,
    SlotsChanged,
    Submit,
    Unit,
    UnitDone,
    UnitFailed,
    UnitState,
    as_ranges,
    failure_limit,
    plan_units,
)
from alchemi_xr.errors import CampaignError, ConfigError


def make_state(samples=10, unit_size=5, **options):
    units = plan_units(np.arange(samples), unit_size)
    return CampaignState(units, total=samples, **options)


def keys(instructions):
    return [i.unit.key for i in instructions if isinstance(i, Submit)]


def test_plan_covers_missing_samples_in_order():
    units = plan_units(np.array([0, 1, 4, 5, 6, 9]), 4, run=2)
    assert [u.key for u in units] == ["002-000000", "002-000001"]
    assert units[0].ranges == ((0, 2), (4, 6))
    assert np.concatenate([u.samples() for u in units]).tolist() == [0, 1, 4, 5, 6, 9]
    assert plan_units(np.arange(0), 4) == []
    with pytest.raises(ConfigError, match="a unit needs a sample"):
        plan_units(np.arange(3), 0)


@given(st.sets(st.integers(0, 60), min_size=2))
def test_split_parts_the_samples(samples):
    ids = np.array(sorted(samples))
    unit = Unit("k", as_ranges(ids))
    a, b = unit.split()
    assert unit.size == len(ids)
    assert np.concatenate([a.samples(), b.samples()]).tolist() == ids.tolist()
    assert abs(a.size - b.size) <= 1
    assert {a.key, b.key} == {"k.a", "k.b"}


def test_one_sample_cannot_be_split():
    with pytest.raises(CampaignError, match="cannot be split"):
        Unit("k", ((3, 4),)).split()


@pytest.mark.parametrize(
    ("given_limit", "limit"),
    [(None, None), (1.0, None), (0.1, 20), (0.0, 0), (0, 0), (7, 7), (0.001, 1)],
)
def test_failure_limit(given_limit, limit):
    assert failure_limit(given_limit, 200) == limit


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_failure_limit_refuses(wrong):
    with pytest.raises(ConfigError):
        failure_limit(wrong, 200)


def test_slots_bound_the_units_in_flight():
    state = make_state(samples=10, unit_size=2, slots=2)
    assert keys(state.start()) == ["000-000000", "000-000001"]
    assert keys(state.handle(UnitDone("000-000001", 2, 0))) == ["000-000002"]
    assert len(state.running) == 2
    assert state.waiting == 2
    assert keys(state.handle(SlotsChanged(3))) == ["000-000003"]


def test_finishes_when_everything_is_settled():
    state = make_state(slots=2)
    state.start()
    assert state.handle(UnitDone("000-000000", 5, 0)) == []
    assert state.handle(UnitDone("000-000001", 4, 1)) == [Finish()]
    assert (state.finished, state.rejected) == (9, 1)


def test_nothing_to_do_finishes_at_once():
    assert CampaignState([], total=5, finished=5).start() == [Finish()]


def test_a_lost_unit_is_tried_again_with_half_the_batch():
    state = make_state(slots=1)
    state.start()
    (again,) = state.handle(UnitFailed("000-000000", "worker died"))
    assert again == Submit(again.unit, attempt=1, scale=0.5, budget=None)
    assert again.unit.key == "000-000000"


def test_a_task_that_never_began_costs_no_attempt():
    state = make_state(slots=1)
    state.start()
    (again,) = state.handle(UnitFailed("000-000000", "worker died", begun=False))
    assert (again.attempt, again.scale) == (0, 1.0)


def test_a_worker_that_cannot_begin_ends_the_campaign():
    state = make_state(slots=1)
    state.start()
    for _ in range(CampaignState.MAX_UNBEGUN - 1):
        state.handle(UnitFailed("000-000000", "import failed", begun=False))
    (abort,) = state.handle(UnitFailed("000-000000", "import failed", begun=False))
    assert isinstance(abort, Abort)
    assert "import failed" in abort.reason


def test_what_breaks_around_a_unit_blames_no_sample():
    state = make_state(slots=1, max_attempts=2)
    state.start()
    (again,) = state.handle(UnitFailed("000-000000", "disk full", broken=True))
    assert isinstance(again, Submit)
    (abort,) = state.handle(UnitFailed("000-000000", "disk full", "tb", broken=True))
    assert abort == Abort("unit 000-000000 cannot be run: disk full", "tb")
    assert state.rejected == 0


def test_a_poison_that_kills_its_worker_is_found_and_alone_rejected():
    """The driver of a sample that always kills: bisected, the rest finishes."""
    poison = 6
    state = make_state(samples=16, unit_size=16, slots=1, max_attempts=2)
    todo, rejects, finished, losses = state.start(), [], [], 0
    while todo:
        instruction = todo.pop(0)
        match instruction:
            case Submit(unit=unit):
                if poison in unit.samples():
                    losses += 1
                    todo += state.handle(UnitFailed(unit.key, "killed"))
                else:
                    finished += unit.samples().tolist()
                    todo += state.handle(UnitDone(unit.key, unit.size, 0))
            case Reject(unit=unit):
                rejects += unit.samples().tolist()
            case Finish():
                break
    assert rejects == [poison]
    assert sorted(finished) == [i for i in range(16) if i != poison]
    assert state.states["000-000000"] is UnitState.SPLIT
    # 2 for the whole, 1 for each of 8, 4, 2, and 2 for the sample alone.
    assert losses == 7


def test_the_limit_stops_the_campaign_and_says_so():
    state = make_state(slots=2, limit=1)
    state.start()
    assert state.handle(UnitDone("000-000000", 4, 1)) == []
    (abort,) = state.handle(UnitDone("000-000001", 4, 1))
    assert isinstance(abort, Abort)
    assert "2 of 10 samples failed" in abort.reason
    assert "(1)" in abort.reason
    assert state.stopped
    assert state.handle(UnitDone("x", 1, 0)) == []


def test_a_limit_hit_inside_a_unit_stops_too():
    state = make_state(slots=2, limit=1)
    state.start()
    (abort,) = state.handle(LimitHit("000-000000", 2, "no convergence"))
    assert isinstance(abort, Abort)
    assert "the last: no convergence" in abort.reason


def test_rejected_lone_sample_counts_to_the_limit():
    state = CampaignState([Unit("u", ((0, 1),))], total=10, limit=0, max_attempts=1)
    state.start()
    reject, abort = state.handle(UnitFailed("u", "killed"))
    assert isinstance(reject, Reject)
    assert isinstance(abort, Abort)


def test_budget_shrinks_with_failures():
    state = make_state(slots=1, limit=3)
    (first,) = state.start()
    (second,) = state.handle(UnitDone("000-000000", 3, 2))
    assert (first.budget, second.budget) == (3, 1)


def test_fatal_aborts():
    state = make_state()
    state.start()
    assert state.handle(Fatal("cannot build", "tb")) == [Abort("cannot build", "tb")]


def test_a_unit_told_done_twice_counts_once():
    state = make_state(slots=2)
    state.start()
    state.handle(UnitDone("000-000000", 5, 0))
    state.handle(UnitDone("000-000000", 5, 0))
    assert state.handle(UnitFailed("000-000000", "late")) == []
    assert state.finished == 5


@settings(deadline=None)
@given(st.data())
def test_any_course_settles_every_sample_once(data):
    """Random ends of units: each sample is finished or rejected exactly once."""
    total = data.draw(st.integers(0, 25))
    state = CampaignState(
        plan_units(np.arange(total), data.draw(st.integers(1, 8))),
        total=total,
        slots=data.draw(st.integers(1, 4)),
        max_attempts=data.draw(st.integers(1, 3)),
    )
    settled: list[int] = []
    ended = False
    todo = state.start()
    while not ended:
        running = list(state.running)
        for instruction in todo:
            if isinstance(instruction, Reject):
                settled += instruction.unit.samples().tolist()
            ended |= isinstance(instruction, Finish)
        if ended:
            break
        assert 0 < len(running) <= state.slots
        key = data.draw(st.sampled_from(running))
        unit = state.running[key]
        if data.draw(st.booleans()):
            settled += unit.samples().tolist()
            todo = state.handle(UnitDone(key, unit.size, 0))
        else:
            todo = state.handle(UnitFailed(key, "killed"))
    assert sorted(settled) == list(range(total))
    assert state.finished + state.rejected == total

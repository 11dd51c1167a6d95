"""Plans: every row belongs to exactly one shard, whatever the partitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.errors import PlanError
from alchemi_xr.plan.plan import Extent, Plan, format_bytes, make_plan
from alchemi_xr.store.bulk import FieldLayout

LAYOUTS = (
    FieldLayout("positions", "atom", "float64", (3,)),
    FieldLayout("neighbor_list", "edge", "int64", (2,)),
    FieldLayout("energy", "system", "float64", (1,)),
    FieldLayout("label", "system", "str", (), "text", "", holes=True),
)
counts = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12
)


def _plan(sizes: list[tuple[int, int, int]], rows: dict[str, int]) -> Plan:
    return make_plan([Extent(*s, payload=None) for s in sizes], LAYOUTS, rows)  # type: ignore[arg-type]


@given(counts, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_every_row_has_one_writer(
    sizes: list[tuple[int, int, int]], a: int, e: int, s: int
) -> None:
    rows = {"atom": a, "edge": e, "system": s}
    if not any(size[0] for size in sizes):
        with pytest.raises(PlanError, match="no sample"):
            _plan(sizes, rows)
        return
    plan = _plan(sizes, rows)
    assert [t.number for t in plan.shards] == list(range(len(plan.shards)))
    for column, level in enumerate(("system", "atom", "edge")):
        tasks = [t for t in plan.shards if t.level == level]
        total = sum(size[column] for size in sizes)
        written = [r for t in tasks for r in range(t.start, t.stop)]
        assert written == list(range(total))
        assert all(t.start % rows[level] == 0 for t in tasks)
        base = np.concatenate(([0], np.cumsum([size[column] for size in sizes])))
        taken = [
            int(base[p.extent]) + r for t in tasks for p in t.pieces for r in range(p.start, p.stop)
        ]
        assert taken == written
    assert plan.num_samples == sum(size[0] for size in sizes)
    assert plan.sample_base[-1] == plan.num_samples


def test_bytes_and_words() -> None:
    plan = _plan([(10, 100, 0), (5, 60, 0)], {"atom": 64, "edge": 64, "system": 64})
    assert plan.row_bytes("atom") == 24
    assert plan.row_bytes("system") == 8 + 64
    assert plan.nbytes == 160 * 24 + 15 * 72
    text = plan.describe(threads=2)
    assert "15 samples, 160 atoms, 0 edges in 2 partitions" in text
    assert "2 read, 4 write" in text
    assert format_bytes(plan.memory(2)) in text


def test_memory_depends_on_partitions_not_on_their_number() -> None:
    rows = {"atom": 64, "edge": 64, "system": 64}
    few = _plan([(10, 100, 0)] * 10, rows)
    many = _plan([(10, 100, 0)] * 1000, rows)
    assert few.memory(2) == many.memory(2)
    assert few.memory(4) > few.memory(2)
    with pytest.raises(PlanError, match="memory"):
        few.check_memory(few.memory(2) - 1, 2, "x")
    few.check_memory(few.memory(2), 2, "x")


def test_fingerprints_tell_plans_apart() -> None:
    rows = {"atom": 64, "edge": 64, "system": 64}
    one = _plan([(10, 100, 0)], rows)
    assert one.fingerprint({"a": 1}) == _plan([(10, 100, 0)], rows).fingerprint({"a": 1})
    assert one.fingerprint({"a": 1}) != one.fingerprint({"a": 2})
    assert one.fingerprint({}) != _plan([(10, 101, 0)], rows).fingerprint({})
    assert one.fingerprint({}) != _plan([(10, 100, 0)], {**rows, "atom": 32}).fingerprint({})

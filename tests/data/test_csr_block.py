"""Pointer algebra and Block against slow loops over samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from alchemi_xr.data import csr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import as_index, counts_to_ptr
from alchemi_xr.data.fields import (
    ALIASES,
    FIELDS,
    as_rows,
    canonical_level,
    check_tail,
    field_order,
    fill_for,
    level_of,
    resolve,
)
from alchemi_xr.errors import FieldError, IndexRangeError, LevelError, UnknownFieldError

counts = st.lists(st.integers(0, 5), max_size=8).map(lambda c: np.array(c, dtype=np.int64))


@st.composite
def counts_and_samples(draw):
    c = draw(counts)
    pick = st.lists(st.integers(0, len(c) - 1), max_size=12) if len(c) else st.just([])
    return c, np.array(draw(pick), dtype=np.int64)


@given(counts_and_samples())
def test_row_indices_is_the_loop(case) -> None:
    c, samples = case
    ptr = counts_to_ptr(c)
    rows, new = csr.row_indices(ptr, samples)
    want = [r for s in samples for r in range(ptr[s], ptr[s + 1])]
    assert rows.tolist() == want
    assert new.tolist() == [0, *np.cumsum(c[samples]).tolist()]
    values = np.arange(ptr[-1]) * 10
    assert csr.take_rows(values, ptr, samples)[0].tolist() == [w * 10 for w in want]


@given(counts)
def test_index_and_mask_expansion(c) -> None:
    ptr = counts_to_ptr(c)
    assert csr.ptr_to_index(ptr).tolist() == [i for i, n in enumerate(c) for _ in range(n)]
    mask = np.arange(len(c)) % 2 == 0
    assert csr.expand_mask(mask, ptr).tolist() == [
        i % 2 == 0 for i, n in enumerate(c) for _ in range(n)
    ]
    csr.validate_ptr(ptr, rows=int(c.sum()))


@given(counts_and_samples())
def test_coalesced_ranges_hold_the_same_rows(case) -> None:
    c, samples = case
    ptr = counts_to_ptr(c)
    starts, stops = csr.coalesce(ptr[samples], ptr[samples + 1])
    assert [r for a, b in zip(starts, stops, strict=True) for r in range(a, b)] == csr.row_indices(
        ptr, samples
    )[0].tolist()
    assert (stops > starts).all()
    assert (starts[1:] != stops[:-1]).all()


@pytest.mark.parametrize(
    ("ptr", "text"),
    [
        ([1, 2], "first ptr is not 0"),
        ([0, 3, 2], "falls at sample 1"),
        ([0.0, 1.0], "whole-number"),
        ([], "whole-number"),
    ],
)
def test_bad_ptrs_are_named(ptr, text) -> None:
    with pytest.raises(FieldError, match=text):
        csr.validate_ptr(np.array(ptr))
    with pytest.raises(FieldError, match="does not end"):
        csr.validate_ptr(np.array([0, 2]), rows=3)


@pytest.mark.parametrize(
    ("selection", "want"),
    [
        (2, [2]),
        (-1, [3]),
        (np.int64(1), [1]),
        (slice(None, None, 2), [0, 2]),
        ([3, 0, 3], [3, 0, 3]),
        ([-1, 0], [3, 0]),
        ([True, False, False, True], [0, 3]),
        (np.array([False, True, False, False]), [1]),
        (range(1, 3), [1, 2]),
        ([], []),
        (np.array([], dtype=np.int64), []),
    ],
)
def test_as_index(selection, want) -> None:
    assert as_index(selection, 4).tolist() == want


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        (4, "out of range"),
        (-5, "out of range"),
        ([0.5], "integer or bool"),
        ("ab", "integer or bool"),
        ([True, False], "mask needs one entry"),
        (True, "mask needs one entry"),
    ],
)
def test_as_index_refuses(selection, text) -> None:
    with pytest.raises(IndexRangeError, match=text):
        as_index(selection, 4)


# -- the field table ---------------------------------------------------------------------


def test_aliases_point_at_fields_and_never_shadow_one() -> None:
    assert set(ALIASES.values()) <= set(FIELDS)
    assert not set(ALIASES) & set(FIELDS)
    assert resolve("energies") == "energy"
    assert resolve("stresses") == "stress"
    assert resolve("virials") == "virial"
    assert resolve("anything") == "anything"


def test_every_row_of_the_table_is_complete() -> None:
    for name, spec in FIELDS.items():
        assert spec.name == name
        assert len(spec.dims) == len(spec.tail), name
        assert spec.description
        assert set(spec.kind) <= set("fiub")


@pytest.mark.parametrize(
    ("word", "level"),
    [("node", "atom"), ("atoms", "atom"), ("edges", "edge"), ("system", "system")],
)
def test_level_words(word, level) -> None:
    assert canonical_level(word) == level


@pytest.mark.parametrize("word", ["molecule", "", None, 3])
def test_wrong_levels_are_refused(word) -> None:
    with pytest.raises(LevelError, match="Invalid level"):
        canonical_level(word)


def test_level_comes_from_the_record_then_the_table_then_nothing() -> None:
    assert level_of("energy") == level_of("energies") == "system"
    assert level_of("mine", {"mine": "node"}) == "atom"
    assert level_of("mine") is None


def test_tail_and_rows() -> None:
    check_tail("forces", (7, 3), where="x")
    check_tail("node_attrs", (7, 9), where="x")
    check_tail("mine", (7, 1, 2), where="x")
    with pytest.raises(FieldError, match=r"'forces' .*found \[7, 2\], expected \[V, 3\]"):
        check_tail("forces", (7, 2), where="x")
    assert as_rows("energy", np.zeros(4)).shape == (4, 1)
    assert as_rows("cell", np.zeros((4, 1, 3, 3))).shape == (4, 3, 3)
    assert as_rows("stress", np.zeros((4, 9))).shape == (4, 3, 3)
    assert as_rows("mine", np.zeros(4)).shape == (4,)


def test_order_is_the_tables_then_the_alphabets() -> None:
    assert field_order(["b", "energy", "a", "positions"]) == ["positions", "energy", "a", "b"]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i8", "?", "U3"])
def test_fills(dtype) -> None:
    fill = fill_for(np.dtype(dtype))
    kind = np.dtype(dtype).kind
    assert np.isnan(fill) if kind == "f" else fill == ("" if kind == "U" else 0)


# -- Block -------------------------------------------------------------------------------


@st.composite
def small_blocks(draw):
    c = draw(counts)
    e = np.array([draw(st.integers(0, 4)) if n else 0 for n in c], dtype=np.int64)
    rows = int(c.sum())
    nl = np.concatenate(
        [np.zeros((0, 2), np.int64)]
        + [
            draw(hnp.arrays(np.int64, (int(m), 2), elements=st.integers(0, max(int(n) - 1, 0))))
            for n, m in zip(c, e, strict=True)
        ]
    )
    arrays = {
        "atomic_numbers": draw(hnp.arrays(np.int64, rows, elements=st.integers(1, 90))),
        "positions": draw(hnp.arrays(np.float64, (rows, 3), elements=st.floats(-9, 9))),
        "neighbor_list": nl,
    }
    levels = {"atomic_numbers": "atom", "positions": "atom", "neighbor_list": "edge"}
    present = {}
    if draw(st.booleans()):
        arrays["energy"] = draw(hnp.arrays(np.float64, (len(c), 1), elements=st.floats(-9, 9)))
        levels["energy"] = "system"
        mask = draw(hnp.arrays(np.bool_, len(c)))
        if not mask.all():
            present["energy"] = mask
    block = Block(counts_to_ptr(c), counts_to_ptr(e), arrays, levels, present)
    block.fill_missing()
    return block.validate()


def samples_of(block: Block) -> list[dict[str, object]]:
    out = []
    for i in range(block.num_samples):
        one = {"n": int(np.diff(block.atoms_ptr)[i])}
        for name, values in block.arrays.items():
            ptr = block.ptr(block.levels[name])
            one[name] = values[ptr[i] : ptr[i + 1]].tolist() if block.has(name)[i] else None
        out.append(one)
    return out


@given(small_blocks(), st.data())
def test_take_and_slice_are_the_loop(block, data) -> None:
    n = block.num_samples
    pick = data.draw(st.lists(st.integers(0, n - 1), max_size=6)) if n else []
    want = samples_of(block)
    assert samples_of(block.take(np.array(pick, dtype=np.int64)).validate()) == [
        want[i] for i in pick
    ]
    a = data.draw(st.integers(0, n))
    b = data.draw(st.integers(a, n))
    assert samples_of(block.slice(a, b).validate()) == want[a:b]


@given(st.lists(small_blocks(), min_size=1, max_size=4))
def test_concat_is_the_list_with_holes(blocks) -> None:
    whole = Block.concat(blocks).validate()
    want = [{**dict.fromkeys(whole.arrays), **s} for b in blocks for s in samples_of(b)]
    assert samples_of(whole) == want
    for name, mask in whole.present.items():
        assert np.isnan(whole[name][~mask]).all()


def test_concat_refuses_two_levels_and_two_tails() -> None:
    def block(values, level):
        return Block(np.array([0, 1]), np.array([0, 0]), {"x": values}, {"x": level})

    with pytest.raises(FieldError, match="two levels"):
        Block.concat([block(np.zeros(1), "atom"), block(np.zeros(1), "system")])
    with pytest.raises(FieldError, match="two shapes"):
        Block.concat([block(np.zeros((1, 2)), "atom"), block(np.zeros((1, 3)), "atom")])
    with pytest.raises(FieldError, match="no block"):
        Block.concat([])


@pytest.mark.parametrize(
    ("arrays", "levels", "text"),
    [
        ({"positions": np.zeros((1, 3))}, {"positions": "atom"}, "wrong number of rows"),
        ({"positions": np.zeros((2, 2))}, {"positions": "atom"}, "wrong shape"),
        ({"x": np.zeros(2)}, {}, "no level"),
    ],
)
def test_validate_names_the_field(arrays, levels, text) -> None:
    block = Block(np.array([0, 2]), np.array([0, 0]), arrays, levels)
    with pytest.raises(FieldError, match=text):
        block.validate("here")


def test_validate_finds_edges_that_leave_their_sample() -> None:
    block = Block(
        np.array([0, 2, 4]),
        np.array([0, 1, 2]),
        {"neighbor_list": np.array([[0, 1], [0, 2]])},
        {"neighbor_list": "edge"},
    )
    with pytest.raises(FieldError, match="sample 1 names an atom it does not have"):
        block.validate()


def test_unknown_field_offers_the_nearest() -> None:
    block = Block(np.array([0]), np.array([0]), {"forces": np.zeros((0, 3))}, {"forces": "atom"})
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        block["force"]
    assert block.select_fields(["forces"]).names == ["forces"]


def test_from_samples_and_with_field() -> None:
    block = Block.from_samples(
        [
            {"atomic_numbers": np.array([1, 8]), "energy": np.array([1.0])},
            {"atomic_numbers": np.array([6])},
        ],
        {"atomic_numbers": "atom", "energy": "system"},
    )
    assert block.atoms_ptr.tolist() == [0, 2, 3]
    assert block.has("energy").tolist() == [True, False]
    more = block.with_field("tag", np.array([1, 2]), "system")
    assert more["tag"].tolist() == [1, 2]
    with pytest.raises(FieldError, match="wrong number of rows"):
        block.with_field("tag", np.array([1]), "system")

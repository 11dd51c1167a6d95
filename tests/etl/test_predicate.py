"""Conditions on samples: what they say, what they refuse, and what they do not know."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError, UnknownFieldError
from alchemi_xr.etl.predicate import Predicate


def block_of() -> Block:
    numbers = np.array([26, 8, 1, 1, 8, 6])
    ptr = np.array([0, 2, 5, 6])
    return Block(
        ptr,
        np.array([0, 1, 1, 1]),
        {
            "atomic_numbers": numbers,
            "positions": np.zeros((6, 3)),
            "forces": np.array(
                [[3.0, 4, 0], [0, 0, 1], [1, 0, 0], [0, 2, 0], [0, 0, 0], [9, 9, 9]]
            ),
            "energy": np.array([[-4.0], [-9.0], [math.nan]]),
            "cell": np.array([np.eye(3) * 2, np.eye(3), np.zeros((3, 3))]),
            "charge": np.array([[0.0], [1.0], [2.0]]),
            "config": np.array(["bulk", "gas", ""], dtype=object),
            "flag": np.array([True, False, True]),
            "neighbor_list": np.array([[0, 1]]),
        },
        {
            **dict.fromkeys(("atomic_numbers", "positions", "forces"), "atom"),
            **dict.fromkeys(("energy", "cell", "charge", "config", "flag"), "system"),
            "neighbor_list": "edge",
        },
        {"config": np.array([True, True, False]), "forces": np.array([True, True, False])},
    )


T, F, N = True, False, None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("natoms < 3", [T, F, T]),
        ("num_atoms == 3 or nedges > 0", [T, T, F]),
        ("fmax < 5", [F, T, N]),
        ("fmax <= 5 and natoms <= 2", [T, F, N]),
        ("fmax < 5 or natoms == 1", [F, T, T]),
        ("not fmax < 5", [T, F, N]),
        ("energy < -5", [F, T, N]),
        ("not (energy < -5)", [T, F, N]),
        ("energy_per_atom == -2", [T, F, N]),
        ("-5 < energy <= -4", [T, F, N]),
        ("volume > 4", [T, F, N]),
        ("density > 10", [T, T, N]),
        ("'Fe' in elements", [T, F, F]),
        ("'Fe' not in elements", [F, T, T]),
        ("elements in ('O', 'H', 'C')", [F, T, T]),
        ("config == 'bulk'", [T, F, N]),
        ("config != 'bulk'", [F, T, N]),
        ("config in ('gas', 'x')", [F, T, N]),
        ("charge in (0, 2)", [T, F, T]),
        ("charge not in [0, 2]", [F, T, F]),
        ("flag", [T, F, T]),
        ("flag and charge > 1", [F, F, T]),
        ("abs(energy) * 2 > 10", [F, T, N]),
        ("sqrt(energy) > 1", [N, N, N]),
        ("natoms % 2 == 0", [T, F, F]),
        ("1 / charge > 0", [T, T, T]),
        ("natoms ** 2 - 1 >= 3", [T, T, F]),
        ("True", [T, T, T]),
    ],
)
def test_what_it_says(text: str, said: list[bool | None]) -> None:
    predicate = pickle.loads(pickle.dumps(Predicate(text)))
    verdict = predicate(block_of())
    assert verdict.keep.tolist() == [s is True for s in said]
    assert verdict.unknown.tolist() == [s is None for s in said]


def test_a_missing_field_is_unknown() -> None:
    block = block_of().select_fields(["atomic_numbers", "positions"])
    for text in (
        "energy < 0",
        "config == 'a'",
        "config in ('a', 'b')",
        "not energy + 1 > 2",
        "flag < 1",
    ):
        assert Predicate(text)(block).unknown.all(), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "natoms <",
        "__import__('os').system('true')",
        "natoms.__class__",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "natoms if flag else 1",
        "f'{natoms}'",
        "open('x')",
        "abs(natoms, 1)",
        "natoms < 1 in elements",
        "'Xx' in elements",
        "natoms is None",
        "natoms << 3",
        "(x := 1)",
        "a[0] > 1",
        "1" * 5_000,
        "(" * 3_000 + ")" * 3_000,
        "b'x' == config",
    ],
)
def test_what_it_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        Predicate(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("natoms", "not a condition"),
        ("natoms and flag", "between conditions"),
        ("config < 'a'", "equal or not"),
        ("config == 1", "text with a number"),
        ("charge in ('a', 'b')", "another kind"),
    ],
)
def test_what_makes_no_sense(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Predicate(text)(block_of())


def test_names_are_checked_before_anything_is_read() -> None:
    levels: Any = {
        "energy": ("system", (1,)),
        "positions": ("atom", (3,)),
        "cell": ("system", (3, 3)),
    }
    Predicate("energy < 0 and volume > 1 and natoms > 1").check(levels)
    with pytest.raises(UnknownFieldError, match="energy"):
        Predicate("energi < 0").check(levels)
    with pytest.raises(UnknownFieldError, match="forces"):
        Predicate("fmax < 1").check(levels)
    with pytest.raises(ConfigError, match="not one value"):
        Predicate("positions > 0").check(levels)
    with pytest.raises(ConfigError, match="not one value"):
        Predicate("cell > 0").check(levels)


def test_fields_that_it_needs() -> None:
    predicate = Predicate("fmax < 1 and density > 2 and 'H' in elements and energies < 0")
    assert set(predicate.fields) == {"forces", "cell", "atomic_numbers", "energy"}


LEAVES = st.sampled_from(["energy < -5", "fmax > 2", "natoms < 3", "config == 'bulk'"])


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
                lambda t: f"({' '.join(t)})"
            ),
            inner.map(lambda t: f"(not {t})"),
        ),
        max_leaves=6,
    )
)
def test_logic_is_that_of_kleene(text: str) -> None:
    """An unknown value decides nothing: whatever it were, what is said is the same."""
    block = block_of()
    verdict = Predicate(text)(block)
    leaves = {"energy < -5", "fmax > 2", "natoms < 3", "config == 'bulk'"}
    for i in range(3):
        known = {leaf: Predicate(leaf)(block) for leaf in leaves}
        outcomes = set()
        for bits in range(2 ** len(leaves)):
            values = {}
            for k, leaf in enumerate(sorted(leaves)):
                free = bool(known[leaf].unknown[i])
                values[leaf] = bool(bits >> k & 1) if free else bool(known[leaf].keep[i])
            plain = text
            for leaf, value in values.items():
                plain = plain.replace(leaf, str(value))
            outcomes.add(eval(plain))
        if not verdict.unknown[i]:
            assert outcomes == {bool(verdict.keep[i])}

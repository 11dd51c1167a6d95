"""Extended XYZ as ASE reads it; and where it is read otherwise on purpose, each case held.

What is listed in ``docs/explanation/extxyz.md`` is what stands in ``DIFFERENCES``.
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.etl.sources.extxyz import ExtxyzSource

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "extxyz.md"
PLAIN = "Properties=species:S:1:pos:R:3"
#: Names of ours for what ASE calls otherwise.
NAMES = {"numbers": "atomic_numbers", "masses": "atomic_masses", "initial_magmoms": "magmoms"}


def ase_facts(path: Path) -> list[dict[str, Any]] | None:
    """By frame all that ASE reads; None where it does not read the file."""
    from ase.io import read

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            frames = read(path, index=":", format="extxyz")
        except Exception:  # ASE says it in many ways
            return None
    out = []
    for atoms in frames:
        facts = dict(atoms.info)
        facts |= {NAMES.get(name, name): values for name, values in atoms.arrays.items()}
        facts |= atoms.calc.results if atoms.calc is not None else {}
        facts |= {"pbc": atoms.pbc, "cell": atoms.cell.array}
        out.append({name: plain(value) for name, value in facts.items()})
    return out


def our_facts(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """By frame all that we read, less the frames that are refused; and what is said of those."""
    source = ExtxyzSource([str(path)], partition_bytes=200)
    scan = source.scan()
    refused = [f"{r.field}: {r.reason}" for r in scan.rejects]
    out = []
    for partition in scan.partitions:
        result = source.read(partition)
        refused += [f"{r.field}: {r.reason}" for r in result.rejects]
        broken = {r.sample for r in result.rejects}
        out += [sample(result.block, i) for i in range(result.block.num_samples) if i not in broken]
    return out, refused


def sample(block: Block, i: int) -> dict[str, Any]:
    rows = slice(int(block.atoms_ptr[i]), int(block.atoms_ptr[i + 1]))
    facts = {}
    for name in block.names:
        if block.has(name)[i]:
            values = block[name]
            facts[name] = plain(values[rows] if block.levels[name] == "atom" else values[i])
    return {"cell": [[0.0] * 3] * 3, **facts}


def plain(value: Any) -> Any:
    return np.asarray(value).tolist() if not isinstance(value, (str, dict)) else value


def same(theirs: Any, ours: Any) -> bool:
    """Whether the values are one: whole numbers exactly, reals by their bits."""
    if isinstance(theirs, (str, dict)) or isinstance(ours, (str, dict)):
        return bool(theirs == ours)
    left, right = np.asarray(theirs, dtype=object), np.asarray(ours, dtype=object)
    if left.size == 1 and right.size == 1:  # energy has the shape [1]
        left, right = left.reshape(1), right.reshape(1)
    return left.shape == right.shape and all(map(_same_number, left.flat, right.flat))


def _same_number(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("d", left) == struct.pack("d", right) or (
            left != left and right != right
        )
    if isinstance(left, int) and isinstance(right, float):
        # A whole number in a field of reals, or beside reals under one key.
        return float(left) == right
    return bool(left == right)


# -- differences on purpose ------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One entry of the list.

    Parameters
    ----------
    said : str
        The input, as the page has it in its first column.
    text : str
        A file.
    name : str
        The fact that differs; ``frames`` is their number.
    theirs, ours : value
        ASE's value and ours; ``ABSENT`` for none, or :class:`Refused`.
    """

    said: str
    text: str
    name: str
    theirs: Any
    ours: Any


@dataclass(frozen=True)
class Refused:
    """The frame is refused, and this is said."""

    pattern: str


ABSENT = object()


def frame(comment: str = "", line: str = "H 0 0 1", columns: str = "", *, first: str = "1") -> str:
    return f"{first}\n{PLAIN}{columns} {comment}\n{line}\n"


ONE = [[0.0, 0.0, 1.0]]
DIFFERENCES = [
    Difference(
        "a comment without `=`", "1\nsome water\nH 0 0 1\n", "comment", ABSENT, "some water"
    ),
    Difference("a Fortran exponent in a comment", frame("a=1.0D+02"), "a", "1.0D+02", 100.0),
    Difference("an underscore within a number", frame("a=1_000"), "a", 1000, "1_000"),
    Difference(
        "an underscore within a number", frame("", "H 0 0 1_0"), "positions", [[0, 0, 10]],
        Refused("pos: .*0 0 1_0"),
    ),
    Difference(
        "nested brackets", frame("a=[[1,2],[3,4]]"), "a", "[1,2,3,4]", [[1, 2], [3, 4]]
    ),
    Difference(
        "nested brackets", frame('a="[[1,2],[3,4]]"'), "a", "[[1,2],[3,4]]", [[1, 2], [3, 4]]
    ),
    Difference("a backslash before no quote", frame(r"a=\alpha"), "a", "alpha", r"\alpha"),
    Difference("`\\n` within quotes", frame(r'a="x\ny"'), "a", "xny", "x\ny"),
    Difference("an empty value in quotes", frame('a="" b=2'), "a", "b=2", ""),
    Difference("an empty value in quotes", frame('a="" b=2'), "b", ABSENT, 2),
    Difference("an empty value at the end", frame("a="), "a", [], ""),
    Difference("text that touches a closing quote", frame('a="x"b=2'), "a", "xb=2", "x"),
    Difference("text that touches a closing quote", frame('a="x"b=2'), "b", ABSENT, 2),
    Difference("`uid`", frame("uid=12"), "uid", "12", 12),
    Difference(
        "JSON that is no array of numbers", frame(r'a="_JSON {\"x\": 1}"'), "a", {"x": 1},
        '{"x": 1}',
    ),
    Difference("letters of `pbc` in one word", frame("pbc=TTF"), "pbc", [True] * 3,
        [True, True, False]),
    Difference(
        "`pbc` that is no truth value", frame('pbc="2 0 0"'), "pbc", [True, False, False],
        Refused("pbc: .*expected three of T or F"),
    ),
    Difference(
        "the key `cell`", frame('cell="1 0 0 0 2 0 0 0 3"'), "cell", [[0] * 3] * 3,
        [[1, 0, 0], [0, 2, 0], [0, 0, 3]],
    ),
    Difference("`virial` and a cell without `stress`",
        frame('virial="8 0 0 0 8 0 0 0 8" Lattice="2 0 0 0 2 0 0 0 2"'), "stress", ABSENT,
        [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]),
    Difference("a known field of another form", frame('energy="1 2"'), "energy", [1, 2],
        Refused("energy: found 2 numbers")),
    Difference("a known field of another form", frame("energy=abc"), "energy", "abc",
        Refused("energy: .*abc")),
    Difference("other spellings of a field", frame("energies=5"), "energy", ABSENT, 5.0),
    Difference("other spellings of a field", frame("", "H 0 0 1 1 2 3", ":force:R:3"), "forces",
        ABSENT, [[1, 2, 3]]),
    Difference("other spellings of a field", frame("", "H 0 0 1 2", ":mass:R:1"), "atomic_masses",
        ABSENT, [2.0]),
    Difference("a column named like a field of the frame", frame("", "H 0 0 1 2", ":energy:R:1"),
        "atomic_energy", ABSENT, [2.0]),
    Difference("`properties` in small letters",
        "1\nproperties=species:S:1:pos:R:3:q:R:1\nH 0 0 1 5\n", "q", ABSENT, [5.0]),
    Difference("no `pos:R:3`, or no elements", "1\nProperties=species:S:1\nH\n", "positions",
        [[0, 0, 0]], Refused("Properties: found no pos:R:3")),
    Difference("no `pos:R:3`, or no elements", "1\nProperties=pos:R:3\n0 0 1\n", "atomic_numbers",
        [0], Refused("Properties: found neither species:S:1 nor Z:I:1")),
    Difference("`species` and `Z` that differ", frame("", "H 0 0 1 6", ":Z:I:1"),
        "atomic_numbers", [6], Refused("Z: .*different elements")),
    Difference("atomic numbers beyond 118", "1\nProperties=Z:I:1:pos:R:3\n200 0 0 1\n",
        "atomic_numbers", [200], Refused("Z: .*200, expected 0 to 118")),
    Difference("more words than columns", frame("", "H 0 0 1 7"), "positions", ONE,
        Refused("atom line has 5 words, expected 4")),
    Difference("logical columns of other words", frame("", "H 0 0 1 true", ":m:L:1"), "m", [False],
        [True]),
    Difference("logical columns of other words", frame("", "H 0 0 1 1", ":m:L:1"), "m", [False],
        [True]),
    Difference("logical columns of other words", frame("", "H 0 0 1 yes", ":m:L:1"), "m", [False],
        Refused("m: .*yes.*expected T or F")),
    Difference("columns of text", frame("", "H 0 0 1 ab", ":label:S:1"), "label", ["ab"], ABSENT),
    Difference("`move_mask`", frame("", "H 0 0 1 T", ":move_mask:L:1"), "move_mask", ABSENT,
        [True]),
    Difference("blank lines between frames", frame("a=1") + "\n" + frame("a=2"), "frames", 1, 2),
    Difference("a blank line at the start", "\n" + frame("a=1"), "frames", 0, 1),
    Difference("a count with a sign or an underscore", frame("a=1", first="+1"), "a", 1,
        Refused("found '.1', expected an atom count")),
    Difference("lines that end with a lone carriage return", frame("a=1").replace("\n", "\r"),
        "a", 1, Refused("expected an atom count")),
    Difference("`VEC1` lines after the atoms",
        "1\nx\nH 0 0 1\nVEC1 1 0 0\nVEC2 0 1 0\nVEC3 0 0 1\n", "cell",
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]], Refused("holds 'VEC1 1 0 0'")),
]  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda c: f"{c.said}-{c.name}")
def test_each_difference_is_one(tmp_path: Path, case: Difference) -> None:
    path = tmp_path / "in.xyz"
    path.write_text(case.text, newline="")
    theirs = ase_facts(path)
    assert theirs is not None, "ASE does not read it"
    ours, refused = our_facts(path)
    if case.name == "frames":
        assert (len(theirs), len(ours), refused) == (case.theirs, case.ours, [])
        return
    if case.theirs is ABSENT:
        assert case.name not in theirs[0]
    else:
        assert same(theirs[0][case.name], case.theirs), theirs[0][case.name]
    if isinstance(case.ours, Refused):
        assert ours == []
        assert len(refused) == 1
        assert re.search(case.ours.pattern, refused[0]), refused
        return
    assert refused == []
    if case.ours is ABSENT:
        assert case.name not in ours[0]
    else:
        assert same(ours[0][case.name], case.ours), ours[0][case.name]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (
            frame('stress="1 2 3 4 5 6"'),
            "stress",
            [[1.0, 6.0, 5.0], [6.0, 2.0, 4.0], [5.0, 4.0, 3.0]],
        ),
        (frame("", "H 0 0 1 5000000000", ":k:I:1"), "k", [5_000_000_000]),
        (frame("", "8 0 0 1"), "atomic_numbers", [8]),
        (frame("", "H 0 0 1.5D+01"), "positions", [[0.0, 0.0, 15.0]]),
    ],
)
def test_some_files_that_ase_refuses_are_read(
    tmp_path: Path, text: str, name: str, value: Any
) -> None:
    path = tmp_path / "in.xyz"
    path.write_text(text)
    assert ase_facts(path) is None
    (ours,), refused = our_facts(path)
    assert refused == []
    assert same(ours[name], value)


def test_the_page_lists_them_all_and_no_other() -> None:
    table = PAGE.read_text().split("| input |", 1)[1].split("\n\n", 1)[0]
    listed = [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()[2:]]
    assert listed == list(dict.fromkeys(case.said for case in DIFFERENCES))


# -- agreement -------------------------------------------------------------------------

BLANKS = st.sampled_from([" ", "  ", "\t", " \t "])
WHOLE = st.one_of(
    st.integers(-999, 999).map(str),
    st.integers(-(2**64), 2**64).map(str),
    st.sampled_from(["+5", "007", "-0", str(2**63), str(-(2**63)), str(2**63 - 1)]),
)
REAL = st.one_of(
    st.floats().map(repr),
    st.builds("{:.{}f}".format, st.floats(-1e6, 1e6), st.integers(0, 25)),
    st.builds("{:.{}E}".format, st.floats(allow_nan=False), st.integers(0, 20)),
    st.sampled_from(["nan", "-inf", "Infinity", "+NaN", ".5", "5.", "-.5e+3", "1e400", "1e-400"]),
)
TRUTH = st.sampled_from(["T", "F", "true", "false", "True", "False", "TRUE", "FALSE"])
# No backslash, no underscore (within a number), no bracket in a bracket: those are listed.
LETTERS = "abTFxyz019+-.;:/()*é"
TEXT = st.text(LETTERS + " ,", min_size=1, max_size=10)
WORD = st.text(LETTERS, min_size=1, max_size=8).filter(lambda s: not s.startswith("uid"))


@st.composite
def values(draw: Any) -> str:
    """A raw value with its quotes, or as one word without."""
    kind = draw(st.sampled_from(["whole", "real", "truth", "mixed", "text", "json"]))
    if kind == "json":
        numbers = st.one_of(st.integers(-(10**12), 10**12), st.floats(-1e9, 1e9))
        row = draw(st.lists(numbers, min_size=1, max_size=3))
        value = draw(st.sampled_from([row, [row, row], row[0]]))
        return f'"_JSON {json.dumps(value)}"'
    if kind == "text":
        value = draw(TEXT.filter(lambda s: s.strip(" ,")))
        if draw(st.booleans()):
            value = value.replace("x", '\\"')
            return f'"{value}"'
    else:
        kinds = {"whole": WHOLE, "real": REAL, "truth": TRUTH}
        one = kinds.get(kind, st.one_of(WHOLE, REAL, TRUTH, WORD))
        words = draw(st.lists(one, min_size=1, max_size=draw(st.sampled_from([1, 1, 4, 9]))))
        value = draw(st.sampled_from([" ", ",", ", ", "  "])).join(words)
    left, right = draw(st.sampled_from(['""', "''", "{}", "[]", "  "]))
    bare = left == " " and " " not in value
    return value if bare else f"{left}{value}{right}".strip() if left != " " else f'"{value}"'


@st.composite
def pairs(draw: Any, taken: set[str]) -> str:
    """A key with its value, or a bare word."""
    known = {
        "energy": st.one_of(WHOLE, REAL),
        "free_energy": st.one_of(WHOLE, REAL),
        "stress": numbers_in_quotes(9),
        "dipole": numbers_in_quotes(3),
        "Lattice": numbers_in_quotes(9),
        "pbc": st.sampled_from(
            ['"T F T"', "[F, F, T]", "T", "F", '"1 0 1"', "'true false True'", "{T T F}", "1"]
        ),
    }
    if draw(st.integers(0, 2)) == 0:
        key = draw(st.sampled_from(sorted(known)))
        value = draw(known[key])
    else:
        key = "u" + draw(st.text("abXY09-.é", max_size=4))
        if draw(st.integers(0, 5)) == 0:
            taken.add(key)
            return key
        value = draw(values())
        key = draw(st.sampled_from([key, key, f'"{key}"']))
    taken.add(key.strip('"'))
    return key + draw(st.sampled_from(["=", "=", " = ", "= ", " ="])) + value


def numbers_in_quotes(count: int) -> st.SearchStrategy[str]:
    number = st.one_of(st.integers(-99, 99).map(str), st.floats(-99, 99).map(repr))
    rows = st.lists(number, min_size=count, max_size=count)
    return st.builds(lambda row, sep: f'"{sep.join(row)}"', rows, st.sampled_from([" ", ", "]))


CELLS = {
    "species": st.sampled_from(["H", "he", "CL", "Si", "Og", "X", "U"]),
    "Z": st.integers(0, 118).map(str),
    "R": REAL,
    "I": st.one_of(st.integers(-999, 999), st.integers(-(2**31), 2**31 - 1)).map(str),
    "L": st.sampled_from(["T", "F", "True", "False"]),
}
EXTRAS = [
    ("forces", "R", 3), ("charges", "R", 1), ("momenta", "R", 3), ("v_r", "R", 1), ("v_i", "I", 2),
    ("v_l", "L", 1), ("v_l3", "L", 3), ("v_n", "I", 1), ("v_m", "R", 9),
]  # fmt: skip


@st.composite
def frames(draw: Any) -> str:
    atoms = draw(st.integers(0, 4))
    columns = [draw(st.sampled_from([("species", "S", 1), ("Z", "I", 1)])), ("pos", "R", 3)]
    columns += draw(st.lists(st.sampled_from(EXTRAS), max_size=3, unique=True))
    columns = draw(st.permutations(columns))
    taken: set[str] = set()
    items = draw(st.lists(pairs(taken), max_size=5))
    if draw(st.integers(0, 4)) == 0 and (not items or any("=" in item for item in items)):
        columns = [("species", "S", 1), ("pos", "R", 3)]
    else:
        said = "Properties=" + ":".join(f"{n}:{k}:{w}" for n, k, w in columns)
        items.insert(draw(st.integers(0, len(items))), said)
    lines = []
    for _ in range(atoms):
        words = [
            draw(CELLS[name if name in CELLS else kind])
            for name, kind, width in columns
            for _ in range(width)
        ]
        blank = draw(BLANKS)
        lines.append(draw(st.sampled_from(["", " "])) + blank.join(words) + draw(st.just("")))
    comment = draw(BLANKS).join(items)
    return "".join(f"{line}\n" for line in [f"{atoms}", comment, *lines])


@settings(max_examples=60, deadline=None)
@given(st.lists(frames(), min_size=1, max_size=4), st.sampled_from(["\n", "\r\n"]), st.booleans())
@example([frame(f"a={-(2**63)}")], "\n", True)
@example([frame(f'a="-0 {2**63}"')], "\n", True)
@example([frame('cell="4 0 0 0 4 0 0 0 4" Lattice="1 0 0 0 2 0 0 0 3"')], "\n", True)
@example([frame('Lattice="1 0 0 0 2 0 0 0 3" cell="4 0 0 0 4 0 0 0 4"')], "\n", True)
def test_what_ase_reads_is_read_so(
    tmp_path_factory: Any, texts: list[str], newline: str, ended: bool
) -> None:
    path = tmp_path_factory.mktemp("agree") / "in.xyz"
    text = "".join(texts)
    path.write_text(text if ended else text.removesuffix("\n"), newline=newline, encoding="utf-8")
    theirs = ase_facts(path)
    event("ASE reads it" if theirs is not None else "ASE does not")
    if theirs is None:
        return
    ours, refused = our_facts(path)
    assert refused == []
    assert len(ours) == len(theirs)
    for left, right in zip(theirs, ours, strict=True):
        agree(left, right)


def agree(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """All that ASE has of a frame; by what the page says of stress and of kinds that vary."""
    for name, value in theirs.items():
        assert name in ours, name
        got = ours[name]
        if name == "stress":
            got = np.asarray(got)[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
        elif isinstance(got, str) and not isinstance(value, str):
            # The key has values of several kinds in this file, and is text.
            for said, in_json in (("True", "true"), ("False", "false"), ("nan", "NaN")):
                got = got.replace(said, in_json)
            got = json.loads(got.replace("inf", "Infinity"))
        assert same(value, got), f"{name}: ASE has {value!r}, we {got!r}"

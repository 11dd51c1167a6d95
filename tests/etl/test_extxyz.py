"""The extended XYZ source: partitions, packers, dialects, and agreement with ASE's writer."""

from __future__ import annotations

import bz2
import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.errors import SourceError
from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.frame_index import Batch, Frame, IndexFault, iter_batches
from alchemi_xr.etl.source import Source
from alchemi_xr.etl.sources.extxyz import ExtxyzSource
from alchemi_xr.native import text as native_text
from alchemi_xr.store.reader import open_store

FRAME = (
    '2\nProperties=species:S:1:pos:R:3:forces:R:3 energy={e} pbc="F F F"\n'
    "H 0.0 0.0 {z} 0.5 0.0 0.0\nH 0.0 0.0 0.7 -0.5 0.0 0.0\n"
)


def _frames(count: int) -> str:
    return "".join(FRAME.format(e=-float(i), z=float(i)) for i in range(count))


def _blocks(source: ExtxyzSource) -> Block:
    scan = source.scan()
    source = pickle.loads(pickle.dumps(source))
    results = [source.read(p) for p in scan.partitions]
    for result, partition in zip(results, scan.partitions, strict=True):
        assert result.block.num_samples == partition.samples
        assert result.block.num_atoms == partition.atoms
    return Block.concat([r.block for r in results])


@pytest.mark.parametrize("size", [1, 100, 500, 10**6])
def test_partitions_do_not_change_what_is_read(write: Any, size: int) -> None:
    path = write(_frames(20))
    source = ExtxyzSource([str(path)], partition_bytes=size)
    assert isinstance(source, Source)
    block = _blocks(source)
    assert block["energy"].ravel().tolist() == [-float(i) for i in range(20)]
    assert block["positions"][::2, 2].tolist() == [float(i) for i in range(20)]
    assert block["forces"].sum() == 0


def _flat(path: Path, window: int) -> list[Frame | IndexFault]:
    found: list[Frame | IndexFault] = []
    for item in iter_batches(path, lambda frame, comment: None, window=window):
        if isinstance(item, Batch):
            found += [item.frame(i) for i in range(len(item.frames))]
        else:
            found.append(item)
    return found


@pytest.mark.parametrize("window", [7, 64, 1000, 2**20])
def test_windows_do_not_change_what_is_found(write: Any, window: int) -> None:
    text = _frames(3) + "\n\nrubbish\n5\nno\n" + _frames(2)
    path = write(text)
    found = _flat(path, window)
    frames = [f for f in found if isinstance(f, Frame)]
    assert [f.number for f in frames] == [0, 1, 2, 4, 5]
    assert len(found) == 6
    data = path.read_bytes()
    assert all(data[f.offset : f.stop].startswith(b"2\nProp") for f in frames)
    lines = text.splitlines()
    assert all(lines[f.line - 1] == "2" for f in frames)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.sampled_from(
            [
                "2\na=1\nH 0 0 0\nHe 0 0 1\n",
                "1\n\nH 0 0 0\n",
                "0\n\n",
                "\n",
                " \t\n",
                "x\n",
                "3\nH 1 1\n",
            ]
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_a_walk_by_lines_finds_the_same(
    tmp_path_factory: Any, pieces: list[str], ended: bool
) -> None:
    path = tmp_path_factory.mktemp("walk") / "in.xyz"
    path.write_text("".join(pieces).removesuffix("" if ended else "\n"))
    want = _flat(path, 2**20)
    # A window in which no frame is whole leaves all to the walk.
    assert _flat(path, 1) == want
    assert _flat(path, 20) == want


def _zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2
    # Two frames, as appending to such a file makes them.
    one, two = (zstandard.ZstdCompressor().compress(d) for d in (data[:half], data[half:]))
    return bytes(one + two)


PACKERS = [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", _zstd)]


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_packed_files(tmp_path: Path, converted: Any, suffix: str, pack: Any) -> None:
    path = tmp_path / f"in.xyz{suffix}"
    path.write_bytes(pack(_frames(10).encode()))
    report, store = converted(path)
    assert report.samples == 10
    assert store.read_block(store.active)["energy"][3, 0] == -3.0


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_a_damaged_packed_file_keeps_its_whole_frames(
    tmp_path: Path, converted: Any, suffix: str, pack: Any
) -> None:
    text = "".join(
        FRAME.format(e=-float(i), z=np.random.default_rng(i).random()) for i in range(20_000)
    )
    packed = pack(text.encode())
    path = tmp_path / f"in.xyz{suffix}"
    path.write_bytes(packed[: int(len(packed) * 0.9)])
    report, _ = converted(path, on_error="quarantine")
    assert 0 < report.samples < 20_000
    assert any("damaged" in r.reason for r in report.rejects)


def test_many_files_and_patterns(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"part{i:02d}.xyz").write_text(_frames(i + 1))
    report = convert(str(tmp_path / "part*.xyz"), tmp_path / "out.zarr")
    assert report.samples == sum(range(1, 13))
    energies = open_store(tmp_path / "out.zarr").read_rows("energy", 0, 78).ravel()
    want = [-float(j) for i in range(12) for j in range(i + 1)]
    assert energies.tolist() == want


def test_plain_xyz(write: Any, converted: Any) -> None:
    path = write("2\nwater, half of it\nO 0 0 0\nH 0.96 0 0\n1\n\nHe 0 0 0\n", "in.xyz")
    _, store = converted(path)
    block = store.read_block(store.active)
    assert block["comment"].tolist() == ["water, half of it", ""]
    assert block.has("comment").tolist() == [True, False]
    assert not block["pbc"].any()
    assert block["atomic_numbers"].tolist() == [8, 1, 2]


@pytest.mark.parametrize(
    ("pbc", "want"),
    [
        ('pbc="T T F"', [True, True, False]),
        ("pbc=[T, F, F]", [True, False, False]),
        ('pbc="1 0 1"', [True, False, True]),
        ("pbc=TTF", [True, True, False]),
        ("pbc=T", [True, True, True]),
        ('pbc="true false True"', [True, False, True]),
        ("", [True, True, True]),
    ],
)
def test_pbc_variants(write: Any, converted: Any, pbc: str, want: list[bool]) -> None:
    path = write(f'1\nLattice="2 0 0 0 2 0 0 0 2" Properties=species:S:1:pos:R:3 {pbc}\nH 0 0 0\n')
    _, store = converted(path)
    assert store.read_block(store.active)["pbc"].tolist() == [want]


def test_a_broken_atom_line_becomes_a_deleted_sample(write: Any, converted: Any) -> None:
    frames = [FRAME.format(e=-float(i), z=float(i)) for i in range(9)]
    frames[4] = frames[4].replace("0.7", "x.7")
    report, store = converted(write("".join(frames)), on_error="quarantine")
    assert (report.records, report.samples, report.rejected) == (9, 8, 1)
    assert store.active.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    (reject,) = report.rejects
    assert (reject.frame, reject.sample, reject.field) == (4, 4, "pos")
    assert "x.7" in reject.reason
    assert reject.offset == sum(len(f) for f in frames[:4])


def test_a_broken_atom_line_raises(write: Any, tmp_path: Path) -> None:
    path = write(_frames(2) + FRAME.format(e=1, z="zero"))
    with pytest.raises(SourceError, match=r"frame 2 \(line 9, byte .*'pos'.*zero") as caught:
        convert(path, tmp_path / "out.zarr")
    assert "quarantine" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_key_of_many_kinds_becomes_text(write: Any, converted: Any) -> None:
    values = ["1", "2.5", "word", '"1 2 3"']
    frames = [f"1\nProperties=species:S:1:pos:R:3 tag={v}\nH 0 0 0\n" for v in values]
    _, store = converted(write("".join(frames)))
    texts = store.read_block(store.active)["tag"].tolist()
    assert texts == ["1", "2.5", "word", "[1, 2, 3]"]


def test_whole_and_float_numbers_promote(write: Any, converted: Any) -> None:
    frames = [
        f"1\nProperties=species:S:1:pos:R:3 k={v} n={i}\nH 0 0 0\n"
        for i, v in enumerate(["1", "2.5"])
    ]
    _, store = converted(write("".join(frames)))
    block = store.read_block(store.active)
    assert block["k"].dtype == np.float64
    assert block["n"].dtype == np.int64


def test_arrays_of_one_row_an_atom_are_atom_fields(write: Any, converted: Any) -> None:
    text = (
        '2\nProperties=species:S:1:pos:R:3 hirsh="0.5 0.25" same="1 2"\nH 0 0 0\nH 0 0 1\n'
        '3\nProperties=species:S:1:pos:R:3 hirsh="1 2 3" same="3 4"\nH 0 0 0\nH 0 0 1\nH 0 0 2\n'
    )
    _, store = converted(write(text))
    assert store.level("hirsh") == "atom"
    assert store.level("same") == "system"
    assert store.read_block(store.active)["hirsh"].tolist() == [0.5, 0.25, 1, 2, 3]


def test_values_taken_for_names_are_refused(write: Any, tmp_path: Path) -> None:
    frames = [f"1\nk=1 word{i}\nH 0 0 0\n" for i in range(1100)]
    with pytest.raises(SourceError, match="more different keys"):
        convert(write("".join(frames)), tmp_path / "out.zarr")


@pytest.mark.skipif(not native_text.available(), reason="no compiler at installation")
def test_one_wrong_element_sends_no_other_frame_to_the_grammar(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alchemi_xr.etl import xyz_part

    frames = ["2\nProperties=species:S:1:pos:R:3:Z:I:1\nH 0 0 0 1\nC 0 0 1 6\n"] * 40
    frames[7] = frames[7].replace("1 6", "1 7")
    seen = []
    parse = xyz_part.parse_columns

    def spy(body: bytes, lines: int, spec: Any) -> Any:
        seen.append(lines)
        return parse(body, lines, spec)

    monkeypatch.setattr(xyz_part, "parse_columns", spy)
    source = ExtxyzSource([str(write("".join(frames)))])
    (result,) = (source.read(p) for p in source.scan().partitions)
    assert [(r.frame, r.field) for r in result.rejects] == [(7, "Z")]
    assert seen == [2]


@pytest.mark.parametrize("count", ["two", "-2", "2.0", "2 atoms"])
def test_a_count_that_is_none_costs_its_own_frame_only(write: Any, count: str) -> None:
    frames = [FRAME.format(e=-float(i), z=0.5) for i in range(9)]
    for i in (2, 4):
        frames[i] = frames[i].replace("2", count, 1)
    path = write("".join(frames))
    for window in (1, 200, 2**20):
        found = _flat(path, window)
        assert [f.number for f in found] == list(range(9))
        assert [f.number for f in found if isinstance(f, IndexFault)] == [2, 4]


def test_a_count_that_lies_is_the_fault_of_its_frame(write: Any) -> None:
    frames = [FRAME.format(e=-float(i), z=0.5) for i in range(9)]
    frames[2] = frames[2].replace("2", "1", 1)
    frames[5] = frames[5].replace("2", "3", 1)
    frames[7] = frames[7].replace("2", "0", 1)
    found = _flat(write("".join(frames)), 2**20)
    assert [f.number for f in found] == list(range(9))
    assert [f.number for f in found if isinstance(f, IndexFault)] == [2, 5, 7]


def test_a_file_that_changes_is_noticed(write: Any) -> None:
    path = write(_frames(5))
    source = ExtxyzSource([str(path)])
    scan = source.scan()
    path.write_text("7\n" + _frames(5))
    with pytest.raises(SourceError, match="not what it was"):
        source.read(scan.partitions[0])


names = st.text("abcdefgXYZ", min_size=1, max_size=8).map(lambda s: "u_" + s)
words = st.text("abcXYZ0189 .,:;()+-_=/'\"", min_size=1, max_size=12).filter(
    # ASE writes a "=" without quotes, and then reads it as one of its own.
    lambda s: s.strip() == s and not s.startswith("_JSON") and ("=" not in s or " " in s)
)


@st.composite
def _atoms(draw: Any) -> Any:
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator

    n = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    atoms = Atoms(rng.integers(1, 90, n), rng.normal(size=(n, 3)) * 10)
    if draw(st.booleans()):
        atoms.set_cell(rng.normal(size=(3, 3)))
        atoms.pbc = rng.random(3) < 0.5
    results: dict[str, Any] = {}
    if draw(st.booleans()):
        results["energy"] = float(rng.normal() * 1e3)
    if draw(st.booleans()):
        results["forces"] = rng.normal(size=(n, 3))
    if draw(st.booleans()) and atoms.cell.rank == 3:
        results["stress"] = rng.normal(size=6)
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    for name in draw(st.lists(names, max_size=3, unique=True)):
        atoms.info[name] = draw(
            st.one_of(words, st.integers(-(10**9), 10**9), st.floats(-1e9, 1e9), st.booleans())
        )
    return atoms


@given(st.lists(_atoms(), min_size=1, max_size=6))
def test_what_ase_writes_reads_as_ase_reads_it(tmp_path_factory: Any, frames: list[Any]) -> None:
    from ase.io import read
    from ase.io import write as ase_write

    path = tmp_path_factory.mktemp("ase") / "in.extxyz"
    ase_write(path, frames, format="extxyz")
    theirs = read(path, index=":", format="extxyz")
    block = _blocks(ExtxyzSource([str(path)]))
    assert block.num_samples == len(theirs)
    for i, atoms in enumerate(theirs):
        rows = slice(int(block.atoms_ptr[i]), int(block.atoms_ptr[i + 1]))
        assert (block["atomic_numbers"][rows] == atoms.numbers).all()
        np.testing.assert_array_equal(block["positions"][rows], atoms.positions)
        assert (block["pbc"][i] == atoms.pbc).all()
        if block.has("cell")[i]:
            np.testing.assert_array_equal(block["cell"][i], atoms.cell.array)
        else:
            assert not atoms.cell.array.any()
        results = atoms.calc.results if atoms.calc is not None else {}
        for name in ("energy", "forces", "stress"):
            assert bool(block.has(name)[i]) == (name in results)
        if "energy" in results:
            assert block["energy"][i, 0] == results["energy"]
        if "forces" in results:
            np.testing.assert_array_equal(block["forces"][rows], results["forces"])
        if "stress" in results:
            voigt = block["stress"][i][[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
            np.testing.assert_allclose(voigt, results["stress"], rtol=1e-12)
        for name, value in atoms.info.items():
            if name not in block:
                continue
            assert block.has(name)[i]
            got = block[name][i]
            if isinstance(got, str) or block[name].dtype.kind == "O":
                continue  # text of mixed kinds: compared below for plain strings
            np.testing.assert_array_equal(got, value)


@given(st.lists(words, min_size=1, max_size=6))
def test_strings_come_back_as_written(tmp_path_factory: Any, texts: list[str]) -> None:
    from ase import Atoms
    from ase.io import write as ase_write

    path = tmp_path_factory.mktemp("ase") / "in.extxyz"
    # A letter in front: what looks like a number or a flag is one.
    frames = [Atoms("H", info={"label": "q" + text}) for text in texts]
    ase_write(path, frames, format="extxyz")
    block = _blocks(ExtxyzSource([str(path)]))
    assert block["label"].tolist() == ["q" + text for text in texts]


LINES = st.sampled_from(
    [
        "H 0 0 0 1",
        "He 1.5 -2e1 3 -4",
        "C  1.0D+00 0.1234567890123456789012 7. 12",
        "cl 1 2 3 1.0",
        "Xx 0 0 0 1",
        "O 0 0 x 1",
        "O 0 0 0",
        "N 0 0 0 1 2",
        "8 nan 0 inf 1",
        "",
    ]
)
COMMENTS = st.sampled_from(
    [
        'Properties=species:S:1:pos:R:3:mark:I:1 energy=-1.5 pbc="T F T"',
        'Properties=species:S:1:pos:R:3:mark:I:1 energy=-2 Lattice="2 0 0 0 2 0 0 0 2"',
        'Properties=species:S:1:pos:R:3:mark:I:1 stress="1 2 3 4 5 6" name=a energy=1e5',
        'Properties=species:S:1:pos:R:3:mark:I:1 stress="1 2 3 4 5 6 7 8 9" own="1 2" energy=nan',
        'Properties=species:S:1:pos:R:3:mark:I:1 virial="1 2 3 4 5 6" Lattice="2 0 0 0 2 0 0 0 2"',
        'Properties=species:S:1:pos:R:3:mark:I:1 own="1 2.5 3" name="b c" Lattice="1 2"',
        "Properties=species:S:1:pos:R:3:mark:R:1 own=\"[1, 2]\" title='x' energy=T",
        "Properties=species:S:1:pos:R:3 energy=1.23456789012345678901234",
        "a title",
        "",
    ]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    frames=st.lists(st.tuples(COMMENTS, st.lists(LINES, max_size=3)), min_size=1, max_size=9),
    size=st.sampled_from([150, 400, 10**6]),
)
def test_without_the_extension_it_is_the_same(
    tmp_path_factory: Any, frames: list[tuple[str, list[str]]], size: int
) -> None:
    path = tmp_path_factory.mktemp("twin") / "in.xyz"
    path.write_text("".join(f"{len(a)}\n{c}\n" + "".join(f"{x}\n" for x in a) for c, a in frames))

    def everything() -> Any:
        source = ExtxyzSource([str(path)], partition_bytes=size)
        scan = source.scan()
        return scan, [source.read(p) for p in scan.partitions]

    scan, results = everything()
    compiled, native_text._text = native_text._text, None
    try:
        plain, others = everything()
    finally:
        native_text._text = compiled
    assert scan.schema == plain.schema
    assert scan.partitions == plain.partitions
    assert (scan.rejects, sorted(scan.notes), scan.keys, scan.records) == (
        plain.rejects,
        sorted(plain.notes),
        plain.keys,
        plain.records,
    )
    for mine, other in zip(results, others, strict=True):
        assert mine.rejects == other.rejects
        assert set(mine.block.names) == set(other.block.names)
        bad = [r.sample for r in mine.rejects]
        kept = np.setdiff1d(np.arange(mine.block.num_samples), bad)
        left, right = mine.block.take(kept), other.block.take(kept)
        for name in left.names:
            np.testing.assert_array_equal(left.has(name), right.has(name), err_msg=name)
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)

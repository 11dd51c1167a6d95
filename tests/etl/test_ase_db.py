"""ASE databases read in our own way, beside ASE's decoder, row by row."""

from __future__ import annotations

import itertools
import json
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.db import connect
from ase.db.row import AtomsRow
from ase.io.jsonio import decode, encode

from alchemi_xr.data.block import Block
from alchemi_xr.etl import ase_forms, batch_spool, inflate
from alchemi_xr.etl.ase_records import fault_of, place_result
from alchemi_xr.etl.ase_rows import PackedRow, PlainRow
from alchemi_xr.etl.records import Record, records_to_block
from alchemi_xr.etl.schema import FieldObserver
from alchemi_xr.etl.sources import ase_db
from alchemi_xr.etl.sources.ase_db import AseDbSource
from alchemi_xr.native import text

lmdb = pytest.importorskip("lmdb")

Rows = list[tuple[Atoms, dict[str, Any], dict[str, Any]]]


def atoms_of(rng: np.random.Generator, kind: int, n: int) -> Atoms:
    atoms = Atoms(numbers=rng.integers(1, 9, n), positions=rng.normal(size=(n, 3)))
    if rng.random() < 0.7:
        atoms.cell = np.eye(3) * 4 if kind % 2 else [[0, 1, 2], [1, 0, 0], [0, 0, 3.0]]
        atoms.pbc = rng.random(3) < 0.5
    results: dict[str, Any] = {"energy": float(rng.normal()), "forces": rng.normal(size=(n, 3))}
    if kind == 1:
        atoms.set_tags(rng.integers(0, 3, n))
        results |= {"stress": rng.normal(size=6), "dipole": rng.normal(size=3)}
    if kind == 2:
        atoms.set_initial_charges(rng.normal(size=n))
        results |= {"charges": rng.normal(size=n), "magmoms": rng.normal(size=n), "magmom": 0.5}
    if kind == 3:
        atoms.set_momenta(rng.normal(size=(n, 3)))
        atoms.set_masses(rng.uniform(1, 9, n))
        del results["energy" if rng.random() < 0.3 else "forces"]
    if kind == 8 and rng.random() < 0.5:
        results["magmoms"] = rng.normal(size=n)
    if kind == 4 and rng.random() < 0.5:
        atoms.set_constraint(FixAtoms([0]))
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def pairs_of(rng: np.random.Generator, kind: int) -> dict[str, Any]:
    given = {"gap": float(rng.normal()), "word": f"w{rng.integers(3)}", "flag": True, "count": 3}
    if kind == 5:
        given |= {"mixed": "a" if rng.random() < 0.5 else 2.5, "accent": "é"}
    return {k: v for k, v in given.items() if kind in (1, 5) and rng.random() < 0.8}


def data_of(rng: np.random.Generator, kind: int, n: int) -> dict[str, Any]:
    given: dict[int, dict[str, Any]] = {
        0: {"tag": f"t{rng.integers(3)}", "q": int(rng.integers(9))},
        1: {"part": rng.normal(size=n), "of four": rng.normal(size=4).astype("f4"), "none": None},
        2: {"list": [1, 2, 3], "ragged": [[1], [2, 3]], "words": ["a", "b"], "empty": []},
        3: {"nested": {"x": [1.5, 2], "y": {"z": [1]}}, "i4": np.arange(n, dtype="i4")},
        4: {"energy": 2.5, "forces": rng.normal(size=(n, 3)), "charges": list(range(n))},
        5: {"energies": float(rng.normal()), "stress": rng.normal(size=6), "on": np.arange(n) > 1},
        6: {
            "charges": rng.normal(size=n + 1),
            "huge": 2**70 if rng.random() < 0.3 else 5,
            "virial": rng.normal(size=6),
        },
        7: {"source_id": 1, "source_file": "s", "nan": float("nan")},
        8: {"level": rng.normal(size=n) if n % 2 else "text", "magmoms": rng.normal(size=n)},
    }
    return {k: v for k, v in given[kind].items() if rng.random() < 0.8}


def rows_of(kind: int, count: int = 40) -> Rows:
    rng = np.random.default_rng(kind)
    out = []
    for _ in range(count):
        n = int(rng.integers(1, 9))
        out.append((atoms_of(rng, kind, n), pairs_of(rng, kind), data_of(rng, kind, n)))
    return out


def write_sqlite(path: Path, rows: Rows) -> None:
    with connect(path, use_lock_file=False) as database:
        for atoms, pairs, data in rows:
            database.write(atoms, key_value_pairs=dict(pairs), data=data)


def texts_of(rows: Rows) -> list[str]:
    out = []
    for atoms, pairs, data in rows:
        row = AtomsRow(atoms)
        values = {name: row[name] for name in row.__dict__ if name[0] != "_"}
        values |= {"cell": np.asarray(values["cell"]), "user": None, "ctime": 1.5}
        values |= {"key_value_pairs": pairs, "data": data}
        if row.constraints:
            values["constraints"] = [c.todict() for c in row.constraints]
        out.append(str(encode(values)))
    return out


def write_lmdb(path: Path, texts: list[str]) -> None:
    environment = lmdb.open(str(path), subdir=False, map_size=2**26)
    with environment, environment.begin(write=True) as transaction:
        for number, said in enumerate(texts, 1):
            transaction.put(str(number).encode(), zlib.compress(said.encode()))


def by_ase(
    source: AseDbSource, rows: Iterator[Any]
) -> tuple[Block, FieldObserver, Counter[str], list[str]]:
    """The good rows as ASE's decoder gives them, one by one."""
    observer, keys, records, faults = FieldObserver(), Counter[str](), [], []
    for identity, row in rows:
        try:
            if isinstance(row, Exception):
                raise row
            record = source._record(row, 0)
            fault = fault_of(record)
        except Exception as error:
            record, fault = Record(0), ("", f"{type(error).__name__}: {error}")
        if fault is None:
            record.observe(observer)
            keys.update(k for k in record.keys if not k.startswith("source_"))
            records.append(record)
        else:
            faults.append(f"row id {identity}: {fault[1]}")
    return records_to_block(records, observer.schema()), observer, keys, faults


def through_ase(path: Path) -> Iterator[tuple[int, Any]]:
    database = connect(path, use_lock_file=False)
    raw = sqlite3.connect(path)
    ids = [row[0] for row in raw.execute("SELECT id FROM systems ORDER BY id")]
    raw.close()
    for identity in ids:
        try:
            yield identity, database.get(id=identity)
        except Exception as error:
            yield identity, error


def decoded(texts: list[str]) -> Iterator[tuple[int, Any]]:
    for number, said in enumerate(texts, 1):
        try:
            yield number, AtomsRow({**decode(said), "id": number})
        except Exception as error:
            yield number, error


def check(source: AseDbSource, rows: Iterator[Any]) -> None:
    """A source gives what ASE's decoder gives of all rows."""
    want, observer, keys, faults = by_ase(source, rows)
    scan = source.scan()
    assert scan.schema == observer.schema()
    assert list(scan.keys.items()) == list(keys.items())  # as they are met
    assert [r.reason for r in scan.rejects] == faults
    assert scan.num_atoms.tolist() == np.diff(want.atoms_ptr).tolist()
    got = Block.concat([source.read(p).block for p in scan.partitions])
    assert got.levels == want.levels
    assert got.arrays.keys() == want.arrays.keys()
    for name, values in want.arrays.items():
        assert got[name].dtype == values.dtype, name
        assert got[name].shape == values.shape, name
        rows_there = np.flatnonzero(want.has(name))
        np.testing.assert_array_equal(got.has(name), want.has(name), err_msg=name)
        left, right = got.take(rows_there)[name], want.take(rows_there)[name]
        if values.dtype.kind == "O":
            assert left.tolist() == right.tolist(), name
        else:
            assert left.tobytes() == right.tobytes(), name


@pytest.mark.parametrize("spooled", [True, False])
@pytest.mark.parametrize("kind", range(9))
def test_sqlite_rows_are_those_of_ase(kind: int, spooled: bool, tmp_path: Path) -> None:
    path = tmp_path / "in.db"
    write_sqlite(path, rows_of(kind))
    spool = str(tmp_path / "spool") if spooled else None
    check(AseDbSource([str(path)], rows=7, spool=spool), through_ase(path))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", range(9))
def test_lmdb_rows_are_those_of_ase(
    kind: int, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(text, "_text", None)
        monkeypatch.setattr(inflate, "_libdeflate", lambda: (None, zlib.error))
    texts = texts_of(rows_of(kind))
    texts[3] = texts[3][:80]
    texts[5] = texts[5].replace("float64", "float32")
    texts[6] = texts[6].replace("[[", "[ [ ").replace(", ", ",")
    path = tmp_path / "in.aselmdb"
    write_lmdb(path, texts)
    spool = str(tmp_path / "spool") if compiled else None
    check(AseDbSource([str(path)], rows=7, spool=spool), decoded(texts))


DAMAGE = [
    "positions = x'0102'",
    "numbers = NULL",
    "data = NULL",
    "data = '{\"a\": [1, 2]}'",
    "data = x'00'",
    "key_value_pairs = '{broken'",
    "energy = 'word'",
    "pbc = NULL",
    "pbc = 'T'",
    "calculator_parameters = '{x'",
    "forces = x''",
    'constraints = \'[{"name": "FixAtoms", "kwargs": {"indices": [0]}}]\'',
]


@pytest.mark.parametrize("change", DAMAGE)
def test_an_odd_sqlite_row_is_for_ase_to_judge(change: str, tmp_path: Path) -> None:
    path = tmp_path / "in.db"
    write_sqlite(path, rows_of(1, 9))
    with sqlite3.connect(path) as raw:
        raw.execute(f"UPDATE systems SET {change} WHERE id = 4")
        raw.execute("DELETE FROM systems WHERE id = 2")
    raw.close()
    check(AseDbSource([str(path)]), through_ase(path))


@pytest.mark.parametrize("version", ["4", "5", "99"])
def test_an_old_sqlite_database_goes_through_ase(version: str, tmp_path: Path) -> None:
    path = tmp_path / "in.db"
    write_sqlite(path, rows_of(0, 5))
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE information SET value = ? WHERE name = 'version'", (version,))
    raw.close()
    source = AseDbSource([str(path)])
    if version == "5":
        check(source, through_ase(path))
    else:
        with pytest.raises(OSError, match=r"convert to new format|not read new"):
            source.scan()


def test_external_tables_go_through_ase(tmp_path: Path) -> None:
    path = tmp_path / "in.db"
    write_sqlite(path, rows_of(0, 5))
    database = connect(path, use_lock_file=False)
    database.write(Atoms("H"), external_tables={"momenta_of": {"a": 1.0}})
    check(AseDbSource([str(path)]), through_ase(path))


def taken(path: Path) -> list[Any]:
    """What rows of a database are taken as."""
    source = AseDbSource([str(path)])
    sorting = ase_db._Sorting(source._forms(0), ase_db.PackedForms(source._forms(0)))
    return [sorting.add(i, row) for i, (_, row, _) in enumerate(source._rows(0, 0, None))]


def test_like_rows_share_a_form(tmp_path: Path) -> None:
    rows: Rows = []
    for n in (1, 2, 4, 6, 9, 64):
        atoms = Atoms(f"H{n}", positions=np.ones((n, 3)), cell=np.eye(3))
        results = {"energy": float(n), "forces": np.ones((n, 3)), "stress": np.ones(6)}
        atoms.calc = SinglePointCalculator(atoms, **results)
        rows.append((atoms, {}, {"tag": f"n{n}", "part": np.ones(n), "q": 0.5}))
    write_sqlite(tmp_path / "in.db", rows)
    write_lmdb(tmp_path / "in.aselmdb", texts_of(rows))
    for name in ("in.db", "in.aselmdb"):
        forms = taken(tmp_path / name)
        # Six numbers of six atoms, or of a stress? That is another form, to be on the safe side.
        assert len({form for k, form in enumerate(forms) if k != 3}) == 1
        assert forms[3] is not forms[0]
        packed = name == "in.aselmdb" and text.available()
        assert isinstance(forms[0], ase_db.PackedForm if packed else ase_db.Form)


def test_as_many_numbers_as_atoms_by_chance(tmp_path: Path) -> None:
    rows: Rows = []
    for n in (3, 4, 3, 6, 5, 6):
        atoms = Atoms(f"H{n}", positions=np.ones((n, 3)), cell=np.eye(3))
        rows.append((atoms, {}, {"dipole" if n < 5 else "virial": np.arange(n) / 7}))
    write_sqlite(tmp_path / "in.db", rows)
    write_lmdb(tmp_path / "in.aselmdb", texts_of(rows))
    source = AseDbSource([str(tmp_path / "in.db")])
    assert [r.frame for r in source.scan().rejects] == [1, 4]
    check(source, through_ase(tmp_path / "in.db"))
    check(AseDbSource([str(tmp_path / "in.aselmdb")]), decoded(texts_of(rows)))


def test_rows_hardly_alike_are_taken_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ase_forms, "MOST_FORMS", 2)
    rows = [(Atoms("H2"), {}, {f"name{i}": i}) for i in range(9)]
    write_sqlite(tmp_path / "in.db", rows)
    forms = taken(tmp_path / "in.db")
    assert [isinstance(f, Record) for f in forms] == [False] * 3 + [True] * 6
    check(AseDbSource([str(tmp_path / "in.db")]), through_ase(tmp_path / "in.db"))


@pytest.mark.parametrize(
    "mend", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:99])]
)
def test_without_what_the_scan_put_down_rows_are_decoded_again(
    mend: Callable[[Path], Any], tmp_path: Path
) -> None:
    path, spool = tmp_path / "in.db", tmp_path / "spool"
    write_sqlite(path, rows_of(1))
    source = AseDbSource([str(path)], rows=7, spool=str(spool))
    partitions = source.scan().partitions
    before = [source.read(p).block for p in partitions]
    mend(next(spool.iterdir()))
    for partition, block in zip(partitions, before, strict=True):
        again = source.read(partition).block
        for name, values in block.arrays.items():
            np.testing.assert_array_equal(again[name], values, err_msg=name)


def test_a_spool_that_cannot_be_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.db"
    write_sqlite(path, rows_of(1))
    (tmp_path / "file").touch()
    check(AseDbSource([str(path)], spool=str(tmp_path / "file")), through_ase(path))
    # More room than any disk has.
    monkeypatch.setattr(batch_spool, "_ROOM", 2**60)
    check(AseDbSource([str(path)], spool=str(tmp_path / "spool")), through_ase(path))
    assert not list((tmp_path / "spool").iterdir())


def test_the_spool_of_a_stopped_conversion_goes(tmp_path: Path) -> None:
    path, spool = tmp_path / "in.db", tmp_path / "spool"
    write_sqlite(path, rows_of(0, 3))
    for _ in range(3):
        AseDbSource([str(path)], spool=str(spool)).scan()
    assert len(list(spool.iterdir())) == 1


def test_segments_are_as_those_of_single_records(tmp_path: Path) -> None:
    path = tmp_path / "in.db"
    write_sqlite(path, rows_of(0, 30))
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE systems SET positions = x'01' WHERE id IN (5, 6, 20)")
    raw.close()
    source = AseDbSource([str(path)], rows=7)
    segments = [s for p in source.scan().partitions for s in p.segments]
    assert [(s.first, s.start, s.stop, s.frames) for s in segments] == [
        (0, 1, 5, 4),
        (6, 7, 14, 7),
        (13, 14, 20, 6),
        (20, 21, 28, 7),
        (27, 28, 31, 3),
    ]


def test_rows_of_an_lmdb_file_come_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alchemi_xr.etl.ase_rows._BYTES", 1000)
    texts = texts_of(rows_of(0, 20))
    write_lmdb(tmp_path / "in.aselmdb", texts)
    check(AseDbSource([str(tmp_path / "in.aselmdb")]), decoded(texts))


@pytest.mark.parametrize("fast", [True, False])
def test_inflate(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fast:
        pytest.importorskip("deflate")
    else:
        monkeypatch.setattr(inflate, "_libdeflate", lambda: (None, zlib.error))
    run = inflate.Inflate()
    for size in (0, 10, 100_000, 5, 3_000_000):  # far more than is guessed, too
        given = b"a" * size
        assert run(zlib.compress(given)) == given
    for packed in (b"", b"junk", zlib.compress(b"abc" * 99)[:-5]):
        with pytest.raises(zlib.error):
            run(packed)


def test_six_numbers_are_a_matrix() -> None:
    assert place_result("stress", (6,), 6) == ("system", True)
    assert place_result("stresses", (4, 6), 4) == ("atom", True)
    assert place_result("stresses", (6,), 3) == ("atom", True)  # three rows of the matrix
    assert place_result("stresses", (6,), 6) == ("system", True)
    assert place_result("forces", (4, 3), 4) == ("atom", False)


def test_a_packed_row_knows_its_plain_one() -> None:
    (said,) = texts_of(rows_of(0, 1))
    reader = text.ArrayReader()
    found = reader(said.encode())
    if found is None:
        pytest.skip("no compiler at installation")
    row = PackedRow(said.encode(), 3, found, reader)
    plain = row.plain()
    assert isinstance(plain, PlainRow)
    assert plain.atoms == row.atoms
    want = AtomsRow({**decode(said), "id": 3})
    for name, mine in itertools.product(("positions", "forces"), (plain,)):
        np.testing.assert_array_equal(mine[name], want[name])


def test_a_cell_or_pbc_of_as_many_rows_as_atoms_is_a_fault(tmp_path: Path) -> None:
    texts = []
    for n, bad in ((3, False), (3, False), (4, True), (2, True), (4, False)):
        array = {
            "numbers": [[n], "int64", [1] * n],
            "positions": [[n, 3], "float64", [0.5] * 3 * n],
            # Two and four rows are together as many as of two good ones.
            "pbc": [[n if bad else 3], "bool", [True] * (n if bad else 3)],
        }
        texts.append(json.dumps({k: {"__ndarray__": v} for k, v in array.items()}))
    write_lmdb(tmp_path / "in.aselmdb", texts)
    source = AseDbSource([str(tmp_path / "in.aselmdb")])
    scan = source.scan()
    assert [reject.frame for reject in scan.rejects] == [2, 3]
    assert scan.num_atoms.tolist() == [3, 3, 4]

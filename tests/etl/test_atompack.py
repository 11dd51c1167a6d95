"""Atompack files, written by the package itself: what is in them, and what is wrong with them."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.errors import OptionalDependencyError, SourceError
from alchemi_xr.etl.atompack_index import read_index
from alchemi_xr.etl.atompack_rows import AtompackReader, _ask, columns_to_block
from alchemi_xr.etl.conversion import append, convert
from alchemi_xr.etl.inputs import expand, find_source
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.records import Record, records_to_block
from alchemi_xr.etl.schema import FieldObserver
from alchemi_xr.etl.set_stats import stats
from alchemi_xr.etl.sources.atompack import AtompackSource
from alchemi_xr.store.reader import open_store

ase = pytest.importorskip("ase")
atompack = pytest.importorskip("atompack", reason="the extra 'atompack' is not installed")

from ase.build import bulk, molecule  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402

HEADERS = 8192
COMPRESSIONS = ("none", "lz4", "zstd")


def make(n: int = 3, seed: int = 0, **own: Any) -> Any:
    rng = np.random.default_rng(seed)
    numbers = own.pop("numbers", rng.integers(1, 90, n).astype(np.uint8))
    dtype = own.pop("dtype", np.float32)
    places = own.pop("positions", rng.normal(size=(n, 3)).astype(dtype))
    custom, of_atoms = own.pop("custom", {}), own.pop("of_atoms", {})
    out = atompack.Molecule.from_arrays(places, numbers, **own)
    for key, value in custom.items():
        out.set_property(key, value)
    for key, value in of_atoms.items():
        out.set_property(key, value, scope="atom")
    return out


def write(path: Path, *flushes: Sequence[Any], compression: str = "none") -> Path:
    """A file of molecules, with a flush behind each lot."""
    file = atompack.Database(str(path), compression=compression, overwrite=True)
    for lot in flushes:
        file.add_molecules(list(lot))
        file.flush()
    return path


def whole(store: Any) -> Any:
    return store.read_block(store.active)


def damaged(path: Path, at: int, data: bytes, name: str = "bad.atp") -> Path:
    """A copy of a file with other bytes at a place."""
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    out = path.with_name(name)
    out.write_bytes(content)
    return out


def reader_of(path: Path) -> AtompackReader:
    return AtompackReader(str(path), "x", NameMap())


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# -- what is in them


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_structures_of_ase(tmp_path: Path, converted: Any, compression: str) -> None:
    frames = [molecule("CH3CH2OH"), bulk("NaCl", "rocksalt", a=5.6), molecule("H2O")]
    rng = np.random.default_rng(0)
    for atoms in frames:
        n = len(atoms)
        atoms.set_velocities(rng.normal(size=(n, 3)))
        atoms.info["label"] = atoms.get_chemical_formula()
        atoms.info["gap"] = float(n)
        atoms.arrays["weight"] = rng.normal(size=n)
        atoms.calc = SinglePointCalculator(
            atoms,
            energy=-float(n),
            forces=rng.normal(size=(n, 3)),
            charges=rng.normal(size=n),
            **({"stress": rng.normal(size=6)} if atoms.pbc.any() else {}),
        )
    molecules = [atompack.from_ase(a, atom_keys=["weight", "momenta"]) for a in frames]
    report, store = converted(write(tmp_path / "a.atp", molecules, compression=compression))
    assert (report.source, report.samples, report.rejected) == ("atompack", 3, 0)
    block = whole(store)
    assert np.diff(block.atoms_ptr).tolist() == [9, 2, 3]
    joined: Callable[[Any], Any] = lambda f: np.concatenate([f(a) for a in frames])  # noqa: E731
    np.testing.assert_array_equal(block["atomic_numbers"], joined(lambda a: a.numbers))
    for name, values in (
        ("positions", joined(lambda a: a.positions)),
        ("forces", joined(lambda a: a.get_forces())),
        ("velocities", joined(lambda a: a.get_velocities())),
    ):
        assert block[name].dtype == np.float32
        np.testing.assert_array_equal(block[name], values.astype(np.float32), err_msg=name)
    np.testing.assert_array_equal(block["charges"], joined(lambda a: a.get_charges()))
    np.testing.assert_array_equal(block["weight"], joined(lambda a: a.arrays["weight"]))
    assert store.level("weight") == "atom"
    np.testing.assert_array_equal(block["energy"].ravel(), [-9.0, -2.0, -3.0])
    assert block["gap"].tolist() == [9.0, 2.0, 3.0]
    assert block["label"].tolist() == ["C2H6O", "ClNa", "H2O"]
    assert block["pbc"].all(axis=1).tolist() == [False, True, False]
    for name, value in (
        ("cell", frames[1].cell.array),
        ("stress", frames[1].get_stress(voigt=False)),
    ):
        assert block.has(name).tolist() == [False, True, False]
        np.testing.assert_array_equal(block[name][1], value)
        assert np.isnan(block[name][[0, 2]]).all()
    assert any("name no units but Å for positions" in note for note in report.notes)
    assert any("taken as they stand" in note for note in report.notes)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_zero_is_there_and_what_lacks_is_not(
    tmp_path: Path, converted: Any, compression: str
) -> None:
    zero = np.zeros((3, 3), np.float32)
    lots = [
        make(energy=0.0, forces=zero, pbc=(False, False, False), custom={"q": 0, "w": ""}),
        make(),
        make(energy=1.5, stress=np.zeros((3, 3)), of_atoms={"c": np.zeros(3)}),
        make(charges=np.zeros(3), velocities=zero, name="last", custom={"v": np.zeros(2)}),
    ]
    report, store = converted(write(tmp_path / "a.atp", lots, compression=compression))
    block = whole(store)
    held = {n: block.has(n).tolist() for n in block.names}
    yes, no = True, False
    assert held == {
        "atomic_numbers": [yes] * 4,
        "positions": [yes] * 4,
        "energy": [yes, no, yes, no],
        "forces": [yes, no, no, no],
        "pbc": [yes, no, no, no],
        "stress": [no, no, yes, no],
        "charges": [no, no, no, yes],
        "velocities": [no, no, no, yes],
        "q": [yes, no, no, no],
        "w": [yes, no, no, no],
        "c": [no, no, yes, no],
        "v": [no, no, no, yes],
        "name": [no, no, no, yes],
    }
    np.testing.assert_array_equal(block["energy"].ravel(), [0.0, np.nan, 1.5, np.nan])
    np.testing.assert_array_equal(block["forces"][:3], zero)
    assert np.isnan(block["forces"][3:]).all()
    assert block["v"].shape == (4, 2)
    assert report.keys["energy"] == 2
    assert report.keys["forces"] == 1


_ENERGY = st.sampled_from([None, 0.0, -1.25])
_SAMPLE = st.fixed_dictionaries(
    {
        "n": st.integers(0, 4),
        "energy": _ENERGY,
        "forces": st.sampled_from([None, 0.0, 2.0]),
        "pbc": st.sampled_from([None, (False,) * 3, (True, False, True)]),
        "k": st.sampled_from([None, 0, 7]),
        "a": st.sampled_from([None, 0.0, 3.0]),
        "t": st.sampled_from([None, None, None, 0.0, 4.0]),
        "s": st.sampled_from([None, "", "é"]),
    }
)


@given(
    samples=st.lists(_SAMPLE, min_size=1, max_size=9),
    rows=st.integers(1, 10),
    compression=st.sampled_from(COMPRESSIONS),
)
def test_any_molecules_in_any_cut(
    tmp_path_factory: Any, samples: list[Any], rows: int, compression: str
) -> None:
    def fill(value: float | None, *shape: int) -> Any:
        return None if value is None else np.full(shape, value, np.float32)

    lots = []
    for i, s in enumerate(samples):
        own = {"energy": s["energy"], "forces": fill(s["forces"], s["n"], 3), "pbc": s["pbc"]}
        # A tensor, which has no flat read where some molecule lacks it.
        custom = {"k": s["k"], "s": s["s"], "t": fill(s["t"], 2, 2)}
        lots.append(
            make(
                s["n"],
                seed=i,
                **{k: v for k, v in own.items() if v is not None},
                custom={k: v for k, v in custom.items() if v is not None},
                of_atoms={} if s["a"] is None else {"a": fill(s["a"], s["n"])},
            )
        )
    path = write(tmp_path_factory.mktemp("in") / "a.atp", lots, compression=compression)
    source = AtompackSource([str(path)], rows=rows)
    scan = source.scan()
    assert scan.rejects == []
    assert scan.num_atoms.tolist() == [s["n"] for s in samples]
    assert max(p.samples for p in scan.partitions) <= rows
    at = 0
    for part in scan.partitions:
        block = source.read(part).block
        ptr = block.atoms_ptr
        for i in range(part.samples):
            want, had = samples[at], lots[at]
            np.testing.assert_array_equal(block["positions"][ptr[i] : ptr[i + 1]], had.positions)
            for key, name in (("energy", "energy"), ("pbc", "pbc"), ("k", "k"), ("t", "t")):
                there = name in block and bool(block.has(name)[i])
                assert there == (want[key] is not None), name
                if there:
                    np.testing.assert_array_equal(block[name][i].ravel(), np.ravel(want[key])[0]
                                                  if name == "t" else np.ravel(want[key]))  # fmt: skip
            for name in ("forces", "a"):
                there = name in block and bool(block.has(name)[i])
                assert there == (want[name] is not None), name
                if there:
                    assert (block[name][ptr[i] : ptr[i + 1]] == want[name]).all()
            assert ("s" in block and bool(block.has("s")[i])) == (want["s"] is not None)
            if want["s"] is not None:
                assert block["s"][i] == want["s"]
            at += 1


def test_custom_properties_keep_shape_and_type(tmp_path: Path, converted: Any) -> None:
    custom = {
        "one": np.array([3.0]),
        "vector": np.arange(5.0),
        "short": np.arange(4, dtype=np.float32),
        "whole": np.arange(3, dtype=np.int32),
        "rows": np.arange(12.0).reshape(4, 3),
        "tensor": np.arange(8.0).reshape(2, 2, 2),
        "number": 2.5,
        "count": 4,
    }
    of_atoms = {
        "a1": np.arange(3),
        "a3": np.ones((3, 3), np.float32),
        "a33": np.arange(27.0).reshape(3, 3, 3),
    }
    lots = [make(custom=custom, of_atoms=of_atoms), make(custom=custom, of_atoms=of_atoms)]
    path = write(tmp_path / "a.atp", lots)
    # By the flat read, which flattens vectors.
    batch = reader_of(path).batch(np.arange(2), np.array([3, 3]))
    assert {c.name: c.tail for c in batch.columns or []} == {
        "atomic_numbers": (),
        "positions": (3,),
        **{name: np.shape(value) for name, value in custom.items()},
        **{name: value.shape[1:] for name, value in of_atoms.items()},
    }
    _, store = converted(path)
    block = whole(store)
    for name, value in custom.items():
        assert block[name].shape == (2, *np.shape(value)), name
        assert block[name].dtype == np.asarray(value).dtype, name
        np.testing.assert_array_equal(block[name][1], value)
    for name, value in of_atoms.items():
        assert (store.level(name), block[name].dtype) == ("atom", value.dtype)
        np.testing.assert_array_equal(block[name], np.concatenate([value, value]))
    assert "name" not in block


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("full", [0, 1, 3])
def test_columns_and_records_are_the_same(tmp_path: Path, full: int, vectors: bool) -> None:
    # Where the first molecule has all properties, none a vector, the flat read refuses those
    # that have not.
    lots = [make(2 + i, seed=i, energy=0.0) for i in range(4)]
    lots[full] = make(
        2 + full,
        energy=2.0,
        forces=np.ones((2 + full, 3), np.float32),
        cell=np.eye(3),
        name="full",
        custom={"k": 0, "s": "word"}
        | ({"v": np.arange(4.0), "rows": np.ones((2, 3))} if vectors else {}),
        of_atoms={"c": np.arange(2 + full), "c3": np.ones((2 + full, 3))},
    )
    reader = reader_of(write(tmp_path / "a.atp", lots))
    rows, atoms = np.arange(4), np.arange(2, 6)
    batch = reader.batch(rows, atoms)
    assert batch.columns is not None
    records = [r for r in reader.records(rows, atoms).records or [] if isinstance(r, Record)]
    assert len(records) == 4
    observer = FieldObserver()
    for record in records:
        record.observe(observer)
    schema = observer.schema()
    want = records_to_block(records, schema)
    got = columns_to_block(batch.columns, atoms, schema, NameMap())
    assert got is not None
    assert (got.names, got.levels) == (want.names, want.levels)
    assert len(got.names) == (12 if vectors else 10)
    for name in got.names:
        assert got[name].dtype == want[name].dtype, name
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        np.testing.assert_array_equal(got.has(name), want.has(name), err_msg=name)


def test_no_lattice_is_no_cell(tmp_path: Path, converted: Any) -> None:
    zero = np.zeros((3, 3))
    for name, custom in (("flat", {}), ("not", {"t": np.ones((2, 2))})):
        lots = [make(cell=zero, custom=custom), make(cell=np.eye(3)), make(cell=zero)]
        source = AtompackSource([str(write(tmp_path / name, lots))])
        block = source.read(source.scan().partitions[0]).block
        assert block.has("cell").tolist() == [False, True, False], name
        assert np.isnan(block["cell"][[0, 2]]).all()


def test_arrays_of_one_row_an_atom_are_found_by_their_lengths(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{n}.atp", [make(n, custom={"mag": np.arange(float(n))})] * 2)
        for n in (3, 4)
    ]
    convert(paths, tmp_path / "out.zarr", progress=False)
    with open_store(tmp_path / "out.zarr") as store:
        assert store.level("mag") == "atom"
        assert whole(store)["mag"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]


def test_doubles_and_singles(tmp_path: Path, converted: Any) -> None:
    write(tmp_path / "a.atp", [make(dtype=np.float64, forces=np.ones((3, 3)))])
    _, store = converted(tmp_path / "a.atp")
    assert whole(store)["positions"].dtype == np.float64
    write(tmp_path / "b.atp", [make(), make()])
    convert([tmp_path / "b.atp", tmp_path / "a.atp"], tmp_path / "two.zarr", progress=False)
    with open_store(tmp_path / "two.zarr") as two:
        block = whole(two)
    assert block["positions"].dtype == np.float64
    np.testing.assert_array_equal(block["positions"][:3], make().positions)
    assert block.has("forces").tolist() == [False, False, True]


def test_a_name_is_told_where_it_cannot_be_had(tmp_path: Path, converted: Any) -> None:
    lots = [make(name="a", custom={"t": np.ones((2, 2))}), make(name="b"), make(energy=1.0)]
    report, store = converted(write(tmp_path / "a.atp", lots))
    block = whole(store)
    assert block.has("t").tolist() == [True, False, False]
    assert block.has("name").tolist() == [True, False, False]
    assert any("of 2 molecules without a tensor" in note for note in report.notes)


def test_properties_of_atoms_that_were_put_down_for_the_molecule(
    tmp_path: Path, converted: Any
) -> None:
    # So from_ase writes arrays that it is not told of.
    lots = [make(seed=i, custom={"momenta": np.full((3, 3), i + 1.0)}) for i in range(2)]
    _, store = converted(write(tmp_path / "a.atp", lots))
    assert store.level("momenta") == "atom"
    np.testing.assert_array_equal(whole(store)["momenta"][:, 0], [1, 1, 1, 2, 2, 2])


def test_names_are_mapped_and_contests_told(tmp_path: Path, converted: Any) -> None:
    lots = [
        make(energy=1.0, custom={"dft": 5.0, "energies": 7.0}),
        make(energy=2.0),
        make(custom={"energies": 3.0}),
    ]
    path = write(tmp_path / "a.atp", lots)
    report, store = converted(path)
    assert whole(store)["energy"].ravel().tolist() == [1.0, 2.0, 3.0]
    assert any("energies" in note for note in report.notes)
    convert(path, tmp_path / "dft.zarr", energy_key="dft", progress=False)
    with open_store(tmp_path / "dft.zarr") as mapped:
        assert whole(mapped)["energy"].ravel().tolist() == [5.0, 2.0, 3.0]
    convert(path, tmp_path / "eh.zarr", units={"energy": "Eh"}, progress=False)
    with open_store(tmp_path / "eh.zarr") as scaled:
        np.testing.assert_allclose(whole(scaled)["energy"].ravel()[0], 27.211386, rtol=1e-7)


def test_shape_that_the_field_cannot_have(tmp_path: Path) -> None:
    lots = [make(custom={"dipole": np.ones(2)}), make(seed=1)]
    path = write(tmp_path / "a.atp", lots)
    with pytest.raises(SourceError, match=r"a\.atp, frame 0: field 'dipole'.*expected 3"):
        convert(path, tmp_path / "out.zarr", progress=False)
    voigt = write(tmp_path / "v.atp", [make(custom={"virial": np.arange(6.0)})])
    convert(voigt, tmp_path / "v.zarr", progress=False)
    with open_store(tmp_path / "v.zarr") as store:
        assert whole(store)["virial"][0].tolist() == [[0, 5, 4], [5, 1, 3], [4, 3, 2]]


# -- how they are read


def test_found_by_suffix_and_by_first_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.atp", [make()])
    assert find_source(expand(path))[0] is AtompackSource
    other = tmp_path / "data.bin"
    other.write_bytes(path.read_bytes())
    assert find_source(expand(other))[0] is AtompackSource
    assert not AtompackSource.matches(str(tmp_path))
    (tmp_path / "text.bin").write_text("ATP")
    assert not AtompackSource.matches(str(tmp_path / "text.bin"))


def many(path: Path, compression: str = "none") -> Path:
    """300 molecules of 1 to 7 atoms, several properties in some of them only."""
    lots = []
    for i in range(300):
        n = 1 + i % 7
        own: dict[str, Any] = {"energy": float(i % 5)} if i % 3 else {}
        if i % 4 == 0:
            own |= {"cell": np.eye(3) * (4 + i), "pbc": (True, True, False)}
        lots.append(
            make(n, seed=i, **own, custom={"k": i} if i % 2 else {}, of_atoms={"c": np.arange(n)})
        )
    return write(path, lots[:200], lots[200:], compression=compression)


OPTIONS: dict[str, Any] = {
    "profile": {name: {"chunk_size": 64} for name in ("core", "custom", "meta")},
    "options": {"rows": 20},
}


def test_workers_give_the_same_bytes(tmp_path: Path) -> None:
    path = many(tmp_path / "a.atp", "zstd")
    for name, client, threads in (("one", None, 1), ("two", 2, None)):
        convert(
            path, tmp_path / name, client=client, threads=threads, progress=False, **OPTIONS
        )  # fmt: skip
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    convert(path, tmp_path / "large", progress=False, threads=1, profile=OPTIONS["profile"])
    with open_store(tmp_path / "one") as one, open_store(tmp_path / "large") as large:
        first, second = whole(one), whole(large)
    assert first.names == second.names
    for name in first.names:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_array_equal(first.has(name), second.has(name))


def test_taken_up_again_to_the_same_bytes(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    class Stopping:
        done = 0

        def start(self, title: str, total: int | None, unit: str) -> None:
            self.title = title

        def advance(self, count: int = 1, note: str = "") -> None:
            self.done += self.title == "convert"
            if self.done > 5:
                raise Stop

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

    path = many(tmp_path / "a.atp")
    convert(path, tmp_path / "whole.zarr", progress=False, threads=1, **OPTIONS)
    with pytest.raises(Stop):
        convert(path, tmp_path / "out.zarr", progress=Stopping(), threads=1, **OPTIONS)
    assert not (tmp_path / "out.zarr").exists()
    report = convert(path, tmp_path / "out.zarr", progress=False, threads=1, **OPTIONS)
    assert report.resumed
    assert tree(tmp_path / "out.zarr") == tree(tmp_path / "whole.zarr")


def test_appended_and_counted(tmp_path: Path) -> None:
    path = many(tmp_path / "a.atp")
    convert(path, tmp_path / "out.zarr", progress=False)
    report = append(path, tmp_path / "out.zarr", progress=False)
    assert (report.samples, report.rejected) == (300, 0)
    counted = stats(path, progress=False)
    assert (counted.samples, counted.atoms) == (300, sum(1 + i % 7 for i in range(300)))


def test_what_one_task_holds_is_bounded(tmp_path: Path) -> None:
    # The flat read makes room for a property in every molecule of a batch.
    lots = [make(1, seed=i) for i in range(100)]
    lots[50].set_property("spectrum", np.ones(300_000))
    scan = AtompackSource([str(write(tmp_path / "a.atp", lots))]).scan()
    assert max(p.samples for p in scan.partitions) <= 7
    assert sum(p.samples for p in scan.partitions) == 100


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.atp", [make(), make(seed=1)])
    source = AtompackSource([str(path)])
    partition = source.scan().partitions[0]
    assert source.read(partition).block.num_samples == 2
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(SourceError, match="not what it was when it was scanned"):
        source.read(partition)
    with pytest.raises(SourceError, match="read before scan"):
        AtompackSource([str(path)]).read(partition)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.atp", [make()])
    monkeypatch.setitem(sys.modules, "atompack", None)
    assert AtompackSource.matches(str(path))
    with pytest.raises(OptionalDependencyError, match=r"alchemi_xr\[atompack\]"):
        convert(path, tmp_path / "out.zarr", progress=False)


# -- what is wrong with them


def test_impossible_elements_are_set_aside(tmp_path: Path) -> None:
    lots = [make(seed=i, energy=1.0) for i in range(5)]
    lots[1] = make(numbers=np.array([1, 0, 8], np.uint8), energy=1.0, custom={"gone": 1})
    lots[3] = make(numbers=np.array([1, 6, 119], np.uint8), energy=1.0)
    path = write(tmp_path / "a.atp", lots)
    with pytest.raises(SourceError, match=r"a\.atp, frame 1: .*atom 1 has the atomic number 0"):
        convert(path, tmp_path / "out.zarr", progress=False)
    assert not (tmp_path / "out.zarr").exists()
    report = convert(path, tmp_path / "out.zarr", on_error="quarantine", progress=False)
    assert [(r.file, r.frame, r.field) for r in report.rejects] == [
        (str(path), 1, "atomic_numbers"),
        (str(path), 3, "atomic_numbers"),
    ]
    assert "atom 2 has the atomic number 119, expected 1 to 118" in report.rejects[1].reason
    assert (report.records, report.samples) == (5, 3)
    with open_store(tmp_path / "out.zarr") as store:
        block = whole(store)
    np.testing.assert_array_equal(block["positions"][3:6], lots[2].positions)
    assert "gone" not in block


def test_impossible_elements_beside_tensors(tmp_path: Path) -> None:
    lots = [make(custom={"t": np.ones((2, 2))}), make(numbers=np.array([1, 1, 0], np.uint8))]
    path = write(tmp_path / "a.atp", lots)
    report = convert(path, tmp_path / "out.zarr", on_error="quarantine", progress=False)
    assert [(r.frame, r.field) for r in report.rejects] == [(1, "atomic_numbers")]


def test_numbers_that_are_none(tmp_path: Path) -> None:
    lots = [make(seed=i, energy=1.0) for i in range(3)]
    lots[1].energy = float("nan")
    path = write(tmp_path / "a.atp", lots)
    report = convert(path, tmp_path / "kept.zarr", progress=False)
    assert (report.samples, report.nonfinite_samples) == (3, 1)
    report = convert(
        path, tmp_path / "out.zarr", nonfinite="quarantine", on_error="quarantine", progress=False
    )
    assert report.samples == 2
    assert [(r.file, r.frame, r.field) for r in report.rejects] == [(str(path), 1, "energy")]


def place_of(path: Path, record: int) -> int:
    return int(read_index(str(path), "x").entries(str(path), record, record + 1)["offset"][0])


def test_broken_records_are_set_aside(tmp_path: Path) -> None:
    lots = [make(seed=i, forces=np.ones((3, 3), np.float32)) for i in range(5)]
    path = write(tmp_path / "a.atp", lots)
    at = place_of(path, 2)
    sections = at + 4 + 3 * 13
    cases = {
        # The forces of two atoms, and 12 bytes that are no section.
        "wrong lengths": (sections + 2 + 2 + 6 + 1, struct.pack("<I", 24)),
        "another number of atoms": (at, struct.pack("<I", 2)),
        "no atom": (at, struct.pack("<I", 0)),
        "too many atoms": (at, struct.pack("<I", 2**31)),
        "a name that is none": (sections + 2 + 2, b"f1rces"),
        "zeros": (at, bytes(60)),
    }
    for case, (where, data) in cases.items():
        bad = damaged(path, where, data)
        with pytest.raises(SourceError, match=r"bad\.atp, frame 2"):
            convert(bad, tmp_path / "out.zarr", progress=False)
        report = convert(bad, tmp_path / f"{case}.zarr", on_error="quarantine", progress=False)
        assert [(r.file, r.frame) for r in report.rejects] == [(str(bad), 2)], case
        assert (report.records, report.samples) == (5, 4), case
        with open_store(tmp_path / f"{case}.zarr") as store:
            np.testing.assert_array_equal(whole(store)["positions"][6:9], lots[3].positions)
            assert whole(store).has("forces").all()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_record_that_is_broken(tmp_path: Path, compression: str) -> None:
    lots = [make(seed=i, energy=1.0) for i in range(5)]
    path = write(tmp_path / "a.atp", lots, compression=compression)
    bad = damaged(path, place_of(path, 4), b"\xff" * 20)
    report = convert(bad, tmp_path / "out.zarr", on_error="quarantine", progress=False)
    assert [(r.file, r.frame) for r in report.rejects] == [(str(bad), 4)]
    assert "ecompression failed" in report.rejects[0].reason
    assert report.samples == 4


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_an_index_that_lies(tmp_path: Path, compression: str) -> None:
    # Each of these ends the package's process, or its Python code, where nobody looks first.
    lots = [make(seed=i) for i in range(4)]
    path = write(tmp_path / "a.atp", lots, compression=compression)
    entry = read_index(str(path), "x").index_start + 8 + 20
    reasons = []
    for where, data in (
        (0, b"\xff" * 8),
        (0, struct.pack("<Q", 10)),
        (8, b"\xff" * 4),
        (16, struct.pack("<I", 2**31)),
        # Could be, but is not what the record says.
        (16, struct.pack("<I", 2)),
        *([(12, b"\xff" * 4)] if compression == "none" else []),
    ):
        bad = damaged(path, entry + where, data)
        report = convert(
            bad, tmp_path / "out.zarr", on_error="quarantine", overwrite=True, progress=False
        )
        assert [r.frame for r in report.rejects] == [1]
        assert report.samples == 3
        reasons.append(report.rejects[0].reason)
    assert reasons.pop(4) == "the record has 3 atoms, the index says 2"
    assert all("the index is damaged" in reason for reason in reasons)
    with pytest.raises(SourceError, match=r"bad\.atp: the index is damaged: found 0 molecules"):
        convert(damaged(path, entry - 28, bytes(88)), tmp_path / "no.zarr", progress=False)


def test_panics_of_the_package_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.atp", [make()])
    entry = read_index(str(path), "x").index_start + 8
    file = atompack.Database.open(str(damaged(path, entry, b"\xff" * 8)))
    with pytest.raises(ValueError, match="out of range"):
        _ask(file.get_molecules_flat, [0])
    with pytest.raises(KeyboardInterrupt):
        _ask(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_schema_that_lies(tmp_path: Path) -> None:
    # The package would make room for a property of 4 GB in every molecule.
    path = write(tmp_path / "a.atp", [make(energy=1.0, forces=np.ones((3, 3), np.float32))])
    content = path.read_bytes()
    start, length = struct.unpack_from("<QQ", content, 4096 + 60)
    for name, back in (("energy", 4), ("forces", 8)):
        at = content.index(name.encode(), start, start + length) - back
        with pytest.raises(SourceError, match="the schema is damaged"):
            convert(damaged(path, at, b"\xff" * 4), tmp_path / "out.zarr", progress=False)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_file_that_was_cut_off(tmp_path: Path, compression: str) -> None:
    lots = [make(seed=i) for i in range(40)]
    path = write(tmp_path / "a.atp", lots[:20], lots[20:], compression=compression)
    good = write(tmp_path / "good.atp", [make()])
    content = path.read_bytes()
    bad = tmp_path / "bad.atp"
    # By the package's reading the last of these has 20 molecules.
    for size in (0, 3, 5000, HEADERS, HEADERS + 100, len(content) // 2, len(content) - 1):
        bad.write_bytes(content[:size])
        with pytest.raises(SourceError, match=r"bad\.atp: .*cut off"):
            convert(bad, tmp_path / "none.zarr", progress=False)
        report = convert(
            [good, bad], tmp_path / "out.zarr", on_error="quarantine", overwrite=True,
            progress=False,
        )  # fmt: skip
        assert (report.records, report.samples) == (2, 1)
        assert [(r.file, r.frame) for r in report.rejects] == [(str(bad), -1)]


def test_files_that_are_none_or_not_finished(tmp_path: Path) -> None:
    bad = tmp_path / "bad.atp"

    def refused(content: bytes, match: str) -> None:
        bad.write_bytes(content)
        with pytest.raises(SourceError, match=match):
            convert(bad, tmp_path / "out.zarr", progress=False)

    refused(b"no" * 8192, "is no atompack file")
    content = write(tmp_path / "a.atp", [make()]).read_bytes()
    for slot in (0, 4096):
        assert content[slot : slot + 4] == b"ATPK"
    newer = bytearray(content)
    newer[4:8] = newer[4100:4104] = struct.pack("<I", 3)
    refused(bytes(newer), r"is of version 3 of the atompack format.*expected version 2")
    refused(content[:2000] + b"?" + content[2001:4097] + b"?" + content[4098:], "both headers")
    # The first header knows of no molecule yet.
    refused(content[:6000] + b"?" + content[6001:], "header that names it is damaged")
    refused(write(tmp_path / "none.atp", []).read_bytes(), "holds no record")
    file = atompack.Database(str(tmp_path / "open.atp"), overwrite=True)
    file.add_molecules([make()])
    refused((tmp_path / "open.atp").read_bytes(), r"but no index \(it was not flushed\)")


def test_what_lies_behind_the_last_flush_is_told(tmp_path: Path, converted: Any) -> None:
    path = write(tmp_path / "a.atp", [make(), make(seed=1)])
    file = atompack.Database.open(str(path), mmap=False)
    file.add_molecules([make(seed=2)])
    report, _ = converted(path)
    assert report.samples == 2
    assert any("bytes behind the last flush are not read" in note for note in report.notes)


def test_the_checksum_of_the_headers_is_the_packages(tmp_path: Path) -> None:
    content = write(tmp_path / "a.atp", [make()], [make()]).read_bytes()
    for slot in (content[:4096], content[4096:8192]):
        assert zlib.adler32(slot[:-4]) == int.from_bytes(slot[-4:], "little")
    index = read_index(str(tmp_path / "a.atp"), "x")
    assert (index.molecules, index.generation, index.tail_bytes) == (2, 2, 0)

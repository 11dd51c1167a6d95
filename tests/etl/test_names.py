"""Names of the input: which is taken of several, and which only look like a field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.db import connect
from typer.testing import CliRunner

from alchemi_xr.cli.main import app
from alchemi_xr.errors import ConfigError
from alchemi_xr.etl.conversion import append, convert
from alchemi_xr.etl.hints import looks_like
from alchemi_xr.etl.names import Contest, NameMap
from alchemi_xr.store.reader import open_store

XYZ = """\
2
{info} Properties=species:S:1:pos:R:3{columns}
H 0 0 0{row}
H 0 0 0.74{row}
"""


def xyz(path: Path, info: str, columns: str = "", row: str = "", frames: int = 1) -> Path:
    path.write_text(XYZ.format(info=info, columns=columns, row=row) * frames, encoding="utf-8")
    return path


def test_order_of_names() -> None:
    names = NameMap.make(energy_key=["b", "a"])
    given: Any = [("energies", "system"), ("energy", "system"), ("a", "system"), ("b", "system")]
    assert [c.kept for c in names.contests(given)] == ["b", "b", "b"]
    assert [c.other for c in names.contests(given)] == ["a", "energy", "energies"]
    assert not any(names.is_ambiguous(c) for c in names.contests(given))
    mapped = NameMap.make(key_map={"a": "energy", "b": "energy"})
    assert mapped.is_ambiguous(Contest("energy", "a", "b"))
    assert not mapped.is_ambiguous(Contest("energy", "a", "energy"))
    # What the format calls its own goes before a note of that name.
    assert NameMap().contests([("cell", "system"), ("Lattice", "system")])[0].kept == "Lattice"


def test_a_name_mapped_to_two_fields() -> None:
    with pytest.raises(ConfigError, match="cannot be both energy and fmax"):
        NameMap.make(energy_key="x", key_map={"x": "fmax"})


@pytest.mark.parametrize("info", ["energy=-1.0 energies=-2.0", "energies=-2.0 energy=-1.0"])
def test_the_own_name_goes_before_other_spellings(
    tmp_path: Path, converted: Any, info: str
) -> None:
    report, store = converted(xyz(tmp_path / "a.xyz", info, frames=3), progress=False)
    assert store.read_block(store.active)["energy"].ravel().tolist() == [-1.0] * 3
    said = "energy is taken from 'energy', not from 'energies' (3 samples have both)"
    assert said in report.notes
    assert said in str(report)


@pytest.mark.parametrize("info", ["energy=-1.0 REF_energy=-2.0", "REF_energy=-2.0 energy=-1.0"])
def test_the_mapped_name_goes_before_the_own(tmp_path: Path, converted: Any, info: str) -> None:
    report, store = converted(
        xyz(tmp_path / "a.xyz", info), energy_key="REF_energy", progress=False
    )
    assert store.read_block(store.active)["energy"].ravel().tolist() == [-2.0]
    assert any("taken from 'REF_energy', not from 'energy'" in n for n in report.notes)


def test_columns_of_one_field(tmp_path: Path, converted: Any) -> None:
    path = xyz(tmp_path / "a.xyz", "energy=1", ":force:R:3:forces:R:3", " 1 1 1 2 2 2")
    report, store = converted(path, progress=False)
    assert (store.read_block(store.active)["forces"] == 2).all()
    assert "forces is taken from 'forces', not from 'force' (1 samples have both)" in report.notes


def test_an_ambiguous_map_is_refused(tmp_path: Path) -> None:
    path = xyz(tmp_path / "a.xyz", "dft=-1.0 ccsd=-2.0")
    with pytest.raises(
        ConfigError, match=r"(?s)both mapped to energy.*energy_key=\['dft', 'ccsd'\]"
    ):
        convert(path, tmp_path / "o.zarr", key_map={"dft": "energy", "ccsd": "energy"})
    assert not (tmp_path / "o.zarr").exists()
    report = convert(path, tmp_path / "o.zarr", energy_key=["ccsd", "dft"], progress=False)
    assert any("taken from 'ccsd', not from 'dft'" in n for n in report.notes)
    with pytest.raises(ConfigError, match="leave one of them out of key_map"):
        convert(
            xyz(tmp_path / "s.xyz", 'a="1 0 0 0 1 0 0 0 1" b="2 0 0 0 2 0 0 0 2"'),
            tmp_path / "s.zarr",
            key_map={"a": "stress", "b": "stress"},
        )


def test_a_map_for_files_with_different_names(tmp_path: Path) -> None:
    paths = [xyz(tmp_path / "a.xyz", "dft=-1.0"), xyz(tmp_path / "b.xyz", "ccsd=-2.0")]
    out = tmp_path / "o.zarr"
    convert(paths, out, key_map={"dft": "energy", "ccsd": "energy"}, progress=False)
    with open_store(out) as store:
        assert store.read_block(store.active)["energy"].ravel().tolist() == [-1.0, -2.0]


def test_an_ase_database(tmp_path: Path, converted: Any) -> None:
    with connect(tmp_path / "a.json") as db:
        for i in range(3):
            atoms = Atoms("H2", [[0, 0, 0], [0, 0, 0.74 + i]])
            # In the second they agree: nothing is lost.
            db.write(atoms, data={"energies": -1.0, "energy": [-2.0, -1.0, -2.0][i]})
    report, store = converted(tmp_path / "a.json", progress=False)
    assert store.read_block(store.active)["energy"].ravel().tolist() == [-2.0, -1.0, -2.0]
    assert (
        "energy is taken from 'energy', not from 'energies' (2 samples have both)" in report.notes
    )


def test_arrays(tmp_path: Path, converted: Any) -> None:
    arrays = {"R": np.zeros((4, 2, 3)), "Z": np.array([1, 1])}
    np.savez(tmp_path / "a.npz", E=np.zeros(4), energy=np.ones(4), **arrays)
    report, store = converted(tmp_path / "a.npz", progress=False)
    assert store.read_block(store.active)["energy"].ravel().tolist() == [1.0] * 4
    assert "energy is taken from 'energy', not from 'E' (4 samples have both)" in report.notes
    assert "'E' is kept as 'E'" in report.notes
    with pytest.raises(ConfigError, match="both mapped to energy"):
        convert(
            tmp_path / "a.npz",
            tmp_path / "b.zarr",
            key_map={"E": "energy", "energy": "energy"},
        )


def test_a_table(tmp_path: Path, converted: Any) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    rows = {
        "numbers": [[1, 1]] * 2,
        "positions": [[[0.0, 0, 0], [0, 0, 1]]] * 2,
        "energies": [-2.0, -2.0],
        "energy": [-1.0, -1.0],
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    report, store = converted(tmp_path / "a.parquet", progress=False)
    assert store.read_block(store.active)["energy"].ravel().tolist() == [-1.0, -1.0]
    assert (
        "energy is taken from 'energy', not from 'energies' (2 samples have both)" in report.notes
    )


# -- names that look like a field


@pytest.mark.parametrize(
    ("name", "energy", "forces"),
    [
        ("dft_energy", True, False),
        ("E_tot", True, False),
        ("Etot", True, False),
        ("total_energy_eV", True, False),
        ("DFT.Energy", True, False),
        ("totalEnergy", True, False),
        ("TOTEN", True, False),
        ("F", False, True),
        ("forces_dft", False, True),
        ("F_ref", False, True),
        ("atomicForces", False, False),
        ("kinetic_energy", False, False),
        ("energy_weight", False, False),
        ("e_above_hull", False, False),
        ("formation_energy", False, False),
        ("config_type", False, False),
        ("frame", False, False),
        ("free", False, False),
        ("", False, False),
    ],
)
def test_looks_like(name: str, energy: bool, forces: bool) -> None:
    assert (looks_like("energy", name), looks_like("forces", name)) == (energy, forces)


def test_extxyz_hint(tmp_path: Path) -> None:
    path = xyz(tmp_path / "a.xyz", "E_tot=-1.0 energy_weight=2", ":F:R:3", " 1 1 1")
    report = convert(path, tmp_path / "a.zarr", progress=False)
    energy = "no energy known by name, but 'E_tot' looks like it: --energy-key E_tot"
    forces = "no forces known by name, but 'F' looks like it: --forces-key F"
    assert any(note.startswith(energy) for note in report.notes)
    assert any(note.startswith(forces) for note in report.notes)
    # Nothing was guessed: they are custom fields still.
    assert "energy" not in report.fields
    assert "E_tot" in report.fields
    again = append(path, tmp_path / "a.zarr", progress=False)
    assert any(note.startswith(energy) for note in again.notes)
    # What it says is what takes them.
    taken = convert(path, tmp_path / "b.zarr", energy_key="E_tot", forces_key="F", progress=False)
    assert taken.fields["energy"].samples == taken.fields["forces"].samples == 1
    assert not any("looks like" in note for note in taken.notes)


def test_hint_on_the_command_line(tmp_path: Path) -> None:
    path = xyz(tmp_path / "a.xyz", "dft_energy=-1.0")
    result = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "o.zarr")])
    assert "--energy-key dft_energy" in result.stdout


def test_text_and_wrong_shapes_are_no_hint(tmp_path: Path) -> None:
    path = xyz(tmp_path / "a.xyz", 'dft_energy=unknown total_energy="1 2"', ":F:R:1", " 1")
    report = convert(path, tmp_path / "a.zarr", progress=False)
    assert not any("looks like" in note for note in report.notes)


def test_hints_of_arrays_and_tables(tmp_path: Path) -> None:
    arrays = {"R": np.zeros((4, 2, 3)), "Z": np.array([1, 1])}
    np.savez(tmp_path / "a.npz", dft_energy=np.zeros(4), F_dft=np.zeros((4, 2, 3)), **arrays)
    report = convert(tmp_path / "a.npz", tmp_path / "a.zarr", progress=False)
    assert any("--energy-key dft_energy" in note for note in report.notes)
    assert any("--forces-key F_dft" in note for note in report.notes)
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("mol")
        for name, values in {"coordinates": np.zeros((4, 2, 3)), "species": [1, 1]}.items():
            group[name] = values
        group["total_energy"] = np.zeros(4)
    report = convert(tmp_path / "a.h5", tmp_path / "h.zarr", progress=False)
    assert any("--energy-key total_energy" in note for note in report.notes)
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    rows = {"numbers": [[1, 1]] * 2, "positions": [[[0.0, 0, 0], [0, 0, 1]]] * 2}
    pq.write_table(pa.table({**rows, "dft_energy": [-1.0, -2.0]}), tmp_path / "a.parquet")
    report = convert(tmp_path / "a.parquet", tmp_path / "p.zarr", progress=False)
    assert any("--energy-key dft_energy" in note for note in report.notes)

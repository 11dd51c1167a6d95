"""Every real file of the foundation's formats, against facts found by other tools."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.store.reader import Snapshot

XYZ = [
    ("xyz-solvents", "frames.xyz", None, {"energy_key": "energy_xtb", "forces_key": "forces_xtb"}),
    ("xyz-carbon", "frames.xyz", None, {}),
    ("xyz-qm9", "frames.xyz", "qm9", {}),
    ("xyz-qm9", "frames_kcal.xyz", "ethanol", {}),
    ("xyz-cluster-dft", "train.xyz", "train", {"energy_key": "dft_energy"}),
    ("xyz-cluster-dft", "single.xyz", "single", {}),
    ("xyz-cluster-dft", "set.xyz", "set", {}),
    ("xyz-druglike", "frames.xyz", None, {}),
    ("xyz-md-frames", "frames.xyz", None, {}),
]


def _facts(shared: Path, folder: str, part: str | None) -> dict[str, Any]:
    facts = json.loads((shared / "data" / folder / "expected.json").read_text())["facts"]
    return facts if part is None else facts[part]


def _check_structure(block: Block, facts: dict[str, Any]) -> None:
    assert block.num_samples == facts["frames"]
    assert block.num_atoms == facts["atoms_total"]
    counts = np.diff(block.atoms_ptr)
    assert (counts.min(), counts.max()) == (facts["atoms_min"], facts["atoms_max"])
    if "sum_atomic_numbers" in facts:
        assert int(block["atomic_numbers"].sum()) == facts["sum_atomic_numbers"]
        total = np.abs(block["positions"]).sum()
        np.testing.assert_allclose(total, facts["sum_abs_positions"], rtol=1e-10)


def _system(block: Block, name: str) -> np.ndarray:
    return block[name][block.has(name)].ravel()


def _whole(store: Snapshot) -> Block:
    return store.read_block(store.active)


@pytest.mark.parametrize(("folder", "file", "part", "options"), XYZ)
def test_extxyz(
    shared: Path,
    converted: Any,
    folder: str,
    file: str,
    part: str | None,
    options: dict[str, Any],
) -> None:
    facts = _facts(shared, folder, part)
    report, store = converted(shared / "data" / folder / file, **options)
    block = _whole(store)
    _check_structure(block, facts)
    assert report.rejected == 0
    for key, count in facts["comment_keys"].items():
        if key != "Properties":
            assert report.keys[key] == count, key
    mapped = {options.get("energy_key"): "energy", options.get("forces_key"): "forces"}
    for key, want in facts.get("energies", {}).items():
        name = mapped.get(key, key)
        values = _system(block, name)
        assert len(values) == want["frames"]
        np.testing.assert_allclose(values.sum(), want["sum"], rtol=1e-10)
        assert (values[0], values[-1]) == (want["first"], want["last"])
    for key, want in facts.get("forces", {}).items():
        name = "forces" if key == "force" else mapped.get(key, key)
        values = block[name]
        norms = np.sqrt((values**2).sum(axis=1))
        np.testing.assert_allclose(norms.sum(), want["sum_of_norms"], rtol=1e-9)
        np.testing.assert_allclose(norms.max(), want["max_norm"], rtol=1e-9)
    cells = facts["frames_with_lattice"]
    assert int(block.has("cell").sum()) == cells
    pbc = [" ".join("T" if p else "F" for p in row) for row in block["pbc"]]
    assert {p: pbc.count(p) for p in set(pbc)} == facts["pbc_after_ase"]


def test_virial_of_carbon_becomes_stress(shared: Path, converted: Any) -> None:
    facts = _facts(shared, "xyz-carbon", None)
    _, store = converted(shared / "data" / "xyz-carbon" / "frames.xyz")
    block = _whole(store)
    np.testing.assert_allclose(block["virial"].sum(), facts["other"]["virial"]["sum"], rtol=1e-9)
    volume = np.abs(np.linalg.det(block["cell"]))[:, None, None]
    np.testing.assert_allclose(block["stress"], -block["virial"] / volume, rtol=1e-12)
    assert block["cut_off_energy"][0] == "650 eV"
    assert block["spin_polarized"].dtype == bool
    assert block["kpoints_mp_grid"].shape == (100, 3)


def test_columns_that_come_and_go(shared: Path, converted: Any) -> None:
    _, store = converted(shared / "data" / "xyz-cluster-dft" / "train.xyz")
    block = _whole(store)
    assert int(block.has("initial_magmoms").sum()) == 18
    assert int(block.has("dft_stress").sum()) == 18
    assert block["dft_stress"].shape == (22, 6)


def test_custom_fields_of_the_others(shared: Path, converted: Any) -> None:
    _, store = converted(shared / "data" / "xyz-druglike" / "frames.xyz")
    block = _whole(store)
    assert block["dihedrals"].shape == (500, 3)
    np.testing.assert_allclose(block["dihedrals"].sum(), 299423.67)
    assert not block["pbc"].any()
    assert block.has("cell").all()


def test_per_atom_energies_are_not_the_energy(shared: Path, converted: Any) -> None:
    facts = _facts(shared, "xyz-md-frames", None)
    _, store = converted(shared / "data" / "xyz-md-frames" / "frames.xyz")
    block = _whole(store)
    assert store.level("atomic_energies") == "atom"
    want = facts["other"]["energies"]["sum"]
    np.testing.assert_allclose(block["atomic_energies"].sum(), want, rtol=1e-7)
    np.testing.assert_allclose(
        np.abs(block["momenta"]).sum(), facts["other"]["momenta"]["sum_abs"], rtol=1e-9
    )


def test_units_are_converted_when_told(shared: Path, converted: Any) -> None:
    path = shared / "data" / "xyz-qm9" / "frames_kcal.xyz"
    report, store = converted(path, units={"energy": "kcal/mol", "forces": "kcal/mol/Å"})
    facts = _facts(shared, "xyz-qm9", "ethanol")
    total = _whole(store)["energy"].sum()
    np.testing.assert_allclose(total, facts["energies"]["energy"]["sum"] * 0.0433641042)
    assert any("kcal/mol" in note for note in report.notes)


def test_ase_database(shared: Path, converted: Any) -> None:
    facts = _facts(shared, "asedb-qm9", None)
    report, store = converted(shared / "data" / "asedb-qm9" / "rows.db")
    block = _whole(store)
    _check_structure(block, facts)
    assert "cell" not in block
    assert block["energy_U0"].shape == (20, 1)
    assert any("Ha" in note for note in report.notes)


def test_ase_lmdb(shared: Path, converted: Any) -> None:
    pytest.importorskip("lmdb")
    facts = _facts(shared, "aselmdb-mof", None)
    folder = shared / "data" / "aselmdb-mof"
    before = sorted(folder.iterdir())
    _, store = converted(folder / "rows.aselmdb", options={"rows": 5})
    assert sorted(folder.iterdir()) == before
    block = _whole(store)
    _check_structure(block, facts)
    energy = facts["energies"]["energy"]
    values = _system(block, "energy")
    np.testing.assert_allclose(values.sum(), energy["sum"], rtol=1e-12)
    # Ids are sorted as numbers, not as the texts they are in the file.
    assert (values[0], values[-1]) == (energy["first"], energy["last"])
    assert block["source_id"].tolist() == list(range(1, 23))
    assert int(block.has("stress").sum()) == facts["stress"]["frames"]
    groups = block["group"].tolist()
    assert {g: groups.count(g) for g in set(groups)} == facts["key_value_pairs"]["group"]["values"]


@pytest.mark.parametrize(
    ("folder", "file", "part"),
    [
        ("traj-slab", "path.traj", None),
        ("traj-oxide", "steps.traj", "steps"),
        ("traj-oxide", "steps_magnetic.traj", "magnetic"),
    ],
)
def test_trajectories(
    shared: Path, converted: Any, folder: str, file: str, part: str | None
) -> None:
    facts = _facts(shared, folder, part)
    _, store = converted(shared / "data" / folder / file)
    block = _whole(store)
    _check_structure(block, facts)
    energy = facts["energies"]["energy"]
    values = _system(block, "energy")
    assert len(values) == energy["frames"]
    np.testing.assert_allclose(values.sum(), energy["sum"], rtol=1e-10)
    forces = facts["forces"]["forces"]
    norms = np.sqrt((block["forces"] ** 2).sum(axis=1))
    np.testing.assert_allclose(np.nansum(norms), forces["sum_of_norms"], rtol=1e-9)
    assert int(np.diff(block.atoms_ptr)[block.has("forces")].sum()) == forces["rows"]
    for name in ("energy", "forces"):
        if f"{name}_present" in facts:
            assert block.has(name).tolist() == facts[f"{name}_present"]
    volume = np.abs(np.linalg.det(block["cell"])).sum()
    np.testing.assert_allclose(volume, facts["cell_volume_sum"], rtol=1e-9)
    if "stress" in facts:
        voigt = block["stress"][:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
        np.testing.assert_allclose(voigt.sum(), facts["stress"]["sum"], rtol=1e-6)


def test_a_folder_of_crystals(shared: Path, converted: Any) -> None:
    folder = shared / "data" / "crystal-files"
    facts = _facts(shared, "crystal-files", None)
    report, store = converted(folder / "files", on_error="quarantine")
    block = _whole(store)
    _check_structure(block, facts["all_readable"])
    files = facts["per_file"]
    refused = {name for name, entry in files.items() if "ase_error" in entry}
    assert {os.path.basename(r.file) for r in report.rejects} == refused
    by_file = {os.path.basename(f): i for i, f in enumerate(block["source_file"])}
    for name, entry in files.items():
        if name in by_file:
            i = by_file[name]
            assert block.atoms_ptr[i + 1] - block.atoms_ptr[i] == entry["atoms_total"]


def test_the_main_job(converted: Any) -> None:
    """ASE's g2 molecules from the installed package: names are kept as text."""
    import ase.collections
    from ase.build import molecule

    path = Path(ase.collections.__file__).parent / "g2.json"
    report, store = converted(path)
    block = _whole(store)
    assert report.samples == 162
    assert store.group("name") == "text"
    where = block["name"].tolist().index("CH3CH2OH")
    rows = slice(int(block.atoms_ptr[where]), int(block.atoms_ptr[where + 1]))
    ethanol = molecule("CH3CH2OH")
    assert (block["positions"][rows] == ethanol.positions).all()
    assert (block["atomic_numbers"][rows] == ethanol.numbers).all()
    assert sorted(set(block["name"])) == sorted(block["name"])
    assert int(block.has("initial_magmoms").sum()) > 0

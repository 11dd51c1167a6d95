"""Trajectories of molecular dynamics, against MDAnalysis itself."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alchemi_xr as ax
from alchemi_xr.errors import ConfigError, OptionalDependencyError, SourceError
from alchemi_xr.etl import convert
from alchemi_xr.etl.sources.trajectory import _guessed
from alchemi_xr.store import open_store

mda = pytest.importorskip("MDAnalysis")


def whole(path: Path) -> Any:
    with open_store(path) as store:
        return store.read_block(store.active)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path, Any]:
    """A topology with elements, and a TRR with velocities and forces."""
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        universe = mda.Universe.empty(
            6, n_residues=2, atom_resindex=[0, 0, 0, 1, 1, 1], trajectory=True,
            velocities=True, forces=True,
        )  # fmt: skip
        universe.add_TopologyAttr("names", ["OW", "HW1", "HW2"] * 2)
        universe.add_TopologyAttr("elements", ["O", "H", "H"] * 2)
        universe.add_TopologyAttr("resnames", ["SOL", "SOL"])
        universe.dimensions = [20, 21, 22, 80, 90, 100]
        universe.atoms.write(tmp_path / "top.pdb")
        universe.atoms.write(tmp_path / "top.gro")
        frames = rng.normal(size=(7, 3, 6, 3)).astype(np.float32) * 9
        with mda.Writer(str(tmp_path / "run.trr"), 6) as out:
            for i, (positions, velocities, forces) in enumerate(frames):
                universe.trajectory.ts.time = 0.5 * i
                universe.atoms.positions = positions
                universe.atoms.velocities = velocities
                universe.atoms.forces = forces
                out.write(universe.atoms)
    return tmp_path / "top.pdb", tmp_path / "run.trr", frames


@pytest.mark.parametrize("size", [1, 2**24])
@pytest.mark.parametrize("client", [None, 2])
def test_positions_velocities_forces(tmp_path: Path, made: Any, size: int, client: Any) -> None:
    topology, run, frames = made
    before = sorted(os.listdir(tmp_path))
    report = convert(
        run, tmp_path / "out.zarr", options={"topology": str(topology), "partition_bytes": size},
        client=client, progress=False,
    )  # fmt: skip
    # MDAnalysis keeps indices beside its input; ours stays as it was.
    assert sorted(set(os.listdir(tmp_path)) - {"out.zarr"}) == before
    assert report.samples == 7
    block = whole(tmp_path / "out.zarr")
    assert block["atomic_numbers"][:6].tolist() == [8, 1, 1] * 2
    shape = (7, 6, 3)
    np.testing.assert_allclose(block["positions"].reshape(shape), frames[:, 0], atol=1e-5)
    # 1 Å/ps is 0.0101805 Å/(Å·(amu/eV)^½); 1 kJ/mol is 0.0103643 eV.
    from ase import units

    np.testing.assert_allclose(
        block["velocities"].reshape(shape), frames[:, 1] / (1000 * units.fs), rtol=1e-5, atol=1e-8
    )
    np.testing.assert_allclose(
        block["forces"].reshape(shape), frames[:, 2] * units.kJ / units.mol, rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(block["time"], 500.0 * np.arange(7), atol=1e-3)
    assert block["pbc"].all()
    lengths = np.linalg.norm(block["cell"][3], axis=1)
    np.testing.assert_allclose(lengths, [20, 21, 22], rtol=1e-5)


def test_it_opens_as_a_trajectory(tmp_path: Path, made: Any) -> None:
    topology, run, frames = made
    convert(
        run, tmp_path / "out.zarr", options={"topology": str(topology), "start": 1, "step": 2},
        progress=False,
    )  # fmt: skip
    ds = ax.open_dataset(tmp_path / "out.zarr").ragged.trajectory(0)
    np.testing.assert_allclose(ds.time, [500, 1500, 2500], atol=1e-3)
    np.testing.assert_allclose(ds.positions, frames[1::2, 0], atol=1e-5)


def test_elements_have_to_come_from_somewhere(tmp_path: Path, made: Any) -> None:
    _, run, _ = made

    def go(**options: Any) -> Any:
        return convert(run, tmp_path / "out.zarr", options=options, overwrite=True, progress=False)

    with pytest.raises(SourceError, match=r"topology=run\.pdb"):
        go()
    with pytest.raises(SourceError, match="guess=true"):
        go(topology=str(tmp_path / "top.gro"))
    report = go(topology=str(tmp_path / "top.gro"), guess=True)
    assert any("guessed" in note for note in report.notes)
    assert whole(tmp_path / "out.zarr")["atomic_numbers"][:6].tolist() == [8, 1, 1] * 2
    report = go(elements="X")
    assert any("not known" in note for note in report.notes)
    go(elements=["O", "H", "H"] * 2)
    assert whole(tmp_path / "out.zarr")["atomic_numbers"][-1] == 1
    with pytest.raises(SourceError, match="another number of atoms"):
        go(elements=["O", "H"])
    with pytest.raises(ConfigError, match="not an element"):
        go(elements=["Qq"])
    with pytest.raises(ConfigError, match="not both"):
        go(elements="X", topology="x.pdb")
    with pytest.raises(SourceError, match="no elements"):
        go(topology=str(run), guess=True)
    (tmp_path / "top.psf").write_text("nothing of the kind")
    with pytest.raises(SourceError, match="no topology"):
        go(topology=str(tmp_path / "top.psf"))


def test_broken_files(tmp_path: Path, made: Any) -> None:
    topology, run, _ = made
    (tmp_path / "bad.xtc").write_bytes(b"nothing of the kind" * 20)
    with pytest.raises(SourceError, match=r"bad\.xtc"):
        convert(
            tmp_path / "bad.xtc", tmp_path / "a.zarr", options={"elements": "X"}, progress=False
        )
    report = convert(
        [run, tmp_path / "bad.xtc"],
        tmp_path / "b.zarr",
        options={"topology": str(topology)},
        on_error="quarantine",
        progress=False,
    )
    assert (report.samples, report.rejected) == (7, 1)


def test_without_mdanalysis(tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "MDAnalysis", None)
    with pytest.raises(OptionalDependencyError, match=r"alchemi_xr\[md\]"):
        convert(made[1], tmp_path / "out.zarr", options={"elements": "X"}, progress=False)


@pytest.mark.parametrize(
    ("folder", "file", "key"),
    [
        ("md-protein", "run.xtc", "xtc"),
        ("md-protein", "run.trr", "trr"),
        ("md-water-lammps", "triclinic.dcd", "dcd"),
    ],
)
def test_real_files(shared: Path, tmp_path: Path, folder: str, file: str, key: str) -> None:
    facts = json.loads((shared / "data" / folder / "expected.json").read_text())["facts"][key]
    report = convert(
        shared / "data" / folder / file, tmp_path / "out.zarr", options={"elements": "X"},
        progress=False,
    )  # fmt: skip
    assert (report.samples, report.atoms) == (facts["frames"], facts["atoms_total"])
    block = whole(tmp_path / "out.zarr")
    total = np.abs(block["positions"].astype(float)).sum()
    assert total == pytest.approx(facts["sum_abs_positions"], rel=1e-9)
    first, last = facts["times_ps"]
    assert block["time"][0] == pytest.approx(1000 * first)
    assert block["time"][-1] == pytest.approx(1000 * last)
    from ase import units
    from ase.geometry import cell_to_cellpar

    np.testing.assert_allclose(cell_to_cellpar(block["cell"][0]), facts["box_first"], rtol=1e-5)
    np.testing.assert_allclose(cell_to_cellpar(block["cell"][-1]), facts["box_last"], rtol=1e-5)
    if "velocities" in facts:
        found = np.abs(block["velocities"].astype(float)).sum() * 1000 * units.fs
        assert found == pytest.approx(facts["velocities"]["sum_abs"], rel=1e-6)
        found = np.abs(block["forces"].astype(float)).sum() * units.mol / units.kJ
        assert found == pytest.approx(facts["forces_mda"]["sum_abs"], rel=1e-6)


def test_lammps_dumps_through_ase(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "md-water-lammps"
    every = json.loads((folder / "expected.json").read_text())["facts"]
    files = {
        "water": "water.lammpstrj.bz2",
        "image_flags": "image_flags.lammpstrj",
        "triclinic": "triclinic.dump",
        "chain": "chain.lammpstrj",
    }
    for key, file in files.items():
        facts = every[key]
        report = convert(folder / file, tmp_path / f"{key}.zarr", progress=False)
        assert (report.samples, report.atoms) == (facts["frames"], facts["atoms_total"])
        block = whole(tmp_path / f"{key}.zarr")
        total = np.abs(block["positions"]).sum()
        assert total == pytest.approx(facts["sum_abs_positions"], rel=1e-9)
        assert block["atomic_numbers"].sum() == facts["sum_atomic_numbers"]
        volume = np.abs(np.linalg.det(block["cell"])).sum()
        assert volume == pytest.approx(facts["cell_volume_sum"], rel=1e-9)
        # ASE makes up an energy of 0 for dumps, which have none.
        assert "energy" not in block
        if "forces" in facts:
            norms = np.linalg.norm(block["forces"], axis=1)
            want = facts["forces"]["forces"]["sum_of_norms"]
            assert norms.sum() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("CA", "C"),
        ("1HB2", "H"),
        ("OW", "O"),
        ("CL-", "Cl"),
        ("NA+", "Na"),
        ("FE", "Fe"),
        ("N", "N"),
    ],
)
def test_elements_of_names(name: str, element: str) -> None:
    assert _guessed(name).capitalize() == element

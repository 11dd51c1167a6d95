"""Neighbour lists made in the pass of a conversion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import alchemi_xr as ax
from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl import neighbors
from alchemi_xr.etl.conversion import append, convert, plan_convert
from alchemi_xr.store.writer import StoreWriter

ase = pytest.importorskip("ase")
pytest.importorskip("vesin", reason="vesin, of the extra etl, makes the search")

CUTOFF = 4.0


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    import ase.build
    import ase.io

    images = []
    for k in range(60):
        made = (
            ase.build.molecule("CH3CH2OH"),
            ase.build.bulk("Cu", "fcc", a=3.6, cubic=True),
            ase.build.fcc111("Al", (2, 2, 2), vacuum=6.0),
        )[k % 3]
        made.info.clear()
        made.rattle(0.05, seed=k)
        images.append(made)
    images.append(ase.Atoms("He"))
    path = tmp_path_factory.mktemp("frames") / "mixed.extxyz"
    ase.io.write(path, images)
    return path, ase.io.read(path, ":")


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many partitions, cut into parts in their turn."""
    monkeypatch.setattr("alchemi_xr.etl.request._BYTES_BEFORE_EDGES", 4_000)
    monkeypatch.setattr(neighbors, "_PART_BYTES", 6_000)


def check(store: Path, images: list, cutoff: float) -> None:
    from ase.neighborlist import primitive_neighbor_list

    with ax.open_store(store) as snapshot:
        block = snapshot.read_block(slice(0, snapshot.num_samples))
    assert block.num_samples == len(images)
    for k, atoms in enumerate(images):
        rows = slice(block.edges_ptr[k], block.edges_ptr[k + 1])
        ours = np.column_stack((block["neighbor_list"][rows], block["neighbor_list_shifts"][rows]))
        # Without atoms of its own a cell ASE completes as we do.
        i, j, s = primitive_neighbor_list(
            "ijS", atoms.pbc, atoms.cell.complete(), atoms.positions, cutoff
        )
        theirs = np.column_stack((i, j, s)).reshape(-1, 5)
        theirs = theirs[np.lexsort(theirs.T[::-1])]
        assert np.array_equal(ours, theirs), k


@pytest.mark.parametrize("cut", [False, True])
def test_every_sample_has_the_neighbours_that_ase_finds(
    frames: tuple[Path, list], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    path, images = frames
    if cut:
        small(monkeypatch)
        assert len(plan_convert(path, cutoff=CUTOFF).extents) > 12
    report = convert(path, tmp_path / "a.zarr", cutoff=CUTOFF, progress=False)
    check(tmp_path / "a.zarr", images, CUTOFF)
    with ax.open_store(tmp_path / "a.zarr") as snapshot:
        assert report.edges == snapshot.num_edges
        assert snapshot.schema.provenance["stages"]["cutoff"] == CUTOFF
    assert f"{report.edges:,} edges" in report.summary()


@pytest.mark.slow
def test_a_cluster_makes_the_same_bytes(
    frames: tuple[Path, list], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = frames
    convert(path, tmp_path / "a.zarr", cutoff=CUTOFF, progress=False)
    convert(path, tmp_path / "b.zarr", cutoff=CUTOFF, client=2, progress=False)
    assert tree(tmp_path / "a.zarr") == tree(tmp_path / "b.zarr")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_survey_that_was_stopped_is_taken_up(
    frames: tuple[Path, list], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = frames
    small(monkeypatch)
    convert(path, tmp_path / "whole.zarr", cutoff=CUTOFF, progress=False)
    true = neighbors.EdgeReading.count
    done: list[int] = []

    def some(self, number, partition):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(number)
        return true(self, number, partition)

    monkeypatch.setattr(neighbors.EdgeReading, "count", some)
    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "a.zarr", cutoff=CUTOFF, threads=1, progress=False)
    assert not (tmp_path / "a.zarr").exists()
    before, done = list(done), []
    monkeypatch.setattr(
        neighbors.EdgeReading, "count", lambda s, n, p: done.append(n) or true(s, n, p)
    )
    convert(path, tmp_path / "a.zarr", cutoff=CUTOFF, threads=1, progress=False)
    assert len(before) == 5
    assert done
    assert not set(done) & set(before)
    assert tree(tmp_path / "a.zarr") == tree(tmp_path / "whole.zarr")


BROKEN = """2
Properties=species:S:1:pos:R:3 pbc="F F F"
H 0 0 0
H 0 0 0.7
2
Properties=species:S:1:pos:R:3 pbc="F F F"
H 0 0 0
H 0 0 5e7
1
Lattice="3 0 0 0 3 0 3 3 0" Properties=species:S:1:pos:R:3 pbc="T T T"
H 0 0 0
1
Lattice="3 0 0 0 3 0 0 0 3" Properties=species:S:1:pos:R:3 pbc="T T T"
H 0 0 0
1
Properties=species:S:1:pos:R:3 pbc="F F F" energy=nan
H 0 0 0
"""


@pytest.mark.parametrize("part", [2**20, 1])
def test_what_has_no_neighbours_to_find_is_raised_or_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(neighbors, "_PART_BYTES", part)
    path = tmp_path / "broken.extxyz"
    path.write_text(BROKEN)
    with pytest.raises(SourceError, match=r"(?s)broken\.extxyz.*no neighbour list.*exploded"):
        convert(path, tmp_path / "a.zarr", cutoff=CUTOFF, progress=False)
    assert not (tmp_path / "a.zarr").exists()
    report = convert(
        path,
        tmp_path / "a.zarr",
        cutoff=CUTOFF,
        on_error="quarantine",
        nonfinite="quarantine",
        progress=False,
    )
    assert (report.samples, report.rejected) == (2, 3)
    assert report.rejects_path is not None
    found = [json.loads(line) for line in Path(report.rejects_path).read_text().splitlines()]
    assert [(r["frame"], r["field"]) for r in found] == [
        (1, "positions"),
        (2, "cell"),
        (4, "energy"),
    ]
    with ax.open_store(tmp_path / "a.zarr") as snapshot:
        assert snapshot.active.tolist() == [0, 3]
        assert np.diff(snapshot.edges_ptr)[0] == 2
        assert len(snapshot.active) == 2


def test_a_condition_may_ask_for_the_new_edges(frames: tuple[Path, list], tmp_path: Path) -> None:
    path, images = frames
    convert(path, tmp_path / "a.zarr", cutoff=CUTOFF, where="nedges > 70", progress=False)
    with ax.open_store(tmp_path / "a.zarr") as snapshot:
        kept = snapshot.num_samples
        assert np.diff(snapshot.edges_ptr).min() > 70
    assert 0 < kept < len(images)
    with pytest.raises(SourceError, match="left out"):
        convert(path, tmp_path / "b.zarr", cutoff=CUTOFF, where="nedges < 0", progress=False)
    # Left out for another reason: no search is spent on them.
    convert(path, tmp_path / "c.zarr", cutoff=CUTOFF, where="natoms == 9", progress=False)
    check(tmp_path / "c.zarr", [a for a in images if len(a) == 9], CUTOFF)


def test_a_store_gets_new_lists_and_keeps_no_values_of_old_edges(
    frames: tuple[Path, list], tmp_path: Path
) -> None:
    path, images = frames
    convert(path, tmp_path / "a.zarr", cutoff=2.5, progress=False)
    report = convert(tmp_path / "a.zarr", tmp_path / "b.zarr", cutoff=CUTOFF, progress=False)
    check(tmp_path / "b.zarr", images, CUTOFF)
    assert any("replaced by new neighbour lists" in note for note in report.notes)
    with ax.open_store(tmp_path / "a.zarr") as snapshot:
        edges = snapshot.num_edges
    StoreWriter(tmp_path / "a.zarr").add_custom("bond_order", np.ones(edges), "edge")
    with pytest.raises(ConfigError, match="bond_order"):
        convert(tmp_path / "a.zarr", tmp_path / "c.zarr", cutoff=CUTOFF, progress=False)


def test_appended_samples_have_the_same_cutoff(frames: tuple[Path, list], tmp_path: Path) -> None:
    path, images = frames
    convert(path, tmp_path / "a.zarr", cutoff=CUTOFF, progress=False)
    for other in (None, 5.0):
        with pytest.raises(ConfigError, match=r"give cutoff=4\.0"):
            append(path, tmp_path / "a.zarr", cutoff=other, progress=False)
    report = append(path, tmp_path / "a.zarr", cutoff=CUTOFF, progress=False)
    check(tmp_path / "a.zarr", [*images, *images], CUTOFF)
    with ax.open_store(tmp_path / "a.zarr") as snapshot:
        assert snapshot.num_edges == 2 * report.edges


@pytest.mark.parametrize("cutoff", [0, -1.0, np.nan, np.inf, True, "5"])
def test_a_cutoff_is_a_length(frames: tuple[Path, list], tmp_path: Path, cutoff: object) -> None:
    with pytest.raises(ConfigError, match="cutoff"):
        convert(frames[0], tmp_path / "a.zarr", cutoff=cutoff, progress=False)

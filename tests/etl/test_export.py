"""Store to another format and back: the identity, up to what the report names."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import alchemi_xr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ConfigError, StoreError, StoreExistsError
from alchemi_xr.etl.conversion import convert
from alchemi_xr.etl.exporting import export
from alchemi_xr.store import fs
from alchemi_xr.store.reader import open_store
from alchemi_xr.store.writer import StoreWriter

FORMATS = ["out.extxyz", "out.db", "out.aselmdb", "out.npz", "out.traj"]
if find_spec("pyarrow") is not None:
    FORMATS.append("out.parquet")


def block_of(counts: list[int], *, seed: int = 0, holes: bool = True, narrow: bool = True) -> Block:
    """Samples with all that a store may hold."""
    rng = np.random.default_rng(seed)
    n, v = len(counts), sum(counts)
    real = np.float32 if narrow else np.float64
    edges = np.array([1 if c > 1 else 0 for c in counts])
    arrays: dict[str, Any] = {
        "atomic_numbers": rng.integers(1, 90, v),
        "positions": rng.normal(size=(v, 3)).astype(real),
        "forces": rng.normal(size=(v, 3)).astype(real),
        "charges": rng.normal(size=v),
        "momenta": rng.normal(size=(v, 3)),
        "energy": rng.normal(size=(n, 1)) * 1e5,
        "cell": rng.normal(size=(n, 3, 3)) + 9 * np.eye(3),
        "pbc": np.repeat(rng.integers(0, 2, (n, 1)).astype(bool), 3, axis=1),
        "stress": (lambda s: s + s.transpose(0, 2, 1))(rng.normal(size=(n, 3, 3))),
        "dipole": rng.normal(size=(n, 3)),
        "charge": rng.integers(-2, 3, (n, 1)).astype(float),
        "flag": rng.integers(0, 2, n).astype(bool),
        "rank": rng.integers(-5, 5, n),
        "tensor": rng.normal(size=(n, 2, 3)),
        "spins": rng.normal(size=(v, 2)),
        "fixed": rng.integers(0, 2, v).astype(bool),
        "label": np.array([f'a "{i}" \\ b=c [{i}]' for i in range(n)], dtype=object),
        "neighbor_list": np.tile([[0, 1]], (int(edges.sum()), 1)),
    }
    atom = ("atomic_numbers", "positions", "forces", "charges", "momenta", "spins", "fixed")
    levels: Any = {k: "atom" if k in atom else "system" for k in arrays}
    levels["neighbor_list"] = "edge"
    present: dict[str, Any] = {}
    if holes and n > 1:
        for name in ("forces", "energy", "label", "dipole"):
            mask = rng.integers(0, 2, n).astype(bool)
            mask[0], mask[1] = True, False
            present[name] = mask
    ptr = counts_to_ptr(np.array(counts))
    block = Block(ptr, counts_to_ptr(edges), arrays, levels, present)
    # The rows of a hole hold the fill, as in a store.
    index = np.repeat(np.arange(n), counts)
    for name, mask in present.items():
        rows = ~mask[index] if levels[name] == "atom" else ~mask
        arrays[name][rows] = "" if arrays[name].dtype == object else np.nan
    return block


def put(path: Path, block: Block) -> Path:
    StoreWriter(path).write(block)
    return path


def whole(path: Any) -> Block:
    with open_store(path) as store:
        return store.read_block(store.active)


def same(got: Block, want: Block, report: Any, *, fills: bool = False) -> None:
    assert np.array_equal(got.atoms_ptr, want.atoms_ptr)
    for name, values in want.arrays.items():
        if name in report.lost:
            assert name not in got, name
            continue
        assert name in got, name
        # What an array of arrays cannot tell from a field of atoms, the export has told.
        if any("fields of atoms" in note and name in note for note in report.notes):
            continue
        assert got.levels[name] == want.levels[name], name
        if not fills:
            np.testing.assert_array_equal(got.has(name), want.has(name), err_msg=name)
        found = got.arrays[name].reshape(values.shape)
        if values.dtype != object:
            found = found.astype(values.dtype)
        np.testing.assert_array_equal(found, values, err_msg=name)


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("holes", [False, True])
def test_round_trip(tmp_path: Path, file: str, holes: bool) -> None:
    block = block_of([3, 1, 5, 2, 7], holes=holes)
    store = put(tmp_path / "in.zarr", block)
    StoreWriter(store).delete([2])
    want = block.take(np.array([0, 1, 3, 4]))
    report = alchemi_xr.export(store, tmp_path / file, progress=False)
    assert (report.samples, report.atoms) == (4, 13)
    assert "neighbor_list" in report.lost or file.endswith("parquet")
    assert not [n for n in os.listdir(tmp_path) if "partial" in n]
    convert(tmp_path / file, tmp_path / "back.zarr", progress=False)
    same(whole(tmp_path / "back.zarr"), want, report, fills=file.endswith("npz"))
    if holes and file.endswith("npz"):
        assert any("no holes" in note for note in report.notes)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(counts=[1, 2], seed=0, file="out.npz", size=1)
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    file=st.sampled_from([f for f in FORMATS if f not in ("out.db", "out.traj")]),
    size=st.sampled_from([1, 500, 10**6]),
)
def test_any_samples_in_any_blocks(
    tmp_path_factory: Any, counts: list[int], seed: int, file: str, size: int
) -> None:
    folder = tmp_path_factory.mktemp("round")
    block = block_of(counts, seed=seed)
    store = put(folder / "in.zarr", block)
    report = export(store, folder / file, block_bytes=size, progress=False)
    convert(folder / file, folder / "back.zarr", progress=False)
    same(whole(folder / "back.zarr"), block, report, fills=file.endswith("npz"))


def test_deepmd(tmp_path: Path) -> None:
    a, b = block_of([3], seed=1, holes=False), block_of([2], seed=2, holes=False)
    block = Block.concat([a, b, a, b, a])
    store = put(tmp_path / "in.zarr", block)
    report = export(store, tmp_path / "out.deepmd", block_bytes=300, progress=False)
    assert "tensor" in report.lost
    assert any("order of samples" in note for note in report.notes)
    systems = sorted(os.listdir(tmp_path / "out.deepmd"))
    assert len(systems) == 2
    convert(tmp_path / "out.deepmd" / "*", tmp_path / "back.zarr", progress=False)
    got = whole(tmp_path / "back.zarr")
    counts = np.diff(got.atoms_ptr)
    order = np.argsort(np.diff(block.atoms_ptr), kind="stable")
    want = block.take(order if counts[0] == 2 else np.array([0, 2, 4, 1, 3]))
    for name in ("atomic_numbers", "positions", "forces", "energy", "pbc"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    with pytest.raises(ConfigError, match="too many systems"):
        export(store, tmp_path / "b", format="deepmd", options={"max_systems": 1}, progress=False)
    assert not (tmp_path / "b").exists()


def test_ase_reads_what_was_written(tmp_path: Path) -> None:
    from ase.io import read

    block = block_of([3, 2], holes=False)
    store = put(tmp_path / "in.zarr", block)
    for file in ("out.extxyz", "out.traj", "out.db"):
        export(store, tmp_path / file, progress=False)
        frames = read(tmp_path / file, ":")
        np.testing.assert_array_equal(frames[0].numbers, block["atomic_numbers"][:3])
        np.testing.assert_allclose(frames[1].get_potential_energy(), block["energy"][1, 0])
        np.testing.assert_allclose(frames[0].get_forces(), block["forces"][:3])
        np.testing.assert_allclose(frames[0].cell.array, block["cell"][0])


def test_one_system_to_a_format_of_ase(tmp_path: Path) -> None:
    from ase.io import read

    block = block_of([3, 2], holes=False)
    store = put(tmp_path / "in.zarr", block)
    how = {"format": "ase", "options": {"ase_format": "vasp"}, "progress": False}
    export(store, tmp_path / "POSCAR", samples=[1], **how)
    atoms = read(tmp_path / "POSCAR", format="vasp")
    np.testing.assert_allclose(atoms.cell.array, block["cell"][1])
    with pytest.raises(ConfigError, match="one system"):
        export(store, tmp_path / "POSCAR2", **how)


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    store = put(tmp_path / "in.zarr", block_of([2]))
    (tmp_path / "out.extxyz").write_text("mine")
    with pytest.raises(StoreExistsError):
        export(store, tmp_path / "out.extxyz", progress=False)
    assert (tmp_path / "out.extxyz").read_text() == "mine"
    export(store, tmp_path / "out.extxyz", overwrite=True, progress=False)
    (tmp_path / "out.deepmd").mkdir()
    (tmp_path / "out.deepmd" / "thesis.tex").touch()
    with pytest.raises(StoreExistsError, match="is not of the format"):
        export(store, tmp_path / "out.deepmd", overwrite=True, progress=False)
    with pytest.raises(ConfigError, match=r"one of: extxyz"):
        export(store, tmp_path / "out.what", progress=False)
    with pytest.raises(ConfigError, match="does not take them"):
        export(store, tmp_path / "o.npz", options={"nonsense": 1}, progress=False)
    assert sorted(os.listdir(tmp_path)) == ["in.zarr", "out.deepmd", "out.extxyz"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = put(tmp_path / "in.zarr", block_of([2, 3]))
    for file in FORMATS:
        with monkeypatch.context() as patch:
            from alchemi_xr.store.reader import Snapshot

            real = Snapshot.iter_blocks

            def breaks(self: Snapshot, real: Any = real, **how: Any) -> Any:
                yield from real(self, **how)
                raise OSError("the disk is gone")

            patch.setattr(Snapshot, "iter_blocks", breaks)
            with pytest.raises(StoreError, match="the disk is gone"):
                export(store, tmp_path / file, progress=False)
        assert os.listdir(tmp_path) == ["in.zarr"], file


def test_text_that_looks_like_something_else(tmp_path: Path) -> None:
    block = block_of([1] * 12, holes=False)
    texts = ["1e5", "T", "F F T", "1 2", "+1", "007", "[[1, 2]]", '_JSON {"a": 2}', "nan", "a\r\nb"]
    label = np.array([*texts, "\u2028 é", 'b "1"'], dtype=object)
    block = block.with_field("label", label, "system")
    export(put(tmp_path / "in.zarr", block), tmp_path / "out.extxyz", progress=False)
    convert(tmp_path / "out.extxyz", tmp_path / "back.zarr", progress=False)
    with open_store(tmp_path / "back.zarr") as store:
        assert store.read_block(slice(None))["label"].tolist() == label.tolist()
    read = pytest.importorskip("ase.io").read(tmp_path / "out.extxyz", ":")
    assert [a.info["label"] for a in read] == label.tolist()


FULL = """
import resource, signal, sys
import alchemi_xr

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    alchemi_xr.export("in.zarr", sys.argv[1], progress=False)
except alchemi_xr.errors.StoreError as error:
    print("told:", error)
"""


@pytest.mark.parametrize("file", [*FORMATS, "out.packed", "b[1].npz"])
def test_a_full_disk_is_told(tmp_path: Path, file: str) -> None:
    # Files cannot grow beyond a limit: what writes them sees what a full disk shows.
    put(tmp_path / "in.zarr", block_of([8] * 400))
    done = subprocess.run(
        [sys.executable, "-c", FULL, file], cwd=tmp_path, capture_output=True, text=True
    )
    assert f"told: {file}: could not be written" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == ["in.zarr"]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no room is taken beforehand here")
def test_a_map_has_its_room(tmp_path: Path) -> None:
    rows = fs.make_map(tmp_path / "a.npy", np.dtype(np.float64), (1000, 100))
    rows[-1] = 1.0
    rows.flush()
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy").sum(), 100.0)
    assert os.stat(tmp_path / "a.npy").st_blocks * 512 >= 800_000


def test_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from alchemi_xr.cli.main import app

    store = put(tmp_path / "in.zarr", block_of([2, 3]))
    dest = tmp_path / "out.extxyz"
    command = ["export", str(store), str(dest), "--field", "energy", "--report", f"{dest}.json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2 samples written" in result.output
    assert "forces" not in dest.read_text()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Twice the samples, the same peak."""
    import tracemalloc

    peaks = []
    for n in (60, 240):
        block = block_of([40] * n, holes=False)
        store = put(tmp_path / f"{n}.zarr", block)
        del block
        tracemalloc.start()
        export(store, tmp_path / f"{n}.extxyz", block_bytes=2**18, progress=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]

"""What is done in the pass of a conversion, against ASE and against plain Python."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    SourceError,
    TransformError,
    UnknownFieldError,
)
from alchemi_xr.etl import append, convert
from alchemi_xr.etl.stages import make_stages, wrap_positions
from alchemi_xr.store import open_store


def frames(count: int = 40) -> list[Atoms]:
    rng = np.random.default_rng(3)
    out = []
    for i in range(count):
        n = int(rng.integers(1, 9))
        atoms = Atoms(
            numbers=rng.choice([1, 6, 8], n),
            positions=rng.normal(size=(n, 3)) * 4,
            cell=np.eye(3) * 5 + rng.normal(size=(3, 3)) * 0.3,
            pbc=[True, i % 2 == 0, True],
        )
        results: dict[str, Any] = {"forces": rng.normal(size=(n, 3))}
        if i % 5:
            results["energy"] = float(rng.normal()) - n
        atoms.calc = SinglePointCalculator(atoms, **results)
        out.append(atoms)
    return out


@pytest.fixture
def given_frames(tmp_path: Path) -> list[Atoms]:
    made = frames()
    write(tmp_path / "in.extxyz", made)
    return made


def whole(path: Path) -> Block:
    with open_store(path) as store:
        assert len(store.active) == store.num_samples
        return store.read_block(slice(None))


@pytest.mark.parametrize("client", [None, 2])
def test_a_condition_in_the_pass(tmp_path: Path, given_frames: list[Atoms], client: Any) -> None:
    report = convert(
        tmp_path / "in.extxyz",
        tmp_path / "out.zarr",
        where="natoms > 2 and energy_per_atom < -0.5",
        client=client,
        progress=False,
    )
    large = [a for a in given_frames if len(a) > 2]
    known = [a for a in large if "energy" in a.calc.results]
    kept = [a for a in known if a.calc.results["energy"] / len(a) < -0.5]
    assert report.undecided == len(large) - len(known) > 0
    assert report.left_out == len(given_frames) - len(large) + len(known) - len(kept)
    assert report.samples == len(kept)
    assert report.rejected == 0
    assert f"{report.undecided} undecided" in report.summary()
    block = whole(tmp_path / "out.zarr")
    np.testing.assert_array_equal(np.diff(block.atoms_ptr), [len(a) for a in kept])
    np.testing.assert_array_equal(block["energy"][:, 0], [a.calc.results["energy"] for a in kept])
    with open_store(tmp_path / "out.zarr") as store:
        told = store.schema.provenance
    assert told["stages"]["where"] == "natoms > 2 and energy_per_atom < -0.5"
    assert (told["left_out"], told["undecided"]) == (report.left_out, report.undecided)
    assert "rejected" not in told
    # Not the samples that are left out either, in a hidden generation before.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.extxyz", "out.zarr"]


def test_a_condition_beside_broken_records(tmp_path: Path, given_frames: list[Atoms]) -> None:
    text = (tmp_path / "in.extxyz").read_text().split("\n")
    text[2] = text[2].replace(text[2].split()[1], "oops", 1)
    (tmp_path / "broken.extxyz").write_text("\n".join(text))
    report = convert(
        tmp_path / "broken.extxyz",
        tmp_path / "out.zarr",
        where="natoms > 2",
        on_error="quarantine",
        progress=False,
    )
    kept = [len(a) for a in given_frames[1:] if len(a) > 2]
    assert (report.samples, report.rejected) == (len(kept), 1)
    assert report.left_out == len(given_frames) - 1 - len(kept)
    assert np.diff(whole(tmp_path / "out.zarr").atoms_ptr).tolist() == kept
    # Its rows are gone with those that were left out, and so is its place.
    assert report.rejects_path is not None
    line = json.loads(Path(report.rejects_path).read_text().splitlines()[0])
    assert (line["frame"], line["sample"]) == (0, None)


def test_nothing_is_left(tmp_path: Path, given_frames: list[Atoms]) -> None:
    with pytest.raises(SourceError, match="left out by the condition"):
        convert(tmp_path / "in.extxyz", tmp_path / "out.zarr", where="natoms > 99", progress=False)
    with pytest.raises(UnknownFieldError, match="natom"):
        convert(tmp_path / "in.extxyz", tmp_path / "out.zarr", where="natom > 9", progress=False)
    assert not (tmp_path / "out.zarr").exists()


def test_append_with_a_condition(tmp_path: Path, given_frames: list[Atoms]) -> None:
    convert(tmp_path / "in.extxyz", tmp_path / "out.zarr", progress=False)
    report = append(tmp_path / "in.extxyz", tmp_path / "out.zarr", where="fmax > 2", progress=False)
    large = [
        len(a) for a in given_frames if np.linalg.norm(a.calc.results["forces"], axis=1).max() > 2
    ]
    assert (report.samples, report.left_out) == (len(large), len(given_frames) - len(large))
    counts = np.diff(whole(tmp_path / "out.zarr").atoms_ptr)
    assert counts[len(given_frames) :].tolist() == large


def test_wrap_is_that_of_ase(tmp_path: Path, given_frames: list[Atoms]) -> None:
    convert(tmp_path / "in.extxyz", tmp_path / "out.zarr", wrap=True, progress=False)
    block = whole(tmp_path / "out.zarr")
    for i, atoms in enumerate(given_frames):
        atoms.wrap(eps=0)
        rows = slice(int(block.atoms_ptr[i]), int(block.atoms_ptr[i + 1]))
        # The file has eight decimals.
        np.testing.assert_allclose(block["positions"][rows], atoms.positions, atol=2e-7)


def test_wrapped_edges_stay_what_they_were() -> None:
    rng = np.random.default_rng(0)
    cell = np.eye(3)[None] * 4 + rng.normal(size=(1, 3, 3)) * 0.2
    pairs = rng.integers(0, 6, (20, 2))
    block = Block(
        np.array([0, 6]),
        np.array([0, 20]),
        {
            "atomic_numbers": np.ones(6, int),
            "positions": rng.normal(size=(6, 3)) * 9,
            "cell": cell,
            "pbc": np.array([[True, True, False]]),
            "neighbor_list": pairs,
            "neighbor_list_shifts": rng.integers(-1, 2, (20, 3)) * [1, 1, 0],
        },
        {
            "atomic_numbers": "atom",
            "positions": "atom",
            "cell": "system",
            "pbc": "system",
            "neighbor_list": "edge",
            "neighbor_list_shifts": "edge",
        },
    )

    def vectors(b: Block) -> Any:
        i, j = b["neighbor_list"].T
        return b["positions"][j] - b["positions"][i] + b["neighbor_list_shifts"] @ b["cell"][0]

    after = wrap_positions(block)
    assert not np.array_equal(after["neighbor_list_shifts"], block["neighbor_list_shifts"])
    np.testing.assert_allclose(vectors(after), vectors(block), atol=1e-12)


def test_a_cell_without_volume() -> None:
    block = Block(
        np.array([0, 1]),
        np.zeros(2, int),
        {"positions": np.ones((1, 3)), "cell": np.zeros((1, 3, 3)), "pbc": np.ones((1, 3), bool)},
        {"positions": "atom", "cell": "system", "pbc": "system"},
    )
    with pytest.raises(FieldError, match="spans no volume"):
        wrap_positions(block)


def test_baseline(tmp_path: Path, given_frames: list[Atoms]) -> None:
    table = {"H": -13.5, "C": -1030.25, 8: -2041.75}
    convert(tmp_path / "in.extxyz", tmp_path / "out.zarr", baseline=table, progress=False)
    block = whole(tmp_path / "out.zarr")
    each = {1: -13.5, 6: -1030.25, 8: -2041.75}
    for i, atoms in enumerate(given_frames):
        energy = atoms.calc.results.get("energy")
        assert bool(block.has("energy")[i]) == (energy is not None)
        if energy is not None:
            want = energy - sum(each[z] for z in atoms.numbers.tolist())
            assert block["energy"][i, 0] == pytest.approx(want, rel=1e-15)
    with open_store(tmp_path / "out.zarr") as store:
        assert store.schema.provenance["stages"]["baseline"]["O"] == -2041.75


def test_an_element_without_energy(tmp_path: Path, given_frames: list[Atoms]) -> None:
    with pytest.raises(SourceError, match="no energy of O"):
        convert(
            tmp_path / "in.extxyz", tmp_path / "a.zarr", baseline={"H": 1, "C": 2}, progress=False
        )
    report = convert(
        tmp_path / "in.extxyz",
        tmp_path / "b.zarr",
        baseline={"H": 1, "C": 2},
        on_error="quarantine",
        progress=False,
    )
    odd = [a for a in given_frames if 8 in a.numbers and "energy" in a.calc.results]
    assert report.rejected == len(odd)


@pytest.mark.parametrize("wrong", [{"Xx": 1.0}, {"H": "x"}, {"H": float("nan")}, {0: 1.0}, [1]])
def test_a_wrong_baseline(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="baseline"):
        make_stages(baseline=wrong)


def with_radius(block: Block) -> Block:
    """A field of atoms, one of systems, another dtype, and one field less."""
    norms = np.linalg.norm(block["positions"], axis=1).astype(np.float32)
    block = block.with_field("radius", norms, "atom")
    block = block.with_field("size", np.diff(block.atoms_ptr), "system")
    return block.select_fields([n for n in block.names if n != "forces"])


@pytest.mark.parametrize("client", [None, 2])
def test_a_function(tmp_path: Path, given_frames: list[Atoms], client: Any) -> None:
    convert(
        tmp_path / "in.extxyz",
        tmp_path / "out.zarr",
        function=with_radius,
        where="size > 2",
        client=client,
        progress=False,
    )
    block = whole(tmp_path / "out.zarr")
    assert "forces" not in block
    assert block["radius"].dtype == np.float32
    kept = [a for a in given_frames if len(a) > 2]
    assert block["size"].tolist() == [len(a) for a in kept]
    want = np.concatenate([np.linalg.norm(a.positions, axis=1) for a in kept])
    np.testing.assert_allclose(block["radius"], want, atol=1e-6)


def test_functions_that_are_none(tmp_path: Path, given_frames: list[Atoms]) -> None:
    def fewer(block: Block) -> Block:
        return block.take(np.arange(block.num_samples - 1))

    def fails(block: Block) -> Block:
        raise ValueError("no good")

    def nothing(block: Block) -> Any:
        return None

    def bare(block: Block) -> Block:
        return block.select_fields(["positions"])

    for function, error, match in (
        (fewer, TransformError, "number of samples"),
        (fails, TransformError, "ValueError: no good"),
        (nothing, TransformError, "no Block"),
        (bare, ConfigError, "leaves out atomic_numbers"),
        ("nowhere", ConfigError, "module:function"),
        ("nowhere.at_all:x", ConfigError, "cannot be imported"),
        ("json:lods", ConfigError, "loads"),
        (5, ConfigError, "cannot be called"),
    ):
        with pytest.raises(error, match=match):
            convert(
                tmp_path / "in.extxyz",
                tmp_path / "out.zarr",
                function=function,  # type: ignore[arg-type]
                progress=False,
            )
        assert not (tmp_path / "out.zarr").exists()


def test_on_the_command_line(tmp_path: Path, given_frames: list[Atoms]) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def number(block):\n"
        "    return block.with_field('mark', np.full(block.num_samples, 7), 'system')\n"
    )
    (tmp_path / "base.json").write_text('{"H": -1.0, "C": -2.0, "O": -3.0}')
    done = subprocess.run(
        [Path(sys.executable).with_name("alchemi-xr"), "convert", "in.extxyz", "out.zarr", "--wrap",
         "--where", "natoms > 2 and mark == 7", "--function", "mine:number",
         "--baseline", "base.json", "-q"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    block = whole(tmp_path / "out.zarr")
    assert block.num_samples == sum(len(a) > 2 for a in given_frames)
    assert (block["mark"] == 7).all()


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
def test_wrapped_positions_are_in_the_cell(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, v = len(counts), sum(counts)
    cell = np.eye(3) * 3 + rng.uniform(-1, 1, (n, 3, 3))
    pbc = rng.integers(0, 2, (n, 3)).astype(bool)
    has = rng.integers(0, 2, n).astype(bool)
    positions = rng.normal(size=(v, 3)) * 20
    block = Block(
        counts_to_ptr(np.array(counts)),
        np.zeros(n + 1, np.int64),
        {"positions": positions, "cell": np.where(has[:, None, None], cell, np.nan), "pbc": pbc},
        {"positions": "atom", "cell": "system", "pbc": "system"},
        {"cell": has},
    )
    after = wrap_positions(block)["positions"]
    owner = np.repeat(np.arange(n), counts)
    for a in range(v):
        i = owner[a]
        if not has[i] or not pbc[i].any():
            np.testing.assert_array_equal(after[a], positions[a])
            continue
        moved = np.linalg.lstsq(cell[i][pbc[i]].T, after[a] - positions[a], rcond=None)[0]
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-9)
        if pbc[i].all():
            scaled = np.linalg.solve(cell[i].T, after[a])
            assert (scaled > -1e-9).all()
            assert (scaled < 1 + 1e-9).all()


@pytest.mark.parametrize("packed", [False, True])
def test_records_set_aside_once_read_have_their_place(tmp_path: Path, packed: bool) -> None:
    def frame(symbol: str, x: str, energy: float) -> str:
        return f"2\nProperties=species:S:1:pos:R:3 energy={energy}\n{symbol} 0 0 {x}\nH 0 0 1\n"

    frames = [frame("H", "0", -1.0), frame("O", "0", -2.0), frame("H", "nan", -3.0)]
    frames += [frame("H", "0", 1e300), frame("H", "0.5", -4.0)]
    text = "".join(frames)
    path = tmp_path / ("a.extxyz.gz" if packed else "a.extxyz")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    report = convert(
        path,
        tmp_path / "a.zarr",
        on_error="quarantine",
        nonfinite="quarantine",
        baseline={"H": -13.6},
        dtype={"energy": "float32"},
        progress=False,
    )
    reasons = ["no energy of O", "NaN", "too large for float32"]
    assert [r.frame for r in report.rejects] == [1, 2, 3]
    for reject, reason in zip(report.rejects, reasons, strict=True):
        assert reason in reject.reason
        assert reject.line == 1 + 4 * reject.frame
        assert reject.offset == len("".join(frames[: reject.frame]))
    with pytest.raises(SourceError, match=r"frame 1 \(line 5, byte "):
        convert(path, tmp_path / "b.zarr", baseline={"H": -13.6}, progress=False)

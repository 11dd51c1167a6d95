"""Padded batches of the packed format, beside a loop over the molecules."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.packed_memmap_loader import PackedMemmapLoader, split_loader
from alchemi_xr.errors import ArgumentTypeError, ConfigError, SourceError, SourceNotFoundError
from alchemi_xr.native import rows as native


def write(path: Path, counts: list[int], *, charges: bool = True, seed: int = 0) -> Path:
    """A folder of packed molecules; energies are their numbers."""
    rng = np.random.default_rng(seed)
    path.mkdir()
    n_atoms = np.array(counts, np.int32)
    offsets = np.concatenate([[0], np.cumsum(n_atoms)]).astype(np.int64)
    atoms = int(offsets[-1])
    np.save(path / "offsets.npy", offsets)
    np.save(path / "n_atoms.npy", n_atoms)
    rng.integers(1, 90, atoms).astype("<i4").tofile(path / "Z_pack.int32")
    rng.normal(size=(atoms, 3)).astype("<f4").tofile(path / "R_pack.f32")
    rng.normal(size=(atoms, 3)).astype("<f4").tofile(path / "F_pack.f32")
    np.arange(len(counts), dtype="<f8").tofile(path / "E.f64")
    if charges:
        rng.integers(-2, 3, len(counts)).astype("<f8").tofile(path / "Qtot.f64")
    return path


COUNTS = [3, 1, 0, 7, 7, 2, 5, 4, 1, 6, 2, 3, 7, 1, 4, 5, 2, 6, 3, 0, 1, 2, 3]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("packed") / "p", COUNTS)


def looped(loader: PackedMemmapLoader, order: list[int], width: int | None) -> dict[str, Any]:
    """A batch as a loop over its molecules makes it."""
    most = max(COUNTS[i] for i in order) if width is None else width
    out: dict[str, Any] = {
        "Z": np.zeros((len(order), most), np.int32),
        "R": np.zeros((len(order), most, 3), np.float32),
        "F": np.zeros((len(order), most, 3), np.float32),
        "E": np.array([loader.E[i] for i in order]),
        "N": np.array([COUNTS[i] for i in order], np.int32),
        "Qtot": np.array([0.0 if loader.Qtot is None else loader.Qtot[i] for i in order]),
    }
    for place, i in enumerate(order):
        a, b = loader.offsets[i], loader.offsets[i + 1]
        for name, rows in (("Z", loader.Z_pack), ("R", loader.R_pack), ("F", loader.F_pack)):
            out[name][place, : b - a] = rows[a:b]
    return out


def expected_order(loader: PackedMemmapLoader, rng: Any) -> list[list[int]]:
    """The batches of an epoch by the format's own rule."""
    order = loader.indices.copy()
    if loader.shuffle:
        rng.shuffle(order)
    batches = []
    for start in range(0, len(order), loader.bucket_size):
        bucket = order[start : start + loader.bucket_size]
        bucket = bucket[np.argsort(loader.n_atoms[bucket], kind="stable")].tolist()
        batches += [
            bucket[i : i + loader.batch_size] for i in range(0, len(bucket), loader.batch_size)
        ]
    return batches


@given(
    batch=st.integers(1, 9),
    bucket=st.integers(1, 30),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    width=st.sampled_from([None, 7, 11]),
    compiled=st.booleans(),
)
def test_equals_a_loop_over_the_molecules(
    packed: Path,
    batch: int,
    bucket: int,
    shuffle: bool,
    seed: int,
    width: int | None,
    compiled: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "_rows", None)
        loader = PackedMemmapLoader(packed, batch, shuffle, bucket, seed)
        rng = np.random.default_rng(seed)
        for _ in range(2):  # the generator goes on
            orders = expected_order(loader, rng)
            found = list(loader.batches(width))
            assert len(found) == len(orders)
            for order, got in zip(orders, found, strict=True):
                for name, values in looped(loader, order, width).items():
                    assert got[name].dtype == values.dtype, name
                    np.testing.assert_array_equal(got[name], values)
                size, most = got["Z"].shape
                np.testing.assert_array_equal(
                    got["batch_segments"], np.repeat(np.arange(size), most)
                )


def test_pairs_and_masks(packed: Path) -> None:
    loader = PackedMemmapLoader(packed, 4, shuffle=False)
    assert (len(loader), loader.N) == (23, 23)
    batch = next(loader.batches(num_atoms=7))
    assert batch["dst_idx"].dtype == batch["src_idx"].dtype == np.int32
    three = next(b for b in loader.batches() if b["Z"].shape[1] == 3)
    assert three["dst_idx"].tolist() == [0, 0, 1, 1, 2, 2]
    assert three["src_idx"].tolist() == [1, 2, 0, 2, 0, 1]
    masked = list(loader.batches(num_atoms=8, physnet_format=False))
    assert set(masked[0]) == {"Z", "R", "F", "E", "N", "Qtot", "mask"}
    for batch in masked:
        assert batch["mask"].sum(axis=1).tolist() == batch["N"].tolist()
        assert (batch["Z"] > 0).tolist() == batch["mask"].tolist()


def test_too_few_atoms_is_told_before_the_first_batch(packed: Path) -> None:
    loader = PackedMemmapLoader(packed, 4)
    with pytest.raises(SourceError, match="molecule 3: has more atoms than num_atoms=6"):
        loader.batches(num_atoms=6)
    for wrong, error in ((0, ConfigError), (2.5, ArgumentTypeError), (True, ArgumentTypeError)):
        with pytest.raises(error):
            loader.batches(num_atoms=wrong)


@given(stop=st.integers(0, 8), epochs=st.integers(0, 2), data=st.data())
def test_stopped_and_taken_up(packed: Path, stop: int, epochs: int, data: Any) -> None:
    """Case C35: anywhere in an epoch, at its end, and twice."""
    make = lambda: PackedMemmapLoader(packed, 3, bucket_size=9)  # noqa: E731
    whole, loader = make(), make()
    for _ in range(epochs):
        for one in (whole, loader):
            list(one.batches())
    want = [b["E"].tolist() for _ in range(2) for b in whole.batches()]
    steps = loader.batches()
    found = [next(steps)["E"].tolist() for _ in range(stop)]
    for _ in range(data.draw(st.integers(1, 2))):
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make()
        loader.load_state_dict(state)
    found += [b["E"].tolist() for b in loader.batches()]
    if stop == 8:  # the end of an epoch is the beginning of the next
        assert len(found) == 8 + len(want) // 2 or found == want[:8]
    found += [b["E"].tolist() for b in loader.batches()]
    assert found[: len(want)] == want
    with pytest.raises(ConfigError, match="another batch_size"):
        PackedMemmapLoader(packed, 4, bucket_size=9).load_state_dict(state)


def test_splits(packed: Path) -> None:
    loader = PackedMemmapLoader(packed, 4)
    before = loader.rng.bit_generator.state
    train, valid = split_loader(loader, 0.7)
    assert train.indices.tolist() == list(range(16))
    assert valid.indices.tolist() == list(range(16, 23))
    assert (train.shuffle, valid.shuffle) == (True, False)
    assert loader.rng.bit_generator.state != before
    again, rest = split_loader(train, 0.5, seed=3)
    assert len(again) == len(rest) == 8
    assert set(again.indices) | set(rest.indices) == set(range(16))
    assert sorted(e for b in again.batches() for e in b["E"]) == sorted(again.indices)
    with pytest.raises(ConfigError, match="fraction"):
        split_loader(loader, 1.5)


def test_torch_tensors(packed: Path) -> None:
    torch = pytest.importorskip("torch")
    batch = next(PackedMemmapLoader(packed, 4, output="torch").batches())
    assert all(isinstance(values, torch.Tensor) for values in batch.values())
    assert batch["E"].dtype == torch.float64


def test_jax_arrays(packed: Path) -> None:
    jax = pytest.importorskip("jax", reason="jax (extra jax) is not installed")
    batch = next(PackedMemmapLoader(packed, 4, output="jax").batches())
    assert all(isinstance(values, jax.Array) for values in batch.values())


def test_no_molecules_and_no_charges(tmp_path: Path) -> None:
    empty = PackedMemmapLoader(write(tmp_path / "none", []), 4)
    assert len(empty) == 0
    assert list(empty.batches()) == []
    loader = PackedMemmapLoader(write(tmp_path / "neutral", [2, 3], charges=False), 4)
    assert loader.Qtot is None
    assert next(loader.batches())["Qtot"].tolist() == [0.0, 0.0]
    hollow = PackedMemmapLoader(write(tmp_path / "hollow", [0, 0]), 4)
    assert next(hollow.batches())["Z"].shape == (2, 0)


@pytest.mark.parametrize("name", ["Z_pack.int32", "R_pack.f32", "F_pack.f32", "E.f64", "Qtot.f64"])
@pytest.mark.parametrize("change", [-4, 4])
def test_a_file_of_another_size_is_named(
    packed: Path, tmp_path: Path, name: str, change: int
) -> None:
    path = tmp_path / "p"
    shutil.copytree(packed, path)
    size = (path / name).stat().st_size
    os.truncate(path / name, size + change)
    stem = name.partition(".")[0]
    message = f"{stem} size mismatch: expected {size} bytes, got {size + change} bytes"
    with pytest.raises(SourceError, match=message) as told:
        PackedMemmapLoader(path, 4)
    assert isinstance(told.value, ValueError)


def test_what_contradicts_itself_is_named(packed: Path, tmp_path: Path) -> None:
    def changed(**arrays: Any) -> Path:
        path = tmp_path / "p"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(packed, path)
        for name, values in arrays.items():
            np.save(path / f"{name}.npy", values)
        return path

    offsets, n_atoms = np.load(packed / "offsets.npy"), np.load(packed / "n_atoms.npy")
    torn = offsets.copy()
    torn[4] += 1
    for arrays, match in (
        ({"offsets": offsets + 1}, "does not begin at 0"),
        ({"offsets": torn}, "molecule 3: offsets.npy and n_atoms.npy contradict"),
        ({"offsets": offsets[:-1]}, "has not one number more"),
        ({"offsets": offsets.astype(float)}, "no whole numbers"),
        ({"n_atoms": n_atoms[:, None]}, "no whole numbers"),
        ({"n_atoms": np.array([None] * 23)}, "no array of NumPy"),
    ):
        with pytest.raises(SourceError, match=match):
            PackedMemmapLoader(changed(**arrays), 4)
    path = changed()
    (path / "F_pack.f32").unlink()
    with pytest.raises(SourceNotFoundError, match=r"F_pack\.f32 is missing"):
        PackedMemmapLoader(path, 4)
    with pytest.raises(SourceNotFoundError, match="no such folder"):
        PackedMemmapLoader(tmp_path / "nowhere", 4)
    for options in ({"batch_size": 0}, {"batch_size": 4, "bucket_size": 0}):
        with pytest.raises(ConfigError):
            PackedMemmapLoader(packed, **options)
    with pytest.raises(ConfigError, match="output"):
        PackedMemmapLoader(packed, 4, output="pandas")


def test_real_molecules(shared: Path) -> None:
    folder = shared / "data" / "packed-alcohols"
    facts = json.loads((folder / "expected.json").read_text())["facts"]
    loader = PackedMemmapLoader(folder / "packed", batch_size=64)
    assert facts["frames"] == loader.N
    energies, forces, numbers, positions = 0.0, 0.0, 0, 0.0
    for batch in loader.batches():
        energies += batch["E"].sum()
        forces += np.linalg.norm(batch["F"].astype(float), axis=-1).sum()
        numbers += int(batch["Z"].sum())
        positions += np.abs(batch["R"].astype(float)).sum()
    np.testing.assert_allclose(energies, facts["energies"]["E"]["sum"], rtol=1e-12)
    np.testing.assert_allclose(forces, facts["forces"]["F"]["sum_of_norms"], rtol=1e-9)
    np.testing.assert_allclose(positions, facts["sum_abs_positions"], rtol=1e-9)
    assert numbers == facts["sum_atomic_numbers"]


RSS = """
import sys
from alchemi_xr.data.packed_memmap_loader import PackedMemmapLoader
loader = PackedMemmapLoader(sys.argv[1], batch_size=64)
for _ in range(4):
    for batch in loader.batches():
        pass
print(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("RssAnon")))
"""


@pytest.mark.slow
def test_memory_does_not_follow_the_data(tmp_path: Path) -> None:
    peaks = []
    for number in (5_000, 20_000):
        path = write(tmp_path / str(number), [20] * number)
        out = subprocess.run(
            [sys.executable, "-c", RSS, str(path)], capture_output=True, text=True, check=True
        )
        peaks.append(int(out.stdout))
    assert peaks[1] < 1.1 * peaks[0]


def test_a_pickle_carries_no_data(tmp_path: Path) -> None:
    path = write(tmp_path / "p", [9] * 400)
    loader = PackedMemmapLoader(path, 4, seed=3)
    next(loader.batches())
    train, _ = split_loader(loader, 0.5)
    sent = pickle.dumps(train)
    assert len(sent) < 400 * 8
    again = pickle.loads(sent)
    for mine, theirs in zip(train.batches(), again.batches(), strict=True):
        np.testing.assert_array_equal(mine["R"], theirs["R"])

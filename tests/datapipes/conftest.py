"""Ragged samples, stores of them, and a watch on threads, for every test here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from alchemi_xr.data import AtomicData
from alchemi_xr.data.datapipes.prefetch import THREAD_PREFIX

MakeSamples = Callable[..., list[AtomicData]]


def make(count: int, *, seed: int = 0, edges: bool = True, holes: bool = False) -> list[AtomicData]:
    """Samples of 1 to 6 atoms whose energy is their number; with holes, odd ones lack fields."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        atoms = int(rng.integers(1, 7))
        fields = {
            "positions": torch.tensor(rng.normal(size=(atoms, 3)), dtype=torch.float32),
            "atomic_numbers": torch.tensor(rng.integers(1, 9, atoms)),
            "forces": torch.tensor(rng.normal(size=(atoms, 3)), dtype=torch.float32),
            "energy": torch.tensor([[float(number)]], dtype=torch.float64),
            "cell": torch.tensor(rng.normal(size=(1, 3, 3)), dtype=torch.float32),
            "pbc": torch.tensor(rng.integers(0, 2, (1, 3)), dtype=torch.bool),
        }
        if edges:
            pairs = int(rng.integers(0, 5))
            fields["neighbor_list"] = torch.tensor(rng.integers(0, atoms, (pairs, 2)))
        if holes and number % 2:
            for name in ("energy", "forces", "pbc"):
                del fields[name]
        samples.append(AtomicData(**fields))
    return samples


@pytest.fixture
def make_samples() -> MakeSamples:
    return make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of 23 samples, without holes."""
    from alchemi_xr.data.datapipes import AtomicDataZarrWriter

    path = tmp_path / "store.zarr"
    AtomicDataZarrWriter(path).write(make(23))
    return path


@pytest.fixture
def holed_store(tmp_path: Path) -> Path:
    """A store of 10 samples of which the odd ones lack energy, forces and pbc."""
    from alchemi_xr.data.datapipes import AtomicDataZarrWriter

    path = tmp_path / "holed.zarr"
    AtomicDataZarrWriter(path).write(make(10, holes=True))
    return path


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)]


@pytest.fixture
def no_threads() -> Iterator[Callable[[], list[str]]]:
    """Gives the names of our live threads; fails when one is left at the end."""
    assert our_threads() == []
    yield our_threads
    assert our_threads() == []


def same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value) or (
            value.is_floating_point() and torch.allclose(found[name], value, 0, 0, equal_nan=True)
        ), name


@pytest.fixture
def assert_same() -> Callable[[AtomicData, AtomicData], None]:
    """Two samples have the same fields, values and dtypes."""

    def check(found: AtomicData, expected: AtomicData) -> None:
        same_tensors(found.to_dict(), expected.to_dict())

    return check

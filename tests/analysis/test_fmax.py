"""Largest forces, and the front door of the room."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest

from alchemi_xr import analysis


def test_fmax_is_the_loop(store, chunks):
    rng = np.random.default_rng(0)
    sizes = [3, 0, 5, 1, 40_000]
    forces = rng.normal(size=(sum(sizes), 3)).astype(np.float32)
    ds = store([np.zeros((n, 3)) for n in sizes], 1, forces=forces, chunks=chunks)
    out = analysis.fmax(ds)
    assert out.dtype == np.float32
    assert out.attrs["units"] == "eV/Å"
    assert bool(out.chunks) == bool(chunks)
    ends = np.cumsum([0, *sizes])
    for i, n in enumerate(sizes):
        norm = np.linalg.norm(forces[ends[i] : ends[i + 1]].astype(float), axis=1)
        if n:
            assert float(out[i]) == pytest.approx(norm.max(), rel=1e-6)
        else:
            assert np.isnan(out[i])


def test_fmax_of_huge_tiny_and_missing(store):
    forces = np.array([[1e25, 0, 0], [3e-25, 0, 4e-25], [np.nan, 0, 0]], dtype=np.float32)
    out = analysis.fmax(store([np.zeros((1, 3))] * 3, forces=forces)).values
    np.testing.assert_allclose(out[:2], [1e25, 5e-25], rtol=1e-5)
    assert np.isnan(out[2])


def test_a_function_is_never_hidden_by_a_module():
    for name in analysis.__all__:
        module = getattr(analysis, name).__module__
        importlib.import_module(module)
        assert callable(getattr(analysis, name)), name


def test_neither_torch_nor_matplotlib_is_imported():
    code = (
        "import sys, alchemi_xr.analysis as a, alchemi_xr.analysis.plot\n"
        "[getattr(a, n) for n in a.__all__]\n"
        "print([m for m in ('torch', 'warp', 'matplotlib', 'vesin', 'pandas.plotting._matplotlib')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_no_samples_are_no_error(store, chunks):
    full = store([np.zeros((2, 3))], forces=np.zeros((2, 3)), energy=[1.0], chunks=chunks)
    ds = full.ragged.head(0)
    for name in (
        "angles",
        "baseline",
        "bond_lengths",
        "composition",
        "coordination",
        "duplicates",
        "fmax",
        "rdf",
        "statistics",
    ):
        getattr(analysis, name)(ds).compute()
    assert ds.ragged.map_blocks(lambda d: d.energy * 2).shape == (0,)
    assert ds.ragged.to_padded().forces.shape[0] == 0
    assert len(ds.ragged.to_dataframe()) == 0
    assert "samples  0" in repr(ds.ragged)

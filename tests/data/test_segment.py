"""Segment reductions in NumPy, torch and Warp against a loop over samples."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.kernels.segment import segment_reduce as reduce_tensor
from alchemi_xr.data.segment import OPS, segment_reduce
from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.testing.reference import segment_loop
from alchemi_xr.testing.strategies import DTYPES, ptrs, random_rows

TAILS = [(), (3,), (2, 2), (0,)]


def close(found, expected, dtype):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    rtol = {"float16": 2e-3, "float32": 1e-6}.get(dtype, 1e-12)
    np.testing.assert_allclose(
        found.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=rtol
    )


def with_nan(values, rng):
    if values.dtype.kind == "f" and values.size:
        values.flat[rng.integers(values.size)] = np.nan
    return values


@given(ptr=ptrs(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_every_version_equals_the_loop(op, tail, ptr, seed, dtype):
    rng = np.random.default_rng(seed)
    values = with_nan(random_rows(rng, (int(ptr[-1]), *tail), dtype), rng)
    if op in ("argmin", "argmax", "min", "max") and values.dtype.kind == "f":
        values = np.round(values)  # ties: the first counts
    if op in ("min", "max") and values.dtype.kind != "f" and (np.diff(ptr) == 0).any():
        with pytest.raises(FieldError, match="initial"):
            segment_reduce(values, ptr, op)
        for backend in ("torch", "warp"):
            with pytest.raises(FieldError, match="initial"):
                reduce_tensor(torch.from_numpy(values), torch.from_numpy(ptr), op, backend=backend)
        return
    expected = segment_loop(values, ptr, op)
    close(segment_reduce(values, ptr, op), expected, dtype)
    for backend in ("torch", "warp"):
        found = reduce_tensor(torch.from_numpy(values), torch.from_numpy(ptr), op, backend=backend)
        close(found.numpy(), expected, dtype)


@given(ptr=ptrs(min_samples=1), seed=st.integers(0, 1000), dtype=st.sampled_from(DTYPES))
def test_initial_takes_part(ptr, seed, dtype):
    values = random_rows(np.random.default_rng(seed), (int(ptr[-1]), 2), dtype)
    for op, pick in (("min", np.minimum), ("max", np.maximum)):
        rows = [values[a:b] for a, b in itertools.pairwise(ptr)]
        one = np.array(1, dtype=dtype)
        expected = np.array([pick.reduce([*r, np.full(2, one)], axis=0) for r in rows])
        np.testing.assert_array_equal(segment_reduce(values, ptr, op, initial=1), expected)
        for backend in ("torch", "warp"):
            found = reduce_tensor(
                torch.from_numpy(values), torch.from_numpy(ptr), op, initial=1, backend=backend
            )
            np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("backend", ["torch", "warp"])
def test_bfloat16(backend):
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    found = reduce_tensor(values, torch.tensor([0, 2, 2, 3]), "mean", backend=backend)
    assert found.dtype == torch.bfloat16
    assert found[:1].tolist() == [1.5]
    assert found[1].isnan()


def test_float32_is_summed_in_double():
    values = np.full(10_000_001, 0.1, dtype=np.float32)
    expected = np.float32(values.astype(np.float64).sum())
    ptr = np.array([0, len(values)])
    assert segment_reduce(values, ptr, "sum")[0] == expected
    assert reduce_tensor(torch.from_numpy(values), torch.from_numpy(ptr), "sum")[0] == expected


@pytest.mark.parametrize("op", ["sum", "mean", "norm", "min", "max"])
def test_gradients(op):
    values = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values.requires_grad_()
    ptr = torch.tensor([0, 2, 6])
    assert torch.autograd.gradcheck(lambda v: reduce_tensor(v, ptr, op), (values,))


def test_errors_name_the_cause():
    values = np.zeros(3)
    with pytest.raises(FieldError, match="does not end at the rows"):
        segment_reduce(values, np.array([0, 2]), "sum")
    with pytest.raises(FieldError, match="does not end at the rows"):
        reduce_tensor(torch.zeros(3), torch.tensor([0, 2]), "sum")
    with pytest.raises(ConfigError, match="median"):
        segment_reduce(values, np.array([0, 3]), "median")
    with pytest.raises(ConfigError, match="backend"):
        reduce_tensor(torch.zeros(3), torch.tensor([0, 3]), "sum", backend="cuda")
    with pytest.raises(FieldError, match="sample 1 has no rows"):
        segment_reduce(np.array([1]), np.array([0, 1, 1]), "min")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_cuda_equals_the_loop(op, dtype):
    rng = np.random.default_rng(3)
    ptr = np.array([0, 5, 6, 300])
    values = random_rows(rng, (300, 3), dtype)
    for backend in ("torch", "warp"):
        found = reduce_tensor(
            torch.from_numpy(values).cuda(), torch.from_numpy(ptr).cuda(), op, backend=backend
        )
        close(found.cpu().numpy(), segment_loop(values, ptr, op), dtype)

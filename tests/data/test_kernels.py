"""Gather and compaction: torch, Warp and NumPy move the same bits."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data.csr import take_rows
from alchemi_xr.data.kernels.compact import compact_rows, fitting, put_rows
from alchemi_xr.data.kernels.gather import gather_rows, row_positions
from alchemi_xr.errors import FieldError
from alchemi_xr.testing.reference import gather_loop, greedy_fit
from alchemi_xr.testing.strategies import DTYPES, ptrs, random_rows

TORCH_ONLY = [torch.bfloat16, torch.complex64, torch.complex128]


@given(data=st.data(), ptr=ptrs(min_samples=1), seed=st.integers(0, 1000))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [(), (3,), (2, 4), (0,)], ids=str)
def test_gather(dtype, tail, data, ptr, seed):
    num = len(ptr) - 1
    samples = np.array(data.draw(st.lists(st.integers(0, num - 1), max_size=2 * num)), np.int64)
    values = random_rows(np.random.default_rng(seed), (int(ptr[-1]), *tail), dtype)
    expected, new = gather_loop(values, ptr, samples)
    rows, numpy_new = take_rows(values, ptr, samples)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(numpy_new, new)
    for backend in ("torch", "warp"):
        for total in (None, int(new[-1])):
            found, found_new = gather_rows(
                torch.from_numpy(values),
                torch.from_numpy(ptr),
                torch.from_numpy(samples),
                total=total,
                backend=backend,
            )
            assert found.dtype == torch.from_numpy(values).dtype
            np.testing.assert_array_equal(found.numpy(), expected)
            np.testing.assert_array_equal(found_new.numpy(), new)


@pytest.mark.parametrize("backend", ["torch", "warp"])
@pytest.mark.parametrize("dtype", TORCH_ONLY, ids=str)
def test_gather_of_dtypes_without_numpy_kin(dtype, backend):
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[2, 0] = float("nan")
    rows, _ = gather_rows(values, torch.tensor([0, 2, 5]), torch.tensor([1, 0]), backend=backend)
    torch.testing.assert_close(rows, values[[2, 3, 4, 0, 1]], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "warp"])
def test_gather_from_a_window(backend):
    # A window that starts off the widest word must not be read from there.
    base = torch.arange(40, dtype=torch.float32)
    for values in (base[1:31].reshape(10, 3), base.reshape(4, 10).T[:, 1:3]):
        rows, _ = gather_rows(values, torch.tensor([0, 4, 10]), torch.tensor([1]), backend=backend)
        assert torch.equal(rows, values[4:])


def test_gather_has_gradients_and_never_on_warp():
    values = torch.randn(4, 2, requires_grad=True)
    rows, _ = gather_rows(values, torch.tensor([0, 1, 4]), torch.tensor([1, 1]), backend="warp")
    rows.sum().backward()
    assert values.grad[:, 0].tolist() == [0, 2, 2, 2]


def test_row_positions_of_nothing():
    rows, new = row_positions(torch.tensor([0, 2]), torch.zeros(0, dtype=torch.int64))
    assert rows.tolist() == []
    assert new.tolist() == [0]


@given(
    counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=12),
    room=st.tuples(st.integers(0, 12), st.integers(0, 20), st.integers(0, 20)),
)
def test_fitting_is_greedy(counts, room):
    atoms, edges = (np.array([c[i] for c in counts], np.int64) for i in (0, 1))
    columns = [np.ones(len(counts), np.int64), atoms, edges]
    assert fitting(columns, room).tolist() == greedy_fit([c.tolist() for c in columns], room)


@pytest.mark.parametrize("backend", ["torch", "warp"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_put_and_compact(dtype, backend):
    rng = np.random.default_rng(5)
    values = random_rows(rng, (7, 3), dtype)
    ptr, samples = np.array([0, 2, 2, 5, 7]), np.array([3, 0])
    expected, _ = gather_loop(values, ptr, samples)
    buffer = torch.zeros(9, 3, dtype=torch.from_numpy(values).dtype)
    written = put_rows(
        buffer,
        torch.from_numpy(values),
        torch.from_numpy(ptr),
        torch.from_numpy(samples),
        at=2,
        backend=backend,
    )
    assert written == 4
    np.testing.assert_array_equal(buffer[2:6].numpy(), expected)
    assert not buffer[:2].any()
    assert not buffer[6:].any()
    kept = torch.from_numpy(values.copy())
    new = compact_rows(kept, torch.from_numpy(ptr), torch.tensor([0, 2]), backend=backend)
    assert new.tolist() == [0, 2, 5]
    np.testing.assert_array_equal(kept[:5].numpy(), values[[0, 1, 2, 3, 4]])
    assert not kept[5:].any()


def test_put_refuses_what_does_not_fit():
    src, ptr, one = torch.zeros(2, 3), torch.tensor([0, 2]), torch.tensor([0])
    with pytest.raises(FieldError, match="do not fit"):
        put_rows(torch.zeros(1, 3), src, ptr, one)
    with pytest.raises(FieldError, match="different shapes"):
        put_rows(torch.zeros(4, 2), src, ptr, one)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_on_cuda(dtype):
    values = random_rows(np.random.default_rng(0), (50, 3), dtype)
    ptr, samples = np.array([0, 20, 20, 50]), np.array([2, 1, 0])
    expected, _ = gather_loop(values, ptr, samples)
    for backend in ("torch", "warp"):
        rows, _ = gather_rows(
            torch.from_numpy(values).cuda(),
            torch.from_numpy(ptr).cuda(),
            torch.from_numpy(samples).cuda(),
            backend=backend,
        )
        np.testing.assert_array_equal(rows.cpu().numpy(), expected)


def test_warp_starts_in_silence():
    """Without a GPU it would tell every user about a driver that is not there."""
    code = "from alchemi_xr.data.kernels._warp import start_warp; start_warp()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == ""


def test_other_words_on_the_error_stream_are_kept(capfd):
    from alchemi_xr.data.kernels._warp import _without_driver_remark

    with _without_driver_remark():
        os.write(2, b"Warp: Could not load the NVIDIA CUDA driver.\nsomething worse\n")
    assert capfd.readouterr().err == "something worse\n"
    with pytest.raises(KeyError), _without_driver_remark():
        os.write(2, b"before it failed\n")
        raise KeyError
    assert capfd.readouterr().err == "before it failed\n"

"""Stores of frames and structures for the tests of analysis."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.ragged import open_dataset
from alchemi_xr.store.writer import StoreWriter

CHUNKS = [None, 3]


@pytest.fixture
def store(tmp_path):
    """Writes samples, gives the opened Dataset: positions is [F, A, 3] or a list of [A, 3]."""
    number = itertools.count()

    def write(positions, numbers=1, *, chunks=None, levels=None, **fields):
        counts = np.array([len(p) for p in positions], dtype=np.int64)
        ptr = counts_to_ptr(counts)
        flat = np.concatenate([np.asarray(p).reshape(-1, 3) for p in positions])
        if np.ndim(numbers) == 0:
            numbers = np.full(len(flat), numbers)
        elif len(np.ravel(numbers)) != len(flat):
            numbers = np.tile(numbers, len(counts))
        arrays = {"positions": flat, "atomic_numbers": np.asarray(numbers).astype(np.int64)}
        own = {"positions": "atom", "atomic_numbers": "atom"}
        for name, values in fields.items():
            level = (levels or {}).get(name) or (FIELDS[name].level if name in FIELDS else "system")
            values = np.asarray(values)
            if name == "cell" and values.ndim == 2:
                values = np.tile(values, (len(counts), 1, 1))
            if name == "pbc" and values.ndim <= 1:
                values = np.tile(np.broadcast_to(values, 3), (len(counts), 1))
            if level == "system" and name in ("energy", "system_id"):
                values = values.reshape(-1, 1)
            if level == "atom":
                values = values.reshape(
                    len(flat),
                    *values.shape[values.ndim - (values.shape[-1] == 3 and values.ndim > 1) :],
                )
            arrays[name], own[name] = values, level
        path = str(tmp_path / f"{next(number)}.zarr")
        block = Block(ptr, np.zeros_like(ptr), arrays, own)
        StoreWriter(path).write(block.validate())
        return open_dataset(path, chunks=chunks)

    return write


@pytest.fixture(params=CHUNKS, ids=["plain", "dask"])
def chunks(request):
    return request.param

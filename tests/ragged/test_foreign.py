"""Stores that nvalchemi-toolkit wrote open as Datasets, with edges numbered within their sample."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from alchemi_xr.errors import CorruptStoreError
from alchemi_xr.ragged import open_dataset

pytestmark = pytest.mark.compat


@pytest.fixture
def toolkit_stores(shared, tmp_path):
    source = shared / "fixtures" / "toolkit_stores"
    if not source.is_dir():
        pytest.skip("no toolkit stores among the shared inputs")
    return shutil.copytree(source, tmp_path / "toolkit")


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("name", ["ragged", "sharded", "soft_deleted", "appended"])
def test_every_sample_is_what_was_put_in(toolkit_stores, name, chunks):
    expected = json.loads((toolkit_stores / "expected.json").read_text())["stores"][name]
    ds = open_dataset(toolkit_stores / f"{name}.zarr", chunks=chunks)
    samples = [s for s in expected["samples"] if s is not None]
    assert ds.ragged.num_samples == len(samples)
    for i, (got, want) in enumerate(zip(ds.ragged.iter_samples(), samples, strict=True)):
        for field, facts in want.items():
            values = got[field].values
            assert values.size == np.prod(facts["shape"]), (i, field)
            assert str(values.dtype) == facts["dtype"], (i, field)
            np.testing.assert_allclose(
                values.astype(float).sum(), facts["sum"], rtol=1e-5, atol=1e-5
            )
            if facts["first_row"] is not None and values.size:
                first = values.reshape(-1)[: len(np.ravel(facts["first_row"]))]
                np.testing.assert_allclose(first, np.ravel(facts["first_row"]), rtol=1e-6)


def test_a_torn_store_is_told(toolkit_stores):
    with pytest.raises(CorruptStoreError, match="forces"):
        open_dataset(toolkit_stores / "torn_v020.zarr")

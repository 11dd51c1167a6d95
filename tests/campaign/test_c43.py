"""Case C43: 200 systems of which three fail, then none, then all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alchemi_xr.campaign import Campaign
from alchemi_xr.errors import CampaignError
from alchemi_xr.store import StoreWriter


@pytest.fixture
def case(shared):
    path = shared / "cases" / "C43-campaign-with-failures" / "expected.json"
    return json.loads(path.read_text(encoding="utf-8"))["expected"]


@pytest.fixture
def source(tmp_path, case, make_clusters):
    path = tmp_path / "many.zarr"
    StoreWriter(str(path)).write(make_clusters(case["n"], sizes=(2, 5)))
    return path


def test_c43_campaign_with_failures(source, case, faulty, tmp_path, read):
    n, fails = case["n"], case["fail_ids"]
    tags = [i**2 for i in fails]

    def run(stages, **options):
        return Campaign(
            source,
            stages,
            tmp_path / "r.zarr",
            workers=0,
            max_batch_size=50,
            unit_size=50,
            **options,
        ).run()

    report = run(faulty(tags, n_steps=3))
    assert (report.finished, report.rejected) == (n - 3, 3)
    assert read(tmp_path / "r.zarr").num_samples == n - 3
    rejects = [
        json.loads(line) for line in (report.directory / "rejects.jsonl").read_text().splitlines()
    ]
    assert sorted(r["dataset_index"] for r in rejects) == fails
    assert all("SCF did not converge" in r["reason"] for r in rejects)
    assert all("Traceback" in r["traceback"] for r in rejects)

    first = read(tmp_path / "r.zarr")
    report = run(faulty(n_steps=3))
    assert (report.computed, report.finished, report.rejected) == (3, n, 0)
    second = read(tmp_path / "r.zarr")
    assert second["dataset_index"].ravel().tolist() == list(range(n))
    kept = np.setdiff1d(np.arange(n), fails)
    np.testing.assert_array_equal(second["energy"][kept], first["energy"])

    with pytest.raises(CampaignError, match=r"2\d of 200 samples failed"):
        run(faulty([i**2 for i in range(n)], n_steps=3), overwrite=True)
    assert len(list((report.directory / "units").iterdir())) == 0

"""``alchemi-xr campaign status``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from alchemi_xr.campaign import Campaign
from alchemi_xr.cli.main import app


@pytest.fixture
def directory(clusters, faulty, tmp_path):
    stages = faulty([4], n_steps=2)  # the tag of the third
    report = Campaign(clusters, stages, tmp_path / "r.zarr", workers=0).run()
    return str(report.directory)


def test_status_says_where_it_stands(directory):
    result = CliRunner().invoke(app, ["campaign", "status", directory])
    assert result.exit_code == 0
    assert "finished, results merged" in result.stdout
    assert "29 of 30 finished, 1 set aside" in result.stdout
    assert "sample 2: ValueError: SCF did not converge" in result.stdout
    result = CliRunner().invoke(app, ["campaign", "status", directory, "--json", "--rejects", "0"])
    facts = json.loads(result.stdout)
    assert (facts["finished"], facts["rejected"], facts["recent"]) == (29, 1, [])


def test_no_campaign_is_exit_code_1(tmp_path):
    result = CliRunner().invoke(app, ["campaign", "status", str(tmp_path)])
    assert result.exit_code == 1
    assert "no campaign here" in result.stderr


def test_status_needs_neither_torch_nor_dask(tmp_path):
    code = (
        "import sys\n"
        "from alchemi_xr.campaign import campaign_status\n"
        "assert not {'torch', 'dask', 'distributed'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Campaigns on Dask workers: the same results, also when processes are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import cloudpickle
import numpy as np
import pytest

from alchemi_xr.campaign import Campaign, campaign_status
from alchemi_xr.campaign.results import CampaignFolder
from alchemi_xr.errors import CampaignError, ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture
def model_kind():
    return "ase"  # spares each worker the start of Warp


@pytest.fixture
def whole(clusters, relax, tmp_path, read):
    """Results and frames of an undisturbed campaign in this process."""
    folder = tmp_path / "whole"
    folder.mkdir()
    Campaign(
        clusters,
        relax,
        folder / "r.zarr",
        trajectory=folder / "t.zarr",
        workers=0,
        max_batch_size=6,
    ).run()
    return read(folder / "r.zarr"), read(folder / "t.zarr")


@pytest.fixture
def campaign(clusters, tmp_path):
    def make(stages, **options):
        settings = {"workers": 2, "max_batch_size": 6, "unit_size": 8, **options}
        return Campaign(
            clusters, stages, tmp_path / "r.zarr", trajectory=tmp_path / "t.zarr", **settings
        )

    return make


@pytest.mark.kill
def test_a_killed_worker_s_unit_is_redone_elsewhere(
    campaign, clusters, faulty, tmp_path, read, whole, assert_same
):
    tags = read(clusters)["tag"].ravel()[[11]].tolist()
    report = campaign(faulty(tags, "kill", once=str(tmp_path / "killed"))).run()
    assert (tmp_path / "killed").exists()
    assert (report.finished, report.rejected, report.lost) == (30, 0, 1)
    assert_same(read(tmp_path / "r.zarr"), whole[0])
    assert_same(read(tmp_path / "t.zarr"), whole[1])
    lost = [line for line in CampaignFolder(report.directory).journal() if line["event"] == "lost"]
    assert "worker died" in lost[0]["reason"]
    left = [p.name for p in (report.directory / "units").iterdir() if p.name.startswith(".")]
    assert left == []


@pytest.mark.kill
def test_a_system_that_always_kills_is_found_and_set_aside(
    campaign, clusters, faulty, tmp_path, read, whole, assert_same
):
    tags = read(clusters)["tag"].ravel()[[5]].tolist()
    report = campaign(faulty(tags, "kill"), unit_size=4, max_attempts=1).run()
    (reject,) = report.rejects
    assert (reject.dataset_index, reject.kind) == (5, "worker")
    assert "its worker died" in reject.reason
    # The unit, its half, the system alone; a unit that had just been sent to a worker
    # that dies is lost with it.
    assert report.finished == 29
    assert report.lost >= 3
    assert_same(read(tmp_path / "r.zarr"), whole[0])


DRIVER = """
    import sys
    import cloudpickle

    if __name__ == "__main__":
        source, stages, results, trajectory = sys.argv[1:]
        from alchemi_xr.campaign import Campaign

        with open(stages, "rb") as file:
            stages = cloudpickle.load(file)
        Campaign(source, stages, results, trajectory=trajectory, workers=1, unit_size=4,
                 max_batch_size=6, progress=False).run()
"""


@pytest.mark.kill
def test_a_killed_driver_goes_on_where_it_was(
    campaign, clusters, relax, tmp_path, read, whole, assert_same
):
    script, pickled = tmp_path / "driver.py", tmp_path / "stages.pkl"
    script.write_text(textwrap.dedent(DRIVER))
    pickled.write_bytes(cloudpickle.dumps(relax))
    arguments = [clusters, pickled, tmp_path / "r.zarr", tmp_path / "t.zarr"]
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    directory = tmp_path / "r.zarr.campaign"
    deadline = time.monotonic() + 240
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if (directory / "campaign.json").exists() and campaign_status(directory).units >= 2:
                break
            time.sleep(0.02)
        assert process.poll() is None, process.stderr.read().decode()
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
    before = campaign_status(directory)
    assert 8 <= before.finished < 30
    assert not (tmp_path / "r.zarr").exists()
    report = campaign(relax, workers=0).run()
    assert report.finished == 30
    assert report.computed <= 30 - before.finished
    assert_same(read(tmp_path / "r.zarr"), whole[0])
    assert_same(read(tmp_path / "t.zarr"), whole[1])


def test_a_client_is_used_as_it_is_and_left_open(campaign, clusters, faulty, tmp_path, read):
    from distributed import Client, LocalCluster

    tags = read(clusters)["tag"].ravel()[[5, 9]].tolist()
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        report = campaign(faulty(tags), workers=client).run()
        assert client.status == "running"
        assert (report.finished, report.rejected) == (28, 2)
        again = campaign(faulty(), workers=cluster.scheduler_address).run()
        assert (again.computed, again.finished) == (2, 30)
        with pytest.raises(CampaignError, match="samples failed"):
            campaign(
                faulty(np.arange(40) ** 2), workers=client, overwrite=True, max_failures=2
            ).run()
        assert client.submit(int, 3).result() == 3


def test_an_address_without_scheduler_is_said(campaign, relax):
    with pytest.raises(ConfigError, match="no scheduler answers at 'tcp"):
        campaign(relax, workers="tcp://127.0.0.1:9").run()

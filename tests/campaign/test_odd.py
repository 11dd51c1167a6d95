"""Campaigns that cannot be meant: told before anything is touched."""

from __future__ import annotations

import threading

import pytest

from alchemi_xr.campaign import Campaign
from alchemi_xr.campaign.results import CampaignFolder
from alchemi_xr.campaign.state import failure_limit
from alchemi_xr.errors import CampaignError, ConfigError
from alchemi_xr.store import open_store


def _run(source, stages, results, **options):
    return Campaign(source, stages, results, workers=0, progress=False, **options).run()


@pytest.mark.parametrize(
    "places",
    [
        {"results": "clusters.zarr"},
        {"results": "link"},
        {"results": "clusters.zarr/core/r.zarr"},
        {"directory": "clusters.zarr"},
        {"directory": "clusters.zarr/campaign"},
        {"trajectory": "clusters.zarr"},
        {"trajectory": "r.zarr"},
        {"trajectory": "r.zarr/t.zarr"},
        {"directory": "r.zarr"},
    ],
)
def test_source_results_and_folder_lie_apart(clusters, relax, tmp_path, places):
    (tmp_path / "link").symlink_to(clusters)
    before = open_store(str(clusters)).generation
    paths = {name: tmp_path / place for name, place in places.items()}
    results = paths.pop("results", tmp_path / "r.zarr")
    with pytest.raises(ConfigError, match="overlap"):
        _run(clusters, relax, results, overwrite=True, **paths)
    after = open_store(str(clusters))
    assert (after.generation, "steps" in after.fields) == (before, False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clusters.zarr", "link"]


def test_stages_that_do_not_pickle_are_told(clusters, relax, tmp_path):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"stages: cannot be sent to a worker.*lock"):
        _run(clusters, lambda: lock and relax(), tmp_path / "r.zarr")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("unit_size", "x"),
        ("unit_size", 1.5),
        ("max_failures", "x"),
        ("max_failures", float("nan")),
        ("max_force", "x"),
        ("config", 5),
    ],
)
def test_options_of_a_wrong_kind_are_told_at_once(clusters, relax, tmp_path, option, value):
    with pytest.raises(ConfigError, match=option):
        Campaign(clusters, relax, tmp_path / "r.zarr", **{option: value})


def test_an_address_that_is_none_is_told(clusters, relax, tmp_path):
    with pytest.raises(ConfigError, match="no scheduler answers at 'nope'"):
        Campaign(clusters, relax, tmp_path / "r.zarr", workers="nope", progress=False).run()


def test_a_folder_where_nothing_can_be_kept_is_told(clusters, relax, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CampaignError, match="no campaign can be kept there"):
        _run(clusters, relax, tmp_path / "r.zarr", directory=tmp_path / "file")


def test_a_document_under_way_is_no_foreign_file(clusters, relax, tmp_path):
    folder = CampaignFolder(tmp_path / "r.zarr.campaign")
    folder.acquire()
    (folder.path / ".campaign.json.1234").write_text("{")
    with pytest.raises(CampaignError, match="is being run by"):
        _run(clusters, relax, tmp_path / "r.zarr")
    folder.release()


def test_limits_are_numbers():
    with pytest.raises(ConfigError, match="max_failures"):
        failure_limit(True, 3)

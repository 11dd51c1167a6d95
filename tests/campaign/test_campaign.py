"""Campaigns in this process (``workers=0``): results, failures, resuming."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from alchemi_xr.campaign import Campaign, campaign_status
from alchemi_xr.campaign.worker import is_out_of_memory
from alchemi_xr.data import Batch
from alchemi_xr.errors import CampaignError, ConfigError, StoreExistsError
from alchemi_xr.store import StoreWriter, open_store


def run(source, stages, path, **options):
    settings = {"workers": 0, "max_batch_size": 6, "unit_size": 10, **options}
    return Campaign(source, stages, path / "r.zarr", **settings).run()


@pytest.fixture
def whole(clusters, relax, tmp_path, read):
    """What an undisturbed campaign over the clusters gives: results and frames."""
    folder = tmp_path / "whole"
    folder.mkdir()
    run(clusters, relax, folder, trajectory=folder / "t.zarr", unit_size=100)
    return read(folder / "r.zarr"), read(folder / "t.zarr")


def test_every_sample_once_in_order_as_if_run_alone(clusters, relax, tmp_path, read):
    """C39 for a whole campaign: ids, user fields and the path of each system."""
    report = run(clusters, relax, tmp_path, trajectory=tmp_path / "t.zarr")
    assert (report.total, report.finished, report.rejected, report.units) == (30, 30, 0, 3)
    assert report.ok
    results, source = read(tmp_path / "r.zarr"), read(clusters)
    assert results["dataset_index"].ravel().tolist() == list(range(30))
    for name in ("tag", "name", "atomic_numbers"):
        assert results[name].tolist() == source[name].tolist()
    for i in (0, 7, 29):
        batch = Batch.from_block(
            source.slice(i, i + 1).select_fields(["positions", "atomic_numbers", "tag"])
        )
        stage = relax()
        alone = stage.run(batch)
        mine = results.slice(i, i + 1)
        np.testing.assert_allclose(mine["energy"], alone["energy"].numpy(), atol=1e-8, rtol=0)
        np.testing.assert_allclose(mine["positions"], alone["positions"].numpy(), atol=1e-7)
        assert mine["steps"][0] == stage.step_count
        assert mine["fmax"][0, 0] == pytest.approx(
            np.linalg.norm(mine["forces"], axis=1).max(), abs=0
        )
    # Some end by their force, some by their number of steps.
    assert 0 < (results["steps"] < 30).sum() < 30
    assert open_store(str(tmp_path / "r.zarr")).unit("energy_initial") == "eV"


def test_frames_show_every_step_of_every_system(clusters, relax, tmp_path, read):
    run(clusters, relax, tmp_path, trajectory=tmp_path / "t.zarr")
    results, frames, source = read(tmp_path / "r.zarr"), read(tmp_path / "t.zarr"), read(clusters)
    system, step = frames["dataset_index"].ravel(), frames["step"].ravel()
    expected = [(i, s) for i, n in enumerate(results["steps"]) for s in range(n + 1)]
    assert list(zip(system.tolist(), step.tolist(), strict=True)) == expected
    last = np.flatnonzero(np.diff(system, append=-1))
    np.testing.assert_array_equal(frames["energy"][last], results["energy"])
    np.testing.assert_array_equal(frames.take(last)["positions"], results["positions"])
    first = np.flatnonzero(step == 0)
    np.testing.assert_array_equal(frames.take(first)["positions"], source["positions"])
    np.testing.assert_array_equal(frames["energy"][first].ravel(), results["energy_initial"])


def test_fewer_frames_still_hold_first_and_last(clusters, relax, tmp_path, read):
    run(clusters, relax, tmp_path, trajectory=tmp_path / "t.zarr", trajectory_every=8)
    results, frames = read(tmp_path / "r.zarr"), read(tmp_path / "t.zarr")
    system, step = frames["dataset_index"].ravel(), frames["step"].ravel()
    for i, n in enumerate(results["steps"]):
        assert step[system == i].tolist() == sorted({*range(0, n + 1, 8), n})


def test_units_and_batches_change_nothing(clusters, relax, tmp_path, read, whole, assert_same):
    run(clusters, relax, tmp_path, trajectory=tmp_path / "t.zarr", unit_size=7, max_batch_size=3)
    assert_same(read(tmp_path / "r.zarr"), whole[0])
    assert_same(read(tmp_path / "t.zarr"), whole[1])


@pytest.mark.parametrize("how", ["raise", "late", "nan"])
def test_a_failing_system_does_not_take_its_batch_down(
    clusters, faulty, tmp_path, read, whole, assert_same, how
):
    bad = [2, 13, 14]
    tags = read(clusters)["tag"].ravel()[bad].tolist()
    stages = faulty(tags, how)
    report = run(clusters, stages, tmp_path, trajectory=tmp_path / "t.zarr", max_failures=5)
    assert (report.finished, report.rejected, report.ok) == (27, 3, False)
    rejects = list(report.rejects)
    assert [r.dataset_index for r in rejects] == bad
    for reject in rejects:
        if how != "nan":
            assert reject.kind == "error"
            assert "ValueError: SCF did not converge" in reject.reason
            assert "forward" in reject.traceback
        else:
            assert (reject.kind, reject.reason) == (
                "non-finite",
                "energy or forces are not finite (step 0)",
            )
    lines = (report.directory / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["dataset_index"] for line in lines] == bad
    assert_same(read(tmp_path / "r.zarr"), whole[0])
    frames = read(tmp_path / "t.zarr")
    assert not np.isin(frames["dataset_index"], bad).any()
    assert_same(frames, _without(whole[1], bad))
    # NaN leaves alone, without a second try of the others.
    assert (report.retries > 0) == (how != "nan")


def _without(block, ids):
    return block.take(np.flatnonzero(~np.isin(block["dataset_index"].ravel(), ids)))


def test_the_next_run_computes_only_what_failed(
    clusters, relax, faulty, tmp_path, read, whole, assert_same
):
    tags = read(clusters)["tag"].ravel()[[2, 13]].tolist()
    run(clusters, faulty(tags), tmp_path)
    report = run(clusters, relax, tmp_path)
    assert (report.computed, report.finished, report.rejected) == (2, 30, 0)
    assert_same(read(tmp_path / "r.zarr"), whole[0])
    assert list(report.rejects) == []
    again = run(clusters, relax, tmp_path)
    assert (again.computed, again.finished) == (0, 30)


def test_rejects_are_left_when_asked(clusters, relax, faulty, tmp_path, read):
    tags = read(clusters)["tag"].ravel()[[2]].tolist()
    run(clusters, faulty(tags), tmp_path)
    report = run(clusters, relax, tmp_path, retry_rejected=False)
    assert (report.computed, report.finished, report.rejected) == (0, 29, 1)


def test_memory_that_runs_out_halves_the_batch(
    clusters, faulty, tmp_path, read, whole, assert_same
):
    report = run(clusters, faulty(how="memory"), tmp_path)
    assert report.ok
    # 6 at once, then 3, then 1: twice a unit.
    assert report.retries == 6
    assert_same(read(tmp_path / "r.zarr"), whole[0])


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA out of memory. Tried"), True),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory"), True),
        (ValueError("out of memory"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_memory):
    assert is_out_of_memory(error) is is_memory


def test_an_exploding_system_is_set_aside(clusters, relax, tmp_path, read):
    writer = StoreWriter(str(clusters))
    block = read(clusters).slice(0, 1)
    block.arrays["positions"] = block["positions"] * 0.2
    writer.append(block)
    report = run(clusters, relax, tmp_path, max_force=1e3)
    (reject,) = report.rejects
    assert reject.dataset_index == 30
    assert "a force is above 1000.0 eV/Å" in reject.reason
    assert report.finished == 30


def test_positions_that_are_no_numbers_are_set_aside(clusters, relax, tmp_path, read):
    block = read(clusters).slice(3, 4)
    block.arrays["positions"] = np.full_like(block["positions"], np.nan)
    StoreWriter(str(clusters)).append(block)
    report = run(clusters, relax, tmp_path)
    (reject,) = report.rejects
    assert (reject.dataset_index, reject.kind) == (30, "input")
    assert "positions" in reject.reason


def test_a_system_above_max_atoms_is_set_aside(clusters, relax, tmp_path, read):
    report = run(clusters, relax, tmp_path, max_atoms=7, max_batch_size=None, max_failures=None)
    sizes = np.diff(read(clusters).atoms_ptr)
    assert [r.dataset_index for r in report.rejects] == np.flatnonzero(sizes > 7).tolist()
    assert all(f"{sizes[r.dataset_index]} atoms" in r.reason for r in report.rejects)


def test_fused_stages_run_as_they_are(clusters, relax, tmp_path, read):
    def stages():
        from alchemi_xr.dynamics import DemoDynamics

        first = relax()
        return first + DemoDynamics(first.model, n_steps=5, dt=0.5)

    report = run(clusters, stages, tmp_path)
    results = read(tmp_path / "r.zarr")
    assert report.finished == 30
    assert (results["status"] == 2).all()
    assert results["steps"].max() == 35
    assert "velocities" in results


def test_all_failing_stops_early_and_says_so(clusters, faulty, tmp_path, read):
    stages = faulty(read(clusters)["tag"].ravel().tolist())
    with pytest.raises(CampaignError, match=r"4 of 30 samples failed.*SCF did not converge"):
        run(clusters, stages, tmp_path)
    assert not (tmp_path / "r.zarr").exists()
    lines = (tmp_path / "r.zarr.campaign" / "rejects.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert "SCF did not converge" in lines[0]


def test_nothing_finished_is_an_error_whatever_the_limit(clusters, faulty, tmp_path, read):
    stages = faulty(read(clusters)["tag"].ravel().tolist(), "nan")
    with pytest.raises(CampaignError, match="none of 30 samples finished"):
        run(clusters, stages, tmp_path, max_failures=None)


def _broken():
    raise KeyError("weights.pt")


def _endless():
    from alchemi_xr.dynamics import FIRE
    from alchemi_xr.models import LennardJonesModel

    return FIRE(LennardJonesModel(epsilon=0.01, sigma=3.4, cutoff=8.0))


def _endless_and_watched():
    from alchemi_xr.dynamics.hooks import NaNDetectorHook

    stage = _endless()
    stage.register_hook(NaNDetectorHook())  # only looks, so it ends nothing
    return stage


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (lambda: _broken(), "the stages cannot be built: KeyError: 'weights.pt'"),
        (lambda: "no dynamics", "must return a dynamics or fused stage"),
        (lambda: _endless(), "nothing ends the stage of status 0"),
        (lambda: _endless_and_watched(), "nothing ends the stage of status 0"),
    ],
)
def test_stages_that_cannot_be_built_blame_no_system(clusters, tmp_path, stages, text):
    with pytest.raises(CampaignError, match=text):
        run(clusters, stages, tmp_path)
    assert campaign_status(tmp_path / "r.zarr.campaign").rejected == 0


def test_a_full_disk_blames_no_system(clusters, relax, tmp_path, monkeypatch):
    from alchemi_xr.campaign.results import UnitWriter

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(UnitWriter, "commit", full)
    with pytest.raises(CampaignError, match=r"cannot be run: OSError.*No space left"):
        run(clusters, relax, tmp_path)
    assert campaign_status(tmp_path / "r.zarr.campaign").rejected == 0
    monkeypatch.undo()
    assert run(clusters, relax, tmp_path).finished == 30


def test_an_empty_source_gives_no_store(clusters, relax, tmp_path):
    StoreWriter(str(clusters)).delete([i for i in range(31) if i != 4])
    report = run(clusters, relax, tmp_path)
    assert (report.total, report.finished, report.results) == (0, 0, None)
    with pytest.raises(CampaignError, match="no table"):
        report.table()


def test_a_stop_between_units_changes_nothing(
    clusters, relax, tmp_path, read, whole, assert_same, monkeypatch
):
    from alchemi_xr.campaign import driver

    real, calls = driver._event, []

    def stop_at_the_second(outcome):
        calls.append(outcome.key)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(outcome)

    monkeypatch.setattr(driver, "_event", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(clusters, relax, tmp_path)
    monkeypatch.undo()
    status = campaign_status(tmp_path / "r.zarr.campaign")
    assert (status.finished, status.units, status.running, status.merged) == (20, 2, False, False)
    # Other units than before: what is there counts, not how it was cut.
    report = run(clusters, relax, tmp_path, unit_size=4)
    assert (report.computed, report.finished) == (10, 30)
    assert_same(read(tmp_path / "r.zarr"), whole[0])


def test_a_stop_in_the_merge_changes_nothing(clusters, relax, tmp_path, read, monkeypatch):
    from alchemi_xr.campaign import merge

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(merge, "publish", fail)
    with pytest.raises(OSError, match="disk full"):
        run(clusters, relax, tmp_path)
    assert not (tmp_path / "r.zarr").exists()
    assert not list(tmp_path.glob(".r.zarr*"))
    monkeypatch.undo()
    report = run(clusters, relax, tmp_path)
    assert (report.computed, report.finished) == (0, 30)
    assert read(tmp_path / "r.zarr").num_samples == 30


def test_status_and_report_speak(clusters, relax, faulty, tmp_path, read):
    tags = read(clusters)["tag"].ravel()[[2]].tolist()
    report = run(clusters, faulty(tags), tmp_path)
    text = str(report)
    assert "29 of 30 systems finished, 1 set aside" in text
    assert "systems/s" in text
    status = str(campaign_status(report.directory))
    assert "finished, results merged" in status
    assert "sample 2: ValueError: SCF did not converge" in status
    table = report.table()
    assert table.sizes["sample"] == 29
    assert {"name", "steps", "energy_initial", "energy", "fmax"} <= set(table)
    assert report.throughput > 0


# What is refused ---------------------------------------------------------------------------------


def test_foreign_results_are_refused(clusters, relax, tmp_path):
    shutil.copytree(clusters, tmp_path / "r.zarr")
    with pytest.raises(StoreExistsError, match="no campaign to go on with"):
        run(clusters, relax, tmp_path)
    report = run(clusters, relax, tmp_path, overwrite=True)
    assert report.finished == 30
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "r.zarr").mkdir()
    with pytest.raises(StoreExistsError, match="is no store"):
        run(clusters, relax, tmp_path / "plain", overwrite=True)


def test_another_source_is_refused(clusters, relax, tmp_path, read):
    run(clusters, relax, tmp_path)
    other = tmp_path / "other.zarr"
    StoreWriter(str(other)).write(read(clusters).slice(0, 5))
    with pytest.raises(CampaignError, match="another source"):
        run(other, relax, tmp_path)
    assert run(other, relax, tmp_path, overwrite=True).total == 5


def test_a_folder_with_other_things_is_refused(clusters, relax, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(CampaignError, match="holds no campaign"):
        run(clusters, relax, tmp_path, directory=tmp_path / "mine")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unit_size": 0}, "unit_size"),
        ({"max_failures": 1.5}, "at most 1.0"),
        ({"device": "tpu"}, "device"),
        ({"workers": True}, "not a way to name workers"),
        ({"workers": -1}, "fewer than none"),
    ],
)
def test_options_without_meaning_are_refused(clusters, relax, tmp_path, options, text):
    with pytest.raises(ConfigError, match=text):
        run(clusters, relax, tmp_path, **options)


def test_stages_must_be_callable(clusters, relax, tmp_path):
    with pytest.raises(ConfigError, match="built on each worker"):
        Campaign(clusters, relax(), tmp_path / "r.zarr")

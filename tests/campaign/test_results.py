"""The folder of a campaign: units appear whole, once, and one driver at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tracemalloc

import numpy as np
import pytest

from alchemi_xr.campaign.merge import merge_frames, merge_results
from alchemi_xr.campaign.results import CampaignFolder, Rejected, UnitFacts
from alchemi_xr.campaign.state import Unit
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import CampaignError
from alchemi_xr.store import open_store


@pytest.fixture
def folder(tmp_path):
    folder = CampaignFolder(tmp_path / "campaign")
    folder.create({"source": "s", "results": "r", "num_samples": 10})
    return folder


def facts(unit, finished, rejected=0, frames=0):
    return UnitFacts(unit.key, unit.ranges, finished, rejected, 0, frames, 0.1, 0)


def result_of(ids, value=0.0):
    """One block with a sample an id: id % 3 + 1 atoms at ``id + value``."""
    ids = np.asarray(ids, dtype=np.int64)
    counts = ids % 3 + 1
    ptr = counts_to_ptr(counts)
    x = np.repeat(ids + value, counts).astype(float)
    return Block(
        ptr,
        np.zeros(len(ids) + 1, dtype=np.int64),
        {
            "positions": np.stack([x, x, x], axis=1),
            "atomic_numbers": np.full(ptr[-1], 18),
            "energy": (ids + value)[:, None].astype(float),
        },
        {"positions": "atom", "atomic_numbers": "atom", "energy": "system"},
    )


def commit(folder, unit, rejects=(), value=0.0, frames=None):
    """Commit all samples of a unit that are not among the rejects."""
    gone = {r.dataset_index for r in rejects}
    ids = np.array([i for i in unit.samples() if i not in gone], dtype=np.int64)
    writer = folder.begin(unit)
    order = ptr = None
    if frames is not None:
        _spool, order, ptr = frames(writer.open_frames(), ids)
    ok = writer.commit(
        result_of(ids, value) if len(ids) else None,
        ids,
        rejects,
        facts(unit, len(ids), len(rejects), 0 if order is None else len(order)),
        frame_order=order,
        frames_ptr=ptr,
    )
    writer.abandon()
    return ok


def test_a_unit_is_there_whole_or_not_at_all(folder):
    unit = Unit("000-000000", ((0, 3),))
    writer = folder.begin(unit)
    assert folder.units() == []
    assert folder.sweep(unit.key) is True  # what a killed worker left
    assert folder.sweep(unit.key) is False
    writer.abandon()
    assert commit(folder, unit)
    (found,) = folder.units()
    assert found.facts.finished == 3
    assert folder.finished_mask(10).tolist() == [True] * 3 + [False] * 7
    assert [p.name for p in folder.units_path.iterdir()] == [unit.key]


def test_the_first_commit_wins(folder):
    unit = Unit("u", ((0, 2),))
    assert commit(folder, unit, value=0.0)
    assert not commit(folder, unit, value=5.0)
    assert folder.unit("u").result.take(np.array([0, 1]))["energy"].ravel().tolist() == [0.0, 1.0]


def test_rejects_are_those_without_a_result(folder):
    bad = [Rejected(1, "first try", "error", "tb", "000"), Rejected(2, "for good", "error")]
    commit(folder, Unit("000", ((0, 4),)), rejects=bad)
    commit(folder, Unit("001", ((1, 3),)), rejects=[Rejected(2, "second try", "error")])
    (reject,) = folder.rejects(10)
    assert (reject.dataset_index, reject.reason) == (2, "second try")
    assert folder.write_rejects(10) == 1
    assert "second try" in (folder.path / "rejects.jsonl").read_text()


def test_a_second_driver_is_refused_and_told_who(folder):
    folder.acquire()
    with pytest.raises(CampaignError, match=f"being run by pid {os.getpid()}"):
        CampaignFolder(folder.path).acquire()
    assert f"pid {os.getpid()}" in folder.owner()
    folder.release()
    assert folder.owner() == ""
    folder.acquire()
    folder.release()


def _hold(path, held):
    folder = CampaignFolder(path)
    folder.acquire()
    held.set()
    signal.pause()


def test_the_lock_of_a_killed_driver_is_free(folder):
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=_hold, args=(folder.path, held))
    process.start()
    try:
        assert held.wait(60)
        with pytest.raises(CampaignError, match=f"pid {process.pid}"):
            folder.acquire()
    finally:
        process.kill()
        process.join()
    folder.acquire()
    folder.release()


def test_a_torn_journal_line_is_left_out(folder):
    folder.record("start", run=0)
    with (folder.path / "journal.jsonl").open("a") as file:
        file.write('{"event": "sta')
    assert [line["event"] for line in folder.journal()] == ["start"]
    assert folder.runs() == 1
    assert not folder.is_merged()


def test_no_campaign_is_said(tmp_path):
    with pytest.raises(CampaignError, match="no campaign here"):
        CampaignFolder(tmp_path / "none").identity()


# Merging -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1, 200, 10**9])
def test_results_come_in_input_order_from_any_units(folder, clusters, tmp_path, max_bytes):
    """Retries between the others, one id twice, one missing; groups of any size."""
    source = open_store(str(clusters))
    commit(folder, Unit("000-0", ((0, 5),)), rejects=[Rejected(3, "no", "error")])
    commit(folder, Unit("000-1", ((8, 10),)))
    commit(folder, Unit("001-0", ((3, 4), (6, 8))))
    commit(folder, Unit("001-1", ((9, 10),)), value=0.5)  # an orphan's late commit
    path = tmp_path / "merged.zarr"
    count = merge_results(folder.units(), source, path, max_bytes=max_bytes)
    ids = [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert count == len(ids)
    merged = open_store(str(path))
    block = merged.read_block(np.arange(count))
    assert block["dataset_index"].ravel().tolist() == ids
    assert block["energy"].ravel().tolist() == [float(i) for i in ids]
    expected = source.read_block(source.active[np.array(ids)], fields=["name"])["name"]
    assert block["name"].tolist() == expected.tolist()
    np.testing.assert_array_equal(block["positions"], result_of(ids)["positions"])
    assert not list(tmp_path.glob(".*merging*"))


def frames_of(lengths, keep=lambda frame: True):
    """A maker of frames for ``commit``: step by step, as a running batch gives them."""

    def make(spool, ids):
        index = []
        for step in range(max(lengths)):
            alive = np.array([i for i in ids if step < lengths[i]], dtype=np.int64)
            if len(alive):
                block = result_of(alive, value=step / 100)
                spool.append(block.with_field("step", np.full(len(alive), step), "system"))
                index += [(i, step) for i in alive]
        rows = [r for r, entry in enumerate(index) if keep(entry)]
        order = np.array(sorted(rows, key=lambda r: index[r]), dtype=np.int64)
        counts = [sum(1 for r in rows if index[r][0] == i) for i in ids]
        return spool, order, counts_to_ptr(np.array(counts))

    return make


@pytest.mark.parametrize("max_bytes", [1, 500, 10**9])
def test_frames_come_by_sample_and_step(folder, tmp_path, max_bytes):
    lengths = [3, 1, 4, 2, 5, 1]
    frames = frames_of(lengths, keep=lambda entry: entry != (2, 1))
    commit(folder, Unit("0", ((0, 2), (4, 6))), frames=frames)
    commit(folder, Unit("1", ((2, 4),)), frames=frames)
    path = tmp_path / "frames.zarr"
    count = merge_frames(folder.units(), 6, path, max_bytes=max_bytes)
    expected = [(i, s) for i, n in enumerate(lengths) for s in range(n) if (i, s) != (2, 1)]
    assert count == len(expected)
    block = open_store(str(path)).read_block(np.arange(count))
    found = zip(block["dataset_index"].ravel().tolist(), block["step"].tolist(), strict=True)
    assert list(found) == expected
    for row, (i, s) in enumerate(expected):
        part = block.take(np.array([row]))
        np.testing.assert_allclose(part["positions"], i + s / 100)
        assert part.num_atoms == i % 3 + 1


def test_nothing_finished_makes_no_store(folder, clusters, tmp_path):
    path = tmp_path / "merged.zarr"
    assert merge_results(folder.units(), open_store(str(clusters)), path) == 0
    assert not path.exists()


def test_merging_holds_one_group_at_a_time(folder, tmp_path):
    """Frames of 24 MB in groups of 1 MB."""
    system, atoms, per_sample = np.arange(10), 100, 1000
    unit = Unit("0", ((0, 10),))
    writer = folder.begin(unit)
    spool = writer.open_frames()
    for step in range(0, per_sample, 50):
        counts = np.full(10 * 50, atoms)
        ptr = counts_to_ptr(counts)
        spool.append(
            Block(
                ptr,
                np.zeros(len(ptr), dtype=np.int64),
                {
                    "positions": np.zeros((ptr[-1], 3), dtype=np.float64),
                    "atomic_numbers": np.ones(ptr[-1], dtype=np.int8),
                    "step": np.tile(np.arange(step, step + 50), 10),
                },
                {"positions": "atom", "atomic_numbers": "atom", "step": "system"},
            )
        )
    frames = len(system) * per_sample
    # Written 50 steps of each system at a time.
    order = np.arange(frames).reshape(-1, 10, 50).transpose(1, 0, 2).ravel()
    writer.commit(
        result_of(system),
        system,
        [],
        facts(unit, 10, frames=frames),
        frame_order=order,
        frames_ptr=np.arange(11) * per_sample,
    )
    tracemalloc.start()
    try:
        assert merge_frames(folder.units(), 10, tmp_path / "f.zarr", max_bytes=2**20) == frames
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * 2**20
    snapshot = open_store(str(tmp_path / "f.zarr"))
    block = snapshot.read_block(np.array([0, 999, 1000, frames - 1]), fields=["step"])
    assert block["step"].tolist() == [0, 999, 0, 999]

"""In-flight batching: each system once, with its fields, and on the way it takes alone."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.dynamics import (
    ConvergenceHook,
    DemoDynamics,
    DynamicsStage,
    FusedStage,
    HostMemory,
    SizeAwareSampler,
)
from alchemi_xr.models.lj import LennardJonesModel

SIGMA = 3.4


def argon_clusters(count=40):
    """Case C39: 2 to 9 atoms at different starting spacings, with tag[i] = i * i."""
    corner = torch.tensor(
        [[x, y, z] for z in range(3) for x in (0, 1) for y in (0, 1)], dtype=torch.float64
    )
    samples = []
    for i in range(count):
        n = 2 + i % 8
        generator = torch.Generator().manual_seed(i)
        noise = 0.05 * torch.randn(n, 3, dtype=torch.float64, generator=generator)
        data = AtomicData(
            atomic_numbers=torch.full((n,), 18),
            positions=(1.04 + 0.01 * (i % 13)) * SIGMA * corner[:n] + noise,
        )
        data.add_system_property("tag", torch.tensor([[i * i]]))
        samples.append(data)
    return samples


def argon():
    return LennardJonesModel(epsilon=0.0104, sigma=SIGMA, cutoff=40.0)


def alone(make, sample):
    """The result of a system that is run by itself."""
    batch = Batch.from_data_list([sample])
    stage = make()
    if not isinstance(stage, FusedStage):
        stage = FusedStage([(0, stage)])
    return stage.run(batch)


def test_c39_ids_through_refill(kit, shared):
    """40 clusters in 6 slots, some finished by fmax and some by five steps."""
    case = json.loads((shared / "cases/C39-ids-through-refill/expected.json").read_text())
    count, slots = case["expected"]["n"], case["expected"]["slots"]
    samples = argon_clusters(count)

    def make(**options):
        return DemoDynamics(
            argon(),
            n_steps=5,
            dt=20.0,
            convergence_hook=ConvergenceHook.from_fmax(0.018),
            **options,
        )

    sink = HostMemory(count)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_batch_size=slots)
    sizes: list = []
    watch = kit.Recorder(
        DynamicsStage.BEFORE_STEP, [], act=lambda ctx: sizes.append(ctx.batch.num_graphs)
    )
    stage = make(sampler=sampler, sinks=[sink], hooks=[watch])
    assert stage.run() is None
    assert stage.done
    assert max(sizes) == slots
    check_against_alone(sink.read(), samples, make)
    result = sink.read()
    steps, fmax = result["steps"].reshape(-1), result["fmax"].reshape(-1)
    by_steps, by_force = (fmax > 0.018), (fmax <= 0.018)
    assert (steps[by_steps] == 5).all()
    assert 10 <= int(by_steps.sum()) <= 30
    assert int((by_force & (steps < 5)).sum()) >= 10


def check_against_alone(result, samples, make, tolerance=1e-8):
    index = result["dataset_index"].reshape(-1)
    assert sorted(index.tolist()) == list(range(len(samples)))
    assert sorted(result["system_id"].reshape(-1).tolist()) == list(range(len(samples)))
    assert torch.equal(result["tag"].reshape(-1), index * index)
    assert not result.present
    ptr = result.atoms_ptr
    for row, i in enumerate(index.tolist()):
        one = alone(make, samples[i])
        mine = result["positions"][ptr[row] : ptr[row + 1]]
        torch.testing.assert_close(mine, one["positions"], rtol=0, atol=tolerance)
        assert float(result["energy"][row]) == pytest.approx(float(one["energy"]), abs=tolerance)
        assert int(result["steps"][row]) == int(one["steps"])


@pytest.mark.parametrize("refill_frequency", [1, 3])
def test_two_stages_through_refill_equal_runs_alone(kit, refill_frequency):
    """Relaxation by fmax (FIRE, with state of its own), then five steps of dynamics."""
    from alchemi_xr.dynamics import FIRE

    samples = argon_clusters(16)

    def make(**options):
        model = argon()
        relax = FIRE(
            model,
            dt=5.0,
            n_steps=60,
            convergence_hook=ConvergenceHook.from_fmax(0.004, frequency=2),
            **options,
        )
        return relax + DemoDynamics(model, n_steps=5, dt=5.0)

    sink = HostMemory(100)
    fused = make(
        sampler=SizeAwareSampler(kit.ListDataset(samples), max_atoms=30, max_batch_size=6),
        refill_frequency=refill_frequency,
        sinks=[sink],
    )
    assert fused.run() is None
    check_against_alone(sink.read(), samples, make)


@pytest.mark.parametrize("shared_list", [False, True])
def test_neighbour_lists_with_a_skin_do_not_outlive_a_refill(kit, shared_list):
    """A list kept for several steps belongs to the systems it was made for."""
    samples = argon_clusters(12)
    for i, data in enumerate(samples):  # all of one size: only the systems change
        samples[i] = data if data.num_nodes == 5 else kit.atoms(5, i, 4.0)
        if "tag" not in samples[i].system_properties:
            samples[i].add_system_property("tag", torch.tensor([[i * i]]))

    def make(**options):
        model = LennardJonesModel(
            epsilon=0.0104, sigma=SIGMA, cutoff=7.0, switch_width=1.0, skin=2.0
        )
        hooks = model.make_neighbor_hooks() if shared_list else None
        convergence = ConvergenceHook.from_fmax(0.01)
        return DemoDynamics(
            model, n_steps=7, dt=4.0, hooks=hooks, convergence_hook=convergence, **options
        )

    sink = HostMemory(100)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_batch_size=3)
    make(sampler=sampler, sinks=[sink]).run()
    result = sink.read()
    check_against_alone(result, samples, make)
    assert not result.keys["edge"]
    assert "neighbor_matrix" not in result


def test_init_fn_and_energy_change_through_refill(kit):
    """Derived fields start anew for each newcomer; init_fn sees each of them once."""
    seen: list = []

    def init(batch):
        seen.extend(batch["dataset_index"].reshape(-1).tolist())
        batch["velocities"] = torch.full_like(batch["positions"], 0.01)

    def make(**options):
        criteria = [{"key": "energy_change", "threshold": 2e-3}]
        return DemoDynamics(
            kit.SpringModel(),
            n_steps=30,
            dt=1.0,
            convergence_hook=ConvergenceHook(criteria),
            **options,
        )

    samples = [kit.atoms(2 + i % 3, i, 0.1) for i in range(9)]
    sink = HostMemory(9)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_batch_size=2)
    make(sampler=sampler, sinks=[sink], init_fn=init).run()
    assert sorted(seen) == list(range(9))
    result = sink.read()
    assert (result["steps"] >= 2).all()  # inf in the first step
    for row, i in enumerate(result["dataset_index"].reshape(-1).tolist()):
        batch = Batch.from_data_list([samples[i]])
        batch["velocities"] = torch.full_like(batch["positions"], 0.01)
        FusedStage([(0, make())]).run(batch)
        assert int(batch["steps"]) == int(result["steps"][row])
        assert float(batch["energy"]) == pytest.approx(float(result["energy"][row]), abs=1e-14)


@pytest.mark.parametrize("refused", [{0, 1}, {2, 3, 4}, {0, 5}, set(range(6))])
def test_init_fn_may_leave_out_systems(kit, refused):
    """Also all of a batch, the first or a later one: the others still have their turn."""

    def init(batch):
        keep = [
            i for i, n in enumerate(batch["dataset_index"].reshape(-1)) if int(n) not in refused
        ]
        return batch.index_select(keep) if keep else Batch.empty_like(batch)

    sink = HostMemory(9)
    sampler = SizeAwareSampler(
        kit.ListDataset([kit.atoms(2, i) for i in range(6)]), max_batch_size=2
    )
    stage = DemoDynamics(kit.SpringModel(), n_steps=2, sampler=sampler, sinks=[sink], init_fn=init)
    assert stage.run() is None
    assert sampler.exhausted
    left = sink.read()["dataset_index"].reshape(-1).tolist() if len(sink) else []
    assert sorted(left) == sorted(set(range(6)) - refused)


def test_results_of_an_earlier_run_start_anew(kit):
    """A store of results may be the source: old status and counters do not count."""
    old = kit.systems([2, 3, 2])
    (DemoDynamics(kit.SpringModel(), n_steps=2) + DemoDynamics(kit.SpringModel(), n_steps=1)).run(
        old
    )
    assert (old["status"] == 2).all()
    sink = HostMemory(3)
    sampler = SizeAwareSampler(kit.ListDataset(old.to_data_list()), max_batch_size=1)
    model = kit.SpringModel()
    fused = DemoDynamics(model, n_steps=2, sampler=sampler, sinks=[sink])
    (fused + DemoDynamics(model, n_steps=1)).run()
    assert sink.read()["steps"].reshape(-1).tolist() == [3, 3, 3]


def test_the_active_batch_of_a_stage_is_not_run_twice(kit):
    samples = [kit.atoms(2, i) for i in range(3)]
    sink = HostMemory(9)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_batch_size=2)
    stage = DemoDynamics(kit.SpringModel(), n_steps=2, sampler=sampler, sinks=[sink])
    stage.active_batch = stage.admit(sampler.build_initial_batch())
    assert stage.run() is None
    assert stage.active_batch is None
    assert sorted(sink.read()["dataset_index"].reshape(-1).tolist()) == [0, 1, 2]


# ------------------------------------------------------------------ one check


def batch_in_flight(kit, stage, status):
    batch = stage.sampler.build_initial_batch()
    batch = stage.admit(batch)
    batch["status"] = torch.tensor(status).reshape(-1, 1)
    return batch


def test_refill_check(kit):
    samples = [kit.atoms(2, i) for i in range(6)]
    sink = HostMemory(10)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_batch_size=3)
    stage = FusedStage(
        [(0, DemoDynamics(kit.SpringModel(), n_steps=5))], sampler=sampler, sinks=[sink]
    )
    batch = batch_in_flight(kit, stage, [0, 0, 0])
    assert stage.refill_check(batch, 1) is batch
    batch["status"] = torch.tensor([[0], [3], [0]])
    new = stage._refill_check(batch, 1)
    assert new is not batch
    assert new["system_id"].reshape(-1).tolist() == [0, 2, 3]
    assert new["dataset_index"].reshape(-1).tolist() == [0, 2, 3]
    assert new["status"].reshape(-1).tolist() == [0, 0, 0]
    assert sink.read()["system_id"].reshape(-1).tolist() == [1]
    new["status"] = torch.ones(3, 1, dtype=torch.int64)
    new = stage.refill_check(new, 1)
    assert new["system_id"].reshape(-1).tolist() == [4, 5]
    new["status"] = torch.ones(2, 1, dtype=torch.int64)
    assert stage.refill_check(new, 1) is None
    assert stage.done
    assert len(sink) == 6


def test_budget_fill(kit):
    """Two small ones that leave make room for one large one."""
    samples = [kit.atoms(n, i) for i, n in enumerate([6, 2, 3, 3, 2])]
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_atoms=8)
    stage = FusedStage([(0, DemoDynamics(kit.SpringModel(), n_steps=5))], sampler=sampler)
    batch = batch_in_flight(kit, stage, [1, 1, 0])
    assert batch.num_nodes_list == [2, 3, 2]  # small bins first
    assert stage.refill_check(batch, 1).num_nodes_list == [2, 6]


def test_a_full_sink_loses_nothing(kit):
    samples = [kit.atoms(2, i) for i in range(4)]
    first, second = HostMemory(1), HostMemory(2)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_batch_size=4)
    stage = FusedStage(
        [(0, DemoDynamics(kit.SpringModel(), n_steps=5))], sampler=sampler, sinks=[first, second]
    )
    batch = batch_in_flight(kit, stage, [1, 1, 1, 1])
    with pytest.raises(RuntimeError, match="All sinks are full"):
        stage.refill_check(batch, 1)
    assert (len(first), len(second), batch.num_graphs) == (0, 0, 4)
    batch["status"] = torch.tensor([[1], [1], [1], [0]])
    assert stage.refill_check(batch, 1).num_graphs == 1
    assert (len(first), len(second)) == (1, 2)


def test_a_bad_sample_is_named(kit):
    good = [kit.atoms(2, i) for i in range(4)]

    class Broken(kit.ListDataset):
        def __getitem__(self, index):
            if index == 2:
                raise OSError("chunk is gone")
            return super().__getitem__(index)

    sampler = SizeAwareSampler(Broken(good), max_batch_size=1)
    stage = DemoDynamics(kit.SpringModel(), n_steps=1, sampler=sampler, sinks=[HostMemory(9)])
    with pytest.raises(RuntimeError, match=r"sample 2 of the dataset.*chunk is gone"):
        stage.run()
    assert len(stage.sinks[0]) == 2


def test_metadata_that_lies_is_named(kit):
    class Lies(kit.ListDataset):
        def get_metadata(self, index):
            return (5, 0) if index == 1 else super().get_metadata(index)

    sampler = SizeAwareSampler(Lies([kit.atoms(2, 0), kit.atoms(2, 1)]), max_batch_size=2)
    with pytest.raises(RuntimeError, match="sample 1 of the dataset is not what its metadata says"):
        sampler.build_initial_batch()


def test_run_with_a_limit_can_go_on(kit):
    samples = [kit.atoms(2, i) for i in range(5)]
    sink = HostMemory(9)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_batch_size=2)
    stage = DemoDynamics(kit.SpringModel(), n_steps=4, sampler=sampler, sinks=[sink])
    batch = stage.run(n_steps=6)
    assert batch.num_graphs == 2
    assert len(sink) == 2
    while batch is not None:
        batch = stage.run(batch, n_steps=3)
    assert sorted(sink.read()["dataset_index"].reshape(-1).tolist()) == list(range(5))
    assert sink.read()["steps"].reshape(-1).tolist() == [4] * 5


# ------------------------------------------------------------------ against a Python model


class Lifetimes:
    """Sets ``age`` so that a criterion ends each system after a number of steps of its own."""

    stage, frequency, read_only = DynamicsStage.AFTER_STEP, 1, True

    def __call__(self, ctx, stage):
        batch = ctx.batch
        batch.set("age", batch["life"] - batch["steps"] - 1, level="system")


def model_of_a_run(sizes, lives, budget, max_atoms, slots, frequency):
    """What a run does, system by system: the order in which ids leave, and their steps."""
    waiting = list(range(len(sizes)))
    bins = sorted(set(sizes))

    def draw_first():
        out, alive = [], list(bins)
        while alive and len(out) < slots:
            still = []
            for size in alive:
                if len(out) >= slots:
                    break
                fit = [i for i in waiting if sizes[i] == size]
                if fit and sum(sizes[i] for i in out) + size <= max_atoms:
                    out.append(fit[0])
                    waiting.remove(fit[0])
                    still.append(size)
            alive = still
        return out

    def draw_more(kept):
        out = []
        for size in reversed(bins):
            while len(kept) + len(out) < slots:
                fit = [i for i in waiting if sizes[i] == size]
                if not fit or sum(sizes[i] for i in kept + out) + size > max_atoms:
                    break
                out.append(fit[0])
                waiting.remove(fit[0])
        return out

    steps = dict.fromkeys(range(len(sizes)), 0)
    target = [min(life, budget) for life in lives]
    flying, primed = draw_first(), set()
    primed.update(flying)
    left, since = [], 0
    while flying:
        done = [i for i in flying if steps[i] >= target[i]]
        if done and (len(done) == len(flying) or since >= frequency):
            left += done
            kept = [i for i in flying if i not in done]
            flying, since = kept + draw_more(kept), 0
            continue
        for i in flying:
            if i not in primed:
                primed.add(i)
            elif steps[i] < target[i]:
                steps[i] += 1
        since += 1
    return left, [steps[i] for i in left]


@settings(max_examples=40)
@given(
    systems=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=14),
    budget=st.integers(1, 5),
    max_atoms=st.integers(5, 14),
    slots=st.integers(1, 5),
    frequency=st.integers(1, 4),
)
def test_refill_equals_a_python_model(kit, systems, budget, max_atoms, slots, frequency):
    samples = []
    for i, (n, life) in enumerate(systems):
        data = kit.atoms(n, i)
        data.add_system_property("life", torch.tensor([[life]]))
        data.add_system_property("tag", torch.tensor([[i * i]]))
        samples.append(data)
    sizes, lives = [n for n, _ in systems], [life for _, life in systems]
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_atoms=max_atoms, max_batch_size=slots)
    sink, seen = HostMemory(100), []
    watch = kit.Recorder(
        DynamicsStage.BEFORE_STEP, [], act=lambda ctx: seen.append(ctx.batch.num_nodes_list)
    )
    stage = DemoDynamics(
        kit.SpringModel(),
        n_steps=budget,
        convergence_hook=ConvergenceHook({"key": "age", "threshold": 0}),
        hooks=[Lifetimes(), watch],
        sampler=sampler,
        refill_frequency=frequency,
        sinks=[sink],
    )
    assert stage.run() is None
    result = sink.read()
    order, steps = model_of_a_run(sizes, lives, budget, max_atoms, slots, frequency)
    index = result["dataset_index"].reshape(-1)
    assert index.tolist() == order
    assert result["steps"].reshape(-1).tolist() == steps
    assert torch.equal(result["tag"].reshape(-1), index * index)
    assert result.num_nodes_list == [sizes[i] for i in order]
    assert all(len(sizes_now) <= slots and sum(sizes_now) <= max_atoms for sizes_now in seen)

"""The hooks that come with the project, in plain runs, fused stages and refills."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import bulk

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.neighbors import neighbor_list, neighbor_matrix
from alchemi_xr.dynamics import (
    ConvergenceHook,
    DemoDynamics,
    DynamicsContext,
    DynamicsStage,
    FusedStage,
    Hook,
    HostMemory,
    SizeAwareSampler,
)
from alchemi_xr.dynamics.hooks import (
    AlignCellHook,
    BiasedPotentialHook,
    ConvergedSnapshotHook,
    EnergyDriftMonitorHook,
    FreezeAtomsHook,
    LoggingHook,
    MaxForceClampHook,
    NaNDetectorHook,
    NeighborListHook,
    NonFiniteError,
    SnapshotHook,
    StageTimingHook,
    TorchProfilerHook,
    WrapPeriodicHook,
)
from alchemi_xr.dynamics.optimizers import FIRE
from alchemi_xr.errors import ConfigError, DynamicsError
from alchemi_xr.models.base import NeighborConfig
from alchemi_xr.models.demo import DemoModel, DemoModelWrapper
from alchemi_xr.models.lj import LennardJonesModel


def sample(n: int, seed: int = 0, **fields: Any) -> AtomicData:
    rng = np.random.default_rng(seed)
    return AtomicData(
        atomic_numbers=torch.full((n,), 18),
        positions=torch.from_numpy(rng.uniform(-2.0, 2.0, (n, 3))),
        **fields,
    )


def batch_of(*sizes: int) -> Batch:
    return Batch.from_data_list([sample(n, seed=k) for k, n in enumerate(sizes)])


def model() -> DemoModelWrapper:
    return DemoModelWrapper(DemoModel(seed=1).double())


def crystal() -> AtomicData:
    atoms = bulk("Ar", "fcc", 5.3, cubic=True)
    atoms.rattle(0.1, seed=1)
    return AtomicData(
        atomic_numbers=torch.from_numpy(atoms.numbers.astype(np.int64)),
        positions=torch.from_numpy(atoms.positions),
        cell=torch.from_numpy(atoms.cell.array)[None],
        pbc=torch.ones((1, 3), dtype=torch.bool),
    )


class Pool:
    def __init__(self, data: list[AtomicData]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[AtomicData, dict[str, Any]]:
        return self.data[i], {}

    def get_metadata(self, i: int) -> tuple[int, int]:
        return self.data[i].num_nodes, 0


def context(batch: Batch, **options: Any) -> DynamicsContext:
    return DynamicsContext(batch=batch, **options)


def all_hooks(tmp_path: Path) -> list[Any]:
    return [
        AlignCellHook(),
        BiasedPotentialHook(lambda b: (b.energy * 0, b.forces * 0)),
        ConvergedSnapshotHook(HostMemory(10)),
        EnergyDriftMonitorHook(1e9),
        FreezeAtomsHook(),
        LoggingHook("csv", log_path=tmp_path / "log.csv"),
        MaxForceClampHook(5.0),
        NaNDetectorHook(),
        NeighborListHook(NeighborConfig(3.0)),
        SnapshotHook(HostMemory(100)),
        StageTimingHook(),
        TorchProfilerHook(tmp_path),
        WrapPeriodicHook(),
    ]


def test_all_are_hooks_and_leave_dtypes_and_order_alone(tmp_path: Path) -> None:
    hooks = all_hooks(tmp_path)
    assert all(isinstance(hook, Hook) for hook in hooks)
    batch = batch_of(3, 1, 4)
    before = {name: (value.dtype, value.shape) for name, value in batch}
    FIRE(model(), hooks=hooks, n_steps=3).run(batch)
    assert {name: (batch[name].dtype, batch[name].shape) for name in before} == before


def test_room_is_lazy_and_complete() -> None:
    from alchemi_xr import hooks as short
    from alchemi_xr.dynamics import hooks

    assert all(getattr(hooks, name) is not None for name in hooks.__all__)
    assert all(getattr(short, name) is not None for name in short.__all__)
    assert short.NeighborListHook is NeighborListHook
    for module in (hooks, short):
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            module.Nothing


class TestLogging:
    def rows(self, path: Path) -> list[dict[str, str]]:
        with path.open() as file:
            return list(csv.DictReader(file))

    def test_one_row_a_system_and_firing(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "log.csv"
        batch = batch_of(3, 2)
        hook = LoggingHook("csv", log_path=path, frequency=2)
        FIRE(model(), hooks=[hook], n_steps=5).run(batch)
        rows = self.rows(path)
        names = ["step", "graph_idx", "system_id", "status", "energy", "fmax", "temperature"]
        assert list(rows[0]) == names
        pairs = [(r["step"], r["graph_idx"]) for r in rows]
        assert pairs == [(str(s), str(g)) for s in (0, 2, 4) for g in (0, 1)]
        assert [float(r["energy"]) for r in rows[-2:]] == batch.energy[:, 0].tolist()

    def test_an_old_log_is_continued_and_another_one_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        for _ in range(2):
            FIRE(model(), hooks=[LoggingHook("csv", log_path=path)], n_steps=2).run(batch_of(3))
        hook = LoggingHook("csv", log_path=path)
        fire = FIRE(model(), hooks=[hook], n_steps=2)
        fire.run(batch_of(3))
        fire.run(batch_of(3))
        assert len(self.rows(path)) == 8
        assert path.read_text().count("step") == 1
        other = LoggingHook("csv", log_path=path, custom_scalars={"x": lambda ctx: 1.0})
        with pytest.raises(ConfigError, match="other columns"):
            FIRE(model(), hooks=[other], n_steps=1).run(batch_of(3))
        assert len(self.rows(path)) == 8

    def test_rows_name_the_system_through_refills(self, tmp_path: Path) -> None:
        data = [sample(n, seed=n) for n in (3, 5, 2, 4, 6)]
        path, sink = tmp_path / "log.csv", HostMemory(10)
        FIRE(
            model(),
            hooks=[LoggingHook("csv", log_path=path)],
            n_steps=500,
            convergence_hook=ConvergenceHook.from_fmax(0.05),
            sampler=SizeAwareSampler(Pool(data), max_batch_size=2),
            sinks=[sink],
        ).run()
        rows = self.rows(path)
        assert {int(r["system_id"]) for r in rows} == set(range(5))
        done = sink.read()
        for k, system in enumerate(done.system_id.reshape(-1).tolist()):
            own = [r for r in rows if int(r["system_id"]) == system]
            assert float(own[-1]["energy"]) == float(done.energy[k])
            assert float(own[-1]["fmax"]) <= 0.05

    def test_custom_columns_and_writer(self) -> None:
        seen: list[tuple[int, list[dict[str, float]]]] = []
        hook = LoggingHook(
            "custom",
            writer_fn=lambda step, rows: seen.append((step, rows)),
            custom_scalars={
                "atoms": lambda ctx: ctx.batch.num_nodes_per_graph,
                "one": lambda ctx: 1.0,
            },
        )
        hook(context(batch_of(3, 2), step_count=7), DynamicsStage.AFTER_STEP)
        ((step, rows),) = seen
        assert step == 7
        assert [(r["atoms"], r["one"], r["system_id"]) for r in rows] == [(3, 1, -1), (2, 1, -1)]
        assert all(np.isnan(r["energy"]) and np.isnan(r["fmax"]) for r in rows)

    def test_temperature(self) -> None:
        data = sample(4)
        data.velocities = torch.full((4, 3), 0.01, dtype=torch.float64)
        rows: list[Any] = []
        hook = LoggingHook("custom", writer_fn=lambda step, r: rows.extend(r))
        hook(context(Batch.from_data_list([data])), DynamicsStage.AFTER_STEP)
        kinetic = 0.5 * 39.948 * 3e-4 * 4
        assert rows[0]["temperature"] == pytest.approx(
            2 * kinetic / (12 * 8.617333262e-5), rel=1e-3
        )

    def test_wrong_length_of_a_custom_column(self) -> None:
        hook = LoggingHook(
            "custom",
            writer_fn=lambda step, rows: None,
            custom_scalars={"x": lambda ctx: torch.zeros(5)},
        )
        with pytest.raises(ConfigError, match="'x' has the wrong length"):
            hook(context(batch_of(3, 2)), DynamicsStage.AFTER_STEP)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"backend": "sql"}, "'sql' is not known"),
            ({"backend": "csv"}, "needs log_path"),
            ({"backend": "tensorboard"}, "needs log_path"),
            ({"backend": "custom"}, "needs writer_fn"),
            ({"backend": "csv", "log_path": "x", "custom_scalars": {"fmax": min}}, "already"),
        ],
    )
    def test_options_are_checked(self, options: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            LoggingHook(**options)


class TestSnapshots:
    def test_whole_batch(self) -> None:
        sink = HostMemory(100)
        FIRE(model(), hooks=[SnapshotHook(sink, frequency=2)], n_steps=5).run(batch_of(3, 2))
        assert len(sink) == 6

    def test_snapshots_do_not_change_afterwards(self) -> None:
        sink, batch = HostMemory(100), batch_of(3)
        FIRE(model(), hooks=[SnapshotHook(sink)], n_steps=3).run(batch)
        energies = sink.read().energy[:, 0].tolist()
        assert len(set(energies)) == 3

    def test_converged_systems_once_without_neighbours(self) -> None:
        sink, batch = HostMemory(100), batch_of(3, 5, 2)
        FIRE(
            model(),
            hooks=[ConvergedSnapshotHook(sink), NeighborListHook(NeighborConfig(3.0, "matrix"))],
            convergence_hook=ConvergenceHook.from_fmax(0.05),
            n_steps=500,
        ).run(batch)
        found = sink.read()
        assert sorted(found.num_nodes_list) == [2, 3, 5]
        assert "neighbor_matrix" not in found
        assert "neighbor_matrix" in batch

    def test_converged_elsewhere_makes_no_sense(self) -> None:
        hook = ConvergedSnapshotHook(HostMemory(3), stage=DynamicsStage.AFTER_STEP)
        with pytest.raises(DynamicsError, match="nothing is known about convergence"):
            FIRE(model(), hooks=[hook], n_steps=1).run(batch_of(3))


class TestSafety:
    def test_clamp_keeps_directions(self) -> None:
        batch = batch_of(2)
        batch.forces = torch.tensor([[30.0, 40.0, 0.0], [0.3, 0.0, 0.0]], dtype=torch.float64)
        MaxForceClampHook(5.0)(context(batch), DynamicsStage.AFTER_COMPUTE)
        assert batch.forces.tolist() == [[3.0, 4.0, 0.0], [0.3, 0.0, 0.0]]

    def test_clamp_bounds_the_forces_of_a_run(self) -> None:
        batch = batch_of(4)
        FIRE(model(), hooks=[MaxForceClampHook(1e-3)], n_steps=2).run(batch)
        norms = torch.linalg.vector_norm(batch.forces, dim=1)
        assert float(norms.max()) <= 1e-3 * (1 + 1e-12)

    @pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
    def test_clamp_limit(self, limit: float) -> None:
        with pytest.raises(ConfigError, match="max_force"):
            MaxForceClampHook(limit)

    def test_detector_names_step_field_and_systems(self) -> None:
        batch = batch_of(3, 2, 4)
        batch.set("system_id", torch.tensor([[7], [8], [9]]))
        batch.positions[3] = torch.nan
        hook = NaNDetectorHook()
        with pytest.raises(
            NonFiniteError, match=r"step 0.*'forces' in graphs \[1\].*system_id \[8\]"
        ) as caught:
            FIRE(model(), hooks=[hook], n_steps=3).run(batch)
        assert isinstance(caught.value, RuntimeError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.systems, again.system_ids) == ([1], [8])

    def test_detector_looks_at_other_fields_and_skips_absent_and_missing(self) -> None:
        batch = batch_of(3, 2)
        batch.set("depth", torch.tensor([1.0, torch.inf]), level="system")
        hook = NaNDetectorHook(extra_keys=["depth", "nothing"])
        with pytest.raises(NonFiniteError, match=r"'depth' in graphs \[1\]"):
            hook(context(batch), DynamicsStage.AFTER_COMPUTE)
        batch.set("depth", batch["depth"], level="system", present=torch.tensor([True, False]))
        hook(context(batch), DynamicsStage.AFTER_COMPUTE)

    def test_detector_of_a_stage_looks_at_its_systems(self) -> None:
        batch = batch_of(3, 2)
        batch.energy = torch.tensor([[torch.nan], [0.0]])
        hook = NaNDetectorHook()
        hook(context(batch, status_mask=torch.tensor([False, True])), DynamicsStage.AFTER_COMPUTE)
        with pytest.raises(NonFiniteError):
            hook(context(batch), DynamicsStage.AFTER_COMPUTE)


class TestDrift:
    def run(self, hook: EnergyDriftMonitorHook, dt: float, steps: int = 60) -> None:
        data = sample(4)
        data.velocities = torch.full((4, 3), 0.02, dtype=torch.float64) * torch.randn(
            (4, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        DemoDynamics(model(), n_steps=steps, dt=dt, hooks=[hook]).run(Batch.from_data_list([data]))

    def test_a_good_integrator_passes_and_a_coarse_one_does_not(self) -> None:
        self.run(EnergyDriftMonitorHook(1e-3, "absolute", "raise"), dt=0.5)
        with pytest.raises(DynamicsError, match="the energy of graph 0 drifts"):
            self.run(EnergyDriftMonitorHook(1e-9, "absolute", "raise"), dt=40.0)

    def test_warning(self) -> None:
        with pytest.warns(UserWarning, match="per atom and step"):
            self.run(EnergyDriftMonitorHook(1e-12), dt=40.0, steps=3)

    def test_potential_energy_alone(self) -> None:
        """Falling, a system changes its potential energy and not its total."""
        with pytest.raises(DynamicsError, match="drifts"):
            self.run(EnergyDriftMonitorHook(1e-4, "absolute", "raise", include_kinetic=False), 1.0)

    def test_the_reference_goes_with_its_system(self) -> None:
        batch = batch_of(3, 2, 4)
        batch.energy = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
        hook = EnergyDriftMonitorHook(0.1, "absolute", "raise", include_kinetic=False)
        hook(context(batch), DynamicsStage.AFTER_STEP)
        refilled = batch.index_select([2, 0])
        refilled.append(batch_of(5))  # a new system has no reference yet
        refilled.energy[2] = 50.0
        hook(context(refilled, step_count=1), DynamicsStage.AFTER_STEP)
        refilled.energy[2] += 1.0
        with pytest.raises(DynamicsError, match="graph 2"):
            hook(context(refilled, step_count=2), DynamicsStage.AFTER_STEP)

    def test_of_a_stage_and_of_the_whole_have_references_of_their_own(self) -> None:
        """Total and potential energy are not to be compared with each other."""
        data = sample(4)
        data.velocities = torch.full((4, 3), 0.3, dtype=torch.float64)
        total = EnergyDriftMonitorHook(0.05, "absolute", "raise")
        potential = EnergyDriftMonitorHook(5.0, "absolute", "raise", include_kinetic=False)
        stage = DemoDynamics(model(), n_steps=3, dt=0.1, hooks=[potential])
        FusedStage([(0, stage)], hooks=[total]).run(Batch.from_data_list([data]))

    def test_options_are_checked(self) -> None:
        for options in ({"threshold": 0.0}, {"metric": "x"}, {"action": "x"}):
            with pytest.raises(ConfigError):
                EnergyDriftMonitorHook(**{"threshold": 1.0, **options})


class TestFreeze:
    def test_atoms_of_the_category_stay_in_every_integrator(self) -> None:
        for engine in (FIRE(model(), n_steps=5), DemoDynamics(model(), n_steps=5, dt=2.0)):
            data = sample(5)
            data.velocities = torch.ones((5, 3), dtype=torch.float64) * 0.05
            data.atom_categories = torch.tensor([0, -1, 0, -1, 0])
            batch = Batch.from_data_list([data])
            engine.register_hook(FreezeAtomsHook())
            start = batch.positions.clone()
            engine.run(batch)
            frozen = batch.atom_categories == -1
            assert torch.equal(batch.positions[frozen], start[frozen])
            assert (batch.positions[~frozen] != start[~frozen]).all()
            assert float(batch.velocities[frozen].abs().max()) == 0.0
            assert float(batch.forces[frozen].abs().max()) == 0.0

    def test_by_mask_and_keeping_forces(self) -> None:
        batch = batch_of(4)
        batch.set("held", torch.tensor([True, False, False, False]), level="atom")
        start = batch.positions.clone()
        hook = FreezeAtomsHook(mask_key="held", zero_forces=False)
        DemoDynamics(model(), n_steps=4, hooks=[hook]).run(batch)
        assert torch.equal(batch.positions[0], start[0])
        assert float(batch.forces[0].abs().max()) > 0.0

    def test_a_mask_that_is_none(self) -> None:
        batch = batch_of(4)
        batch.set("held", torch.zeros(4), level="atom")
        with pytest.raises(DynamicsError, match="'held' is no mask of atoms"):
            FIRE(model(), hooks=[FreezeAtomsHook(mask_key="held")], n_steps=1).run(batch)
        with pytest.raises(ConfigError, match="BEFORE_PRE_UPDATE"):
            FreezeAtomsHook(stage=DynamicsStage.AFTER_STEP)


class TestNeighbors:
    def batch(self) -> Batch:
        return Batch.from_data_list([crystal(), sample(4, seed=2), crystal()])

    def test_pairs_are_there_at_every_model_call(self) -> None:
        batch, config = self.batch(), NeighborConfig(4.0, "coo")
        hook = NeighborListHook(config)
        FIRE(LennardJonesModel(0.01, 3.4, 4.0), hooks=[hook], n_steps=3).run(batch)
        # The last search was made at the positions where the run ended.
        edges = neighbor_list(batch, 4.0)
        assert torch.equal(batch.neighbor_list.long(), edges.neighbor_list)
        assert torch.equal(batch.edges_ptr, edges.edges_ptr)
        i, j = batch.neighbor_list.long().T
        distance = torch.linalg.vector_norm(
            batch.positions[j] - batch.positions[i] + batch.shifts, dim=1
        )
        assert float(distance.max()) < 4.0

    @pytest.mark.parametrize("form", ["coo", "matrix"])
    @pytest.mark.parametrize("skin", [0.0, 0.3])
    def test_the_fields_follow_atoms_that_move(self, form: str, skin: float) -> None:
        """After each search the batch holds its pairs, not those of the first one."""
        batch = self.batch()
        hook = NeighborListHook(NeighborConfig(4.0, form), skin=skin)
        for _ in range(3):
            hook(context(batch), DynamicsStage.BEFORE_COMPUTE)
            matrix = neighbor_matrix(batch, 4.0 + skin)
            if form == "matrix":
                assert torch.equal(batch.num_neighbors, matrix.counts)
            else:
                expected = neighbor_list(batch, 4.0 + skin)
                assert torch.equal(batch.neighbor_list.long(), expected.neighbor_list)
            batch.positions.mul_(0.8)
        assert hook.table.searches == 3

    def test_matrix_and_its_reuse_by_skin(self) -> None:
        batch = self.batch()
        hook = NeighborListHook(NeighborConfig(4.0, "matrix"), skin=0.8)
        model = LennardJonesModel(0.01, 3.4, 4.0)
        FIRE(model, dt=0.2, hooks=[hook], n_steps=10).run(batch)
        assert hook.table.searches < 5
        # The model looked at the hook's list, and made none of its own.
        assert model._neighbors.searches == 0
        assert batch.neighbor_matrix.shape[0] == batch.num_nodes
        torch.testing.assert_close(
            batch.forces, LennardJonesModel(0.01, 3.4, 4.0)(batch)["forces"], rtol=1e-10, atol=1e-13
        )

    def test_a_list_that_no_longer_fits_is_not_used(self) -> None:
        batch = self.batch()
        model = LennardJonesModel(0.01, 3.4, 4.0)
        hook = NeighborListHook(model.model_config.neighbor_config)
        hook(context(batch), DynamicsStage.BEFORE_COMPUTE)
        batch.positions.mul_(1.2)
        expected = LennardJonesModel(0.01, 3.4, 4.0)(batch.clone())["energy"]
        torch.testing.assert_close(model(batch)["energy"], expected)

    def test_through_a_refill(self) -> None:
        sink = HostMemory(10)
        data = [sample(n, seed=n) for n in (4, 6, 3, 5)]
        for item in data:
            item.positions = item.positions * 2.5
        lj = LennardJonesModel(0.01, 2.0, 8.0)
        FIRE(
            lj,
            hooks=lj.make_neighbor_hooks(),
            n_steps=5,
            sampler=SizeAwareSampler(Pool(data), max_batch_size=2),
            sinks=[sink],
        ).run()
        done = sink.read()
        assert len(done) == 4
        torch.testing.assert_close(done.energy, LennardJonesModel(0.01, 2.0, 8.0)(done)["energy"])


class TestWrap:
    def test_along_periodic_axes_only(self) -> None:
        data = crystal()
        data.pbc = torch.tensor([[True, False, True]])
        open_ = sample(3)
        batch = Batch.from_data_list([data, open_])
        start = batch.positions.clone()
        batch.positions[:4] += 3.0 * data.cell[0].sum(dim=0)
        batch.positions[4:] += 100.0
        WrapPeriodicHook()(context(batch), DynamicsStage.AFTER_STEP)
        length = float(data.cell[0, 0, 0])
        found = batch.positions[:4]
        assert bool(((found[:, [0, 2]] >= 0) & (found[:, [0, 2]] < length)).all())
        torch.testing.assert_close(found[:, 1], start[:4, 1] + 3 * length)
        assert torch.equal(batch.positions[4:], start[4:] + 100.0)

    def test_energy_stays_and_atoms_inside_keep_their_bits(self) -> None:
        batch = Batch.from_data_list([crystal()])
        batch.positions[0] += batch.cell[0].sum(dim=0)
        inside = batch.positions[1:].clone()
        lj = LennardJonesModel(0.01, 3.4, 6.0)
        energy = lj(batch)["energy"]
        WrapPeriodicHook()(context(batch), DynamicsStage.AFTER_STEP)
        torch.testing.assert_close(lj(batch)["energy"], energy)
        mine = (inside >= 0).all(dim=1)
        assert torch.equal(batch.positions[1:][mine], inside[mine])

    def test_without_cells_nothing_happens(self) -> None:
        batch = batch_of(3)
        start = batch.positions.clone()
        WrapPeriodicHook()(context(batch), DynamicsStage.AFTER_STEP)
        assert torch.equal(batch.positions, start)


class TestBias:
    def spring(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        x = batch.positions
        per_atom = 0.5 * x.square().sum(dim=1)
        energy = x.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx.long(), per_atom)
        return energy, -x

    @pytest.mark.parametrize("inplace", [True, False])
    def test_is_added_to_energy_and_forces(self, inplace: bool) -> None:
        batch = batch_of(3, 2)
        hook = BiasedPotentialHook(self.spring, inplace=inplace)
        FIRE(model(), hooks=[hook], n_steps=1).run(batch)
        plain, (energy, forces) = model()(batch), self.spring(batch)
        torch.testing.assert_close(batch.energy, plain["energy"] + energy[:, None])
        torch.testing.assert_close(batch.forces, plain["forces"] + forces)

    def test_of_one_stage_leaves_the_others_alone(self) -> None:
        batch = batch_of(3, 2)
        first = FIRE(model(), n_steps=1)
        second = FIRE(model(), hooks=[BiasedPotentialHook(self.spring)], n_steps=3)
        (first + second).run(batch, n_steps=1)
        torch.testing.assert_close(batch.energy, model()(batch)["energy"])

    def test_wrong_shape(self) -> None:
        hook = BiasedPotentialHook(lambda b: (b.energy, b.forces[:1]))
        with pytest.raises(DynamicsError, match="bias of 'forces' has the wrong shape"):
            FIRE(model(), hooks=[hook], n_steps=1).run(batch_of(3))


class TestTiming:
    def test_intervals_of_every_step(self) -> None:
        hook = StageTimingHook()
        FIRE(model(), hooks=[hook], n_steps=4).run(batch_of(3))
        # Priming passes through the model call once more.
        assert hook.counts["BEFORE_COMPUTE → AFTER_COMPUTE"] == 5
        assert hook.counts["AFTER_STEP → BEFORE_STEP"] == 3
        assert all(seconds >= 0.0 for seconds in hook.seconds.values())
        assert "BEFORE_COMPUTE → AFTER_COMPUTE" in hook.summary()

    def test_chosen_stages_and_frequency(self) -> None:
        stages = [DynamicsStage.BEFORE_COMPUTE, DynamicsStage.AFTER_COMPUTE]
        hook = StageTimingHook(stages, frequency=3)
        FIRE(model(), hooks=[hook], n_steps=7).run(batch_of(3))
        inside = "BEFORE_COMPUTE → AFTER_COMPUTE"
        assert hook.counts[inside] == 4  # the priming call and steps 0, 3, 6
        with pytest.raises(ConfigError):
            StageTimingHook("some")  # type: ignore[arg-type]


def test_fire_stages_follow_one_another_with_fresh_state() -> None:
    """The second optimizer starts from rest with its own numbers."""
    batch = batch_of(4, 3)
    alone = batch.clone()
    model_ = model()
    (FIRE(model_, dt=0.5, n_steps=6) + FIRE(model_, dt=2.0, n_steps=6)).run(batch)
    FIRE(model_, dt=0.5, n_steps=6).run(alone)
    FIRE(model_, dt=2.0, n_steps=6).run(alone)
    assert torch.equal(batch.positions, alone.positions)

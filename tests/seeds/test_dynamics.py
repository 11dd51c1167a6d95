"""The listings of the dynamics seed, run as they stand.

Nothing in them is changed but the package name; a test compares each with the
seed itself. What follows a listing looks at what it left behind. Listings of
``DistributedPipeline`` come with it.
"""

from __future__ import annotations

import csv
import shutil
from types import SimpleNamespace

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch

LISTINGS = {
    "names": """
from alchemi_xr.dynamics import GPUBuffer, HostMemory, ZarrData
""",
    "basic": """
from alchemi_xr.dynamics import DemoDynamics, ConvergenceHook
from alchemi_xr.models.demo import DemoModelWrapper
from alchemi_xr.data import AtomicData, Batch
import torch

model = DemoModelWrapper()

dynamics = DemoDynamics(
    model=model,
    n_steps=1000,       # total steps for run()
    dt=0.5,             # timestep (fs)
)

# Create batch with required state
data = AtomicData(
    atomic_numbers=torch.tensor([6, 8, 1], dtype=torch.long),
    positions=torch.randn(3, 3),
)
batch = Batch.from_data_list([data])
batch.forces = torch.zeros(3, 3)
batch.energy = torch.zeros(1, 1)

result = dynamics.run(batch)
""",
    "convergence": """
dynamics = DemoDynamics(
    model=model,
    n_steps=10000,
    dt=0.5,
    convergence_hook=ConvergenceHook(
        criteria=[
            {"key": "fmax", "threshold": 0.05, "reduce_op": "max"},
            {"key": "energy_change", "threshold": 1e-6},
        ],
        frequency=1,
    ),
)
""",
    "from_fmax": """
dynamics = DemoDynamics(
    model=model,
    n_steps=10000,
    dt=0.5,
    convergence_hook=ConvergenceHook.from_fmax(threshold=0.05),
)
""",
    "hooks": """
from alchemi_xr.dynamics.hooks import MaxForceClampHook, LoggingHook

dynamics = DemoDynamics(
    model=model,
    n_steps=1000,
    dt=0.5,
    hooks=[
        MaxForceClampHook(max_force=10.0),
        LoggingHook(backend="csv", log_path="md_log.csv", frequency=100),
    ],
)
""",
    "opt_md": """
# Stage 0: geometry optimization
opt = DemoDynamics(
    model=model,
    n_steps=100,
    dt=1.0,
    convergence_hook=ConvergenceHook.from_fmax(0.05),
)

# Stage 1: production MD
md = DemoDynamics(model=model, n_steps=500, dt=0.5)

# Compose — auto-registers convergence hook to migrate status 0 → 1
fused = opt + md

result = fused.run(batch)  # runs until all samples reach exit_status
""",
    "explicit": """
fused = FusedStage(
    sub_stages=[(0, opt), (1, md)],
    entry_status=0,          # initial sample status
    exit_status=2,           # auto-set to len(sub_stages) if -1
    compile_step=False,      # enable torch.compile
    compile_kwargs=None,     # kwargs for torch.compile
    reprime_on_entry=None,   # status codes needing a fresh force compute on entry
)
""",
    "compile": """
fused = (opt + md)
fused.compile(fullgraph=True, mode="reduce-overhead")

with fused:  # lazy compilation on context entry
    result = fused.run(batch)
""",
    "with": """
with dynamics:
    dynamics.run(batch)
""",
    "chaining": """
fused_3 = opt + md + analysis       # 3 sub-stages: status 0, 1, 2
fused_3 = fused + extra_stage       # append to existing FusedStage
""",
    "comm_mode": """
stage = DemoDynamics(
    model=model,
    n_steps=100,
    dt=0.5,
    comm_mode="async_recv",      # default: deferred blocking
    # comm_mode="sync",          # immediate blocking (debugging)
    # comm_mode="fully_async",   # maximum overlap
)
""",
    "buffer_config": """
from alchemi_xr.dynamics.base import BufferConfig

buffer_cfg = BufferConfig(
    num_systems=100,     # max graphs
    num_nodes=5000,      # total node capacity
    num_edges=20000,     # total edge capacity
)

stage = DemoDynamics(
    model=model,
    n_steps=100,
    dt=0.5,
    buffer_config=buffer_cfg,
)
""",
    "buffer": """
# Pre-allocated buffer created via Batch.empty()
buffer = Batch.empty(num_systems=100, num_nodes=5000, num_edges=20000, template=batch)

# Copy selected graphs into buffer (Warp GPU kernels, float32 only)
mask = converged_mask  # bool tensor, True = copy this graph
buffer.put(src_batch, mask)

# Remove copied graphs from source in-place
src_batch.defrag()

# Reset buffer for reuse (preserves allocated memory)
buffer.zero()
""",
    "sampler": """
from alchemi_xr.dynamics import SizeAwareSampler

sampler = SizeAwareSampler(
    dataset=dataset,               # must have __len__, __getitem__, get_metadata
    max_atoms=1000,                # max total atoms per batch (None = auto from GPU)
    max_edges=5000,                # max total edges per batch
    max_batch_size=32,             # max graphs per batch
    bin_width=10,                  # group samples by atom count bins
    shuffle=False,
    max_gpu_memory_fraction=0.8,   # for auto max_atoms estimation
)

# Build initial batch via greedy bin-packing
batch = sampler.build_initial_batch()

# Request a replacement sample that fits constraints
replacement = sampler.request_replacement(num_atoms=50, num_edges=200)

# Check if all samples consumed
sampler.exhausted  # bool
""",
    "in_flight": """
opt = DemoDynamics(
    model=model,
    n_steps=100,
    dt=1.0,
    sampler=sampler,
    refill_frequency=1,        # check for replacements every N steps
    convergence_hook=ConvergenceHook.from_fmax(0.05),
)
md = DemoDynamics(model=model, n_steps=500, dt=0.5)

fused = opt + md

with fused:
    result = fused.run()       # no batch arg — built from sampler
""",
}


@pytest.mark.parametrize("name", LISTINGS)
def test_listing_is_the_seeds_own(shared, name):
    (seed,) = (shared / "seeds").glob("003_*.txt")
    mine = " ".join(LISTINGS[name].split()).replace("alchemi_xr", "nvalchemi")
    assert mine in " ".join(seed.read_text().split())


def run(name: str, space: SimpleNamespace) -> SimpleNamespace:
    exec(compile(LISTINGS[name], f"<listing {name}>", "exec"), vars(space))
    return space


def molecules(count: int, seed: int = 0) -> list[AtomicData]:
    generator = torch.Generator().manual_seed(seed)
    return [
        AtomicData(
            atomic_numbers=torch.tensor([6, 8, 1, 1, 1][:n], dtype=torch.long),
            positions=torch.randn(n, 3, generator=generator),
        )
        for n in (3 + i % 3 for i in range(count))
    ]


@pytest.fixture
def space() -> SimpleNamespace:
    """What the listings take from those before them."""
    from alchemi_xr.dynamics import ConvergenceHook, DemoDynamics, FusedStage
    from alchemi_xr.models.demo import DemoModelWrapper

    torch.manual_seed(0)
    return SimpleNamespace(
        torch=torch,
        AtomicData=AtomicData,
        Batch=Batch,
        ConvergenceHook=ConvergenceHook,
        DemoDynamics=DemoDynamics,
        FusedStage=FusedStage,
        model=DemoModelWrapper(),
        batch=Batch.from_data_list(molecules(4)),
    )


@pytest.fixture
def near_minimum(space):
    """A batch from which the criteria of the listings are met in some steps."""
    from alchemi_xr.dynamics import FIRE

    convergence = space.ConvergenceHook.from_fmax(0.06)
    FIRE(space.model, n_steps=500, convergence_hook=convergence).run(space.batch)
    space.batch["velocities"].zero_()
    return space


def test_overview():
    """The import list of the overview, but for DistributedPipeline."""
    from alchemi_xr.dynamics import (  # noqa: F401
        BaseDynamics,
        ConvergenceHook,
        DataSink,
        DemoDynamics,
        DynamicsStage,
        FusedStage,
        GPUBuffer,
        Hook,
        HostMemory,
        SizeAwareSampler,
        ZarrData,
        hooks,
    )

    run("names", SimpleNamespace())


def test_basic():
    space = run("basic", SimpleNamespace())
    assert space.result is space.batch
    assert space.dynamics.step_count == 1000
    assert float(space.batch["forces"].abs().max()) > 0
    assert torch.isfinite(space.batch["positions"]).all()


@pytest.mark.parametrize("name", ["convergence", "from_fmax"])
def test_convergence(near_minimum, name):
    space = run(name, near_minimum)
    space.dynamics.run(space.batch)
    assert 1 <= space.dynamics.step_count < 10000
    assert (space.batch["fmax"] <= 0.05).all()
    if name == "convergence":
        assert (space.batch["energy_change"] <= 1e-6).all()


def test_hooks(space, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("hooks", space)
    run("with", space)
    with open("md_log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 * 4  # ten steps of a thousand, four systems
    assert {"step", "graph_idx", "status", "energy", "fmax", "temperature"} <= set(rows[0])


def test_opt_md_explicit_and_chaining(space):
    run("opt_md", space)
    assert space.result is space.batch
    assert (space.batch["status"] == 2).all()
    steps = space.batch["steps"]
    assert ((steps > 500) & (steps <= 600)).all()
    run("explicit", space)
    assert space.fused.sub_stages == [(0, space.opt), (1, space.md)]
    space.analysis = space.DemoDynamics(model=space.model, n_steps=3)
    space.extra_stage = space.DemoDynamics(model=space.model, n_steps=4)
    run("chaining", space)
    assert space.fused_3.sub_stages == [(0, space.opt), (1, space.md), (2, space.extra_stage)]


def test_with_block(space):
    space.dynamics = space.DemoDynamics(model=space.model, n_steps=20)
    run("with", space)
    assert space.dynamics.step_count == 20


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compile(space):
    space.opt = space.DemoDynamics(
        model=space.model,
        n_steps=100,
        dt=1.0,
        convergence_hook=space.ConvergenceHook.from_fmax(0.05),
    )
    space.md = space.DemoDynamics(model=space.model, n_steps=500, dt=0.5)
    plain = space.batch.clone()
    (space.opt + space.md).run(plain)
    run("compile", space)
    assert (space.batch["status"] == 2).all()
    assert torch.equal(space.batch["steps"], plain["steps"])
    torch.testing.assert_close(space.batch["positions"], plain["positions"], atol=1e-3, rtol=0)


def test_comm_options(space):
    assert run("comm_mode", space).stage.comm_mode == "async_recv"
    assert run("buffer_config", space).stage.buffer_config.num_nodes == 5000


def test_buffer(space):
    space.src_batch = space.batch.clone()
    space.converged_mask = torch.tensor([True, False, True, False])
    run("buffer", space)
    assert len(space.src_batch) == 2
    assert len(space.buffer) == 0
    assert space.buffer.system_capacity == 100


@pytest.mark.parametrize("store", [False, True])
def test_in_flight_batching(space, tmp_path, store):
    """Sampler and sinks given to the first stage; the data from a store or from memory."""
    from alchemi_xr.data import AtomicDataZarrReader, AtomicDataZarrWriter, Dataset
    from alchemi_xr.data.datapipes import InMemoryDataset
    from alchemi_xr.dynamics import HostMemory, ZarrData

    count = 40
    if store:
        AtomicDataZarrWriter(tmp_path / "data.zarr").write(molecules(count))
        space.dataset = Dataset(AtomicDataZarrReader(tmp_path / "data.zarr"), device="cpu")
    else:
        space.dataset = InMemoryDataset(Batch.from_data_list(molecules(count)))
    run("sampler", space)
    assert len(space.batch) == 32
    assert space.replacement.num_nodes <= 50
    assert not space.sampler.exhausted
    sink = ZarrData(tmp_path / "done.zarr") if store else HostMemory(count)
    # The listing names no sink: what it simulated would be gone.
    demo = space.DemoDynamics
    space.DemoDynamics = lambda **kw: demo(**{"sinks": [sink], **kw})
    run("in_flight", space)
    assert space.result is None
    assert space.sampler.exhausted
    done = sink.read()
    assert len(done) == count - 33  # all but those drawn by hand before
    assert sorted(done["dataset_index"].reshape(-1).tolist()) == sorted(
        set(range(count))
        - set(space.batch["dataset_index"].reshape(-1).tolist())
        - set(space.replacement.dataset_index.reshape(-1).tolist())
    )
    assert (done["status"] == 2).all()
    if store:
        space.dataset.close()

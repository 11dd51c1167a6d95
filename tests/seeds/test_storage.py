"""The listings of the storage guide run as they stand: only the package's name and the
device are others. What a listing takes for granted is made before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
)

PIPELINE = """
from nvalchemi.data.datapipes import (
    AtomicDataZarrWriter,
    AtomicDataZarrReader,
    Dataset,
    DataLoader,
)
"""

WRITING = """
from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import AtomicDataZarrWriter
import torch

writer = AtomicDataZarrWriter("dataset.zarr")

# Write a single system
data = AtomicData(
    positions=torch.randn(10, 3),
    atomic_numbers=torch.ones(10, dtype=torch.long),
    energies=torch.tensor([[0.5]]),
)
writer.write(data)

# Write a list of systems
writer.write([data1, data2, data3])

# Write a Batch
batch = Batch.from_data_list([data1, data2])
writer.write(batch)
"""

APPENDING = """
writer = AtomicDataZarrWriter("dataset.zarr")
writer.append(new_data)          # single AtomicData
writer.append([data1, data2])    # list
writer.append(batch)             # Batch
"""

CUSTOM = """
writer.add_custom("my_feature", torch.randn(total_atoms, 32), level="atom")
"""

DELETING = """
writer.delete([0, 2])   # soft-delete samples 0 and 2 (sets mask=False)
writer.defragment()      # rebuild store without deleted samples
"""

READING = """
from nvalchemi.data.datapipes import AtomicDataZarrReader

reader = AtomicDataZarrReader(
    "dataset.zarr",
    pin_memory=False,                  # pin tensors to page-locked memory
    include_index_in_metadata=True,    # add "index" key to metadata
)

# Access a sample
data_dict, metadata = reader[0]       # (dict[str, Tensor], dict)

len(reader)          # number of active (non-deleted) samples
reader.field_names   # list of field names in each sample
reader.close()       # release resources
reader.refresh()     # reload after external modifications
"""

DATASET = """
from nvalchemi.data.datapipes import AtomicDataZarrReader, Dataset

reader = AtomicDataZarrReader("dataset.zarr")
ds = Dataset(
    reader,
    device="cuda",       # target device ("auto" picks CUDA if available)
    num_workers=2,       # thread pool size for prefetching
)

# Get a sample
atomic_data, metadata = ds[0]   # AtomicData on target device

# Lightweight metadata (no full construction)
num_atoms, num_edges = ds.get_metadata(0)

len(ds)    # number of samples
ds.close()

# Context manager
with Dataset(reader, device="cuda") as ds:
    data, meta = ds[0]
"""

PREFETCHING = """
ds = Dataset(reader, device="cuda")

# Prefetch a single sample
stream = torch.cuda.Stream()
ds.prefetch(0, stream=stream)
atomic_data, meta = ds[0]   # waits for prefetch to complete

# Prefetch multiple samples
streams = [torch.cuda.Stream() for _ in range(4)]
ds.prefetch_batch([0, 1, 2, 3], streams=streams)

# Cancel pending prefetches
ds.cancel_prefetch()       # cancel all
ds.cancel_prefetch(0)      # cancel specific index
"""

LOADING = """
from nvalchemi.data.datapipes import AtomicDataZarrReader, Dataset, DataLoader

reader = AtomicDataZarrReader("dataset.zarr")
ds = Dataset(reader, device="cuda", num_workers=4)

loader = DataLoader(
    ds,
    batch_size=32,
    shuffle=True,
    drop_last=False,
    sampler=None,              # optional torch Sampler
    prefetch_factor=2,         # batches to prefetch ahead
    num_streams=4,             # CUDA streams for prefetching
    use_streams=True,          # enable stream prefetching
)

for batch in loader:
    # batch is a Batch with concatenated tensors on target device
    print(batch.num_graphs, batch.num_nodes)

len(loader)                    # number of batches
loader.set_epoch(epoch)        # for distributed sampler
"""

CUSTOM_READER = '''
from nvalchemi.data.datapipes.backends.base import Reader

class MyReader(Reader):
    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.path = path

    def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
        """Load raw tensor dict for a single sample."""
        ...

    def __len__(self) -> int:
        """Total number of samples."""
        ...

    # Optional overrides:
    def _get_sample_metadata(self, index: int) -> dict[str, Any]:
        """Per-sample metadata (default: empty dict)."""
        ...

    def _get_field_names(self) -> list[str]:
        """List of field names in each sample."""
        ...

    def close(self):
        """Release resources."""
        ...
'''

CUSTOM_READER_IN_USE = """
reader = MyReader("data/", pin_memory=True)
ds = Dataset(reader, device="cuda")
loader = DataLoader(ds, batch_size=16)
"""

WORKFLOW = """
import torch
from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrWriter,
    AtomicDataZarrReader,
    Dataset,
    DataLoader,
)

# --- Write ---
data_list = [
    AtomicData(
        positions=torch.randn(n, 3),
        atomic_numbers=torch.ones(n, dtype=torch.long),
        energies=torch.tensor([[float(i)]]),
    )
    for i, n in enumerate([5, 8, 3, 12])
]

writer = AtomicDataZarrWriter("train.zarr")
writer.write(data_list)

# Append more later
writer.append(AtomicData(
    positions=torch.randn(6, 3),
    atomic_numbers=torch.ones(6, dtype=torch.long),
))

# --- Read & Train ---
reader = AtomicDataZarrReader("train.zarr")
ds = Dataset(reader, device="cuda", num_workers=4)
loader = DataLoader(ds, batch_size=2, shuffle=True, prefetch_factor=2)

for epoch in range(10):
    loader.set_epoch(epoch)
    for batch in loader:
        energies = batch["energies"]      # [batch_size, 1]
        positions = batch["positions"]    # [total_nodes, 3]
        # ... model forward pass ...
"""

LISTINGS = [
    PIPELINE,
    WRITING,
    APPENDING,
    CUSTOM,
    DELETING,
    READING,
    DATASET,
    PREFETCHING,
    LOADING,
    CUSTOM_READER,
    CUSTOM_READER_IN_USE,
    WORKFLOW,
]


def test_the_listings_are_those_of_the_guide(shared: Path) -> None:
    (seed,) = (p for p in (shared / "seeds").iterdir() if "nvalchemi-data-storage" in p.read_text())
    blocks = re.findall(r"```python\n(.*?)```", seed.read_text(), flags=re.DOTALL)
    assert [b.strip() for b in blocks] == [listing.strip() for listing in LISTINGS]


def local(listing: str) -> str:
    """The listing for this package, and for this machine's device."""
    code = listing.replace("nvalchemi", "alchemi_xr")
    return code if torch.cuda.is_available() else code.replace("cuda", "cpu")


def sample(atoms: int, energy: float) -> AtomicData:
    return AtomicData(
        positions=torch.randn(atoms, 3),
        atomic_numbers=torch.ones(atoms, dtype=torch.long),
        energies=torch.tensor([[energy]]),
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a listing in an empty folder, with the names that it takes for granted."""
    monkeypatch.chdir(tmp_path)

    def execute(listing: str, **names: Any) -> dict[str, Any]:
        granted: dict[str, Any] = {
            "torch": torch,
            "Any": Any,
            "AtomicDataZarrWriter": AtomicDataZarrWriter,
            "Dataset": Dataset,
            "DataLoader": DataLoader,
            "data1": sample(4, 1.0),
            "data2": sample(2, 2.0),
            "data3": sample(7, 3.0),
            "new_data": sample(3, 4.0),
        }
        names = {**granted, **names}
        exec(compile(local(listing), "<listing>", "exec"), names)
        return names

    return execute


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A store ``dataset.zarr`` of five samples where the listings run."""
    path = tmp_path / "dataset.zarr"
    AtomicDataZarrWriter(path).write([sample(n, float(i)) for i, n in enumerate([5, 8, 3, 12, 1])])
    return path


def stored_energies(path: Path) -> list[float]:
    with AtomicDataZarrReader(path) as reader:
        return [float(e) for e in reader.read_batch(range(len(reader)))["energies"].flatten()]


def test_pipeline(run: Callable[..., dict[str, Any]]) -> None:
    assert run(PIPELINE)["DataLoader"] is DataLoader


@pytest.mark.parametrize(("number", "energies"), [(0, [0.5]), (1, [1, 2, 3]), (2, [1, 2])])
def test_writing(
    run: Callable[..., dict[str, Any]], tmp_path: Path, number: int, energies: list[float]
) -> None:
    # The listing writes three times to one path, which holds one store: each write by itself.
    tree = ast.parse(WRITING)
    writes = [node for node in tree.body if "writer.write" in ast.unparse(node)]
    assert len(writes) == 3
    tree.body = [node for node in tree.body if node not in writes or node is writes[number]]
    run(ast.unparse(tree))
    assert stored_energies(tmp_path / "dataset.zarr") == energies


def test_writing_twice_to_one_path_is_refused(run: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(FileExistsError, match="already exists"):
        run(WRITING)


def test_appending(run: Callable[..., dict[str, Any]], stored: Path) -> None:
    run(APPENDING, batch=Batch.from_data_list([sample(2, 7.0), sample(3, 8.0)]))
    assert stored_energies(stored) == [0, 1, 2, 3, 4, 4, 1, 2, 7, 8]


def test_custom_arrays(run: Callable[..., dict[str, Any]], stored: Path) -> None:
    run(CUSTOM, writer=AtomicDataZarrWriter("dataset.zarr"), total_atoms=29)
    with AtomicDataZarrReader(stored) as reader:
        assert reader[3][0]["my_feature"].shape == (12, 32)


def test_deleting(run: Callable[..., dict[str, Any]], stored: Path) -> None:
    run(DELETING, writer=AtomicDataZarrWriter("dataset.zarr"))
    assert stored_energies(stored) == [1, 3, 4]


def test_reading(run: Callable[..., dict[str, Any]], stored: Path) -> None:
    # A closed reader cannot be refreshed, as in the guide's own package: the last two lines
    # stand for two uses, so each runs without the other.
    for left_out in ("reader.close()", "reader.refresh()"):
        tree = ast.parse(READING)
        tree.body = [node for node in tree.body if ast.unparse(node) != left_out]
        names = run(ast.unparse(tree))
        assert names["data_dict"]["energies"].tolist() == [[0.0]]
        assert names["metadata"]["index"] == 0
    with pytest.raises(RuntimeError, match="Cannot refresh a closed reader"):
        run(READING)


def test_dataset(run: Callable[..., dict[str, Any]], stored: Path) -> None:
    # The first dataset closes the reader; the second one opens it again.
    names = run(DATASET)
    assert (names["num_atoms"], names["num_edges"]) == (5, 0)
    assert names["atomic_data"].energies.tolist() == [[0.0]]
    assert names["meta"]["index"] == 0
    assert names["reader"].closed


def test_prefetching(run: Callable[..., dict[str, Any]], stored: Path) -> None:
    with AtomicDataZarrReader("dataset.zarr") as reader:
        names = run(PREFETCHING, reader=reader)
        assert names["meta"]["index"] == 0
        assert names["ds"].prefetch_count == 0
        names["ds"].close()


def test_loading(
    run: Callable[..., dict[str, Any]], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(LOADING, epoch=3)
    assert capsys.readouterr().out == "5 29\n"
    assert names["loader"].epoch == 3
    names["ds"].close()


def test_custom_reader(run: Callable[..., dict[str, Any]]) -> None:
    names = run(CUSTOM_READER)
    names = run(CUSTOM_READER_IN_USE, MyReader=names["MyReader"])
    assert names["reader"].path == "data/"

    class Filled(names["MyReader"]):  # type: ignore[misc]
        def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
            return sample(index + 1, float(index)).to_dict()

        def __len__(self) -> int:
            return 5

        def _get_sample_metadata(self, index: int) -> dict[str, Any]:
            return {"number": index}

    names = run(CUSTOM_READER_IN_USE, MyReader=Filled)
    assert names["ds"][3][1]["number"] == 3
    (batch,) = names["loader"]
    assert batch["energies"].flatten().tolist() == [0, 1, 2, 3, 4]


def test_workflow(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    names = run(WORKFLOW)
    # The sample appended without energy is there, its energy is not.
    assert names["energies"].shape[1:] == (1,)
    found = torch.cat([batch["energies"] for batch in names["loader"]])
    assert found.shape == (5, 1)
    assert sorted(found[~found.isnan()].tolist()) == [0, 1, 2, 3]
    assert int(found.isnan().sum()) == 1
    names["ds"].close()

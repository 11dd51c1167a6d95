"""nvalchemi-toolkit's own reader and writer on stores of ours.

That package is no dependency; these tests run where it is installed.
"""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import verify

toolkit = pytest.importorskip(
    "nvalchemi.data", reason="nvalchemi-toolkit is not installed in this environment"
)
pytestmark = [
    pytest.mark.compat,
    # The toolkit's own imports and casts warn.
    pytest.mark.filterwarnings("ignore"),
]


def block(seed=0, num=4, forces=True):
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, 6, num)
    ptr = np.concatenate(([0], np.cumsum(counts)))
    edges_ptr = np.arange(num + 1) * 2
    arrays = {
        "atomic_numbers": rng.integers(1, 9, ptr[-1]),
        "positions": rng.normal(size=(ptr[-1], 3)),
        "energy": rng.normal(size=(num, 1)),
        "cell": rng.normal(size=(num, 3, 3)),
        "pbc": rng.random((num, 3)) < 0.5,
        "neighbor_list": np.tile(np.array([[0, 1], [1, 0]]), (num, 1)),
    }
    levels = {
        "atomic_numbers": "atom",
        "positions": "atom",
        "energy": "system",
        "cell": "system",
        "pbc": "system",
        "neighbor_list": "edge",
    }
    if forces:
        arrays["forces"], levels["forces"] = rng.normal(size=(ptr[-1], 3)), "atom"
    return Block(ptr, edges_ptr, arrays, levels)


def read_by_toolkit(path):
    with toolkit.AtomicDataZarrReader(path) as reader:
        if hasattr(reader, "check_integrity"):
            reader.check_integrity()
        return [reader.read(i)[0] for i in range(len(reader))]


def assert_read(path, wanted):
    found = read_by_toolkit(path)
    assert len(found) == wanted.num_samples
    for i, sample in enumerate(found):
        one = wanted.slice(i, i + 1)
        for name in wanted.names:
            np.testing.assert_array_equal(
                sample[name].numpy(), one[name], err_msg=f"{name} of sample {i}"
            )


@pytest.mark.parametrize(
    "config", [None, "raw", "small", {"core": {"chunk_size": 4, "shard_size": 8}}]
)
def test_its_reader_reads_ours(tmp_path, config):
    path = tmp_path / "a.zarr"
    StoreWriter(path, config).write(block())
    assert_read(path, block())


def test_its_reader_reads_ours_after_every_operation(tmp_path):
    path = tmp_path / "a.zarr"
    writer = StoreWriter(path)
    writer.write(block())
    writer.append(block(1, forces=False))
    writer.append(block(2, 2))
    whole = Block.concat([block(), block(1, forces=False), block(2, 2)])
    assert_read(path, whole)
    writer.add_custom("tag", np.arange(10.0), "system")
    writer.delete([0, 5])
    left = np.array([1, 2, 3, 4, 6, 7, 8, 9])
    assert_read(path, whole.take(left))
    writer.defragment()
    assert_read(path, whole.take(left))
    found = read_by_toolkit(path)
    assert [float(s["tag"].ravel()[0]) for s in found] == left.tolist()


def test_its_append_to_ours_is_noticed_and_read(tmp_path):
    path = tmp_path / "a.zarr"
    fields = ["atomic_numbers", "positions", "energy", "neighbor_list"]
    StoreWriter(path).write(block().select_fields(fields))
    sample = read_by_toolkit(path)[1]
    data = toolkit.AtomicData(**{name: sample[name] for name in fields})
    writer = toolkit.AtomicDataZarrWriter(path)
    writer.append(data)
    snapshot = open_store(path)
    assert snapshot.is_foreign
    assert snapshot.num_samples == 5
    found = snapshot.read_block([4], fields)
    for name in fields:
        np.testing.assert_array_equal(found[name], block().slice(1, 2)[name])
    assert verify(path).ok


def test_its_deletion_in_ours_is_honoured(tmp_path):
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(block())
    toolkit.AtomicDataZarrWriter(path).delete([1])
    assert open_store(path).active.tolist() == [0, 2, 3]
    StoreWriter(path).defragment()
    assert_read(path, block().take(np.array([0, 2, 3])))

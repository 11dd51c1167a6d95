"""Parallel, aligned writes into a store that is not one before its commit."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from alchemi_xr.errors import (
    ConfigError,
    FieldError,
    NotAStoreError,
    PlanError,
    StoreExistsError,
    UnknownFieldError,
)
from alchemi_xr.store import BulkWriter, FieldLayout, StoreWriter, open_store
from alchemi_xr.store.incoming import globalised
from alchemi_xr.store.verify import verify

CONFIG = {
    "core": {"chunk_size": 4, "shard_size": 8},
    "meta": {"chunk_size": 5},
    "field_overrides": {"forces": {"chunk_size": 3, "shard_size": 12}},
}


def layouts(block):
    return [
        FieldLayout(
            name,
            block.levels[name],
            "str" if block[name].dtype == object else str(block[name].dtype),
            block[name].shape[1:],
            holes=name == "forces",
        )
        for name in block.names
    ]


def create(path, block, **options):
    return BulkWriter.create(
        path, layouts(block), np.diff(block.atoms_ptr), np.diff(block.edges_ptr), **options
    )


def on_disk(block, name):
    values = block[name]
    return globalised(values, block, 0, where="") if name == "neighbor_list" else values


def test_pieces_written_by_many_in_any_order_twice(make, same, tmp_path):
    block = make(0, 50, text=True, holes=("forces",))
    path = tmp_path / "a.zarr"
    writer = create(path, block, config=CONFIG, provenance={"source": "x"})
    assert writer.shard_rows("atom") == 24
    assert writer.shard_rows("edge") == 8
    token = pickle.dumps(writer)
    tasks = []
    for name in block.names:
        unit = writer.shard_rows(block.levels[name])
        tasks += [(name, s, unit) for s in range(0, block.rows(block.levels[name]), unit)]
    np.random.default_rng(0).shuffle(tasks)

    def run(task):
        name, start, unit = task
        pickle.loads(token).write_rows(
            name, int(start), on_disk(block, name)[int(start) : int(start) + int(unit)]
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, [*tasks, *tasks[:5]]))
    for start in range(0, 50, writer.shard_rows("system")):
        stop = start + writer.shard_rows("system")
        writer.write_present("forces", start, block.has("forces")[start:stop])
    with pytest.raises(NotAStoreError, match="unfinished"):
        open_store(path)
    mask = np.ones(50, bool)
    mask[[3, 49]] = False
    BulkWriter.open(path).commit(mask)
    snapshot = open_store(path)
    same(snapshot.read_block(slice(None)), block)
    assert snapshot.samples_mask.tolist() == mask.tolist()
    assert snapshot.schema.provenance == {"source": "x"}
    assert snapshot.generation == 1
    assert verify(path).clean
    with pytest.raises(NotAStoreError, match="no store is being built"):
        BulkWriter.open(path)
    StoreWriter(path).append(block)
    same(open_store(path).read_block(slice(50, 100)), block)


def test_a_piece_that_is_no_whole_shard_is_refused(make, tmp_path):
    block = make(0, 50)
    writer = create(tmp_path / "a.zarr", block, config=CONFIG)
    positions = block["positions"]
    for start, stop in ((4, 12), (0, 12), (8, len(positions) - 1)):
        with pytest.raises(PlanError, match="no whole shards"):
            writer.write_rows("positions", start, positions[start:stop])
    writer.write_rows("positions", 8, positions[8:])
    with pytest.raises(PlanError, match="never written"):
        writer.commit()
    with pytest.raises(NotAStoreError, match="unfinished"):
        open_store(tmp_path / "a.zarr")


def test_pieces_that_do_not_fit_their_layout(make, tmp_path):
    block = make(0, 4, text=True)
    writer = create(tmp_path / "a.zarr", block)
    with pytest.raises(FieldError, match="'positions' was laid out otherwise"):
        writer.write_rows("positions", 0, block["positions"][:, :2])
    with pytest.raises(FieldError, match="'positions' was laid out otherwise"):
        writer.write_rows("positions", 0, block["positions"].astype(int))
    with pytest.raises(FieldError, match="text"):
        writer.write_rows("name", 0, np.zeros(4))
    with pytest.raises(UnknownFieldError, match="Nearest: 'forces'"):
        writer.write_rows("force_s", 0, block["forces"])
    with pytest.raises(PlanError, match="holes=True"):
        writer.write_present("energy", 0, np.ones(4, bool))


def test_what_create_refuses(make, tmp_path):
    block = make(0, 4)
    (tmp_path / "there").mkdir()
    with pytest.raises(StoreExistsError, match="already exists"):
        create(tmp_path / "there", block)
    with pytest.raises(PlanError, match="negative"):
        BulkWriter.create(tmp_path / "b", layouts(block), [1, -1], [0, 0])
    with pytest.raises(PlanError, match="different lengths"):
        BulkWriter.create(tmp_path / "b", layouts(block), [1, 1], [0])
    with pytest.raises(ConfigError, match="Nearest: 'forces'"):
        create(tmp_path / "b", block, config={"field_overrides": {"forcs": {"chunk_size": 1}}})
    with pytest.raises(FieldError, match="twice"):
        BulkWriter.create(tmp_path / "b", [*layouts(block), *layouts(block)], [1], [0])
    with pytest.raises(FieldError, match="per sample"):
        BulkWriter.create(tmp_path / "b", [FieldLayout("t", "atom", "str")], [1], [0])
    assert not (tmp_path / "b").exists()


def test_holes_that_were_none_are_dropped(make, tmp_path):
    block = make(0, 4)
    writer = create(tmp_path / "a.zarr", block)
    for name in block.names:
        writer.write_rows(name, 0, on_disk(block, name))
    writer.write_present("forces", 0, np.ones(4, bool))
    writer.commit()
    assert open_store(tmp_path / "a.zarr").present("forces") is None
    assert verify(tmp_path / "a.zarr").clean


def test_defaults_hold_whatever_the_counts(make, tmp_path):
    writer = create(tmp_path / "a.zarr", make(0, 1))
    assert writer.shard_rows("atom") == 65536
    assert writer.shard_rows("edge") == 262144


def test_no_samples_at_all(make, tmp_path):
    block = make(0, 4).take(np.empty(0, int))
    create(tmp_path / "a.zarr", block).commit()
    assert open_store(tmp_path / "a.zarr").num_samples == 0


def test_wide_rows_get_shorter_chunks_that_still_align(tmp_path):
    wide = FieldLayout("graph_embeddings", "system", "float64", (4096,))
    writer = BulkWriter.create(
        tmp_path / "a.zarr", [wide, FieldLayout("energy", "system", "float64", (1,))], [1], [0]
    )
    chunk = writer.session.array("core/graph_embeddings").chunks[0]
    assert chunk * 4096 * 8 <= 16 * 2**20
    assert writer.shard_rows("system") == 65536

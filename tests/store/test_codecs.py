"""Profiles and configs: what is asked for is what is on disk."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import zarr

from alchemi_xr.errors import ConfigError
from alchemi_xr.store import StoreWriter, ZarrArrayConfig, ZarrWriteConfig, open_store
from alchemi_xr.store.codecs import as_config


def names(path, field):
    array = open_store(path).array(field)
    return [type(c).__name__ for c in (*array.filters, *array.compressors)]


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [
        ("raw", []),
        ("fast", ["BloscCodec", "Crc32cCodec"]),
        ("balanced", ["BloscCodec", "Crc32cCodec"]),
        ("small", ["BloscCodec", "Crc32cCodec"]),
    ],
)
def test_profiles(make, same, tmp_path, profile, wanted):
    path = tmp_path / "a.zarr"
    StoreWriter(path, profile).write(make(0))
    assert names(path, "positions") == wanted
    same(open_store(path).read_block(slice(None)), make(0))


def test_the_default_keeps_floats_and_pointers_raw(make, tmp_path):
    """They grow in place and can be mapped; what compresses is compressed."""
    path = tmp_path / "a.zarr"
    StoreWriter(path).write(make(0))
    for name in ("positions", "energy", "forces"):
        assert names(path, name) == []
    for name in ("atomic_numbers", "neighbor_list"):
        assert names(path, name) == ["BloscCodec", "Crc32cCodec"]
    for name, wanted in (("atoms_ptr", []), ("atoms_mask", ["BloscCodec", "Crc32cCodec"])):
        array = zarr.open_array(path / "meta" / name, mode="r")
        assert [type(c).__name__ for c in array.compressors] == wanted


def test_lossy_rounds_atoms_and_keeps_energies(make, tmp_path):
    pytest.importorskip("numcodecs")
    path = tmp_path / "a.zarr"
    block = make(0, 20)
    StoreWriter(path, "lossy:12").write(block)
    found = open_store(path).read_block(slice(None))
    np.testing.assert_array_equal(found["energy"], block["energy"])
    assert (found["positions"] != block["positions"]).any()
    np.testing.assert_allclose(found["positions"], block["positions"], rtol=2.0**-12)
    np.testing.assert_array_equal(found["atomic_numbers"], block["atomic_numbers"])


def test_groups_and_overrides(make, same, tmp_path):
    path = tmp_path / "a.zarr"
    config = {
        "core": ZarrArrayConfig(chunk_size=4, shard_size=8, compressors="zstd:5"),
        "custom": {"chunk_size": 3},
        "meta": {"compressors": ()},
        "field_overrides": {
            "positions": {"chunk_size": 2, "shard_size": 6, "compressors": ["gzip"]}
        },
    }
    writer = StoreWriter(path, config)
    writer.write(make(0, 20))
    writer.add_custom("tag", np.arange(20.0), "system")
    snapshot = open_store(path)
    assert snapshot.array("forces").chunks[0] == 4
    assert snapshot.array("forces").shards[0] == 8
    assert snapshot.array("positions").shards[0] == 6
    assert names(path, "positions") == ["GzipCodec"]
    assert names(path, "forces") == ["ZstdCodec"]
    assert snapshot.array("tag").chunks == (3,)
    same(snapshot.read_block(slice(None), make(0).names), make(0, 20))
    assert pickle.loads(pickle.dumps(writer.config)) == writer.config


@pytest.mark.parametrize("codec", ["lz4", "blosc-zstd:7", "gzip", "zstd", None])
def test_codecs_by_name(make, same, codec):
    store: dict = {}
    StoreWriter(store, ZarrArrayConfig(compressors=codec)).write(make(0))
    same(open_store(store).read_block(slice(None)), make(0))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"cores": {}}, "Nearest: 'core'"),
        ({"core": {"chunk_sizes": 3}}, "Nearest: 'chunk_size'"),
        ({"core": 3}, "no array config"),
        ({"core": {"chunk_size": 0}}, "at least 1"),
        ({"core": {"shard_size": 1.5}}, "at least 1"),
        ({"core": {"chunk_size": 4, "shard_size": 6}}, "must be a multiple"),
        ("fats", "Nearest: 'fast'"),
        ("lossy:0", "not known"),
        (3, "no write config"),
    ],
)
def test_wrong_configs(config, words):
    with pytest.raises(ConfigError, match=words):
        as_config(config)


def test_a_codec_that_is_not_known(make):
    with pytest.raises(ConfigError, match="'zst' is not known"):
        StoreWriter({}, ZarrArrayConfig(compressors="zst")).write(make(0))


def test_defaults_are_the_same_object_for_nothing_and_default():
    assert as_config(None) == ZarrWriteConfig() == as_config("mixed") == as_config({})

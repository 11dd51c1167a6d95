"""Byte budgets, what a store says of itself, damaged chunks, and measured profiles."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr.errors import ConfigError, FieldError
from alchemi_xr.store import StoreWriter, ZarrArrayConfig, ZarrWriteConfig, open_store
from alchemi_xr.store.describe import describe
from alchemi_xr.store.measure import Measured, best, measure
from alchemi_xr.store.verify import verify

FIELDS = {"positions": "f8", "atomic_numbers": "i8", "energy": "f8"}


def test_chunks_by_bytes_at_each_level(make, same, tmp_path):
    config = ZarrWriteConfig(
        profile="raw",
        chunk_bytes={"atoms": "1KiB", "system": 64},
        shard_bytes={"atom": "4 KiB"},
        field_overrides={"atomic_numbers": {"chunk_bytes": 256}},
    )
    block = make(0, 40, fields=FIELDS)
    StoreWriter(tmp_path / "a.zarr", config).write(block)
    fields = describe(tmp_path / "a.zarr")["fields"]
    # The largest power of two of rows: 24, 8 and 8 bytes a row.
    assert fields["positions"]["chunk_rows"] == 32
    assert fields["positions"]["shard_rows"] == 128
    assert fields["atomic_numbers"]["chunk_rows"] == 32
    assert fields["energy"]["chunk_rows"] == 8
    assert fields["energy"]["shard_rows"] is None
    same(open_store(tmp_path / "a.zarr").read_block(slice(None)), block)


def test_rows_and_bytes_together_are_refused_and_the_stronger_config_decides():
    with pytest.raises(ConfigError, match="both given"):
        ZarrArrayConfig(chunk_size=3, chunk_bytes="1MiB")
    for wrong in ("1 parsec", "", 0, -1, True, "1.2.3MiB"):
        with pytest.raises(ConfigError, match="no number of bytes"):
            ZarrArrayConfig(chunk_bytes=wrong)
    config = ZarrWriteConfig(core={"chunk_bytes": "1MiB"}, field_overrides={"x": {"chunk_size": 7}})
    assert config.for_array("core", "x") == ZarrArrayConfig(chunk_size=7)


def test_the_encoding_is_recorded_and_kept(make, tmp_path):
    path = tmp_path / "a.zarr"
    config = {"profile": "raw", "core": {"filters": "delta", "compressors": ["shuffle", "zstd:5"]}}
    StoreWriter(path, {**config, "core": {}}).write(make(0, 5, fields=FIELDS))
    writer = StoreWriter(path)
    writer.delete([0])
    writer.defragment()
    facts = describe(path)
    assert facts["encoding"] == {"profile": "raw"}
    assert facts["fields"]["positions"]["codecs"] == []
    writer.defragment({"profile": "fast", "core": {"compressors": ["shuffle", "zstd:5", "crc32c"]}})
    StoreWriter(path).append(make(1, 2, fields={**FIELDS, "charge": "f8"}))
    facts = describe(path)
    assert facts["encoding"]["core"] == {"compressors": ["shuffle", "zstd:5", "crc32c"]}
    assert facts["fields"]["charge"]["codecs"] == ["shuffle(8)", "zstd(5)", "crc32c"]
    np.testing.assert_array_equal(
        open_store(path).read_rows("charge", 4, 6),
        make(1, 2, fields={**FIELDS, "charge": "f8"})["charge"],
    )


def test_what_a_store_says_of_itself(make, anywhere):
    writer = StoreWriter(anywhere, "balanced")
    writer.write(make(0, 5, fields=FIELDS, holes=("energy",)), provenance={"source": "here"})
    writer.append(make(1, 3, fields={"positions": "f8"}))
    writer.delete([0, 7])
    facts = describe(anywhere)
    snapshot = open_store(anywhere)
    absent = ~snapshot.present("energy") & snapshot.samples_mask
    assert facts["fields"]["energy"]["holes"] == absent.sum() > 2
    assert facts["fields"]["energy"]["samples"] + absent.sum() == 6 == facts["samples"]
    assert facts["deleted"] == 2
    assert facts["fields"]["positions"]["codecs"] == ["blosc(zstd, 3, shuffle)", "crc32c"]
    assert facts["raw_bytes"] == sum(
        snapshot.read_block(slice(None))[n].nbytes for n in snapshot.fields
    )
    assert facts["stored_bytes"] > 0
    assert facts["ratio"] == round(facts["raw_bytes"] / facts["stored_bytes"], 3)
    assert facts["provenance"] == {"source": "here"}
    assert [e["operation"] for e in facts["history"]] == ["write", "append", "delete"]
    assert [e["samples"] for e in facts["history"]] == [5, 8, 8]


def test_the_history_is_bounded(make, tmp_path):
    writer = StoreWriter(tmp_path / "a.zarr")
    writer.write(make(0, 2))
    for _ in range(70):
        writer.delete([0])
        writer.undelete([0])
    history = describe(tmp_path / "a.zarr")["history"]
    assert len(history) == 64
    assert history[-1]["generation"] == 141


@pytest.mark.parametrize(
    "config", ["fast", "raw", {"profile": "fast", "core": {"chunk_size": 4, "shard_size": 8}}]
)
def test_checksums_name_the_damaged_chunk(make, tmp_path, config):
    path = tmp_path / "a.zarr"
    base = {"profile": config} if isinstance(config, str) else config
    base = {**base, "core": {"chunk_size": 4, **base.get("core", {})}}
    StoreWriter(path, base).write(make(0, 12, fields=FIELDS, text=True))
    assert verify(path, checksums=True).ok
    file = sorted((path / "core/energy/c").glob("*/0"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data if config != "raw" else data[:-3])
    assert verify(path).ok
    report = verify(path, checksums=True)
    assert len(report.problems) == 1
    assert report.problems[0].startswith("chunk 1 of array 'core/energy' is damaged")
    assert any("carry no checksums" in n for n in report.notices) == (config == "raw")


def test_profiles_are_measured_on_the_data(make, tmp_path):
    found = measure(make(0, 300, fields=FIELDS), ["raw", "small", "lossy:8"], tmp_path, rounds=1)
    by_name = {m.profile: m for m in found}
    assert by_name["raw"].raw_bytes == by_name["small"].raw_bytes
    assert by_name["lossy:8"].stored_bytes < by_name["small"].stored_bytes
    assert all(m.write_speed > 0 and m.read_speed > 0 for m in found)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FieldError, match="no sample"):
        measure(make(0, 4).take([]), ["raw"], tmp_path)
    with pytest.raises(ConfigError, match="smal"):
        measure(make(0, 4), ["smal"], tmp_path)


def test_the_smallest_of_the_fast_ones_is_best():
    raw = Measured("raw", 100, 100, 1.0, 10.0)
    fast, small = Measured("fast", 100, 60, 1.0, 6.0), Measured("small", 100, 20, 1.0, 2.0)
    lossy = Measured("lossy:8", 100, 10, 1.0, 9.0)
    assert best([raw, fast, small, lossy]) is fast
    assert best([raw, Measured("fast", 100, 95, 1.0, 9.0)]) is raw
    with pytest.raises(ConfigError):
        best([lossy])

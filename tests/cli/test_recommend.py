"""``recommend`` and ``info``: what they print of a store and of files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from alchemi_xr.cli.main import app
from alchemi_xr.data.block import Block
from alchemi_xr.store import StoreWriter


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(0)
    ptr = np.arange(201) * 10
    arrays = {
        "atomic_numbers": np.full(2000, 6),
        "positions": rng.normal(size=(2000, 3)),
        "energy": rng.normal(size=(200, 1)),
    }
    levels = {"atomic_numbers": "atom", "positions": "atom", "energy": "system"}
    block = Block(ptr, np.zeros(201, np.int64), arrays, levels)
    StoreWriter(tmp_path / "a.zarr", "small").write(block, provenance={"source": "test"})
    StoreWriter(tmp_path / "a.zarr").delete([3])
    return tmp_path / "a.zarr"


def test_recommend_a_profile_for_a_store(store):
    result = call("recommend", store, "--profile", "lossy:8", "--sample", "20kB", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert set(facts["profiles"]) == {"mixed", "raw", "fast", "balanced", "small", "lossy:8"}
    assert facts["recommended"] in ("mixed", "raw", "fast", "balanced", "small")
    assert 0 < facts["samples"] < 199
    assert facts["profiles"]["small"]["ratio"] > 1.1
    shown = call("recommend", store)
    assert shown.exit_code == 0, shown.output
    assert "recommended: --profile" in shown.stdout
    assert "read MiB/s" in shown.stdout


def test_recommend_for_a_file(tmp_path):
    file = tmp_path / "a.xyz"
    frame = "2\nProperties=species:S:1:pos:R:3 energy=-1.5\nH 0 0 0\nH 0 0 0.74\n"
    file.write_text(frame * 30)
    result = call("recommend", file, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 30
    assert call("recommend", tmp_path / "none.xyz").exit_code == 1
    assert call("recommend", file, "--profile", "tiny").exit_code == 1


def test_info_shows_chunks_codecs_and_history(store):
    result = call("info", store)
    assert result.exit_code == 0, result.output
    assert "199 samples (1 more are deleted)" in result.stdout
    assert "generation 2: delete, 200 samples" in result.stdout
    assert "source: test" in result.stdout
    facts = json.loads(call("info", store, "--json").stdout)
    assert facts["fields"]["positions"]["codecs"] == ["blosc(zstd, 9, bitshuffle)", "crc32c"]
    assert facts["ratio"] > 1

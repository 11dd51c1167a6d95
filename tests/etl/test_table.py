"""Parquet and Arrow tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.errors import SourceError
from alchemi_xr.etl.conversion import convert

pa = pytest.importorskip("pyarrow", reason="the extra 'table' is not installed")
pq = pytest.importorskip("pyarrow.parquet")


def whole(store: Any) -> Any:
    return store.read_block(store.active)


def rows() -> dict[str, Any]:
    return {
        "symbols": [["H", "H"], ["O", "H", "H"], ["C"]],
        "positions": [[[0.0, 0, 0], [0, 0, 1]], [[0.0, 0, 0]] * 3, [[1.0, 2, 3]]],
        "forces": [[[0.0, 0, 0]] * 2, None, [[1.0, 1, 1]]],
        "energy": [-1.0, -2.0, None],
        "q": [[0.1, -0.1], [0.0, 0.0, 0.0], [1.0]],
        "name": ["a", "b", "c"],
        "vector": [[1, 2], [3, 4], [5, 6]],
    }


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_columns(tmp_path: Path, converted: Any, kind: str) -> None:
    table = pa.table(rows())
    path = tmp_path / ("in.parquet" if kind == "parquet" else "in.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    report, store = converted(path)
    block = whole(store)
    assert block["atomic_numbers"].tolist() == [1, 1, 8, 1, 1, 6]
    assert block["positions"][-1].tolist() == [1, 2, 3]
    assert block.has("energy").tolist() == [True, True, False]
    assert block.has("forces").tolist() == [True, False, True]
    assert store.level("q") == "atom"
    assert store.level("vector") == "system"
    assert block["vector"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert block["name"].tolist() == ["a", "b", "c"]
    assert any("'q': taken as one row an atom" in note for note in report.notes)


def test_a_map_and_units(tmp_path: Path, converted: Any) -> None:
    given = rows()
    given["e_tot"] = [1.0, 2.0, 3.0]
    pq.write_table(pa.table(given), tmp_path / "in.parquet")
    _, store = converted(tmp_path / "in.parquet", energy_key="e_tot", units={"energy": "Hartree"})
    np.testing.assert_allclose(whole(store)["energy"].ravel(), np.arange(1, 4) * 27.211386245988)


def test_bad_rows(tmp_path: Path, converted: Any) -> None:
    given = rows()
    given["positions"][1] = [[0.0, 0, 0]] * 2
    given["forces"][2] = [[1.0, 1, 1]] * 4
    pq.write_table(pa.table(given), tmp_path / "in.parquet")
    with pytest.raises(SourceError, match="found 6 numbers for 3 atoms"):
        convert(tmp_path / "in.parquet", tmp_path / "no.zarr", progress=False)
    report, _ = converted(tmp_path / "in.parquet", on_error="quarantine")
    assert [(r.frame, r.field) for r in report.rejects] == [(1, "positions"), (2, "forces")]
    assert report.samples == 1


def test_damage_and_missing_columns(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table(rows()), path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(SourceError, match="no whole Parquet"):
        convert(path, tmp_path / "out.zarr", progress=False)
    pq.write_table(pa.table({"symbols": [["H"]], "x": [1.0]}), path)
    with pytest.raises(SourceError, match="no column is known as positions"):
        convert(path, tmp_path / "out.zarr", progress=False)

"""The shared cases of conversion, against their expected numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemi_xr.errors import SourceError
from alchemi_xr.etl.conversion import convert
from alchemi_xr.store.reader import Snapshot


def _expected(shared: Path, case: str) -> dict[str, Any]:
    return json.loads((shared / "cases" / case / "expected.json").read_text())["expected"]


def _read(store: Snapshot, name: str) -> np.ndarray:
    return store.read_block(store.active)[name]


def _has(store: Snapshot, name: str) -> list[bool]:
    return store.read_block(store.active).has(name).tolist()


def test_c01_other_names_stay_custom(shared: Path, converted: Any) -> None:
    case = "C01-energy-key-names"
    want = _expected(shared, case)
    report, store = converted(shared / "cases" / case / "in.xyz")
    assert (report.samples, report.atoms) == (want["samples"], want["atoms"])
    for name, count in want["without_map"]["custom_system_fields"].items():
        assert store.group(name) == "custom"
        assert store.level(name) == "system"
        assert sum(_has(store, name)) == count == report.keys[name]
    assert _has(store, "energy") == want["without_map"]["core_energy_present"]
    energy = _read(store, "energy").ravel()
    assert energy[3] == -3.0
    assert np.isnan(energy[:3]).all()


def test_c01_a_map_puts_them_together(shared: Path, converted: Any) -> None:
    case = "C01-energy-key-names"
    want = _expected(shared, case)["with_map"]
    report, store = converted(
        shared / "cases" / case / "in.xyz",
        energy_key=want["energy_from"],
        forces_key=want["forces_from"],
    )
    assert _read(store, "energy").ravel().tolist() == want["energy"]
    assert _has(store, "forces") == want["forces_present"]
    assert "REF_energy" not in store.fields
    assert report.fields["energy"].samples == 4
    assert report.keys["REF_energy"] == 2


def test_c02_stress_from_either(shared: Path, converted: Any) -> None:
    case = "C02-stress-and-virial"
    want = _expected(shared, case)
    report, store = converted(shared / "cases" / case / "in.xyz")
    stress = _read(store, "stress")
    for i in range(3):
        np.testing.assert_allclose(stress[i], want["stress"][i], rtol=1e-12)
    assert np.isnan(stress[3]).all()
    assert _has(store, "stress") == [True, True, True, False, True]
    np.testing.assert_allclose(stress[4], np.eye(3) * 0.01)
    assert any("frame 4" in note and "stress" in note for note in report.notes)
    assert not any("frame 0" in note for note in report.notes)


def test_c05_quotes_and_json(shared: Path, converted: Any) -> None:
    case = "C05-quotes-and-json"
    want = _expected(shared, case)
    _, store = converted(shared / "cases" / case / "in.xyz")
    block = store.read_block(store.active)
    assert block["energy"].ravel().tolist() == want["energy"]
    for name in ("title", "name", "empty"):
        assert block[name][0] == want["frame0"][name]
        assert block.has(name).tolist() == [True, False, False, False]
    assert bool(block["bare"][0]) is True
    assert json.loads(block["occupancy"][1]) == want["frame1"]["occupancy"]
    assert json.loads(block["ragged"][1]) == want["frame1"]["ragged"]
    assert block["matrix"][1].tolist() == want["frame1"]["matrix"]
    assert block.has("acid").tolist() == [False, False, False, True]
    assert block.has("2-amino").tolist() == [False, False, False, True]


def test_c06_bad_lattice_is_set_aside(shared: Path, converted: Any) -> None:
    case = "C06-bad-lattice"
    want = _expected(shared, case)
    report, store = converted(shared / "cases" / case / "in.xyz", on_error="quarantine")
    assert report.records == want["frames_in_file"]
    assert report.samples == want["samples"] == store.num_samples
    assert _read(store, "energy").ravel().tolist() == want["kept_energy"]
    (reject,) = report.rejects
    expected = want["rejects"][0]
    assert (reject.frame, reject.line) == (expected["frame"], expected["line"])
    assert reject.offset == 103
    for word in expected["reason_must_mention"]:
        assert word in f"{reject.field} {reject.reason}"
    lines = Path(report.rejects_path).read_text().splitlines()
    assert json.loads(lines[0])["frame"] == 1


def test_c06_raise_names_everything(shared: Path, tmp_path: Path) -> None:
    source = shared / "cases" / "C06-bad-lattice" / "in.xyz"
    with pytest.raises(SourceError, match=r"frame 1 \(line 4, byte 103\).*'Lattice'.*9") as caught:
        convert(source, tmp_path / "out.zarr")
    assert str(source) in str(caught.value)
    assert "quarantine" in (caught.value.mend or "")
    assert list(tmp_path.iterdir()) == []


def test_c07_torn_file(shared: Path, converted: Any) -> None:
    folder = shared / "cases" / "C07-torn-file"
    want = _expected(shared, "C07-torn-file")["cut"]
    report, _ = converted(folder / "cut.xyz", on_error="quarantine")
    assert report.samples == want["whole_frames"]
    assert report.rejected == want["rejects"]
    assert want["reason"] in report.rejects[0].reason
    assert report.rejects[0].offset is not None


def test_c07_miscount_finds_its_way_again(shared: Path, converted: Any) -> None:
    folder = shared / "cases" / "C07-torn-file"
    want = _expected(shared, "C07-torn-file")["miscount"]
    report, store = converted(folder / "miscount.xyz", on_error="quarantine")
    assert _read(store, "energy").ravel().tolist() == want["kept_energy"]
    assert report.rejected == want["rejects"]
    assert report.rejects[0].frame == 1


def test_c07_blank_lines_are_allowed(shared: Path, converted: Any) -> None:
    report, _ = converted(shared / "cases" / "C07-torn-file" / "blank.xyz")
    assert (report.samples, report.rejected) == (3, 0)


def test_c10_empty_and_single(shared: Path, converted: Any) -> None:
    want = _expected(shared, "C10-empty-and-single")
    report, store = converted(shared / "cases" / "C10-empty-and-single" / "in.xyz")
    assert store.atoms_ptr.tolist() == want["atoms_ptr_if_empty_kept"]
    assert float(_read(store, "energy").sum()) == want["energy_sum_if_kept"]
    assert report.atoms == want["atoms"]


def test_c12_values_are_kept_and_counted(shared: Path, converted: Any) -> None:
    want = _expected(shared, "C12-nan-inf-huge")
    report, store = converted(shared / "cases" / "C12-nan-inf-huge" / "in.xyz")
    assert report.samples == want["samples"]
    energy, forces = report.fields["energy"], report.fields["forces"]
    assert energy.nan + energy.inf == want["non_finite"]["energy"]
    assert forces.nan + forces.inf == want["non_finite"]["forces_rows"]
    assert report.nonfinite_samples == len(want["frames_with_non_finite"])
    values = _read(store, "forces")
    assert np.isinf(values[2]).tolist() == [True, False, True]
    assert values[2, 2] == -np.inf


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"nonfinite": "quarantine"}, "quarantine_option_keeps"),
        ({"nonfinite": "quarantine", "max_force": 50.0}, "with_max_force_50_keeps"),
    ],
)
def test_c12_filters(shared: Path, converted: Any, options: dict[str, Any], key: str) -> None:
    want = _expected(shared, "C12-nan-inf-huge")
    report, store = converted(shared / "cases" / "C12-nan-inf-huge" / "in.xyz", **options)
    assert store.active.tolist() == want[key]
    assert report.samples == len(want[key])
    assert report.rejected == 4 - len(want[key])
    assert {r.frame for r in report.rejects} == set(range(4)) - set(want[key])


def test_c14_no_digit_is_lost(shared: Path, converted: Any) -> None:
    want = _expected(shared, "C14-precision")
    _, store = converted(shared / "cases" / "C14-precision" / "in.xyz")
    energy = _read(store, "energy").ravel()
    assert energy.dtype == np.float64
    assert energy.tolist() == want["energy"]
    assert energy[0] != energy[1]
    assert _read(store, "positions")[:2].tolist() == want["pos_frame0"]


def test_c21_gaps_and_holes(shared: Path, converted: Any) -> None:
    want = _expected(shared, "C21-asedb-gaps")
    report, store = converted(shared / "cases" / "C21-asedb-gaps" / "rows.db")
    block = store.read_block(store.active)
    assert report.samples == want["samples"]
    assert block["source_id"].tolist() == want["ids_in_file"]
    assert block["label"].tolist() == want["labels"]
    assert block.has("energy").tolist() == want["energy_present"]
    assert block.has("forces").tolist() == want["forces_present"]
    energy = [None if np.isnan(e) else e for e in block["energy"].ravel().tolist()]
    assert energy == want["energy"]
    assert block["pbc"].tolist() == want["pbc"]
    assert float(block["score"].sum()) == want["score_sum"]
    assert int(block["spectrum"].sum()) == want["spectrum_sum"]
    # Row 4 (id 5) holds atom 0 still; the forces are the raw ones all the same.
    rows = slice(int(block.atoms_ptr[3]), int(block.atoms_ptr[4]))
    assert block["fixed"][rows].tolist() == [True] + [False] * (rows.stop - rows.start - 1)
    assert np.abs(block["forces"][rows][0]).sum() > 0

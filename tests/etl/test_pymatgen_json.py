"""JSON of structures: real files, forms, faults, and where records lie."""

from __future__ import annotations

import gzip
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.errors import ConfigError, SourceError
from alchemi_xr.etl import convert
from alchemi_xr.etl.json_index import iter_records, record_depth
from alchemi_xr.store import open_store


def structure(count: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    matrix = (np.eye(3) * 4 + rng.normal(size=(3, 3)) * 0.1).tolist()
    sites = []
    for i in range(count):
        abc = rng.random(3)
        sites.append(
            {
                "species": [{"element": ["Fe", "O"][i % 2], "occu": 1}],
                "abc": abc.tolist(),
                "xyz": (abc @ np.array(matrix)).tolist(),
                "label": "x",
                "properties": {"magmom": float(i)},
            }
        )
    return {"@class": "Structure", "lattice": {"matrix": matrix}, "sites": sites, **more}


def entry(count: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed + 100)
    return {
        "structure": structure(count, seed),
        "energy": float(rng.normal()),
        "forces": rng.normal(size=(count, 3)).tolist(),
        "stress": rng.normal(size=6).tolist(),
        "bandgap": 0.5 * seed,
        "matpes_id": f'id "{seed}" {{[\\',
        **more,
    }


def whole(path: Path) -> Any:
    with open_store(path) as store:
        return store.read_block(store.active), store


def check(block: Any, entries: list[dict[str, Any]]) -> None:
    np.testing.assert_array_equal(
        np.diff(block.atoms_ptr), [len(e["structure"]["sites"]) for e in entries]
    )
    xyz = [s["xyz"] for e in entries for s in e["structure"]["sites"]]
    np.testing.assert_array_equal(block["positions"], xyz)
    np.testing.assert_array_equal(block["forces"], [f for e in entries for f in e["forces"]])
    np.testing.assert_array_equal(block["energy"][:, 0], [e["energy"] for e in entries])
    np.testing.assert_array_equal(
        block["cell"], [e["structure"]["lattice"]["matrix"] for e in entries]
    )
    assert block["matpes_id"].tolist() == [e["matpes_id"] for e in entries]
    assert block["pbc"].all()


def as_file(folder: Path, form: str, entries: list[dict[str, Any]]) -> Path:
    path = folder / ("in.jsonl" if form == "lines" else "in.json")
    if form == "list":
        path.write_text(json.dumps(entries))
    elif form == "indented":
        path.write_text(json.dumps({"meta": {"n": [1, 2]}, "data": entries}, indent=2))
    elif form == "lines":
        path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    elif form == "dicts":
        groups: dict[str, Any] = {}
        for i, e in enumerate(entries):
            groups.setdefault(f"mp-{i // 3}", {})[f"mp-{i // 3}-{i}"] = e
        path.write_text(json.dumps(groups))
    elif form == "gzip":
        path = folder / "in.json.gz"
        path.write_bytes(gzip.compress(json.dumps(entries).encode()))
    return path


@pytest.mark.parametrize("form", ["list", "indented", "lines", "dicts", "gzip"])
@pytest.mark.parametrize("size", [1, 5_000, 2**24])
def test_forms(tmp_path: Path, form: str, size: int) -> None:
    entries = [entry(1 + i % 4, i) for i in range(10)]
    path = as_file(tmp_path, form, entries)
    report = convert(path, tmp_path / "out.zarr", options={"partition_bytes": size}, progress=False)
    assert (report.records, report.rejected) == (10, 0)
    block, store = whole(tmp_path / "out.zarr")
    check(block, entries)
    np.testing.assert_array_equal(block["stress_as_given"], [e["stress"] for e in entries])
    assert "stress" not in block
    assert any("neither unit nor sign" in note for note in report.notes)
    assert store.level("magmoms") == "atom"
    assert block["bandgap"].tolist() == [0.5 * i for i in range(10)]


def test_the_stress_as_vasp_prints_it(tmp_path: Path) -> None:
    entries = [entry(2, i) for i in range(3)]
    path = as_file(tmp_path, "list", entries)
    convert(path, tmp_path / "a.zarr", options={"stress": "-kbar"}, progress=False)
    block, _ = whole(tmp_path / "a.zarr")
    kbar = 0.1 / 160.21766208  # eV/Å³
    want = -np.array([e["stress"] for e in entries]) * kbar
    voigt = block["stress"][:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    np.testing.assert_allclose(voigt, want, rtol=1e-7)
    convert(
        path,
        tmp_path / "b.zarr",
        options={"stress": "GPa", "stress_order": "vasp"},
        progress=False,
    )
    block, _ = whole(tmp_path / "b.zarr")
    np.testing.assert_allclose(
        block["stress"][:, [0, 1, 2, 0, 1, 0], [0, 1, 2, 1, 2, 2]],
        np.array([e["stress"] for e in entries]) / 160.21766208,
        rtol=1e-7,
    )
    with pytest.raises(ConfigError, match="no unit of a stress"):
        convert(path, tmp_path / "c.zarr", options={"stress": "apples"}, progress=False)


def test_the_form_of_mptrj(tmp_path: Path) -> None:
    entries = []
    for i in range(4):
        e = entry(2, i)
        e["force"] = e.pop("forces")
        e["uncorrected_total_energy"] = e.pop("energy")
        e |= {"corrected_total_energy": -9.0, "magmom": None if i == 1 else [0.5, i]}
        entries.append(e)
    path = as_file(tmp_path, "dicts", entries)
    report = convert(path, tmp_path / "out.zarr", progress=False)
    assert any("'uncorrected_total_energy'" in note for note in report.notes)
    block, _ = whole(tmp_path / "out.zarr")
    assert block["energy"][:, 0].tolist() == [e["uncorrected_total_energy"] for e in entries]
    assert (block["corrected_total_energy"] == -9.0).all()
    np.testing.assert_array_equal(block["forces"], [f for e in entries for f in e["force"]])
    chosen = convert(path, tmp_path / "b.zarr", energy_key="corrected_total_energy", progress=False)
    assert not any("'uncorrected_total_energy'" in note for note in chosen.notes)
    assert (whole(tmp_path / "b.zarr")[0]["energy"] == -9.0).all()


def test_molecules_and_bare_structures(tmp_path: Path) -> None:
    molecule = {
        "@class": "Molecule",
        "charge": -1,
        "sites": [{"name": "O", "xyz": [0, 0, 1]}, {"name": "H", "xyz": [0, 0, 2]}],
    }
    fractional = structure(2)
    for site in fractional["sites"]:
        del site["xyz"]
    (tmp_path / "in.json").write_text(json.dumps([fractional, molecule]))
    convert(tmp_path / "in.json", tmp_path / "out.zarr", progress=False)
    block, _ = whole(tmp_path / "out.zarr")
    want = np.array([s["abc"] for s in fractional["sites"]]) @ fractional["lattice"]["matrix"]
    np.testing.assert_allclose(block["positions"][:2], want)
    assert block["pbc"].tolist() == [[True] * 3, [False] * 3]
    assert block.has("cell").tolist() == [True, False]
    assert block["charge"][1, 0] == -1
    assert block["atomic_numbers"].tolist() == [26, 8, 8, 1]


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda e: e["structure"]["sites"][1]["species"].append({"element": "Mn", "occu": 0.5}),
            "site 1",
        ),
        (lambda e: e["structure"]["sites"][0]["species"][0].update(occu=0.5), "site 0"),
        (lambda e: e["structure"]["sites"][0]["species"][0].update(element="Qq"), "Qq"),
        (lambda e: e["forces"].pop(), "expected 2 rows"),
        (lambda e: e.update(stress=[1, 2]), "6 or 3 x 3"),
        (lambda e: e["structure"]["lattice"].update(matrix=[[1, 2, 3]]), "lattice"),
        (lambda e: e["structure"].update(sites=[]), "no sites"),
        (lambda e: e.update(forces="none"), "expected numbers"),
        (lambda e: e.update(energy=[1.0, 2.0]), "energy"),
    ],
)
def test_faults_are_named(tmp_path: Path, spoil: Any, match: str) -> None:
    entries = [entry(2, i) for i in range(4)]
    spoil(entries[2])
    path = as_file(tmp_path, "list", entries)
    with pytest.raises(SourceError, match=match) as error:
        convert(path, tmp_path / "out.zarr", progress=False)
    assert "frame 2" in str(error.value)
    report = convert(path, tmp_path / "out.zarr", on_error="quarantine", progress=False)
    assert (report.samples, report.rejected) == (3, 1)
    check(whole(tmp_path / "out.zarr")[0], [e for i, e in enumerate(entries) if i != 2])


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    entries = [entry(3, i) for i in range(5)]
    text = json.dumps(entries)
    (tmp_path / "cut.json").write_text(text[: int(len(text) * 0.7)])
    report = convert(
        tmp_path / "cut.json", tmp_path / "out.zarr", on_error="quarantine", progress=False
    )
    assert (report.samples, report.rejected) == (3, 1)
    assert "ends inside the record" in report.rejects[0].reason
    (tmp_path / "none.json").write_text('{"sites": 1}')
    with pytest.raises(SourceError, match="no structure"):
        convert(tmp_path / "none.json", tmp_path / "b.zarr", progress=False)
    packed = gzip.compress(text.encode())
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) - 300])
    report = convert(
        tmp_path / "cut.json.gz", tmp_path / "c.zarr", format="pymatgen-json",
        on_error="quarantine", progress=False,
    )  # fmt: skip
    assert any("damaged" in r.reason for r in report.rejects)


def test_ge(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "json-ge"
    facts = json.loads((folder / "expected.json").read_text())["facts"]
    report = convert(folder / "entries.json", tmp_path / "out.zarr", progress=False)
    block, _ = whole(tmp_path / "out.zarr")
    assert (report.samples, report.atoms) == (facts["frames"], facts["atoms_total"])
    energy = facts["energies"]["energy"]
    assert block["energy"].sum() == pytest.approx(energy["sum"], rel=1e-12)
    assert block["energy"][0, 0] == energy["first"]
    assert block["energy"][-1, 0] == energy["last"]
    forces = facts["forces"]["forces"]
    norms = np.linalg.norm(block["forces"], axis=1)
    assert norms.sum() == pytest.approx(forces["sum_of_norms"], rel=1e-11)
    assert norms.max() == pytest.approx(forces["max_norm"], rel=1e-9)
    assert np.abs(block["positions"]).sum() == pytest.approx(facts["sum_abs_positions"], rel=1e-12)
    assert block["virial_stress"].sum() == pytest.approx(facts["virial_stress"]["sum"], rel=1e-10)
    groups, counts = np.unique(block["group"].astype(str), return_counts=True)
    assert dict(zip(groups.tolist(), counts.tolist(), strict=True)) == facts["groups"]
    assert (block["tag"] == "test").all()
    assert (block["atomic_numbers"] == 32).all()


@given(
    st.recursive(
        st.one_of(st.text('ab"\\{}[]:,', max_size=6), st.integers(), st.none()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text('a"\\{', max_size=3), inner, max_size=3),
        ),
        max_leaves=8,
    ),
    st.integers(0, 4),
    st.integers(1, 40),
)
def test_records_lie_where_json_says(filler: Any, count: int, window: int) -> None:
    entries = [{"x": filler, "structure": {"sites": [i]}, "\\": '{"'} for i in range(count)]
    document = {"first": [filler], "all": entries, "last": {"z": filler}}
    for indent in (None, 1):
        raw = json.dumps(document, indent=indent).encode()
        depth = record_depth(BytesIO(raw))
        if count == 0:
            continue
        assert depth == 3
        found = []
        for a, b in iter_records(BytesIO(raw), 3, window=window):
            value = json.loads(raw[a:b])
            if isinstance(value, dict) and "structure" in value:
                found.append(value)
        assert found == entries

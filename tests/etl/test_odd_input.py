"""Input that no sane program writes: a typed error or the right result, and nothing left over."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from alchemi_xr.errors import (
    AlchemiError,
    ArgumentTypeError,
    ConfigError,
    SourceError,
    SourceNotFoundError,
)
from alchemi_xr.etl import convert
from alchemi_xr.etl.columns import LineFault, parse_columns, parse_properties
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.sources.extxyz import ExtxyzSource
from alchemi_xr.plan.client import open_runner
from alchemi_xr.plan.journal import Journal
from alchemi_xr.plan.rejects import Quarantine, Reject
from alchemi_xr.plan.tasks import PartStats
from alchemi_xr.store.reader import open_store

COLUMNS = "Properties=species:S:1:pos:R:3"


def frame(comment: str = "", line: str = "H 0.0 0.0 0.5", atoms: int = 1, columns: str = "") -> str:
    return f"{atoms}\n{COLUMNS}{columns} {comment}\n" + (line + "\n") * atoms


def converted(tmp_path, text, **options):
    source, target = tmp_path / "in.xyz", tmp_path / "out.zarr"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        report = convert(source, target, progress=False, **options)
    except AlchemiError:
        assert sorted(os.listdir(tmp_path)) == ["in.xyz"]
        raise
    return report, open_store(str(target))


def refused(tmp_path, text, match, **options):
    with pytest.raises((SourceError, ConfigError), match=match):
        converted(tmp_path, text, **options)


@pytest.mark.parametrize("bad", [b"\x003.5 0.0 0.0", b"13.5 0.0\x1f0.0"])
def test_a_control_character_is_no_blank(bad):
    body = b"H 13.5 0.0 0.0\nH " + bad + b"\n"
    with pytest.raises(LineFault) as fault:
        parse_columns(body, 2, parse_properties(COLUMNS.removeprefix("Properties=")))
    assert fault.value.row == 1


@pytest.mark.parametrize(
    "word", ["1e30", "99999999999999999999", "9223372036854775808", "inf", "nan"]
)
@pytest.mark.parametrize("more", ["", ":flag:L:1"])
def test_a_whole_number_beyond_64_bits_is_refused(tmp_path, word, more):
    line = f"H 0 0 0 {word}" + (" T" if more else "")
    refused(tmp_path, frame("", line, 2, ":tag:I:1" + more), "'tag'.*expected whole numbers")


@pytest.mark.parametrize("word", ["119", "-1"])
def test_an_atomic_number_of_no_element_is_refused(tmp_path, word):
    text = f"1\nProperties=Z:I:1:pos:R:3\n{word} 0 0 0\n"
    refused(tmp_path, text, f"'Z'.*atomic number {word}, expected 0 to 118")


def test_symbols_and_numbers_must_name_the_same_elements(tmp_path):
    refused(tmp_path, frame("", "H 0 0 0 6", 2, ":Z:I:1"), "'Z'.*different elements")
    _, snapshot = converted(tmp_path, frame("", "C 0 0 0 6", 2, ":Z:I:1"))
    assert snapshot.read_rows("atomic_numbers", 0, 2).tolist() == [6, 6]


def test_real_numbers_are_no_atomic_numbers(tmp_path):
    text = "1\nProperties=numbers:R:1:pos:R:3:Z:I:1\nnan 0 0 0 6\n"
    refused(tmp_path, text, "'numbers'.*found numbers:R:1, expected whole numbers")
    text = "1\nProperties=species:I:1:pos:R:3\n500 0 0 0\n"
    refused(tmp_path, text, "'species'.*unknown element '500'")


def test_a_column_of_absurd_width_is_refused_before_memory_is_asked_for(tmp_path):
    refused(tmp_path, frame("", "H 0 0 0", 1, ":b:R:99999999999999999"), "Properties.*b:R:9")


@pytest.mark.parametrize(
    "value", ["_JSON" + "[" * 50_000 + "]" * 50_000, "[" * 50_000 + "]" * 50_000]
)
def test_values_nested_without_end_are_text(tmp_path, value):
    report, _ = converted(tmp_path, frame(f"foo={value}"))
    assert report.fields["foo"].dtype == "str"


def test_a_number_of_thousands_of_digits_is_a_float(tmp_path):
    _, snapshot = converted(tmp_path, frame("foo=" + "9" * 5000))
    assert snapshot.read_rows("foo", 0, 1).tolist() == [np.inf]


def test_names_become_single_folders():
    find = NameMap().target
    assert find("a\\b", "system").name == "a_b"
    long, longer = (find("x" * n, "system").name for n in (300, 301))
    assert len(long) <= 200
    assert long != longer
    assert len(find("é" * 300, "system").name.encode()) <= 200


@pytest.mark.parametrize("name", ["a\\b", "x" * 300, "..", "/etc"])
def test_any_key_can_be_stored(tmp_path, name):
    report, snapshot = converted(tmp_path, frame(f"{name}=3"))
    (field,) = set(report.fields) - {"positions", "atomic_numbers", "pbc"}
    assert snapshot.read_rows(field, 0, 1).tolist() == [3]


@pytest.mark.parametrize("value", ["3", "abc", '"5 6"'])
def test_a_key_named_like_a_column_is_left_out_and_said(tmp_path, value):
    text = frame(f"foo={value}", "H 0 0 0 1", 2, ":foo:R:1") + frame(f"foo={value}")
    report, snapshot = converted(tmp_path, text)
    assert snapshot.read_rows("foo", 0, 2).tolist() == [1, 1]
    assert snapshot.present("foo").tolist() == [True, False]
    assert any("'foo' is not stored" in note for note in report.notes)


def test_a_number_too_large_for_its_dtype_is_rejected_not_made_infinite(tmp_path):
    text = frame("foo=1e300") + frame("foo=2.0")
    refused(tmp_path, text, "frame 0.*'foo'.*too large for float32", dtype="float32")
    report, snapshot = converted(tmp_path, text, dtype="float32", on_error="quarantine")
    assert [(r.frame, r.field) for r in report.rejects] == [(0, "foo")]
    assert snapshot.active.tolist() == [1]


def test_a_whole_number_too_large_for_its_dtype_is_rejected(tmp_path):
    refused(tmp_path, frame("foo=300"), "'foo'.*too large for int8", dtype={"foo": "int8"})


def test_infinity_in_the_input_stays_one_under_a_cast(tmp_path):
    _, snapshot = converted(tmp_path, frame("foo=inf"), dtype="float32")
    assert snapshot.read_rows("foo", 0, 1).tolist() == [np.inf]


@pytest.mark.parametrize("dtype", [{"positions": "int32"}, "complex64", "bool"])
def test_a_dtype_of_another_kind_is_refused(tmp_path, dtype):
    refused(tmp_path, frame(), "positions.*would lose its values", dtype=dtype)


def test_sums_that_overflow_warn_nobody(tmp_path):
    report, _ = converted(tmp_path, frame("", "H 1e308 1e308 1e308", 3))
    assert report.nonfinite_samples == 0


@pytest.mark.parametrize(
    ("after", "match"),
    [
        (frame("energy=x0"), "not what it was"),
        (frame('foo="1 2"'), "not what it was"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_changes_under_the_reader_is_told(tmp_path, after, match):
    from alchemi_xr.etl.transforms import Reading, Transform

    path = tmp_path / "in.xyz"
    path.write_text(frame("energy=10") if after and "energy" in after else frame("foo=123456"))
    source = ExtxyzSource([str(path)])
    scan = source.scan()
    if after is None:
        path.unlink()
    else:
        assert len(after) <= path.stat().st_size
        path.write_text(after.ljust(path.stat().st_size, "\n"))
    with pytest.raises(SourceError, match=match):
        Reading(source, Transform())(scan.partitions[0])


def test_damage_is_named_before_what_follows_from_it(tmp_path):
    path = tmp_path / "in.xyz.gz"
    path.write_bytes(gzip.compress(frame().encode() * 3000)[:200])
    with pytest.raises(SourceError, match=r"in\.xyz\.gz: the compressed data are damaged"):
        convert(path, tmp_path / "out.zarr", progress=False)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.xyz.gz")
    with pytest.raises(SourceError, match="no regular file"):
        convert(tmp_path / "pipe.xyz.gz", tmp_path / "out.zarr", progress=False)
    (tmp_path / "folders").mkdir()
    (tmp_path / "folders" / "one").mkdir()
    with pytest.raises(SourceNotFoundError, match="no file matches"):
        convert(str(tmp_path / "folders" / "*"), tmp_path / "out.zarr", progress=False)
    for wrong in (None, 5, [None], b"in.xyz"):
        with pytest.raises(ArgumentTypeError, match="path"):
            convert(wrong, tmp_path / "out.zarr", progress=False)


@pytest.mark.parametrize(
    "options",
    [
        {"energy_key": 5},
        {"energy_key": [5]},
        {"key_map": ["a"]},
        {"key_map": {"a": 5}},
        {"client": "foo bar"},
        {"threads": -1},
        {"threads": 0},
        {"threads": 1.5},
    ],
)
def test_options_of_a_wrong_kind_are_named(tmp_path, options):
    with pytest.raises(ConfigError, match=r"energy_key|key_map|client|threads"):
        if {"client", "threads"} & options.keys():
            open_runner(options.get("client"), threads=options.get("threads"))
        else:
            NameMap.make(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"units": "eV"},
        {"units": {"energy": 5}},
        {"max_force": "x"},
        {"max_force": -1},
        {"options": {"nope": 1}},
    ],
)
def test_options_of_a_wrong_kind_leave_nothing(tmp_path, options):
    (name,) = options
    refused(tmp_path, frame("energy=1"), name, **options)


def test_a_key_that_no_record_has_is_said(tmp_path):
    report, _ = converted(tmp_path, frame("energy=1"), energy_key="REF_energy")
    assert "no record has 'REF_energy', which was to be energy" in report.notes


def test_a_file_that_may_not_be_read_is_told(tmp_path, monkeypatch):
    import alchemi_xr.etl.frame_index as index

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied", "in.xyz")

    # A test that runs as root may read everything, so the refusal is made.
    monkeypatch.setattr(index, "open", forbidden, raising=False)
    refused(tmp_path, frame(), "in.xyz: cannot be read .Permission denied")


def test_reasons_with_line_separators_survive_journal_and_quarantine(tmp_path):
    reject = Reject("a\u2028b.xyz", 0, "found 'a\u2028b\x85c', expected an atom count", sample=0)
    Quarantine(tmp_path / "q.jsonl").write([reject])
    assert Quarantine(tmp_path / "q.jsonl").read() == [reject]
    with Journal(tmp_path / "j.jsonl", "f") as journal:
        journal.extent_done(0, PartStats([reject], ["note\u2029"], {}, 0))
    again = Journal(tmp_path / "j.jsonl", "f").open()
    again.close()
    assert again.extents[0].rejects == [reject]


def test_a_file_name_that_is_no_text(tmp_path):
    odd = os.fsdecode(b"caf\xe9.xyz")
    try:
        (tmp_path / odd).write_text(frame() + "1\n")
    except OSError:
        pytest.skip("this file system takes no such name")
    report = convert(tmp_path / odd, tmp_path / "a.zarr", on_error="quarantine", progress=False)
    assert (report.samples, report.rejected) == (1, 1)
    with open_store(tmp_path / "a.zarr") as store:
        assert store.schema.provenance["files"] == [str(tmp_path / "caf?.xyz")]
    (reject,) = Quarantine(tmp_path / "a.zarr.rejects.jsonl").read()
    assert reject.file == str(tmp_path / "caf?.xyz")
    with Journal(tmp_path / "j.jsonl", "f") as journal:
        journal.extent_done(0, PartStats(report.rejects, [], {}, 0))
    with Journal(tmp_path / "j.jsonl", "f").open() as again:
        assert again.extents[0].rejects == report.rejects

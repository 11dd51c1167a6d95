"""The error family: one text, two identities, and a safe trip between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from alchemi_xr import errors
from alchemi_xr.errors import AlchemiError, FieldError, UnknownFieldError, nearest

FAMILY = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, AlchemiError)]


def test_message_has_place_facts_and_mend() -> None:
    error = FieldError(
        "a.xyz, frame 3", "field 'forces'", found=[12, 3], expected=[13, 3], mend="correct it"
    )
    assert str(error) == (
        "a.xyz, frame 3: field 'forces': found [12, 3], expected [13, 3].\n  Mend: correct it"
    )


def test_zero_is_a_fact() -> None:
    assert "found 0, expected 1" in str(FieldError("x", "rows", found=0, expected=1))


@pytest.mark.parametrize("cls", FAMILY)
def test_every_child_pickles_and_prints_plainly(cls: type[AlchemiError]) -> None:
    error = cls("here", "what", found=1, expected=2, mend="so")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error) == "here: what: found 1, expected 2.\n  Mend: so"
    assert again.mend == "so"


def test_children_are_the_builtins_a_reader_would_catch() -> None:
    assert issubclass(errors.FieldError, ValueError)
    assert issubclass(errors.UnknownFieldError, KeyError)
    assert issubclass(errors.UnknownFieldError, AttributeError)
    assert issubclass(errors.StoreNotFoundError, FileNotFoundError)
    assert issubclass(errors.StoreExistsError, FileExistsError)
    assert issubclass(errors.OptionalDependencyError, ImportError)
    assert issubclass(errors.IndexRangeError, IndexError)
    assert issubclass(errors.StoreLockedError, RuntimeError)


def test_an_unknown_field_is_not_quoted_like_a_key_error() -> None:
    assert str(UnknownFieldError("s", "no field 'a'")) == "s: no field 'a'."


@pytest.mark.parametrize(
    ("name", "names", "text"),
    [
        ("force", ["forces", "energy"], "Nearest: 'forces'"),
        ("zzz", ["forces", "energy"], "There are: 'energy', 'forces'"),
        ("zzz", [], "There are none"),
    ],
)
def test_nearest(name: str, names: list[str], text: str) -> None:
    assert nearest(name, names) == text


def test_made_again_from_its_message_alone() -> None:
    error = errors.StoreError(message="Caught StoreError in a worker. Original text")
    assert str(error).startswith("Caught StoreError in a worker")

"""Importing the room loads nothing heavy; every name it lists is there."""

import subprocess
import sys

import pytest

import alchemi_xr.data as data


def loaded_after(code):
    probe = f"import sys\n{code}\nprint(*[m for m in ('torch', 'warp', 'ase', 'dask', 'zarr') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    ).stdout
    return set(out.split())


def test_the_room_is_lazy():
    assert loaded_after("import alchemi_xr.data") == set()
    assert (
        loaded_after("from alchemi_xr.data import Block\nimport alchemi_xr.data.segment") == set()
    )
    assert loaded_after("import alchemi_xr.data.thermo, alchemi_xr.testing.reference") == set()
    # Batches do without Warp until a kernel is asked for.
    assert loaded_after("from alchemi_xr.data import AtomicData, Batch, transforms") == {"torch"}


@pytest.mark.parametrize("name", data.__all__)
def test_every_name_answers(name):
    assert getattr(data, name) is not None
    assert name in dir(data)


def test_other_names_do_not():
    with pytest.raises(AttributeError, match="no attribute 'Atoms'"):
        data.Atoms
    assert "Atoms" not in data.__all__

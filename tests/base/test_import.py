"""The front door is lazy: importing the package costs little and loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_PROBE = """
import json, sys, time
start = time.process_time()
import {module}
took = time.process_time() - start
heavy = [m for m in ("torch", "warp", "dask", "distributed", "zarr", "xarray", "matplotlib", "ase")
         if m in sys.modules]
print(json.dumps([took, heavy]))
"""


def probe(module: str) -> tuple[float, list[str]]:
    out = subprocess.run(
        [sys.executable, "-c", _PROBE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    took, heavy = json.loads(out)
    return took, heavy


def test_package_import_is_light() -> None:
    # Processor time, best of three: what the import costs, not how busy the machine is.
    runs = [probe("alchemi_xr") for _ in range(3)]
    assert runs[0][1] == []
    assert min(took for took, _ in runs) < 0.3


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("alchemi_xr.data", set()),
        ("alchemi_xr.data.csr", set()),
        ("alchemi_xr.data.block", set()),
        ("alchemi_xr.dynamics", set()),
        ("alchemi_xr.campaign", set()),
        ("alchemi_xr.models", set()),
        ("alchemi_xr.store", {"zarr"}),
        ("alchemi_xr.cli.main", set()),
    ],
)
def test_rooms_load_no_more_than_they_need(module: str, allowed: set[str]) -> None:
    _, heavy = probe(module)
    assert set(heavy) <= allowed


@pytest.mark.parametrize("module", ["alchemi_xr.etl.conversion", "alchemi_xr.ragged.backend"])
def test_bulk_rooms_need_no_torch(module: str) -> None:
    _, heavy = probe(module)
    assert not {"torch", "warp", "matplotlib"} & set(heavy)


def test_every_public_name_resolves() -> None:
    import alchemi_xr

    for name in alchemi_xr.__all__:
        assert getattr(alchemi_xr, name) is not None
    assert set(alchemi_xr.__all__) <= set(dir(alchemi_xr))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = alchemi_xr.nothing

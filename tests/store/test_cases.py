"""The shared cases that are the store's own (C24, C26 and C28 stand in lease, kill, verify)."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from alchemi_xr.data.block import Block
from alchemi_xr.store import StoreWriter, open_store
from alchemi_xr.store.verify import verify


def read(path):
    io = pytest.importorskip("ase.io")
    blocks = []
    for atoms in io.read(path, ":"):
        found = {
            "atomic_numbers": (atoms.numbers, "atom"),
            "positions": (atoms.positions, "atom"),
            "energy": (np.array([[atoms.get_potential_energy()]]), "system"),
        }
        for name, level in (("forces", "atom"), ("dipole", "system")):
            values = atoms.calc.results.get(name) if atoms.calc else None
            values = atoms.info.get(name, atoms.arrays.get(name)) if values is None else values
            if values is not None:
                found[name] = (values if level == "atom" else np.asarray(values)[None], level)
        blocks.append(
            Block(
                np.array([0, len(atoms)]),
                np.array([0, 0]),
                {n: np.asarray(v) for n, (v, _) in found.items()},
                {n: level for n, (_, level) in found.items()},
            )
        )
    return Block.concat(blocks).validate()


def test_c17_append_other_fields(shared, tmp_path):
    case = shared / "cases" / "C17-append-other-fields"
    wanted = json.loads((case / "expected.json").read_text())["expected"]
    writer = StoreWriter(tmp_path / "a.zarr")
    writer.write(read(case / "a.xyz"))
    writer.append(read(case / "b.xyz"))
    snapshot = open_store(tmp_path / "a.zarr")
    block = snapshot.read_block(slice(None))
    assert snapshot.num_samples == wanted["samples"]
    assert block.has("forces").tolist() == wanted["forces_present"]
    assert block.has("dipole").tolist() == wanted["dipole_present"]
    assert block["energy"].ravel().tolist() == wanted["energy"]
    assert block.atoms_ptr.tolist() == wanted["atoms_ptr"]
    for row, values in zip(block["dipole"], wanted["dipole"], strict=True):
        assert np.isnan(row).all() if values is None else row.tolist() == values
    assert np.isnan(block["forces"][4:]).all()
    assert verify(tmp_path / "a.zarr").clean


def test_the_room_needs_neither_torch_nor_dask():
    code = (
        "import sys\n"
        "for name in ('torch', 'dask', 'xarray', 'warp', 'matplotlib'): sys.modules[name] = None\n"
        "import alchemi_xr.store as store\n"
        "assert 'zarr' not in sys.modules\n"
        "for name in store.__all__: getattr(store, name)\n"
        "import alchemi_xr.store.verify\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

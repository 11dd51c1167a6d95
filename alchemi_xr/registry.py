"""Plug-ins by name: our own and those that other packages announce.

A plug-in is one class in one file and one line in an entry-point group; the
registry finds both without importing any of them before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from alchemi_xr.errors import ConfigError, nearest

__all__ = ["Registry", "exports", "hooks", "models", "sources"]


class Registry:
    """Objects of one kind by name, imported when asked for.

    Parameters
    ----------
    group : str
        Entry-point group, such as ``"alchemi_xr.sources"``.
    builtin : dict of str to str
        Our own: name to ``"module:attribute"``.
    """

    def __init__(self, group: str, builtin: dict[str, str]) -> None:
        self.group = group
        self._builtin = dict(builtin)
        self._objects: dict[str, Any] = {}

    def register(self, name: str, obj: Any) -> Any:
        """Add an object under a name for this process; returns it."""
        self._objects[name] = obj
        return obj

    def names(self) -> list[str]:
        """All names, in order: ours, registered ones, other packages'."""
        found = {**self._builtin, **self._objects}
        for entry in entry_points(group=self.group):
            found.setdefault(entry.name, entry.value)
        return list(found)

    def get(self, name: str) -> Any:
        """The object of this name.

        Raises
        ------
        ConfigError
            No plug-in has this name; the nearest are offered.
        """
        if name in self._objects:
            return self._objects[name]
        target = self._builtin.get(name)
        if target is None:
            for entry in entry_points(group=self.group):
                if entry.name == name:
                    return self._objects.setdefault(name, entry.load())
            raise ConfigError(self.group, f"{name!r} is not known. {nearest(name, self.names())}")
        module, _, attribute = target.partition(":")
        return self._objects.setdefault(name, getattr(importlib.import_module(module), attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


sources = Registry(
    "alchemi_xr.sources",
    {
        "extxyz": "alchemi_xr.etl.sources.extxyz:ExtxyzSource",
        "npz": "alchemi_xr.etl.sources.npz:NpzSource",
        "hdf5": "alchemi_xr.etl.sources.hdf5:Hdf5Source",
        "deepmd": "alchemi_xr.etl.sources.deepmd:DeepmdSource",
        "packed": "alchemi_xr.etl.sources.packed:PackedSource",
        "atompack": "alchemi_xr.etl.sources.atompack:AtompackSource",
        "store": "alchemi_xr.etl.sources.store:StoreSource",
        "table": "alchemi_xr.etl.sources.table:TableSource",
        "trajectory": "alchemi_xr.etl.sources.trajectory:TrajectorySource",
        "pymatgen-json": "alchemi_xr.etl.sources.pymatgen_json:PymatgenJsonSource",
        "ase-db": "alchemi_xr.etl.sources.ase_db:AseDbSource",
        "ase": "alchemi_xr.etl.sources.ase_io:AseSource",
    },
)
exports = Registry(
    "alchemi_xr.exports",
    {
        "extxyz": "alchemi_xr.etl.exports.extxyz:ExtxyzExport",
        "ase-db": "alchemi_xr.etl.exports.ase_db:AseDbExport",
        "aselmdb": "alchemi_xr.etl.exports.ase_db:AseLmdbExport",
        "npz": "alchemi_xr.etl.exports.npz:NpzExport",
        "parquet": "alchemi_xr.etl.exports.table:ParquetExport",
        "deepmd": "alchemi_xr.etl.exports.deepmd:DeepmdExport",
        "packed": "alchemi_xr.etl.exports.packed:PackedExport",
        "ase": "alchemi_xr.etl.exports.ase_io:AseExport",
    },
)
models = Registry(
    "alchemi_xr.models",
    {
        "demo": "alchemi_xr.models.demo:DemoModelWrapper",
        "lj": "alchemi_xr.models.lj:LennardJonesModel",
        "ase": "alchemi_xr.models.ase:ASECalculatorModel",
    },
)
_HOOKS = "alchemi_xr.dynamics.hooks"
hooks = Registry(
    "alchemi_xr.hooks",
    {
        "align-cell": f"{_HOOKS}.align:AlignCellHook",
        "bias": f"{_HOOKS}.bias:BiasedPotentialHook",
        "converged-snapshot": f"{_HOOKS}.snapshot:ConvergedSnapshotHook",
        "energy-drift": f"{_HOOKS}.drift:EnergyDriftMonitorHook",
        "freeze-atoms": f"{_HOOKS}.freeze:FreezeAtomsHook",
        "logging": f"{_HOOKS}.logging:LoggingHook",
        "max-force": f"{_HOOKS}.safety:MaxForceClampHook",
        "nan-detector": f"{_HOOKS}.safety:NaNDetectorHook",
        "neighbor-list": f"{_HOOKS}.neighbor_list:NeighborListHook",
        "snapshot": f"{_HOOKS}.snapshot:SnapshotHook",
        "stage-timing": f"{_HOOKS}.timing:StageTimingHook",
        "torch-profiler": f"{_HOOKS}.profiler:TorchProfilerHook",
        "wrap-periodic": f"{_HOOKS}.periodic:WrapPeriodicHook",
    },
)

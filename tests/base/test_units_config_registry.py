"""Units against ASE's constants, options that check themselves, plug-ins by name."""

from __future__ import annotations

import pytest

from alchemi_xr import units as u
from alchemi_xr.config import get_options, set_options
from alchemi_xr.errors import ConfigError, OptionalDependencyError
from alchemi_xr.registry import Registry, sources

ase_units = pytest.importorskip("ase.units")


@pytest.mark.physics
@pytest.mark.parametrize(
    ("unit", "target", "expected"),
    [
        ("Hartree", "eV", ase_units.Hartree),
        ("kcal/mol", "eV", ase_units.kcal / ase_units.mol),
        ("kJ/mol", "eV", ase_units.kJ / ase_units.mol),
        ("Bohr", "Å", ase_units.Bohr),
        ("Hartree/Bohr", "eV/Å", ase_units.Hartree / ase_units.Bohr),
        ("kcal/mol/Å", "eV/Å", ase_units.kcal / ase_units.mol),
        ("GPa", "eV/Å^3", ase_units.GPa),
        ("GPa", "eV/Å³", ase_units.GPa),
        ("Debye", "e*Å", ase_units.Debye),
        ("nm", "Angstrom", 10.0),
        ("ps", "fs", 1000.0),
    ],
)
def test_factors_agree_with_ase(unit: str, target: str, expected: float) -> None:
    # ASE uses CODATA 2014 by default, we 2018: they differ below 1e-7.
    assert u.conversion_factor(unit, target) == pytest.approx(expected, rel=1e-6)


@pytest.mark.physics
def test_internal_time_and_boltzmann() -> None:
    # ASE's unit of time is the same as ours: fs in it is 1 / 10.18.
    assert pytest.approx(1 / ase_units.fs, rel=1e-6) == u.FS_PER_INTERNAL_TIME
    assert pytest.approx(ase_units.kB, rel=1e-6) == u.KB
    assert u.from_internal_time(u.to_internal_time(0.5)) == pytest.approx(0.5)


@pytest.mark.parametrize(("unit", "target"), [("eV", "Å"), ("furlong", "Å"), ("eV/Å", "eV")])
def test_wrong_units_are_refused(unit: str, target: str) -> None:
    with pytest.raises(ConfigError, match="units"):
        u.conversion_factor(unit, target)


def test_options_for_a_block_and_for_good() -> None:
    before = dict(get_options())
    with set_options(stream_bytes=1024):
        assert get_options()["stream_bytes"] == 1024
    assert get_options() == before


@pytest.mark.parametrize(
    "options",
    [
        {"stream_byte": 1},
        {"progress": "loud"},
        {"stream_bytes": 0},
        {"lease_timeout": True},
        {"stream_bytes": 5, "nothing": 1},
    ],
)
def test_wrong_options_change_nothing(options: dict[str, object]) -> None:
    before = dict(get_options())
    with pytest.raises(ConfigError):
        set_options(**options)
    assert get_options() == before


def test_registry_offers_the_nearest_and_takes_new_ones() -> None:
    registry = Registry("alchemi_xr.nothing", {"join": "os.path:join"})
    import os.path

    assert registry.get("join") is os.path.join
    registry.register("mine", int)
    assert registry.get("mine") is int
    assert list(registry) == ["join", "mine"]
    with pytest.raises(ConfigError, match="Nearest: 'join'"):
        registry.get("joim")


def test_every_builtin_source_loads() -> None:
    for name in ("extxyz", "ase-db", "ase"):
        assert sources.get(name).name == name


def test_a_missing_optional_package_names_its_extra() -> None:
    from alchemi_xr._optional import import_optional

    with pytest.raises(OptionalDependencyError, match=r"pip install 'alchemi_xr\[viz\]'"):
        import_optional("a_module_that_is_not", extra="viz", why="a plot")

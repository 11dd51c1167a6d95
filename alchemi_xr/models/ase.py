"""Any ASE calculator as a model: real physics, system by system, on the CPU.

Every system in flight has a calculator of its own that stays with it, so that a
self-consistent method starts each step from the last one's density, and systems
that did not move cost nothing.
"""

from __future__ import annotations

import math
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from alchemi_xr._typing import NDArray
from alchemi_xr.errors import ConfigError, ModelError
from alchemi_xr.models.base import BaseModelMixin, ModelConfig

__all__ = ["ASECalculatorModel", "CalculatorError"]

# A system whose atom jumped farther than this (Å) since its last evaluation is
# another one with the same number: no optimizer or integrator moves so far in a step.
_JUMP = 1.0

_SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "energy": ("system", (1,)),
    "forces": ("atom", (3,)),
    "stress": ("system", (3, 3)),
    "dipole": ("system", (3,)),
    "charges": ("atom", ()),
}

_HEAVIEST_FIRST = ("stress", "forces", "charges", "dipole", "energy")


class CalculatorError(ModelError):
    """The calculator failed for some systems.

    Attributes
    ----------
    systems : list of int
        Their positions in the batch.
    """

    systems: list[int]

    def __init__(self, *args: Any, systems: Iterable[int] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.systems = list(systems)

    def __reduce__(self) -> tuple[Any, ...]:
        build, arguments = super().__reduce__()
        return build, arguments, {"systems": self.systems}


@dataclass(slots=True)
class _Site:
    """One system with its calculator."""

    atoms: Any
    calculator: Any
    electrons: tuple[float | None, float | None]
    results: dict[str, NDArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _System:
    """What the calculator is told about one system, in NumPy."""

    numbers: NDArray
    positions: NDArray
    cell: NDArray | None
    pbc: NDArray
    charge: float | None
    spin: float | None


class ASECalculatorModel(nn.Module, BaseModelMixin):
    """Energies, forces and more from any ASE calculator.

    Parameters
    ----------
    factory : callable
        Makes a calculator: ``factory() -> ase.calculators.calculator.Calculator``.
        It must pickle to travel to workers: a class, a module's function, or a
        ``functools.partial`` of one, such as ``partial(TBLite, method="GFN2-xTB",
        verbosity=0)``; not a lambda.
    properties : tuple of str
        Of ``energy``, ``forces``, ``stress``, ``dipole``, ``charges``.
    workers : int, optional
        Threads that evaluate systems at the same time. They help only where the
        calculator leaves the interpreter during its work (compiled codes do,
        Python codes do not) and should run with ``OMP_NUM_THREADS=1``. For
        Python codes use processes: the workers of a campaign. By default one.
    on_error : {"raise", "nan"}
        What a failing calculator means: an error that names the systems, or NaN
        in their rows and a reason in ``failures``.
    calculators : {"per-system", "shared"}
        A calculator for each system in flight, or one for all, for those that
        are dear to make and remember nothing (a trained network).

    Attributes
    ----------
    failures : dict of int to str
        Of the last call: position in the batch to reason.

    Raises
    ------
    ConfigError
        An option or property is not known.

    Notes
    -----
    ``energy`` is always float64, the rest has the dtype of the positions. The
    energy is ``calculator.get_property("energy")``. A batch's ``charge`` and
    ``spin`` (multiplicity) reach the calculator as initial charges and magnetic
    moments with that sum, on the first atom, and as ``info["charge"]`` and
    ``info["spin"]``. A periodic system's stress is asked for; others have NaN.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        properties: Iterable[str] = ("energy", "forces"),
        workers: int | None = None,
        *,
        on_error: Literal["raise", "nan"] = "raise",
        calculators: Literal["per-system", "shared"] = "per-system",
    ) -> None:
        super().__init__()
        where = "ASECalculatorModel"
        if not callable(factory):
            raise ConfigError(
                where,
                "factory must be callable without arguments",
                found=type(factory).__name__,
                mend="pass the class or a functools.partial, not a calculator",
            )
        wanted = tuple(properties)
        unknown = [p for p in wanted if p not in _SHAPES]
        if unknown or "energy" not in wanted:
            raise ConfigError(
                where,
                f"properties {unknown} are not known" if unknown else "properties lack 'energy'",
                expected=f"'energy' and some of {list(_SHAPES)[1:]}",
            )
        if on_error not in ("raise", "nan"):
            raise ConfigError(where, f"on_error={on_error!r}", expected="'raise' or 'nan'")
        if calculators not in ("per-system", "shared"):
            raise ConfigError(
                where, f"calculators={calculators!r}", expected="'per-system' or 'shared'"
            )
        if workers is not None and workers < 1:
            raise ConfigError(where, "workers starts at 1", found=workers)
        if workers is not None and workers > 1 and calculators == "shared":
            raise ConfigError(where, "one shared calculator cannot serve several threads")
        self.factory = factory
        self.properties = wanted
        self.workers = workers
        self.on_error = on_error
        self.calculators = calculators
        self.failures: dict[int, str] = {}
        self._sites: dict[tuple[str, int], _Site] = {}
        self._shared: Any = None
        self.model_config = ModelConfig(
            outputs=set(wanted),
            optional_inputs={"cell", "pbc", "charge", "spin"},
            supports_pbc=True,
        )

    def __getstate__(self) -> dict[str, Any]:
        # Calculators hold foreign handles; a copy makes its own.
        return {**self.__dict__, "_sites": {}, "_shared": None, "failures": {}}

    def reset_systems(self) -> None:
        """Forget the systems in flight; the next call makes their calculators anew.

        For those who give the same numbers to other systems: a campaign between
        its units and tries.
        """
        self._sites = {}
        self.failures = {}

    def forward(self, data: Any, **kwargs: Any) -> OrderedDict[str, Tensor]:
        """The chosen properties of every system.

        Raises
        ------
        CalculatorError
            A calculator failed, with ``on_error="raise"``.
        """
        self.adapt_input(data)
        systems, names = _split(data)
        sites = self._seat(names, systems)
        wanted = tuple(p for p in self.properties if p in self.output_data())
        reasons: dict[int, tuple[str, BaseException]] = {}

        def evaluate(k: int) -> None:
            try:
                self._evaluate(sites[k], systems[k], wanted)
            except Exception as error:  # whatever a foreign code raises
                reasons[k] = (_reason(error), error)

        if self.workers is not None and self.workers > 1 and len(sites) > 1:
            with ThreadPoolExecutor(self.workers) as pool:
                list(pool.map(evaluate, range(len(sites))))
        else:
            for k in range(len(sites)):
                evaluate(k)

        for k in reasons:
            # What a failed code remembers is not to be trusted.
            self._sites.pop(names[k], None)
            self._shared = None
        self.failures = {k: reasons[k][0] for k in sorted(reasons)}
        if reasons and self.on_error == "raise":
            self._raise(reasons, systems)
        results = [{} if k in reasons else site.results for k, site in enumerate(sites)]
        return self.adapt_output(self._gather(results, systems, wanted, data), data)

    def _raise(self, reasons: dict[int, tuple[str, BaseException]], systems: list[_System]) -> None:
        first = min(reasons)
        others = f" (and of systems {sorted(set(reasons) - {first})})" if len(reasons) > 1 else ""
        raise CalculatorError(
            f"system {first}",
            f"its calculator failed{others}: {reasons[first][0]}",
            mend='correct the structure, or on_error="nan" to go on without it',
            systems=sorted(reasons),
        ) from reasons[first][1]

    def _seat(self, names: list[tuple[str, int]], systems: list[_System]) -> list[_Site]:
        """A site for every system; those of systems that left are given up."""
        sites = []
        for name, system in zip(names, systems, strict=True):
            site = self._sites.get(name)
            if site is None or not _continues(site, system):
                site = self._new_site(system)
            sites.append(site)
        self._sites = dict(zip(names, sites, strict=True))
        return sites

    def _new_site(self, system: _System) -> _Site:
        from ase import Atoms

        atoms = Atoms(
            numbers=system.numbers,
            positions=system.positions,
            cell=system.cell,
            pbc=system.pbc,
        )
        if system.charge is not None:
            charges = np.zeros(len(atoms))
            charges[:1] = system.charge
            atoms.set_initial_charges(charges)
            atoms.info["charge"] = _whole(system.charge)
        if system.spin is not None:
            moments = np.zeros(len(atoms))
            moments[:1] = system.spin - 1.0
            atoms.set_initial_magnetic_moments(moments)
            atoms.info["spin"] = _whole(system.spin)
        return _Site(atoms, None, (system.charge, system.spin))

    def _evaluate(self, site: _Site, system: _System, wanted: tuple[str, ...]) -> None:
        """Results of one system into its site."""
        calculator, atoms = self._calculator_of(site), site.atoms
        # The heaviest first: a code that gives forces has the energy too, and then
        # does not run again for it.
        asked = [p for p in _HEAVIEST_FIRST if p in wanted]
        if not system.pbc.any():
            asked = [p for p in asked if p != "stress"]
        if len(atoms) == 0 or (_unmoved(atoms, system) and set(asked) <= set(site.results)):
            return
        atoms.positions[:] = system.positions
        if system.cell is not None:
            atoms.cell[:] = system.cell
        site.results = {}
        results = {}
        for name in asked:
            value = np.array(calculator.get_property(name, atoms), dtype=np.float64)
            results[name] = _shaped(name, value, len(atoms))
        site.results = results

    def _calculator_of(self, site: _Site) -> Any:
        """The site's own, or the shared one: sites keep no hold of that, as it may be replaced."""
        if self.calculators == "shared":
            if self._shared is None:
                self._shared = self.factory()
            return self._shared
        if site.calculator is None:
            site.calculator = self.factory()
        return site.calculator

    def _gather(
        self,
        results: list[dict[str, NDArray]],
        systems: list[_System],
        wanted: tuple[str, ...],
        data: Any,
    ) -> dict[str, Tensor]:
        """One flat tensor a property, NaN where a system has none."""
        positions = data.positions
        output = {}
        for name in wanted:
            level, tail = _SHAPES[name]
            rows = []
            for result, system in zip(results, systems, strict=True):
                count = len(system.numbers) if level == "atom" else 1
                # Nothing weighs nothing: a system without atoms has no energy, not NaN.
                fill = 0.0 if len(system.numbers) == 0 and name == "energy" else np.nan
                value = result.get(name)
                shape = (count, *tail)
                rows.append(np.full(shape, fill) if value is None else value)
            flat = np.concatenate(rows) if rows else np.zeros((0, *tail))
            dtype = torch.float64 if name == "energy" else positions.dtype
            output[name] = torch.from_numpy(flat).to(positions.device, dtype)
        return output


def _unmoved(atoms: Any, system: _System) -> bool:
    same_cell = system.cell is None or np.array_equal(atoms.cell.array, system.cell)
    return same_cell and np.array_equal(atoms.positions, system.positions)


def _continues(site: _Site, system: _System) -> bool:
    """Whether a site's calculator was working on this very system."""
    atoms = site.atoms
    if (
        len(atoms) != len(system.numbers)
        or not np.array_equal(atoms.numbers, system.numbers)
        or not np.array_equal(atoms.pbc, system.pbc)
        or site.electrons != (system.charge, system.spin)
    ):
        return False
    # NaN compares False and makes a new site.
    return bool((np.abs(atoms.positions - system.positions) <= _JUMP).all())


def _split(data: Any) -> tuple[list[_System], list[tuple[str, int]]]:
    """The systems of a batch in NumPy, and a lasting name for each."""

    def array(name: str) -> NDArray | None:
        if name not in data or data[name] is None:
            return None
        values: NDArray = data[name].detach().cpu().numpy()
        return values

    def present(name: str, count: int) -> NDArray:
        mask = getattr(data, "present", {}).get(name)
        return np.ones(count, dtype=bool) if mask is None else mask.cpu().numpy()

    numbers = data.atomic_numbers.detach().cpu().numpy()
    positions = data.positions.detach().cpu().numpy().astype(np.float64)
    ptr = getattr(data, "atoms_ptr", None)
    bounds = [0, len(numbers)] if ptr is None else ptr.tolist()
    count = len(bounds) - 1
    cell, pbc, charge, spin = (array(n) for n in ("cell", "pbc", "charge", "spin"))
    has_cell, has_pbc = present("cell", count), present("pbc", count)
    ids = array("system_id")

    def number(values: NDArray | None, k: int) -> float | None:
        if values is None or not np.isfinite(values[k]).all():
            return None
        return float(values[k].reshape(-1)[0])

    has_charge, has_spin = present("charge", count), present("spin", count)
    systems = []
    for k in range(count):
        rows = slice(bounds[k], bounds[k + 1])
        multiplicity = number(spin, k) if has_spin[k] else None
        systems.append(
            _System(
                numbers[rows],
                positions[rows],
                cell[k].astype(np.float64) if cell is not None and has_cell[k] else None,
                pbc[k].astype(bool) if pbc is not None and has_pbc[k] else np.zeros(3, dtype=bool),
                number(charge, k) if has_charge[k] else None,
                # 0 is how data sets write "not known".
                multiplicity if multiplicity else None,
            )
        )
    names = [
        ("slot", k) if ids is None or int(ids[k, 0]) < 0 else ("id", int(ids[k, 0]))
        for k in range(count)
    ]
    if len(set(names)) < len(names):  # two runs' batches put together
        names = [("slot", k) for k in range(count)]
    return systems, names


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _shaped(name: str, value: NDArray, atoms: int) -> NDArray:
    """A calculator's value as rows of its field."""
    level, tail = _SHAPES[name]
    if name == "stress" and value.shape == (6,):
        from ase.stress import voigt_6_to_full_3x3_stress

        value = np.asarray(voigt_6_to_full_3x3_stress(value))
    shape = (atoms if level == "atom" else 1, *tail)
    if value.size != math.prod(shape):
        raise ModelError(
            "calculator", f"its {name} has the wrong shape", found=value.shape, expected=shape
        )
    return value.reshape(shape)


def _reason(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()

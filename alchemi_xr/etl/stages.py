"""What is done to the samples between reading and writing, block by block.

In this order: a function of the user's, positions put back into the cell, the
energies of the elements taken off, and the condition by which samples are kept.
Counts of atoms stay as the scan found them: what is filtered out is marked.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from alchemi_xr._typing import NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.data.fields import FIELDS
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.errors import AlchemiError, ConfigError, FieldError, TransformError, nearest
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.etl.predicate import Predicate, Verdict
from alchemi_xr.store.bulk import FieldLayout

__all__ = ["Stages", "make_stages", "wrap_positions"]


@dataclass(frozen=True)
class Stages:
    """What is done to every block.

    Parameters
    ----------
    function : callable, optional
        Of a :class:`~alchemi_xr.data.block.Block`, giving one with the same samples.
    wrap : bool
        Put positions into the cell along periodic axes.
    baseline : dict of int to float
        Energy of an atom of each element, eV, taken off the energy.
    where : Predicate, optional
    cutoff : float, optional
        Å, of the neighbour lists that every sample is given
        (:mod:`alchemi_xr.etl.neighbors`, which is no function of single blocks).
    """

    function: Callable[[Block], Block] | None = None
    wrap: bool = False
    baseline: Mapping[int, float] = field(default_factory=dict)
    where: Predicate | None = None
    cutoff: float | None = None

    @property
    def any(self) -> bool:
        """Whether anything is done at all."""
        return bool(self.function or self.wrap or self.baseline or self.where or self.cutoff)

    def __call__(self, block: Block) -> tuple[Block, list[tuple[int, str, str]]]:
        """The block after it, and sample, field and reason of what cannot be done."""
        failed: list[tuple[int, str, str]] = []
        if self.function is not None:
            block = self._called(block)
        if self.wrap:
            block = wrap_positions(block)
        if self.baseline:
            block, failed = self._less_elements(block)
        return block, failed

    def verdict(self, block: Block) -> Verdict | None:
        """Which samples are kept."""
        return None if self.where is None else self.where(block)

    def identity(self) -> dict[str, Any]:
        """All that decides the result, in words."""
        return {
            "function": None if self.function is None else _identity_of(self.function),
            "wrap": self.wrap,
            "baseline": sorted(self.baseline.items()),
            "where": None if self.where is None else self.where.text,
            "cutoff": self.cutoff,
        }

    def said(self) -> dict[str, Any]:
        """What the store remembers of it."""
        out: dict[str, Any] = {}
        if self.function is not None:
            out["function"] = _name_of(self.function)
        if self.wrap:
            out["wrap"] = True
        if self.baseline:
            out["baseline"] = {SYMBOLS[z]: e for z, e in sorted(self.baseline.items())}
        if self.where is not None:
            out["where"] = self.where.text
        if self.cutoff is not None:
            out["cutoff"] = self.cutoff
        return out

    def _called(self, block: Block) -> Block:
        assert self.function is not None
        name = _name_of(self.function)
        try:
            after = self.function(block)
        except AlchemiError:
            raise
        except Exception as error:
            raise TransformError(
                f"function {name}", f"failed with {type(error).__name__}: {error}"
            ) from error
        if not isinstance(after, Block):
            raise TransformError(
                f"function {name}", "gave no Block", found=type(after).__name__, expected="Block"
            )
        if not (
            np.array_equal(after.atoms_ptr, block.atoms_ptr)
            and np.array_equal(after.edges_ptr, block.edges_ptr)
        ):
            raise TransformError(
                f"function {name}",
                "changed the number of samples, atoms or edges",
                mend="keep them; a condition (where=) leaves samples out",
            )
        return after.validate(where=f"function {name}")

    def _less_elements(self, block: Block) -> tuple[Block, list[tuple[int, str, str]]]:
        if "energy" not in block:
            return block, []
        table = np.full(len(SYMBOLS), np.nan)
        for z, energy in self.baseline.items():
            table[z] = energy
        numbers = block["atomic_numbers"]
        inside = (numbers >= 0) & (numbers < len(SYMBOLS))
        each = np.where(inside, table[np.where(inside, numbers, 0)], np.nan)
        total = segment_reduce(each, block.atoms_ptr, "sum")
        failed = []
        for i in np.flatnonzero(np.isnan(total) & block.has("energy")).tolist():
            rows = slice(int(block.atoms_ptr[i]), int(block.atoms_ptr[i + 1]))
            missing = sorted({int(z) for z in numbers[rows][np.isnan(each[rows])]})
            shown = ", ".join(SYMBOLS[z] if 0 <= z < len(SYMBOLS) else str(z) for z in missing)
            failed.append((i, "energy", f"baseline has no energy of {shown}"))
        values = block["energy"]
        less = values - np.nan_to_num(total).reshape(-1, *[1] * (values.ndim - 1))
        return replace(block, arrays={**block.arrays, "energy": less.astype(values.dtype)}), failed

    # -- layouts

    def layouts(
        self, given: tuple[FieldLayout, ...], probe: Block | None
    ) -> tuple[FieldLayout, ...]:
        """The layouts after the function, as a block that it gave shows them.

        Parameters
        ----------
        given : tuple of FieldLayout
            Before it.
        probe : Block, optional
            What the function made of the first samples.
        """
        if self.function is None or probe is None:
            return given
        known = {layout.name: layout for layout in given}
        out = []
        for name in probe.names:
            values = probe[name]
            level = probe.levels[name]
            text = values.dtype.kind in "OU"
            tail = () if text else tuple(values.shape[1:])
            dtype = "str" if text else values.dtype.name
            before = known.get(name)
            if before is not None and (before.level, before.tail) == (level, tail):
                out.append(before if before.dtype == dtype else replace(before, dtype=dtype))
                continue
            spec = FIELDS.get(name)
            group = "text" if text else "core" if spec is not None else "custom"
            unit = probe.units.get(name) or (spec.unit if spec is not None else "")
            # Of other blocks nothing is known yet: some may lack it.
            out.append(FieldLayout(name, level, dtype, tail, group, unit, True))
        made = {layout.name for layout in out}
        # A field that the first samples do not have is left to those that do.
        rare = [x for x in given if x.holes and x.name not in made]
        return tuple(out + rare)


def make_stages(
    *,
    function: Callable[[Block], Block] | str | None = None,
    wrap: bool = False,
    baseline: Mapping[Any, float] | None = None,
    where: str | Predicate | None = None,
    cutoff: float | None = None,
) -> Stages:
    """The stages of the options of ``convert``.

    Raises
    ------
    ConfigError
        A function cannot be found, an element is unknown, a condition cannot be read.
    """
    return Stages(
        _function(function),
        bool(wrap),
        _baseline(baseline),
        where if where is None or isinstance(where, Predicate) else Predicate(where),
        cutoff,
    )


def _function(given: Any) -> Callable[[Block], Block] | None:
    if given is None:
        return None
    if isinstance(given, str):
        module, colon, name = given.partition(":")
        if not (module and colon and name):
            raise ConfigError("function", "is no name", found=given, expected="module:function")
        try:
            found: Any = importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                "function",
                f"module {module!r} cannot be imported ({error})",
                mend="install it, or put its folder into PYTHONPATH",
            ) from error
        for part in name.split("."):
            if not hasattr(found, part):
                raise ConfigError(
                    "function", f"{module!r} has no {part!r}. {nearest(part, dir(found))}"
                )
            found = getattr(found, part)
        given = found
    if not callable(given):
        raise ConfigError("function", "cannot be called", found=type(given).__name__)
    return given


def _baseline(given: Mapping[Any, float] | None) -> dict[int, float]:
    out: dict[int, float] = {}
    if given is None:
        return out
    if not isinstance(given, Mapping):
        raise ConfigError(
            "baseline", "is no mapping", found=type(given).__name__, expected='{"H": -13.6, ...}'
        )
    for element, energy in given.items():
        if isinstance(element, str) and element in SYMBOLS[1:]:
            number = SYMBOLS.index(element)
        elif isinstance(element, (int, np.integer)) and 0 < int(element) < len(SYMBOLS):
            number = int(element)
        else:
            raise ConfigError(
                "baseline", "no such element", found=repr(element), expected="H, He …"
            )
        try:
            value = float(energy)
        except (TypeError, ValueError):
            value = np.nan
        if not np.isfinite(value):
            raise ConfigError("baseline", f"no energy in eV for {element!r}", found=repr(energy))
        out[number] = value
    return out


def _name_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", type(function).__module__)
    return f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def _identity_of(function: Callable[..., Any]) -> str:
    """Name and text: a job is not taken up with another function."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(function) if not inspect.isroutine(function) else ""
    return f"{_name_of(function)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def wrap_positions(block: Block) -> Block:
    """Positions in the cell, along periodic axes; samples without a cell stay as they are.

    Fractional coordinates, in terms of the three vectors of the cell, become those in
    [0, 1) along periodic axes, as in ``ase.Atoms.wrap(eps=0)``.
    """
    if "cell" not in block or "pbc" not in block or block.num_atoms == 0:
        return block
    pbc: NDArray = (
        block["pbc"].astype(bool) & block.has("pbc")[:, None] & block.has("cell")[:, None]
    )
    chosen = np.flatnonzero(pbc.any(axis=1))
    if len(chosen) == 0:
        return block
    cell = np.zeros((block.num_samples, 3, 3))
    cell[:] = np.eye(3)
    cell[chosen] = [
        _completed(c, p) for c, p in zip(block["cell"][chosen], pbc[chosen], strict=True)
    ]
    flat = np.abs(np.linalg.det(cell)) < 1e-9
    if flat.any():
        i = int(np.flatnonzero(flat)[0])
        raise FieldError(
            f"sample {i} of the block",
            "is periodic but its cell spans no volume, so its positions cannot be wrapped",
            found=block["cell"][i].tolist(),
            mend="correct cell and pbc, or convert without wrap",
        )
    owner = ptr_to_index(block.atoms_ptr)
    positions = block["positions"].astype(np.float64)
    scaled = np.einsum("ij,ijk->ik", positions, np.linalg.inv(cell)[owner])
    images: NDArray = np.where(pbc[owner], np.floor(scaled), 0.0)
    moved = positions - np.einsum("ij,ijk->ik", images, cell[owner])
    shifted: NDArray = np.asarray(images.any(axis=1))
    values = np.where(shifted[:, None], moved, positions)
    arrays = {**block.arrays, "positions": values.astype(block["positions"].dtype)}
    if "neighbor_list_shifts" in block and "neighbor_list" in block:
        # x_j + S.cell - x_i stays what it was.
        pairs = (
            block["neighbor_list"]
            + np.repeat(block.atoms_ptr[:-1], np.diff(block.edges_ptr))[:, None]
        )
        more = images[pairs[:, 1]] - images[pairs[:, 0]]
        shifts = block["neighbor_list_shifts"]
        arrays["neighbor_list_shifts"] = (shifts + more).astype(shifts.dtype)
    return replace(block, arrays=arrays)


def _completed(cell: NDArray, pbc: NDArray) -> NDArray:
    """The cell, with vectors at right angles for axes that are not periodic and have none."""
    out = np.array(cell, dtype=np.float64)
    open_axes = np.flatnonzero(~pbc & ~(np.isfinite(out).all(axis=1) & out.any(axis=1)))
    out[open_axes] = 0.0
    for axis in open_axes.tolist():
        # The direction that the vectors so far leave open most.
        _, _, rows = np.linalg.svd(out)
        out[axis] = rows[-1]
    return out

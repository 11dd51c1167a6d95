"""A condition on samples, given as text: ``"natoms < 200 and fmax < 50"``.

The text is parsed, never run: numbers, names, comparisons, arithmetic and
``and``, ``or``, ``not`` are all there is. A sample about which the condition
cannot be decided, since a value is missing or NaN, is neither kept nor quietly
taken for one that fails it: it is counted apart.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from alchemi_xr._typing import BoolArray, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.fields import resolve
from alchemi_xr.data.segment import segment_reduce
from alchemi_xr.errors import ConfigError, UnknownFieldError, nearest
from alchemi_xr.etl.elements import SYMBOLS

__all__ = ["DERIVED", "Predicate", "Verdict"]

_AMU_PER_A3 = 1.66053906660  # g/cm3, CODATA 2018


@dataclass(frozen=True)
class Verdict:
    """What a condition says of the samples of a block.

    Parameters
    ----------
    keep : bool array, shape (N,)
    unknown : bool array, shape (N,)
        Those about which it says nothing; never kept.
    """

    keep: BoolArray
    unknown: BoolArray


@dataclass(frozen=True)
class _Column:
    """A value a sample, and where there is one."""

    values: NDArray
    known: BoolArray
    absent: bool = False  # no sample here has it, so its kind is not known either


def _sizes(block: Block) -> _Column:
    return _everywhere(np.diff(block.atoms_ptr))


def _edges(block: Block) -> _Column:
    return _everywhere(np.diff(block.edges_ptr))


def _everywhere(values: NDArray) -> _Column:
    return _Column(values, np.ones(len(values), dtype=bool))


def _fmax(block: Block) -> _Column:
    # The largest of the squares first: one root a sample.
    with np.errstate(over="ignore", invalid="ignore"):
        squares = (block["forces"].astype(np.float64) ** 2).sum(axis=1)
    values = np.sqrt(segment_reduce(squares, block.atoms_ptr, "max"))
    return _Column(values, block.has("forces") & ~np.isnan(values))


def _energy_per_atom(block: Block) -> _Column:
    counts = np.diff(block.atoms_ptr)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = block["energy"].reshape(-1) / counts
    return _Column(values, block.has("energy") & ~np.isnan(values))


def _volume(block: Block) -> _Column:
    # The rows of samples without a cell are NaN.
    with np.errstate(invalid="ignore"):
        values = np.abs(np.linalg.det(block["cell"].astype(np.float64).reshape(-1, 3, 3)))
    return _Column(values, block.has("cell") & (values > 0))


def _density(block: Block) -> _Column:
    from ase.data import atomic_masses

    volume = _volume(block)
    mass = segment_reduce(atomic_masses[block["atomic_numbers"]], block.atoms_ptr, "sum")
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Column(mass / volume.values * _AMU_PER_A3, volume.known)


@dataclass(frozen=True)
class _Derived:
    needs: tuple[str, ...]
    of: Callable[[Block], _Column]
    doc: str


DERIVED: Mapping[str, _Derived] = {
    "natoms": _Derived((), _sizes, "number of atoms"),
    "nedges": _Derived((), _edges, "number of edges"),
    "fmax": _Derived(("forces",), _fmax, "largest force, eV/Å"),
    "energy_per_atom": _Derived(("energy",), _energy_per_atom, "eV"),
    "volume": _Derived(("cell",), _volume, "Å³"),
    "density": _Derived(("cell",), _density, "g/cm³"),
}
"""Names that a condition may have beside those of fields of systems, and ``elements``."""

_ALIASES = {"num_atoms": "natoms", "num_edges": "nedges"}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.true_divide,
    ast.Mod: np.mod,
    ast.Pow: np.power,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "log": np.log,
    "exp": np.exp,
}
_LONGEST = 4_000


class Predicate:
    """A condition on samples.

    Parameters
    ----------
    text : str
        Names of fields with one value a sample, of :data:`DERIVED`, and
        ``elements``: ``"'Fe' in elements"`` (some atom is iron),
        ``"elements in ('H', 'C', 'O')"`` (no atom is anything else).
    where : str
        For messages.

    Raises
    ------
    ConfigError
        It is no condition, or has something that is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> block = Block(np.array([0, 1, 3]), np.zeros(3, int), {"energy": np.array([[-1.0], [5.0]])},
    ...               {"energy": "system"})
    >>> Predicate("natoms < 3 and energy < 0")(block).keep
    array([ True, False])
    """

    def __init__(self, text: str, *, where: str = "where") -> None:
        if not isinstance(text, str) or not text.strip() or len(text) > _LONGEST:
            raise ConfigError(where, "is no condition", found=repr(text)[:80], mend=_EXAMPLE)
        self.text, self.where = text.strip(), where
        try:
            self._tree = ast.parse(self.text, mode="eval").body
            self._check(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                where, f"the condition cannot be read ({error})", found=self.text, mend=_EXAMPLE
            ) from None

    def __repr__(self) -> str:
        return f"Predicate({self.text!r})"

    def __reduce__(self) -> Any:
        return Predicate, (self.text,)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in the condition, each once."""
        called = {id(n.func) for n in ast.walk(self._tree) if isinstance(n, ast.Call)}
        found = [
            _ALIASES.get(n.id, n.id)
            for n in ast.walk(self._tree)
            if isinstance(n, ast.Name) and id(n) not in called
        ]
        return tuple(dict.fromkeys(found))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that have to be there for it."""
        out: list[str] = []
        for name in self.names:
            if name == "elements":
                out.append("atomic_numbers")
            elif name in DERIVED:
                out += DERIVED[name].needs
                out += ["atomic_numbers"] if name == "density" else []
            else:
                out.append(resolve(name))
        return tuple(dict.fromkeys(out))

    def check(self, levels: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Whether the samples have what it asks for.

        Parameters
        ----------
        levels : dict of str to (level, trailing shape)
            By field.

        Raises
        ------
        UnknownFieldError, ConfigError
        """
        for name in self.names:
            needs = DERIVED[name].needs if name in DERIVED else ()
            missing = [n for n in needs if n not in levels]
            if missing:
                raise UnknownFieldError(
                    self.where, f"{name!r} needs {missing[0]!r}, which no record has"
                )
            if name in DERIVED or name == "elements":
                continue
            field = resolve(name)
            if field not in levels:
                known = [*levels, *DERIVED, "elements"]
                raise UnknownFieldError(
                    self.where, f"the input has no field {name!r}. {nearest(name, known)}"
                )
            level, tail = levels[field]
            if level != "system" or int(np.prod(tail)) != 1:
                raise ConfigError(
                    self.where,
                    f"{name!r} is not one value a sample",
                    found=f"{level} [rows, {', '.join(map(str, tail))}]",
                    expected="a field of systems with one value, or " + ", ".join(DERIVED),
                )

    def __call__(self, block: Block) -> Verdict:
        """What it says of every sample of a block."""
        with np.errstate(all="ignore"):
            found = self._value(self._tree, block, {})
        if found.values.dtype != np.bool_:
            raise ConfigError(
                self.where, "is a number, not a condition", found=self.text, mend=_EXAMPLE
            )
        n = block.num_samples
        known = np.broadcast_to(found.known, (n,))
        return Verdict(np.broadcast_to(found.values, (n,)) & known, ~known)

    # -- what may stand in it

    def _check(self, node: ast.AST) -> None:
        children: Collection[ast.AST]
        match node:
            case ast.Constant(value=bool() | int() | float() | str()):
                children = ()
            case ast.Name():
                children = ()
            case ast.BoolOp(values=values):
                children = values
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
                children = (operand,)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
                children = (left, right)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
                name in _FUNCTIONS
            ):
                children = (argument,)
            case ast.Compare(left=left, ops=ops, comparators=right):
                if any(type(o) not in _COMPARISONS and not _is_in(o) for o in ops):
                    self._refuse(node)
                members = [r for o, r in zip(ops, right, strict=True) if _is_in(o)]
                if members:
                    self._check_membership(node)
                    return
                children = (left, *right)
            case _:
                self._refuse(node)
        for child in children:
            self._check(child)

    def _check_membership(self, node: ast.Compare) -> None:
        if len(node.ops) != 1:
            self._refuse(node)
        left, right = node.left, node.comparators[0]
        if isinstance(left, ast.Constant) and isinstance(right, ast.Name):
            if right.id != "elements" or left.value not in SYMBOLS[1:]:
                self._refuse(node)
        elif isinstance(left, ast.Name) and isinstance(right, (ast.Tuple, ast.List, ast.Set)):
            if not right.elts or not all(isinstance(e, ast.Constant) for e in right.elts):
                self._refuse(node)
            if left.id == "elements" and not all(
                isinstance(e, ast.Constant) and e.value in SYMBOLS[1:] for e in right.elts
            ):
                self._refuse(node)
        else:
            self._refuse(node)

    def _refuse(self, node: ast.AST) -> Any:
        raise ConfigError(
            self.where,
            f"{ast.unparse(node)!r} may not stand in a condition",
            expected="names, numbers, comparisons, arithmetic, and, or, not, in ('a', 'b'), "
            + ", ".join(_FUNCTIONS),
            mend=_EXAMPLE,
        )

    # -- what it says

    def _value(self, node: ast.AST, block: Block, seen: dict[str, _Column]) -> _Column:
        match node:
            case ast.Constant(value=value):
                return _Column(np.asarray(value), np.asarray(True))
            case ast.Name(id=name):
                if name not in seen:
                    seen[name] = _column(_ALIASES.get(name, name), block)
                return seen[name]
            case ast.BoolOp(op=op, values=values):
                return self._both(op, [self._value(v, block, seen) for v in values])
            case ast.UnaryOp(op=op, operand=operand):
                found = self._value(operand, block, seen)
                if isinstance(op, ast.Not):
                    return _Column(~self._condition(found), found.known)
                return _Column(
                    -found.values if isinstance(op, ast.USub) else found.values, found.known
                )
            case ast.BinOp(op=op, left=left, right=right):
                a, b = self._value(left, block, seen), self._value(right, block, seen)
                return self._apply(_OPERATORS[type(op)], a, b, node)
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                found = self._value(argument, block, seen)
                return _finite(_FUNCTIONS[name](found.values), found.known)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare(node, left, ops, comparators, block, seen)
        raise AssertionError("checked before")

    def _compare(
        self,
        node: ast.Compare,
        left: ast.expr,
        ops: list[ast.cmpop],
        comparators: list[ast.expr],
        block: Block,
        seen: dict[str, _Column],
    ) -> _Column:
        if _is_in(ops[0]):
            found = self._membership(left, comparators[0], block, seen)
            if isinstance(ops[0], ast.NotIn):
                found = _Column(~found.values, found.known)
            return found
        parts = []
        before = self._value(left, block, seen)
        for op, comparator in zip(ops, comparators, strict=True):
            after = self._value(comparator, block, seen)
            parts.append(self._apply(_COMPARISONS[type(op)], before, after, node))
            before = after
        return parts[0] if len(parts) == 1 else self._both(ast.And(), parts)

    def _membership(
        self, left: ast.expr, right: ast.expr, block: Block, seen: dict[str, _Column]
    ) -> _Column:
        numbers = block.arrays.get("atomic_numbers")
        if isinstance(left, ast.Constant):
            assert numbers is not None
            hit = numbers == SYMBOLS.index(str(left.value))
            return _everywhere(segment_reduce(hit, block.atoms_ptr, "any"))
        assert isinstance(right, (ast.Tuple, ast.List, ast.Set))
        members: list[Any] = [e.value for e in right.elts if isinstance(e, ast.Constant)]
        if isinstance(left, ast.Name) and left.id == "elements":
            assert numbers is not None
            hit = np.isin(numbers, [SYMBOLS.index(str(m)) for m in members])
            return _everywhere(segment_reduce(hit, block.atoms_ptr, "all"))
        column = self._value(left, block, seen)
        if column.absent:
            return _Column(np.zeros(block.num_samples, dtype=bool), column.known)
        texts = column.values.dtype == object
        if any(isinstance(m, str) != texts for m in members):
            raise ConfigError(
                self.where,
                f"{ast.unparse(left)!r} is compared with something of another kind",
                found=ast.unparse(right),
                expected="texts" if texts else "numbers",
            )
        hit = np.isin(column.values.astype(str), members) if texts else np.isin(
            column.values, np.array(members)
        )  # fmt: skip
        return _Column(hit, column.known)

    def _apply(self, function: Any, a: _Column, b: _Column, node: ast.AST) -> _Column:
        if a.absent or b.absent:
            condition = function in _COMPARISONS.values()
            known = a.known & b.known
            values = (
                np.zeros(known.shape, dtype=bool) if condition else np.full(known.shape, np.nan)
            )
            return _Column(values, known, absent=not condition)
        if (a.values.dtype.kind in "OU") != (b.values.dtype.kind in "OU"):
            raise ConfigError(self.where, "compares a text with a number", found=ast.unparse(node))
        if a.values.dtype.kind in "OU" and function not in (np.equal, np.not_equal):
            raise ConfigError(
                self.where, "texts can be equal or not, no more", found=ast.unparse(node)
            )
        left, right = a.values, b.values
        if left.dtype == object or right.dtype == object:
            left, right = left.astype(object), right.astype(object)
        values = np.asarray(function(left, right))
        if function in (np.equal, np.not_equal):
            values = values.astype(bool)
        return _finite(values, a.known & b.known)

    def _condition(self, found: _Column) -> BoolArray:
        if found.values.dtype != np.bool_:
            raise ConfigError(
                self.where, "and, or, not stand between conditions", found=self.text, mend=_EXAMPLE
            )
        return found.values

    def _both(self, op: ast.boolop, parts: list[_Column]) -> _Column:
        """Kleene's logic: what is false decides an ``and``, whatever is unknown."""
        decided = isinstance(op, ast.Or)
        values, known = np.asarray(not decided), np.asarray(True)
        settled = np.asarray(False)
        for part in parts:
            condition = self._condition(part)
            settled = settled | (part.known & (condition == decided))
            known = known & part.known
            values = values | condition if decided else values & condition
        return _Column(np.where(settled, decided, values), known | settled)


_EXAMPLE = "such as \"natoms < 200 and fmax < 50 and 'Fe' in elements\""


def _is_in(op: ast.cmpop) -> bool:
    return isinstance(op, (ast.In, ast.NotIn))


def _finite(values: NDArray, known: BoolArray) -> _Column:
    if values.dtype.kind == "f":
        known = known & ~np.isnan(values)
    return _Column(values, known)


def _column(name: str, block: Block) -> _Column:
    if name in DERIVED:
        missing = [n for n in DERIVED[name].needs if n not in block]
        if missing:
            return _nowhere(block)
        return DERIVED[name].of(block)
    field = resolve(name)
    if field not in block:
        return _nowhere(block)
    values = block[field].reshape(block.num_samples)
    return _finite(values, block.has(field))


def _nowhere(block: Block) -> _Column:
    n = block.num_samples
    return _Column(np.full(n, np.nan), np.zeros(n, dtype=bool), absent=True)

"""Ragged data for hypothesis: pointers, blocks, batches, selections.

They reach no sample, samples without atoms or edges, one giant beside small
ones, fields with holes, and every dtype. Structure is drawn by hypothesis (so
that it shrinks), numbers come from a drawn seed (so that it is fast).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from alchemi_xr._typing import Level, NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["DTYPES", "batches", "blocks", "ptrs", "random_rows", "sample_chunks", "selections"]

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)

# Fields that a drawn block may have besides numbers and positions: level, row shape, dtypes.
_FLOATS = ("float16", "float32", "float64")
_OPTIONAL: dict[str, tuple[Level, tuple[int, ...], Sequence[str]]] = {
    "forces": ("atom", (3,), _FLOATS),
    "charges": ("atom", (), _FLOATS),
    "energy": ("system", (1,), _FLOATS),
    "cell": ("system", (3, 3), _FLOATS),
    "pbc": ("system", (3,), ("bool",)),
    "status": ("system", (1,), ("int32", "int64")),
    "shifts": ("edge", (3,), _FLOATS),
    "neighbor_list_shifts": ("edge", (3,), ("int32", "int64", "float32")),
    "my_atom_feature": ("atom", (2,), DTYPES),
    "my_edge_feature": ("edge", (), DTYPES),
    "my_system_feature": ("system", (2, 2), DTYPES),
    "my_scalar": ("system", (), DTYPES),
}


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray:
    """Numbers of a dtype that are not all alike, small enough to be exact."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind == "u":
        return rng.integers(0, 100, shape).astype(dtype)
    if kind == "i":
        return rng.integers(-100, 100, shape).astype(dtype)
    return rng.normal(scale=4.0, size=shape).astype(dtype)


@st.composite
def ptrs(draw: st.DrawFn, *, min_samples: int = 0, max_samples: int = 8, max_rows: int = 6) -> Ptr:
    """Pointers, with empty samples and now and then one giant."""
    sizes = st.lists(st.integers(0, max_rows), min_size=min_samples, max_size=max_samples)
    counts: list[int] = draw(sizes)
    giant = draw(st.booleans())
    if counts and giant:
        counts[draw(st.integers(0, len(counts) - 1))] = 40
    return counts_to_ptr(np.array(counts, dtype=np.int64))


@st.composite
def blocks(
    draw: st.DrawFn,
    *,
    min_samples: int = 1,
    max_samples: int = 6,
    min_atoms: int = 0,
    max_atoms: int = 6,
    edges: bool = True,
    holes: bool = True,
    fields: Sequence[str] | None = None,
    position_dtypes: Sequence[str] = ("float32", "float64"),
    text: bool = False,
) -> Block:
    """Blocks of random ragged samples.

    Parameters
    ----------
    min_samples, max_samples, min_atoms, max_atoms : int
    edges : bool
        Whether there may be edge fields (a sample may still have none).
    holes : bool
        Whether fields may be absent in some samples.
    fields : sequence of str, optional
        Exactly these optional fields; by default any of them.
    position_dtypes : sequence of str
    text : bool
        Whether a text field ``label`` may be there.
    """
    num = draw(st.integers(min_samples, max_samples))
    atom_counts = draw(st.lists(st.integers(min_atoms, max_atoms), min_size=num, max_size=num))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = list(fields) if fields is not None else draw(st.sets(st.sampled_from([*_OPTIONAL])))
    with_edges = edges and (fields is None or "neighbor_list" in names)
    with_edges = with_edges and draw(st.booleans()) if fields is None else with_edges
    names = [n for n in sorted(names) if with_edges or _level(n) != "edge"]
    edge_counts = [draw(st.integers(0, 8)) if with_edges and count else 0 for count in atom_counts]
    atoms_ptr, edges_ptr = (
        counts_to_ptr(np.array(c, np.int64)) for c in (atom_counts, edge_counts)
    )
    arrays: dict[str, NDArray] = {
        "atomic_numbers": rng.integers(1, 87, atoms_ptr[-1]).astype(
            draw(st.sampled_from(["int32", "int64"]))
        ),
        "positions": random_rows(
            rng, (int(atoms_ptr[-1]), 3), draw(st.sampled_from(list(position_dtypes)))
        ),
    }
    levels: dict[str, Level] = {"atomic_numbers": "atom", "positions": "atom"}
    if with_edges:
        limit = np.repeat(np.array(atom_counts, np.int64), edge_counts)
        pairs = (rng.random((int(edges_ptr[-1]), 2)) * limit[:, None]).astype(
            draw(st.sampled_from(["int32", "int64"]))
        )
        arrays["neighbor_list"], levels["neighbor_list"] = pairs, "edge"
    rows = {"atom": int(atoms_ptr[-1]), "edge": int(edges_ptr[-1]), "system": num}
    for name in names:
        if name == "neighbor_list":
            continue
        level, tail, dtypes = _OPTIONAL[name]
        dtype = draw(st.sampled_from(list(dtypes)))
        arrays[name], levels[name] = random_rows(rng, (rows[level], *tail), dtype), level
    if text and draw(st.booleans()):
        words = draw(st.lists(st.text(max_size=5), min_size=num, max_size=num))
        arrays["label"], levels["label"] = np.array(words, dtype=object), "system"
    block = Block(atoms_ptr, edges_ptr, arrays, levels)
    if holes and num > 1:
        block.present = _holes(draw, block)
        block.fill_missing()
    return block.validate()


def _level(name: str) -> Level:
    return "edge" if name == "neighbor_list" else _OPTIONAL[name][0]


def _holes(draw: st.DrawFn, block: Block) -> dict[str, NDArray]:
    """Presence masks: at least one sample has each field; edges are never without a list."""
    present: dict[str, NDArray] = {}
    num = block.num_samples
    for name in block.names:
        if name in ("atomic_numbers", "positions", "label") or not draw(st.booleans()):
            continue
        mask = np.array(draw(st.lists(st.booleans(), min_size=num, max_size=num)), bool)
        if name == "neighbor_list":
            mask |= np.diff(block.edges_ptr) > 0
        if not mask.any():
            mask[draw(st.integers(0, num - 1))] = True
        if not mask.all():
            present[name] = mask
    return present


@st.composite
def batches(draw: st.DrawFn, **options: Any) -> Batch:
    """Batches on CPU; options as ``blocks``."""
    from alchemi_xr.data.batch import Batch

    return Batch.from_block(draw(blocks(**options)))


@st.composite
def selections(draw: st.DrawFn, length: int, *, allow_empty: bool = False) -> tuple[Any, list[int]]:
    """A way to choose samples and the positions it means.

    Ints with repeats and negatives, slices, masks; as lists, arrays or tuples.
    """
    kind = draw(st.sampled_from(["ints", "mask", "slice"])) if length else "ints"
    if kind == "ints":
        low = 0 if allow_empty or not length else 1
        size = 0 if not length else 2 * length
        numbers = (
            draw(st.lists(st.integers(-length, length - 1), min_size=low, max_size=size))
            if length
            else []
        )
        wanted = [n % length for n in numbers]
        forms: list[Callable[[Any], Any]] = [list, tuple, lambda v: np.array(v, np.int64)]
        return draw(st.sampled_from(forms))(numbers), wanted
    if kind == "mask":
        bools = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        if not any(bools) and not allow_empty:
            bools[draw(st.integers(0, length - 1))] = True
        forms = [list, lambda v: np.array(v, bool)]
        return draw(st.sampled_from(forms))(bools), [i for i, keep in enumerate(bools) if keep]
    start = draw(st.integers(0, length - 1))
    stop = draw(st.integers(start if allow_empty else start + 1, length))
    step = draw(st.sampled_from([1, 2, -1]))
    cut = slice(start, stop, step)
    if step == -1:
        cut = slice(stop - 1, None if start == 0 else start - 1, -1)
        cut = cut if stop > start else slice(0, 0)
    return cut, list(range(length))[cut]


@st.composite
def sample_chunks(draw: st.DrawFn, num_samples: int) -> tuple[int, ...]:
    """Ways to cut samples into chunks, as sizes that add up to their number."""
    sizes, left = [], num_samples
    while left:
        size = draw(st.integers(1, left))
        sizes.append(size)
        left -= size
    return tuple(sizes)

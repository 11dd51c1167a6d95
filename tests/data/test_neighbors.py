"""Pairs, images and distances against ASE's and vesin's searches."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.geometry import complete_cell
from ase.neighborlist import neighbor_list as ase_pairs

from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.data.neighbors import VerletList, neighbor_list, neighbor_matrix
from alchemi_xr.errors import ConfigError, FieldError

PBCS = [[bool(k & 1), bool(k & 2), bool(k & 4)] for k in range(8)]


def block_of(systems: list[Atoms], dtype: type = np.float64) -> Block:
    """A block as a source would give it, dummy cells and all."""
    counts = np.array([len(a) for a in systems])
    return Block(
        counts_to_ptr(counts),
        np.zeros(len(systems) + 1, dtype=np.int64),
        {
            "atomic_numbers": np.concatenate([a.numbers for a in systems]),
            "positions": np.concatenate([a.positions for a in systems]).astype(dtype),
            "cell": np.stack([a.cell.array for a in systems]).astype(dtype),
            "pbc": np.stack([a.pbc for a in systems]),
        },
        {"atomic_numbers": "atom", "positions": "atom", "cell": "system", "pbc": "system"},
    ).validate()


def as_set(pairs: np.ndarray, shifts: np.ndarray) -> list[tuple[int, ...]]:
    rows = np.concatenate([pairs, shifts], axis=1).astype(int).tolist()
    assert len(set(map(tuple, rows))) == len(rows), "a pair stands twice"
    return sorted(map(tuple, rows))


def ase_reference(atoms: Atoms, cutoff: float) -> list[tuple[int, ...]]:
    i, j, shifts = ase_pairs("ijS", atoms, cutoff)
    return as_set(np.stack([i, j], axis=1), shifts)


def rotated(atoms: Atoms, rng: np.random.Generator) -> Atoms:
    """The same system turned as a whole, and its atoms out of their cell."""
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    atoms = atoms.copy()
    atoms.set_cell(atoms.cell.array @ turn)
    atoms.positions = atoms.positions @ turn + rng.uniform(-20, 20, 3)
    images = rng.integers(-3, 4, (len(atoms), 3)) * atoms.pbc
    atoms.positions += images @ atoms.cell.array
    return atoms


def mixed_systems(seed: int) -> list[Atoms]:
    """Eight kinds of periodicity, tiny and skewed cells, molecules with dummy cells."""
    rng = np.random.default_rng(seed)
    systems = []
    for pbc in PBCS:
        n = int(rng.integers(1, 9))
        cell = np.eye(3) * rng.uniform(3.0, 6.0, 3) + rng.uniform(-1.0, 1.0, (3, 3))
        systems.append(Atoms("Ar" * n, cell=cell, pbc=pbc, positions=rng.uniform(-2, 8, (n, 3))))
    dummy = molecule("CH3CH2OH")
    dummy.set_cell(np.eye(3))
    wide = fcc111("Cu", (2, 2, 2))  # a slab whose third vector is zero
    systems += [dummy, molecule("H2O"), bulk("Cu", "fcc", 3.6), wide, Atoms("He")]
    return [rotated(a, rng) for a in systems]


@pytest.mark.parametrize("method", [None, "naive", "cell_list"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("cutoff", [1.3, 5.1])
def test_pairs_and_images_are_those_of_ase(method: str | None, seed: int, cutoff: float) -> None:
    systems = mixed_systems(seed)
    block = block_of(systems)
    edges = neighbor_list(block, cutoff, method=method)
    assert edges.neighbor_list.dtype == np.int64
    assert edges.edges_ptr[-1] == len(edges.neighbor_list)
    for k, atoms in enumerate(systems):
        rows = slice(edges.edges_ptr[k], edges.edges_ptr[k + 1])
        found = as_set(edges.neighbor_list[rows], edges.neighbor_list_shifts[rows])
        # complete_cell: ASE refuses the vectors of length zero that it writes itself.
        full = atoms.copy()
        full.set_cell(complete_cell(atoms.cell.array))
        assert found == ase_reference(full, cutoff), f"system {k}, pbc {atoms.pbc}, seed {seed}"


@pytest.mark.parametrize("seed", [3, 4])
def test_distances_are_those_of_vesin(seed: int) -> None:
    vesin = pytest.importorskip("vesin")
    systems = [
        rotated(bulk("NaCl", "rocksalt", 5.6, cubic=True) * (2, 2, 1), np.random.default_rng(seed)),
        rotated(bulk("Ti"), np.random.default_rng(seed + 10)),
    ]
    block = block_of(systems)
    edges = neighbor_list(block, 4.3)
    for k, atoms in enumerate(systems):
        rows = slice(edges.edges_ptr[k], edges.edges_ptr[k + 1])
        i, j = edges.neighbor_list[rows].T
        vectors = (
            atoms.positions[j]
            - atoms.positions[i]
            + edges.neighbor_list_shifts[rows] @ atoms.cell.array
        )
        wi, wj, ws, wd = vesin.NeighborList(cutoff=4.3, full_list=True).compute(
            points=atoms.positions, box=atoms.cell.array, periodic=True, quantities="ijSd"
        )
        assert as_set(edges.neighbor_list[rows], edges.neighbor_list_shifts[rows]) == as_set(
            np.stack([wi, wj], axis=1), ws
        )
        np.testing.assert_allclose(np.sort(np.linalg.norm(vectors, axis=1)), np.sort(wd), atol=1e-9)


def test_a_large_system_beside_a_molecule() -> None:
    crystal = bulk("Cu", "fcc", 3.61, cubic=True) * (5, 5, 5)
    crystal.rattle(0.05, seed=1)
    systems = [molecule("CH4"), crystal]
    edges = neighbor_list(block_of(systems), 4.0)
    assert np.diff(edges.edges_ptr).tolist() == [len(ase_reference(a, 4.0)) for a in systems]


def test_sparse_and_dense_forms_agree_and_half_is_half() -> None:
    block = block_of(mixed_systems(5))
    edges, matrix = neighbor_list(block, 4.0), neighbor_matrix(block, 4.0)
    assert int(matrix.counts.sum()) == len(edges.neighbor_list)
    assert len(neighbor_list(block, 4.0, half=True).neighbor_list) * 2 == len(edges.neighbor_list)
    slot = np.arange(matrix.neighbors.shape[1])
    unused = matrix.neighbors.numpy()[matrix.counts.numpy()[:, None] <= slot]
    assert (unused == block.num_atoms).all()


def test_order_of_pairs_is_fixed() -> None:
    block = block_of(mixed_systems(6))
    naive, cells = (neighbor_list(block, 4.0, method=m) for m in ("naive", "cell_list"))
    np.testing.assert_array_equal(naive.neighbor_list, cells.neighbor_list)
    np.testing.assert_array_equal(naive.neighbor_list_shifts, cells.neighbor_list_shifts)
    rows = [neighbor_matrix(block, 4.0, method=m, sort=True) for m in ("naive", "cell_list")]
    width = int(rows[0].counts.max())
    assert (rows[0].neighbors[:, :width] == rows[1].neighbors[:, :width]).all()
    assert (rows[0].shifts[:, :width] == rows[1].shifts[:, :width]).all()


def test_capacity_never_cuts_pairs() -> None:
    block = block_of([bulk("Cu", "fcc", 3.6)])
    full, tight = neighbor_matrix(block, 9.0), neighbor_matrix(block, 9.0, max_neighbors=3)
    assert full.counts.tolist() == tight.counts.tolist()
    assert tight.neighbors.shape[1] >= int(full.counts.max()) > 64


@pytest.mark.parametrize("counts", [[0], [0, 2, 0], []])
def test_systems_without_atoms(counts: list[int]) -> None:
    rows = sum(counts)
    block = Block(
        counts_to_ptr(np.array(counts, dtype=np.int64)),
        np.zeros(len(counts) + 1, dtype=np.int64),
        {
            "atomic_numbers": np.ones(rows, dtype=np.int64),
            "positions": np.arange(3.0 * rows).reshape(rows, 3) * 0.1,
        },
        {"atomic_numbers": "atom", "positions": "atom"},
    )
    edges = neighbor_list(block, 2.0)
    assert edges.neighbor_list.tolist() == ([[0, 1], [1, 0]] if rows else [])
    assert len(edges.edges_ptr) == len(counts) + 1


def test_absent_cells_are_not_periodic() -> None:
    """A hole in ``cell`` holds NaN; its system is open, whatever its pbc row says."""
    block = block_of([molecule("H2O"), bulk("Cu", "fcc", 3.6)])
    block.arrays["cell"][0] = np.nan
    block.present["cell"] = np.array([False, True])
    edges = neighbor_list(block, 2.7)
    assert np.diff(edges.edges_ptr).tolist() == [6, 12]


def test_a_system_that_blew_up_leaves_the_others_alone() -> None:
    systems = [molecule("CH4"), bulk("Cu", "fcc", 3.6, cubic=True), molecule("H2O")]
    good = np.diff(neighbor_list(block_of(systems), 3.0).edges_ptr)
    for value in (np.nan, np.inf, 1e30):
        for method in ("naive", "cell_list"):
            block = block_of(systems)
            block.arrays["positions"][6] = value
            counts = np.diff(neighbor_list(block, 3.0, method=method).edges_ptr)
            assert counts[[0, 2]].tolist() == good[[0, 2]].tolist()


def test_flat_periodic_cells_are_refused() -> None:
    flat = Atoms("Cu", cell=np.diag([3.0, 3.0, 0.0]), pbc=[True, True, True])
    with pytest.raises(FieldError, match=r"system 1.*spans no volume"):
        neighbor_list(block_of([molecule("H2O"), flat]), 3.0)
    flat.pbc = [True, True, False]
    assert len(neighbor_list(block_of([flat]), 3.1).neighbor_list) == 4


@pytest.mark.parametrize("cutoff", [0.0, -1.0, np.nan, np.inf, "4"])
def test_cutoff_is_checked(cutoff: object) -> None:
    with pytest.raises(ConfigError, match="cutoff"):
        neighbor_list(block_of([molecule("H2O")]), cutoff)  # type: ignore[arg-type]


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="'quick' is not known"):
        neighbor_list(block_of([molecule("H2O")]), 2.0, method="quick")


class TestVerletList:
    def test_small_moves_reuse_and_large_ones_search(self) -> None:
        block = block_of([bulk("Cu", "fcc", 3.6, cubic=True), molecule("CH4")])
        table = VerletList(3.0, skin=0.4)
        first = table.matrix(block)
        block.arrays["positions"] = block["positions"] + 0.11
        assert table.matrix(block) is first
        assert table.searches == 1
        assert table.covers(block, 3.0)
        assert not table.covers(block, 3.2)
        block.arrays["positions"] = block["positions"] + 0.11
        assert not table.covers(block, 3.0)
        assert table.matrix(block) is not first
        assert table.searches == 2

    def test_without_skin_only_unmoved_atoms_are_covered(self) -> None:
        block = block_of([molecule("CH4")])
        table = VerletList(3.0)
        table.matrix(block)
        assert table.covers(block, 3.0)
        block.arrays["positions"] = block["positions"] + 1e-9
        assert not table.covers(block, 3.0)

    @pytest.mark.parametrize("field", ["cell", "pbc"])
    def test_another_cell_is_another_list(self, field: str) -> None:
        block = block_of([bulk("Cu", "fcc", 3.6)])
        table = VerletList(3.0, skin=0.5)
        table.matrix(block)
        block.arrays[field] = block[field] * 1.01 if field == "cell" else ~block[field]
        assert not table.covers(block, 3.0)

    def test_other_atoms_are_another_list(self) -> None:
        table = VerletList(3.0, skin=0.5)
        table.matrix(block_of([molecule("CH4"), molecule("H2O")]))
        assert not table.covers(block_of([molecule("H2O"), molecule("CH4")]), 3.0)

    def test_nan_positions_are_never_covered(self) -> None:
        block = block_of([molecule("H2O")])
        block.arrays["positions"][0] = np.nan
        table = VerletList(3.0, skin=0.5)
        table.matrix(block)
        assert not table.covers(block, 3.0)

    def test_negative_skin_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="skin"):
            VerletList(3.0, skin=-0.1)

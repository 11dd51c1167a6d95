"""Which atoms see which: neighbour lists of many systems at once.

Every system is searched with its own cell and its own periodic axes, so a
molecule (whatever stands in its cell), a slab and a bulk may share a batch. The
pair search is that of nvalchemi-toolkit-ops, on CPU and CUDA; what is added here
are safe cells for axes that are not periodic, capacities that cannot overflow,
one order of the pairs, and their reuse while atoms move little.

The search compiles its kernels at the first call of a process without a warm
cache (some seconds); later processes find them compiled.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alchemi_xr._typing import NDArray, Ptr
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import ptr_to_index
from alchemi_xr.errors import ConfigError, FieldError

__all__ = [
    "EdgeList",
    "NeighborMatrix",
    "VerletList",
    "complete_cells",
    "neighbor_list",
    "neighbor_matrix",
]

# Below this many atoms a direct search over pairs beats binning (measured on CPU).
_DIRECT_LIMIT = 128
# Atoms farther out than this (Å) are an exploded system; binning them would overflow int32.
_FAR = 1.0e6


@dataclass(frozen=True, slots=True)
class EdgeList:
    """Directed pairs i → j, ordered by i, then j, then image.

    Parameters
    ----------
    neighbor_list : int64 tensor or array, [E, 2]
        Atom numbers, of the batch for a Batch, of the sample for a Block.
    neighbor_list_shifts : int64 tensor or array, [E, 3]
        Lattice images: the vector of a pair is ``x[j] + shifts @ cell - x[i]``.
    edges_ptr : int64 tensor or array, [B + 1]
    cutoff : float
        Å.
    """

    neighbor_list: Any
    neighbor_list_shifts: Any
    edges_ptr: Any
    cutoff: float


@dataclass(frozen=True, slots=True)
class NeighborMatrix:
    """The same pairs in dense form: one row of K slots an atom.

    Parameters
    ----------
    neighbors : int32 tensor, [V, K]
        Atom numbers of the batch; slots from ``counts`` on hold V.
    shifts : int32 tensor, [V, K, 3]
    counts : int32 tensor, [V]
    cutoff : float
        Å.
    half : bool
        Each pair stands once instead of twice.
    """

    neighbors: Tensor
    shifts: Tensor
    counts: Tensor
    cutoff: float
    half: bool = False


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What a neighbour search needs of a Batch, a Block or an AtomicData."""

    positions: Tensor  # [V, 3]
    atoms_ptr: Tensor  # int64 [B + 1]
    system: Tensor  # int64 [V]
    cell: Tensor  # [B, 3, 3], zero where there is none
    pbc: Tensor  # bool [B, 3]


def neighbor_list(
    data: Any,
    cutoff: float,
    *,
    half: bool = False,
    method: str | None = None,
) -> EdgeList:
    """All pairs nearer than a cutoff, in sparse (COO) form.

    Parameters
    ----------
    data : Batch, AtomicData or Block
        Periodic along the axes that its ``pbc`` names; without ``pbc``, not at all.
    cutoff : float
        Å.
    half : bool
        Give each pair once instead of in both directions.
    method : {"naive", "cell_list"}, optional
        Search; by default chosen from the size of the largest system.

    Returns
    -------
    EdgeList
        Tensors for a Batch or AtomicData, arrays with local atom numbers for a Block.

    Raises
    ------
    ConfigError
        The cutoff is no positive number.
    FieldError
        A periodic system has no cell, or a cell without volume.
    """
    geometry = _geometry(data)
    matrix = _search(geometry, _checked_cutoff(cutoff), half=half, method=method)
    edges = _to_edges(matrix, geometry)
    if not isinstance(data, Block):
        return edges
    ptr = edges.edges_ptr.numpy()
    start = np.repeat(np.asarray(data.atoms_ptr[:-1]), np.diff(ptr))
    return EdgeList(
        edges.neighbor_list.numpy() - start[:, None],
        edges.neighbor_list_shifts.numpy(),
        ptr,
        cutoff,
    )


def neighbor_matrix(
    data: Any,
    cutoff: float,
    *,
    half: bool = False,
    method: str | None = None,
    max_neighbors: int | None = None,
    sort: bool | None = None,
) -> NeighborMatrix:
    """All pairs nearer than a cutoff, in dense form.

    Parameters
    ----------
    data : Batch, AtomicData or Block
    cutoff : float
        Å.
    half : bool
        Give each pair once instead of in both directions.
    method : {"naive", "cell_list"}, optional
    max_neighbors : int, optional
        First guess of the capacity K. Too small a guess costs a second search,
        never a pair.
    sort : bool, optional
        Put each row in the order of atom and image, so that sums over it do not
        depend on how it was found. By default on CUDA, where the order of the
        search itself is not reproducible.
    """
    geometry = _geometry(data)
    return _search(
        geometry,
        _checked_cutoff(cutoff),
        half=half,
        method=method,
        max_neighbors=max_neighbors,
        sort=sort,
    )


class VerletList:
    """A neighbour matrix that is searched again only when it has to be.

    Pairs are listed out to ``cutoff + skin``. They stay complete within
    ``cutoff`` until some atom has moved more than half the skin, so the list is
    reused until then, or until the cell, the periodic axes or the atoms change.
    The check is about geometry alone: whatever batch comes, a list is never
    stale. With ``skin=0`` only unmoved atoms find theirs again.

    Parameters
    ----------
    cutoff, skin : float
        Å.
    half : bool
        Each pair once.
    method : {"naive", "cell_list"}, optional
    max_neighbors : int, optional
        First guess of the capacity.

    Attributes
    ----------
    searches : int
        How often the list was searched.
    """

    def __init__(
        self,
        cutoff: float,
        *,
        skin: float = 0.0,
        half: bool = False,
        method: str | None = None,
        max_neighbors: int | None = None,
    ) -> None:
        self.cutoff = _checked_cutoff(cutoff)
        if not (skin >= 0.0 and math.isfinite(skin)):
            raise ConfigError("VerletList", "skin is no length", found=skin, expected=">= 0 Å")
        self.skin = float(skin)
        self.half = half
        self.method = method
        self.searches = 0
        self._capacity = max_neighbors
        self._matrix: NeighborMatrix | None = None
        self._edges: EdgeList | None = None
        self._reference: _Geometry | None = None

    def covers(self, data: Any, cutoff: float) -> bool:
        """Whether the list at hand holds every pair of ``data`` within ``cutoff``."""
        return cutoff <= self.cutoff and self._is_valid(_geometry(data))

    def matrix(self, data: Any) -> NeighborMatrix:
        """The pairs of a batch, complete within ``cutoff``, in dense form."""
        geometry = _geometry(data)
        if not self._is_valid(geometry):
            self._matrix = _search(
                geometry,
                self.cutoff + self.skin,
                half=self.half,
                method=self.method,
                max_neighbors=self._capacity,
                # With a skin the moment of the search must not show in a sum.
                sort=True if self.skin > 0.0 else None,
            )
            self._capacity = max(1, int(self._matrix.neighbors.shape[1]))
            self._edges = None
            self._reference = _Geometry(
                geometry.positions.clone(),
                geometry.atoms_ptr.clone(),
                geometry.system,
                geometry.cell.clone(),
                geometry.pbc.clone(),
            )
            self.searches += 1
        assert self._matrix is not None
        return self._matrix

    def at_hand(self, data: Any, cutoff: float) -> NeighborMatrix | None:
        """The list as it is, where it `covers` the data; never searches."""
        return self._matrix if self.covers(data, cutoff) else None

    def edges(self, data: Any) -> EdgeList:
        """The same pairs in sparse form."""
        matrix = self.matrix(data)
        if self._edges is None:
            assert self._reference is not None
            self._edges = _to_edges(matrix, self._reference)
        return self._edges

    def clear(self) -> None:
        """Forget the list."""
        self._matrix = self._edges = self._reference = None

    def __getstate__(self) -> dict[str, Any]:
        # A list belongs to one process's batch; a copy elsewhere searches anew.
        return {**self.__dict__, "_matrix": None, "_edges": None, "_reference": None}

    def _is_valid(self, now: _Geometry) -> bool:
        then = self._reference
        if (
            then is None
            or then.positions.shape != now.positions.shape
            or then.positions.dtype != now.positions.dtype
            or then.positions.device != now.positions.device
            or then.atoms_ptr.shape != now.atoms_ptr.shape
        ):
            return False
        moved = (now.positions - then.positions).square().sum(dim=-1)
        same = [
            # NaN compares False: an atom that is nowhere asks for a new search.
            (moved <= (0.5 * self.skin) ** 2).all(),
            (then.atoms_ptr == now.atoms_ptr).all(),
            (then.pbc == now.pbc).all(),
            (then.cell == now.cell).all(),
        ]
        # One wait for the device, as this is asked in every step.
        return bool(torch.stack(same).all())


def _checked_cutoff(cutoff: float) -> float:
    if not (isinstance(cutoff, numbers.Real) and math.isfinite(cutoff) and cutoff > 0.0):
        raise ConfigError(
            "neighbor_list", "the cutoff is no length", found=cutoff, expected="a number > 0, in Å"
        )
    return float(cutoff)


def _geometry(data: Any) -> _Geometry:
    if isinstance(data, Block):
        return _block_geometry(data)
    positions = data.positions.detach()
    if positions.dtype not in (torch.float32, torch.float64):
        positions = positions.float()
    ptr = getattr(data, "atoms_ptr", None)
    if ptr is None:  # one sample
        ptr = torch.tensor([0, len(positions)], device=positions.device)
        system = torch.zeros(len(positions), dtype=torch.int64, device=positions.device)
    else:
        ptr = ptr.to(torch.int64)
        system = data.atom_system.to(torch.int64)
    cell, pbc = (_optional(data, name) for name in ("cell", "pbc"))
    present = getattr(data, "present", {})
    return _with_cells(positions, ptr, system, cell, pbc, present.get("cell"), present.get("pbc"))


def _optional(data: Any, name: str) -> Tensor | None:
    if name not in data or data[name] is None:
        return None
    value: Tensor = data[name].detach()
    return value


def _block_geometry(block: Block) -> _Geometry:
    def tensor(values: NDArray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(np.ascontiguousarray(values))

    positions = np.asarray(block["positions"])
    if positions.dtype not in (np.float32, np.float64):
        positions = positions.astype(np.float32)
    ptr: Ptr = np.asarray(block.atoms_ptr, dtype=np.int64)
    flat = torch.from_numpy(np.ascontiguousarray(positions))
    return _with_cells(
        flat,
        torch.from_numpy(ptr),
        torch.from_numpy(ptr_to_index(ptr)),
        tensor(block.arrays.get("cell")),
        tensor(block.arrays.get("pbc")),
        tensor(block.present.get("cell")),
        tensor(block.present.get("pbc")),
    )


def _with_cells(
    positions: Tensor,
    ptr: Tensor,
    system: Tensor,
    cell: Tensor | None,
    pbc: Tensor | None,
    has_cell: Tensor | None,
    has_pbc: Tensor | None,
) -> _Geometry:
    systems = len(ptr) - 1
    if pbc is None:
        periodic = torch.zeros((systems, 3), dtype=torch.bool, device=positions.device)
    else:
        periodic = pbc.to(torch.bool).reshape(systems, 3)
        if has_pbc is not None:
            periodic = periodic & has_pbc[:, None]
    if cell is None:
        box = torch.zeros((systems, 3, 3), dtype=positions.dtype, device=positions.device)
    else:
        box = cell.to(positions.dtype).reshape(systems, 3, 3)
        if has_cell is not None:
            box = torch.where(has_cell[:, None, None], box, torch.zeros_like(box))
    return _Geometry(positions, ptr, system, box, periodic)


def complete_cells(cell: Tensor, pbc: Tensor, length: Tensor | None = None) -> Tensor:
    """Cells whose periodic vectors are the given ones and whose others are harmless.

    A vector along an axis that is not periodic may be anything (zero, NaN, a
    1 Å dummy): it is replaced by one at right angles to the periodic vectors.

    Parameters
    ----------
    cell : float tensor, [B, 3, 3], Å
    pbc : bool tensor, [B, 3]
    length : float tensor, [B], optional
        Å of the vectors put in; by default 1.

    Raises
    ------
    FieldError
        The periodic vectors of a system span no length, area or volume.
    """
    count = pbc.sum(dim=1)
    eye = torch.eye(3, dtype=cell.dtype, device=cell.device)
    # Periodic vectors first, the rest after them; undone at the end.
    order = torch.argsort((~pbc).to(torch.int8), dim=1, stable=True)
    rows = torch.gather(cell, 1, order[:, :, None].expand(-1, -1, 3))
    first = torch.where((count >= 1)[:, None], rows[:, 0], eye[0])
    # The Cartesian axis farthest from the first vector gives a stable second one.
    axis = eye[first.abs().argmin(dim=1)]
    second = torch.where((count >= 2)[:, None], rows[:, 1], _unit(torch.cross(first, axis, dim=1)))
    third = torch.where((count >= 3)[:, None], rows[:, 2], _unit(torch.cross(first, second, dim=1)))
    full = torch.stack([first, second, third], dim=1)
    scale = torch.linalg.vector_norm(full, dim=2).prod(dim=1)
    volume = torch.linalg.det(full).abs()
    bad = ~(volume > 1e-9 * scale.clamp(min=1e-30)) & (count > 0)
    if bool(bad.any()):
        system = int(torch.nonzero(bad)[0])
        raise FieldError(
            f"system {system}",
            "is periodic but its cell spans no volume along its periodic axes",
            found=cell[system].tolist(),
            expected=f"independent lattice vectors for pbc={pbc[system].tolist()}",
            mend="correct cell, or set pbc to False along axes that do not repeat",
        )
    if length is not None:
        open_axis = torch.arange(3, device=count.device)[None, :] >= count[:, None]
        full = torch.where(open_axis[:, :, None], full * length[:, None, None], full)
    return torch.zeros_like(full).scatter_(1, order[:, :, None].expand(-1, -1, 3), full)


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)


def _search(
    geometry: _Geometry,
    cutoff: float,
    *,
    half: bool = False,
    method: str | None = None,
    max_neighbors: int | None = None,
    sort: bool | None = None,
) -> NeighborMatrix:
    positions = geometry.positions
    atoms, systems = len(positions), len(geometry.atoms_ptr) - 1
    device = positions.device
    if atoms == 0:
        empty = torch.zeros((0, 0), dtype=torch.int32, device=device)
        return NeighborMatrix(empty, empty.new_zeros((0, 0, 3)), empty.new_zeros(0), cutoff, half)
    # A system that blew up must not take the others with it: its atoms get some
    # finite place here, and its energy is NaN or infinite from its true positions.
    placed = torch.nan_to_num(positions, nan=0.0, posinf=_FAR, neginf=-_FAR).clamp(-_FAR, _FAR)
    index = geometry.system[:, None].expand(-1, 3)
    corner = placed.new_full((systems, 3), torch.inf).scatter_reduce(0, index, placed, "amin")
    far = placed.new_full((systems, 3), -torch.inf).scatter_reduce(0, index, placed, "amax")
    # Moving a system as a whole changes neither pairs nor images.
    placed = (placed - corner[geometry.system]).contiguous()
    # Systems without atoms have an infinite corner and take part in nothing.
    extent = (far - corner).amax(dim=1).clamp(min=0.0) + cutoff
    extent = torch.nan_to_num(extent, nan=cutoff, posinf=cutoff)
    if bool(geometry.pbc.any()):
        cell = complete_cells(geometry.cell, geometry.pbc, extent)
    else:  # molecules only: any box that holds them
        cell = torch.eye(3, dtype=positions.dtype, device=device) * extent[:, None, None]
    largest = int(torch.diff(geometry.atoms_ptr).max())
    capacity = max_neighbors or min(64, max(largest, 16))
    ptr, system = geometry.atoms_ptr.to(torch.int32), geometry.system.to(torch.int32)
    while True:
        neighbors, counts, shifts = _run_search(
            placed, cutoff, cell, geometry.pbc, system, ptr, half, capacity, method, largest
        )
        widest = int(counts.max())
        if widest <= capacity:
            break
        capacity = -(-widest // 16) * 16  # the counts are true even where slots were too few
    used = torch.arange(neighbors.shape[1], device=device)[None] < counts[:, None]
    shifts.masked_fill_(~used[:, :, None], 0)  # the search leaves what was in memory
    if sort or (sort is None and device.type == "cuda"):
        neighbors, shifts = _sorted_rows(neighbors, shifts, counts)
    return NeighborMatrix(neighbors, shifts, counts, cutoff, half)


def _run_search(
    positions: Tensor,
    cutoff: float,
    cell: Tensor,
    pbc: Tensor,
    system: Tensor,
    ptr: Tensor,
    half: bool,
    capacity: int,
    method: str | None,
    largest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from alchemi_xr.data.kernels._warp import on_stream_of, start_warp

    start_warp()  # before the library does it
    from nvalchemiops.torch.neighbors import neighbor_list as search

    name = method or ("naive" if largest <= _DIRECT_LIMIT else "cell_list")
    if name not in ("naive", "cell_list"):
        raise ConfigError(
            "neighbor_list", f"method {name!r} is not known", expected="'naive' or 'cell_list'"
        )
    with on_stream_of(positions.device):
        neighbors, counts, shifts = search(
            positions,
            cutoff,
            cell=cell.contiguous(),
            pbc=pbc.contiguous(),
            batch_idx=system,
            batch_ptr=ptr,
            half_fill=half,
            method=f"batch_{name}",
            max_neighbors=capacity,
        )
    return neighbors, counts, shifts


def _sorted_rows(neighbors: Tensor, shifts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in the order of atom and image; unused slots stay last."""
    if neighbors.numel() == 0:
        return neighbors, shifts
    used = torch.arange(neighbors.shape[1], device=counts.device)[None] < counts[:, None]
    image, span = _image_key(shifts)
    key = torch.where(used, neighbors.long() * span + image, torch.iinfo(torch.int64).max)
    order = torch.argsort(key, dim=1)
    return (
        torch.gather(neighbors, 1, order),
        torch.gather(shifts, 1, order[:, :, None].expand(-1, -1, 3)),
    )


def _image_key(shifts: Tensor) -> tuple[Tensor, int]:
    """One whole number per image that orders them, and one above the largest."""
    flat = shifts.reshape(-1, 3).long()
    low, high = flat.amin(dim=0), flat.amax(dim=0)
    width = (high - low + 1).tolist()
    local = shifts.long() - low
    key = (local[..., 0] * width[1] + local[..., 1]) * width[2] + local[..., 2]
    return key, math.prod(width)


def _to_edges(matrix: NeighborMatrix, geometry: _Geometry) -> EdgeList:
    counts = matrix.counts.long()
    width = matrix.neighbors.shape[1]
    used = torch.arange(width, device=counts.device)[None] < counts[:, None]
    source = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    target, shifts = matrix.neighbors[used].long(), matrix.shifts[used].long()
    if len(source):
        image, span = _image_key(shifts)
        # Two stable passes: one key of atom, atom and image could pass 63 bits.
        order = torch.argsort(target * span + image, stable=True)
        order = order[torch.argsort(source[order], stable=True)]
        target, shifts = target[order], shifts[order]
    row_end = torch.zeros(len(counts) + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=row_end[1:])
    return EdgeList(
        torch.stack([source, target], dim=1), shifts, row_end[geometry.atoms_ptr], matrix.cutoff
    )

"""Batches for models that want ``edge_index`` [2, E]: as a dict, or as PyTorch Geometric's own.

Nothing is copied: ``edge_index`` is the neighbour list seen from the other side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alchemi_xr._optional import import_optional

if TYPE_CHECKING:
    from alchemi_xr.data.batch import Batch

__all__ = ["to_edge_index_dict", "to_pyg"]

#: Our names, and those that PyTorch Geometric's models read.
_NAMES = {"positions": "pos", "atomic_numbers": "z", "neighbor_list": "edge_index"}


def to_edge_index_dict(batch: Batch) -> dict[str, Tensor]:
    """Every field of a batch by its name, with ``edge_index``, ``batch`` and ``ptr``.

    Parameters
    ----------
    batch : Batch

    Returns
    -------
    dict of Tensor
        ``edge_index`` [2, E] int64 stands for ``neighbor_list`` (row 0 is its first
        column) where there is one; ``batch`` [V] and ``ptr`` [B + 1] are int64.

    Examples
    --------
    >>> import torch
    >>> from alchemi_xr.data import AtomicData, Batch
    >>> batch = Batch.from_data_list(
    ...     [AtomicData(positions=torch.zeros(2, 3), atomic_numbers=torch.ones(2).long())]
    ... )
    >>> to_edge_index_dict(batch)["batch"].tolist()
    [0, 0]
    """
    found = {
        name: value
        for name, value in batch
        if isinstance(value, Tensor) and name not in ("batch", "ptr", "neighbor_list")
    }
    if "neighbor_list" in batch:
        found["edge_index"] = batch["neighbor_list"].to(torch.int64).t()
    found["batch"] = batch.batch_idx.to(torch.int64)
    found["ptr"] = batch.atoms_ptr
    return found


def to_pyg(batch: Batch) -> Any:
    """The batch as a ``torch_geometric.data.Batch``.

    Parameters
    ----------
    batch : Batch

    Returns
    -------
    torch_geometric.data.Batch
        With ``pos``, ``z``, ``edge_index`` [2, E], ``batch`` and ``ptr``; all other
        fields keep their names. ``to_data_list`` and ``[i]`` work on it.

    Raises
    ------
    OptionalDependencyError
        PyTorch Geometric is not installed.
    """
    data = import_optional("torch_geometric.data", extra="pyg", why="to_pyg")
    count = batch.num_graphs
    out = data.Batch(_base_cls=data.Data)
    zeros = torch.zeros(count, dtype=torch.int64)
    ptrs = {
        "atom": batch.atoms_ptr.cpu(),
        "edge": batch.edges_ptr.cpu(),
        "system": torch.arange(count + 1),
    }
    slices: dict[str, Tensor] = {}
    shifts: dict[str, Tensor] = {}
    for name, value in to_edge_index_dict(batch).items():
        theirs = _NAMES.get(name, name)
        out[theirs] = value
        if name not in ("batch", "ptr"):
            ours = "neighbor_list" if name == "edge_index" else name
            slices[theirs] = ptrs[str(batch.level_of(ours))]
            shifts[theirs] = zeros if name != "edge_index" else ptrs["atom"][:-1]
    # What its own collate leaves behind, so that a batch can be taken apart again.
    out._num_graphs, out._slice_dict, out._inc_dict = count, slices, shifts
    return out

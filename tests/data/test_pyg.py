"""Batches as dicts with edge_index, and as PyTorch Geometric's."""

from __future__ import annotations

import pytest
import torch

from alchemi_xr.data import AtomicData, Batch
from alchemi_xr.data.pyg import to_edge_index_dict, to_pyg
from alchemi_xr.errors import OptionalDependencyError


@pytest.fixture
def batch() -> Batch:
    samples = [
        AtomicData(
            positions=torch.arange(3.0 * n).reshape(n, 3),
            atomic_numbers=torch.arange(1, n + 1),
            energy=torch.tensor([[float(n)]]),
            neighbor_list=torch.tensor([[0, n - 1], [n - 1, 0], [0, 0]][:n]),
        )
        for n in (2, 1, 3)
    ]
    return Batch.from_data_list(samples)


def test_edge_index_is_the_list_from_the_other_side(batch: Batch) -> None:
    found = to_edge_index_dict(batch)
    assert found["edge_index"].tolist() == batch["neighbor_list"].t().tolist()
    assert "neighbor_list" not in found
    assert found["batch"].tolist() == [0, 0, 1, 2, 2, 2]
    assert found["ptr"].tolist() == [0, 2, 3, 6]
    assert found["positions"].data_ptr() == batch["positions"].data_ptr()


def test_without_edges_there_is_no_edge_index() -> None:
    alone = AtomicData(positions=torch.zeros(2, 3), atomic_numbers=torch.ones(2).long())
    assert "edge_index" not in to_edge_index_dict(Batch.from_data_list([alone]))


def test_pyg_takes_the_batch_apart_as_we_do(batch: Batch) -> None:
    pytest.importorskip("torch_geometric")
    theirs = batch.to_pyg()
    assert theirs.num_graphs == 3
    assert theirs.num_nodes == 6
    for ours, graph in zip(batch.to_data_list(), theirs.to_data_list(), strict=True):
        assert torch.equal(graph.pos, ours.positions)
        assert torch.equal(graph.z, ours.atomic_numbers)
        assert torch.equal(graph.edge_index, ours.neighbor_list.t())
        assert torch.equal(graph.energy, ours.energy)
    again = type(theirs).from_data_list(theirs.to_data_list())
    assert torch.equal(again.edge_index, theirs.edge_index)
    assert torch.equal(again.batch, theirs.batch)
    assert torch.equal(again.ptr, theirs.ptr)


def test_without_pyg_the_error_names_the_extra(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch_geometric.data", None)
    with pytest.raises(OptionalDependencyError, match="pyg"):
        to_pyg(batch)

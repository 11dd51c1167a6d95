"""Which samples are drawn, and what is refused."""

from __future__ import annotations

import pytest

from alchemi_xr.dynamics import SizeAwareSampler


def sampler_of(kit, sizes, **options):
    dataset = kit.ListDataset([kit.atoms(n, i) for i, n in enumerate(sizes)])
    return SizeAwareSampler(dataset, **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "neither max_atoms nor max_batch_size"),
        ({"max_edges": 5}, ValueError, "neither"),
        ({"max_atoms": 0}, ValueError, "max_atoms"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size"),
        ({"max_batch_size": 2, "bin_width": 0}, ValueError, "bin_width"),
        ({"max_batch_size": 2, "max_gpu_memory_fraction": 0.0}, ValueError, "fraction"),
        ({"max_batch_size": 2, "max_gpu_memory_fraction": 1.5}, ValueError, "fraction"),
        ({"max_atoms": 5}, RuntimeError, "Sample 1 has 9 atoms, exceeding max_atoms=5"),
    ],
)
def test_refused(kit, options, error, match):
    with pytest.raises(error, match=match):
        sampler_of(kit, [3, 9, 2], **options)


def test_dataset_without_sizes():
    with pytest.raises(TypeError, match="get_metadata"):
        SizeAwareSampler([1, 2], max_batch_size=1)


def test_first_batch_goes_round_the_bins(kit):
    sampler = sampler_of(kit, [3, 2, 3, 2, 5], max_batch_size=4)
    batch = sampler.build_initial_batch()
    assert batch["dataset_index"].reshape(-1).tolist() == [1, 0, 4, 3]
    assert batch["system_id"].reshape(-1).tolist() == [0, 1, 2, 3]
    assert batch["status"].reshape(-1).tolist() == [0] * 4
    assert batch.num_nodes_list == [2, 3, 5, 2]
    assert list(sampler) == [2]
    assert len(sampler) == 1
    assert not sampler.exhausted
    assert sampler.replacement_batch(atom_budget=2) is None
    assert sampler.replacement_batch(atom_budget=3)["system_id"].item() == 4
    assert sampler.exhausted
    with pytest.raises(RuntimeError, match="no samples available"):
        sampler.build_initial_batch()


def test_limits_hold_together(kit):
    sampler = sampler_of(kit, [4, 4, 4, 4], max_atoms=9, max_batch_size=3)
    assert sampler.build_initial_batch().num_graphs == 2


def test_edges_are_limited_too(kit):
    import torch

    samples = []
    for edges in (6, 2, 2):
        data = kit.atoms(4, edges)
        data.neighbor_list = torch.zeros(edges, 2, dtype=torch.int64)
        samples.append(data)
    sampler = SizeAwareSampler(kit.ListDataset(samples), max_edges=7, max_batch_size=9)
    assert sampler.has_edges
    assert sampler.build_initial_batch()["dataset_index"].reshape(-1).tolist() == [0]
    assert sampler.replacement_batch(edge_budget=3)["dataset_index"].reshape(-1).tolist() == [1]
    with pytest.raises(RuntimeError, match="Sample 0 has 6 edges, exceeding max_edges=5"):
        SizeAwareSampler(kit.ListDataset(samples), max_edges=5, max_batch_size=9)


def test_request_replacement_same_bin_then_smaller(kit):
    sampler = sampler_of(kit, [2, 4, 5, 9], max_batch_size=4, bin_width=2)
    found = sampler.request_replacement(num_atoms=5, num_edges=0)
    assert found.num_nodes == 4  # the bin of 4 and 5, in its order
    assert sampler.request_replacement(5, 0).num_nodes == 5
    assert sampler.request_replacement(5, 0).num_nodes == 2
    assert sampler.request_replacement(5, 0) is None
    assert sampler.request_replacements([9, 1], [0, 0])[0].num_nodes == 9


def test_request_replacements_budget(kit):
    sampler = sampler_of(kit, [2, 4, 5, 9], max_batch_size=4)
    assert [d.num_nodes for d in sampler.request_replacements_budget(11, None, 2)] == [9, 2]
    assert [d.num_nodes for d in sampler.request_replacements_budget()] == [5, 4]
    assert sampler.request_replacements_budget(100) == []


def test_shuffle_has_a_seed_of_its_own(kit):
    import random

    sizes = [3] * 40

    def order(seed):
        return list(sampler_of(kit, sizes, max_batch_size=5, shuffle=True, seed=seed))

    random.seed(0)
    first = order(1)
    random.seed(99)
    assert order(1) == first
    assert order(2) != first
    assert sorted(first) == list(range(40))


def test_state_goes_on(kit):
    sizes = [2, 3, 4, 3, 2, 4]
    sampler = sampler_of(kit, sizes, max_batch_size=2)
    sampler.build_initial_batch()
    other = sampler_of(kit, sizes, max_batch_size=2)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(sampler)
    a, b = sampler.replacement_batch(), other.replacement_batch()
    assert a["dataset_index"].tolist() == b["dataset_index"].tolist()
    assert a["system_id"].tolist() == b["system_id"].tolist()
    with pytest.raises(ValueError, match="does not have"):
        sampler_of(kit, [2], max_batch_size=2).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="seed"):
        sampler_of(kit, sizes, max_batch_size=2, seed=4).load_state_dict(sampler.state_dict())


def test_batches_are_read_at_once_where_the_dataset_can(kit):
    from alchemi_xr.data import Batch

    reads: list = []

    class Columns(kit.ListDataset):
        def __getitem__(self, index):
            raise AssertionError("sample by sample")

        def get_batch(self, indices):
            reads.append(list(indices))
            return Batch.from_data_list([self.samples[i] for i in indices])

    dataset = Columns([kit.atoms(2 + i % 2, i) for i in range(6)])
    sampler = SizeAwareSampler(dataset, max_batch_size=3)
    sampler.build_initial_batch()
    sampler.replacement_batch()
    assert [len(indices) for indices in reads] == [3, 3]


def test_large_bins_skip_what_is_drawn(kit):
    sampler = sampler_of(kit, [1] * 3000, max_batch_size=2999)
    assert sampler.build_initial_batch().num_graphs == 2999
    assert list(sampler) == [2999]
    assert sampler.replacement_batch()["dataset_index"].item() == 2999


def test_sizes_come_from_pointers_and_equal_the_slow_loop(kit, tmp_path):
    from alchemi_xr.data import AtomicDataZarrReader, AtomicDataZarrWriter, Batch, Dataset
    from alchemi_xr.data.datapipes import InMemoryDataset
    from alchemi_xr.dynamics import sampler as module

    samples = [kit.atoms(1 + i % 4, i) for i in range(9)]
    writer = AtomicDataZarrWriter(tmp_path / "x.zarr")
    writer.write(samples)
    writer.delete([0, 4])
    stored = Dataset(AtomicDataZarrReader(tmp_path / "x.zarr"), device="cpu")
    for dataset in (stored, InMemoryDataset(Batch.from_data_list(samples))):
        atoms, edges = module._known_sizes(dataset)
        slow = [dataset.get_metadata(i) for i in range(len(dataset))]
        assert list(zip(atoms.tolist(), edges.tolist(), strict=True)) == slow
    assert module._known_sizes(kit.ListDataset(samples)) is None
    stored.close()

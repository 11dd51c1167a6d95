from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alchemi_xr.data import Batch
from alchemi_xr.data.datapipes import (
    DataLoader,
    DistributedSamplerProtocol,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
)


def multi(*lengths: int) -> MultiDataset:
    parts = []
    for number, count in enumerate(lengths):
        samples = [
            {
                "positions": torch.zeros(1, 3),
                "atomic_numbers": torch.ones(1, dtype=torch.long),
                "energy": torch.tensor([[100.0 * number + i]]),
            }
            for i in range(count)
        ]
        parts.append(InMemoryDataset(Batch.from_raw_dicts(samples)))
    return MultiDataset(*parts)


def owners(dataset: MultiDataset, indices: Any) -> Counter[int]:
    return Counter(dataset.to_local_index(i)[0] for i in indices)


def test_every_sample_once_without_replacement() -> None:
    dataset = multi(5, 1, 7)
    sampler = MultiDatasetSampler(dataset, replacement=False)
    assert isinstance(sampler, DistributedSamplerProtocol)
    assert len(sampler) == 13
    first = list(sampler)
    assert sorted(first) == list(range(13))
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    plain = MultiDatasetSampler(dataset, replacement=False, shuffle=False)
    assert list(plain) == list(range(13))


def test_weights_decide_the_share() -> None:
    dataset = multi(10, 1000)
    drawn = MultiDatasetSampler(dataset, weights=[3, 1], num_samples=4000, seed=1)
    share = owners(dataset, drawn)[0] / 4000
    assert abs(share - 0.75) < 0.05
    exact = MultiDatasetSampler(dataset, weights=[3, 1], num_samples=400, shuffle=False)
    assert owners(dataset, exact) == {0: 300, 1: 100}
    never = MultiDatasetSampler(dataset, weights=[0, 1], num_samples=50)
    assert owners(dataset, never) == {1: 50}


@given(world=st.integers(1, 7), total=st.integers(1, 40), drop_last=st.booleans())
def test_ranks_share_one_order(world: int, total: int, drop_last: bool) -> None:
    dataset = multi(9, 31)
    options: dict[str, Any] = {"num_samples": total, "replacement": True, "seed": 3}
    whole = list(MultiDatasetSampler(dataset, **options))
    ranks = [
        MultiDatasetSampler(dataset, num_replicas=world, rank=r, drop_last=drop_last, **options)
        for r in range(world)
    ]
    drawn = [list(rank) for rank in ranks]
    assert [len(d) for d in drawn] == [len(rank) for rank in ranks]
    assert len({len(d) for d in drawn}) == 1
    merged = [d[k] for k in range(len(drawn[0])) for d in drawn]
    if drop_last:
        assert merged == whole[: total - total % world]
    else:
        assert merged == (whole * world)[: len(merged)]
        assert set(merged) == set(whole)


def test_batches_have_a_fixed_number_of_each() -> None:
    dataset = multi(10, 30)
    sampler = MultiDatasetBatchSampler(dataset, batch_size=8, samples_per_dataset=[2, 6])
    assert len(sampler) == 5
    for batch in sampler:
        assert owners(dataset, batch) == {0: 2, 1: 6}
    once = MultiDatasetBatchSampler(
        dataset, batch_size=8, samples_per_dataset=[2, 6], replacement=False
    )
    drawn = [i for batch in once for i in batch]
    assert len(drawn) == len(set(drawn)) == 40
    balanced = MultiDatasetBatchSampler.balanced(dataset, batch_size=4, num_batches=3)
    assert [owners(dataset, b) for b in balanced] == [{0: 2, 1: 2}] * 3
    rates = MultiDatasetBatchSampler(dataset, batch_size=4, samples_per_dataset=[0.5, 0.5])
    assert rates.samples_per_dataset == [2, 2]


def test_epoch_policies() -> None:
    dataset = multi(10, 30)

    def length(policy: str, **options: Any) -> int:
        return len(
            MultiDatasetBatchSampler(
                dataset,
                batch_size=5,
                samples_per_dataset=[1, 4],
                epoch_policy=policy,  # type: ignore[arg-type]
                **options,
            )
        )

    assert length("dataset_size") == 8
    assert length("min_size") == 8
    assert length("max_size") == 10
    assert length("dataset_size", replacement=False) == 7
    with pytest.raises(ValueError, match="max_size"):
        length("max_size", replacement=False)
    with pytest.raises(ValueError, match="epoch_policy"):
        length("all")


def test_generators_and_managers() -> None:
    dataset = multi(10, 30)

    def drawn(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return list(MultiDatasetSampler(dataset, generator=generator))

    assert drawn(1) == drawn(1) != drawn(2)
    manager = SimpleNamespace(world_size=2, rank=1)
    whole = list(MultiDatasetSampler(dataset))
    assert list(MultiDatasetSampler(dataset, distributed_manager=manager)) == whole[1::2]


@pytest.mark.parametrize(
    "options",
    [
        {"weights": [1]},
        {"weights": [0, 0, 0]},
        {"weights": [1, -1, 1]},
        {"weights": [1, float("nan"), 1]},
        {"weights": [1, 1, 1]},  # the third dataset is empty
        {"num_samples": 0},
        {"num_samples": 100, "replacement": False},
        {"num_replicas": 2, "rank": 2},
    ],
)
def test_wrong_sampler_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        MultiDatasetSampler(multi(5, 5, 0), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 4, "weights": [1, 1], "samples_per_dataset": [2, 2]},
        {"batch_size": 4, "samples_per_dataset": [2, 1]},
        {"batch_size": 4, "samples_per_dataset": [5, -1]},
        {"batch_size": 4, "samples_per_dataset": [4]},
        {"batch_size": 4, "num_batches": 0},
        {"batch_size": 4, "num_batches": 11, "replacement": False},
    ],
)
def test_wrong_batch_sampler_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        MultiDatasetBatchSampler(multi(10, 30), **options)


def test_the_loader_resumes_a_batch_sampler() -> None:
    dataset = multi(10, 30)

    def make() -> DataLoader:
        sampler = MultiDatasetBatchSampler(dataset, batch_size=8, seed=4)
        return DataLoader(dataset, batch_sampler=sampler)

    def ids(batch: Batch) -> list[int]:
        return [int(e) for e in batch["energy"].flatten()]

    loader = make()
    whole = [[ids(b) for b in loader] for _ in range(2)]
    assert whole[0] != whole[1]
    loader = make()
    iterator = iter(loader)
    seen = [ids(next(iterator)) for _ in range(2)]
    other = make()
    other.load_state_dict(loader.state_dict())
    assert seen + [ids(b) for b in other] == whole[0]
    assert [ids(b) for b in other] == whole[1]

"""What loaders say about themselves, and which shares of the ranks are right."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import unishard
from unishard.data.loader_checks import _samples_in, _wrong_shares
from unishard.data.loader_facts import LoaderFacts, Share, facts_of

DATA = TensorDataset(torch.arange(24).reshape(12, 2))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Own:
    batch_size = 64
    """Of whatever its author means."""

    def __iter__(self):
        return iter(())


def sampler(parts=2, number=1, **options):
    return DistributedSampler(DATA, num_replicas=parts, rank=number, **options)


@pytest.mark.parametrize(
    ("loader", "facts"),
    [
        (DataLoader(DATA, batch_size=3), {"batch_size": 3, "whole": "SequentialSampler"}),
        (DataLoader(DATA, shuffle=True), {"batch_size": 1, "whole": "RandomSampler"}),
        (DataLoader(DATA, batch_size=None), {"hides_batches": True, "whole": "SequentialSampler"}),
        (DataLoader(DATA, sampler=[0, 1], batch_size=2), {"batch_size": 2}),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), {}),
        (DataLoader(Stream(), batch_size=4), {"batch_size": 4}),
        (DataLoader(Stream(), batch_size=None), {"hides_batches": True}),
        (
            DataLoader(DATA, sampler=sampler(shuffle=False)),
            {"batch_size": 1, "shares": (Share("DistributedSampler", 1, 2),)},
        ),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(sampler(shuffle=False), 4, drop_last=True)),
            {"batch_size": 4, "shares": (Share("DistributedSampler", 1, 2),)},
        ),
        (
            DataLoader(DATA, sampler=sampler(1, 0, shuffle=False)),
            {"batch_size": 1, "whole": "DistributedSampler(num_replicas=1)"},
        ),
        (
            unishard.dataloader(DATA, unishard.Config()),
            {"name": "unishard.dataloader", "ours": True, "batch_size": 1},
        ),
        ([1, 2], {"name": "list", "hides_batches": True}),
        (Own(), {"name": "Own", "hides_batches": True}),
    ],
)
def test_facts(loader, facts):
    assert facts_of(loader) == LoaderFacts(**{"name": type(loader).__name__} | facts)


def test_the_order_is_told_by_the_epoch_or_the_state_of_a_generator():
    shuffled = sampler()
    before = facts_of(DataLoader(DATA, sampler=shuffled))
    assert before.order == facts_of(DataLoader(DATA, sampler=shuffled)).order is not None
    assert "still at epoch 0: call set_epoch(epoch)" in before.reorder
    shuffled.set_epoch(1)
    assert facts_of(DataLoader(DATA, sampler=shuffled)).order != before.order
    generator = torch.Generator()
    random = DataLoader(DATA, sampler=RandomSampler(DATA, generator=generator))
    first = facts_of(random).order
    assert facts_of(random).order == first is not None
    list(random)
    assert facts_of(random).order != first


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata 0.11, of torch 2.13
def test_a_stateful_loader_of_torchdata_says_as_much():
    facts = facts_of(StatefulDataLoader(DATA, batch_size=4, shuffle=True))
    assert (facts.name, facts.batch_size, facts.whole) == ("StatefulDataLoader", 4, "RandomSampler")


class OfItsOwn(DistributedSampler):
    def __iter__(self):
        return iter(torch.randperm(len(self.dataset)).tolist())


def test_a_sampler_that_draws_its_own_order_has_none():
    assert facts_of(DataLoader(DATA, sampler=OfItsOwn(DATA, num_replicas=2, rank=0))).order is None


def shares(*pairs):
    return [LoaderFacts("DataLoader", shares=(Share("DistributedSampler", *pair),)) for pair in pairs]


@pytest.mark.parametrize(
    "everyone",
    [
        shares((0, 2), (1, 2)),
        shares((1, 2), (0, 2)),
        shares((0, 2), (1, 2), (0, 2), (1, 2)),  # two nodes, each with its own files
        [LoaderFacts("list")] * 2,
        [*shares((0, 2)), LoaderFacts("list")],
        [LoaderFacts("unishard.dataloader", ours=True)] * 2,
    ],
)
def test_right_shares(everyone):
    assert _wrong_shares(everyone) is None


@pytest.mark.parametrize(
    ("everyone", "message"),
    [
        (shares((0, 2), (1, 3)), "rank 1 reads share 1 of 3"),
        (shares((0, 2), (1, 2), (0, 2)), "rank 2 reads share 0 of 2"),
        (shares((3, 8)), "does not give the only rank all the data: rank 0 reads share 3 of 8"),
    ],
)
def test_wrong_shares(everyone, message):
    assert message in _wrong_shares(everyone)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"x": torch.ones(3, 4), "y": torch.ones(3)}, 3),
        ([torch.ones(3, 4), torch.ones(3)], 3),
        (torch.ones(3, 4), 3),
        ({"x": torch.ones(1, 4)}, None),
        ({"x": torch.ones(3)}, None),
        ({"x": torch.ones(3, 4), "lengths": torch.ones(2)}, None),
        ({"x": torch.ones(3, 4), "step": torch.tensor(1)}, None),
        ("text", None),
        ({}, None),
    ],
)
def test_samples_of_a_batch_are_counted_where_that_is_sure(batch, samples):
    assert _samples_in(batch) == samples

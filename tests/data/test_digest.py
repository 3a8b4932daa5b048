"""The same samples have the same digest, other samples another one; what would run code of others has none."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from unishard.data.digest import of_dataset, of_value


class Own(Dataset):
    def __getitem__(self, index):
        raise AssertionError("was read")

    def __len__(self):
        return 3


def samples(count: int = 4, first: float = 0.0) -> list[dict[str, object]]:
    return [{"x": torch.full((3,), index + first), "text": "a", "id": index} for index in range(count)]


@pytest.mark.parametrize(
    "build",
    [
        samples,
        lambda: tuple(samples()),
        lambda: range(7),
        lambda: TensorDataset(torch.arange(12.0).reshape(4, 3), torch.arange(4)),
        lambda: Subset(samples(), [0, 2]),
        lambda: [numpy.arange(3), numpy.float32(1.5)],
        lambda: [
            torch.ones(2, dtype=torch.bfloat16),
            torch.ones(2, dtype=torch.complex64).conj(),
            torch.tensor(True),
            torch.empty(0),
        ],
    ],
)
def test_the_same_samples_have_the_same_digest(build):
    assert of_dataset(build()) == of_dataset(build()) is not None


def test_other_samples_have_another_digest():
    sets = [
        samples(),
        samples(5),
        samples(first=1.0),
        tuple(samples()),
        Subset(samples(), [0, 2]),
        Subset(samples(), [0, 1]),
        TensorDataset(torch.zeros(4, 3)),
        TensorDataset(torch.ones(4, 3)),
        TensorDataset(torch.ones(5, 3)),
        range(4),
        range(1, 5),
        [],
    ]
    assert len({of_dataset(each) for each in sets}) == len(sets)


@pytest.mark.parametrize(
    "dataset",
    [
        Own(),
        Subset(Own(), [0]),
        Subset(samples(), torch.tensor([0])),
        [object()],
        [torch.ones(2, device="meta")],
        [torch.ones(2).to_sparse()],
        [numpy.array([object()])],
    ],
)
def test_what_cannot_be_read_without_code_of_others_has_none(dataset):
    assert of_dataset(dataset) is None


def test_a_large_tensor_is_sampled():
    large = torch.zeros(2**20)
    other = large.clone()
    other[2**19] = 1
    assert of_value(large) != of_value(other)
    assert of_value(large) == of_value(large.clone())

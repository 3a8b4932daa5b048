"""A loader that is built anew over the same dataset reads the next epoch; every other loader keeps its own."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch.utils.data import TensorDataset

import unishard
from unishard.config import Config
from unishard.data.epochs import Epochs
from unishard.errors import DataError

DATA = list(range(12))


def config(micro: int = 2, seed: int = 0) -> Config:
    return Config.model_validate({"training": {"micro_batch_size": micro, "seed": seed}})


def read(epochs, loader, batches=None):
    """The epoch that a loader reads, and some of its batches, or all."""
    epochs.join(loader)
    reading = iter(loader)
    for _ in range(len(loader) if batches is None else batches):
        next(reading)
    return loader.epoch if batches is not None else loader.epoch - 1


def test_a_new_loader_reads_the_next_epoch():
    epochs = Epochs()
    assert [read(epochs, unishard.dataloader(DATA, config())) for _ in range(3)] == [0, 1, 2]
    assert read(epochs, unishard.dataloader(DATA, config(), drop_last=True, num_workers=0)) == 3
    assert read(epochs, unishard.dataloader(DATA, config(), shuffle=False)) == 0, "another order"
    assert read(epochs, unishard.dataloader(DATA, config(seed=1))) == 0


def test_an_epoch_that_was_left_is_over():
    epochs = Epochs()
    assert [read(epochs, unishard.dataloader(DATA, config()), batches=2) for _ in range(3)] == [0, 1, 2]
    unread = unishard.dataloader(DATA, config())
    epochs.join(unread)
    assert read(epochs, unishard.dataloader(DATA, config())) == 3, "the one before was not read"


def test_a_loader_with_a_position_of_its_own_keeps_it():
    epochs = Epochs()
    loader = unishard.dataloader(DATA, config())
    assert [read(epochs, loader) for _ in range(2)] == [0, 1]
    begun = unishard.dataloader(DATA, config())
    list(begun)
    placed = unishard.dataloader(DATA, config())
    placed.load_state_dict(unishard.dataloader(DATA, config()).state_dict())
    assert [read(epochs, begun), read(epochs, placed)] == [1, 0]
    assert read(epochs, unishard.dataloader(DATA, config())) == 1, "after the last one that was read"
    epochs.forget()
    assert read(epochs, unishard.dataloader(DATA, config())) == 0


def test_two_datasets_in_turn_have_their_own_epochs():
    epochs, first, second = Epochs(), TensorDataset(torch.arange(12)), TensorDataset(torch.arange(1, 13))
    order = [read(epochs, unishard.dataloader(data, config())) for _ in range(2) for data in (first, second)]
    assert order == [0, 0, 1, 1]


def test_no_dataset_is_kept_alive():
    epochs = Epochs()
    for size in range(8, 12):
        data = TensorDataset(torch.arange(size))
        alive = weakref.ref(data)
        read(epochs, unishard.dataloader(data, config()))
        del data
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("build", [lambda: list(range(12)), lambda: TensorDataset(torch.arange(12))])
def test_a_dataset_that_is_built_anew_with_the_same_samples_is_warned_of(build):
    epochs, kept = Epochs(), build()
    read(epochs, unishard.dataloader(kept, config()))
    with pytest.warns(
        UserWarning,
        match="the same samples as the last one starts again at epoch 0, in the same order; build the dataset",
    ):
        assert read(epochs, unishard.dataloader(build(), config())) == 0


def test_other_samples_and_an_order_without_a_shuffle_are_not():
    epochs = Epochs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in (0, 1):
            read(epochs, unishard.dataloader([start] * 12, config()))
        for _ in range(2):
            read(epochs, unishard.dataloader(list(DATA), config(), shuffle=False))


@pytest.mark.parametrize(
    ("samples", "micro", "message"),
    [
        (
            16,
            64,
            r"the dataset has 16 samples, but a micro-batch on each rank takes 64 \(training.micro_batch_size 64 x 1 "
            r"rank\)",
        ),
        (1, 2, "set training.micro_batch_size to at most 1, or use more data"),
    ],
)
def test_a_dataset_smaller_than_a_micro_batch_is_refused_for_training(samples, micro, message):
    loader = unishard.dataloader(range(samples), config(micro))
    with pytest.raises(DataError, match=message):
        loader.require_enough_samples()
    assert len(list(loader)) == 1, "an evaluation may fill up its only micro-batch"
    unishard.dataloader(range(samples), config(samples)).require_enough_samples()

"""Batch sizes that contradict each other: what the error proposes agrees, and changes the accumulation first."""

from __future__ import annotations

import re

import pytest

import unishard
from unishard.config.batch_sizes import check_batch, ranks_of_batch


def config(**sizes: int) -> unishard.Config:
    return unishard.load({"training": sizes})


def repaired(cfg: unishard.Config, message: str) -> unishard.Config:
    """The config with every field that the error tells to write."""
    instead = message.rpartition("write ")[2]
    return cfg.override(*(f"training.{name}={value}" for name, value in re.findall(r"(\w+): (\d+)", instead)))


@pytest.mark.parametrize(
    ("sizes", "ranks", "instead"),
    [
        ((32, 4, 1), 4, "write gradient_accumulation_steps: 2, or remove global_batch_size"),
        ((32, 4, 8), 2, "write gradient_accumulation_steps: 4, or remove global_batch_size"),
        ((30, 4, 1), 5, "write gradient_accumulation_steps: 2 and micro_batch_size: 3, or remove global_batch_size"),
        ((2, 4, 2), 1, "write gradient_accumulation_steps: 1 and micro_batch_size: 2, or remove global_batch_size"),
        (
            (32, 4, 1),
            3,
            "3 ranks do not divide 32: write gradient_accumulation_steps: 3 and global_batch_size: 36, or remove",
        ),
        ((10, 4, 1), 3, "3 ranks do not divide 10: write global_batch_size: 12, or remove global_batch_size"),
        (
            (1, 4, 2),
            8,
            "8 ranks do not divide 1: write gradient_accumulation_steps: 1 and global_batch_size: 32, or remove",
        ),
    ],
)
def test_what_is_proposed_agrees(sizes: tuple[int, int, int], ranks: int, instead: str) -> None:
    whole, micro, steps = sizes
    cfg = config(global_batch_size=whole, micro_batch_size=micro, gradient_accumulation_steps=steps)
    with pytest.raises(unishard.ConfigError) as error:
        check_batch(cfg.training, ranks)
    assert instead in str(error.value)
    better = repaired(cfg, str(error.value))
    assert check_batch(better.training, ranks) == better.training.global_batch_size


def test_without_a_number_of_ranks() -> None:
    cfg = config(global_batch_size=24, micro_batch_size=4, gradient_accumulation_steps=4)
    with pytest.raises(
        unishard.ConfigError, match="write gradient_accumulation_steps: 3, which gives it on 2 ranks, or remove"
    ) as error:
        ranks_of_batch(cfg.training)
    assert ranks_of_batch(repaired(cfg, str(error.value)).training) == 2
    assert ranks_of_batch(config().training) is None

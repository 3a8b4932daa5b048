"""What the engines of a soak do, drawn at random from a seed."""

from __future__ import annotations

import random
from typing import NamedTuple

import unishard

__all__ = ["STRATEGIES", "WORLDS", "Life", "Segment", "config", "draw"]

WORLDS = (1, 2, 4)
STRATEGIES = ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard")
LENGTH = 10
"""Updates of a segment on average."""
GLOBAL_BATCH, MICRO_BATCH = 8, 2


class Segment(NamedTuple):
    """What one engine does: it resumes, trains, evaluates, saves, and perhaps trains on."""

    strategy: str
    updates: int
    evaluates: bool = False
    in_background: bool = False
    beyond: int = 0
    """Updates after the save, which are trained again."""
    goes_back: bool = False
    """Whether this engine loads what it saved and trains them again; else the next one does."""


class Life(NamedTuple):
    """Processes in which one engine is prepared after the other."""

    world: int
    segments: tuple[Segment, ...]


def draw(updates: int, lives: int, seed: int) -> list[Life]:
    """Lives with that many updates together."""
    dice, found = random.Random(seed), []
    for life in range(lives):
        left = updates * (life + 1) // lives - updates * life // lives
        segments: list[Segment] = []
        first = dice.sample(STRATEGIES, k=len(STRATEGIES))
        while left:
            length = min(left, dice.randint(LENGTH // 2, 3 * LENGTH // 2))
            left -= length
            in_background = (
                not segments or dice.random() < 0.5
            )  # the first one connects a thread of its own to the other ranks
            told = (dice.random() < 0.5, in_background, dice.choice((0, 2, 3)), dice.random() < 0.5)
            strategy = first.pop() if first else dice.choice((segments[-1].strategy, *STRATEGIES))
            segments.append(Segment(strategy, length, *told))
        found.append(Life(WORLDS[(life + 1) % len(WORLDS)], tuple(segments)))
    return found


def config(backend: str, segment: Segment, root: str | None) -> unishard.Config:
    """The same training at any number of ranks."""
    world = unishard.Topology.from_environment().world_size
    saving = {"dir": root, "on_existing": "resume", "async_save": segment.in_background, "keep_last": 2}
    return unishard.Config.model_validate(
        {
            "backend": backend,
            "sharding": segment.strategy,
            "optimizer": {"name": "sgd", "lr": 0.0002, "momentum": 0.9},
            "training": {
                "micro_batch_size": MICRO_BATCH,
                "gradient_accumulation_steps": GLOBAL_BATCH // MICRO_BATCH // world,
                "seed": 3,
            },
        }
        | ({"checkpoint": saving} if root else {})
    )

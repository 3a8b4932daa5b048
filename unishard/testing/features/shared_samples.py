"""Trains features in which a group of ranks shares each sample."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import unishard
from unishard.config.nested import merge
from unishard.testing.cells import Cell, Recorder, micro_batches
from unishard.testing.models import TestModel
from unishard.testing.oracle import Curve

Models = Mapping[str, TestModel]
SIZE = 2
"""Of a group."""


def trained(models: Models) -> dict[str, Any]:
    """Fields of a feature with these models."""
    return {"models": models, "loop": partial(_loop, models)}


def sections(parallel: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Sections of a feature: windows have the micro-batches of all ranks of a group."""
    window = {"training": {"gradient_accumulation_steps": 2 * SIZE}}
    return merge({"parallel": parallel} | window, more or {})


def _loop(models: Models, engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    """The ranks of a group read the micro-batches that each of them would have read without it."""
    rank = unishard.Topology.from_environment().rank
    first = rank - rank % SIZE
    of_group = [micro_batches(models[cell.model], cell, rank) for rank in range(first, first + SIZE)]
    recorder = Recorder()
    for micro_batch in engine.batches([each for turn in zip(*of_group, strict=True) for each in turn]):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        recorder.record(engine.mean(loss), engine.step())
    return recorder.curve()

"""Validation during training: forwards in evaluation mode and loops of different length, which must not affect
training.
"""

from __future__ import annotations

from typing import Any

import unishard
from unishard.testing.cells import Cell, Feature, Recorder
from unishard.testing.oracle import Curve


def _evaluating_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    rank = unishard.Topology.from_environment().rank
    recorder = Recorder()
    for turn, batch in enumerate(engine.batches(data)):
        loss = engine(**batch).loss
        engine.eval()
        with engine.lockstep():
            for _ in range((turn + rank) % 3):
                engine(**batch)
        engine.train().backward(loss)
        recorder.record(engine.mean(loss), engine.step())
        engine.eval()(**batch)
        engine.train()
    return recorder.curve()


EVALUATION = (
    Feature(
        "evaluation",
        "between forward and backward the ranks evaluate different numbers of batches in `engine.lockstep()`, and one "
        "more after each step",
        loop=_evaluating_loop,
    ),
)

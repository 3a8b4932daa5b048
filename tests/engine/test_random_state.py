"""Random numbers go on where they were, or begin anew in a way that can be repeated."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from unishard.engine.state import random_state
from unishard.errors import CheckpointError

CPU = torch.device("cpu")


def draw() -> list[float]:
    """From every generator; the normal ones keep a spare number between two calls."""
    return [
        *torch.rand(3).tolist(),
        torch.randn(()).item(),
        random.random(),
        random.gauss(0, 1),
        *numpy.random.randn(3).tolist(),
    ]


def test_every_generator_goes_on_where_it_was():
    draw()
    states = random_state.capture_random(CPU)
    assert set(states) == {"torch", "python", "numpy"}
    assert {state.dtype for state in states.values()} == {torch.uint8}
    drawn = [draw(), draw()]
    random_state.reseed(1, 2, 3)
    assert draw() != drawn[0]
    random_state.restore_random(states, CPU)
    assert [draw(), draw()] == drawn


def test_a_generator_that_was_not_captured_stays():
    states = random_state.capture_random(CPU)
    del states["torch"]
    drawn, state = draw(), torch.get_rng_state()
    random_state.restore_random(states, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert draw()[4:] == drawn[4:]


def test_new_streams_differ_by_rank_and_step_and_can_be_repeated():
    def of(*numbers: int) -> tuple[float, ...]:
        random_state.reseed(*numbers)
        return tuple(draw())

    streams = [of(seed, step, rank) for seed in range(3) for step in range(3) for rank in range(3)]
    for column in zip(*streams, strict=True):
        assert len(set(column)) == len(streams)
    assert of(1, 1, 1) == streams[13]


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
@pytest.mark.parametrize("state", [b"", b"{}", b"[3, [1], null]", b"\xff\xfe"])
def test_a_state_that_does_not_fit_is_refused(kind, state):
    with pytest.raises(CheckpointError, match=f"{kind} random state does not fit"):
        random_state.restore_random({kind: torch.tensor(bytearray(state), dtype=torch.uint8)}, CPU)

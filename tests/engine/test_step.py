"""What `Engine.step` returns: a named tuple that waits for the device only where it is read."""

from __future__ import annotations

import math
import pickle

import pytest

from unishard import Step


class Norm:
    """Counts how often the device is waited for."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.value


def test_nothing_is_read_before_it_is_asked_for():
    norm = Norm(2.5)
    step = Step.pending(norm, None, 0.1)
    assert (step.ended, step.lr, norm.reads) == (True, 0.1, 0)
    assert (step.updated, step.grad_norm, step.skipped, norm.reads) == (True, 2.5, False, 1)
    assert step == Step(updated=True, grad_norm=2.5, lr=0.1, skipped=False)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_an_update_with_a_norm_that_is_not_finite_was_skipped(norm):
    assert Step.pending(Norm(norm), None, 0.1) == (False, math.inf, 0.1, True)
    assert Step.pending(Norm(norm), True, 0.1) == (True, math.inf, 0.1, False), "under training.nonfinite: ignore"


def test_what_the_host_knows_is_not_waited_for():
    norm = Norm(1.0)
    for updated in (True, False):
        step = Step.pending(norm, updated, 0.1)
        assert (step.updated, step.skipped) == (updated, not updated)
    assert norm.reads == 0


def test_inside_a_window_there_is_nothing_to_read():
    step = Step(updated=False, grad_norm=None, lr=0.1, skipped=False)
    assert not step.ended
    assert not step.skipped
    assert tuple(step) == (False, None, 0.1, False)


def test_it_is_still_a_named_tuple():
    step = Step.pending(Norm(2.5), None, 0.1)
    updated, norm, lr, skipped = step
    assert (updated, norm, lr, skipped) == (True, 2.5, 0.1, False) == step
    assert step[1] == step._asdict()["grad_norm"] == 2.5
    assert step._replace(lr=0.2) == Step(True, 2.5, 0.2, False)
    assert pickle.loads(pickle.dumps(step)) == step
    assert hash(step) == hash(tuple(step))
    assert repr(step) == "Step(updated=True, grad_norm=2.5, lr=0.1, skipped=False)"

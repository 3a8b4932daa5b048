"""Frameworks on unishard beside the same program on the engine that the framework itself sets up: losses, and what an
update calls."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from unishard.testing import run_ranks

if not all(map(find_spec, ("accelerate", "lightning", "transformers"))):
    pytest.skip("a framework is not installed", allow_module_level=True)

from benchmarks.frameworks.cases import CASES
from benchmarks.frameworks.turns import take_turns
from benchmarks.peers.turns import Turns
from dev.ranks.judging import deviation

pytestmark = pytest.mark.ranks

MARGIN = 1.05
FEWER = {
    "accelerate": ("fsdp", "full_shard"),
    "trainer": ("deepspeed", "shard_grad_op"),
    "fabric": ("fsdp", "no_shard"),
}
"""Where an update calls no more functions than the framework's own."""
CHOSEN = [case for case in CASES if FEWER.get(case.model) == case[:2]]
OURS = 657
"""Functions of unishard that an update calls under Accelerate on DeepSpeed; its own clipping computes no norm."""


def beside(case):
    """Eleven updates of either side, and the calls of another one."""
    return take_turns(case, Turns(0.0, 0, 0))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[pytest.mark.deep] * (case.model != "accelerate")) for case in CHOSEN],
)
def test_losses_are_those_of_its_own_engine_and_no_more_is_called(case):
    for rank in run_ranks(2, beside, case, timeout=300):
        own, ours = rank["own"], rank["unishard"]
        assert len(own.losses) == 11
        assert deviation(ours.losses, own.losses) <= 1e-6
        assert ours.calls.everything <= own.calls.everything, ours.calls.own.most_common(20)


@pytest.mark.deep
def test_accelerate_on_deepspeed_calls_few_functions():
    (case,) = [each for each in CASES if each[:2] == ("deepspeed", "shard_grad_op") and each.model == "accelerate"]
    for rank in run_ranks(2, beside, case, timeout=300):
        assert deviation(rank["unishard"].losses, rank["own"].losses) <= 1e-6
        assert rank["unishard"].calls.own.total() <= MARGIN * OURS, rank["unishard"].calls.own.most_common(20)

"""examples/reinforce_llama.py: the reward grows on both engines alike, and the server has the policy's weights."""

from __future__ import annotations

import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from harness import config

import unishard
from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "reinforce_llama.py"
STEPS = 12


def reinforced(backend):
    """The log of a run, and whether what was pushed is the policy."""
    sys.argv = [str(SCRIPT), "--set", f"backend={backend}", "--set", "optimizer.lr=0.01", "--steps", str(STEPS)]
    example = runpy.run_path(str(SCRIPT))
    log = example["main"]()
    with unishard.prepare(example["policy"](), config(backend, precision="bf16")) as engine:
        server = example["policy"]()
        for weight in server.parameters():
            weight.data.zero_()
        example["push"](engine, server)
        own = engine.weights.state_dict(dtype="fp32")
        pushed = all(torch.equal(value, server.state_dict()[name]) for name, value in own.items())
    return log, pushed


@cache
def outcome(backend):
    return run_ranks(2, reinforced, backend, timeout=200)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reward_grows_and_the_server_gets_the_policy(backend):
    (log, pushed), (other, pushed_too) = outcome(backend)
    assert log == other
    assert len(log["rewards"]) == STEPS
    assert sum(log["rewards"][-3:]) / 3 > sum(log["rewards"][:3]) / 3 + 0.1
    assert log["distances"][0] == 0.0
    assert log["distances"][-1] > 0.0
    assert pushed
    assert pushed_too


def test_both_engines_draw_and_train_the_same():
    one, other = (outcome(backend)[0][0] for backend in BACKENDS)
    assert other["rewards"][:4] == pytest.approx(one["rewards"][:4], abs=1e-6)
    assert other["distances"][:4] == pytest.approx(one["distances"][:4], abs=1e-6)

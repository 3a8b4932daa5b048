"""The loops that benchmarks/peers compares: they run, train the same, and unishard sends what the plan says."""

import pytest

from benchmarks.peers.cell import CANDIDATES, Cell
from benchmarks.peers.page import TRAFFIC, cell_result
from benchmarks.peers.turns import Turns, take_turns, theory
from unishard.testing import run_ranks

ONE_ROUND = Turns(0.0, 1, 1)


@pytest.mark.deep
@pytest.mark.parametrize(
    "settings",
    [("fsdp", "full_shard", "fp32"), ("deepspeed", "shard_grad_op", "bf16")],
    ids="-".join,
)
def test_the_loops_train_the_same_and_unishard_sends_what_the_plan_says(settings):
    cell = Cell(*settings, "tiny")
    found = cell_result(cell, 0, theory(cell, 2), run_ranks(2, take_turns, cell, CANDIDATES, ONE_ROUND))
    assert {name: side["deviation"] for name, side in found["candidates"].items() if side["void"]} == {}
    assert set(found["candidates"]) == set(CANDIDATES)
    assert found["candidates"]["unishard"]["nbytes"] == pytest.approx(found["theory"], rel=TRAFFIC)
    assert all(side["peak"] > 0 and side["seconds"] > 0 for side in found["candidates"].values())

"""The comparison of layers and experts over ranks: the page made from the results."""

import pytest

from benchmarks.machine import machine
from benchmarks.parallel import page
from benchmarks.peers.turns import Counts, Side

MIB = 1 << 20


def side(seconds, losses=(3.0, 2.0)):
    return Side([seconds] * 4, [*losses], Counts(7, 3 * MIB, 2 * MIB), 5 * MIB)


SIDES = {
    "full_shard on fsdp": side(2.0),
    "full_shard on deepspeed": side(4.0),
    "tensor: 2 on deepspeed": side(6.0),
    "transformers": side(3.0),
}


def written(sides):
    return page.section("tensor", {"machine": machine(2), "tensor": [*page.results_of(sides)]})


@pytest.mark.parametrize("name", ["tensor: 2 on deepspeed", "transformers"])
def test_a_time_is_relative_to_plain_sharding_on_the_same_engine_else_on_the_first(name):
    assert f"| {name} | 1.50 (1.50 to 1.50) | 5.0 | 2.0 | 7 | 3.0 |" in written(SIDES)


def test_a_candidate_that_trains_something_else_has_no_ratio():
    text = written({**SIDES, "transformers": side(3.0, (3.0, 2.1))})
    assert "| transformers | void |" in text
    assert "**Void**: transformers does not train the same: losses are 5.0e-02 apart." in text

"""The comparison with frameworks' own runs: the page made from the results."""

import math

import pytest

pytest.importorskip("accelerate")

from benchmarks.calls import Calls, Counter
from benchmarks.frameworks import page
from benchmarks.frameworks.cases import CASES
from benchmarks.frameworks.turns import Side
from benchmarks.machine import machine


def side(seconds, calls, losses=(2.0, 1.0)):
    return Side([seconds] * 8, list(losses), Calls(Counter(ours=3), Counter(others=calls)))


def cell(own, ours, at=0):
    rank = {"own": own, "unishard": ours}
    return page.result_of(CASES[at], [rank, rank])


def test_the_page_counts_the_cells_that_reach_the_goal():
    cells = [cell(side(1.0, 10), side(0.9, 7)), cell(side(1.0, 10), side(1.2, 8), 1)]
    written = page.section({"machine": machine(2), "cells": cells})
    assert "The median of 2 cells is 1.050. An update takes at most 1.00 x the framework's own in 1 of them" in written
    assert "in 1 the whole interval is above" in written
    assert "as many Python calls in 2 of 2" in written
    assert "| Accelerate | fsdp | `no_shard` | 1000.0 | 900.0 | 0.900 (0.900 to 0.900) | 8 | 13 | 10 | 3 |" in written


@pytest.mark.parametrize("loss", [1.1, math.nan])
def test_a_run_that_trains_something_else_has_no_ratio(loss):
    found = cell(side(1.0, 10), side(0.5, 7, (2.0, loss)))
    written = page.section({"machine": machine(2), "cells": [found]})
    assert "**Void**: Accelerate on fsdp with `no_shard` does not train as its own run" in written
    assert "0.500" not in written
    assert "**Void**" in page.line_of(found)

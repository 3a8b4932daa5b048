"""The comparison of long sequences: the page made from the results."""

from typing import NamedTuple

import pytest

from benchmarks.machine import machine
from benchmarks.sequence import page


class Updates(NamedTuple):
    seconds: list[float]
    losses: list[float]
    peak: int = 5 << 20


ROUND = {"ulysses": Updates([2.0, 2.0], [3.0, 2.0]), "Accelerate": Updates([3.0, 3.0], [3.0, 2.0])}


def written(name, rounds):
    results = {"machine": machine(2), "cells": [page.result_of("fsdp", name, rounds)], "longest": [], "budget": 0}
    return page.section(results)


def test_a_ratio_is_that_of_one_round_and_the_page_has_the_median_and_the_range():
    slow_machine = {name: Updates([9 * each for each in of.seconds], of.losses) for name, of in ROUND.items()}
    faster = {**ROUND, "Accelerate": Updates([2.0, 2.0], [3.0, 2.0])}
    assert "| fsdp | Accelerate | 3.00 | 1.50 (1.00 to 1.50) | 5 |" in written(
        "Accelerate", [ROUND, slow_machine, faster]
    )


@pytest.mark.parametrize(("name", "void"), [("Accelerate", True), ("half the length", False)])
def test_a_candidate_that_trains_something_else_has_no_ratio(name, void):
    other = {**ROUND, name: Updates([3.0, 3.0], [3.0, 2.1])}
    assert ("| void |" in (text := written(name, [other]))) is void
    assert (f"**Void**: {name} on fsdp does not train as `ulysses`: losses are 5.0e-02 apart." in text) is void


def test_a_hybrid_model_is_relative_to_half_the_length_and_trains_as_by_heads():
    here = {
        "heads": Updates([3.0, 3.0], [3.0, 2.0]),
        "states": Updates([2.0, 2.0], [3.0, 2.1]),
        "half the length": Updates([2.0, 2.0], [4.0, 3.0]),
    }
    cells = [page.result_of("fsdp", name, [here], page.OF_HYBRIDS) for name in here]
    results = {"machine": machine(2), "cells": [], "longest": [], "budget": 0}
    text = page.section(results | {"hybrid": {"machine": machine(2), "cells": cells}})
    assert "| relative to `half the length` |" in text
    assert "| fsdp | heads | 3.00 | 1.50 (1.50 to 1.50) | 5 |" in text
    assert "**Void**: states on fsdp does not train as `heads`: losses are 5.0e-02 apart." in text

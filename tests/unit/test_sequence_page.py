"""The comparison of long sequences: the page made from the results."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `benchmarks` is no part of the wheel

from benchmarks.peers.page import machine  # noqa: E402
from benchmarks.sequence import page  # noqa: E402

MEASURED = ROOT / "benchmarks" / "sequence" / "measured.json"
PAGE = ROOT / "docs" / "performance.md"


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


def test_the_section_of_the_guide_is_that_of_the_last_results():
    found = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"cells": []}
    assert f"{page.BEGIN}\n{page.section(found)}\n{page.END}" in PAGE.read_text(encoding="utf-8")

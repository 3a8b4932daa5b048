"""Seconds to the first step: phases by the loop's calls of its cell, ratios of one round, the page from the results."""

from typing import NamedTuple

import pytest

from benchmarks.first_step import page
from benchmarks.first_step.phases import PHASES, phases_of
from benchmarks.machine import machine


class Clock:
    """Moves where the loop says so."""

    now = 100.0

    def __call__(self):
        return self.now


class Tiny(NamedTuple):
    """A cell whose model takes a second."""

    clock: Clock

    def build(self):
        self.clock.now += 1
        return "model"

    def micro_batches(self, rank):
        return [f"batch of rank {rank}"]


def loop(cell):
    """Three seconds before the data, of which one is the model's, and steps of four and then of half a second."""
    cell.clock.now += 2
    assert cell.build() == "model"
    assert cell.micro_batches(1) == ["batch of rank 1"]
    cell.clock.now += 4
    yield
    cell.clock.now += 0.5
    yield


def test_phases_are_told_by_when_the_loop_builds_and_reads():
    clock = Clock()
    found = phases_of(loop, Tiny(clock), clock.now, clock)
    assert found.pop("cpu") > 0
    assert found == {"build": 1, "shard": 2, "step 1": 4, "step 2": 0.5}


def one_start(scale=1.0, step=1.0):
    return dict(zip(PHASES, (2 * scale, scale, scale, step * scale, 0.5 * scale), strict=True)) | {"cpu": 3 * scale}


def test_a_ratio_is_that_of_one_round():
    quiet = {"by hand": one_start(), "unishard": one_start(step=2.0)}
    busy = {"by hand": one_start(9.0), "unishard": one_start(9.0, step=2.0)}
    found = page.start_result(2, "fsdp", "unishard", [quiet, busy, quiet])
    assert found["together"] == pytest.approx(6.0)
    assert found["ratio"] == pytest.approx(6 / 5)
    assert page.line_of(found) == (
        "| 2 | fsdp | unishard | 2.00 | 1.00 | 1.00 | 2.00 | 6.00 | 1.20 | 3.00 | 1.00 | 0.50 | 3 |"
    )


def test_the_compiler_is_what_the_first_step_takes_more():
    starts = [one_start(step=1.0), one_start(step=21.0), one_start(step=3.0)]
    results = {
        "machine": machine(2),
        "model": "tiny",
        "starts": [page.start_result(2, "fsdp", "by hand", [{"by hand": one_start()}])],
        "compiled": [page.compiled_result(2, "fsdp", starts)],
    }
    assert "| 2 | fsdp | 1.00 | 21.00 | 20.00 | 3.00 | 2.00 | 0.50 |" in page.section(results)

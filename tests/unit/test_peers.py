"""The comparison with loops by hand and Accelerate: ratios, void comparisons, and the page made from the results."""

import math

import pytest

from benchmarks.machine import machine
from benchmarks.peers import page
from benchmarks.peers.cell import Cell
from benchmarks.peers.page import cell_result
from benchmarks.peers.turns import Counts, Event, Side, sent
from benchmarks.ratios import paired
from dev.ranks.judging import deviation

CELL = Cell("fsdp", "full_shard", "fp32", "tiny")


def side(seconds, losses=(2.0, 1.0), nbytes=1000):
    return Side(list(seconds), list(losses), Counts(7, nbytes, 2**20), 2**20)


def result(**sides):
    names = {"hand": "by hand", "accelerate": "Accelerate", "ours": "unishard"}
    rank = {names[name]: found for name, found in sides.items()}
    return cell_result(CELL, 10, 1000, [rank, rank])


def results(*cells):
    return {"machine": machine(2), "cells": list(cells), "notes": []}


def test_steps_of_the_same_round_are_compared():
    """A machine that gets slower makes no difference."""
    found = paired([1.1, 2.2, 11.0], [1.0, 2.0, 10.0])
    assert found["ratio"] == pytest.approx(1.1)
    assert found["low"] == pytest.approx(found["high"]) == pytest.approx(1.1)
    assert found["pairs"] == 3


def test_the_interval_is_of_the_median():
    found = paired([*range(1, 101)], [1.0] * 100)
    assert (found["ratio"], found["low"], found["high"]) == (50.5, 41, 61)


def test_a_loss_that_is_no_number_is_infinitely_far():
    assert deviation([1.0, math.nan], [1.0, 1.0]) == math.inf
    assert deviation([1.0, 1.5], [1.0, 1.0]) == 0.5


def test_a_loop_that_trains_something_else_has_no_ratio():
    cell = result(hand=side([1.0]), accelerate=side([0.5], (2.0, 1.1)), ours=side([0.9]))
    written = page.section(results(cell))
    assert (
        "**Void**: Accelerate of fsdp full_shard fp32 tiny trains something else than by hand: its losses are 1.0e-01 "
        "apart" in written
    )
    assert "0.900 (0.900 to 0.900)" in written
    assert "x that of Accelerate" not in written
    assert " VOID" in page.line_of(cell)


def test_the_page_counts_the_cells_that_reach_the_goals():
    good = result(hand=side([1.0]), accelerate=side([1.0]), ours=side([0.9]))
    slow = result(hand=side([1.0]), accelerate=side([1.0]), ours=side([1.2], nbytes=1100))
    written = page.section(results(good, slow))
    assert (
        "at most 1.00 x that of by hand in 1 of 2 cells; in 1 the whole interval is above. Median of the cells: 1.050."
        in written
    )
    assert "in 1 of 2 cells.\n" in written
    assert "7; 1.100 x; 2.0 MiB" in written
    assert "](peers.svg)" in written


def test_a_run_without_accelerate_leaves_its_column_empty_and_says_why():
    found = results(result(hand=side([1.0]), ours=side([1.0]))) | {
        "notes": ["Accelerate is left out, it ends with ValueError"]
    }
    written = page.section(found)
    assert "| 1000.0 |  | 1000.0 | 1.000 (1.000 to 1.000) |  | 1 |" in written
    assert "Accelerate is left out" in written


def test_a_collective_without_a_formula_is_an_error():
    assert sent(Event("", "all_reduce", 8, "float32"), 2) == 32
    assert sent(Event("", "all_gather", 8, "bfloat16"), 2) == 8
    with pytest.raises(RuntimeError, match="alltoall_ was called"):
        sent(Event("", "c10d::alltoall_", 8, "float32"), 2)

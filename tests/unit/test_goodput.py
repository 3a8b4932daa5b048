"""The simulated goodput is that of the closed formula, the best interval is found, and the page is made from the results."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.goodput import __main__ as program
from benchmarks.goodput import page
from benchmarks.goodput.model import Costs, best, formula, simulate, young_daly

HOUR = 3600.0
LIVES = 3000


@settings(max_examples=30, deadline=None)
@given(
    blocks=st.floats(0.0, 300.0),
    lag=st.floats(0.0, 600.0),
    restart=st.floats(0.0, HOUR),
    longer=st.floats(60.0, 2 * HOUR),
    mtbf=st.floats(HOUR / 2, 24 * HOUR),
    seed=st.integers(0, 2**32),
)
def test_the_simulation_agrees_with_the_closed_formula(blocks, lag, restart, longer, mtbf, seed):
    """The lost time of a life has a deviation of less than the mean life; four of them over the lives are allowed."""
    costs, interval = Costs(blocks, lag, restart), lag + longer
    shares = simulate(interval, costs, mtbf, lives=LIVES, seed=seed)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0
    assert shares.useful == pytest.approx(formula(interval, costs, mtbf), abs=4 / LIVES**0.5)


@pytest.mark.parametrize("mtbf", page.MTBF)
@pytest.mark.parametrize("costs", [Costs(120.0, 0.0, 430.0), Costs(12.0, 108.0, 430.0)])
def test_many_lives_agree_closely(costs, mtbf):
    interval = young_daly(costs, mtbf * HOUR)
    shares = simulate(interval, costs, mtbf * HOUR, lives=40_000, seed=3)
    assert shares.useful == pytest.approx(formula(interval, costs, mtbf * HOUR), abs=0.004)


def test_without_failures_only_saves_cost():
    shares = simulate(90.0, Costs(10.0, 0.0, 0.0), 1e7, lives=20, seed=1)
    assert shares.useful == pytest.approx(0.9, abs=1e-3)
    assert shares.saves == pytest.approx(0.1, abs=1e-3)


def test_a_save_waits_for_the_one_before_it():
    """Updates of 60 s and a save that is complete 120 s after them: half of the time they stand still."""
    shares = simulate(60.0, Costs(0.0, 120.0, 0.0), 1e7, lives=5, seed=1)
    assert shares.saves == pytest.approx(0.5, abs=1e-2)


@pytest.mark.parametrize("mtbf", page.MTBF)
@pytest.mark.parametrize("costs", [Costs(30.0, 0.0, 300.0), Costs(5.0, 40.0, 300.0)])
def test_the_best_interval_is_near_youngs(costs, mtbf):
    interval, shares = best(costs, mtbf * HOUR, lives=400, seed=3)
    first = young_daly(costs, mtbf * HOUR)
    assert 0.5 < interval / first < 2
    assert shares.useful >= simulate(first, costs, mtbf * HOUR, lives=400, seed=3).useful


def test_own_seconds_give_the_tables(monkeypatch, capsys):
    monkeypatch.setattr(page, "LIVES", 300)
    words = "--save 30 --blocks 3 --resume 60 --start 120 --notice 10 --mtbf 12 --interval 5 --interval 10"
    monkeypatch.setattr(sys, "argv", ["goodput", *words.split()])
    program.main()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in printed if line.startswith("| 12 h")] == [
        ["| 12 h", "wait"],
        ["| 12 h", "in the background"],
    ] * 2
    assert "| MTBF | saves | every 5 min | every 10 min |" in printed


def test_the_page_says_what_was_simulated_and_the_formula_agrees():
    for run in page.MEASURED.kept()["runs"].values():
        kinds = page.kinds(run["times"])
        for each in run["figures"]:
            costs, mean = kinds[each["kind"]], HOUR * each["mtbf"]
            assert each["formula"] == pytest.approx(formula(young_daly(costs, mean), costs, mean))
            assert each["shares"][0] == pytest.approx(each["formula"], abs=0.01)
            assert each["best goodput"] >= each["shares"][0]

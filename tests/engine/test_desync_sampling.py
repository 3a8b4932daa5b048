"""Before which calls ranks wait for each other: where loops mostly go wrong, and as often in the rest as costs
nothing."""

from __future__ import annotations

import pytest

from unishard.failures.collective_check import interval, samples, samples_modules


def test_the_first_updates_are_checked_and_then_every_tenth() -> None:
    assert [update for update in range(45) if samples(update)] == [*range(11), 20, 30, 40]


def test_modules_are_checked_one_by_one_in_the_first_updates() -> None:
    assert [update for update in range(45) if samples_modules(update)] == [*range(10)]


@pytest.mark.parametrize(("seconds", "updates"), [(0.0, 10), (0.01, 10), (0.1, 10), (0.25, 4), (0.7, 1), (60.0, 1)])
def test_updates_that_take_long_are_checked_more_often(seconds: float, updates: int) -> None:
    assert interval(seconds) == updates

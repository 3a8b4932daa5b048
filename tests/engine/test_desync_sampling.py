"""Before which calls ranks wait for each other: where loops mostly go wrong, and as often in the rest as costs
nothing."""

from __future__ import annotations

import pytest

from unishard.failures.collective_check import samples, samples_all, samples_modules


def test_the_first_updates_are_checked_and_then_every_tenth() -> None:
    assert [update for update in range(45) if samples(update)] == [*range(11), 20, 30, 40]


def test_modules_are_checked_one_by_one_in_the_first_updates() -> None:
    assert [update for update in range(45) if samples_modules(update)] == [*range(10)]


@pytest.mark.parametrize(("updates", "seconds", "all_calls"), [(9, 0.0, True), (10, 0.9, False), (10, 1.0, True)])
def test_all_calls_are_checked_in_the_first_updates_and_in_long_ones(
    updates: int, seconds: float, all_calls: bool
) -> None:
    assert samples_all(updates, seconds) is all_calls

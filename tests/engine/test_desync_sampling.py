"""Which calls are checked: those where loops mostly go wrong, and a tenth of the rest."""

from __future__ import annotations

from unishard.distributed.collective_check import samples


def test_the_first_updates_are_checked_and_then_every_tenth() -> None:
    assert [update for update in range(45) if samples(update)] == [*range(11), 20, 30, 40]

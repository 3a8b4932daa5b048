"""Random combinations of settings, each continued by another one, train as plain torch does."""

from __future__ import annotations

import pytest

from dev.combining import drawn, judge


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 4])
def test_none_is_wrong(ranks: int) -> None:
    found = [*judge([*drawn(seed=11, count=8, ranks=ranks)], ranks)]
    assert [(str(combination), said) for combination, said, is_wrong in found if is_wrong] == []
    assert sum("refused" not in said for _, said, _ in found) > len(found) // 2

"""How numbers of things are written in messages."""

import pytest

from unishard.config.describe import count_of


@pytest.mark.parametrize(("number", "written"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (4096, "4,096 ranks")])
def test_a_number_of_things(number, written):
    assert count_of(number, "rank") == written

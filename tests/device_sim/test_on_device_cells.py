"""Strategies, engines, precisions and offload on two ranks: the CPU's losses, and no race."""

from __future__ import annotations

import pytest
from cells import CELLS, QUICK, check


@pytest.mark.parametrize("cell", QUICK, ids=str)
@pytest.mark.quick
def test_a_quick_cell_has_the_losses_of_the_cpu(cell):
    check(cell, QUICK)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in QUICK], ids=str)
def test_a_cell_has_the_losses_of_the_cpu(cell):
    check(cell, tuple(each for each in CELLS if each not in QUICK and each.backend == cell.backend))

"""Strategies, engines, precisions and offload on two ranks: the CPU's losses, and no race."""

from __future__ import annotations

import pytest
from cells import CELLS, QUICK, check


@pytest.mark.parametrize("cell", QUICK, ids=str)
@pytest.mark.quick
def test_a_quick_cell_has_the_losses_of_the_cpu(cell):
    check(cell, QUICK)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in QUICK], ids=str)
def test_a_cell_has_the_losses_of_the_cpu(cell, request):
    items = [item for item in request.session.items if item.originalname == request.node.originalname]
    chosen = [item.callspec.params["cell"] for item in items]
    check(cell, tuple(each for each in chosen if _group(each) == _group(cell)))


def _group(cell):
    """Cells that share ranks."""
    return cell.backend, bool(cell.feature)

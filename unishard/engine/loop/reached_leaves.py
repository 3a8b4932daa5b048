"""Whether a loss reaches the parameters of a model, for frameworks that say of no loss whose it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["reaches"]


def reaches(loss: Tensor, leaves: Iterable[Tensor]) -> bool:
    """Whether the backward of a loss would accumulate a gradient on one of these leaves. Walks its graph."""
    wanted: set[Any] = {torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad}
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting and wanted:
        node = waiting.pop()
        if node in wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return False

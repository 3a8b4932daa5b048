"""What the graph of a loss reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves to which a loss has a path in autograd's graph."""
    seen: set[Any] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):  # of a node that accumulates the gradient of a leaf
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def reaches(loss: Tensor, leaves: Iterable[Tensor]) -> bool:
    """Whether the backward of a loss would accumulate a gradient on one of these leaves."""
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


def comes_from(loss: Tensor, origin: Tensor) -> bool:
    """Whether a loss is another tensor, or was computed from it."""
    if loss is origin:
        return True
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is origin.grad_fn:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return False

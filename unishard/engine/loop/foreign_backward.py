"""Detect another engine's backward that reaches this model's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unishard.contract.adapter import EngineAdapter
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.errors import ContractError

_FOREIGN = CORE_PRIVATE_API["foreign-backward"]


class ForeignBackwardCheck:
    """Raises if a backward of another engine, or of the user, reaches this model's parameters through an output of its
    forward.
    """

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self._own = False
        adapter.on_gradient = self._on_gradient

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """A block in which the engine's own backward runs."""
        self._own = True
        try:
            yield
        finally:
            self._own = False

    def _on_gradient(self, gradient: Tensor) -> None:
        if self._own:
            return
        if any(map(_will_accumulate, self._adapter.leaves())):
            raise ContractError(
                "a backward that is not this engine's reaches the parameters of its "
                f"{type(self._adapter.module).__name__} and would mix gradients with its own; call this engine's "
                "backward(loss), or, if the loss trains only another model, compute and backward it inside `with "
                "engine.frozen():`"
            )
        self._adapter.input_gradients(graph=torch.is_grad_enabled())


def _will_accumulate(leaf: Tensor) -> bool:
    """Whether the running backward will accumulate a gradient on a leaf.

    Raises:
        ContractError: This torch version cannot tell.
    """
    if not _FOREIGN.works:
        raise ContractError(_FOREIGN.refusal())
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # for a leaf whose gradient `torch.autograd.grad` returns instead of accumulating
        return False

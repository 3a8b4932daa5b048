"""Find another engine's backward that reaches this model's parameters, or `loss.backward()`."""

from __future__ import annotations

import torch
from torch import Tensor

from unishard.contract.adapter import EngineAdapter
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.engine.guards.guard import Guard
from unishard.engine.open_blocks import OpenBlocks
from unishard.errors import ContractError

_PRIVATE = CORE_PRIVATE_API["foreign-backward"]


class ForeignBackward(Guard):
    """Refuses a backward that is not the engine's and reaches its parameters through an output of its forward.

    Without it: gradients are mixed, or not reduced, and the model trains on in silence.
    """

    def __init__(self, adapter: EngineAdapter, blocks: OpenBlocks) -> None:
        """Look at the gradients of all outputs.

        Args:
            adapter: The model.
            blocks: Those in which the run is.
        """
        self._adapter = adapter
        self._blocks = blocks
        adapter.on_gradient = self._on_gradient

    def _on_gradient(self, gradient: Tensor) -> None:
        if self._blocks.backward:
            return
        if any(_will_accumulate(leaf) for leaf in self._adapter.leaves().values() if leaf.requires_grad):
            raise ContractError(
                "a backward that is not this engine's reaches the parameters of its "
                f"{type(self._adapter.module).__name__} and would mix gradients with its own; call this engine's "
                "backward(loss), or, if the loss trains only another model, compute and backward it inside `with "
                "engine.weights.frozen():`; if it is to train both, put both models into one nn.Module, and prepare "
                "that"
            )
        self._adapter.input_gradients(graph=torch.is_grad_enabled())


def _will_accumulate(leaf: Tensor) -> bool:
    """Whether the running backward will accumulate a gradient on a leaf.

    Raises:
        ContractError: This torch version cannot tell.
    """
    if not _PRIVATE.works:
        raise ContractError(_PRIVATE.refusal())
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # for a leaf whose gradient `torch.autograd.grad` returns instead of accumulating
        return False
